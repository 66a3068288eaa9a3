//! A service with one App and one Client, and browsers without scripts.

use std::collections::BTreeMap;

use http::StatusCode;
use latchkey_tests::{
    builders::{App, Client},
    client::ApiResponse,
    page_browser::{LoadedPage, PageBrowser},
    passwords::PASSWORD,
    stack::{Builder, Stack},
};
use serde_json::json;

use crate::{
    fault_support::unlimited_app,
    support::{NAME, TestApp},
};

pub(super) const EMAIL: &str = "ada@example.com";
pub(super) const OTHER_EMAIL: &str = "eve@example.com";
pub(super) const CALLBACK: &str = "https://grafana.example.com/callback";

/// A service with one App that has pages, and one Client.
pub(super) struct ProviderTest {
    pub(super) test_app: TestApp,
    pub(super) client: Client,
    /// The redirect URL in the test's authorization requests.
    pub(super) callback: &'static str,
}

/// An App with pages in both languages, and with limits on logins that no test reaches.
pub(super) fn app() -> App {
    unlimited_app("openid").set("/pages/mode", "Enabled").set("/pages/languages", json!(["en", "de"]))
}

/// The parameters of a redirect to the client.
pub(super) fn reply(page: &LoadedPage) -> BTreeMap<String, String> {
    let url = page.external.as_deref().unwrap_or_else(|| panic!("no redirect at {}: {}", page.address, page.html));
    assert_eq!(page.status, StatusCode::SEE_OTHER);
    assert_eq!(page.headers["referrer-policy"], "no-referrer");
    url::Url::parse(url).expect("a URL").query_pairs().into_owned().collect()
}

// === impl ProviderTest ===

impl ProviderTest {
    pub(super) async fn start() -> Self {
        Self::with_client(|client| client).await
    }

    /// Starts a service with a Client that has a secret. `edit` changes the Client before the service starts.
    pub(super) async fn with_client(edit: impl FnOnce(Client) -> Client) -> Self {
        Self::of(app(), edit, Stack::builder()).await
    }

    pub(super) async fn of(app: App, edit: impl FnOnce(Client) -> Client, builder: Builder) -> Self {
        let client = Client::web("grafana", &app, CALLBACK)
            .set("/displayName", "Our Grafana")
            .set("/scopes", json!(["openid", "profile", "email", "groups", "offline_access"]));
        Self::start_with(app, edit(client), CALLBACK, builder).await
    }

    /// Starts a service with a Client that has no secret. A program on the user's device receives the requests to the
    /// redirect URL.
    pub(super) async fn of_device(callback: &'static str) -> Self {
        let app = app();
        let client = Client::public("cli", &app, callback).set("/displayName", "Our Program");
        Self::start_with(app, client, callback, Stack::builder()).await
    }

    async fn start_with(app: App, client: Client, callback: &'static str, builder: Builder) -> Self {
        let started = Self { test_app: TestApp::from_builder(app, builder).await, client, callback };
        started.apply(&started.client).await;
        started
    }

    /// Creates or changes a Client, and waits until it is served.
    pub(super) async fn apply(&self, client: &Client) {
        self.test_app.stack.apply_client(client).expect("the Client is rendered");
        self.test_app.stack.wait_until_served(&self.test_app.app).await.expect("the Client is served");
    }

    /// The path of a page.
    pub(super) fn path(&self, page: &str) -> String {
        format!("/{}/{page}", self.test_app.id())
    }

    pub(super) fn issuer(&self) -> String {
        self.test_app.stack.issuer(&self.test_app.app)
    }

    pub(super) fn new_browser(&self) -> PageBrowser {
        PageBrowser::new(self.test_app.client())
    }

