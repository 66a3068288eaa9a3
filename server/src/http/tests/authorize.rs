//! The pages for Clients: which requests are refused, and how, before any store is used. In most tests, every store
//! panics, so that a test fails if a refused request uses a store.

use latchkey_crds::rendered::RenderedClient;
use url::form_urlencoded;
use uuid::Uuid;

use super::{
    FailingStores, Reply, TestServer, get_request,
    pages::{TestBrowser, assert_page_error, assert_protected, hidden_field, post_form},
};
use crate::{
    domain::{pages::SessionCookie, session::SessionId, user::UserId},
    fixtures,
};

const CALLBACK: &str = "https://grafana.example.com/callback";
const ISSUER: &str = "https%3A%2F%2Fauth.example.com%2Fshop";

fn server_with(stores: FailingStores, edit: impl FnOnce(&mut RenderedClient)) -> TestServer {
    let mut client = fixtures::client("grafana");
    client.display_name = "Our <Grafana>".to_owned();
    client.post_logout_redirect_urls = vec!["https://grafana.example.com/bye".parse().unwrap()];
    edit(&mut client);
    TestServer::with_app(stores, |app| {
        app.pages = Some(fixtures::pages());
        app.clients = vec![client];
    })
}

fn server() -> TestServer {
    server_with(FailingStores::Panicking, |_| {})
}

/// The query of a valid request with these changes applied. A change with an empty value removes the parameter.
fn query(changes: &[(&str, &str)]) -> String {
    let mut sent = vec![
        ("client_id", "grafana"),
        ("redirect_uri", CALLBACK),
        ("response_type", "code"),
        ("scope", "openid email"),
        ("state", "state 1"),
    ];
    for (name, value) in changes {
        sent.retain(|(known, _)| known != name);
        sent.push((name, value));
    }
    encode(&sent)
}

fn encode(pairs: &[(&str, &str)]) -> String {
    form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish()
}

async fn authorize(server: &TestServer, changes: &[(&str, &str)]) -> Reply {
    server.send_request(get_request(&format!("/shop/authorize?{}", query(changes)), "")).await
}

/// Asserts a redirect to the client, and returns the value of `error`.
#[track_caller]
fn error_for_client(reply: &Reply) -> String {
    assert_eq!(reply.status, 303, "{}", reply.body);
    assert_eq!(reply.header("referrer-policy"), Some("no-referrer"));
    assert_protected(reply);
    let location = reply.header("location").unwrap();
    let rest = location.strip_prefix(&format!("{CALLBACK}?error=")).unwrap_or_else(|| panic!("{location}"));
    assert!(location.ends_with(&format!("&iss={ISSUER}")), "{location}");
    assert!(location.contains("&error_description="), "{location}");
    rest.split('&').next().unwrap().to_owned()
}

/// The `tx` in a redirect to this page.
#[track_caller]
fn tx_for(reply: &Reply, status: u16, page: &str) -> String {
    assert_eq!(reply.status, status, "{}", reply.body);
    let location = reply.header("location").unwrap();
    let rest = location.strip_prefix(&format!("/shop/{page}?tx=")).unwrap_or_else(|| panic!("{location}"));
    rest.split('&').next().unwrap().to_owned()
}

#[tokio::test]
async fn authorize_shows_invalid_client_in_an_app_without_clients() {
    let without = TestServer::with_app(FailingStores::Panicking, |app| app.pages = Some(fixtures::pages()));
    for path in ["authorize".to_owned(), format!("authorize?{}", query(&[]))] {
        let reply = without.send_request(get_request(&format!("/shop/{path}"), "")).await;
        assert_page_error(&reply, 400, "invalid_client");
        assert_eq!(reply.header("www-authenticate"), None);
    }
}

#[tokio::test]
async fn an_unknown_client_or_redirect_url_is_an_error_on_a_page() {
    let server = server();
    for (changes, code) in [
        ([("client_id", "")], "invalid_client"),
        ([("client_id", "other")], "invalid_client"),
        ([("redirect_uri", "")], "redirect_url_not_allowed"),
        ([("redirect_uri", "https://evil.example")], "redirect_url_not_allowed"),
        ([("redirect_uri", "https://grafana.example.com/callback?x")], "redirect_url_not_allowed"),
    ] {
        let reply = authorize(&server, &changes).await;
        assert_page_error(&reply, 400, code);
        assert!(!reply.body.contains("evil.example"), "{}", reply.body);
    }
    for (again, code) in [("client_id=grafana", "invalid_client"), ("redirect_uri=x", "redirect_url_not_allowed")] {
        let path = format!("/shop/authorize?{}&{again}", query(&[]));
        assert_page_error(&server.send_request(get_request(&path, "")).await, 400, code);
    }
    let not_utf_8 = server.send_request(get_request(&format!("/shop/authorize?{}&x=%FF", query(&[])), "")).await;
    assert_page_error(&not_utf_8, 400, "invalid_request");
}

