//! Hosted pages: which requests reach a page, and what protects every page. In most tests, every store panics, so that
//! a test fails if a refused request uses a store.

use latchkey_crds::rendered::{Base64Bytes, KeyState, RenderedApp, RenderedLogo, RenderedProvider, SignUp};
use serde_json::json;
use time::Duration;
use uuid::Uuid;

use super::{FailingStores, Reply, TestServer, failing_stores::DOWN, get_request};
use crate::{
    domain::{
        app::App,
        clock::Env,
        email::Email,
        pages::{BrowserId, SessionCookie, seal_address, user_token},
        session::SessionId,
        user::UserId,
    },
    fixtures,
};

const PAGES: [&str; 15] = [
    "login",
    "register",
    "confirm",
    "forgot",
    "reset",
    "account",
    "account/password",
    "account/email",
    "account/delete",
    "account/identities",
    "account/sessions",
    "account/activity",
    "account/applications",
    "consent",
    "logout",
];
const FORM: &str = "email=ada%40example.com&password=correct+horse";
const ORIGIN: &str = "Origin: https://auth.example.com\r\n";

/// A server with all pages: the App has a client.
fn server(stores: FailingStores) -> TestServer {
    TestServer::with_app(stores, |app| {
        app.pages = Some(fixtures::pages());
        app.clients = vec![fixtures::client("grafana")];
    })
}

/// The cookie and the field `csrf` of a browser that has opened a page.
pub(super) struct TestBrowser {
    pub(super) cookie: String,
    pub(super) csrf: String,
}

impl TestBrowser {
    pub(super) async fn open_page(server: &TestServer) -> Self {
        let reply = server.send_request(get_request("/shop/login", "")).await;
        let cookie = reply.header("set-cookie").unwrap().split(';').next().unwrap();
        Self { cookie: format!("Cookie: {cookie}\r\n"), csrf: hidden_field(&reply.body, "csrf").to_owned() }
    }
}

pub(super) fn hidden_field<'a>(html: &'a str, name: &str) -> &'a str {
    let (_, rest) = html.split_once(&format!("name=\"{name}\" value=\"")).unwrap_or_else(|| panic!("{name} in {html}"));
    rest.split('"').next().unwrap()
}

pub(super) async fn post_form(server: &TestServer, path: &str, headers: &str, body: &str) -> Reply {
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {length}\r\n\
         Content-Type: application/x-www-form-urlencoded\r\n{headers}\r\n{body}"
    );
    server.send_request(head).await
}

#[track_caller]
pub(super) fn assert_protected(reply: &Reply) {
    let script = if reply.body.contains(" type=\"password\"") { "script-src 'self'; " } else { "" };
    let policy = format!(
        "default-src 'none'; {script}style-src 'self'; img-src 'self'; base-uri 'none'; frame-ancestors 'none'"
    );
    assert_eq!(reply.header("content-security-policy"), Some(policy.as_str()));
    assert_eq!(reply.header("x-frame-options"), Some("DENY"));
    assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(reply.header("cache-control"), Some("no-store"));
    assert_eq!(reply.header("access-control-allow-origin"), None);
}

/// Asserts an error page, or a form with an error.
#[track_caller]
pub(super) fn assert_page_error(reply: &Reply, status: u16, code: &str) {
    assert_eq!(reply.status, status, "{}", reply.body);
    assert!(reply.body.contains(&format!("<main data-error=\"{code}\">")), "{}", reply.body);
    assert_eq!(reply.header("content-type"), Some("text/html; charset=utf-8"));
    assert_eq!(reply.header("referrer-policy"), Some("same-origin"));
    assert_protected(reply);
}

#[tokio::test]
async fn pages_without_a_session_need_no_store() {
    let server = server(FailingStores::Panicking);
    for page in ["login", "register", "confirm", "confirm?code=ABCDE-FGHJK", "forgot", "reset", "logout"] {
        let reply =
            server.send_request(get_request(&format!("/shop/{page}"), "Origin: https://evil.example\r\n")).await;
        assert_eq!(reply.status, 200, "{page}");
        assert!(reply.body.starts_with("<!DOCTYPE html>") && !reply.body.contains("data-error"), "{page}");
        assert_eq!(reply.header("referrer-policy"), Some("same-origin"));
        assert_protected(&reply);
        let cookie = reply.header("set-cookie").unwrap();
        assert!(cookie.starts_with("__Host-latchkey-browser="), "{cookie}");
        assert!(cookie.ends_with("; Path=/; Secure; HttpOnly; SameSite=Lax"), "{cookie}");
        let head = server.send_request(get_request(&format!("/shop/{page}"), "").replacen("GET", "HEAD", 1)).await;
        assert_eq!((head.status, head.body.as_str()), (200, ""), "{page}");
    }
    let reply = server.send_request(get_request("/shop/account/email", "")).await;
    assert_eq!(reply.status, 303);
    assert!(reply.header("location").unwrap().starts_with("/shop/login?tx="));
    assert_eq!(reply.header("referrer-policy"), Some("no-referrer"));
    assert_protected(&reply);
}

