//! The pages of the user's own account.

use latchkey_tests::passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD};

use super::{EMAIL, PagesTest};

#[tokio::test]
async fn a_user_changes_the_name() {
    let pages = PagesTest::start().await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let account = pages.path("account");
    let saved = pages.fill_in(&mut browser, "account", &[("name", "Grace Hopper")]).await.expect_at(&account);
    assert!(saved.text().contains("Your name is saved"), "{}", saved.html);
    let refused = pages.fill_in(&mut browser, "account", &[("name", &"x".repeat(201))]).await;
    refused.expect_error(400, "invalid_request");
    let shown = pages.open(&mut browser, "account").await;
    assert_eq!(shown.form(&account).value("name"), "Grace Hopper");
}

#[tokio::test]
async fn a_new_password_ends_all_other_sessions() {
    let pages = PagesTest::start().await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let mut other = pages.new_browser();
    pages.log_in(&mut other, EMAIL, PASSWORD).await;
    let page = "account/password";
    let wrong = [("current_password", WRONG_PASSWORD), ("password", NEW_PASSWORD)];
    pages.fill_in(&mut browser, page, &wrong).await.expect_error(401, "invalid_credentials");
    let weak = [("current_password", PASSWORD), ("password", "x")];
    pages.fill_in(&mut browser, page, &weak).await.expect_error(400, "weak_password");
    assert!(pages.is_logged_in(&mut other).await);
    let good = [("current_password", PASSWORD), ("password", NEW_PASSWORD)];
    let account = pages.fill_in(&mut browser, page, &good).await.expect_at(&pages.path("account"));
    assert!(account.text().contains("Your new password is set"), "{}", account.html);
    assert!(!pages.is_logged_in(&mut other).await);
    assert!(pages.is_logged_in(&mut browser).await);
}

#[tokio::test]
async fn a_user_can_request_the_confirmation_mail_again() {
    let pages = PagesTest::start().await;
    pages.register(&mut pages.new_browser(), EMAIL, PASSWORD).await;
    pages.test_app.mail(EMAIL, 1).await;
    let mut browser = pages.new_browser();
    let account = pages.log_in(&mut browser, EMAIL, PASSWORD).await.expect_at(&pages.path("account"));
    let verify = account.forms().into_iter().find(|form| form.fields.iter().any(|(_, value)| value == "verify"));
    let sent = browser.press(&verify.expect("a button")).await.expect_at(&pages.path("account"));
    assert!(sent.text().contains("We have sent an email"), "{}", sent.html);
    pages.mailed_link(EMAIL, 2, "confirm").await;
}

#[tokio::test]
async fn an_unverified_account_cannot_be_changed() {
    let pages = PagesTest::start().await;
    pages.register(&mut pages.new_browser(), EMAIL, PASSWORD).await;
    let mut browser = pages.new_browser();
    pages.log_in(&mut browser, EMAIL, PASSWORD).await.expect_at(&pages.path("account"));
    let fields = [("current_password", PASSWORD), ("password", NEW_PASSWORD)];
    pages.fill_in(&mut browser, "account/password", &fields).await.expect_error(403, "email_not_verified");
    let fields = [("email", "eve@example.com"), ("password", PASSWORD)];
    pages.fill_in(&mut browser, "account/email", &fields).await.expect_error(403, "email_not_verified");
    pages
        .fill_in(&mut browser, "account/delete", &[("password", PASSWORD)])
        .await
        .expect_error(403, "email_not_verified");
    assert!(pages.is_logged_in(&mut browser).await);
}

