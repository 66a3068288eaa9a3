//! Constant load on the Service from clients that do not retry. Counts and reports failed requests.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::Ipv4Addr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use futures::future::join_all;
use http::{
    Request, Response,
    header::{CONNECTION, CONTENT_TYPE, HOST},
};
use http_body_util::{BodyExt, Full};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
    server,
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::{
    net::{TcpListener, TcpStream},
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use url::{Position, Url};

#[derive(clap::Args)]
pub(crate) struct LoadArgs {
    /// URL of the public API's Service.
    #[arg(long)]
    url: Url,
    /// URL of the proxy in front of the Service.
    #[arg(long)]
    front: Url,
    #[arg(long)]
    app: String,
    /// Email address of the user who logs in. The program registers this user first.
    #[arg(long)]
    email: String,
    #[arg(long)]
    password: String,
}

/// The numbers of requests so far, and the failures. The keys of the maps are the names of the [`LoadClient`]s.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Counts {
    pub(crate) sent: BTreeMap<String, u64>,
    pub(crate) failed: u64,
    /// The newest failures.
    pub(crate) failures: Vec<String>,
    pub(crate) slowest_ms: BTreeMap<String, u128>,
    /// Seconds since the load started. The times in `failures` count from the same moment.
    pub(crate) seconds: u64,
}

/// Timeout of a request.
const LIMIT: Duration = Duration::from_secs(15);
/// Maximum length of [`Counts::failures`].
const MAX_FAILURES: usize = 20;

/// How a client sends its requests. `Login` and `FrontLogin` log in; the others read the JWKS.
#[derive(Clone, Copy, Debug)]
enum LoadClient {
    /// Sends all requests over one connection, as long as the server keeps it open.
    Kept,
    /// Opens a new connection for each request.
    Fresh,
    /// Uses HTTP/2 without TLS, as proxies do.
    Http2,
    /// Logs in, over one connection like `Kept`.
    Login,
    /// Like `Kept`, but through the proxy.
    Front,
    /// Like `Login`, but through the proxy.
    FrontLogin,
}

/// The clients, each with the time between two of its requests, in milliseconds.
const CLIENTS: [(LoadClient, u64); 12] = [
    (LoadClient::Kept, 25),
    (LoadClient::Kept, 25),
    (LoadClient::Kept, 400),
    (LoadClient::Fresh, 25),
    (LoadClient::Fresh, 25),
    (LoadClient::Http2, 25),
    (LoadClient::Http2, 400),
    (LoadClient::Login, 500),
    (LoadClient::Login, 500),
    (LoadClient::Front, 25),
    (LoadClient::Front, 400),
    (LoadClient::FrontLogin, 500),
];

enum Connection {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

type SharedCounts = Arc<Mutex<Counts>>;

pub(crate) async fn run(options: LoadArgs) -> Result<()> {
    let counts = SharedCounts::default();
    let began = Instant::now();
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 8000)).await?;
    tokio::spawn(serve_counts(listener, counts.clone(), began));
    register(&options).await.context("registering the user")?;
    let options = Arc::new(options);
    let clients = CLIENTS.map(|(client, period)| {
        tokio::spawn(run_client(client, Duration::from_millis(period), options.clone(), counts.clone(), began))
    });
    join_all(clients).await;
    bail!("a load client ended")
}

/// Registers the user. The response is 200 even if the user already exists.
async fn register(options: &LoadArgs) -> Result<()> {
    let http = reqwest::Client::builder().no_proxy().build()?;
    let body = json!({ "name": "Load", "email": options.email, "password": options.password });
    let url = options.url.join(&format!("v1/{}/email/register", options.app))?;
    http.post(url).json(&body).send().await?.error_for_status()?;
    Ok(())
}

async fn run_client(
    client: LoadClient,
    period: Duration,
    options: Arc<LoadArgs>,
    counts: SharedCounts,
    began: Instant,
) {
    let mut sender = None;
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let started = Instant::now();
        let result = timeout(LIMIT, send_request(client, &options, &mut sender)).await;
        let result = result.unwrap_or_else(|_| bail!("no response within {LIMIT:?}"));
        let took = started.elapsed().as_millis();
        let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
        let name = format!("{client:?}");
        *counts.sent.entry(name.clone()).or_default() += 1;
        let slowest = counts.slowest_ms.entry(name.clone()).or_default();
        *slowest = took.max(*slowest);
        if let Err(error) = result {
            sender = None;
            counts.failed += 1;
            let failure = format!("{name} at {:.1} s after {took} ms: {error:#}", began.elapsed().as_secs_f32());
            counts.failures.push(failure);
            if counts.failures.len() > MAX_FAILURES {
                counts.failures.remove(0);
            }
        }
    }
}