#[tokio::test]
async fn all_other_errors_are_sent_to_the_client_with_state_and_issuer() {
    let server = server();
    for (changes, code) in [
        ([("request", "x")], "request_not_supported"),
        ([("request_uri", "https://evil.example")], "request_uri_not_supported"),
        ([("registration", "{}")], "registration_not_supported"),
        ([("response_type", "token")], "unsupported_response_type"),
        ([("scope", "email")], "invalid_scope"),
        ([("prompt", "none login")], "invalid_request"),
        ([("prompt", "none")], "login_required"),
    ] {
        let reply = authorize(&server, &changes).await;
        assert_eq!(error_for_client(&reply), code);
        assert!(reply.header("location").unwrap().contains("&state=state%201&"), "{changes:?}");
    }
    let bad_state = authorize(&server, &[("state", &"s".repeat(2_049))]).await;
    assert_eq!(error_for_client(&bad_state), "invalid_request");
    assert!(!bad_state.header("location").unwrap().contains("state=s"));
    let again = format!("/shop/authorize?{}&nonce=a&nonce=a", query(&[]));
    assert_eq!(error_for_client(&server.send_request(get_request(&again, "")).await), "invalid_request");
}

#[tokio::test]
async fn a_form_post_response_is_a_page_with_one_script() {
    let server = server();
    let state = "\"><script>alert(1)</script>";
    let reply = authorize(&server, &[("response_mode", "form_post"), ("prompt", "none"), ("state", state)]).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    let policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; base-uri 'none'; \
                  frame-ancestors 'none'";
    assert_eq!(reply.header("content-security-policy"), Some(policy));
    assert_eq!(reply.header("x-frame-options"), Some("DENY"));
    assert_eq!(reply.header("cache-control"), Some("no-store"));
    assert!(reply.body.contains(&format!("<form method=\"post\" action=\"{CALLBACK}\">")), "{}", reply.body);
    assert_eq!(hidden_field(&reply.body, "error"), "login_required");
    assert!(hidden_field(&reply.body, "iss").starts_with("https:"));
    assert_eq!(reply.body.matches("<script").count(), 1, "{}", reply.body);
    assert!(!reply.body.contains("csrf"), "{}", reply.body);
    let script = reply.body.split('"').find(|text| text.starts_with("/assets/form-post.")).unwrap();
    let script = server.send_request(get_request(script, "")).await;
    assert_eq!(script.header("content-type"), Some("text/javascript; charset=utf-8"));
    assert_eq!(script.header("cache-control"), Some("public, max-age=31536000, immutable"));
    assert!(script.body.contains("submit()"));
}

#[tokio::test]
async fn a_request_without_a_session_leads_to_the_login_or_the_registration() {
    let server = server();
    let browser = TestBrowser::open_page(&server).await;
    let path = format!("/shop/authorize?{}", query(&[("login_hint", "ada@example.com"), ("ui_locales", "fr de")]));
    let reply = server.send_request(get_request(&path, &browser.cookie)).await;
    let tx = tx_for(&reply, 302, "login");
    assert_protected(&reply);
    let login = server.send_request(get_request(&format!("/shop/login?tx={tx}"), &browser.cookie)).await;
    assert_eq!((login.status, hidden_field(&login.body, "tx")), (200, tx.as_str()));
    assert!(login.body.contains("value=\"ada@example.com\""), "{}", login.body);
    assert!(login.body.contains("<html lang=\"de\""), "{}", login.body);
    let own = format!("/shop/login?tx={tx}&lang=en");
    let english = server.send_request(get_request(&own, &browser.cookie)).await;
    assert!(english.body.contains("<html lang=\"en\""), "the user's own choice counts first");
    tx_for(&authorize(&server, &[("prompt", "create")]).await, 302, "register");
    tx_for(&authorize(&server, &[("prompt", "create login")]).await, 302, "register");
    // A login leads back to `authorize`. This browser still has no session, so it is sent to the login again.
    let again = server.send_request(get_request(&format!("/shop/authorize?tx={tx}"), &browser.cookie)).await;
    tx_for(&again, 302, "login");
}

