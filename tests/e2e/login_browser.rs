//! Social login as a person meets it: Chromium, the pages of Dex, and the way back to the application.

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
    client::Answer,
    dex::{self, Dex, Person},
    inbox::Inbox,
    mail::Mailbox,
    process,
    stack::{Builder, Stack},
    tls::{Front, Tls},
};
use serde_json::{Value, json};
use sqlx::Connection;
use url::{Url, form_urlencoded};

use crate::support::NAME;

const ADA: &str = "ada@example.com";
/// The parameters of the interface, section 4.2, in the order of their names.
const SEVEN: [&str; 7] =
    ["access_token", "email_verified", "expires_at", "expires_in", "local_id", "refresh_token", "session_id"];
/// A verifier of RFC 7636, section 4.1.
const VERIFIER: &str = "a-verifier-has-43-characters-or-more-0123456789";

/// A service with one App whose users come by Dex, and the page to which they come back.
struct Social {
    stack: Stack,
    app: App,
    dex: Dex,
    /// The one address on the App's list.
    done: String,
    _page: Inbox,
    _fronts: Vec<Front>,
}

// === impl Social ===

impl Social {
    /// With the App's own settings, and a Dex that Ada can log in at.
    async fn open(app: App, dex: dex::Options) -> Self {
        Self::of(app, dex, Stack::builder(), Vec::new()).await
    }

    /// All of it over TLS, as it is on the Internet: the service at one site, Dex at another.
    async fn open_over_tls(app: App) -> Self {
        let tls = Tls::new().expect("certificates are made");
        let (dex, front_of_dex) = dex::Options::for_tests().behind_tls(&tls).await.expect("a free port");
        let (builder, front) = Stack::builder().behind_tls(&tls).await.expect("a free port");
        let ca = process::fresh_dir("tls").join("ca.pem");
        fs::write(&ca, &tls.ca).expect("the certificate can be written");
        let builder = builder.env("SSL_CERT_FILE", &ca.display().to_string());
        Self::of(app, dex, builder, vec![front_of_dex, front]).await
    }

    async fn of(app: App, dex: dex::Options, builder: Builder, fronts: Vec<Front>) -> Self {
        let page = Inbox::start(process::free_addr(), Mailbox::default()).expect("a free port");
        let done = format!("http://{}/done", page.addr());
        let provider = Provider::new("dex", "oidc").set("issuer", dex.issuer());
        let app = app.set("/redirectURLs", json!([done]));
        // What Dex says of an address is believed.
        let app = app.set("/providerRefs", json!([{ "name": provider.name(), "linkByEmail": true }]));
        let builder = builder.app(&app).provider(&provider);
        let client = dex::Client::of(&provider, &builder.callback(&app, &provider));
        let people = dex.person(Person::new(NAME, ADA)).client(client);
        let (dex, stack) = tokio::join!(Dex::start(people), builder.start());
        Self { stack, app, dex: dex.expect("Dex starts"), done, _page: page, _fronts: fronts }
    }

    /// The link that an application shows.
    fn link(&self) -> String {
        let (base, app, done) = (self.stack.base_url(), self.app.id(), &self.done);
        format!("{base}/{app}/dex/redirect?redirect_url={done}")
    }

    /// Waits for the page that the application gets the person back on.
    async fn back(&self, browser: &Browser) -> Url {
        let done = self.done.parse::<Url>().expect("an address");
        browser.until_url("the way back", |url| (url.path(), url.port()) == (done.path(), done.port())).await
    }

    /// Calls with the Bearer of a parameter list.
    async fn verified_address(&self, parameters: &BTreeMap<String, String>) -> String {
        let signed_in = self.stack.client().signed_in(self.app.id(), &parameters["access_token"]);
        // Verified already: it sends no mail, and tells the address.
        signed_in.verify().await.expect(StatusCode::OK).string("email").to_owned()
    }

    async fn refresh(&self, refresh_token: &str) -> Answer {
        let body = json!({ "grant_type": "refresh_token", "refresh_token": refresh_token });
        self.stack.client().post(&format!("v1/{}/token", self.app.id()), &body).await
    }

