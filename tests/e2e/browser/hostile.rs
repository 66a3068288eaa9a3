//! Mail scanners that use a browser, and other sites that use the pages to attack users.

use latchkey_tests::{
    browser::Browser,
    passwords::{NEW_PASSWORD, PASSWORD},
};

use super::OtherSite;
use crate::{
    pages::{EMAIL, PagesTest},
    support::MAIL_LIMIT,
};

/// The buttons that send a form. Other buttons change only what the page shows.
const SENDING_BUTTONS: &str = "button:not([type=button])";

/// Opens a page and presses each of its buttons. Then opens each link of this page, and of the pages to which the
/// buttons lead.
async fn scan(browser: &Browser, base_url: &str, url: &str) {
    browser.open(url).await;
    let buttons = browser.count(SENDING_BUTTONS).await;
    assert!(buttons > 0, "the page has a button");
    let mut links = page_links(browser).await;
    for button in 0..buttons {
        browser.open(url).await;
        browser.run_script("document.querySelectorAll('button[type=button]').forEach(button => button.click())").await;
        browser.run_script(&format!("document.querySelectorAll('{SENDING_BUTTONS}')[{button}].click()")).await;
        // A form without a password is refused.
        browser.text_of("main[data-error]").await;
        links.extend(page_links(browser).await);
    }
    for link in links.iter().filter(|link| link.starts_with(base_url)) {
        browser.open(link).await;
    }
}

/// The URLs of the links of the page.
async fn page_links(browser: &Browser) -> Vec<String> {
    let links = browser.run_script("return [...document.querySelectorAll('a[href]')].map(link => link.href)").await;
    serde_json::from_value(links).expect("links are texts")
}

#[tokio::test]
async fn a_scanner_changes_nothing_even_if_it_runs_scripts_and_presses_every_button() {
    let pages = PagesTest::start().await;
    let base_url = pages.test_app.stack.base_url();
    pages.test_app.register(EMAIL).await;
    let before = pages.test_app.epoch_and_verified(EMAIL).await;
    let confirm = format!("{base_url}{}", pages.mailed_link(EMAIL, 1, "confirm").await);
    let scanner = Browser::start().await.unwrap();
    scan(&scanner, base_url, &confirm).await;
    assert_eq!(pages.test_app.epoch_and_verified(EMAIL).await, before);
    assert_eq!(pages.test_app.session_count().await, 0);

    // The user can still confirm the address. A reset link still works after a scan, too.
    let browser = Browser::start().await.unwrap();
    browser.open(&confirm).await;
    browser.fill("#password", PASSWORD).await;
    browser.click("main .primary").await;
    pages.wait_for_page(&browser, "account").await;
    assert!(pages.test_app.epoch_and_verified(EMAIL).await.1);

    pages.fill_in(&mut pages.new_browser(), "forgot", &[("email", EMAIL)]).await;
    let reset = format!("{base_url}{}", pages.mailed_link(EMAIL, 2, "reset").await);
    let before = pages.test_app.epoch_and_verified(EMAIL).await;
    scan(&scanner, base_url, &reset).await;
    assert_eq!(pages.test_app.epoch_and_verified(EMAIL).await, before);
    browser.open(&reset).await;
    browser.fill("#password", NEW_PASSWORD).await;
    browser.click("main .primary").await;
    pages.wait_for_page(&browser, "login").await;
    assert!(pages.test_app.epoch_and_verified(EMAIL).await.0 > before.0);
}

#[tokio::test]
async fn other_sites_cannot_show_a_page_in_a_frame() {
    let pages = PagesTest::start().await;
    let frame = |url: &str| format!("<title>frame</title><iframe src=\"{url}\"></iframe>");
    let site = OtherSite::start(vec![
        ("/form", "<form><button>Go</button></form>".to_owned()),
        ("/own-form", frame("/form")),
        ("/login", frame(&pages.url("login"))),
    ])
    .await;
    let browser = Browser::start().await.unwrap();
    browser.open(&site.url("/own-form")).await;
    assert_eq!(browser.count_in_frame("form").await, 1, "the test sees what is in a frame");
    browser.open(&site.url("/login")).await;
    assert_eq!(browser.count_in_frame("form").await, 0);
}

#[tokio::test]
async fn a_form_on_another_site_logs_nobody_in() {
    let pages = PagesTest::start().await;
    pages.test_app.register_and_confirm(EMAIL).await;
    let sessions = pages.test_app.session_count().await;
    let attack = format!(
        "<form method=\"post\" action=\"{}\"><input name=\"email\" value=\"{EMAIL}\">
         <input name=\"password\" value=\"{PASSWORD}\"><button>Go</button></form>",
        pages.url("login")
    );
    let site = OtherSite::start(vec![("/", attack)]).await;
    let browser = Browser::start().await.unwrap();
    // The victim's browser gets the cookies of the pages.
    browser.open(&pages.url("login")).await;
    browser.open(&site.url("/")).await;
    browser.click("button").await;
    pages.wait_for_page(&browser, "login").await;
    assert_eq!(browser.attribute("main", "data-error").await.as_deref(), Some("origin_not_allowed"));
    assert_eq!(pages.test_app.session_count().await, sessions);
}

#[tokio::test]
async fn the_code_in_a_mail_link_is_sent_to_no_other_site() {
    let pages = PagesTest::start().await;
    pages.test_app.register(EMAIL).await;
    let mail = pages.test_app.stack.mails().wait_for(|mail| mail.is_to(EMAIL), MAIL_LIMIT).await;
    let link = pages.mailed_link(EMAIL, 1, "confirm").await;
    let site = OtherSite::start(vec![("/", "<p id=\"here\">here</p>".to_owned())]).await;
    let browser = Browser::start().await.unwrap();
    browser.open(&format!("{}{link}", pages.test_app.stack.base_url())).await;
    browser.run_script(&format!("location.href = '{}'", site.url("/"))).await;
    browser.text_of("#here").await;
    let referrer = browser.run_script("return document.referrer").await;
    assert!(!referrer.to_string().contains(&mail.code()), "{referrer}");
}
