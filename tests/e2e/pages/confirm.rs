//! The confirmation page: a code alone confirms nothing in a browser that did not register.

use latchkey_tests::{
    page_browser::PageBrowser,
    passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD},
};

use super::{EMAIL, PagesTest};

/// Opens every link of a page, and presses every button.
async fn scan(pages: &PagesTest, browser: &mut PageBrowser, link: &str) {
    let mut page = browser.open(link).await;
    for _ in 0..3 {
        for form in page.forms() {
            page = browser.press(&form).await;
        }
        for link in page.links().into_iter().filter(|link| link.starts_with(&pages.path(""))) {
            browser.open(&link).await;
        }
    }
}

#[tokio::test]
async fn a_scanner_that_presses_every_button_changes_nothing() {
    let pages = PagesTest::start().await;
    let mut browser = pages.new_browser();
    pages.register(&mut browser, EMAIL, PASSWORD).await;
    let link = pages.mailed_link(EMAIL, 1, "confirm").await;
    let before = pages.test_app.epoch_and_verified(EMAIL).await;
    let mut scanner = pages.new_browser();
    scan(&pages, &mut scanner, &link).await;
    assert_eq!(pages.test_app.epoch_and_verified(EMAIL).await, before);
    assert_eq!(pages.test_app.session_count().await, 0);

    // The user can still confirm the address.
    let confirm = browser.open(&link).await;
    browser.submit(&confirm, &pages.path("confirm"), &[]).await.expect_at(&pages.path("account"));

    pages.fill_in(&mut pages.new_browser(), "forgot", &[("email", EMAIL)]).await;
    let reset = pages.mailed_link(EMAIL, 2, "reset").await;
    let before = pages.test_app.epoch_and_verified(EMAIL).await;
    scan(&pages, &mut pages.new_browser(), &reset).await;
    assert_eq!(pages.test_app.epoch_and_verified(EMAIL).await, before);
}

#[tokio::test]
async fn a_confirmation_in_another_browser_needs_the_password() {
    let pages = PagesTest::start().await;
    pages.register(&mut pages.new_browser(), EMAIL, PASSWORD).await;
    let link = pages.mailed_link(EMAIL, 1, "confirm").await;
    let action = pages.path("confirm");
    let mut other = pages.new_browser();
    let page = other.open(&link).await.expect_at(&action);
    let refused = other.submit(&page, &action, &[]).await.expect_error(401, "reauthentication_required");
    let refused = other.submit(&refused, &action, &[("password", WRONG_PASSWORD)]).await;
    let refused = refused.expect_error(401, "invalid_credentials");
    assert!(!refused.html.contains(WRONG_PASSWORD));
    assert!(!pages.test_app.epoch_and_verified(EMAIL).await.1, "neither has used up the code");
    let done = other.submit(&refused, &action, &[("password", PASSWORD)]).await;
    let account = done.expect_at(&pages.path("account"));
    assert!(account.text().contains("Your email address is confirmed"), "{}", account.html);
    assert!(pages.test_app.epoch_and_verified(EMAIL).await.1);
}

#[tokio::test]
async fn a_confirmation_removes_only_the_registration_cookie_of_its_address() {
    let pages = PagesTest::start().await;
    let mut browser = pages.new_browser();
    pages.register(&mut browser, EMAIL, PASSWORD).await;
    pages.register(&mut browser, "eve@example.com", PASSWORD).await;
    let count = |browser: &PageBrowser| browser.cookies.keys().filter(|name| name.starts_with("latchkey-tx.")).count();
    assert_eq!(count(&browser), 2);
    // With a session of the account, the confirmation does not need the registration cookie.
    pages.log_in(&mut browser, EMAIL, PASSWORD).await.expect_at(&pages.path("account"));
    let page = browser.open(&pages.mailed_link(EMAIL, 1, "confirm").await).await;
    browser.submit(&page, &pages.path("confirm"), &[]).await.expect_at(&pages.path("account"));
    assert_eq!(count(&browser), 1);
    let page = browser.open(&pages.mailed_link("eve@example.com", 1, "confirm").await).await;
    browser.submit(&page, &pages.path("confirm"), &[]).await.expect_at(&pages.path("account"));
    assert_eq!(count(&browser), 0);
}

