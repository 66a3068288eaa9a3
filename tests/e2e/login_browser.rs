//! Social login as a user sees it: Chromium, the pages of Dex, and the redirect back to the application.

use std::{collections::BTreeMap, fs, net::SocketAddr};

use aws_lc_rs::digest;
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use bytes::Bytes;
use http::StatusCode;
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use latchkey_tests::{
    browser::{Browser, Cookie},
    builders::{App, Provider},
    client::ApiResponse,
    dex::{self, Dex, User},
    inbox::Inbox,
    mail::Mailbox,
    process,
    stack::{Builder, Stack},
    tls::{ServerTls, TlsProxy},
};
use serde_json::{Value, json};
use sqlx::Connection;
use url::{Url, form_urlencoded};

use crate::support::NAME;

const ADA_EMAIL: &str = "ada@example.com";
/// The parameters of the redirect to the application, sorted by name (specification: Social login, Callback).
const CALLBACK_PARAMETERS: [&str; 7] =
    ["access_token", "email_verified", "expires_at", "expires_in", "local_id", "refresh_token", "session_id"];
/// A code verifier (RFC 7636, section 4.1).
const CODE_VERIFIER: &str = "a-verifier-has-43-characters-or-more-0123456789";

/// A service with one App, Dex as the App's provider, and the application's page to which users return.
struct SocialLoginTest {
    stack: Stack,
    app: App,
    dex: Dex,
    /// The only redirect URL of the App.
    redirect_url: String,
    _page: Inbox,
    _tls_proxies: Vec<TlsProxy>,
}

// === impl SocialLoginTest ===

impl SocialLoginTest {
    /// Starts the service with this App and with a Dex at which Ada can log in.
    async fn start(app: App, dex: dex::Options) -> Self {
        Self::from_builder(app, dex, Stack::builder(), Vec::new()).await
    }

    /// Starts everything over TLS, as on the Internet: the service at one site, Dex at another.
    async fn start_over_tls(app: App) -> Self {
        let tls = ServerTls::new().expect("certificates are made");
        let (dex, dex_proxy) = dex::Options::for_tests().behind_tls(&tls).await.expect("a free port");
        let (builder, server_proxy) = Stack::builder().behind_tls(&tls).await.expect("a free port");
        let ca = process::fresh_dir("tls").join("ca.pem");
        fs::write(&ca, &tls.ca).expect("the certificate can be written");
        let builder = builder.env("SSL_CERT_FILE", &ca.display().to_string());
        Self::from_builder(app, dex, builder, vec![dex_proxy, server_proxy]).await
    }

    async fn from_builder(app: App, dex: dex::Options, builder: Builder, tls_proxies: Vec<TlsProxy>) -> Self {
        let page = Inbox::start(process::free_addr(), Mailbox::default()).expect("a free port");
        let redirect_url = format!("http://{}/done", page.addr());
        let provider = Provider::new("dex", "oidc").set("issuer", dex.issuer());
        let app = app.set("/redirectURLs", json!([redirect_url]));
        // The App trusts email addresses that Dex reports as verified.
        let app = app.set("/providerRefs", json!([{ "name": provider.name(), "linkByEmail": true }]));
        let builder = builder.app(&app).provider(&provider);
        let client = dex::Client::of(&provider, &builder.callback(&app, &provider));
        let dex_options = dex.user(User::new(NAME, ADA_EMAIL)).client(client);
        let (dex, stack) = tokio::join!(Dex::start(dex_options), builder.start());
        Self { stack, app, dex: dex.expect("Dex starts"), redirect_url, _page: page, _tls_proxies: tls_proxies }
    }

    /// The link with which the application starts a login.
    fn login_link(&self) -> String {
        let (base, app, done) = (self.stack.base_url(), self.app.id(), &self.redirect_url);
        format!("{base}/{app}/dex/redirect?redirect_url={done}")
    }

    /// Waits until the user is back on the application's page.
    async fn wait_for_redirect(&self, browser: &Browser) -> Url {
        let done = self.redirect_url.parse::<Url>().expect("an address");
        browser.wait_for_url("the redirect back", |url| (url.path(), url.port()) == (done.path(), done.port())).await
    }