/// Sends one request. If the kept connection is known to be closed, opens a new connection. A closed connection does
/// not count as a failure, because the request was not sent on it.
async fn send_request(client: LoadClient, options: &LoadArgs, kept: &mut Option<Connection>) -> Result<()> {
    let url = match client {
        LoadClient::Front | LoadClient::FrontLogin => &options.front,
        LoadClient::Kept | LoadClient::Fresh | LoadClient::Http2 | LoadClient::Login => &options.url,
    };
    let mut sender = match kept.take() {
        Some(sender) if sender.is_open() => sender,
        _ => Connection::connect(client, url).await.context("connecting")?,
    };
    let jwks = format!("/{}/.well-known/jwks.json", options.app);
    let authority = &url[Position::BeforeHost..Position::AfterPort];
    let request = match client {
        LoadClient::Http2 => Request::get(format!("http://{authority}{jwks}")).body(Full::default())?,
        LoadClient::Kept | LoadClient::Front => Request::get(jwks).header(HOST, authority).body(Full::default())?,
        LoadClient::Fresh => {
            Request::get(jwks).header(HOST, authority).header(CONNECTION, "close").body(Full::default())?
        }
        LoadClient::Login | LoadClient::FrontLogin => {
            let path = format!("/v1/{}/email/login", options.app);
            let body = json!({ "email": options.email, "password": options.password }).to_string();
            let request = Request::post(path).header(HOST, authority).header(CONTENT_TYPE, "application/json");
            request.body(Full::from(body))?
        }
    };
    let response = match sender.send(request.clone()).await {
        // The server closed this connection without processing the request (RFC 9113, section 6.8), so the request
        // counts as not sent.
        Err(error) if is_not_processed(&error) => {
            sender = Connection::connect(client, url).await.context("connecting")?;
            sender.send(request).await
        }
        other => other,
    };
    let response = response.context("sending")?;
    let status = response.status();
    let server_closes = response.headers().get(CONNECTION).is_some_and(|value| value == "close");
    let body = response.into_body().collect().await.context("reading the response")?.to_bytes();
    if !status.is_success() {
        bail!("{status}: {}", String::from_utf8_lossy(&body));
    }
    if !server_closes {
        *kept = Some(sender);
    }
    Ok(())
}

fn is_not_processed(error: &hyper::Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<h2::Error>());
    source.is_some_and(|error| error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR))
}

async fn serve_counts(listener: TcpListener, counts: SharedCounts, began: Instant) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let counts = counts.clone();
        tokio::spawn(async move {
            let handler = service_fn(|_: Request<Incoming>| {
                let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner).clone();
                counts.seconds = began.elapsed().as_secs();
                let text = serde_json::to_string(&counts).unwrap_or_default();
                async move { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(text))) }
            });
            // An error means that the client has disconnected.
            drop(server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), handler).await);
        });
    }
}

// === impl Connection ===

impl Connection {
    /// Connects to the host, after a new DNS lookup.
    async fn connect(client: LoadClient, url: &Url) -> Result<Self> {
        let host = url.host_str().context("the URL names a host")?;
        let stream = TcpStream::connect((host, url.port_or_known_default().unwrap_or(80))).await?;
        stream.set_nodelay(true)?;
        let io = TokioIo::new(stream);
        Ok(match client {
            LoadClient::Http2 => {
                let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await?;
                tokio::spawn(connection);
                Self::Http2(sender)
            }
            LoadClient::Kept | LoadClient::Fresh | LoadClient::Login | LoadClient::Front | LoadClient::FrontLogin => {
                let (sender, connection) = http1::handshake(io).await?;
                tokio::spawn(connection);
                Self::Http1(sender)
            }
        })
    }

    fn is_open(&self) -> bool {
        match self {
            Self::Http1(sender) => !sender.is_closed(),
            Self::Http2(sender) => !sender.is_closed(),
        }
    }

    async fn send(&mut self, request: Request<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
        match self {
            Self::Http1(sender) => {
                sender.ready().await?;
                sender.send_request(request).await
            }
            Self::Http2(sender) => {
                sender.ready().await?;
                sender.send_request(request).await
            }
        }
    }
}
