//! The logout that a Client asks for.

use http::{Method, StatusCode};
use latchkey_tests::{builders::Client, page_browser::PageBrowser};
use serde_json::json;

use super::provider_test::{EMAIL, ProviderTest};

const LOGOUT_REDIRECT_URL: &str = "https://grafana.example.com/bye";

fn with_logout_url(client: Client) -> Client {
    client.set_own("postLogoutRedirectURLs", json!([LOGOUT_REDIRECT_URL]))
}

fn logout_path(test: &ProviderTest, sent: &[(&str, &str)]) -> String {
    let query = url::form_urlencoded::Serializer::new(String::new()).extend_pairs(sent).finish();
    test.path(&format!("logout?{query}"))
}

async fn is_logged_in(test: &ProviderTest, browser: &mut PageBrowser) -> bool {
    browser.open(&test.path("account/sessions")).await.path() == test.path("account/sessions")
}

/// An ID token of the browser's session.
async fn id_token(test: &ProviderTest, browser: &mut PageBrowser) -> String {
    let code = test.code(browser, &[]).await;
    test.exchange(&code).await.expect(StatusCode::OK).string("id_token").to_owned()
}

#[tokio::test]
async fn an_id_token_of_the_session_logs_out_immediately() {
    let test = ProviderTest::with_client(with_logout_url).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let hint = id_token(&test, &mut browser).await;
    let path = logout_path(
        &test,
        &[("id_token_hint", &hint), ("post_logout_redirect_uri", LOGOUT_REDIRECT_URL), ("state", "a b")],
    );
    // A link scanner that sends HEAD logs nobody out.
    let client = test.test_app.client();
    let cookies: Vec<String> = browser.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let head = client.send(client.request(Method::HEAD, &path).header("cookie", cookies.join("; "))).await;
    assert_eq!(head.status, StatusCode::OK);
    assert!(is_logged_in(&test, &mut browser).await);

    let done = browser.open(&path).await;
    assert_eq!(done.external, Some(format!("{LOGOUT_REDIRECT_URL}?state=a%20b")));
    assert!(!browser.cookies.keys().any(|name| name.starts_with("latchkey-session.")), "{:?}", browser.cookies);
    assert!(!is_logged_in(&test, &mut browser).await);
    // A second logout, without a session, redirects immediately, too.
    assert_eq!(browser.open(&path).await.external, Some(format!("{LOGOUT_REDIRECT_URL}?state=a%20b")));
}

#[tokio::test]
async fn a_logout_without_an_id_token_of_the_session_asks_the_user_first() {
    let test = ProviderTest::with_client(with_logout_url).await;
    let mut other = test.logged_in_browser(EMAIL).await;
    let old_hint = id_token(&test, &mut other).await;
    let mut browser = test.new_browser();
    let login = browser.open(&test.path("login")).await;
    test.log_in_at(&mut browser, &login, EMAIL).await;
    let client_id = test.client.client_id();
    for sent in [
        &[("client_id", client_id.as_str()), ("post_logout_redirect_uri", LOGOUT_REDIRECT_URL), ("state", "s")][..],
        &[("id_token_hint", old_hint.as_str()), ("post_logout_redirect_uri", LOGOUT_REDIRECT_URL), ("state", "s")],
    ] {
        let question = browser.open(&logout_path(&test, sent)).await.expect_at(&test.path("logout"));
        assert!(!question.html.contains(&old_hint));
        assert!(is_logged_in(&test, &mut browser).await, "the page only asks");
        let mut leaving = browser.clone();
        let german = leaving.open(&question.links().into_iter().find(|link| link.contains("lang=de")).unwrap()).await;
        let german = german.expect_at(&test.path("logout"));
        assert!(german.html.contains("<html lang=\"de\""));
        assert_eq!(german.form(&test.path("logout")).fields.len(), 2, "csrf and tx");
    }
    let sent = [("client_id", client_id.as_str()), ("post_logout_redirect_uri", LOGOUT_REDIRECT_URL)];
    let question = browser.open(&logout_path(&test, &sent)).await;
    let done = browser.submit(&question, &test.path("logout"), &[]).await;
    assert_eq!(done.external.as_deref(), Some(LOGOUT_REDIRECT_URL));
    assert!(!is_logged_in(&test, &mut browser).await);
    assert!(is_logged_in(&test, &mut other).await, "only this browser is logged out");
}