#[tokio::test]
async fn an_error_page_has_the_language_that_the_client_asks_for() {
    let server = server();
    let reply = authorize(&server, &[("client_id", "other"), ("ui_locales", "de-AT en")]).await;
    assert!(reply.body.contains("<html lang=\"de\""), "{}", reply.body);
    let form = encode(&[("client_id", "other"), ("ui_locales", "de")]);
    let posted = post_form(&server, "/shop/authorize", "", &form).await;
    assert!(posted.body.contains("<html lang=\"de\""), "{}", posted.body);
}

#[tokio::test]
async fn a_request_that_does_not_fit_into_a_transaction_is_refused() {
    let server = server();
    let claims = format!("{{\"id_token\": {{\"{}\": null}}}}", "x".repeat(4_000));
    let reply = authorize(&server, &[("claims", &claims), ("state", &"s".repeat(2_000))]).await;
    assert_eq!(error_for_client(&reply), "invalid_request");
    let form = query(&[("claims", &claims), ("state", &"s".repeat(2_000))]);
    let posted = post_form(&server, "/shop/authorize", "", &form).await;
    assert_eq!(error_for_client(&posted), "invalid_request");
}

#[tokio::test]
async fn a_post_from_another_site_becomes_a_get_and_sets_no_cookie() {
    let server = server();
    for headers in ["", "Origin: https://grafana.example.com\r\n", "Origin: null\r\n", "Sec-Fetch-Site: cross-site\r\n"]
    {
        let posted = post_form(&server, "/shop/authorize", headers, &query(&[])).await;
        let tx = tx_for(&posted, 303, "authorize");
        assert_eq!(posted.header("set-cookie"), None);
        let path = format!("/shop/authorize?tx={tx}");
        // The request continues in any browser, also in one without cookies.
        for cookie in [String::new(), TestBrowser::open_page(&server).await.cookie] {
            tx_for(&server.send_request(get_request(&path, &cookie)).await, 302, "login");
        }
    }
    let wrong = post_form(&server, "/shop/authorize", "", &query(&[("client_id", "x")])).await;
    assert_page_error(&wrong, 400, "invalid_client");
    assert_eq!(wrong.header("set-cookie"), None);
    let wrong = post_form(&server, "/shop/authorize", "", &query(&[("scope", "email")])).await;
    assert_eq!(error_for_client(&wrong), "invalid_scope");
    assert_eq!(wrong.header("set-cookie"), None);
    let wrong = post_form(&server, "/shop/authorize", "", &format!("{}&state=again", query(&[]))).await;
    assert_eq!(error_for_client(&wrong), "invalid_request");
    let json = server.post("/shop/authorize", "", "{}").await;
    assert_page_error(&json, 415, "unsupported_media_type");
}

#[tokio::test]
async fn a_transaction_that_is_bound_to_no_browser_is_valid_only_on_its_page() {
    let server = server();
    let browser = TestBrowser::open_page(&server).await;
    let authorization = tx_for(&post_form(&server, "/shop/authorize", "", &query(&[])).await, 303, "authorize");
    let logout = encode(&[("client_id", "grafana"), ("state", "x")]);
    let logout = tx_for(&post_form(&server, "/shop/logout", "", &logout).await, 303, "logout");
    for (tx, own_page) in [(&authorization, "authorize"), (&logout, "logout")] {
        for page in ["login", "register", "confirm", "forgot", "account", "consent", "authorize", "logout"] {
            if page != own_page {
                let path = format!("/shop/{page}?tx={tx}");
                let reply = server.send_request(get_request(&path, &browser.cookie)).await;
                assert_page_error(&reply, 400, "invalid_state");
            }
        }
        let form = format!("decision=allow&csrf={}&tx={tx}", browser.csrf);
        let headers = format!("{}Origin: https://auth.example.com\r\n", browser.cookie);
        let posted = post_form(&server, "/shop/consent", &headers, &form).await;
        assert_page_error(&posted, 400, "invalid_state");
    }
    // `authorize` and `consent` also refuse a transaction of another kind, and a transaction of another browser.
    let account = server.send_request(get_request("/shop/account", &browser.cookie)).await;
    let account = tx_for(&account, 303, "login");
    let bound = format!("/shop/authorize?{}", query(&[]));
    let bound = tx_for(&server.send_request(get_request(&bound, &browser.cookie)).await, 302, "login");
    let other = TestBrowser::open_page(&server).await;
    for (tx, cookie) in [(&account, &browser.cookie), (&bound, &other.cookie)] {
        for page in ["authorize", "consent"] {
            let reply = server.send_request(get_request(&format!("/shop/{page}?tx={tx}"), cookie)).await;
            assert_page_error(&reply, 400, "invalid_state");
        }
    }
}