    async fn counts(&self) -> (i64, i64) {
        counts(&self.stack).await
    }
}

/// How many users and identities there are.
async fn counts(stack: &Stack) -> (i64, i64) {
    let mut connection = stack.database.connect().await.expect("the database is there");
    let counts = sqlx::query_as("SELECT (SELECT count(*) FROM users), (SELECT count(*) FROM identities)")
        .fetch_one(&mut connection)
        .await
        .expect("two counts");
    connection.close().await.expect("the database is there");
    counts
}

/// Each parameter, which must be there once.
fn parameters(encoded: Option<&str>) -> BTreeMap<String, String> {
    let mut parameters = BTreeMap::new();
    for (name, value) in form_urlencoded::parse(encoded.unwrap_or_default().as_bytes()).into_owned() {
        assert!(parameters.insert(name.clone(), value).is_none(), "{name} is there twice");
    }
    parameters
}

/// Asserts the seven, and that they fit together.
fn assert_the_seven(parameters: &BTreeMap<String, String>) {
    assert_eq!(parameters.keys().map(String::as_str).collect::<Vec<_>>(), SEVEN);
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
    assert_eq!((&claims["email"], &claims["name"]), (&json!(ADA), &json!(NAME)));
}

fn app() -> App {
    App::new("social")
}

#[tokio::test]
async fn a_person_who_logs_in_comes_back_with_the_seven_parameters_in_the_query() {
    let social = Social::open(app(), dex::Options::for_tests().asking()).await;
    let browser = Browser::start().await.unwrap();
    browser.open(&social.link()).await;
    let [flow] = &browser.cookies().await[..] else { panic!("one flow, one cookie") };
    assert!(flow.http_only && flow.same_site.as_deref() == Some("Lax"), "{flow:?}");
    dex::log_in(&browser, ADA).await;
    dex::grant(&browser).await;
    let url = social.back(&browser).await;
    assert_eq!(url.fragment(), None);
    let first = parameters(url.query());
    assert_the_seven(&first);
    assert_eq!(browser.text_of("#title").await, "Logged in");
    assert_eq!(social.verified_address(&first).await, ADA);
    social.refresh(&first["refresh_token"]).await.expect(StatusCode::OK);
    assert!(browser.cookies().await.is_empty(), "the flow is over");
    assert_eq!(social.counts().await, (1, 1));

    // The same person in another browser is the same user.
    let other = Browser::start().await.unwrap();
    other.open(&social.link()).await;
    dex::log_in(&other, ADA).await;
    dex::grant(&other).await;
    let second = parameters(social.back(&other).await.query());
    assert_the_seven(&second);
    assert_eq!(second["local_id"], first["local_id"]);
    assert_ne!(second["session_id"], first["session_id"]);
    assert_eq!(social.counts().await, (1, 1));
}

#[tokio::test]
async fn a_person_who_logs_in_comes_back_with_the_seven_parameters_in_the_fragment() {
    let social = Social::open(app().set("/callbackMode", "Fragment"), dex::Options::for_tests()).await;
    let browser = Browser::start().await.unwrap();
    browser.open(&format!("{}&state=of-the-app", social.link())).await;
    dex::log_in(&browser, ADA).await;
    let url = social.back(&browser).await;
    assert_eq!(url.query(), None);
    let mut seven = parameters(url.fragment());
    assert_eq!(seven.remove("state").as_deref(), Some("of-the-app"));
    assert_the_seven(&seven);
    assert_eq!(browser.text_of("td[data-name=session_id]").await, seven["session_id"]);
    assert_eq!(social.verified_address(&seven).await, ADA);
}