#[tokio::test]
async fn a_wrong_request_logs_nobody_out() {
    let test = ProviderTest::with_client(with_logout_url).await;
    let other = Client::web("other", &test.test_app.app, "https://other.example.com/callback");
    test.apply(&other).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let hint = id_token(&test, &mut browser).await;
    let (client_id, other_id) = (test.client.client_id(), other.client_id());
    let (hint, client_id, other_id) = (hint.as_str(), client_id.as_str(), other_id.as_str());
    let forged = format!("{}x", &hint[..hint.len() - 1]);
    let cases: [(&[(&str, &str)], &str); 6] = [
        (&[("post_logout_redirect_uri", LOGOUT_REDIRECT_URL)], "invalid_request"),
        (&[("id_token_hint", forged.as_str())], "invalid_request"),
        (&[("id_token_hint", hint), ("client_id", other_id)], "invalid_request"),
        (&[("client_id", other_id), ("post_logout_redirect_uri", LOGOUT_REDIRECT_URL)], "redirect_url_not_allowed"),
        (&[("id_token_hint", hint), ("post_logout_redirect_uri", "https://evil.example")], "redirect_url_not_allowed"),
        (&[("client_id", client_id), ("client_id", client_id)], "invalid_request"),
    ];
    for (sent, code) in cases {
        browser.open(&logout_path(&test, sent)).await.expect_error(400, code);
        assert!(is_logged_in(&test, &mut browser).await, "{code}");
    }
}

#[tokio::test]
async fn a_post_from_another_site_logs_out_immediately_only_with_the_id_token_of_the_session() {
    let test = ProviderTest::with_client(with_logout_url).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let hint = id_token(&test, &mut browser).await;
    let post = async |browser: &PageBrowser, sent: &[(&str, &str)]| {
        let fields: Vec<(String, String)> =
            sent.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let mut without_cookies = browser.clone();
        without_cookies.cookies.clear();
        let origin = [("origin", "https://grafana.example.com")];
        let posted = without_cookies.post(&test.path("logout"), &fields, &origin).await;
        assert_eq!((posted.status, posted.headers.get("set-cookie")), (StatusCode::SEE_OTHER, None));
        posted.header("location").unwrap().to_owned()
    };
    let client_id = test.client.client_id();
    let asked = post(&browser, &[("client_id", &client_id)]).await;
    browser.open(&asked).await.expect_at(&test.path("logout"));
    let empty = post(&browser, &[]).await;
    browser.open(&empty).await.expect_at(&test.path("logout"));
    assert!(is_logged_in(&test, &mut browser).await);
    let hinted = post(&browser, &[("id_token_hint", &hint), ("post_logout_redirect_uri", LOGOUT_REDIRECT_URL)]).await;
    assert_eq!(browser.open(&hinted).await.external.as_deref(), Some(LOGOUT_REDIRECT_URL));
    assert!(!is_logged_in(&test, &mut browser).await);
}

#[tokio::test]
async fn the_logout_page_works_without_parameters() {
    let test = ProviderTest::start().await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let question = browser.open(&test.path("logout")).await.expect_at(&test.path("logout"));
    let done = browser.submit(&question, &test.path("logout"), &[]).await.expect_at(&test.path("logout"));
    assert!(done.text().contains("You are logged out"), "{}", done.html);
    assert!(!is_logged_in(&test, &mut browser).await);
}

#[tokio::test]
async fn offline_access_continues_after_the_logout() {
    let test = ProviderTest::with_client(with_logout_url).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let code = test.code(&mut browser, &[("scope", "openid offline_access")]).await;
    let tokens = test.exchange(&code).await.expect(StatusCode::OK);
    let (access, refresh) = (tokens.string("access_token").to_owned(), tokens.string("refresh_token").to_owned());
    let code = test.code(&mut browser, &[]).await;
    let online = test.exchange(&code).await.expect(StatusCode::OK).string("access_token").to_owned();
    let question = browser.open(&test.path("logout")).await;
    browser.submit(&question, &test.path("logout"), &[]).await.expect_at(&test.path("logout"));
    let id = test.test_app.id();
    let userinfo = async |token: &str| test.test_app.client().with_token(id, token).get("userinfo").await;
    userinfo(&access).await.expect(StatusCode::OK);
    userinfo(&online).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    test.refresh(&refresh).await.expect(StatusCode::OK);
}