    /// Calls *verify* with the access token in these parameters. Returns the email address.
    async fn verified_address(&self, parameters: &BTreeMap<String, String>) -> String {
        let signed_in = self.stack.client().with_token(self.app.id(), &parameters["access_token"]);
        // The email address is verified, so *verify* returns it and sends no mail.
        signed_in.verify().await.expect(StatusCode::OK).string("email").to_owned()
    }

    async fn refresh(&self, refresh_token: &str) -> ApiResponse {
        let body = json!({ "grant_type": "refresh_token", "refresh_token": refresh_token });
        self.stack.client().post(&format!("v1/{}/token", self.app.id()), &body).await
    }

    async fn user_and_identity_counts(&self) -> (i64, i64) {
        user_and_identity_counts(&self.stack).await
    }
}

/// The number of users and of identities.
async fn user_and_identity_counts(stack: &Stack) -> (i64, i64) {
    let mut connection = stack.database.connect().await.expect("the database is reachable");
    let counts = sqlx::query_as("SELECT (SELECT count(*) FROM users), (SELECT count(*) FROM identities)")
        .fetch_one(&mut connection)
        .await
        .expect("two counts");
    connection.close().await.expect("the database is reachable");
    counts
}

/// Decodes the parameters. Panics if a parameter appears twice.
fn unique_parameters(encoded: Option<&str>) -> BTreeMap<String, String> {
    let mut parameters = BTreeMap::new();
    for (name, value) in form_urlencoded::parse(encoded.unwrap_or_default().as_bytes()).into_owned() {
        assert!(parameters.insert(name.clone(), value).is_none(), "{name} appears twice");
    }
    parameters
}

/// Asserts that exactly the seven `CALLBACK_PARAMETERS` are present, and that they are consistent.
fn assert_callback_parameters(parameters: &BTreeMap<String, String>) {
    assert_eq!(parameters.keys().map(String::as_str).collect::<Vec<_>>(), CALLBACK_PARAMETERS);
    assert_eq!(parameters["email_verified"], "true");
    let expires_in: u64 = parameters["expires_in"].parse().unwrap();
    let expires_at: u64 = parameters["expires_at"].parse().unwrap();
    let claims: Value = {
        let payload = parameters["access_token"].split('.').nth(1).unwrap();
        serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(payload).unwrap()).unwrap()
    };
    assert_eq!(claims["sub"], parameters["local_id"].as_str());
    assert_eq!(claims["sid"], parameters["session_id"].as_str());
    assert_eq!((&claims["iat"], &claims["exp"]), (&json!(expires_at - expires_in), &json!(expires_at)));
    assert_eq!((&claims["email"], &claims["name"]), (&json!(ADA_EMAIL), &json!(NAME)));
}

fn app() -> App {
    App::new("social")
}

#[tokio::test]
async fn a_login_returns_the_seven_parameters_in_the_query() {
    let social = SocialLoginTest::start(app(), dex::Options::for_tests().with_consent_page()).await;
    let browser = Browser::start().await.unwrap();
    browser.open(&social.login_link()).await;
    let [flow] = &browser.cookies().await[..] else { panic!("one flow, one cookie") };
    assert!(flow.http_only && flow.same_site.as_deref() == Some("Lax"), "{flow:?}");
    dex::log_in(&browser, ADA_EMAIL).await;
    dex::grant(&browser).await;
    let url = social.wait_for_redirect(&browser).await;
    assert_eq!(url.fragment(), None);
    let first = unique_parameters(url.query());
    assert_callback_parameters(&first);
    assert_eq!(browser.text_of("#title").await, "Logged in");
    assert_eq!(social.verified_address(&first).await, ADA_EMAIL);
    social.refresh(&first["refresh_token"]).await.expect(StatusCode::OK);
    assert!(browser.cookies().await.is_empty(), "the flow is over");
    assert_eq!(social.user_and_identity_counts().await, (1, 1));

    // The same person logs in with another browser and is the same user.
    let other = Browser::start().await.unwrap();
    other.open(&social.login_link()).await;
    dex::log_in(&other, ADA_EMAIL).await;
    dex::grant(&other).await;
    let second = unique_parameters(social.wait_for_redirect(&other).await.query());
    assert_callback_parameters(&second);
    assert_eq!(second["local_id"], first["local_id"]);
    assert_ne!(second["session_id"], first["session_id"]);
    assert_eq!(social.user_and_identity_counts().await, (1, 1));
}

