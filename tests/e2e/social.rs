//! Social login, from *redirect* to a session, with a scripted provider (specification: Social login, Redirect; Social
//! login, Callback).

mod accounts;
mod codes;
mod flows;
mod groups;
mod identities;
mod redirects;
pub(crate) mod scripted_provider;
mod storm;

use std::collections::{BTreeMap, HashMap};

use http::{Method, StatusCode};
use latchkey_tests::{
    builders::App,
    client::{ApiClient, ApiResponse},
    stack::{Builder, Stack},
};
use serde_json::{Value, json};
use url::Url;

use crate::{fault_support::unlimited_app, support::TestApp};
use scripted_provider::{AuthorizationRequest, Person, ScriptedProvider};

/// The first redirect URL of the App.
const REDIRECT_URL: &str = "https://shop.example.com/auth/done";
/// Another redirect URL of the App.
const OTHER_REDIRECT_URL: &str = "com.example.shop:/done?from=login";

/// A service with one App. The App's Providers `local` and `other` are two clients of the same scripted provider.
struct SocialTest {
    test_app: TestApp,
    upstream: ScriptedProvider,
}

/// An HTTP client that keeps cookies, like a browser.
struct CookieClient {
    client: ApiClient,
    cookies: BTreeMap<String, String>,
}

/// A redirect from *callback* to the application, with its parameters.
#[derive(Debug)]
struct AppRedirect {
    location: String,
    parameters: HashMap<String, String>,
}

/// An App with several redirect URLs. It links accounts by email address for the Provider `local`, but not for `other`.
fn app() -> App {
    let refs = json!([{ "name": "local", "linkByEmail": true }, { "name": "other" }]);
    unlimited_app("social")
        .set("/redirectURLs", json!([REDIRECT_URL, OTHER_REDIRECT_URL, "http://127.0.0.1/done"]))
        .set("/providerRefs", refs)
}

// === impl SocialTest ===

impl SocialTest {
    async fn start() -> Self {
        Self::with_app(app()).await
    }

    async fn with_app(app: App) -> Self {
        Self::of(app, Stack::builder()).await
    }

    async fn of(app: App, builder: Builder) -> Self {
        let upstream = ScriptedProvider::start().await;
        let builder = builder.provider(&upstream.provider("local")).provider(&upstream.provider("other"));
        Self { test_app: TestApp::from_builder(app, builder).await, upstream }
    }

    fn path(&self, operation: &str) -> String {
        self.path_of("local", operation)
    }

    fn path_of(&self, provider: &str, operation: &str) -> String {
        format!("{}/{provider}/{operation}", self.test_app.id())
    }

    fn new_client(&self) -> CookieClient {
        CookieClient { client: self.test_app.client(), cookies: BTreeMap::new() }
    }

    /// Logs in as this person in a new browser, from *redirect* to *callback*.
    async fn log_in(&self, person: &Person) -> ApiResponse {
        self.log_in_with("local", person).await
    }

    async fn log_in_with(&self, provider: &str, person: &Person) -> ApiResponse {
        let mut browser = self.new_client();
        let authorization = browser.start_flow(&self.path_of(provider, "redirect")).await;
        let code = self.upstream.approve(&authorization, person);
        browser.callback(&self.path_of(provider, "callback"), &authorization, &code).await
    }

    /// Calls *login* with an access token of the provider.
    async fn log_in_by_token(&self, person: &Person) -> ApiResponse {
        let body = json!({ "token": self.upstream.access_token(person) });
        self.test_app.client().post(&self.path("login"), &body).await
    }

    /// The numbers of users, identities and sessions.
    async fn counts(&self) -> (i64, i64, usize) {
        (
            self.test_app.query_number("SELECT count(*) FROM users").await,
            self.test_app.query_number("SELECT count(*) FROM identities").await,
            self.test_app.session_count().await,
        )
    }

