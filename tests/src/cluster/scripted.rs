//! Pods without a server, in the servers' Service. The test scripts the revision stream that the operator reads from
//! such a Pod.

use std::{convert::Infallible, sync::atomic::Ordering, time::Duration};

use anyhow::Result;
use bytes::Bytes;
use futures::stream;
use http_body_util::StreamBody;
use hyper::{
    body::{Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
    time::sleep,
};

use super::{Endpoint, Installation, ServerPod};

/// Interval of heartbeats, the same as that of a real server.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// A Pod with a scripted revision stream. When this value is dropped, the stream ends and the Pod stays.
pub struct ScriptedServer {
    pod: ServerPod,
    script: watch::Sender<RevisionScript>,
    accepting: JoinHandle<()>,
}

/// What every revision stream of a Pod reports.
#[derive(Clone, Debug, PartialEq)]
pub struct RevisionScript {
    /// The first message (hello), without the Pod's UID. If `None`, the stream stays open without any message.
    hello: Option<Value>,
}

impl Installation<'_> {
    /// Adds a serving Pod with this scripted revision stream.
    pub async fn scripted_server(&self, script: RevisionScript) -> Result<ScriptedServer> {
        let index = self.server_count.fetch_add(1, Ordering::Relaxed);
        let pod = self.create_server_pod(&format!("{}-scripted-{index}", self.release)).await?;
        let listener = TcpListener::bind(pod.ops()).await?;
        let script = watch::Sender::new(script);
        let accepting = tokio::spawn(accept(listener, script.clone(), pod.uid().to_owned()));
        pod.set_endpoint(Endpoint::SERVING).await?;
        Ok(ScriptedServer { pod, script, accepting })
    }
}

// === impl ScriptedServer ===

impl ScriptedServer {
    pub fn pod(&self) -> &ServerPod {
        &self.pod
    }

    /// Replaces the script. Open streams are closed, and new streams report the new script.
    pub fn set_script(&self, script: RevisionScript) {
        self.script.send_replace(script);
    }
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

// === impl RevisionScript ===

impl RevisionScript {
    /// A server that supports this document format and serves this revision of the App.
    pub fn serving(format: u32, app: &str, revision: &str) -> Self {
        Self { hello: Some(json!({ "format": format, "revisions": { app: revision } })) }
    }

    /// A server that has rejected the newest revision of the App and still serves an older one.
    pub fn rejecting(app: &str, served: &str, rejected: &str, reason: &str) -> Self {
        let rejected = json!({ app: { "revision": rejected, "reason": reason } });
        Self { hello: Some(json!({ "format": 1, "revisions": { app: served }, "refused": rejected })) }
    }

    /// A server that sends no message on its stream.
    pub fn hanging() -> Self {
        Self { hello: None }
    }
}

async fn accept(listener: TcpListener, script: watch::Sender<RevisionScript>, uid: String) {
    loop {
        let Ok((socket, _)) = listener.accept().await else { continue };
        tokio::spawn(respond(socket, script.subscribe(), uid.clone()));
    }
}

async fn respond(socket: TcpStream, script: watch::Receiver<RevisionScript>, uid: String) {
    let service = service_fn(move |_: http::Request<Incoming>| {
        let lines = lines(script.clone(), uid.clone());
        async move { Ok::<_, Infallible>(http::Response::new(StreamBody::new(lines))) }
    });
    // A closed connection is not an error, because the operator can close the stream at any time.
    drop(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service).await);
}

/// The lines of a stream: the hello, then heartbeats, until the script changes. Without a hello there are no lines.
fn lines(
    mut script: watch::Receiver<RevisionScript>,
    uid: String,
) -> impl futures::Stream<Item = Result<Frame<Bytes>, Infallible>> {
    let hello = script.borrow_and_update().hello.clone();
    let hangs = hello.is_none();
    let hello = hello.map(|mut hello| {
        hello["podUID"] = uid.into();
        json!({ "hello": hello })
    });
    stream::unfold((hello, script), move |(hello, mut script)| async move {
        let line = match hello {
            Some(hello) => hello,
            None => {
                let beat = async { if hangs { std::future::pending().await } else { sleep(HEARTBEAT).await } };
                tokio::select! {
                    _ = script.changed() => return None,
                    () = beat => json!({ "heartbeat": 1 }),
                }
            }
        };
        Some((Ok(Frame::data(Bytes::from(format!("{line}\n")))), (None, script)))
    })
}
