//! OpenID Connect clients (specification: OpenID provider), with real stores. The clients are written into the rendered
//! document, so these tests need no Client resources.

mod introspect;
mod refresh;
mod revoke;
mod token;
mod userinfo;

use aws_lc_rs::digest::{SHA256, digest};
use base64::{
    Engine,
    prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD},
};
use http::{Method, StatusCode};
use latchkey_tests::{
    builders::App,
    client::{ApiClient, ApiResponse},
    page_browser::PageBrowser,
    passwords::PASSWORD,
    stack::{Builder, Stack},
};
use serde_json::{Value, json};
use url::Url;

use crate::{fault_support::unlimited_app, support::TestApp};

const EMAIL: &str = "ada@example.com";
const GRAFANA: &str = "tests.grafana";
const ARGOCD: &str = "tests.argocd";
const SPA: &str = "tests.spa";
const SECRET: &str = "lks_grafana-secret";
const OTHER_SECRET: &str = "lks_argocd-secret";
const CALLBACK: &str = "https://app.example.com/callback";
const VERIFIER: &str = "0123456789012345678901234567890123456789012";

/// A service with one App that has pages and three clients: two with a secret, one public.
struct OpenIdTest {
    test_app: TestApp,
}

/// How a client authenticates.
#[derive(Clone, Copy)]
enum Auth<'a> {
    Basic(&'a str, &'a str),
    Post(&'a str, &'a str),
    /// Sends only the `client_id`.
    Public(&'a str),
    /// Sends this `Authorization` header, and nothing in the form.
    Header(&'a str),
    Nothing,
}

const AS_GRAFANA: Auth<'_> = Auth::Basic(GRAFANA, SECRET);

fn app() -> App {
    unlimited_app("openid")
        .set("/pages/mode", "Enabled")
        .set("/pages/languages", json!(["en"]))
        .limit("refreshesPerSession", &[(100_000, 60)])
}

/// A client as the rendered document has it. Without a secret, it is public.
fn rendered_client(id: &str, secret: Option<&str>) -> Value {
    let authentication = match secret {
        Some(secret) => {
            json!({ "method": "secret", "sha256": BASE64_STANDARD.encode(digest(&SHA256, secret.as_bytes())) })
        }
        None => json!({ "method": "none" }),
    };
    json!({
        "clientID": id,
        "namespace": "tests",
        "name": id.trim_start_matches("tests."),
        "uid": format!("uid-{id}"),
        "generation": 1,
        "displayName": id,
        "authentication": authentication,
        "redirectURLs": [CALLBACK],
        "pkceRequired": secret.is_none(),
        "pushedAuthorizationRequired": false,
        "scopes": ["openid", "profile", "email", "groups", "offline_access"],
        "consent": "Never",
        "groups": { "max": 100 },
        "tokens": { "idTokenAlgorithm": "ES256", "idTokenLifetimeSeconds": 3600 },
    })
}

fn default_clients() -> Vec<Value> {
    vec![
        rendered_client(GRAFANA, Some(SECRET)),
        rendered_client(ARGOCD, Some(OTHER_SECRET)),
        rendered_client(SPA, None),
    ]
}

fn challenge(verifier: &str) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(digest(&SHA256, verifier.as_bytes()))
}

fn basic(client_id: &str, secret: &str) -> String {
    let encode = |text: &str| url::form_urlencoded::byte_serialize(text.as_bytes()).collect::<String>();
    format!("Basic {}", BASE64_STANDARD.encode(format!("{}:{}", encode(client_id), encode(secret))))
}

// === impl OpenIdTest ===

impl OpenIdTest {
    async fn start() -> Self {
        Self::start_with(app(), default_clients()).await
    }

    async fn start_with(app: App, clients: Vec<Value>) -> Self {
        Self::from_builder(app, clients, Stack::builder()).await
    }

    async fn from_builder(app: App, clients: Vec<Value>, builder: Builder) -> Self {
        let test = Self { test_app: TestApp::from_builder(app, builder).await };
        test.set_clients(clients).await;
        test.test_app.register_and_confirm(EMAIL).await;
        test
    }

    /// Replaces the clients of the App.
    async fn set_clients(&self, clients: Vec<Value>) {
        let edit = |document: &mut Value| {
            document["format"] = 4.into();
            document["clients"] = clients.into();
        };
        self.test_app.edit_rendered(edit).await;
    }

    fn client(&self) -> ApiClient {
        self.test_app.client()
    }

    fn issuer(&self) -> String {
        self.test_app.stack.issuer(&self.test_app.app)
    }

    fn endpoint(&self, name: &str) -> String {
        format!("v1/{}/{name}", self.test_app.id())
    }

