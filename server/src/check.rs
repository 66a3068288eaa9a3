//! `latchkey-server check`: checks that URLs inside a cluster respond. This command exists because the container image
//! has no shell and no curl.

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

/// The timeout of one attempt to get a response from a URL.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Requests each URL until it responds with a success status. The time `within` begins with the first request to the
/// first URL. After this time, no request is retried.
pub(crate) async fn check(urls: &[Url], within: Duration) -> Result<()> {
    let end = Instant::now() + within;
    for url in urls {
        loop {
            let result = timeout(ATTEMPT_TIMEOUT, send_request(url))
                .await
                .unwrap_or_else(|_| bail!("no response within {ATTEMPT_TIMEOUT:?}"));
            match result {
                Ok(()) => break println!("{url} answers"),
                Err(error) if Instant::now() >= end => return Err(error.context(format!("{url} does not respond"))),
                Err(_) => sleep(RETRY_DELAY).await,
            }
        }
    }
    Ok(())
}

async fn send_request(url: &Url) -> Result<()> {
    if url.scheme() != "http" {
        bail!("only http:// URLs can be checked");
    }
    let host = url.host_str().context("the URL has no host")?;
    let port = url.port_or_known_default().unwrap_or(80);
    let stream = TcpStream::connect((host.trim_matches(['[', ']']), port)).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // This task runs the connection until the sender is dropped. Errors of the connection appear in the result of the
    // request.
    tokio::spawn(connection);
    let authority = HeaderValue::from_str(&url[url::Position::BeforeHost..url::Position::AfterPort])?;
    let target = &url[url::Position::BeforePath..url::Position::AfterQuery];
    let request = Request::get(target).header(HOST, authority).body(Empty::<Bytes>::new())?;
    let status = sender.send_request(request).await?.status();
    if !status.is_success() {
        bail!("it responds with status {status}");
    }
    Ok(())
}
