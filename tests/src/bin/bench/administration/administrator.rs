//! Calls of the administration API, and batches for imports.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use base64::{
    Engine, alphabet,
    engine::general_purpose::{GeneralPurpose, NO_PAD, STANDARD_NO_PAD},
};
use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use latchkey_tests::client::unique_client_address;
use serde::Deserialize;
use serde_json::json;

use crate::logins::{Connection, connect};

/// The creation time of all imported users, in Unix seconds.
pub(super) const CREATED_AT: i64 = 1_600_000_000;

/// A connection with the token of a ServiceAccount.
pub(super) struct Administrator {
    connection: Connection,
    server: SocketAddr,
    authorization: String,
}

/// Users for one import, stored by column. Each batch has different users.
pub(super) struct Batch {
    pub(super) external_ids: Vec<String>,
    pub(super) emails: Vec<String>,
    pub(super) names: Vec<String>,
    pub(super) hashes: Vec<String>,
}

/// The field of an import response that the benchmark checks.
#[derive(Deserialize)]
struct ImportResponse {
    created: usize,
}

/// A bcrypt hash of random bytes. No password is known for it.
pub(super) fn bcrypt_hash(cost: u32) -> String {
    let base64 = GeneralPurpose::new(&alphabet::BCRYPT, NO_PAD);
    let (salt, output) = (base64.encode(rand::random::<[u8; 16]>()), base64.encode(rand::random::<[u8; 23]>()));
    format!("$2b${cost:02}${salt}{output}")
}

/// A scrypt hash with N = 2^17, r = 8 and p = 1, which needs 128 MiB. No password is known for it.
pub(super) fn scrypt_hash() -> String {
    let encode = |bytes: [u8; 32]| STANDARD_NO_PAD.encode(bytes);
    format!("$scrypt$ln=17,r=8,p=1${}${}", encode(rand::random()), encode(rand::random()))
}

// === impl Administrator ===

impl Administrator {
    pub(super) async fn connect(server: SocketAddr, token: &str) -> Result<Self> {
        let connection = connect(server, unique_client_address()).await?;
        Ok(Self { connection, server, authorization: format!("Bearer {token}") })
    }

    pub(super) async fn get(&mut self, path: &str) -> Result<Bytes> {
        self.send(Method::GET, path, "", Bytes::new()).await
    }

    pub(super) async fn patch(&mut self, path: &str, body: &serde_json::Value) -> Result<Bytes> {
        self.send(Method::PATCH, path, "application/json", body.to_string().into()).await
    }

    /// Imports `lines`, the body that [`Batch::lines`] returns. Returns an error if the number of created users is not
    /// `users`.
    pub(super) async fn import(&mut self, app: &str, lines: Bytes, users: usize) -> Result<()> {
        let path = format!("/v1/{app}/imports?source=bench");
        let body = self.send(Method::POST, &path, "application/x-ndjson", lines).await?;
        let response: ImportResponse = serde_json::from_slice(&body)?;
        ensure!(response.created == users, "an import created {} of {users} users", response.created);
        Ok(())
    }

    /// Sends a request, and returns the body of the response. Returns an error if the status is not 200.
    async fn send(&mut self, method: Method, path: &str, content_type: &str, body: Bytes) -> Result<Bytes> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", self.server.to_string())
            .header("authorization", &self.authorization);
        if !content_type.is_empty() {
            request = request.header("content-type", content_type);
        }
        self.connection.ready().await?;
        let response = self.connection.send_request(request.body(Full::new(body))?).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        ensure!(status == StatusCode::OK, "{path} returned {status}: {}", String::from_utf8_lossy(&body));
        Ok(body)
    }
}

// === impl Batch ===

impl Batch {
    /// A batch of new users. `hash` is called once for each user, and returns the password hash of this user.
    pub(super) fn new(users: usize, hash: impl Fn() -> String) -> Self {
        let batch: u64 = rand::random();
        let column = |value: &dyn Fn(usize) -> String| -> Vec<String> { (0..users).map(value).collect() };
        Self {
            external_ids: column(&|number| format!("bench:{batch:016x}:{number}")),
            emails: column(&|number| format!("user-{batch:016x}-{number}@example.com")),
            names: column(&|number| format!("User {number}")),
            hashes: column(&|_| hash()),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.emails.len()
    }

    /// The body of an import.
    pub(super) fn lines(&self) -> Bytes {
        let mut lines = String::new();
        for number in 0..self.len() {
            let line = json!({
                "external_id": self.external_ids[number],
                "email": self.emails[number],
                "email_verified": true,
                "name": self.names[number],
                "created_at": CREATED_AT,
                "password_hash": self.hashes[number],
            });
            lines.push_str(&line.to_string());
            lines.push('\n');
        }
        lines.into()
    }
}