#[tokio::test]
async fn a_person_who_logs_in_comes_back_with_a_code_that_the_verifier_turns_into_tokens_once() {
    let social = Social::open(app().set("/callbackMode", "Code"), dex::Options::for_tests()).await;
    let browser = Browser::start().await.unwrap();

    // Without a challenge nobody is sent anywhere.
    browser.open(&social.link()).await;
    assert!(browser.text().await.contains("invalid_request"), "{}", browser.text().await);
    assert!(browser.url().await.as_str().starts_with(social.stack.base_url()));

    let challenge = BASE64_URL_SAFE_NO_PAD.encode(digest::digest(&digest::SHA256, VERIFIER.as_bytes()));
    browser.open(&format!("{}&code_challenge={challenge}&code_challenge_method=S256", social.link())).await;
    dex::log_in(&browser, ADA).await;
    let url = social.back(&browser).await;
    let mut found = parameters(url.query());
    let code = found.remove("code").unwrap();
    assert!(found.is_empty() && url.fragment().is_none(), "a code and nothing else: {url}");
    assert_eq!(browser.text_of("#title").await, "A code, for POST token");

    let exchange = async |code: &str, verifier: &str| {
        let body = json!({ "grant_type": "authorization_code", "code": code, "code_verifier": verifier });
        social.stack.client().post(&format!("v1/{}/token", social.app.id()), &body).await
    };
    let answer = exchange(&code, VERIFIER).await.expect(StatusCode::OK);
    let signed_in = social.stack.client().signed_in(social.app.id(), answer.string("access_token"));
    assert_eq!(signed_in.verify().await.expect(StatusCode::OK).string("email"), ADA);

    // Whoever has the code too ends what it gave.
    exchange(&code, VERIFIER).await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    let refreshed = social.refresh(answer.string("refresh_token")).await;
    refreshed.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    signed_in.verify().await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
}

#[tokio::test]
async fn two_tabs_can_log_in_at_once() {
    let social = Social::open(app(), dex::Options::for_tests()).await;
    let browser = Browser::start().await.unwrap();
    let first = browser.tab().await;
    browser.open(&social.link()).await;
    let second = browser.new_tab().await;
    browser.open(&social.link()).await;
    assert_eq!(browser.cookies().await.len(), 2, "a cookie for each flow");

    // The second begins later and ends earlier.
    let mut sessions = Vec::new();
    for tab in [&second, &first] {
        browser.switch_to(tab).await;
        dex::log_in(&browser, ADA).await;
        let seven = parameters(social.back(&browser).await.query());
        assert_the_seven(&seven);
        assert_eq!(social.verified_address(&seven).await, ADA);
        sessions.push((seven["local_id"].clone(), seven["session_id"].clone()));
    }
    assert_eq!(sessions[0].0, sessions[1].0);
    assert_ne!(sessions[0].1, sessions[1].1);
    assert!(browser.cookies().await.is_empty(), "both flows are over");
}

/// An attacker's link that leads into the attacker's own flow would log the victim in as the attacker; the other way
/// round the victim's code would log the attacker in.
#[tokio::test]
async fn a_second_browser_cannot_use_the_state_of_the_first() {
    let social = Social::open(app(), dex::Options::for_tests()).await;
    let (one, other) = tokio::join!(Browser::start(), Browser::start());
    let (one, other) = (one.unwrap(), other.unwrap());
    one.open(&social.link()).await;
    let page_of_dex = one.url().await;
    assert_eq!(page_of_dex.port(), Some(social.dex.addr().port()));

    // Dex lets anybody log in on that page, and sends that browser back with the state of the first.
    other.open(page_of_dex.as_str()).await;
    dex::log_in(&other, ADA).await;
    other.until_text("invalid_state").await;
    let refused = other.url().await;
    assert_eq!(refused.path(), format!("/{}/dex/callback", social.app.id()));
    assert!(!other.text().await.contains("access_token"));
    assert_eq!(social.counts().await, (0, 0));

    // Even one that has flows of its own.
    other.open(&social.link()).await;
    assert_eq!(other.cookies().await.len(), 1);
    let again = other.url().await;
    one.open(again.as_str()).await;
    dex::log_in(&one, ADA).await;
    one.until_text("invalid_state").await;
    assert_eq!(social.counts().await, (0, 0));
}

