//! Those who call the API: each from a client address of its own, anonymous or signed in.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context, Result};
use http::{HeaderMap, Method, StatusCode};
use serde_json::{Value, json};

/// Longer than any answer may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Somebody at one client address, not signed in.
#[derive(Clone, Debug)]
pub struct Anonymous {
    http: reqwest::Client,
    base: String,
    address: IpAddr,
}

/// Somebody at one client address who shows a token of one App.
#[derive(Clone, Debug)]
pub struct SignedIn {
    client: Anonymous,
    app: String,
    token: String,
}

/// What came back.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
    /// The body where it is JSON, else null.
    pub body: Value,
}

/// A loopback address that no other caller of this process has: limits per client address do not meet.
pub fn own_address() -> IpAddr {
    // 127.0.0.0/24 is left to servers. Random, because several test processes may share a server.
    let [a, b] = rand::random::<u16>().to_be_bytes();
    IpAddr::V4(Ipv4Addr::new(127, a.max(1), b, rand::random_range(1..=254)))
}

// === impl Anonymous ===

impl Anonymous {
    /// From a client address of its own.
    pub fn new(server: SocketAddr) -> Self {
        Self::from_address(server, own_address())
    }

    pub fn from_address(server: SocketAddr, address: IpAddr) -> Self {
        let http = reqwest::Client::builder()
            .local_address(address)
            .redirect(reqwest::redirect::Policy::none())
            .timeout(LIMIT)
            .no_proxy()
            .build()
            .expect("a plain HTTP client");
        Self { http, base: format!("http://{server}"), address }
    }

    pub fn address(&self) -> IpAddr {
        self.address
    }

    pub fn base(&self) -> &str {
        &self.base
    }

    /// For what the methods below do not say.
    pub fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.http.request(method, format!("{}/{}", self.base, path.trim_start_matches('/')))
    }

    pub async fn try_send(&self, request: reqwest::RequestBuilder) -> Result<Answer> {
        let response = request.send().await.context("sending a request")?;
        let (status, headers) = (response.status(), response.headers().clone());
        let text = response.text().await.context("reading an answer")?;
        let body = serde_json::from_str(&text).unwrap_or(Value::Null);
        Ok(Answer { status, headers, text, body })
    }

    pub async fn send(&self, request: reqwest::RequestBuilder) -> Answer {
        self.try_send(request).await.expect("the server answers")
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(self.request(Method::GET, path)).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::POST, path).json(body)).await
    }

    pub async fn post_form(&self, path: &str, fields: &[(&str, &str)]) -> Answer {
        let body = url::form_urlencoded::Serializer::new(String::new()).extend_pairs(fields).finish();
        let form = "application/x-www-form-urlencoded";
        self.send(self.request(Method::POST, path).header(http::header::CONTENT_TYPE, form).body(body)).await
    }

    pub async fn post_without_body(&self, path: &str) -> Answer {
        self.send(self.request(Method::POST, path)).await
    }

    pub async fn register(&self, app: &str, name: &str, email: &str, password: &str) -> Answer {
        let body = json!({ "name": name, "email": email, "password": password });
        self.post(&format!("v1/{app}/email/register"), &body).await
    }

    pub async fn login(&self, app: &str, email: &str, password: &str) -> Answer {
        self.post(&format!("v1/{app}/email/login"), &json!({ "email": email, "password": password })).await
    }

    pub async fn confirm(&self, app: &str, code: &str) -> Answer {
        self.post(&format!("v1/{app}/email/confirm"), &json!({ "code": code })).await
    }

    pub async fn forgot_password(&self, app: &str, email: &str) -> Answer {
        self.post(&format!("v1/{app}/email/forgot-password"), &json!({ "email": email })).await
    }

    pub async fn confirm_password(&self, app: &str, email: &str, code: &str, password: &str) -> Answer {
        let body = json!({ "email": email, "code": code, "password": password });
        self.post(&format!("v1/{app}/email/confirm-password"), &body).await
    }

    /// Exchanges a refresh token.
    pub async fn refresh(&self, app: &str, refresh_token: &str) -> Answer {
        self.post(&format!("v1/{app}/token"), &json!({ "refresh_token": refresh_token })).await
    }

    /// The same caller, with a token.
    pub fn signed_in(&self, app: &str, token: &str) -> SignedIn {
        SignedIn { client: self.clone(), app: app.to_owned(), token: token.to_owned() }
    }

    /// Logs in, which must succeed.
    pub async fn sign_in(&self, app: &str, email: &str, password: &str) -> SignedIn {
        let answer = self.login(app, email, password).await.expect(StatusCode::OK);
        self.signed_in(app, answer.string("token"))
    }
}

// === impl SignedIn ===

impl SignedIn {
    pub fn token(&self) -> &str {
        &self.token
    }

    pub fn client(&self) -> &Anonymous {
        &self.client
    }

    /// A path below `/v1/{APPID}/`.
    pub fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.client.request(method, &format!("v1/{}/{path}", self.app)).bearer_auth(&self.token)
    }

    pub async fn send(&self, request: reqwest::RequestBuilder) -> Answer {
        self.client.send(request).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(self.request(Method::GET, path)).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::POST, path).json(body)).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send(self.request(Method::DELETE, path)).await
    }

    pub async fn verify(&self) -> Answer {
        self.send(self.request(Method::POST, "email/verify")).await
    }

    pub async fn confirm(&self, code: &str) -> Answer {
        self.post("email/confirm", &json!({ "code": code })).await
    }
}

// === impl Answer ===

impl Answer {
    /// Itself, if it has that status; else a panic that shows it.
    #[track_caller]
    pub fn expect(self, status: StatusCode) -> Self {
        assert_eq!(self.status, status, "the answer was: {}", self.text);
        self
    }

    /// Asserts a refusal of the contract's shape.
    #[track_caller]
    pub fn expect_error(self, status: StatusCode, error: &str) -> Self {
        let this = self.expect(status);
        assert_eq!(this.body["error"], error, "the answer was: {}", this.text);
        assert!(this.body["error_description"].is_string(), "no description in {}", this.text);
        assert_eq!(this.body["request_id"].as_str(), this.header("x-request-id"), "the request id in {}", this.text);
        this
    }

    /// A string of the body, or a panic that shows it.
    #[track_caller]
    pub fn string(&self, name: &str) -> &str {
        self.body[name].as_str().unwrap_or_else(|| panic!("no string {name:?} in {}", self.text))
    }

    /// An integer of the body, or a panic that shows it.
    #[track_caller]
    pub fn integer(&self, name: &str) -> i64 {
        self.body[name].as_i64().unwrap_or_else(|| panic!("no integer {name:?} in {}", self.text))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}