#[tokio::test]
async fn only_pages_with_a_password_field_can_run_a_script() {
    let server = server(FailingStores::Panicking);
    for (page, has_password_field) in [
        ("login", true),
        ("register", true),
        ("reset", true),
        // A browser that has not registered must send the password.
        ("confirm?code=ABCDE-FGHJK", true),
        ("forgot", false),
        ("forgot?notice=sent", false),
        ("logout", false),
        ("login?tx=forged", false),
    ] {
        let reply = server.send_request(get_request(&format!("/shop/{page}"), "")).await;
        let policy = reply.header("content-security-policy").unwrap();
        assert_eq!(policy.contains("script-src"), has_password_field, "{page}: {policy}");
        assert!(!policy.contains("unsafe") && !policy.contains("nonce"), "{page}: {policy}");
        assert_eq!(reply.body.contains("name=\"password\""), has_password_field, "{page}");
        assert_eq!(reply.body.matches("<script").count(), usize::from(has_password_field), "{page}");
        assert_protected(&reply);
    }
}

#[tokio::test]
async fn every_page_path_is_unknown_in_an_app_without_pages() {
    let server = TestServer::new(FailingStores::Panicking);
    // The header `Date` can differ between the two responses.
    let headers = |reply: &Reply| {
        let headers = reply.headers.clone().into_iter().filter(|(name, _)| name != "date");
        headers.collect::<Vec<_>>()
    };
    let unknown = server.send_request(get_request("/shop/nothing", "X-Request-Id: 1\r\n")).await;
    let with_pages = self::server(FailingStores::Panicking);
    for page in PAGES.into_iter().chain(["continue", "authorize", "theme.css", "logo"]) {
        for method in ["GET", "HEAD", "POST", "OPTIONS", "DELETE"] {
            let request =
                |app: &str| get_request(&format!("/{app}/{page}"), "X-Request-Id: 1\r\n").replacen("GET", method, 1);
            let replies =
                [server.send_request(request("shop")).await, with_pages.send_request(request("nobody")).await];
            for reply in replies {
                assert_eq!((reply.status, headers(&reply)), (404, headers(&unknown)), "{method} {page}");
                assert_eq!(reply.body, if method == "HEAD" { "" } else { unknown.body.as_str() }, "{method} {page}");
            }
        }
    }
    // The stylesheet belongs to no App, but it exists only if some App has pages.
    let stylesheet = get_request("/assets/pages.AAAAAAAAAAAA.css", "X-Request-Id: 1\r\n");
    assert_eq!(server.send_request(stylesheet.clone()).await.body, unknown.body);
    assert_eq!(with_pages.send_request(stylesheet).await.status, 200);
}

#[tokio::test]
async fn a_wrong_method_gets_a_page_with_the_allowed_methods() {
    let server = server(FailingStores::Panicking);
    for (method, path, allow) in [
        ("DELETE", "login", "GET, HEAD, POST"),
        ("OPTIONS", "login", "GET, HEAD, POST"),
        ("POST", "account/activity", "GET, HEAD"),
        ("POST", "continue", "GET"),
        ("DELETE", "authorize", "GET, POST"),
    ] {
        let reply = server.send_request(get_request(&format!("/shop/{path}"), "").replacen("GET", method, 1)).await;
        assert_page_error(&reply, 405, "method_not_allowed");
        assert_eq!(reply.header("allow"), Some(allow), "{method} {path}");
    }
    for path in ["continue", "authorize"] {
        let head = server.send_request(get_request(&format!("/shop/{path}"), "").replacen("GET", "HEAD", 1)).await;
        assert_eq!((head.status, head.body.as_str()), (405, ""), "{path}");
    }
}

#[tokio::test]
async fn a_form_needs_the_cookie_of_its_browser_and_our_origin() {
    let server = server(FailingStores::Panicking);
    let (own, other) = (TestBrowser::open_page(&server).await, TestBrowser::open_page(&server).await);
    for page in PAGES.into_iter().filter(|page| *page != "account/activity") {
        let path = format!("/shop/{page}");
        let post = async |headers: String, csrf: &str| {
            post_form(&server, &path, &headers, &format!("{FORM}&csrf={csrf}")).await
        };
        assert_page_error(&post(ORIGIN.to_owned(), &own.csrf).await, 400, "invalid_state");
        // Another site can ask for a logout. The user then decides.
        let without_csrf = post(own.cookie.clone(), "").await;
        match page {
            "logout" => assert_eq!((without_csrf.status, without_csrf.header("location")), (303, Some("/shop/logout"))),
            _ => assert_page_error(&without_csrf, 400, "invalid_state"),
        }
        assert_page_error(&post(own.cookie.clone(), &other.csrf).await, 400, "invalid_state");
        assert_page_error(&post(own.cookie.clone(), &own.csrf[1..]).await, 400, "invalid_state");
        for origin in ["null", "https://shop.example.com", "http://auth.example.com", "https://auth.example.com:443"] {
            let reply = post(format!("{}Origin: {origin}\r\n", own.cookie), &own.csrf).await;
            assert_page_error(&reply, 403, "origin_not_allowed");
        }
        let reply = post(format!("{}Sec-Fetch-Site: same-site\r\n", own.cookie), &own.csrf).await;
        assert_page_error(&reply, 403, "origin_not_allowed");
    }
}

