//! The one HTTP client for providers: bounded in time and in size, only by TLS, and only to addresses that the install lets
//! Apps reach.

use std::{
    collections::HashMap,
    error::Error,
    fmt,
    future::Future,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Uri, header::USER_AGENT};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper_rustls::HttpsConnector;
use hyper_util::{
    client::{
        legacy::{
            Client,
            connect::{HttpConnector, proxy::Tunnel},
        },
        proxy::matcher::Intercept,
    },
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use rustls::pki_types::CertificateDer;
use tokio::{
    net::TcpStream,
    sync::OnceCell,
    time::{Instant, timeout},
};
use tower_service::Service;

use super::metrics::Metrics;
use crate::{
    domain::identity::{Away, Fault, Place, ProviderError},
    outbound::{Reach, Unresolved, look_up, proxy::Proxy, trust::Trust},
};

/// Everything that one call of ours asks of a provider (contract, 5).
pub(super) const WHOLE: Duration = Duration::from_secs(10);
/// The largest body of an answer, refused by its `Content-Length` or while it is read. What providers send is listed in
/// docs/decisions/0024.
pub(super) const MAX_ANSWER: usize = 64 * 1024;
/// The largest head of an answer; GitHub's has some 4 KiB. Without it hyper reads heads of up to 400 KiB.
pub(super) const MAX_HEAD: usize = 32 * 1024;
/// One of several addresses that answers nothing must leave time for the next.
const CONNECT: Duration = Duration::from_secs(4);
/// Behind a proxy a cluster may know no names but its own, and be slow to say so.
const LOOK_UP: Duration = Duration::from_secs(2);
/// Servers end connections that are silent; a request on one that just ended is lost, and a code with it.
const MOST_IDLE: Duration = Duration::from_secs(20);
/// Connections kept for one host.
const KEPT: usize = 16;
/// GitHub and Discord refuse a call without it.
const AGENT: &str = concat!("Latchkey/", env!("CARGO_PKG_VERSION"));

type Whole = Full<Bytes>;

/// The way out.
pub(super) struct Http {
    dial: Dial,
    trust: Trust,
    client: OnceCell<Client<HttpsConnector<Dial>, Whole>>,
    metrics: Metrics,
}

/// What a call is for, which it is counted under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Purpose {
    pub(super) preset: &'static str,
    pub(super) place: Place,
}

/// An answer, whole.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: http::HeaderMap,
    pub(super) body: Vec<u8>,
}

/// No answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoAnswer {
    #[error("{0}")]
    Away(Away),
    #[error("{0}")]
    Fault(Fault),
}

/// Connects to addresses that are allowed.
#[derive(Clone)]
struct Dial {
    reach: Arc<Reach>,
    proxy: Proxy,
    /// For tests: hosts that stand at an address of this machine.
    hosts: Arc<HashMap<String, SocketAddr>>,
}

// === impl Http ===

impl Http {
    pub(super) fn new(
        reach: Reach,
        proxy: Proxy,
        hosts: HashMap<String, SocketAddr>,
        authorities: Vec<CertificateDer<'static>>,
        metrics: Metrics,
    ) -> Self {
        Self {
            dial: Dial { reach: Arc::new(reach), proxy, hosts: Arc::new(hosts) },
            trust: Trust::with(authorities),
            client: OnceCell::new(),
            metrics,
        }
    }

    /// Whether a URL may be called: only `https`, but in development.
    pub(super) fn allows(&self, url: &str) -> bool {
        url.starts_with("https://") || (self.dial.reach.allow_insecure && url.starts_with("http://"))
    }

    /// Asks once; follows no redirect. Answers 429 and 5xx as [`Away`]: such a provider is to be asked again later.
    pub(super) async fn call(&self, purpose: Purpose, request: Request<Whole>) -> Result<Answer, NoAnswer> {
        let began = Instant::now();
        let answer = self.ask(request).await;
        let status = answer.as_ref().map(|answer| answer.status).map_err(|error| *error);
        self.metrics.called(purpose, status, began.elapsed());
        answer
    }

