//! The HTTP client for providers. It bounds the time and the size of responses. It connects only to IP addresses that
//! the installation allows, and only over TLS, except in development.

use std::{collections::HashMap, fmt, net::SocketAddr, time::Duration};

use http::{Request, StatusCode};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use rustls::pki_types::CertificateDer;
use tokio::time::{Instant, timeout};

use super::metrics::Metrics;
use crate::{
    domain::identity::{InvalidResponse, ProviderEndpoint, ProviderError, UnavailableReason},
    outbound::{
        OutboundPolicy,
        client::{FullBody, OutboundClient, PoolLimits},
        proxy::OutboundProxy,
    },
};

/// Timeout of one operation, which can make several calls, and of each call (specification: Limits, Provider calls).
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a response body, in bytes. Checked against `Content-Length`, and again while the body is read.
/// docs/decisions/0024 lists the sizes of the largest responses of providers.
pub(super) const MAX_RESPONSE_BODY: usize = 64 * 1024;

/// The timeout of idle connections is short, because providers also close idle connections: a request on a connection
/// that the provider has just closed is lost, together with the authorization code in the request.
const POOL: PoolLimits = PoolLimits { max_idle_per_host: 16, idle_timeout: Duration::from_secs(20) };

/// The HTTP client for calls to providers.
pub(super) struct ProviderHttp {
    client: OutboundClient,
    metrics: Metrics,
}

/// The labels under which a call is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallTarget {
    pub(super) preset: &'static str,
    pub(super) endpoint: ProviderEndpoint,
}

/// A complete response.
pub(super) struct ProviderResponse {
    pub(super) status: StatusCode,
    pub(super) headers: http::HeaderMap,
    pub(super) body: Vec<u8>,
}

/// Why a call has no usable response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum HttpCallError {
    #[error("{0}")]
    Unavailable(UnavailableReason),
    #[error("{0}")]
    InvalidResponse(InvalidResponse),
}

// === impl ProviderHttp ===

impl ProviderHttp {
    pub(super) fn new(
        reach: OutboundPolicy,
        proxy: OutboundProxy,
        hosts: HashMap<String, SocketAddr>,
        test_roots: Vec<CertificateDer<'static>>,
        metrics: Metrics,
    ) -> Self {
        Self { client: OutboundClient::new(reach, proxy, hosts, test_roots, POOL), metrics }
    }

    /// Whether a URL can be called: its scheme is `https`, or `http` in development.
    pub(super) fn allows_url(&self, url: &str) -> bool {
        self.client.allows_url(url)
    }

    /// Sends one request and counts it. Does not follow redirects. Status 429 and 5xx are
    /// [`HttpCallError::Unavailable`]: the client can try again later.
    pub(super) async fn call(
        &self,
        target: CallTarget,
        request: Request<FullBody>,
    ) -> Result<ProviderResponse, HttpCallError> {
        let started = Instant::now();
        let response = self.send(request).await;
        let status = response.as_ref().map(|response| response.status).map_err(|error| *error);
        self.metrics.record_call(target, status, started.elapsed());
        response
    }

    async fn send(&self, request: Request<FullBody>) -> Result<ProviderResponse, HttpCallError> {
        if !self.allows_url(&request.uri().to_string()) {
            return Err(HttpCallError::InvalidResponse(InvalidResponse::NotHttps));
        }
        // The span has neither path nor query, because these can contain tokens. The request does not propagate the
        // trace to the provider.
        let span = latchkey_telemetry::child_span!(
            "client",
            "provider",
            otel.name = request.method().as_str(),
            http.request.method = request.method().as_str(),
            http.response.status_code = tracing::field::Empty,
            server.address = request.uri().host(),
        );
        let call = async {
            let response = self.client.request(request).await.map_err(HttpCallError::Unavailable)?;
            let (head, body) = response.into_parts();
            span.record("http.response.status_code", head.status.as_u16());
            if head.status == StatusCode::TOO_MANY_REQUESTS || head.status.is_server_error() {
                return Err(HttpCallError::Unavailable(UnavailableReason::Status(head.status.as_u16())));
            }
            if head.status.is_redirection() {
                return Err(HttpCallError::InvalidResponse(InvalidResponse::Status(head.status.as_u16())));
            }
            let body = read_body(body).await?;
            Ok(ProviderResponse { status: head.status, headers: head.headers, body })
        };
        let response =
            timeout(CALL_TIMEOUT, call).await.unwrap_or(Err(HttpCallError::Unavailable(UnavailableReason::Timeout)));
        if response.is_err() {
            latchkey_telemetry::record_error(&span, "no_answer");
        }
        response
    }
}