#[tokio::test]
async fn an_app_without_clients_has_neither_a_consent_page_nor_an_applications_page() {
    let server = TestServer::with_app(FailingStores::Panicking, |app| app.pages = Some(fixtures::pages()));
    let unknown = server.send_request(get_request("/shop/nothing", "X-Request-Id: 1\r\n")).await;
    for page in ["consent", "account/applications"] {
        for method in ["GET", "POST", "DELETE"] {
            let request = get_request(&format!("/shop/{page}"), "X-Request-Id: 1\r\n").replacen("GET", method, 1);
            let reply = server.send_request(request).await;
            assert_eq!((reply.status, reply.body.as_str()), (404, unknown.body.as_str()), "{method} {page}");
        }
    }
}

#[tokio::test]
async fn another_site_cannot_ask_for_a_logout_in_an_app_without_clients() {
    let server = TestServer::with_app(FailingStores::Panicking, |app| app.pages = Some(fixtures::pages()));
    let opened = TestBrowser::open_page(&server).await;
    let asked = "client_id=grafana&post_logout_redirect_uri=https%3A%2F%2Fevil.example&state=a&ui_locales=de";
    let path = format!("/shop/logout?{asked}&state=b");
    let shown = server.send_request(get_request(&path, &opened.cookie)).await;
    assert_eq!((shown.status, shown.header("location")), (200, None), "{}", shown.body);
    assert!(shown.body.contains("<html lang=\"en\""), "{}", shown.body);
    let foreign = post_form(&server, "/shop/logout", "Origin: https://evil.example\r\n", asked).await;
    assert_page_error(&foreign, 403, "origin_not_allowed");
    let without_csrf = post_form(&server, "/shop/logout", &format!("{}{ORIGIN}", opened.cookie), asked).await;
    assert_page_error(&without_csrf, 400, "invalid_state");
    let own = format!("csrf={}", opened.csrf);
    let done = post_form(&server, "/shop/logout", &format!("{}{ORIGIN}", opened.cookie), &own).await;
    assert_eq!((done.status, done.header("location")), (303, Some("/shop/logout")));
}

#[tokio::test]
async fn a_form_from_another_site_does_not_replace_the_browser_cookie() {
    let server = server(FailingStores::Panicking);
    let opened = TestBrowser::open_page(&server).await;
    // Browsers send no cookie with a form from another site.
    for page in PAGES.into_iter().chain(["continue"]) {
        let path = format!("/shop/{page}");
        let reply = post_form(&server, &path, "Origin: https://evil.example\r\n", FORM).await;
        assert_eq!(reply.header("set-cookie"), None, "{page}");
        let reply = post_form(&server, &path, "", &format!("{FORM}&csrf={}", opened.csrf)).await;
        assert_eq!(reply.header("set-cookie"), None, "{page}");
    }
}

#[tokio::test]
async fn a_non_ascii_cookie_of_a_neighbouring_host_does_no_harm() {
    let server = server(FailingStores::Panicking);
    let opened = TestBrowser::open_page(&server).await;
    let cookies = opened.cookie.replacen("Cookie: ", "Cookie: n=J\u{f6}rg; ", 1);
    let reply = server.send_request(get_request("/shop/login", &cookies)).await;
    assert_eq!((reply.status, reply.header("set-cookie")), (200, None));
    assert_eq!(hidden_field(&reply.body, "csrf"), opened.csrf);
}

/// A session cookie of this age for this user.
fn session_cookie(app: &App, user: u128, age: Duration) -> String {
    let issued_ms = u64::try_from((Env::system().now() - age).unix_timestamp_nanos() / 1_000_000).unwrap();
    let (user, session) = (UserId(Uuid::from_u128(user)), SessionId(Uuid::from_u128(9)));
    format!("__Host-latchkey-session.shop={}", SessionCookie { issued_ms, user, session }.encode(app))
}

