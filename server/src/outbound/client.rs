//! The HTTP client for calls on behalf of Apps. It connects only to IP addresses that the installation allows, and only
//! over TLS, except in development. It does not follow redirects.

use std::{
    collections::HashMap,
    error::Error,
    future::Future,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, Uri, header::USER_AGENT};
use http_body_util::Full;
use hyper::body::Incoming;
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
use tokio::{net::TcpStream, sync::OnceCell, time::timeout};
use tower_service::Service;

use super::{OutboundPolicy, ResolveError, lookup_host, proxy::OutboundProxy, tls_roots::TlsRoots};
use crate::domain::identity::UnavailableReason;

/// Maximum size of a response head, in bytes. The head of GitHub's responses has about 4 KiB. The default maximum of
/// hyper is 400 KiB.
pub(crate) const MAX_RESPONSE_HEAD: usize = 32 * 1024;
/// Timeout of a connection attempt to one IP address. Leaves time to try the host's next IP address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// Timeout of a name lookup if there is a proxy. A cluster with a proxy can have a DNS server that knows only names in
/// the cluster and is slow to report that a name is unknown.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);
/// The value of the header `User-Agent`. GitHub and Discord reject calls without this header.
const USER_AGENT_VALUE: &str = concat!("Latchkey/", env!("CARGO_PKG_VERSION"));

pub(crate) type FullBody = Full<Bytes>;

/// Limits of idle connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolLimits {
    pub(crate) max_idle_per_host: usize,
    pub(crate) idle_timeout: Duration,
}

/// The HTTP client. Its connections are opened on first use.
pub(crate) struct OutboundClient {
    connector: OutboundConnector,
    trust: TlsRoots,
    pool: PoolLimits,
    client: OnceCell<Client<HttpsConnector<OutboundConnector>, FullBody>>,
}

/// Connects to allowed IP addresses, directly or through the proxy.
#[derive(Clone)]
struct OutboundConnector {
    reach: Arc<OutboundPolicy>,
    proxy: OutboundProxy,
    /// For tests: hosts that resolve to an IP address of this machine.
    hosts: Arc<HashMap<String, SocketAddr>>,
}

// === impl OutboundClient ===

impl OutboundClient {
    pub(crate) fn new(
        reach: OutboundPolicy,
        proxy: OutboundProxy,
        hosts: HashMap<String, SocketAddr>,
        test_roots: Vec<CertificateDer<'static>>,
        pool: PoolLimits,
    ) -> Self {
        Self {
            connector: OutboundConnector { reach: Arc::new(reach), proxy, hosts: Arc::new(hosts) },
            trust: TlsRoots::with_extra_roots(test_roots),
            pool,
            client: OnceCell::new(),
        }
    }

    /// Whether a URL can be called: its scheme is `https`, or `http` in development.
    pub(crate) fn allows_url(&self, url: &str) -> bool {
        url.starts_with("https://") || (self.connector.reach.allow_insecure && url.starts_with("http://"))
    }

    /// Sends one request. The caller limits the time of the call, and checks the URL with [`Self::allows_url`].
    pub(crate) async fn request(
        &self,
        mut request: Request<FullBody>,
    ) -> Result<Response<Incoming>, UnavailableReason> {
        request.headers_mut().insert(USER_AGENT, HeaderValue::from_static(USER_AGENT_VALUE));
        let client = self.get_or_build_client().await?;
        client.request(request).await.map_err(|error| unavailable_reason(&error))
    }

    async fn get_or_build_client(
        &self,
    ) -> Result<&Client<HttpsConnector<OutboundConnector>, FullBody>, UnavailableReason> {
        let build = || async {
            let config = self.trust.tls_config().await.map_err(|_| UnavailableReason::Tls)?;
            let mut connector = HttpsConnector::from((self.connector.clone(), config));
            if !self.connector.reach.allow_insecure {
                connector.enforce_https();
            }
            Ok(Client::builder(TokioExecutor::new())
                .pool_timer(TokioTimer::new())
                .pool_idle_timeout(self.pool.idle_timeout)
                .pool_max_idle_per_host(self.pool.max_idle_per_host)
                .http1_max_buf_size(MAX_RESPONSE_HEAD)
                .build(connector))
        };
        self.client.get_or_try_init(build).await
    }
}

/// The [`UnavailableReason`] in the error's source chain. If there is none, a failed connection attempt counts as a TLS
/// failure, and any other failure counts as a closed connection.
fn unavailable_reason(error: &hyper_util::client::legacy::Error) -> UnavailableReason {
    let mut source: Option<&(dyn Error + 'static)> = error.source();
    while let Some(inner) = source {
        if let Some(reason) = inner.downcast_ref::<UnavailableReason>() {
            return *reason;
        }
        source = inner.source();
    }
    if error.is_connect() { UnavailableReason::Tls } else { UnavailableReason::ConnectionClosed }
}

// === impl OutboundConnector ===

impl OutboundConnector {
    async fn connect(&self, uri: &Uri) -> Result<TokioIo<TcpStream>, UnavailableReason> {
        let host = uri.host().ok_or(UnavailableReason::NameUnknown)?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("http") { 80 } else { 443 });
        if let Some(proxy) = self.proxy.intercept(uri) {
            return self.tunnel(&proxy, uri, host, port).await;
        }
        let addresses = match self.hosts.get(host) {
            Some(address) => vec![*address],
            None => self.reach.resolve(host, port).await.map_err(|error| match error {
                ResolveError::NameUnknown => UnavailableReason::NameUnknown,
                ResolveError::AddressNotAllowed => UnavailableReason::AddressNotAllowed,
            })?,
        };
        for address in addresses {
            if let Ok(Ok(stream)) = timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
                // TCP_NODELAY, because requests are small, and the caller waits for the response.
                let _ = stream.set_nodelay(true);
                return Ok(TokioIo::new(stream));
            }
        }
        Err(UnavailableReason::Unreachable)
    }

    /// Connects through the installation's proxy, which looks up the name itself. This server looks up the name, too.
    /// If this server finds IP addresses, all of them must be allowed. If this server finds none, only the proxy can
    /// check the IP address (docs/decisions/0019).
    async fn tunnel(
        &self,
        proxy: &Intercept,
        uri: &Uri,
        host: &str,
        port: u16,
    ) -> Result<TokioIo<TcpStream>, UnavailableReason> {
        if !self.hosts.contains_key(host)
            && let Ok(Ok(addresses)) = timeout(LOOKUP_TIMEOUT, lookup_host(host, port)).await
            && !addresses.iter().all(|address| self.reach.allows(address.ip()))
        {
            return Err(UnavailableReason::AddressNotAllowed);
        }
        let mut tcp = HttpConnector::new();
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        tcp.set_nodelay(true);
        let mut tunnel = Tunnel::new(proxy.uri().clone(), tcp);
        if let Some(credentials) = proxy.basic_auth() {
            tunnel = tunnel.with_auth(credentials.clone());
        }
        tunnel.call(uri.clone()).await.map_err(|_| UnavailableReason::Proxy)
    }
}

impl Service<Uri> for OutboundConnector {
    type Response = TokioIo<TcpStream>;
    type Error = UnavailableReason;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, UnavailableReason>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), UnavailableReason>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move { connector.connect(&uri).await })
    }
}