#[tokio::test]
async fn a_user_ends_other_sessions() {
    let pages = PagesTest::start().await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let (mut second, mut third) = (pages.new_browser(), pages.new_browser());
    pages.log_in(&mut second, EMAIL, PASSWORD).await;
    let listed = pages.open(&mut browser, "account/sessions").await.expect_at(&pages.path("account/sessions"));
    // The list has buttons for two other sessions: one that the API call *confirm* has opened, and one of the second
    // browser.
    let buttons = |page: &latchkey_tests::page_browser::LoadedPage| {
        let forms = page.forms().into_iter().filter(|form| form.fields.iter().any(|(name, _)| name == "session"));
        forms.collect::<Vec<_>>()
    };
    let ends = buttons(&listed);
    assert_eq!(ends.len(), 2, "{}", listed.html);
    let mut shown = listed;
    for end in ends {
        shown = browser.press(&end).await.expect_at(&pages.path("account/sessions"));
    }
    assert!(buttons(&shown).is_empty(), "{}", shown.html);
    assert!(!pages.is_logged_in(&mut second).await);
    pages.log_in(&mut third, EMAIL, PASSWORD).await;
    let listed = pages.open(&mut browser, "account/sessions").await;
    let others = listed.forms().into_iter().find(|form| form.fields.iter().any(|(_, value)| value == "end_others"));
    browser.press(&others.expect("a button")).await.expect_at(&pages.path("account/sessions"));
    assert!(!pages.is_logged_in(&mut third).await);
    assert!(pages.is_logged_in(&mut browser).await);
    let unknown = pages.open(&mut browser, "account/sessions").await;
    assert_eq!(unknown.forms().len(), 0, "{}", unknown.html);
}

#[tokio::test]
async fn the_activity_page_lists_events_with_times_in_utc() {
    let pages = PagesTest::start().await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let activity = pages.open(&mut browser, "account/activity").await.expect_at(&pages.path("account/activity"));
    assert!(activity.text().contains("UTC"), "{}", activity.html);
}

#[tokio::test]
async fn a_user_deletes_the_account() {
    let pages = PagesTest::start().await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let wrong = [("password", WRONG_PASSWORD)];
    pages.fill_in(&mut browser, "account/delete", &wrong).await.expect_error(401, "invalid_credentials");
    let login = pages.fill_in(&mut browser, "account/delete", &[("password", PASSWORD)]).await;
    let login = login.expect_at(&pages.path("login"));
    assert!(login.text().contains("Your account is deleted"), "{}", login.html);
    assert_eq!(pages.test_app.query_number("SELECT count(*) FROM users").await, 0);
    assert!(!pages.is_logged_in(&mut browser).await);
}

#[tokio::test]
async fn a_form_changes_only_the_account_that_it_shows() {
    let pages = PagesTest::start().await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let first_tab = pages.open(&mut browser, "account").await;
    let delete = pages.open(&mut browser, "account/delete").await;
    pages.test_app.register_and_confirm("grace@example.com").await;
    // In a second tab, the user logs out and another user logs in.
    pages.fill_in(&mut browser, "logout", &[]).await;
    pages.log_in(&mut browser, "grace@example.com", PASSWORD).await.expect_at(&pages.path("account"));
    let account = browser.submit(&first_tab, &pages.path("account"), &[("name", "Eve")]).await;
    let account = account.expect_at(&pages.path("account"));
    assert!(account.html.contains("grace@example.com") && !account.html.contains("Eve"), "{}", account.html);
    let kept = browser.submit(&delete, &pages.path("account/delete"), &[("password", PASSWORD)]).await;
    kept.expect_at(&pages.path("account"));
    assert_eq!(pages.test_app.query_number("SELECT count(*) FROM users").await, 2);
    // A form of the logged-in user's own account still works.
    let saved = pages.fill_in(&mut browser, "account", &[("name", "Grace Hopper")]).await;
    assert!(saved.text().contains("Your name is saved"), "{}", saved.html);
}

#[tokio::test]
async fn a_login_by_another_user_in_the_same_browser_ends_the_session_of_the_first_user() {
    let pages = PagesTest::start().await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let mut first_user = browser.clone();
    pages.test_app.register_and_confirm("grace@example.com").await;
    // The login page leads logged-in users to the account, so the form is posted directly.
    let csrf = pages.open(&mut browser, "forgot").await.form(&pages.path("forgot")).value("csrf").to_owned();
    let fields = [("email", "grace@example.com"), ("password", PASSWORD), ("csrf", csrf.as_str())];
    let fields: Vec<_> = fields.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    browser.post(&pages.path("login"), &fields, &[]).await;
    let account = pages.open(&mut browser, "account").await.expect_at(&pages.path("account"));
    assert!(account.html.contains("grace@example.com"), "{}", account.html);
    assert!(!pages.is_logged_in(&mut first_user).await);
}