#[tokio::test]
async fn an_old_cookie_signed_with_an_unknown_key_is_no_session_and_a_recent_one_is_503() {
    let server = server(FailingStores::Panicking);
    // The App was deleted and created again, so the numbers of its keys begin with 1 again.
    let mut deleted_app = fixtures::rendered("shop");
    deleted_app.keys.hmac = vec![fixtures::hmac_key("h2", 2, KeyState::Active)];
    let deleted_app = fixtures::app(deleted_app);
    let get = async |path: &str, age: Duration| {
        let cookie = format!("Cookie: {}\r\n", session_cookie(&deleted_app, 7, age));
        server.send_request(get_request(&format!("/shop/{path}"), &cookie)).await
    };
    for page in ["login", "confirm", "logout"] {
        assert_eq!(get(page, Duration::hours(1)).await.status, 200, "{page}");
    }
    let recent = get("login", Duration::ZERO).await;
    assert_page_error(&recent, 503, "temporarily_unavailable");
    assert_eq!(recent.header("retry-after"), Some("2"));
    let login = get("account", Duration::hours(1)).await;
    assert_eq!(login.status, 303);
    let cleared = login.header("set-cookie").unwrap();
    assert!(cleared.starts_with("__Host-latchkey-session.shop=; Max-Age=0;"), "{cleared}");
}

#[tokio::test]
async fn an_account_form_of_another_user_changes_nothing() {
    let server = server(FailingStores::Panicking);
    let opened = TestBrowser::open_page(&server).await;
    let app = server.state.apps.get("shop").unwrap();
    // Ada's form is open in one tab. In another tab, Eve has logged in.
    let headers = opened.cookie.replace("\r\n", &format!("; {}\r\n{ORIGIN}", session_cookie(&app, 8, Duration::ZERO)));
    let field = user_token(&app, UserId(Uuid::from_u128(7)));
    let body = format!("{FORM}&name=Ada&csrf={}&user={field}", opened.csrf);
    for page in PAGES.into_iter().filter(|page| page.starts_with("account") && !page.ends_with("activity")) {
        let reply = post_form(&server, &format!("/shop/{page}"), &headers, &body).await;
        assert_eq!((reply.status, reply.header("location")), (303, Some("/shop/account")), "{page}");
    }
    // Without a session, this form leads to the login, as all account forms do.
    let body = format!("{FORM}&csrf={}&user={field}", opened.csrf);
    let reply = post_form(&server, "/shop/account/delete", &format!("{}{ORIGIN}", opened.cookie), &body).await;
    assert!(reply.header("location").unwrap().starts_with("/shop/login?tx="), "{}", reply.body);
}

#[tokio::test]
async fn a_notice_names_only_an_address_that_the_browser_has_sent() {
    let server = server(FailingStores::Panicking);
    let (own, other) = (TestBrowser::open_page(&server).await, TestBrowser::open_page(&server).await);
    let app = server.state.apps.get("shop").unwrap();
    let cookie = own.cookie.trim_end().rsplit_once('=').unwrap().1;
    let (browser, email) = (BrowserId::parse(cookie).unwrap(), Email::parse("Ada@example.com").unwrap());
    let address = seal_address(&Env::system(), &app, &browser, &email);
    let get = async |path: &str, headers: &str| server.send_request(get_request(path, headers)).await.body;
    let notice = get(&format!("/shop/forgot?notice=sent&address={address}"), &own.cookie).await;
    assert!(notice.contains("If Ada@example.com has an account"), "{notice}");
    assert!(notice.contains("/shop/reset?address=") && !notice.contains("email=Ada"), "{notice}");
    let reset = get(&format!("/shop/reset?address={address}"), &own.cookie).await;
    assert!(reset.contains("value=\"Ada@example.com\""), "{reset}");
    for (query, headers) in [
        (format!("address={address}"), &other.cookie),
        (format!("address={address}x"), &own.cookie),
        ("address=Ada@example.com".to_owned(), &own.cookie),
        ("email=Ada@example.com".to_owned(), &own.cookie),
        ("email=Your+account+is+locked.+Call".to_owned(), &own.cookie),
    ] {
        let form = get(&format!("/shop/forgot?notice=sent&{query}"), headers).await;
        assert!(!form.contains("has an account") && form.contains("action=\"/shop/forgot\""), "{query}: {form}");
    }
}

#[tokio::test]
async fn an_empty_tx_counts_as_missing() {
    let server = server(FailingStores::Panicking);
    let opened = TestBrowser::open_page(&server).await;
    let shown = server.send_request(get_request("/shop/login?tx=", &opened.cookie)).await;
    assert_eq!(shown.status, 200, "{}", shown.body);
    let body = format!("email=x&tx=&csrf={}", opened.csrf);
    let sent = post_form(&server, "/shop/login", &format!("{}{ORIGIN}", opened.cookie), &body).await;
    assert_page_error(&sent, 400, "invalid_request");
}

#[tokio::test]
async fn a_form_without_a_session_changes_nothing() {
    let server = server(FailingStores::Panicking);
    let opened = TestBrowser::open_page(&server).await;
    let body = format!("{FORM}&csrf={}&name=Eve&action=end_others", opened.csrf);
    for page in PAGES.into_iter().filter(|page| page.starts_with("account") && !page.ends_with("activity")) {
        let headers = format!("{}{ORIGIN}", opened.cookie);
        let reply = post_form(&server, &format!("/shop/{page}"), &headers, &body).await;
        assert_eq!(reply.status, 303, "{page}");
        assert!(reply.header("location").unwrap().starts_with("/shop/login?tx="), "{page}");
    }
}