#[tokio::test]
async fn the_consent_page_needs_a_request_and_accepts_only_its_own_form() {
    let server = server();
    let browser = TestBrowser::open_page(&server).await;
    assert_page_error(&server.send_request(get_request("/shop/consent", &browser.cookie)).await, 400, "invalid_state");
    let request = format!("/shop/authorize?{}", query(&[]));
    let tx = tx_for(&server.send_request(get_request(&request, &browser.cookie)).await, 302, "login");
    // Without a session, the consent page redirects to `authorize`, which then redirects to the login.
    let reply = server.send_request(get_request(&format!("/shop/consent?tx={tx}"), &browser.cookie)).await;
    tx_for(&reply, 302, "authorize");

    let own = format!("{}Origin: https://auth.example.com\r\n", browser.cookie);
    let post = async |headers: &str, form: &str| post_form(&server, "/shop/consent", headers, form).await;
    let form = |decision: &str| format!("decision={decision}&tx={tx}&csrf={}", browser.csrf);
    assert_page_error(&post(&own, &format!("decision=allow&tx={tx}")).await, 400, "invalid_state");
    assert_page_error(&post(&own, &format!("decision=allow&csrf={}", browser.csrf)).await, 400, "invalid_state");
    let foreign = format!("{}Origin: https://grafana.example.com\r\n", browser.cookie);
    assert_page_error(&post(&foreign, &form("allow")).await, 403, "origin_not_allowed");
    assert_page_error(&post(&own, &form("perhaps")).await, 400, "invalid_request");
    assert_page_error(&post(&own, &form("")).await, 400, "invalid_request");
    tx_for(&post(&own, &form("allow")).await, 303, "login");
    assert_eq!(error_for_client(&post(&own, &form("deny")).await), "access_denied");
    let switched = post(&own, &form("switch")).await;
    tx_for(&switched, 303, "login");
    assert!(switched.header("location").unwrap().ends_with("&notice=other_account"));
}

/// A well-formed session cookie. It is valid if the store has its session.
fn session_cookie(server: &TestServer) -> String {
    let app = server.state.apps.get("shop").unwrap();
    let cookie = SessionCookie {
        issued_ms: 1_900_000_000_000,
        user: UserId(Uuid::from_u128(7)),
        session: SessionId(Uuid::from_u128(9)),
    };
    format!("Cookie: __Host-latchkey-session.shop={}\r\n", cookie.encode(&app))
}

#[tokio::test]
async fn an_outage_is_an_error_page_but_with_prompt_none_the_client_gets_the_error() {
    for (stores, status, code) in
        [(FailingStores::Unavailable, 503, "temporarily_unavailable"), (FailingStores::Broken, 500, "server_error")]
    {
        let server = server_with(stores, |_| {});
        let cookie = session_cookie(&server);
        let get = async |changes: &[(&str, &str)]| {
            server.send_request(get_request(&format!("/shop/authorize?{}", query(changes)), &cookie)).await
        };
        let reply = get(&[]).await;
        assert_page_error(&reply, status, code);
        assert_eq!(reply.header("retry-after").is_some(), status == 503);
        let silent = get(&[("prompt", "none")]).await;
        match status {
            503 => assert_eq!(error_for_client(&silent), "temporarily_unavailable"),
            _ => assert_page_error(&silent, status, code),
        }
        let pushed = [("request_uri", "urn:ietf:params:oauth:request_uri:x")];
        assert_page_error(&get(&pushed).await, status, code);
        assert_page_error(&server.send_request(get_request("/shop/logout", &cookie)).await, status, code);
    }
}

