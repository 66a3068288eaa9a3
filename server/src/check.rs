//! `latchkey-server check`: asks addresses inside a cluster whether they answer. The image has no shell and no curl.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http::{HeaderValue, Request, header::HOST};
use http_body_util::Empty;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    time::{Instant, sleep, timeout},
};
use url::Url;

/// For one try.
const TRY_LIMIT: Duration = Duration::from_secs(5);
const TRY_AGAIN: Duration = Duration::from_millis(500);

/// Asks each until it answers with a success, all together at most so long.
pub(crate) async fn check(urls: &[Url], within: Duration) -> Result<()> {
    let end = Instant::now() + within;
    for url in urls {
        loop {
            let tried = timeout(TRY_LIMIT, ask(url)).await.unwrap_or_else(|_| bail!("no answer within {TRY_LIMIT:?}"));
            match tried {
                Ok(()) => break println!("{url} answers"),
                Err(error) if Instant::now() >= end => return Err(error.context(format!("{url} does not answer"))),
                Err(_) => sleep(TRY_AGAIN).await,
            }
        }
    }
    Ok(())
}

async fn ask(url: &Url) -> Result<()> {
    if url.scheme() != "http" {
        bail!("only http:// is asked");
    }
    let host = url.host_str().context("it names no host")?;
    let port = url.port_or_known_default().unwrap_or(80);
    let stream = TcpStream::connect((host.trim_matches(['[', ']']), port)).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // It ends with the sender; what goes wrong with it, the answer says.
    tokio::spawn(connection);
    let authority = HeaderValue::from_str(&url[url::Position::BeforeHost..url::Position::AfterPort])?;
    let target = &url[url::Position::BeforePath..url::Position::AfterQuery];
    let request = Request::get(target).header(HOST, authority).body(Empty::<Bytes>::new())?;
    let status = sender.send_request(request).await?.status();
    if !status.is_success() {
        bail!("it answers {status}");
    }
    Ok(())
}