    #[track_caller]
    fn assert_ok(&self, response: &ApiResponse) {
        assert_eq!(response.status, StatusCode::OK, "{}", response.text);
    }
}

// === impl CookieClient ===

impl CookieClient {
    async fn get(&mut self, path: &str) -> ApiResponse {
        let request = self.request(Method::GET, path);
        self.send(request).await
    }

    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let request = self.client.request(method, path);
        if self.cookies.is_empty() {
            return request;
        }
        let pairs: Vec<String> = self.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        request.header("cookie", pairs.join("; "))
    }

    async fn send(&mut self, request: reqwest::RequestBuilder) -> ApiResponse {
        let response = self.client.send(request).await;
        for field in response.headers.get_all("set-cookie") {
            let text = field.to_str().expect("a cookie is ASCII");
            let (name, value) = text.split(';').next().and_then(|pair| pair.split_once('=')).expect("a pair");
            if text.contains("Max-Age=0") {
                self.cookies.remove(name);
            } else {
                self.cookies.insert(name.to_owned(), value.to_owned());
            }
        }
        response
    }

    /// Calls *redirect*, and asserts that it redirects to the provider.
    async fn start_flow(&mut self, path: &str) -> AuthorizationRequest {
        let response = self.get(path).await.expect(StatusCode::FOUND);
        AuthorizationRequest::of(response.header("location").expect("an address"))
    }

    /// Calls *callback* with the parameters that the provider adds to the redirect.
    async fn callback(&mut self, path: &str, authorization: &AuthorizationRequest, code: &str) -> ApiResponse {
        self.get(&format!("{path}?state={}&code={code}", authorization.state())).await
    }
}

// === impl AppRedirect ===

impl AppRedirect {
    #[track_caller]
    fn of(response: &ApiResponse) -> Self {
        assert_eq!(response.status, StatusCode::FOUND, "{}", response.text);
        assert_eq!(response.header("referrer-policy"), Some("no-referrer"));
        assert_eq!(response.header("cache-control"), Some("no-store"));
        let location = response.header("location").expect("an address").to_owned();
        let url: Url = location.parse().expect("an absolute URL");
        let encoded = if location.contains('#') { url.fragment() } else { url.query() };
        let parameters = url::form_urlencoded::parse(encoded.unwrap_or_default().as_bytes()).into_owned().collect();
        Self { location, parameters }
    }

    #[track_caller]
    fn parameter(&self, name: &str) -> &str {
        self.parameters.get(name).unwrap_or_else(|| panic!("no {name} in {}", self.location))
    }

    /// Asserts a redirect to the application with the seven parameters of a session.
    #[track_caller]
    fn expect_session(response: &ApiResponse) -> Self {
        let redirect = Self::of(response);
        assert!(!redirect.parameters.contains_key("error"), "{}", redirect.location);
        for name in ["access_token", "refresh_token", "session_id", "local_id", "email_verified", "expires_at"] {
            assert!(!redirect.parameter(name).is_empty(), "{name} in {}", redirect.location);
        }
        assert!((1..=900).contains(&redirect.parameter("expires_in").parse::<i64>().expect("a number")));
        redirect
    }

    /// Asserts a redirect to the application with this error.
    #[track_caller]
    fn expect_error(response: &ApiResponse, error: &str) -> Self {
        let redirect = Self::of(response);
        assert_eq!(redirect.parameter("error"), error, "{}", redirect.location);
        assert!(!redirect.parameter("error_description").is_empty());
        assert!(!redirect.parameters.contains_key("access_token"), "{}", redirect.location);
        redirect
    }
}

/// Asserts that the JSON has the seven fields of a session.
#[track_caller]
fn assert_session_fields(body: &Value) {
    for name in ["access_token", "refresh_token", "session_id", "local_id"] {
        assert!(body[name].is_string(), "{name} in {body}");
    }
    assert!(body["email_verified"].is_boolean(), "{body}");
    assert!(body["expires_at"].is_i64() && body["expires_in"].is_i64(), "{body}");
}
