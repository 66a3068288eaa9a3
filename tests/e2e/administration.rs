//! The administration API (specification: Administration).

use std::{fs, net::SocketAddr, time::Duration};

use http::{Method, StatusCode};
use latchkey_tests::{
    builders::{App, Provider},
    client::{ApiClient, ApiResponse},
    process,
    service_account::{AUDIENCE, ServiceAccountIssuer},
    stack::{Builder, Stack},
};
use serde_json::{Value, json};

use crate::support::{TestApp, app};

mod access;
mod calls;
mod cross_app;
mod data;
mod groups;
mod hash_retention;
mod import_cli;
mod imports;
mod stores;
mod users;

const HOUR: Duration = Duration::from_secs(3600);

/// A service outside Kubernetes, and the issuer of the ServiceAccount tokens that the service accepts.
pub(crate) struct AdministrationTest {
    pub(crate) test_app: TestApp,
    issuer: ServiceAccountIssuer,
}

/// A client with the token of a ServiceAccount.
pub(crate) struct Administrator {
    client: ApiClient,
    token: String,
    app: String,
}

/// Adds one ServiceAccount per role to the administrators of the App.
fn with_administrators(app: App) -> App {
    let administrator =
        |name: &str, role: &str| json!({ "serviceAccount": { "namespace": "shop", "name": name }, "role": role });
    app.set(
        "/administrators",
        json!([
            administrator("asks", "Introspector"),
            administrator("reads", "Reader"),
            administrator("imports", "Importer"),
            administrator("runs", "UserAdmin"),
        ]),
    )
}

// === impl AdministrationTest ===

impl AdministrationTest {
    pub(crate) async fn start() -> Self {
        Self::start_with(app(), &[]).await
    }

    pub(crate) async fn start_with(app: App, providers: &[Provider]) -> Self {
        Self::start_on(Stack::builder(), app, providers).await
    }

    /// Starts the service of this builder. Adds this App, with its administrators and these Providers.
    pub(crate) async fn start_on(builder: Builder, app: App, providers: &[Provider]) -> Self {
        let issuer = ServiceAccountIssuer::new().unwrap();
        let keys = process::fresh_dir("keys").join("keys.json");
        fs::write(&keys, issuer.jwks().unwrap().to_string()).unwrap();
        let builder = builder.args(["--service-account-keys", &keys.display().to_string()]);
        let (app, builder) = providers.iter().fold((with_administrators(app), builder), |(app, builder), provider| {
            (app.provider(provider), builder.provider(provider))
        });
        Self { test_app: TestApp::from_builder(app, builder).await, issuer }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.test_app.stack.server().admin
    }

    /// A token of a ServiceAccount in the namespace `shop`.
    pub(crate) fn token(&self, name: &str) -> String {
        self.issuer.token("shop", name, AUDIENCE, HOUR).unwrap()
    }

    /// Returns the administrator that uses this ServiceAccount: `asks`, `reads`, `imports` or `runs`.
    pub(crate) fn administrator(&self, name: &str) -> Administrator {
        self.administrator_of(&self.test_app.app, name)
    }

    /// Returns a client that calls the API of this App as this ServiceAccount.
    pub(crate) fn administrator_of(&self, app: &App, name: &str) -> Administrator {
        let (client, token) = (ApiClient::new(self.address()), self.token(name));
        Administrator { client, token, app: app.id().to_owned() }
    }

    /// Returns the administrator with all rights.
    pub(crate) fn admin(&self) -> Administrator {
        self.administrator("runs")
    }
}

// === impl Administrator ===

impl Administrator {
    pub(crate) fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.client.request(method, &format!("v1/{}/{path}", self.app)).bearer_auth(&self.token)
    }

    pub(crate) async fn send(&self, request: reqwest::RequestBuilder) -> ApiResponse {
        self.client.send(request).await
    }

    /// Sends a request to a server that can die before it responds.
    pub(crate) async fn try_send(&self, request: reqwest::RequestBuilder) -> anyhow::Result<ApiResponse> {
        self.client.try_send(request).await
    }

    pub(crate) async fn get(&self, path: &str) -> ApiResponse {
        self.send(self.request(Method::GET, path)).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> ApiResponse {
        self.send(self.request(Method::POST, path).json(body)).await
    }

    pub(crate) async fn patch(&self, path: &str, body: &Value) -> ApiResponse {
        self.send(self.request(Method::PATCH, path).json(body)).await
    }

    pub(crate) async fn put(&self, path: &str, body: &Value) -> ApiResponse {
        self.send(self.request(Method::PUT, path).json(body)).await
    }

    pub(crate) async fn delete(&self, path: &str) -> ApiResponse {
        self.send(self.request(Method::DELETE, path)).await
    }

    /// Creates a user and returns its id.
    pub(crate) async fn create(&self, body: &Value) -> String {
        self.post("users", body).await.expect(StatusCode::OK).string("id").to_owned()
    }

    /// Imports lines of JSON.
    pub(crate) async fn import(&self, query: &str, lines: &[Value]) -> ApiResponse {
        let lines: String = lines.iter().map(|line| format!("{line}\n")).collect();
        self.import_text(query, lines).await
    }

    pub(crate) async fn import_text(&self, query: &str, text: impl Into<reqwest::Body>) -> ApiResponse {
        self.send(self.import_request(query, text)).await
    }

    pub(crate) fn import_request(&self, query: &str, text: impl Into<reqwest::Body>) -> reqwest::RequestBuilder {
        let request = self.request(Method::POST, &format!("imports?{query}"));
        request.header("Content-Type", "application/x-ndjson").body(text)
    }
}