    async fn ask(&self, mut request: Request<Whole>) -> Result<Answer, NoAnswer> {
        if !self.allows(&request.uri().to_string()) {
            return Err(NoAnswer::Fault(Fault::NotHttps));
        }
        request.headers_mut().insert(USER_AGENT, HeaderValue::from_static(AGENT));
        // Neither path nor query, which can hold tokens. Nor does the request carry our trace: it is another's service.
        let span = latchkey_trace::child!(
            "client",
            "provider",
            otel.name = request.method().as_str(),
            http.request.method = request.method().as_str(),
            http.response.status_code = tracing::field::Empty,
            server.address = request.uri().host(),
        );
        let calling = async {
            let client = self.client().await?;
            let response = client.request(request).await.map_err(|error| NoAnswer::Away(away(&error)))?;
            let (head, body) = response.into_parts();
            span.record("http.response.status_code", head.status.as_u16());
            if head.status == StatusCode::TOO_MANY_REQUESTS || head.status.is_server_error() {
                return Err(NoAnswer::Away(Away::Status(head.status.as_u16())));
            }
            if head.status.is_redirection() {
                return Err(NoAnswer::Fault(Fault::Status(head.status.as_u16())));
            }
            let body = read(body).await?;
            Ok(Answer { status: head.status, headers: head.headers, body })
        };
        let answer = timeout(WHOLE, calling).await.unwrap_or(Err(NoAnswer::Away(Away::TooSlow)));
        if answer.is_err() {
            latchkey_trace::fail(&span, "no_answer");
        }
        answer
    }

    async fn client(&self) -> Result<&Client<HttpsConnector<Dial>, Whole>, NoAnswer> {
        let make = || async {
            let config = self.trust.config().await.map_err(|_| NoAnswer::Away(Away::Tls))?;
            let mut connector = HttpsConnector::from((self.dial.clone(), config));
            if !self.dial.reach.allow_insecure {
                connector.enforce_https();
            }
            Ok(Client::builder(TokioExecutor::new())
                .pool_timer(TokioTimer::new())
                .pool_idle_timeout(MOST_IDLE)
                .pool_max_idle_per_host(KEPT)
                .http1_max_buf_size(MAX_HEAD)
                .build(connector))
        };
        self.client.get_or_try_init(make).await
    }
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Http(…)")
    }
}