#[tokio::test]
async fn registering_another_address_does_not_suffice_to_confirm() {
    let pages = PagesTest::start().await;
    pages.register(&mut pages.new_browser(), EMAIL, PASSWORD).await;
    let link = pages.mailed_link(EMAIL, 1, "confirm").await;
    let mut other = pages.new_browser();
    pages.register(&mut other, "eve@example.com", PASSWORD).await;
    let page = other.open(&link).await;
    let refused = other.submit(&page, &pages.path("confirm"), &[]).await;
    refused.expect_error(401, "reauthentication_required");
    // The registration cookie is valid only in the browser that registered: a copy in another browser is refused.
    let mut copied = pages.new_browser();
    pages.open(&mut copied, "login").await;
    let stolen = other.cookies.iter().filter(|(name, _)| name.starts_with("latchkey-tx."));
    copied.cookies.extend(stolen.map(|(name, value)| (name.clone(), value.clone())));
    let page = copied.open(&link).await;
    let refused = copied.submit(&page, &pages.path("confirm"), &[]).await;
    refused.expect_error(401, "reauthentication_required");
    assert!(!pages.test_app.epoch_and_verified(EMAIL).await.1);
}

#[tokio::test]
async fn a_session_of_the_account_suffices_to_confirm_and_continues() {
    let pages = PagesTest::start().await;
    pages.register(&mut pages.new_browser(), EMAIL, PASSWORD).await;
    let mut browser = pages.new_browser();
    pages.log_in(&mut browser, EMAIL, PASSWORD).await.expect_at(&pages.path("account"));
    let session = browser.cookies.clone();
    let page = browser.open(&pages.mailed_link(EMAIL, 1, "confirm").await).await;
    browser.submit(&page, &pages.path("confirm"), &[]).await.expect_at(&pages.path("account"));
    assert_eq!(browser.cookies, session);
    assert_eq!(pages.test_app.session_count().await, 1);
}

#[tokio::test]
async fn the_owner_of_a_contested_account_sets_a_password() {
    let pages = PagesTest::start().await;
    pages.register(&mut pages.new_browser(), EMAIL, WRONG_PASSWORD).await;
    pages.test_app.mail(EMAIL, 1).await;
    let mut owner = pages.new_browser();
    pages.register(&mut owner, EMAIL, PASSWORD).await;
    let page = owner.open(&pages.mailed_link(EMAIL, 2, "confirm").await).await;
    let password = pages.path("account/password");
    let required = owner.submit(&page, &pages.path("confirm"), &[]).await.expect_at(&password);
    owner.submit(&required, &password, &[("password", NEW_PASSWORD)]).await.expect_at(&pages.path("account"));
    pages.log_in(&mut pages.new_browser(), EMAIL, NEW_PASSWORD).await.expect_at(&pages.path("account"));
    let stranger = pages.log_in(&mut pages.new_browser(), EMAIL, WRONG_PASSWORD).await;
    stranger.expect_error(401, "invalid_credentials");
}

#[tokio::test]
async fn a_new_address_is_confirmed_only_in_a_session_of_the_account() {
    const NEW_EMAIL: &str = "ada@example.org";
    let pages = PagesTest::start().await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let fields = [("email", NEW_EMAIL), ("password", PASSWORD)];
    let account = pages.fill_in(&mut browser, "account/email", &fields).await.expect_at(&pages.path("account"));
    assert!(account.text().contains(NEW_EMAIL), "{}", account.html);
    let link = pages.mailed_link(NEW_EMAIL, 1, "confirm").await;
    let mut other = pages.new_browser();
    scan(&pages, &mut other, &link).await;
    let page = other.open(&link).await;
    let refused = other.submit(&page, &pages.path("confirm"), &[("password", PASSWORD)]).await;
    let refused = refused.expect_error(401, "reauthentication_required");
    assert!(refused.links().iter().any(|link| link.starts_with(&pages.path("login"))), "{}", refused.html);
    let page = browser.open(&link).await;
    let account = browser.submit(&page, &pages.path("confirm"), &[]).await.expect_at(&pages.path("account"));
    assert!(account.text().contains(NEW_EMAIL) && !account.text().contains(EMAIL), "{}", account.html);
}