    /// The parameters of an authorization request. `changes` adds parameters, and replaces those with the same name.
    /// Parameters with an empty value are left out.
    pub(super) fn parameters(&self, changes: &[(&str, &str)]) -> Vec<(String, String)> {
        let client_id = self.client.client_id();
        let mut sent: Vec<(String, String)> = [
            ("client_id", client_id.as_str()),
            ("redirect_uri", self.callback),
            ("response_type", "code"),
            ("scope", "openid"),
            ("state", "state-1"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        for (name, value) in changes {
            sent.retain(|(known, _)| known != name);
            sent.push(((*name).to_owned(), (*value).to_owned()));
        }
        sent.retain(|(_, value)| !value.is_empty());
        sent
    }

    /// The path of an authorization request.
    pub(super) fn request(&self, changes: &[(&str, &str)]) -> String {
        let query =
            url::form_urlencoded::Serializer::new(String::new()).extend_pairs(self.parameters(changes)).finish();
        self.path(&format!("authorize?{query}"))
    }

    pub(super) async fn authorize(&self, browser: &mut PageBrowser, changes: &[(&str, &str)]) -> LoadedPage {
        browser.open(&self.request(changes)).await
    }

    /// Sends an authorization request to which the service must respond with a code and without a page. Returns the
    /// code.
    pub(super) async fn code(&self, browser: &mut PageBrowser, changes: &[(&str, &str)]) -> String {
        reply(&self.authorize(browser, changes).await)["code"].clone()
    }

    /// Sends the login form of a page.
    pub(super) async fn log_in_at(&self, browser: &mut PageBrowser, page: &LoadedPage, email: &str) -> LoadedPage {
        browser.submit(page, &self.path("login"), &[("email", email), ("password", PASSWORD)]).await
    }

    /// A browser that is logged in to a new account.
    pub(super) async fn logged_in_browser(&self, email: &str) -> PageBrowser {
        self.test_app.register_and_confirm(email).await;
        let mut browser = self.new_browser();
        let login = browser.open(&self.path("login")).await;
        self.log_in_at(&mut browser, &login, email).await.expect_at(&self.path("account"));
        browser
    }

    /// Presses a button of the consent page.
    pub(super) async fn decide(&self, browser: &mut PageBrowser, page: &LoadedPage, decision: &str) -> LoadedPage {
        browser.submit(page, &self.path("consent"), &[("decision", decision)]).await
    }

    pub(super) async fn register_at(&self, browser: &mut PageBrowser, page: &LoadedPage, email: &str) -> LoadedPage {
        let fields = [("name", NAME), ("email", email), ("password", PASSWORD)];
        browser.submit(page, &self.path("register"), &fields).await
    }

    /// Calls the token endpoint as the Client.
    pub(super) async fn token(&self, fields: &[(&str, &str)]) -> ApiResponse {
        let secret = self.test_app.stack.client_secret(&self.client).expect("the Client has a secret");
        let client_id = self.client.client_id();
        let own = [("client_id", client_id.as_str()), ("client_secret", secret.as_str())];
        let fields: Vec<(&str, &str)> = own.iter().chain(fields).copied().collect();
        self.test_app.client().post_form(&format!("v1/{}/token", self.test_app.id()), &fields).await
    }

    /// Exchanges a code.
    pub(super) async fn exchange(&self, code: &str) -> ApiResponse {
        self.token(&[("grant_type", "authorization_code"), ("code", code), ("redirect_uri", self.callback)]).await
    }

    pub(super) async fn refresh(&self, refresh_token: &str) -> ApiResponse {
        self.token(&[("grant_type", "refresh_token"), ("refresh_token", refresh_token)]).await
    }

    /// The kinds of the newest events of an account.
    pub(super) async fn events(&self, email: &str) -> Vec<String> {
        let client = self.test_app.client().authenticate(self.test_app.id(), email, PASSWORD).await;
        let activity = client.get("user/activity").await.expect(StatusCode::OK);
        let kinds = activity.body["events"].as_array().expect("a list").iter();
        kinds.map(|event| event["kind"].as_str().expect("a kind").to_owned()).collect()
    }

    /// Waits for an event of an account, because the server writes the event only after the response.
    pub(super) async fn wait_for_event(&self, email: &str, kind: &str) {
        let found = || async { self.events(email).await.iter().any(|found| found == kind).then_some(()) };
        latchkey_tests::eventually(kind, crate::support::LIVE_LIMIT, found).await;
    }

    /// The number of stored consents.
    pub(super) async fn consent_count(&self) -> i64 {
        let mut connection = self.test_app.stack.database.connect().await.expect("the database is reachable");
        sqlx::query_scalar("SELECT count(*) FROM consents").fetch_one(&mut connection).await.expect("a count")
    }
}