    /// A browser that is logged in.
    async fn logged_in_browser(&self) -> PageBrowser {
        let mut browser = PageBrowser::new(self.client());
        let path = format!("/{}/login", self.test_app.id());
        let page = browser.open(&path).await;
        let fields = [("email", EMAIL), ("password", PASSWORD)];
        browser.submit(&page, &path, &fields).await.expect_at(&format!("/{}/account", self.test_app.id()));
        browser
    }

    /// Gets a code for a client. `fields` are added to the authorization request.
    async fn code(&self, browser: &mut PageBrowser, client_id: &str, fields: &[(&str, &str)]) -> String {
        let query = url::form_urlencoded::Serializer::new(String::new())
            .extend_pairs([("client_id", client_id), ("redirect_uri", CALLBACK), ("response_type", "code")])
            .extend_pairs(fields)
            .finish();
        let page = browser.open(&format!("/{}/authorize?{query}", self.test_app.id())).await;
        let location = page.external.unwrap_or_else(|| panic!("no redirect at {}: {}", page.address, page.html));
        let location = Url::parse(&location).unwrap();
        let found = location.query_pairs().find(|(name, _)| name == "code");
        found.unwrap_or_else(|| panic!("no code in {location}")).1.into_owned()
    }

    /// Sends a form to an endpoint.
    async fn post(&self, endpoint: &str, auth: Auth<'_>, fields: &[(&str, &str)]) -> ApiResponse {
        self.post_as(&self.client(), endpoint, auth, fields).await
    }

    async fn post_as(
        &self,
        client: &ApiClient,
        endpoint: &str,
        auth: Auth<'_>,
        fields: &[(&str, &str)],
    ) -> ApiResponse {
        let mut fields = fields.to_vec();
        let mut request = client.request(Method::POST, &self.endpoint(endpoint));
        match auth {
            Auth::Basic(client_id, secret) => request = request.header("authorization", basic(client_id, secret)),
            Auth::Post(client_id, secret) => fields.extend([("client_id", client_id), ("client_secret", secret)]),
            Auth::Public(client_id) => fields.push(("client_id", client_id)),
            Auth::Header(value) => request = request.header("authorization", value),
            Auth::Nothing => {}
        }
        let body = url::form_urlencoded::Serializer::new(String::new()).extend_pairs(fields).finish();
        client.send(request.header("content-type", "application/x-www-form-urlencoded").body(body)).await
    }

    /// Exchanges a code, with the verifier if there is one.
    async fn exchange(&self, auth: Auth<'_>, code: &str, verifier: Option<&str>) -> ApiResponse {
        let mut fields = vec![("grant_type", "authorization_code"), ("code", code), ("redirect_uri", CALLBACK)];
        fields.extend(verifier.map(|verifier| ("code_verifier", verifier)));
        self.post("token", auth, &fields).await
    }

    async fn refresh(&self, auth: Auth<'_>, token: &str) -> ApiResponse {
        self.post("token", auth, &[("grant_type", "refresh_token"), ("refresh_token", token)]).await
    }

    /// Logs in at Grafana in a new browser, and returns the response with the tokens.
    async fn tokens(&self, scope: &str) -> ApiResponse {
        let mut browser = self.logged_in_browser().await;
        self.tokens_in(&mut browser, scope).await
    }

    async fn tokens_in(&self, browser: &mut PageBrowser, scope: &str) -> ApiResponse {
        let code = self.code(browser, GRAFANA, &[("scope", scope), ("nonce", "n-1")]).await;
        self.exchange(AS_GRAFANA, &code, None).await.expect(StatusCode::OK)
    }

    /// Logs in at the public client, and returns the response with the tokens.
    async fn public_tokens(&self, browser: &mut PageBrowser, scope: &str) -> ApiResponse {
        let challenge = challenge(VERIFIER);
        let fields = [("scope", scope), ("code_challenge", challenge.as_str()), ("code_challenge_method", "S256")];
        let code = self.code(browser, SPA, &fields).await;
        self.exchange(Auth::Public(SPA), &code, Some(VERIFIER)).await.expect(StatusCode::OK)
    }

    async fn userinfo(&self, access_token: &str) -> ApiResponse {
        let client = self.client();
        let request = client.request(Method::GET, &self.endpoint("userinfo"));
        client.send(request.bearer_auth(access_token)).await
    }

    async fn log_out(&self, browser: &mut PageBrowser) {
        let path = format!("/{}/logout", self.test_app.id());
        let page = browser.open(&path).await;
        let out = browser.submit(&page, &path, &[]).await;
        assert_eq!(out.status, StatusCode::OK, "{}", out.html);
    }
}

#[track_caller]
fn expect_invalid_grant(response: ApiResponse) {
    response.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
}

/// Asserts the response to a failed authentication, which is the same for every client.
#[track_caller]
fn expect_invalid_client(response: ApiResponse) -> ApiResponse {
    response.expect_error(StatusCode::UNAUTHORIZED, "invalid_client")
}