#[tokio::test]
async fn a_person_who_cancels_at_the_provider_is_not_logged_in_and_may_try_again() {
    let social = Social::open(app(), dex::Options::for_tests().asking()).await;
    let browser = Browser::start().await.unwrap();
    browser.open(&social.link()).await;
    dex::log_in(&browser, ADA).await;
    dex::cancel(&browser).await;
    browser.until_text("Approval rejected").await;
    assert_eq!(social.counts().await, (0, 0));
    browser.open(&social.link()).await;
    dex::log_in(&browser, ADA).await;
    dex::grant(&browser).await;
    assert_the_seven(&parameters(social.back(&browser).await.query()));
}

/// The cookies of the service, which the browser tells only of the site that it is at; it stays where it was.
async fn cookies_of(browser: &Browser, stack: &Stack, app: &App) -> Vec<Cookie> {
    let page = browser.url().await;
    browser.open(&format!("{}/{}/.well-known/jwks.json", stack.base_url(), app.id())).await;
    let cookies = browser.cookies().await;
    browser.open(page.as_str()).await;
    cookies
}

#[tokio::test]
async fn over_tls_a_real_browser_keeps_its_flows_in_cookies_of_this_host_alone() {
    let social = Social::open_over_tls(app()).await;
    assert!(social.stack.base_url().starts_with("https://localhost:"), "{}", social.stack.base_url());
    let browser = Browser::start_believing_certificates().await.unwrap();
    // The oldest goes: a fifth flow leaves four.
    for flows in [1, 2, 3, 4, 4] {
        browser.open(&social.link()).await;
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
    dex::log_in(&browser, ADA).await;
    let seven = parameters(social.back(&browser).await.query());
    assert_the_seven(&seven);
    assert_eq!(social.verified_address(&seven).await, ADA);
    assert_eq!(cookies_of(&browser, &social.stack, &social.app).await.len(), 3, "one flow is over");
    assert_eq!(social.counts().await, (1, 1));

    // Another browser has the link to Dex, and nothing of the flow.
    browser.open(&social.link()).await;
    let stolen = browser.url().await;
    let other = Browser::start_believing_certificates().await.unwrap();
    other.open(stolen.as_str()).await;
    dex::log_in(&other, ADA).await;
    other.until_text("invalid_state").await;
}

/// As Apple does it: a POST from the provider's own site, to which a browser gives no cookie but `SameSite=None`.
#[tokio::test]
async fn over_tls_a_provider_may_come_back_by_a_post_from_its_own_site() {
    let page = Inbox::start(process::free_addr(), Mailbox::default()).unwrap();
    let done = format!("http://{}/done", page.addr());
    let tls = Tls::new().unwrap();
    let at = Front::start(&tls, provider_that_posts().await).await.unwrap();
    let (builder, _front) = Stack::builder().behind_tls(&tls).await.unwrap();
    let ca = process::fresh_dir("tls").join("ca.pem");
    fs::write(&ca, &tls.ca).unwrap();
    let url = |path: &str| format!("{}/{path}", at.url("127.0.0.1"));
    let provider = Provider::new("posting", "oauth2")
        .set("authorizationURL", url("authorize"))
        .set("tokenURL", url("token"))
        .set("userInfoURL", url("user"))
        .set("claims", json!({ "subject": "id", "email": "email", "emailVerified": "verified", "name": "name" }));
    let app = app().set("/redirectURLs", json!([done]));
    let app = app.set("/providerRefs", json!([{ "name": "posting", "linkByEmail": true }]));
    let builder = builder.env("SSL_CERT_FILE", &ca.display().to_string());
    let stack = builder.app(&app).provider(&provider).start().await;
    let browser = Browser::start_believing_certificates().await.unwrap();
    browser.open(&format!("{}/{}/posting/redirect?state=mine", stack.base_url(), app.id())).await;
    assert_eq!(browser.url().await.host_str(), Some("127.0.0.1"));
    browser.click("#post").await;
    let url = browser.until_url("the way back", |url| url.path() == "/done").await;
    let mut seven = parameters(url.query());
    assert_eq!(seven.remove("state").as_deref(), Some("mine"));
    assert_the_seven(&seven);
    assert!(cookies_of(&browser, &stack, &app).await.is_empty(), "the flow is over");
    assert_eq!(counts(&stack).await, (1, 1));
}

/// Dex tells of a refusal on a page of its own; most providers send the person back with it.
#[tokio::test]
async fn a_person_who_cancels_comes_back_with_access_denied_and_no_words_of_the_provider() {
    let page = Inbox::start(process::free_addr(), Mailbox::default()).unwrap();
    let done = format!("http://{}/done", page.addr());
    let cancelling = format!("http://{}", provider_with_a_cancel_button().await);
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
        let url = browser.until_url("the way back", |url| url.path() == "/done").await;
        let (with, without) =
            if mode == "Query" { (url.query(), url.fragment()) } else { (url.fragment(), url.query()) };
        assert_eq!(without, None, "{url}");
        let mut told = parameters(with);
        assert_eq!(told.remove("error").as_deref(), Some("access_denied"));
        assert_eq!(told.remove("state").as_deref(), Some("mine"));
        let description = told.remove("error_description").unwrap();
        assert!(!description.is_empty() && !description.contains("words of the provider"), "{description}");
        assert!(told.is_empty(), "{told:?}");
        assert_eq!(browser.text_of("#title").await, "Not logged in");
        assert_eq!(browser.text_of(&format!("td[data-place={place}][data-name=error]")).await, "access_denied");
        assert!(browser.cookies().await.is_empty(), "the flow is over");

        // The page of the provider is still there; its link has been used.
        browser.back().await;
        browser.click("#cancel").await;
        browser.until_text("invalid_state").await;
        assert_eq!(counts(&stack).await, (0, 0));
    }
}

