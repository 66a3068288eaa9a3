//! Clients of the API, each with its own client address, with or without an access token.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context, Result};
use http::{HeaderMap, Method, StatusCode};
use serde_json::{Value, json};

/// Timeout of a request. Every response arrives earlier.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A client without a token, at one client address.
#[derive(Clone, Debug)]
pub struct ApiClient {
    http: reqwest::Client,
    base: String,
    address: IpAddr,
}

/// A client at one client address with a token of one App.
#[derive(Clone, Debug)]
pub struct AuthenticatedClient {
    client: ApiClient,
    app: String,
    token: String,
}

/// A response with its complete body.
#[derive(Clone, Debug)]
pub struct ApiResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
    /// The body if it is JSON, otherwise null.
    pub body: Value,
}

/// A random loopback address. Two clients practically never get the same address, so the limits per client address
/// count each client separately.
pub fn unique_client_address() -> IpAddr {
    // The second byte is not 0, because servers listen in 127.0.0.0/24.
    let [a, b] = rand::random::<u16>().to_be_bytes();
    IpAddr::V4(Ipv4Addr::new(127, a.max(1), b, rand::random_range(1..=254)))
}

// === impl ApiClient ===

impl ApiClient {
    /// A client with a random client address.
    pub fn new(server: SocketAddr) -> Self {
        Self::from_address(server, unique_client_address())
    }

    pub fn from_address(server: SocketAddr, address: IpAddr) -> Self {
        let http = reqwest::Client::builder()
            .local_address(address)
            .redirect(reqwest::redirect::Policy::none())
            .timeout(REQUEST_TIMEOUT)
            .no_proxy()
            .build()
            .expect("a plain HTTP client");
        Self { http, base: format!("http://{server}"), address }
    }

    pub fn address(&self) -> IpAddr {
        self.address
    }

    pub fn base_url(&self) -> &str {
        &self.base
    }

    /// A request to any path, for endpoints that have no method in this type.
    pub fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.http.request(method, format!("{}/{}", self.base, path.trim_start_matches('/')))
    }

    pub async fn try_send(&self, request: reqwest::RequestBuilder) -> Result<ApiResponse> {
        let response = request.send().await.context("sending a request")?;
        let (status, headers) = (response.status(), response.headers().clone());
        let text = response.text().await.context("reading a response")?;
        let body = serde_json::from_str(&text).unwrap_or(Value::Null);
        Ok(ApiResponse { status, headers, text, body })
    }

    pub async fn send(&self, request: reqwest::RequestBuilder) -> ApiResponse {
        self.try_send(request).await.expect("the server responds")
    }

    pub async fn get(&self, path: &str) -> ApiResponse {
        self.send(self.request(Method::GET, path)).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> ApiResponse {
        self.send(self.request(Method::POST, path).json(body)).await
    }

    pub async fn post_form(&self, path: &str, fields: &[(&str, &str)]) -> ApiResponse {
        let body = url::form_urlencoded::Serializer::new(String::new()).extend_pairs(fields).finish();
        let form = "application/x-www-form-urlencoded";
        self.send(self.request(Method::POST, path).header(http::header::CONTENT_TYPE, form).body(body)).await
    }

    pub async fn post_without_body(&self, path: &str) -> ApiResponse {
        self.send(self.request(Method::POST, path)).await
    }

    pub async fn register(&self, app: &str, name: &str, email: &str, password: &str) -> ApiResponse {
        let body = json!({ "name": name, "email": email, "password": password });
        self.post(&format!("v1/{app}/email/register"), &body).await
    }

    pub async fn login(&self, app: &str, email: &str, password: &str) -> ApiResponse {
        self.post(&format!("v1/{app}/email/login"), &json!({ "email": email, "password": password })).await
    }

    pub async fn confirm(&self, app: &str, code: &str) -> ApiResponse {
        self.post(&format!("v1/{app}/email/confirm"), &json!({ "code": code })).await
    }

    pub async fn forgot_password(&self, app: &str, email: &str) -> ApiResponse {
        self.post(&format!("v1/{app}/email/forgot-password"), &json!({ "email": email })).await
    }

    pub async fn confirm_password(&self, app: &str, email: &str, code: &str, password: &str) -> ApiResponse {
        let body = json!({ "email": email, "code": code, "password": password });
        self.post(&format!("v1/{app}/email/confirm-password"), &body).await
    }

    /// Refreshes a session.
    pub async fn refresh(&self, app: &str, refresh_token: &str) -> ApiResponse {
        self.post(&format!("v1/{app}/token"), &json!({ "refresh_token": refresh_token })).await
    }

    /// A client with a token, at the same client address.
    pub fn with_token(&self, app: &str, token: &str) -> AuthenticatedClient {
        AuthenticatedClient { client: self.clone(), app: app.to_owned(), token: token.to_owned() }
    }

    /// Logs in and returns a client with the access token. Panics if the login fails.
    pub async fn authenticate(&self, app: &str, email: &str, password: &str) -> AuthenticatedClient {
        let response = self.login(app, email, password).await.expect(StatusCode::OK);
        self.with_token(app, response.string("token"))
    }
}

// === impl AuthenticatedClient ===

impl AuthenticatedClient {
    pub fn token(&self) -> &str {
        &self.token
    }

    pub fn client(&self) -> &ApiClient {
        &self.client
    }

    /// A request for a path below `/v1/{APPID}/`.
    pub fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.client.request(method, &format!("v1/{}/{path}", self.app)).bearer_auth(&self.token)
    }

    pub async fn send(&self, request: reqwest::RequestBuilder) -> ApiResponse {
        self.client.send(request).await
    }

    pub async fn get(&self, path: &str) -> ApiResponse {
        self.send(self.request(Method::GET, path)).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> ApiResponse {
        self.send(self.request(Method::POST, path).json(body)).await
    }

    pub async fn delete(&self, path: &str) -> ApiResponse {
        self.send(self.request(Method::DELETE, path)).await
    }

    pub async fn verify(&self) -> ApiResponse {
        self.send(self.request(Method::POST, "email/verify")).await
    }

    pub async fn confirm(&self, code: &str) -> ApiResponse {
        self.post("email/confirm", &json!({ "code": code })).await
    }
}

// === impl ApiResponse ===

impl ApiResponse {
    /// Asserts the status and returns the response.
    #[track_caller]
    pub fn expect(self, status: StatusCode) -> Self {
        assert_eq!(self.status, status, "the response was: {}", self.text);
        self
    }

    /// Asserts an error response (specification: HTTP API, Errors).
    #[track_caller]
    pub fn expect_error(self, status: StatusCode, error: &str) -> Self {
        let this = self.expect(status);
        assert_eq!(this.body["error"], error, "the response was: {}", this.text);
        assert!(this.body["error_description"].is_string(), "no description in {}", this.text);
        assert_eq!(this.body["request_id"].as_str(), this.header("x-request-id"), "the request id in {}", this.text);
        this
    }

    /// A string field of the body. If it is missing, panics with the body.
    #[track_caller]
    pub fn string(&self, name: &str) -> &str {
        self.body[name].as_str().unwrap_or_else(|| panic!("no string {name:?} in {}", self.text))
    }

    /// An integer field of the body. If it is missing, panics with the body.
    #[track_caller]
    pub fn integer(&self, name: &str) -> i64 {
        self.body[name].as_i64().unwrap_or_else(|| panic!("no integer {name:?} in {}", self.text))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}
