//! Refusals that are held without their connection.
//!
//! A refusal that closes its connection needs nothing of the connection but the socket. While such a refusal is held,
//! the buffers, tasks and slots of the connection are free for other clients. So more of these refusals can be held
//! than the listener has connections, and a flood of requests that do not fit the budgets becomes slow
//! (docs/decisions/0025).

use std::{
    future::{Future, poll_fn},
    io::Write,
};

use futures::FutureExt;
use http::{HeaderMap, StatusCode, header::CONTENT_LENGTH};
use http_body_util::BodyExt;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::{
    refusals::HeldRefusal,
    response::Response,
    timeouts::{Linger, Timeouts},
};

/// An HTTP/1 response that closes its connection and is held.
#[derive(Debug)]
pub struct ParkedRefusal {
    response: Box<[u8]>,
    held: HeldRefusal,
}

/// What is left of a connection whose last response is held.
pub(super) struct ParkedConnection<T> {
    pub(super) stream: T,
    pub(super) refusal: ParkedRefusal,
    pub(super) timeouts: Timeouts,
}

/// The error with which a service ends a connection whose last response is held.
#[derive(Debug, thiserror::Error)]
#[error("the response is held without its connection")]
pub(super) struct Parked;

// === impl ParkedRefusal ===

impl ParkedRefusal {
    /// `response`: the bytes of a complete HTTP/1 response.
    pub(super) fn new(response: Vec<u8>, held: HeldRefusal) -> Self {
        // Without the unused capacity of the vector: thousands of refusals can be held.
        Self { response: response.into_boxed_slice(), held }
    }
}

/// Waits until `connection` has ended. If its last response is held, waits until the hold is over or the listener
/// drains, sends the response, and closes the socket.
pub(super) async fn finish<T>(connection: impl Future<Output = Option<ParkedConnection<T>>>, drain: &CancellationToken)
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let Some(ParkedConnection { mut stream, refusal, timeouts }) = connection.await else { return };
    refusal.held.wait(drain).await;
    let sent = async {
        stream.write_all(&refusal.response).await?;
        stream.shutdown().await
    };
    if let Ok(Ok(())) = timeout(timeouts.write, sent).await {
        let mut linger = Linger::new(timeouts.linger);
        poll_fn(|cx| linger.poll_discard(&mut stream, cx)).await;
    }
}

/// Writes a response in the format of HTTP/1.1. Its body must be complete; responses to errors are.
pub(super) fn http1_bytes(response: Response) -> Vec<u8> {
    let (parts, body) = response.into_parts();
    let body = body.collect().now_or_never().map_or_else(Default::default, |collected| {
        let Ok(collected) = collected;
        collected.to_bytes()
    });
    let mut bytes = head_bytes(parts.status, &parts.headers, body.len());
    bytes.extend_from_slice(&body);
    bytes
}

fn head_bytes(status: StatusCode, headers: &HeaderMap, body_length: usize) -> Vec<u8> {
    let mut head = Vec::with_capacity(512);
    let reason = status.canonical_reason().unwrap_or_default();
    // Writing to a vector does not fail.
    let _ = write!(head, "HTTP/1.1 {} {reason}\r\n", status.as_str());
    if !headers.contains_key(CONTENT_LENGTH) {
        let _ = write!(head, "content-length: {body_length}\r\n");
    }
    for (name, value) in headers {
        head.extend_from_slice(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    head.extend_from_slice(b"\r\n");
    head
}