#[tokio::test]
async fn a_login_returns_the_seven_parameters_in_the_fragment() {
    let social = SocialLoginTest::start(app().set("/callbackMode", "Fragment"), dex::Options::for_tests()).await;
    let browser = Browser::start().await.unwrap();
    browser.open(&format!("{}&state=of-the-app", social.login_link())).await;
    dex::log_in(&browser, ADA_EMAIL).await;
    let url = social.wait_for_redirect(&browser).await;
    assert_eq!(url.query(), None);
    let mut returned = unique_parameters(url.fragment());
    assert_eq!(returned.remove("state").as_deref(), Some("of-the-app"));
    assert_callback_parameters(&returned);
    assert_eq!(browser.text_of("td[data-name=session_id]").await, returned["session_id"]);
    assert_eq!(social.verified_address(&returned).await, ADA_EMAIL);
}

#[tokio::test]
async fn a_login_returns_a_code_that_can_be_exchanged_once_with_the_verifier() {
    let social = SocialLoginTest::start(app().set("/callbackMode", "Code"), dex::Options::for_tests()).await;
    let browser = Browser::start().await.unwrap();

    // Without a challenge, *redirect* does not redirect to the provider.
    browser.open(&social.login_link()).await;
    assert!(browser.text().await.contains("invalid_request"), "{}", browser.text().await);
    assert!(browser.url().await.as_str().starts_with(social.stack.base_url()));

    let challenge = BASE64_URL_SAFE_NO_PAD.encode(digest::digest(&digest::SHA256, CODE_VERIFIER.as_bytes()));
    browser.open(&format!("{}&code_challenge={challenge}&code_challenge_method=S256", social.login_link())).await;
    dex::log_in(&browser, ADA_EMAIL).await;
    let url = social.wait_for_redirect(&browser).await;
    let mut found = unique_parameters(url.query());
    let code = found.remove("code").unwrap();
    assert!(found.is_empty() && url.fragment().is_none(), "a code and nothing else: {url}");
    assert_eq!(browser.text_of("#title").await, "A code, for POST token");

    let exchange = async |code: &str, verifier: &str| {
        let body = json!({ "grant_type": "authorization_code", "code": code, "code_verifier": verifier });
        social.stack.client().post(&format!("v1/{}/token", social.app.id()), &body).await
    };
    let response = exchange(&code, CODE_VERIFIER).await.expect(StatusCode::OK);
    let signed_in = social.stack.client().with_token(social.app.id(), response.string("access_token"));
    assert_eq!(signed_in.verify().await.expect(StatusCode::OK).string("email"), ADA_EMAIL);

    // A second use of the code ends the session that the first use opened.
    exchange(&code, CODE_VERIFIER).await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    let refreshed = social.refresh(response.string("refresh_token")).await;
    refreshed.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    signed_in.verify().await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
}

#[tokio::test]
async fn two_tabs_can_log_in_concurrently() {
    let social = SocialLoginTest::start(app(), dex::Options::for_tests()).await;
    let browser = Browser::start().await.unwrap();
    let first = browser.tab().await;
    browser.open(&social.login_link()).await;
    let second = browser.new_tab().await;
    browser.open(&social.login_link()).await;
    assert_eq!(browser.cookies().await.len(), 2, "a cookie for each flow");

    // The login that starts second ends first.
    let mut sessions = Vec::new();
    for tab in [&second, &first] {
        browser.switch_to(tab).await;
        dex::log_in(&browser, ADA_EMAIL).await;
        let returned = unique_parameters(social.wait_for_redirect(&browser).await.query());
        assert_callback_parameters(&returned);
        assert_eq!(social.verified_address(&returned).await, ADA_EMAIL);
        sessions.push((returned["local_id"].clone(), returned["session_id"].clone()));
    }
    assert_eq!(sessions[0].0, sessions[1].0);
    assert_ne!(sessions[0].1, sessions[1].1);
    assert!(browser.cookies().await.is_empty(), "both flows are over");
}