/// A provider whose page posts a code to the callback, and which then vouches for Ada.
async fn provider_that_posts() -> SocketAddr {
    answering(|request| {
        let page = |kind: &'static str, body: String| {
            http::Response::builder().header("content-type", kind).body(Full::new(Bytes::from(body)))
        };
        match request.uri().path() {
            "/authorize" => {
                let asked = parameters(request.uri().query());
                let form = format!(
                    "<!doctype html><title>Log in</title><form method=post action=\"{}\">\
                     <input type=hidden name=state value=\"{}\"><input type=hidden name=code value=posted>\
                     <button id=post>Log in</button></form>",
                    asked["redirect_uri"], asked["state"],
                );
                page("text/html", form)
            }
            "/token" => page("application/json", json!({ "access_token": "t", "token_type": "Bearer" }).to_string()),
            "/user" => {
                let ada = json!({ "id": "1", "email": ADA, "verified": true, "name": NAME });
                page("application/json", ada.to_string())
            }
            _ => http::Response::builder().status(StatusCode::NOT_FOUND).body(Full::default()),
        }
    })
    .await
}

/// A provider whose page has one button.
async fn provider_with_a_cancel_button() -> SocketAddr {
    answering(|request| {
        if request.uri().path() != "/authorize" {
            return http::Response::builder().status(StatusCode::NOT_FOUND).body(Full::default());
        }
        let asked = parameters(request.uri().query());
        let mut back: Url = asked["redirect_uri"].parse().expect("an address");
        back.query_pairs_mut()
            .append_pair("error", "access_denied")
            .append_pair("error_description", "words of the provider")
            .append_pair("state", &asked["state"]);
        let back = back.as_str().replace('&', "&amp;");
        let page = format!("<!doctype html><title>Log in</title><a id=cancel href=\"{back}\">Cancel</a>");
        http::Response::builder().header("content-type", "text/html").body(Full::new(Bytes::from(page)))
    })
    .await
}

/// A server that answers so.
async fn answering(answer: fn(http::Request<Incoming>) -> http::Result<http::Response<Full<Bytes>>>) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service_fn(move |request| std::future::ready(answer(request)));
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    addr
}