#[tokio::test]
async fn a_form_that_is_too_large_or_repeats_a_field_is_refused() {
    let server = server(FailingStores::Panicking);
    let opened = TestBrowser::open_page(&server).await;
    let headers = format!("{}{ORIGIN}", opened.cookie);
    let fields = format!("{FORM}&csrf={}", opened.csrf);
    for repeated in ["email=x", "%65mail=x", "csrf=x", "tx=x&tx=x"] {
        let reply = post_form(&server, "/shop/login", &headers, &format!("{fields}&{repeated}")).await;
        assert_page_error(&reply, 400, "invalid_request");
    }
    let many = format!("{fields}{}", (0..62).map(|number| format!("&f{number}=x")).collect::<String>());
    assert_page_error(&post_form(&server, "/shop/login", &headers, &many).await, 400, "invalid_request");
    let query = format!("/shop/login?{}", "x&".repeat(65));
    assert_page_error(&server.send_request(get_request(&query, &opened.cookie)).await, 400, "invalid_request");
    let long = format!("{fields}&name={}", "x".repeat(64 * 1024));
    assert_page_error(&post_form(&server, "/shop/login", &headers, &long).await, 413, "payload_too_large");
    let json = server.post("/shop/login", &headers, "{}").await;
    assert_page_error(&json, 415, "unsupported_media_type");
}

#[tokio::test]
async fn an_invalid_field_is_marked_and_a_password_is_not_filled_in() {
    let server = server(FailingStores::Panicking);
    let opened = TestBrowser::open_page(&server).await;
    let headers = format!("{}{ORIGIN}", opened.cookie);
    let body = format!("email=%22%3E%3Cscript%3E&password=p4ssw0rd-in-clear&csrf={}", opened.csrf);
    let reply = post_form(&server, "/shop/login", &headers, &body).await;
    assert_page_error(&reply, 400, "invalid_request");
    assert!(reply.body.contains("aria-invalid=\"true\""), "{}", reply.body);
    assert!(!reply.body.contains("<script>") && !reply.body.contains("p4ssw0rd"), "{}", reply.body);
}

#[tokio::test]
async fn an_outage_and_a_limit_are_error_pages() {
    for (stores, status, code) in [
        (FailingStores::Unavailable, 503, "temporarily_unavailable"),
        (FailingStores::Limited, 429, "rate_limited"),
        (FailingStores::Overloaded, 503, "temporarily_unavailable"),
        (FailingStores::Broken, 500, "server_error"),
    ] {
        let server = server(stores);
        let opened = TestBrowser::open_page(&server).await;
        let headers = format!("{}{ORIGIN}X-Request-Id: request-7\r\n", opened.cookie);
        let reply = post_form(&server, "/shop/login", &headers, &format!("{FORM}&csrf={}", opened.csrf)).await;
        assert_page_error(&reply, status, code);
        assert_eq!(reply.header("retry-after").is_some(), status != 500);
        assert!(reply.body.contains("request-7") && !reply.body.contains("secret-host"), "{}", reply.body);
    }
}

#[tokio::test]
async fn a_hostile_transaction_is_refused() {
    let server = server(FailingStores::Panicking);
    let (own, other) = (TestBrowser::open_page(&server).await, TestBrowser::open_page(&server).await);
    let first = server.send_request(get_request("/shop/account", &own.cookie)).await;
    let tx = first.header("location").unwrap().split_once("tx=").unwrap().1.to_owned();
    let good = server.send_request(get_request(&format!("/shop/login?tx={tx}"), &own.cookie)).await;
    assert_eq!((good.status, hidden_field(&good.body, "tx")), (200, tx.as_str()));

    let mut hostile: Vec<String> = (0..tx.len()).step_by(tx.len() / 30).map(|at| replace_char(&tx, at)).collect();
    hostile.extend((1..8).map(|cut| tx[..tx.len() - cut].to_owned()));
    hostile.extend([
        "x".to_owned(),
        "%00".to_owned(),
        "..%2Faccount".to_owned(),
        "https:%2F%2Fevil.example".to_owned(),
        "%22%3E%3Cscript%3E".to_owned(),
        "{\"t\":{\"account\":\"overview\"}}".replace('"', "%22"),
        "%C3%A9".repeat(20),
        "A".repeat(6_000),
        "A".repeat(6_001),
        "A".repeat(20_000),
        format!("{tx}A"),
        format!("{tx}="),
        format!("+{tx}"),
        format!("{tx}{tx}"),
        other.csrf.clone(),
        own.csrf.clone(),
    ]);
    assert!(hostile.len() >= 50, "{}", hostile.len());
    for tx in &hostile {
        for path in ["login", "register", "confirm", "account"] {
            let reply = server.send_request(get_request(&format!("/shop/{path}?tx={tx}"), &own.cookie)).await;
            assert_page_error(&reply, 400, "invalid_state");
            assert!(!reply.body.contains("<script>"), "{}", reply.body);
        }
    }
    for headers in ["", other.cookie.as_str()] {
        let reply = server.send_request(get_request(&format!("/shop/login?tx={tx}"), headers)).await;
        assert_page_error(&reply, 400, "invalid_state");
    }
    let twice = server.send_request(get_request(&format!("/shop/login?tx={tx}&tx={tx}"), &own.cookie)).await;
    assert_page_error(&twice, 400, "invalid_request");
    let not_utf_8 = server.send_request(get_request("/shop/login?tx=%FF", &own.cookie)).await;
    assert_page_error(&not_utf_8, 400, "invalid_request");
}