/// If a second browser could use the state, an attacker could send a victim a link with the attacker's state and code,
/// and the victim would be logged in as the attacker. An attacker who has the state and the code of a victim would be
/// logged in as the victim.
#[tokio::test]
async fn a_second_browser_cannot_use_the_state_of_the_first() {
    let social = SocialLoginTest::start(app(), dex::Options::for_tests()).await;
    let (one, other) = tokio::join!(Browser::start(), Browser::start());
    let (one, other) = (one.unwrap(), other.unwrap());
    one.open(&social.login_link()).await;
    let page_of_dex = one.url().await;
    assert_eq!(page_of_dex.port(), Some(social.dex.addr().port()));

    // On this page of Dex anybody can log in. Dex then redirects the second browser back, with the state of the first
    // browser's flow (its unfinished login).
    other.open(page_of_dex.as_str()).await;
    dex::log_in(&other, ADA_EMAIL).await;
    other.wait_for_text("invalid_state").await;
    let refused = other.url().await;
    assert_eq!(refused.path(), format!("/{}/dex/callback", social.app.id()));
    assert!(!other.text().await.contains("access_token"));
    assert_eq!(social.user_and_identity_counts().await, (0, 0));

    // A browser with its own flow cannot use the state of another browser's flow, either.
    other.open(&social.login_link()).await;
    assert_eq!(other.cookies().await.len(), 1);
    let second_page_of_dex = other.url().await;
    one.open(second_page_of_dex.as_str()).await;
    dex::log_in(&one, ADA_EMAIL).await;
    one.wait_for_text("invalid_state").await;
    assert_eq!(social.user_and_identity_counts().await, (0, 0));
}

#[tokio::test]
async fn a_user_who_cancels_at_the_provider_is_not_logged_in_and_can_try_again() {
    let social = SocialLoginTest::start(app(), dex::Options::for_tests().with_consent_page()).await;
    let browser = Browser::start().await.unwrap();
    browser.open(&social.login_link()).await;
    dex::log_in(&browser, ADA_EMAIL).await;
    dex::cancel(&browser).await;
    browser.wait_for_text("Approval rejected").await;
    assert_eq!(social.user_and_identity_counts().await, (0, 0));
    browser.open(&social.login_link()).await;
    dex::log_in(&browser, ADA_EMAIL).await;
    dex::grant(&browser).await;
    assert_callback_parameters(&unique_parameters(social.wait_for_redirect(&browser).await.query()));
}

/// The cookies of the service. ChromeDriver returns only the cookies of the open page, so this function opens a page of
/// the service and goes back.
async fn cookies_of(browser: &Browser, stack: &Stack, app: &App) -> Vec<Cookie> {
    let page = browser.url().await;
    browser.open(&format!("{}/{}/.well-known/jwks.json", stack.base_url(), app.id())).await;
    let cookies = browser.cookies().await;
    browser.open(page.as_str()).await;
    cookies
}

