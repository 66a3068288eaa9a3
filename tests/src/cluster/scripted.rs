//! A Pod of the servers' Service without a server: the test scripts what the operator reads from its revision stream.

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

/// Interval of heartbeats, as of a server.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// It ends when this value is dropped.
pub struct ScriptedServer {
    pod: ServerPod,
    script: watch::Sender<RevisionScript>,
    accepting: JoinHandle<()>,
}

/// What every stream reports.
#[derive(Clone, Debug, PartialEq)]
pub struct RevisionScript {
    /// The hello without the Pod's UID. `None`: the server accepts the request and does not respond.
    hello: Option<Value>,
}

impl Installation<'_> {
    /// Adds a serving Pod with this scripted revision stream.
    pub async fn scripted_server(&self, words: RevisionScript) -> Result<ScriptedServer> {
        let index = self.servers.fetch_add(1, Ordering::Relaxed);
        let pod = self.create_server_pod(&format!("{}-scripted-{index}", self.release)).await?;
        let listener = TcpListener::bind(pod.ops()).await?;
        let words = watch::Sender::new(words);
        let accepting = tokio::spawn(accept(listener, words.clone(), pod.uid().to_owned()));
        pod.set_endpoint(Endpoint::SERVING).await?;
        Ok(ScriptedServer { pod, script: words, accepting })
    }
}

// === impl ScriptedServer ===

impl ScriptedServer {
    pub fn pod(&self) -> &ServerPod {
        &self.pod
    }

    /// Replaces the script: open streams are closed, and new ones report the new state.
    pub fn set_script(&self, words: RevisionScript) {
        self.script.send_replace(words);
    }
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

// === impl RevisionScript ===

impl RevisionScript {
    /// A server that supports that document format and serves the App at that revision.
    pub fn serving(format: u32, app: &str, revision: &str) -> Self {
        Self { hello: Some(json!({ "format": format, "revisions": { app: revision } })) }
    }

    /// A server that keeps serving one revision and rejects another.
    pub fn rejecting(app: &str, goes_on: &str, refused: &str, reason: &str) -> Self {
        let refused = json!({ app: { "revision": refused, "reason": reason } });
        Self { hello: Some(json!({ "format": 1, "revisions": { app: goes_on }, "refused": refused })) }
    }

    /// A server that does not respond.
    pub fn hanging() -> Self {
        Self { hello: None }
    }
}

async fn accept(listener: TcpListener, words: watch::Sender<RevisionScript>, uid: String) {
    loop {
        let Ok((socket, _)) = listener.accept().await else { continue };
        tokio::spawn(respond(socket, words.subscribe(), uid.clone()));
    }
}

async fn respond(socket: TcpStream, words: watch::Receiver<RevisionScript>, uid: String) {
    let service = service_fn(move |_: http::Request<Incoming>| {
        let lines = lines(words.clone(), uid.clone());
        async move { Ok::<_, Infallible>(http::Response::new(StreamBody::new(lines))) }
    });
    // The operator can close the stream at any time.
    drop(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service).await);
}

/// The hello, then heartbeats, until the script changes.
fn lines(
    mut words: watch::Receiver<RevisionScript>,
    uid: String,
) -> impl futures::Stream<Item = Result<Frame<Bytes>, Infallible>> {
    let hello = words.borrow_and_update().hello.clone();
    let hangs = hello.is_none();
    let hello = hello.map(|mut hello| {
        hello["podUID"] = uid.into();
        json!({ "hello": hello })
    });
    stream::unfold((hello, words), move |(hello, mut words)| async move {
        let line = match hello {
            Some(hello) => hello,
            None => {
                let beat = async { if hangs { std::future::pending().await } else { sleep(HEARTBEAT).await } };
                tokio::select! {
                    _ = words.changed() => return None,
                    () = beat => json!({ "heartbeat": 1 }),
                }
            }
        };
        Some((Ok(Frame::data(Bytes::from(format!("{line}\n")))), (None, words)))
    })
}
