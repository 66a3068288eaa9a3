//! The provider of the benchmarks. A code contains the name of the user that logs in. The provider can become hostile.

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

/// Size of the nested JSON, in bytes: 16 times the maximum that a server reads (specification: Limits, Provider calls).
const RESPONSE_BYTES: usize = 1024 * 1024;
/// Depth of the nested JSON, below the maximum of serde_json (128). A server accepts documents with a depth of 16.
const NESTING_DEPTH: usize = 100;
/// Delay before some codes are rejected: slightly less than the timeout of a server's provider call (10 s).
const REJECTION_DELAY: Duration = Duration::from_secs(9);
/// The token endpoint delays the rejection of a code with this prefix.
pub(super) const DELAYED_CODE_PREFIX: &str = "held-";

/// A running provider. It ends with the runtime on which it was started.
#[derive(Clone)]
pub(super) struct BenchProvider {
    addr: SocketAddr,
    hostile: Arc<AtomicBool>,
    nested: Bytes,
}

// === impl BenchProvider ===

impl BenchProvider {
    pub(super) async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let this = Self {
            addr: listener.local_addr()?,
            hostile: Arc::new(AtomicBool::new(false)),
            nested: nested_json(RESPONSE_BYTES).into(),
        };
        tokio::spawn(this.clone().serve(listener));
        Ok(this)
    }

    /// Responds to every request with 1 MiB of nested JSON from now on.
    pub(super) fn turn_hostile(&self) {
        self.hostile.store(true, Ordering::Relaxed);
    }

    /// The manifest of a Provider with the `oauth2` preset.
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

    /// The manifest of a Provider with the `oidc` preset.
    pub(super) fn oidc(&self, name: &str) -> builders::Provider {
        builders::Provider::new(name, "oidc").set("issuer", format!("http://{}/{name}", self.addr))
    }

    async fn serve(self, listener: TcpListener) {
        while let Ok((stream, _)) = listener.accept().await {
            let this = self.clone();
            tokio::spawn(async move {
                let service = service_fn(|request| this.respond(request));
                // A client that disconnects is not an error here.
                drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
            });
        }
    }

    async fn respond(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
        let bearer = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let person = bearer.and_then(|value| value.strip_prefix("Bearer token-")).map(str::to_owned);
        let path = request.uri().path().to_owned();
        let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let (status, body) = if self.hostile.load(Ordering::Relaxed) {
            (StatusCode::OK, self.nested.clone())
        } else {
            let (status, body) = match path.as_str() {
                "/token" => token_response(&body).await,
                "/userinfo" => user_info_response(person),
                "/introspect" => (StatusCode::OK, json!({ "active": false })),
                "/jwks" => (StatusCode::OK, json!({ "keys": [] })),
                path => self.discovery_response(path),
            };
            (status, body.to_string().into())
        };
        let response = Response::builder().status(status).header("content-type", "application/json");
        Ok(response.body(Full::new(body)).expect("a plain response"))
    }

    fn discovery_response(&self, path: &str) -> (StatusCode, Value) {
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

/// The token endpoint: the code `code-ada` belongs to the user `ada`.
async fn token_response(form: &[u8]) -> (StatusCode, Value) {
    let code = url::form_urlencoded::parse(form).find(|(name, _)| name == "code").map(|(_, code)| code.into_owned());
    let code = code.unwrap_or_default();
    if let Some(person) = code.strip_prefix("code-") {
        let token = format!("token-{person}");
        return (StatusCode::OK, json!({ "access_token": token, "token_type": "Bearer", "expires_in": 3600 }));
    }
    if code.starts_with(DELAYED_CODE_PREFIX) {
        tokio::time::sleep(REJECTION_DELAY).await;
    }
    (StatusCode::BAD_REQUEST, json!({ "error": "invalid_grant" }))
}

fn user_info_response(person: Option<String>) -> (StatusCode, Value) {
    match person {
        Some(person) => {
            let email = format!("{person}@people.example.com");
            (StatusCode::OK, json!({ "id": person, "email": email, "email_verified": true, "name": "Ada" }))
        }
        None => (StatusCode::UNAUTHORIZED, json!({ "error": "invalid_token" })),
    }
}

/// Nested objects of five bytes each. In memory, a parsed object needs about a hundred times as many bytes.
fn nested_json(bytes: usize) -> String {
    let nested = format!("{}0{}", r#"{"":"#.repeat(NESTING_DEPTH), "}".repeat(NESTING_DEPTH));
    let mut text = String::with_capacity(bytes);
    text.push('[');
    text.push_str(&nested);
    while text.len() + nested.len() + 2 <= bytes {
        text.push(',');
        text.push_str(&nested);
    }
    text.push(']');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nested_json_is_valid_and_almost_as_large_as_requested() {
        let text = nested_json(RESPONSE_BYTES);
        assert!(text.len() <= RESPONSE_BYTES && text.len() > RESPONSE_BYTES - 1024);
        assert!(serde_json::from_str::<Value>(&text).is_ok());
    }
}