#[tokio::test]
async fn flows_over_tls_are_stored_in_host_only_cookies() {
    let social = SocialLoginTest::start_over_tls(app()).await;
    assert!(social.stack.base_url().starts_with("https://localhost:"), "{}", social.stack.base_url());
    let browser = Browser::start_accepting_all_certificates().await.unwrap();
    // The fifth flow removes the oldest flow, so four flows are left.
    for flows in [1, 2, 3, 4, 4] {
        browser.open(&social.login_link()).await;
        assert_eq!(browser.url().await.host_str(), Some("127.0.0.1"), "at Dex, which is another site");
        let cookies = cookies_of(&browser, &social.stack, &social.app).await;
        assert_eq!(cookies.len(), flows, "{cookies:?}");
        for cookie in &cookies {
            assert!(cookie.name.starts_with("__Host-latchkey-flow."), "{cookie:?}");
            assert!(cookie.secure && cookie.http_only, "{cookie:?}");
            assert_eq!((cookie.domain.as_str(), cookie.path.as_str()), ("localhost", "/"));
            assert_eq!(cookie.same_site.as_deref(), Some("None"));
        }
    }
    dex::log_in(&browser, ADA_EMAIL).await;
    let returned = unique_parameters(social.wait_for_redirect(&browser).await.query());
    assert_callback_parameters(&returned);
    assert_eq!(social.verified_address(&returned).await, ADA_EMAIL);
    assert_eq!(cookies_of(&browser, &social.stack, &social.app).await.len(), 3, "one flow is over");
    assert_eq!(social.user_and_identity_counts().await, (1, 1));

    // Another browser that opens the link to Dex does not have the flow's cookie.
    browser.open(&social.login_link()).await;
    let page_of_dex = browser.url().await;
    let other = Browser::start_accepting_all_certificates().await.unwrap();
    other.open(page_of_dex.as_str()).await;
    dex::log_in(&other, ADA_EMAIL).await;
    other.wait_for_text("invalid_state").await;
}

/// In a login with Apple, a page of the provider sends a POST request to *callback*. With such a request, browsers send
/// only cookies with `SameSite=None`.
#[tokio::test]
async fn a_provider_can_return_with_a_cross_site_post_over_tls() {
    let page = Inbox::start(process::free_addr(), Mailbox::default()).unwrap();
    let done = format!("http://{}/done", page.addr());
    let tls = ServerTls::new().unwrap();
    let tls_proxy = TlsProxy::start(&tls, posting_provider().await).await.unwrap();
    let (builder, _server_proxy) = Stack::builder().behind_tls(&tls).await.unwrap();
    let ca = process::fresh_dir("tls").join("ca.pem");
    fs::write(&ca, &tls.ca).unwrap();
    let url = |path: &str| format!("{}/{path}", tls_proxy.url("127.0.0.1"));
    let provider = Provider::new("posting", "oauth2")
        .set("authorizationURL", url("authorize"))
        .set("tokenURL", url("token"))
        .set("userInfoURL", url("user"))
        .set("claims", json!({ "subject": "id", "email": "email", "emailVerified": "verified", "name": "name" }));
    let app = app().set("/redirectURLs", json!([done]));
    let app = app.set("/providerRefs", json!([{ "name": "posting", "linkByEmail": true }]));
    let builder = builder.env("SSL_CERT_FILE", &ca.display().to_string());
    let stack = builder.app(&app).provider(&provider).start().await;
    let browser = Browser::start_accepting_all_certificates().await.unwrap();
    browser.open(&format!("{}/{}/posting/redirect?state=mine", stack.base_url(), app.id())).await;
    assert_eq!(browser.url().await.host_str(), Some("127.0.0.1"));
    browser.click("#post").await;
    let url = browser.wait_for_url("the redirect back", |url| url.path() == "/done").await;
    let mut returned = unique_parameters(url.query());
    assert_eq!(returned.remove("state").as_deref(), Some("mine"));
    assert_callback_parameters(&returned);
    assert!(cookies_of(&browser, &stack, &app).await.is_empty(), "the flow is over");
    assert_eq!(user_and_identity_counts(&stack).await, (1, 1));
}

