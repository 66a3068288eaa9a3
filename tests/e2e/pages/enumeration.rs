//! Known and unknown addresses get the same status, page and cookies.

use latchkey_tests::{
    page_browser::{LoadedPage, PageBrowser},
    passwords::{PASSWORD, WRONG_PASSWORD},
    stack::Stack,
};

use super::{EMAIL, PagesTest, app};
use crate::support::{NAME, WRONG_CODE};

const UNKNOWN_EMAIL: &str = "eve@example.com";

/// The text without sealed (encrypted) addresses, which are different each time.
fn without_sealed_addresses(text: &str) -> String {
    let is_sealed = |char: char| char.is_ascii_alphanumeric() || matches!(char, '-' | '_');
    let mut parts = text.split("address=");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + "address=" + part.trim_start_matches(is_sealed))
}

/// What a browser sees, without the values that differ for every request.
fn shape(page: &LoadedPage, browser: &PageBrowser, email: &str) -> (u16, String, String, Vec<String>, Vec<String>) {
    let in_query = email.replace('@', "%40");
    let mut html = page.html.replace(email, "EMAIL").replace(&in_query, "EMAIL");
    for form in page.forms() {
        html = html.replace(form.value("csrf"), "CSRF");
    }
    let address = without_sealed_addresses(&page.address.replace(&in_query, "EMAIL"));
    html = without_sealed_addresses(&html);
    let mut headers: Vec<String> = page.headers.keys().map(|name| name.as_str().to_owned()).collect();
    headers.sort_unstable();
    // The names of some cookies have a time and a random id.
    let kind = |name: &String| name.split('.').next().unwrap_or_default().to_owned();
    (page.status.as_u16(), address, html, headers, browser.cookies.keys().map(kind).collect())
}

/// Sends the form of a page for the known and for an unknown address, and asserts that both responses look alike.
async fn assert_alike(pages: &PagesTest, page: &str, fields: &[(&str, &str)], status: u16) {
    let mut shapes = Vec::new();
    for email in [EMAIL, UNKNOWN_EMAIL] {
        let mut browser = pages.new_browser();
        let fields: Vec<(&str, &str)> = fields.iter().copied().chain([("email", email)]).collect();
        let shown = pages.fill_in(&mut browser, page, &fields).await;
        assert_eq!(shown.status.as_u16(), status, "{}", shown.html);
        shapes.push(shape(&shown, &browser, email));
    }
    assert_eq!(shapes[0], shapes[1], "{page}");
}

#[tokio::test]
async fn pages_do_not_show_whether_an_address_has_an_account() {
    let pages = PagesTest::start().await;
    pages.test_app.register_and_confirm(EMAIL).await;
    assert_alike(&pages, "login", &[("password", WRONG_PASSWORD)], 401).await;
    assert_alike(&pages, "forgot", &[], 200).await;
    assert_alike(&pages, "reset", &[("code", WRONG_CODE), ("password", PASSWORD)], 400).await;
    // This form is the last one, because it registers the unknown address.
    assert_alike(&pages, "register", &[("name", NAME), ("password", PASSWORD)], 200).await;
}

#[tokio::test]
async fn a_taken_address_is_reported_without_enumeration_protection() {
    let open = app().set("/enumerationProtection", "Disabled");
    let pages = PagesTest::of(open, Stack::builder()).await;
    pages.test_app.register_and_confirm(EMAIL).await;
    let refused = pages.register(&mut pages.new_browser(), EMAIL, PASSWORD).await;
    refused.expect_error(409, "email_taken");
    assert_eq!(pages.test_app.settled_mail_count(EMAIL).await, 1);
}
