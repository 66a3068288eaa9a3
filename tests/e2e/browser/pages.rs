//! Browsers as users have them: without scripts, without cookies, with two tabs and a back button.

use latchkey_tests::{browser::Browser, page_tour::PageTour, passwords::PASSWORD, stack::Stack, tls::ServerTls};

use crate::pages::{EMAIL, PagesTest, app};

/// The minimum number of page states that a walk visits.
const MIN_STOPS: usize = 25;

#[tokio::test]
async fn every_page_and_flow_works_without_scripts() {
    let browser = Browser::start_without_scripts().await.unwrap();
    browser.open("data:text/html,<title>off</title><script>document.title = 'on'</script>").await;
    assert_eq!(browser.title().await, "off", "the browser runs no scripts of pages");
    let tour = PageTour::start().await.unwrap();
    let mut stops = Vec::new();
    let walk = tour.walk(&browser, "en", async |_: &Browser, stop: &str| stops.push(stop.to_owned()));
    walk.await.unwrap();
    assert!(stops.len() >= MIN_STOPS, "{stops:?}");
}

#[tokio::test]
async fn two_tabs_log_in_one_after_the_other() {
    let pages = PagesTest::start().await;
    pages.test_app.register_and_confirm(EMAIL).await;
    let browser = Browser::start().await.unwrap();
    let first = browser.tab().await;
    browser.open(&pages.url("account/sessions")).await;
    pages.wait_for_page(&browser, "login").await;
    let second = browser.new_tab().await;
    browser.open(&pages.url("account/activity")).await;
    pages.wait_for_page(&browser, "login").await;
    pages.log_in_here(&browser, EMAIL, PASSWORD).await;
    pages.wait_for_page(&browser, "account/activity").await;

    // The form in the first tab is older than the session that the second tab has opened.
    browser.switch_to(&first).await;
    pages.log_in_here(&browser, EMAIL, PASSWORD).await;
    pages.wait_for_page(&browser, "account/sessions").await;
    browser.switch_to(&second).await;
    browser.open(&pages.url("account")).await;
    pages.wait_for_page(&browser, "account").await;
    browser.wait_for_text(EMAIL).await;
    // One session of the browser, and one of the client that confirmed the address.
    assert_eq!(pages.test_app.session_count().await, 2);
}

#[tokio::test]
async fn a_login_without_cookies_shows_an_error_and_a_link_to_the_login_page() {
    let pages = PagesTest::start().await;
    pages.test_app.register_and_confirm(EMAIL).await;
    let sessions = pages.test_app.session_count().await;
    let browser = Browser::start_without_cookies().await.unwrap();
    browser.open(&pages.url("login")).await;
    pages.log_in_here(&browser, EMAIL, PASSWORD).await;
    // The error page has a request ID and a link, but no form.
    browser.text_of("main a.primary").await;
    assert_eq!(browser.attribute("main", "data-error").await.as_deref(), Some("invalid_state"));
    assert!(browser.cookies().await.is_empty());
    assert_eq!(pages.test_app.session_count().await, sessions);
    browser.click("main a.primary").await;
    browser.text_of("#password").await;
}

#[tokio::test]
async fn the_back_button_shows_no_account_after_the_logout() {
    let pages = PagesTest::start().await;
    pages.test_app.register_and_confirm(EMAIL).await;
    let browser = Browser::start().await.unwrap();
    browser.open(&pages.url("login")).await;
    pages.log_in_here(&browser, EMAIL, PASSWORD).await;
    pages.wait_for_page(&browser, "account").await;
    browser.wait_for_text(EMAIL).await;
    browser.click("main .actions button").await;
    pages.wait_for_page(&browser, "logout").await;
    browser.text_of("main a.primary").await;

    browser.back().await;
    pages.wait_for_page(&browser, "login").await;
    let text = browser.text().await;
    assert!(!text.contains(EMAIL), "{text}");

    // The back button shows no account after the account was deleted, either.
    pages.log_in_here(&browser, EMAIL, PASSWORD).await;
    pages.wait_for_page(&browser, "account").await;
    browser.wait_for_text(EMAIL).await;
    browser.open(&pages.url("account/delete")).await;
    browser.click("main button.danger").await;
    pages.wait_for_page(&browser, "login").await;
    browser.back().await;
    browser.back().await;
    pages.wait_for_page(&browser, "login").await;
    let text = browser.text().await;
    assert!(!text.contains(EMAIL), "{text}");
}

#[tokio::test]
async fn cookies_are_sent_only_to_this_host_over_https_and_scripts_cannot_read_them() {
    let (builder, _proxy) = Stack::builder().behind_tls(&ServerTls::new().unwrap()).await.unwrap();
    let pages = PagesTest::of(app(), builder).await;
    pages.test_app.register_and_confirm(EMAIL).await;
    let browser = Browser::start_accepting_all_certificates().await.unwrap();
    browser.open(&pages.url("account")).await;
    pages.wait_for_page(&browser, "login").await;
    pages.log_in_here(&browser, EMAIL, PASSWORD).await;
    pages.wait_for_page(&browser, "account").await;
    let cookies = browser.cookies().await;
    let session = format!("__Host-latchkey-session.{}", pages.test_app.id());
    for name in ["__Host-latchkey-browser", &session] {
        assert!(cookies.iter().any(|cookie| cookie.name == name), "{cookies:?}");
    }
    for cookie in &cookies {
        assert!(cookie.secure && cookie.http_only && cookie.path == "/", "{cookie:?}");
        assert_eq!((cookie.domain.as_str(), cookie.same_site.as_deref()), ("localhost", Some("Lax")), "{cookie:?}");
    }
    assert_eq!(browser.run_script("return document.cookie").await, "");
}