/// The text with a different character at this index.
fn replace_char(text: &str, at: usize) -> String {
    let other = if text.as_bytes()[at] == b'A' { 'B' } else { 'A' };
    text.char_indices().map(|(index, char)| if index == at { other } else { char }).collect()
}

#[tokio::test]
async fn files_are_cached_forever_only_at_the_url_of_their_content() {
    let logo =
        RenderedLogo { content_type: "image/svg+xml".to_owned(), data: Base64Bytes(Vec::from(&b"<svg/>"[..]).into()) };
    let server = TestServer::with_app(FailingStores::Panicking, |app| {
        let mut pages = fixtures::pages();
        pages.theme.logo = Some(logo);
        app.pages = Some(pages);
    });
    let page = server.send_request(get_request("/shop/login", "")).await;
    let links: Vec<&str> =
        page.body.split('"').filter(|text| text.starts_with("/shop/") || text.starts_with("/assets/")).collect();
    for (begin, content_type) in [
        ("/assets/pages.", "text/css; charset=utf-8"),
        ("/assets/show-password.", "text/javascript; charset=utf-8"),
        ("/shop/theme.css?v=", "text/css; charset=utf-8"),
        ("/shop/logo?v=", "image/svg+xml"),
    ] {
        let link = links.iter().find(|link| link.starts_with(begin)).unwrap();
        let current = server.send_request(get_request(link, "")).await;
        assert_eq!((current.status, current.header("content-type")), (200, Some(content_type)), "{link}");
        assert_eq!(current.header("cache-control"), Some("public, max-age=31536000, immutable"));
        assert_eq!(current.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(current.header("set-cookie"), None);
        let other = match link.strip_prefix("/assets/").and_then(|name| name.rsplit_once('.')) {
            Some((_, extension)) => format!("{begin}AAAAAAAAAAAA.{extension}"),
            None => format!("{begin}AAAAAAAAAAAA"),
        };
        let other = server.send_request(get_request(&other, "")).await;
        assert_eq!((other.status, other.header("cache-control")), (200, Some("no-store")), "{link}");
        assert_eq!(other.body, current.body);
        assert_eq!(current.header("clear-site-data"), None);
        let is_logo = begin.contains("logo");
        assert_eq!(current.header("content-security-policy").unwrap().ends_with("; sandbox"), is_logo);
    }
    for path in ["/assets/", "/assets/pages.css", "/assets/../openapi.json", "/assets/x/pages.AAAAAAAAAAAA.css"] {
        server.send_request(get_request(path, "")).await.assert_refused(404, "not_found");
    }
    let reply = server.send_request(get_request("/assets/pages.AAAAAAAAAAAA.css", "").replacen("GET", "POST", 1)).await;
    reply.assert_refused(405, "method_not_allowed");
    // This response makes browsers forget the pages of the account.
    let after_logout = server.send_request(get_request("/shop/theme.css?v=logout", "")).await;
    assert_eq!((after_logout.status, after_logout.header("cache-control")), (200, Some("no-store")));
    assert_eq!(after_logout.header("clear-site-data"), Some("\"cache\""));
    let without_logo = self::server(FailingStores::Panicking);
    assert_page_error(&without_logo.send_request(get_request("/shop/logo", "")).await, 404, "not_found");
}

#[tokio::test]
async fn the_language_is_chosen_by_parameter_cookie_and_header() {
    let server = server(FailingStores::Panicking);
    let lang = async |query: &str, headers: &str| {
        let reply = server.send_request(get_request(&format!("/shop/login{query}"), headers)).await;
        let (_, rest) = reply.body.split_once("<html lang=\"").unwrap();
        (rest[..2].to_owned(), reply.header("set-cookie").unwrap_or_default().to_owned())
    };
    assert_eq!(lang("", "").await.0, "en");
    assert_eq!(lang("", "Accept-Language: fr, de-AT;q=0.9, en;q=0.5\r\n").await.0, "de");
    let cookie = "Cookie: __Host-latchkey-lang=de; __Host-latchkey-browser=AAAAAAAAAAAAAAAAAAAAAA\r\n";
    assert_eq!(lang("", cookie).await, ("de".to_owned(), String::new()));
    let (language, set_cookie) = lang("?lang=en", cookie).await;
    assert_eq!(language, "en");
    assert!(set_cookie.starts_with("__Host-latchkey-lang=en; Max-Age=31536000;"), "{set_cookie}");
    assert_eq!(lang("?lang=tlh", cookie).await, ("de".to_owned(), String::new()), "an unknown language is not stored");
}

#[tokio::test]
async fn an_own_host_has_only_the_pages_of_its_app() {
    let server = TestServer::with_app(FailingStores::Panicking, |app| {
        let mut pages = fixtures::pages();
        pages.host = Some("login.shop.example".parse().unwrap());
        app.pages = Some(pages);
    });
    let mut other = fixtures::rendered("other");
    other.pages = Some(fixtures::pages());
    server.state.apps.put(&"other".parse().unwrap(), &other.to_bytes());
    let get = async |host: &str, path: &str| {
        server.send_request(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")).await
    };
    for host in ["login.shop.example", "Login.Shop.Example", "login.shop.example:8443"] {
        assert_eq!(get(host, "/shop/login").await.status, 200, "{host}");
        get(host, "/other/login").await.assert_refused(404, "not_found");
        assert_eq!(get(host, "/shop/.well-known/jwks.json").await.status, 200, "every other path is everywhere");
        assert_eq!(get(host, "/assets/pages.AAAAAAAAAAAA.css").await.status, 200);
    }
    for host in hostile_hosts() {
        let moved = get(&host, "/shop/confirm?code=A%20B&lang=de").await;
        assert_eq!(moved.status, 302, "{host}");
        let location = "https://login.shop.example/shop/confirm?code=A%20B&lang=de";
        assert_eq!(moved.header("location"), Some(location), "{host}");
        assert_eq!(get(&host, "/other/login").await.status, 200, "{host}");
        let post =
            format!("POST /shop/login HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
        server.send_request(post).await.assert_refused(404, "not_found");
    }
}

#[tokio::test]
async fn an_own_host_that_is_the_host_of_the_base_url_is_ignored() {
    let server = TestServer::with_app(FailingStores::Panicking, |app| {
        let mut pages = fixtures::pages();
        pages.host = Some("auth.example.com".parse().unwrap());
        app.pages = Some(pages);
    });
    let mut other = fixtures::rendered("other");
    other.pages = Some(fixtures::pages());
    server.state.apps.put(&"other".parse().unwrap(), &other.to_bytes());
    for host in ["auth.example.com", "AUTH.example.com:443", "a"] {
        for path in ["/shop/login", "/other/login"] {
            let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
            assert_eq!(server.send_request(request).await.status, 200, "{host} {path}");
        }
    }
}

/// A server with an App with two providers. One provider is down.
fn server_with_providers(edit: impl FnOnce(&mut RenderedApp)) -> TestServer {
    TestServer::with_app(FailingStores::Panicking, |app| {
        app.pages = Some(fixtures::pages());
        app.providers = ["corp", DOWN].map(provider).into();
        edit(app);
    })
}

fn provider(name: &str) -> RenderedProvider {
    let provider = json!({
        "name": name,
        "resource": name,
        "linkByEmail": true,
        "settings": { "preset": "github", "clientID": "client", "secret": "secret" },
    });
    serde_json::from_value(provider).unwrap()
}

/// Starts a login with a provider. Returns the path of *redirect*, and the cookies that the browser then has.
async fn start_login(server: &TestServer, provider: &str) -> (String, String) {
    let opened = TestBrowser::open_page(server).await;
    let started = server.send_request(get_request(&format!("/shop/login?provider={provider}"), &opened.cookie)).await;
    assert_eq!(started.status, 303, "{}", started.body);
    let cookie = started.header("set-cookie").unwrap().split(';').next().unwrap();
    let redirect = started.header("location").unwrap().strip_prefix("https://auth.example.com").unwrap();
    (redirect.to_owned(), opened.cookie.replace("\r\n", &format!("; {cookie}\r\n")))
}

#[tokio::test]
async fn a_social_login_that_cannot_start_returns_to_the_login_page() {
    let server = server_with_providers(|_| {});
    let (redirect, cookies) = start_login(&server, DOWN).await;
    let returned = server.send_request(get_request(&redirect, "")).await;
    assert_eq!((returned.status, returned.header("referrer-policy")), (302, Some("no-referrer")));
    assert_eq!((returned.header("cache-control"), returned.header("set-cookie")), (Some("no-store"), None));
    let target = returned.header("location").unwrap().strip_prefix("https://auth.example.com").unwrap();
    assert!(target.starts_with("/shop/continue?error=temporarily_unavailable&state="), "{target}");
    let login = server.send_request(get_request(target, &cookies)).await;
    assert_eq!((login.status, login.header("location")), (303, Some("/shop/login?error=temporarily_unavailable")));
    assert!(login.header("set-cookie").unwrap().contains("=; Max-Age=0;"), "the login has ended");

    // All other calls get JSON: a call with a `state` that no page has encrypted, and a call from an application.
    let (url, _) = redirect.split_once("&state=").unwrap();
    let refused = server.send_request(get_request(&format!("{url}&state=x"), "")).await;
    refused.assert_refused(400, "redirect_url_not_allowed");
    let application = server.send_request(get_request("/shop/down/redirect", "")).await;
    application.assert_refused(503, "temporarily_unavailable");
}

#[tokio::test]
async fn redirect_accepts_the_url_of_a_page_only_from_the_pages_even_if_the_app_lists_it() {
    let url = "https://auth.example.com/shop/continue";
    let server = server_with_providers(|app| app.redirect_urls = vec![url.parse().unwrap()]);
    let (redirect, _) = start_login(&server, "corp").await;
    let (path, query) = redirect.split_once('?').unwrap();
    for refused in [
        path.to_owned(),
        format!("{path}?redirect_url={url}"),
        format!("{path}?format=json"),
        format!("{redirect}&format=json"),
        format!("{path}?format=json&redirect_url={url}&state=x"),
    ] {
        let reply = server.send_request(get_request(&refused, "Sec-Fetch-Site: same-site\r\n")).await;
        reply.assert_refused(400, "redirect_url_not_allowed");
        assert_eq!(reply.header("set-cookie"), None, "{refused}");
    }
    assert_eq!(server.send_request(get_request(&format!("{path}?{query}"), "")).await.status, 302);
}

#[tokio::test]
async fn another_site_cannot_start_a_social_login() {
    let server = server_with_providers(|_| {});
    let opened = TestBrowser::open_page(&server).await;
    for (site, status) in [("cross-site", 200), ("same-site", 200), ("same-origin", 303), ("none", 303)] {
        let headers = format!("{}Sec-Fetch-Site: {site}\r\n", opened.cookie);
        let reply = server.send_request(get_request("/shop/login?provider=corp", &headers)).await;
        assert_eq!((reply.status, reply.header("set-cookie").is_some()), (status, status == 303), "{site}");
        assert_eq!(reply.body.contains("/shop/login?provider=corp"), status == 200, "{site}");
    }
}

/// Values of `Host` that are not the own host.
fn hostile_hosts() -> Vec<String> {
    let mut hosts: Vec<String> = [
        "auth.example.com",
        "a",
        "evil.example",
        "login.shop.example.",
        "login.shop.example.evil.example",
        "evil.login.shop.example",
        "shop.example",
        "login.shop",
        "login-shop.example",
        "loginxshop.example",
        "login.shop.example@evil.example",
        "evil@login.shop.example",
        "user:pass@login.shop.example",
        "127.0.0.1",
        "127.0.0.1:8080",
        "[::1]",
        "[::1]:8080",
        "localhost",
        "xn--login.shop.example",
        "login..shop.example",
        ".login.shop.example",
        "-login.shop.example",
        "login_shop.example",
        "1",
        "0x7f.1",
        "login.shop.example%00",
        "login.shop.example%2e",
        "login%2eshop.example",
        "login.shop.example:x",
        "login.shop.example/",
        "login.shop.example/x",
        "login.shop.example?x",
        "login.shop.example#x",
        "https://login.shop.example",
        "login.shop.example,evil.example",
        "login.shop.example evil.example",
        "login.shop.example;x",
        "\"login.shop.example\"",
        "<script>",
        "*",
        "*.shop.example",
        "$host",
        "{{host}}",
        "login.shop.example\\x",
        "login.shop.example&x",
        "login.shop.example=x",
        "..",
        "/",
        ":",
        ":443",
        "@",
    ]
    .map(str::to_owned)
    .into();
    hosts.push(format!("{}.example", "a".repeat(300)));
    assert!(hosts.len() >= 50);
    hosts
}

#[tokio::test]
async fn a_closed_registration_has_no_page_and_no_link() {
    let server = TestServer::with_app(FailingStores::Panicking, |app| {
        app.sign_up = SignUp::Closed;
        app.pages = Some(fixtures::pages());
    });
    assert_page_error(&server.send_request(get_request("/shop/register", "")).await, 403, "registration_disabled");
    let login = server.send_request(get_request("/shop/login", "")).await;
    assert!(!login.body.contains("/shop/register"), "{}", login.body);
}

#[tokio::test]
async fn requests_for_pages_are_counted_by_page_and_outcome() {
    let server = server(FailingStores::Unavailable);
    let opened = TestBrowser::open_page(&server).await;
    let headers = format!("{}{ORIGIN}", opened.cookie);
    let csrf = &opened.csrf;
    post_form(&server, "/shop/login", &headers, &format!("{FORM}&csrf={csrf}")).await;
    post_form(&server, "/shop/login", &headers, &format!("email=x&csrf={csrf}")).await;
    server.send_request(get_request("/shop/account/email", "")).await;
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &server.registry).unwrap();
    for line in [
        "pages_total{page=\"login\",outcome=\"shown\"} 1",
        "pages_total{page=\"login\",outcome=\"error\"} 1",
        "pages_total{page=\"login\",outcome=\"refused\"} 1",
        "pages_total{page=\"account-email\",outcome=\"done\"} 1",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}