/// Reads a body of at most [`MAX_ANSWER`]. It is copied: a body in tiny pieces would keep what it was read into alive.
async fn read(mut body: Incoming) -> Result<Vec<u8>, NoAnswer> {
    let too_large = NoAnswer::Fault(Fault::TooLarge);
    if body.size_hint().lower() > MAX_ANSWER as u64 {
        return Err(too_large);
    }
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        // Trailers mean nothing here.
        let Ok(data) = frame.map_err(|_| NoAnswer::Away(Away::Broken))?.into_data() else { continue };
        if bytes.len() + data.len() > MAX_ANSWER {
            return Err(too_large);
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

/// The reason at the end of the chain, in our words.
fn away(error: &hyper_util::client::legacy::Error) -> Away {
    let mut source: Option<&(dyn Error + 'static)> = error.source();
    while let Some(inner) = source {
        if let Some(away) = inner.downcast_ref::<Away>() {
            return *away;
        }
        source = inner.source();
    }
    if error.is_connect() { Away::Tls } else { Away::Broken }
}

// === impl NoAnswer ===

impl NoAnswer {
    pub(super) fn at(self, place: Place) -> ProviderError {
        match self {
            Self::Away(away) => ProviderError::Away(away),
            Self::Fault(fault) => ProviderError::Answer { place, fault },
        }
    }
}

// === impl Dial ===

impl Dial {
    async fn connect(&self, uri: &Uri) -> Result<TokioIo<TcpStream>, Away> {
        let host = uri.host().ok_or(Away::NameUnknown)?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("http") { 80 } else { 443 });
        if let Some(proxy) = self.proxy.of(uri) {
            return self.tunnel(&proxy, uri, host, port).await;
        }
        let addresses = match self.hosts.get(host) {
            Some(address) => vec![*address],
            None => self.reach.resolve(host, port).await.map_err(|unresolved| match unresolved {
                Unresolved::NameUnknown => Away::NameUnknown,
                Unresolved::AddressRefused => Away::AddressRefused,
            })?,
        };
        for address in addresses {
            if let Ok(Ok(stream)) = timeout(CONNECT, TcpStream::connect(address)).await {
                // A request is short and waits for its answer.
                let _ = stream.set_nodelay(true);
                return Ok(TokioIo::new(stream));
            }
        }
        Err(Away::Unreachable)
    }

    /// Through the install's proxy, which is told the name and looks it up for itself. Where the name is known here too, no
    /// address of it may be one that is refused; where it is not, only the proxy can judge (docs/decisions/0019).
    async fn tunnel(&self, proxy: &Intercept, uri: &Uri, host: &str, port: u16) -> Result<TokioIo<TcpStream>, Away> {
        if !self.hosts.contains_key(host)
            && let Ok(Ok(found)) = timeout(LOOK_UP, look_up(host, port)).await
            && !found.iter().all(|address| self.reach.allows(address.ip()))
        {
            return Err(Away::AddressRefused);
        }
        let mut tcp = HttpConnector::new();
        tcp.set_connect_timeout(Some(CONNECT));
        tcp.set_nodelay(true);
        let mut tunnel = Tunnel::new(proxy.uri().clone(), tcp);
        if let Some(login) = proxy.basic_auth() {
            tunnel = tunnel.with_auth(login.clone());
        }
        tunnel.call(uri.clone()).await.map_err(|_| Away::Proxy)
    }
}

impl Service<Uri> for Dial {
    type Response = TokioIo<TcpStream>;
    type Error = Away;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Away>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Away>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let dial = self.clone();
        Box::pin(async move { dial.connect(&uri).await })
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    fn http(reach: Reach) -> Http {
        Http::new(reach, Proxy::default(), HashMap::new(), Vec::new(), Metrics::new())
    }

    fn insecure() -> Http {
        http(Reach { allow_insecure: true, ..Reach::default() })
    }

    async fn get(http: &Http, url: &str) -> Result<(u16, usize), NoAnswer> {
        let request = Request::get(url).body(Whole::default()).unwrap();
        let purpose = Purpose { preset: "oauth2", place: Place::UserInfo };
        http.call(purpose, request).await.map(|answer| (answer.status.as_u16(), answer.body.len()))
    }

    /// Writes those octets to whoever connects.
    async fn server(answer: Vec<u8>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/x", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let answer = answer.clone();
                tokio::spawn(async move {
                    let mut head = [0; 1024];
                    let _ = stream.read(&mut head).await;
                    let _ = stream.write_all(&answer).await;
                });
            }
        });
        url
    }

    #[tokio::test]
    async fn addresses_of_this_machine_and_of_private_networks_are_refused_however_they_are_written() {
        let http = http(Reach::default());
        for host in [
            "127.0.0.1",
            "localhost",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "[::ffff:10.0.0.1]",
            "[64:ff9b::a9fe:a9fe]",
            "0.0.0.0",
            "10.0.0.1",
            "169.254.169.254",
            "192.168.0.1",
            "[fd00::1]",
            "[fe80::1]",
        ] {
            let refused = get(&http, &format!("https://{host}/x")).await;
            assert_eq!(refused, Err(NoAnswer::Away(Away::AddressRefused)), "{host}");
        }
    }

    #[tokio::test]
    async fn nothing_goes_out_in_clear_but_in_development() {
        let url = server(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi".to_vec()).await;
        let listed = Reach { private_cidrs: vec!["127.0.0.0/8".parse().unwrap()], ..Reach::default() };
        assert_eq!(get(&http(listed), &url).await, Err(NoAnswer::Fault(Fault::NotHttps)));
        assert_eq!(get(&insecure(), &url).await, Ok((200, 2)));
    }

    #[tokio::test]
    async fn a_listed_network_is_reached_and_its_certificate_is_still_judged() {
        let url = server(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi".to_vec()).await;
        let listed = Reach { private_cidrs: vec!["127.0.0.0/8".parse().unwrap()], ..Reach::default() };
        let refused = get(&http(listed), &url.replace("http://", "https://")).await;
        assert_eq!(refused, Err(NoAnswer::Away(Away::Tls)));
    }

    #[tokio::test]
    async fn what_is_too_large_or_leads_elsewhere_is_no_answer() {
        let http = insecure();
        let too_large = Err(NoAnswer::Fault(Fault::TooLarge));
        // By its `Content-Length`, before any of the body has come.
        let declared = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", MAX_ANSWER + 1);
        assert_eq!(get(&http, &server(declared.into_bytes()).await).await, too_large);
        let fits = format!("HTTP/1.1 200 OK\r\ncontent-length: {MAX_ANSWER}\r\n\r\n").into_bytes();
        let fits = fits.into_iter().chain(std::iter::repeat_n(b'x', MAX_ANSWER)).collect();
        assert_eq!(get(&http, &server(fits).await).await, Ok((200, MAX_ANSWER)));
        // In chunks, without a `Content-Length`.
        let pieces = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".iter().copied();
        let pieces = pieces.chain(b"1\r\nx\r\n".repeat(MAX_ANSWER + 1)).collect();
        assert_eq!(get(&http, &server(pieces).await).await, too_large);
        let head = format!("HTTP/1.1 200 OK\r\nx: {}\r\ncontent-length: 0\r\n\r\n", "x".repeat(3 * MAX_HEAD));
        assert_eq!(get(&http, &server(head.into_bytes()).await).await, Err(NoAnswer::Away(Away::Broken)));
        let fields = format!("HTTP/1.1 200 OK\r\n{}content-length: 0\r\n\r\n", "x: y\r\n".repeat(101));
        assert_eq!(get(&http, &server(fields.into_bytes()).await).await, Err(NoAnswer::Away(Away::Broken)));
        let elsewhere = b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n".to_vec();
        assert_eq!(get(&http, &server(elsewhere).await).await, Err(NoAnswer::Fault(Fault::Status(302))));
        let busy = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n".to_vec();
        assert_eq!(get(&http, &server(busy).await).await, Err(NoAnswer::Away(Away::Status(503))));
        assert_eq!(get(&http, &server(Vec::new()).await).await, Err(NoAnswer::Away(Away::Broken)));
        assert_eq!(get(&http, "http://127.0.0.1:1/").await, Err(NoAnswer::Away(Away::Unreachable)));
        assert_eq!(get(&http, "http://no-such-host.invalid/").await, Err(NoAnswer::Away(Away::NameUnknown)));
    }

    #[tokio::test]
    async fn the_proxy_is_not_asked_for_what_is_known_to_be_private() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Proxy::new(&format!("http://{}", listener.local_addr().unwrap()), "").unwrap();
        let http = Http::new(Reach::default(), proxy, HashMap::new(), Vec::new(), Metrics::new());
        for host in ["127.0.0.1", "localhost", "[::1]", "10.0.0.1", "169.254.169.254"] {
            let refused = get(&http, &format!("https://{host}/x")).await;
            assert_eq!(refused, Err(NoAnswer::Away(Away::AddressRefused)), "{host}");
        }
        let nobody_came = timeout(Duration::from_millis(200), listener.accept()).await.is_err();
        assert!(nobody_came);
        // A name that is not known here is the proxy's to know; this one closes the connection.
        let elsewhere = get(&http, "https://no-such-host.invalid/x");
        let (answer, accepted) = tokio::join!(elsewhere, async { drop(listener.accept().await) });
        assert_eq!((answer, accepted), (Err(NoAnswer::Away(Away::Proxy)), ()));
    }
}