#[tokio::test]
async fn a_logout_for_a_client_checks_its_parameters() {
    const BYE: &str = "https://grafana.example.com/bye";
    let server = server();
    let get = async |sent: &[(&str, &str)]| {
        server.send_request(get_request(&format!("/shop/logout?{}", encode(sent)), "")).await
    };
    let (client, url) = (("client_id", "grafana"), ("post_logout_redirect_uri", BYE));
    // Without a session, there is nothing to ask: the browser is redirected to the client immediately.
    let reply = get(&[client, url, ("state", "a b")]).await;
    assert_eq!((reply.status, reply.header("location")), (303, Some("https://grafana.example.com/bye?state=a%20b")));
    assert_protected(&reply);
    assert_eq!(get(&[client]).await.status, 200);
    let refused: [(&[(&str, &str)], &str); 6] = [
        (&[url], "invalid_request"),
        (&[client, client], "invalid_request"),
        (&[("id_token_hint", "x")], "invalid_request"),
        (&[("client_id", "other"), url], "invalid_client"),
        (&[client, ("post_logout_redirect_uri", CALLBACK)], "redirect_url_not_allowed"),
        (&[client, ("post_logout_redirect_uri", "https://evil.example")], "redirect_url_not_allowed"),
    ];
    for (sent, code) in refused {
        assert_page_error(&get(sent).await, 400, code);
        let posted = post_form(&server, "/shop/logout", "", &encode(sent)).await;
        assert_page_error(&posted, 400, code);
        assert_eq!(posted.header("set-cookie"), None);
    }
    let posted = post_form(&server, "/shop/logout", "Origin: null\r\n", &encode(&[client, url])).await;
    let tx = tx_for(&posted, 303, "logout");
    assert_eq!(posted.header("set-cookie"), None);
    let done = server.send_request(get_request(&format!("/shop/logout?tx={tx}"), "")).await;
    assert_eq!((done.status, done.header("location")), (303, Some(BYE)));
    let german = get(&[("client_id", "grafana"), ("ui_locales", "de")]).await;
    assert!(german.body.contains("<html lang=\"de\""), "{}", german.body);
}

#[tokio::test]
async fn a_transaction_is_checked_again_when_the_client_has_changed() {
    let server = server();
    let browser = TestBrowser::open_page(&server).await;
    let request = format!("/shop/authorize?{}", query(&[]));
    let tx = tx_for(&server.send_request(get_request(&request, &browser.cookie)).await, 302, "login");
    let mut doc = fixtures::rendered("shop");
    doc.keys = server.state.apps.get("shop").unwrap().doc.keys.clone();
    doc.pages = Some(fixtures::pages());
    let mut client = fixtures::client("grafana");
    client.redirect_urls = vec!["https://new.example.com/callback".parse().unwrap()];
    doc.clients = vec![client];
    server.state.apps.put(&"shop".parse().unwrap(), &doc.to_bytes());
    let form = format!("decision=deny&tx={tx}&csrf={}", browser.csrf);
    let headers = format!("{}Origin: https://auth.example.com\r\n", browser.cookie);
    for reply in [
        server.send_request(get_request(&format!("/shop/authorize?tx={tx}"), &browser.cookie)).await,
        server.send_request(get_request(&format!("/shop/consent?tx={tx}"), &browser.cookie)).await,
        post_form(&server, "/shop/consent", &headers, &form).await,
    ] {
        assert_page_error(&reply, 400, "redirect_url_not_allowed");
    }
}

#[tokio::test]
async fn a_new_client_does_not_inherit_a_transaction_of_an_old_client_with_the_same_name() {
    let server = server();
    let browser = TestBrowser::open_page(&server).await;
    let request = format!("/shop/authorize?{}", query(&[]));
    let tx = tx_for(&server.send_request(get_request(&request, &browser.cookie)).await, 302, "login");
    let mut doc = fixtures::rendered("shop");
    doc.keys = server.state.apps.get("shop").unwrap().doc.keys.clone();
    doc.pages = Some(fixtures::pages());
    doc.clients = vec![RenderedClient { uid: "uid-new".to_owned(), ..fixtures::client("grafana") }];
    server.state.apps.put(&"shop".parse().unwrap(), &doc.to_bytes());
    for page in ["authorize", "consent"] {
        let reply = server.send_request(get_request(&format!("/shop/{page}?tx={tx}"), &browser.cookie)).await;
        assert_page_error(&reply, 400, "invalid_client");
    }
}

#[tokio::test]
async fn authorization_responses_are_counted() {
    let server = server();
    for change in [("nonce", "n"), ("prompt", "none"), ("client_id", "x"), ("scope", "email")] {
        authorize(&server, &[change]).await;
    }
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &server.registry).unwrap();
    for line in [
        "authorizations_total{outcome=\"login\"} 1",
        "authorizations_total{outcome=\"error\"} 2",
        "authorizations_total{outcome=\"invalid\"} 1",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}
