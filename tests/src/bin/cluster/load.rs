//! Constant load on the Service, of clients that retry nothing: what fails is counted, and said.

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
pub(crate) struct Options {
    /// The Service of the public API.
    #[arg(long)]
    url: Url,
    /// What stands before it.
    #[arg(long)]
    front: Url,
    #[arg(long)]
    app: String,
    /// Who logs in, and has registered.
    #[arg(long)]
    email: String,
    #[arg(long)]
    password: String,
}

/// What has been asked so far.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Counts {
    pub(crate) sent: BTreeMap<String, u64>,
    pub(crate) failed: u64,
    /// The newest that failed.
    pub(crate) failures: Vec<String>,
    pub(crate) slowest_ms: BTreeMap<String, u128>,
    /// Since the pod runs; failures are told by it.
    pub(crate) seconds: u64,
}

/// A request that takes longer has failed.
const LIMIT: Duration = Duration::from_secs(15);
const SHOWN: usize = 20;

#[derive(Clone, Copy, Debug)]
enum Client {
    /// One connection for all requests, as long as the server keeps it.
    Kept,
    /// A connection for each.
    Fresh,
    /// HTTP/2 without TLS, as proxies speak it.
    Http2,
    /// Logs in, over a kept connection.
    Login,
    /// As `Kept` and `Login`, by the front.
    Front,
    FrontLogin,
}

const CLIENTS: [(Client, u64); 12] = [
    (Client::Kept, 25),
    (Client::Kept, 25),
    (Client::Kept, 400),
    (Client::Fresh, 25),
    (Client::Fresh, 25),
    (Client::Http2, 25),
    (Client::Http2, 400),
    (Client::Login, 500),
    (Client::Login, 500),
    (Client::Front, 25),
    (Client::Front, 400),
    (Client::FrontLogin, 500),
];

enum Sender {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

type Shared = Arc<Mutex<Counts>>;

pub(crate) async fn run(options: Options) -> Result<()> {
    let counts = Shared::default();
    let began = Instant::now();
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 8000)).await?;
    tokio::spawn(tell(listener, counts.clone(), began));
    register(&options).await.context("registering who logs in")?;
    let options = Arc::new(options);
    let clients = CLIENTS.map(|(client, every)| {
        tokio::spawn(go_on(client, Duration::from_millis(every), options.clone(), counts.clone(), began))
    });
    join_all(clients).await;
    bail!("no client ends by itself")
}

/// Answered 200, known or not.
async fn register(options: &Options) -> Result<()> {
    let http = reqwest::Client::builder().no_proxy().build()?;
    let body = json!({ "name": "Load", "email": options.email, "password": options.password });
    let url = options.url.join(&format!("v1/{}/email/register", options.app))?;
    http.post(url).json(&body).send().await?.error_for_status()?;
    Ok(())
}

async fn go_on(client: Client, every: Duration, options: Arc<Options>, counts: Shared, began: Instant) {
    let mut sender = None;
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let asked = Instant::now();
        let answer = timeout(LIMIT, ask(client, &options, &mut sender)).await;
        let answer = answer.unwrap_or_else(|_| bail!("no answer within {LIMIT:?}"));
        let took = asked.elapsed().as_millis();
        let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
        let name = format!("{client:?}");
        *counts.sent.entry(name.clone()).or_default() += 1;
        let slowest = counts.slowest_ms.entry(name.clone()).or_default();
        *slowest = took.max(*slowest);
        if let Err(error) = answer {
            sender = None;
            counts.failed += 1;
            let failure = format!("{name} at {:.1} s after {took} ms: {error:#}", began.elapsed().as_secs_f32());
            counts.failures.push(failure);
            if counts.failures.len() > SHOWN {
                counts.failures.remove(0);
            }
        }
    }
}

/// One request. A connection that is known to have ended before is no failure: nothing was sent on it.
async fn ask(client: Client, options: &Options, kept: &mut Option<Sender>) -> Result<()> {
    let url = match client {
        Client::Front | Client::FrontLogin => &options.front,
        Client::Kept | Client::Fresh | Client::Http2 | Client::Login => &options.url,
    };
    let mut sender = match kept.take() {
        Some(sender) if sender.is_open() => sender,
        _ => Sender::connect(client, url).await.context("connecting")?,
    };
    let jwks = format!("/{}/.well-known/jwks.json", options.app);
    let authority = &url[Position::BeforeHost..Position::AfterPort];
    let request = match client {
        Client::Http2 => Request::get(format!("http://{authority}{jwks}")).body(Full::default())?,
        Client::Kept | Client::Front => Request::get(jwks).header(HOST, authority).body(Full::default())?,
        Client::Fresh => Request::get(jwks).header(HOST, authority).header(CONNECTION, "close").body(Full::default())?,
        Client::Login | Client::FrontLogin => {
            let path = format!("/v1/{}/email/login", options.app);
            let body = json!({ "email": options.email, "password": options.password }).to_string();
            let request = Request::post(path).header(HOST, authority).header(CONTENT_TYPE, "application/json");
            request.body(Full::from(body))?
        }
    };
    let response = match sender.send(request.clone()).await {
        // The server has said that it ends this connection and does not do this (RFC 9113, 6.8): as good as not sent.
        Err(error) if not_taken(&error) => {
            sender = Sender::connect(client, url).await.context("connecting")?;
            sender.send(request).await
        }
        answer => answer,
    };
    let response = response.context("asking")?;
    let status = response.status();
    let ends = response.headers().get(CONNECTION).is_some_and(|value| value == "close");
    let body = response.into_body().collect().await.context("reading the answer")?.to_bytes();
    if !status.is_success() {
        bail!("{status}: {}", String::from_utf8_lossy(&body));
    }
    if !ends {
        *kept = Some(sender);
    }
    Ok(())
}

fn not_taken(error: &hyper::Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<h2::Error>());
    source.is_some_and(|error| error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR))
}

async fn tell(listener: TcpListener, counts: Shared, began: Instant) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let counts = counts.clone();
        tokio::spawn(async move {
            let answer = service_fn(|_: Request<Incoming>| {
                let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner).clone();
                counts.seconds = began.elapsed().as_secs();
                let text = serde_json::to_string(&counts).unwrap_or_default();
                async move { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(text))) }
            });
            // Whoever asked has gone.
            drop(server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await);
        });
    }
}

// === impl Sender ===

impl Sender {
    /// To the name, looked up anew.
    async fn connect(client: Client, url: &Url) -> Result<Self> {
        let host = url.host_str().context("the URL names a host")?;
        let stream = TcpStream::connect((host, url.port_or_known_default().unwrap_or(80))).await?;
        stream.set_nodelay(true)?;
        let io = TokioIo::new(stream);
        Ok(match client {
            Client::Http2 => {
                let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await?;
                tokio::spawn(connection);
                Self::Http2(sender)
            }
            Client::Kept | Client::Fresh | Client::Login | Client::Front | Client::FrontLogin => {
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
