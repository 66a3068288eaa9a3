//! Forms from other browsers, Apps and sites, and markup in the input from users.

use http::StatusCode;
use latchkey_tests::{
    page_browser::PageBrowser,
    passwords::{PASSWORD, WRONG_PASSWORD},
    stack::Stack,
};
use serde_json::json;

use super::{EMAIL, PagesTest, app};
use crate::support::TestApp;

const MARKUP: &str = "\"'><script>alert(1)</script>{{ csrf }}&amp;</title>";

fn fields(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// The field `csrf` of the browser's forms.
async fn csrf(pages: &PagesTest, browser: &mut PageBrowser) -> String {
    let login = pages.open(browser, "forgot").await;
    login.form(&pages.path("forgot")).value("csrf").to_owned()
}

#[tokio::test]
async fn a_form_from_another_browser_app_or_site_changes_nothing() {
    let other_app = app();
    let pages = PagesTest::of(app(), Stack::builder().app(&other_app)).await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let own = csrf(&pages, &mut browser).await;
    let other_browser = csrf(&pages, &mut pages.new_browser()).await;
    let path = format!("/{}/forgot", other_app.id());
    let other = browser.open(&path).await.form(&path).value("csrf").to_owned();
    let delete = pages.path("account/delete");
    for csrf in ["", "x", &other_browser, &other] {
        let refused = browser.post(&delete, &fields(&[("password", PASSWORD), ("csrf", csrf)]), &[]).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{}", refused.text);
    }
    let without = browser.post(&delete, &fields(&[("password", PASSWORD)]), &[]).await;
    assert_eq!(without.status, StatusCode::BAD_REQUEST, "{}", without.text);
    let good = fields(&[("password", PASSWORD), ("csrf", &own)]);
    for origin in ["null", "https://shop.example.com", "https://evil.example"] {
        let refused = browser.post(&delete, &good, &[("origin", origin)]).await;
        assert_eq!(refused.status, StatusCode::FORBIDDEN, "{origin}");
    }
    let mut without_browser = browser.clone();
    assert!(without_browser.forget("latchkey-browser"));
    let refused = without_browser.post(&delete, &good, &[]).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{}", refused.text);
    assert!(pages.is_logged_in(&mut browser).await);

    let deleted = browser.post(&delete, &good, &[]).await;
    assert_eq!(deleted.status, StatusCode::SEE_OTHER, "{}", deleted.text);
    assert!(!pages.is_logged_in(&mut browser).await);
}

#[tokio::test]
async fn a_form_after_the_end_of_the_session_changes_nothing_and_leads_to_the_login() {
    let pages = PagesTest::start().await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let account = pages.open(&mut browser, "account").await;
    let client = pages.test_app.client().authenticate(pages.test_app.id(), EMAIL, PASSWORD).await;
    client.delete("sessions").await.expect(StatusCode::OK);
    let login = browser.submit(&account, &pages.path("account"), &[("name", "Eve")]).await;
    let login = login.expect_at(&pages.path("login"));
    let fields = [("email", EMAIL), ("password", PASSWORD)];
    let account = browser.submit(&login, &pages.path("login"), &fields).await.expect_at(&pages.path("account"));
    assert!(!account.html.contains("Eve"), "{}", account.html);
}

#[tokio::test]
async fn a_forged_session_cookie_is_rejected() {
    let pages = PagesTest::start().await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let name = format!("latchkey-session.{}", pages.test_app.id());
    let cookie = browser.cookies[&name].clone();
    for at in 0..cookie.len() {
        let mut bytes = cookie.clone().into_bytes();
        bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
        browser.cookies.insert(name.clone(), String::from_utf8(bytes).unwrap());
        let response = browser.get(&pages.path("account/sessions")).await;
        // The cookie contains the number of its key. The response is 503 if the changed number can be that of a newer
        // key, which this server does not have yet.
        assert!(matches!(response.status.as_u16(), 303 | 503), "{at}: {}", response.text);
        browser.cookies.insert(name.clone(), cookie.clone());
    }
    assert!(pages.is_logged_in(&mut browser).await);
}

#[tokio::test]
async fn markup_in_names_and_texts_is_shown_as_text() {
    let hostile = app().set("/displayName", "<b>Shop</b>");
    let pages = PagesTest::of(hostile, Stack::builder()).await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let saved = pages.fill_in(&mut browser, "account", &[("name", MARKUP)]).await.expect_at(&pages.path("account"));
    assert_eq!(saved.form(&pages.path("account")).value("name"), MARKUP);
    let refused = pages.log_in(&mut pages.new_browser(), MARKUP, WRONG_PASSWORD).await;
    let refused = refused.expect_error(400, "invalid_request");
    assert_eq!(refused.form(&pages.path("login")).value("email"), MARKUP);
    let query = url::form_urlencoded::byte_serialize(MARKUP.as_bytes()).collect::<String>();
    let mut shown = vec![saved, refused];
    for page in ["confirm?code=", "reset?code=x&email=", "forgot?notice=sent&email=", "login?notice=", "login?error="] {
        shown.push(pages.open(&mut pages.new_browser(), &format!("{page}{query}")).await);
    }
    for page in shown {
        assert!(!page.html.contains("<script>") && !page.html.contains("<b>Shop"), "{}", page.html);
    }
}

#[tokio::test]
async fn pages_appear_and_disappear_when_their_mode_changes() {
    let disabled = crate::fault_support::unlimited_app("pages");
    let mut pages = PagesTest { test_app: TestApp::start_with(disabled.clone()).await };
    let client = pages.test_app.client();
    for page in ["login", "account", "theme.css", "logo", "continue"] {
        let unknown = client.get(&pages.path("nothing")).await.expect_error(StatusCode::NOT_FOUND, "not_found");
        let response = client.get(&pages.path(page)).await.expect_error(StatusCode::NOT_FOUND, "not_found");
        let without_id = |text: &str, id: &str| text.replace(id, "ID");
        assert_eq!(
            without_id(&response.text, response.header("x-request-id").unwrap()),
            without_id(&unknown.text, unknown.header("x-request-id").unwrap()),
        );
    }
    pages.test_app.apply(disabled.clone().set("/pages/mode", "Enabled")).await;
    pages.open(&mut pages.new_browser(), "login").await.expect_at(&pages.path("login"));
    pages.test_app.apply(disabled.set("/pages/mode", "Disabled")).await;
    client.get(&pages.path("login")).await.expect_error(StatusCode::NOT_FOUND, "not_found");
}

#[tokio::test]
async fn the_links_of_the_app_are_on_its_pages() {
    let linked = app()
        .set("/pages/links", json!({ "home": "https://shop.example.com/", "terms": "https://shop.example.com/terms" }));
    let pages = PagesTest::of(linked, Stack::builder()).await;
    let links = pages.open(&mut pages.new_browser(), "login").await.links();
    for link in ["https://shop.example.com/", "https://shop.example.com/terms"] {
        assert!(links.iter().any(|found| found == link), "{links:?}");
    }
}
