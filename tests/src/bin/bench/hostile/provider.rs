//! A provider of a benchmark: it vouches for whoever a code names, and can be turned hostile.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use bytes::Bytes;
use http::{Request, Response, StatusCode, header::AUTHORIZATION};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use latchkey_tests::builders;
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// What a provider may answer with (contract, 5).
const MAX_ANSWER: usize = 1024 * 1024;
/// JSON parsers take no more than 128.
const DEPTH: usize = 100;
/// Just under the time that the server waits for a provider.
const HOLD: Duration = Duration::from_secs(9);
/// A code that begins so is held before it is refused.
pub(super) const HELD: &str = "held-";

/// It ends with the runtime that it was started on.
#[derive(Clone)]
pub(super) struct Provider {
    addr: SocketAddr,
    hostile: Arc<AtomicBool>,
    nested: Bytes,
}

// === impl Provider ===

impl Provider {
    pub(super) async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let this = Self {
            addr: listener.local_addr()?,
            hostile: Arc::new(AtomicBool::new(false)),
            nested: nested_json(MAX_ANSWER).into(),
        };
        tokio::spawn(this.clone().serve(listener));
        Ok(this)
    }

    /// Answers everything with a mebibyte of nested JSON from now on.
    pub(super) fn turn_hostile(&self) {
        self.hostile.store(true, Ordering::Relaxed);
    }

    /// The manifest of an OAuth 2.0 client of it.
    pub(super) fn oauth2(&self, name: &str) -> builders::Provider {
        let url = |path: &str| format!("http://{}/{path}", self.addr);
        builders::Provider::new(name, "oauth2")
            .set("authorizationURL", url("authorize"))
            .set("tokenURL", url("token"))
            .set("userInfoURL", url("userinfo"))
            .set("introspectionURL", url("introspect"))
            .set(
                "claims",
                json!({ "subject": "id", "email": "email", "emailVerified": "email_verified", "name": "name" }),
            )
    }

    /// The manifest of an OpenID client of it.
    pub(super) fn oidc(&self, name: &str) -> builders::Provider {
        builders::Provider::new(name, "oidc").set("issuer", format!("http://{}/{name}", self.addr))
    }

    async fn serve(self, listener: TcpListener) {
        while let Ok((stream, _)) = listener.accept().await {
            let this = self.clone();
            tokio::spawn(async move {
                let service = service_fn(|request| this.answer(request));
                // A client that goes away is none of a provider's business.
                drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
            });
        }
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
        let bearer = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let person = bearer.and_then(|value| value.strip_prefix("Bearer token-")).map(str::to_owned);
        let path = request.uri().path().to_owned();
        let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let (status, body) = if self.hostile.load(Ordering::Relaxed) {
            (StatusCode::OK, self.nested.clone())
        } else {
            let (status, body) = match path.as_str() {
                "/token" => exchange(&body).await,
                "/userinfo" => user_info(person),
                "/introspect" => (StatusCode::OK, json!({ "active": false })),
                "/jwks" => (StatusCode::OK, json!({ "keys": [] })),
                path => self.discovery(path),
            };
            (status, body.to_string().into())
        };
        let response = Response::builder().status(status).header("content-type", "application/json");
        Ok(response.body(Full::new(body)).expect("a plain response"))
    }

    fn discovery(&self, path: &str) -> (StatusCode, Value) {
        let Some(issuer) = path.strip_suffix("/.well-known/openid-configuration") else {
            return (StatusCode::NOT_FOUND, json!({}));
        };
        let url = |path: &str| format!("http://{}{path}", self.addr);
        let document = json!({
            "issuer": url(issuer),
            "authorization_endpoint": url("/authorize"),
            "token_endpoint": url("/token"),
            "jwks_uri": url("/jwks"),
            "userinfo_endpoint": url("/userinfo"),
            "id_token_signing_alg_values_supported": ["ES256"],
        });
        (StatusCode::OK, document)
    }
}

/// The token endpoint: `code-ada` is Ada's.
async fn exchange(form: &[u8]) -> (StatusCode, Value) {
    let code = url::form_urlencoded::parse(form).find(|(name, _)| name == "code").map(|(_, code)| code.into_owned());
    let code = code.unwrap_or_default();
    if let Some(person) = code.strip_prefix("code-") {
        let token = format!("token-{person}");
        return (StatusCode::OK, json!({ "access_token": token, "token_type": "Bearer", "expires_in": 3600 }));
    }
    if code.starts_with(HELD) {
        tokio::time::sleep(HOLD).await;
    }
    (StatusCode::BAD_REQUEST, json!({ "error": "invalid_grant" }))
}

fn user_info(person: Option<String>) -> (StatusCode, Value) {
    match person {
        Some(person) => {
            let email = format!("{person}@people.example.com");
            (StatusCode::OK, json!({ "id": person, "email": email, "email_verified": true, "name": "Ada" }))
        }
        None => (StatusCode::UNAUTHORIZED, json!({ "error": "invalid_token" })),
    }
}

/// Objects inside objects: six bytes each, for which a map of a parsed document takes a hundred times as much.
fn nested_json(bytes: usize) -> String {
    let one = format!("{}0{}", r#"{"":"#.repeat(DEPTH), "}".repeat(DEPTH));
    let mut text = String::with_capacity(bytes);
    text.push('[');
    text.push_str(&one);
    while text.len() + one.len() + 2 <= bytes {
        text.push(',');
        text.push_str(&one);
    }
    text.push(']');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nested_answer_is_json_within_what_a_server_reads() {
        let text = nested_json(MAX_ANSWER);
        assert!(text.len() <= MAX_ANSWER && text.len() > MAX_ANSWER - 1024);
        assert!(serde_json::from_str::<Value>(&text).is_ok());
    }
}
