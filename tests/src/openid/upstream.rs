//! The application behind a proxy that signs in users: it returns the headers that the proxy sends.

use std::{collections::BTreeMap, convert::Infallible, net::SocketAddr};

use anyhow::Result;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::{net::TcpListener, task::JoinHandle};

/// A running application. It ends when this value is dropped.
pub(crate) struct Upstream {
    addr: SocketAddr,
    task: JoinHandle<()>,
}

// === impl Upstream ===

impl Upstream {
    pub(crate) async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = service_fn(async |request| Ok::<_, Infallible>(respond_with_headers(&request)));
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Ok(Self { addr, task })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/", self.addr)
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The headers of the request, as JSON with names in lower case.
fn respond_with_headers(request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let headers: BTreeMap<&str, String> = request
        .headers()
        .iter()
        .map(|(name, value)| (name.as_str(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
        .collect();
    let mut response = Response::new(Full::new(json!({ "headers": headers }).to_string().into()));
    response.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response
}