/// Most providers redirect back if the user cancels. Dex does not, so this test uses another provider.
#[tokio::test]
async fn a_user_who_cancels_returns_with_access_denied_and_no_text_from_the_provider() {
    let page = Inbox::start(process::free_addr(), Mailbox::default()).unwrap();
    let done = format!("http://{}/done", page.addr());
    let cancelling = format!("http://{}", cancelling_provider().await);
    let provider = Provider::new("cancelling", "oauth2")
        .set("authorizationURL", format!("{cancelling}/authorize"))
        .set("tokenURL", format!("{cancelling}/token"))
        .set("userInfoURL", format!("{cancelling}/user"))
        .set("claims", json!({ "subject": "id", "email": "email" }));
    for (mode, place) in [("Query", "query"), ("Fragment", "fragment")] {
        let app = app().set("/redirectURLs", json!([done])).set("/callbackMode", mode).provider(&provider);
        let stack = Stack::builder().app(&app).provider(&provider).start().await;
        let browser = Browser::start().await.unwrap();
        let link = format!("{}/{}/cancelling/redirect?redirect_url={done}&state=mine", stack.base_url(), app.id());
        browser.open(&link).await;
        browser.click("#cancel").await;
        let url = browser.wait_for_url("the redirect back", |url| url.path() == "/done").await;
        let (expected_part, other_part) =
            if mode == "Query" { (url.query(), url.fragment()) } else { (url.fragment(), url.query()) };
        assert_eq!(other_part, None, "{url}");
        let mut returned = unique_parameters(expected_part);
        assert_eq!(returned.remove("error").as_deref(), Some("access_denied"));
        assert_eq!(returned.remove("state").as_deref(), Some("mine"));
        let description = returned.remove("error_description").unwrap();
        assert!(!description.is_empty() && !description.contains("text of the provider"), "{description}");
        assert!(returned.is_empty(), "{returned:?}");
        assert_eq!(browser.text_of("#title").await, "Not logged in");
        assert_eq!(browser.text_of(&format!("td[data-place={place}][data-name=error]")).await, "access_denied");
        assert!(browser.cookies().await.is_empty(), "the flow is over");

        // The user goes back to the provider's page and cancels again, but the flow that led to that page has already
        // ended.
        browser.back().await;
        browser.click("#cancel").await;
        browser.wait_for_text("invalid_state").await;
        assert_eq!(user_and_identity_counts(&stack).await, (0, 0));
    }
}

/// Starts a provider with a page that posts a code to the callback URL. The code is for Ada.
async fn posting_provider() -> SocketAddr {
    start_server(|request| {
        let page = |kind: &'static str, body: String| {
            http::Response::builder().header("content-type", kind).body(Full::new(Bytes::from(body)))
        };
        match request.uri().path() {
            "/authorize" => {
                let query = unique_parameters(request.uri().query());
                let form = format!(
                    "<!doctype html><title>Log in</title><form method=post action=\"{}\">\
                     <input type=hidden name=state value=\"{}\"><input type=hidden name=code value=posted>\
                     <button id=post>Log in</button></form>",
                    query["redirect_uri"], query["state"],
                );
                page("text/html", form)
            }
            "/token" => page("application/json", json!({ "access_token": "t", "token_type": "Bearer" }).to_string()),
            "/user" => {
                let ada = json!({ "id": "1", "email": ADA_EMAIL, "verified": true, "name": NAME });
                page("application/json", ada.to_string())
            }
            _ => http::Response::builder().status(StatusCode::NOT_FOUND).body(Full::default()),
        }
    })
    .await
}

/// Starts a provider with a page that has only a cancel button.
async fn cancelling_provider() -> SocketAddr {
    start_server(|request| {
        if request.uri().path() != "/authorize" {
            return http::Response::builder().status(StatusCode::NOT_FOUND).body(Full::default());
        }
        let query = unique_parameters(request.uri().query());
        let mut redirect: Url = query["redirect_uri"].parse().expect("an address");
        redirect
            .query_pairs_mut()
            .append_pair("error", "access_denied")
            .append_pair("error_description", "text of the provider")
            .append_pair("state", &query["state"]);
        let redirect = redirect.as_str().replace('&', "&amp;");
        let page = format!("<!doctype html><title>Log in</title><a id=cancel href=\"{redirect}\">Cancel</a>");
        http::Response::builder().header("content-type", "text/html").body(Full::new(Bytes::from(page)))
    })
    .await
}

/// Starts a server that handles requests with this function.
async fn start_server(handler: fn(http::Request<Incoming>) -> http::Result<http::Response<Full<Bytes>>>) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service_fn(move |request| std::future::ready(handler(request)));
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    addr
}