impl fmt::Debug for ProviderHttp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProviderHttp(…)")
    }
}

/// Reads a body of at most [`MAX_RESPONSE_BODY`] bytes. Copies the frames, because even a small frame of a chunked body
/// would keep a large read buffer in memory.
async fn read_body(mut body: Incoming) -> Result<Vec<u8>, HttpCallError> {
    let too_large = HttpCallError::InvalidResponse(InvalidResponse::TooLarge);
    if body.size_hint().lower() > MAX_RESPONSE_BODY as u64 {
        return Err(too_large);
    }
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        // Trailers are ignored.
        let Ok(data) = frame.map_err(|_| HttpCallError::Unavailable(UnavailableReason::ConnectionClosed))?.into_data()
        else {
            continue;
        };
        if bytes.len() + data.len() > MAX_RESPONSE_BODY {
            return Err(too_large);
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

// === impl HttpCallError ===

impl HttpCallError {
    pub(super) fn into_provider_error(self, endpoint: ProviderEndpoint) -> ProviderError {
        match self {
            Self::Unavailable(reason) => ProviderError::Unavailable(reason),
            Self::InvalidResponse(reason) => ProviderError::InvalidResponse { endpoint, reason },
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;
    use crate::outbound::client::MAX_RESPONSE_HEAD;

    fn http(reach: OutboundPolicy) -> ProviderHttp {
        ProviderHttp::new(reach, OutboundProxy::default(), HashMap::new(), Vec::new(), Metrics::new())
    }

    fn insecure_http() -> ProviderHttp {
        http(OutboundPolicy { allow_insecure: true, ..OutboundPolicy::default() })
    }

    async fn get(http: &ProviderHttp, url: &str) -> Result<(u16, usize), HttpCallError> {
        let request = Request::get(url).body(FullBody::default()).unwrap();
        let target = CallTarget { preset: "oauth2", endpoint: ProviderEndpoint::UserInfo };
        http.call(target, request).await.map(|response| (response.status.as_u16(), response.body.len()))
    }

    /// Starts a server that writes `response` to every connection. Returns a URL of the server.
    async fn run_server(response: Vec<u8>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/x", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let response = response.clone();
                tokio::spawn(async move {
                    let mut head = [0; 1024];
                    let _ = stream.read(&mut head).await;
                    let _ = stream.write_all(&response).await;
                });
            }
        });
        url
    }

    #[tokio::test]
    async fn loopback_and_private_addresses_are_rejected_in_every_notation() {
        let http = http(OutboundPolicy::default());
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
            let result = get(&http, &format!("https://{host}/x")).await;
            assert_eq!(result, Err(HttpCallError::Unavailable(UnavailableReason::AddressNotAllowed)), "{host}");
        }
    }

    #[tokio::test]
    async fn plain_http_works_only_in_development() {
        let url = run_server(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi".to_vec()).await;
        let policy =
            OutboundPolicy { private_cidrs: vec!["127.0.0.0/8".parse().unwrap()], ..OutboundPolicy::default() };
        assert_eq!(get(&http(policy), &url).await, Err(HttpCallError::InvalidResponse(InvalidResponse::NotHttps)));
        assert_eq!(get(&insecure_http(), &url).await, Ok((200, 2)));
    }

    #[tokio::test]
    async fn a_host_in_a_listed_network_is_reached_and_its_certificate_is_verified() {
        let url = run_server(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi".to_vec()).await;
        let policy =
            OutboundPolicy { private_cidrs: vec!["127.0.0.0/8".parse().unwrap()], ..OutboundPolicy::default() };
        let result = get(&http(policy), &url.replace("http://", "https://")).await;
        assert_eq!(result, Err(HttpCallError::Unavailable(UnavailableReason::Tls)));
    }

    #[tokio::test]
    async fn oversized_responses_and_redirects_are_errors() {
        let http = insecure_http();
        let too_large = Err(HttpCallError::InvalidResponse(InvalidResponse::TooLarge));
        // Rejected because of its `Content-Length`, before the body arrives.
        let long_content_length = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", MAX_RESPONSE_BODY + 1);
        assert_eq!(get(&http, &run_server(long_content_length.into_bytes()).await).await, too_large);
        let largest_allowed = format!("HTTP/1.1 200 OK\r\ncontent-length: {MAX_RESPONSE_BODY}\r\n\r\n").into_bytes();
        let largest_allowed = largest_allowed.into_iter().chain(std::iter::repeat_n(b'x', MAX_RESPONSE_BODY)).collect();
        assert_eq!(get(&http, &run_server(largest_allowed).await).await, Ok((200, MAX_RESPONSE_BODY)));
        // A body in chunks, without a `Content-Length`.
        let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".iter().copied();
        let chunked = chunked.chain(b"1\r\nx\r\n".repeat(MAX_RESPONSE_BODY + 1)).collect();
        assert_eq!(get(&http, &run_server(chunked).await).await, too_large);
        let long_head =
            format!("HTTP/1.1 200 OK\r\nx: {}\r\ncontent-length: 0\r\n\r\n", "x".repeat(3 * MAX_RESPONSE_HEAD));
        assert_eq!(
            get(&http, &run_server(long_head.into_bytes()).await).await,
            Err(HttpCallError::Unavailable(UnavailableReason::ConnectionClosed))
        );
        let many_fields = format!("HTTP/1.1 200 OK\r\n{}content-length: 0\r\n\r\n", "x: y\r\n".repeat(101));
        assert_eq!(
            get(&http, &run_server(many_fields.into_bytes()).await).await,
            Err(HttpCallError::Unavailable(UnavailableReason::ConnectionClosed))
        );
        let redirect = b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n".to_vec();
        assert_eq!(
            get(&http, &run_server(redirect).await).await,
            Err(HttpCallError::InvalidResponse(InvalidResponse::Status(302)))
        );
        let busy = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n".to_vec();
        assert_eq!(
            get(&http, &run_server(busy).await).await,
            Err(HttpCallError::Unavailable(UnavailableReason::Status(503)))
        );
        assert_eq!(
            get(&http, &run_server(Vec::new()).await).await,
            Err(HttpCallError::Unavailable(UnavailableReason::ConnectionClosed))
        );
        assert_eq!(
            get(&http, "http://127.0.0.1:1/").await,
            Err(HttpCallError::Unavailable(UnavailableReason::Unreachable))
        );
        assert_eq!(
            get(&http, "http://no-such-host.invalid/").await,
            Err(HttpCallError::Unavailable(UnavailableReason::NameUnknown))
        );
    }

    #[tokio::test]
    async fn known_private_addresses_are_refused_without_asking_the_proxy() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = OutboundProxy::new(&format!("http://{}", listener.local_addr().unwrap()), "").unwrap();
        let http = ProviderHttp::new(OutboundPolicy::default(), proxy, HashMap::new(), Vec::new(), Metrics::new());
        for host in ["127.0.0.1", "localhost", "[::1]", "10.0.0.1", "169.254.169.254"] {
            let result = get(&http, &format!("https://{host}/x")).await;
            assert_eq!(result, Err(HttpCallError::Unavailable(UnavailableReason::AddressNotAllowed)), "{host}");
        }
        let is_proxy_unused = timeout(Duration::from_millis(200), listener.accept()).await.is_err();
        assert!(is_proxy_unused);
        // A name is looked up by the proxy, so an unknown name is no error here. The test's proxy closes the
        // connection, and the call fails with `Proxy`.
        let proxied_call = get(&http, "https://no-such-host.invalid/x");
        let (result, accepted) = tokio::join!(proxied_call, async { drop(listener.accept().await) });
        assert_eq!((result, accepted), (Err(HttpCallError::Unavailable(UnavailableReason::Proxy)), ()));
    }
}
