//! A Pod of the servers' Service in which no server runs: a test says what the operator hears of it.

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

use super::{Endpoint, Install, ServerPod};

/// As a server does.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// It ends when this value is dropped.
pub struct ScriptedServer {
    pod: ServerPod,
    words: watch::Sender<Words>,
    accepting: JoinHandle<()>,
}

/// What is said on every stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Words {
    /// The body of the hello, without the Pod's UID; none: it takes the request and says nothing.
    hello: Option<Value>,
}

impl Install<'_> {
    /// One more Pod that counts, and that says this.
    pub async fn scripted_server(&self, words: Words) -> Result<ScriptedServer> {
        let index = self.servers.fetch_add(1, Ordering::Relaxed);
        let pod = self.server_pod(&format!("{}-scripted-{index}", self.release)).await?;
        let listener = TcpListener::bind(pod.ops()).await?;
        let words = watch::Sender::new(words);
        let accepting = tokio::spawn(accept(listener, words.clone(), pod.uid().to_owned()));
        pod.set_endpoint(Endpoint::SERVING).await?;
        Ok(ScriptedServer { pod, words, accepting })
    }
}

// === impl ScriptedServer ===

impl ScriptedServer {
    pub fn pod(&self) -> &ServerPod {
        &self.pod
    }

    /// Says something else: the streams are cut, and who comes back hears it.
    pub fn say(&self, words: Words) {
        self.words.send_replace(words);
    }
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

// === impl Words ===

impl Words {
    /// A server of that format which serves the App at that revision.
    pub fn serving(format: u32, app: &str, revision: &str) -> Self {
        Self { hello: Some(json!({ "format": format, "revisions": { app: revision } })) }
    }

    /// A server which goes on with one revision and refuses another.
    pub fn refusing(app: &str, goes_on: &str, refused: &str, reason: &str) -> Self {
        let refused = json!({ app: { "revision": refused, "reason": reason } });
        Self { hello: Some(json!({ "format": 1, "revisions": { app: goes_on }, "refused": refused })) }
    }

    /// A server that hangs.
    pub fn none() -> Self {
        Self { hello: None }
    }
}

async fn accept(listener: TcpListener, words: watch::Sender<Words>, uid: String) {
    loop {
        let Ok((socket, _)) = listener.accept().await else { continue };
        tokio::spawn(answer(socket, words.subscribe(), uid.clone()));
    }
}

async fn answer(socket: TcpStream, words: watch::Receiver<Words>, uid: String) {
    let service = service_fn(move |_: http::Request<Incoming>| {
        let lines = lines(words.clone(), uid.clone());
        async move { Ok::<_, Infallible>(http::Response::new(StreamBody::new(lines))) }
    });
    // The operator cuts it when it likes.
    drop(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service).await);
}

/// The hello, then heartbeats, until something else is to be said.
fn lines(
    mut words: watch::Receiver<Words>,
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
