//! Every flow of a user on the hosted pages, from the first page to the last.

use http::StatusCode;
use latchkey_tests::{
    passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD},
    stack::Stack,
};

use super::{EMAIL, PagesTest, app};
use crate::support::NAME;

#[tokio::test]
async fn a_user_registers_confirms_logs_out_and_logs_in() {
    let pages = PagesTest::start().await;
    let mut browser = pages.new_browser();
    let notice = pages.register(&mut browser, EMAIL, PASSWORD).await.expect_at(&pages.path("confirm"));
    assert!(notice.text().contains(EMAIL), "{}", notice.html);
    assert!(!pages.is_logged_in(&mut browser).await);

    let link = pages.mailed_link(EMAIL, 1, "confirm").await;
    let confirm = browser.open(&link).await.expect_at(&pages.path("confirm"));
    assert!(!pages.test_app.epoch_and_verified(EMAIL).await.1, "opening the link changes nothing");
    let account = browser.submit(&confirm, &pages.path("confirm"), &[]).await.expect_at(&pages.path("account"));
    assert!(account.text().contains("Your email address is confirmed"), "{}", account.html);
    assert!(!browser.cookies.keys().any(|name| name.starts_with("latchkey-tx.")), "{:?}", browser.cookies.keys());
    assert!(account.html.contains(NAME) && account.html.contains(EMAIL));
    assert!(pages.test_app.epoch_and_verified(EMAIL).await.1);

    let question = pages.open(&mut browser, "logout").await.expect_at(&pages.path("logout"));
    assert!(pages.is_logged_in(&mut browser).await, "the page only asks");
    browser.submit(&question, &pages.path("logout"), &[]).await.expect_at(&pages.path("logout"));
    assert!(!pages.is_logged_in(&mut browser).await);
    assert_eq!(pages.test_app.session_count().await, 0);

    pages.log_in(&mut browser, EMAIL, WRONG_PASSWORD).await.expect_error(401, "invalid_credentials");
    pages.log_in(&mut browser, EMAIL, PASSWORD).await.expect_at(&pages.path("account"));
    pages.open(&mut browser, "login").await.expect_at(&pages.path("account"));
}

#[tokio::test]
async fn the_code_can_be_typed_in_the_browser_that_registered() {
    let pages = PagesTest::start().await;
    let mut browser = pages.new_browser();
    let notice = pages.register(&mut browser, EMAIL, PASSWORD).await;
    let code = pages.test_app.code(EMAIL, 1).await.to_lowercase();
    let confirm = pages.path("confirm");
    let again = browser.submit(&notice, &confirm, &[("code", "00000-00000")]).await;
    let again = again.expect_error(400, "invalid_code");
    browser.submit(&again, &confirm, &[("code", &code)]).await.expect_at(&pages.path("account"));
}

#[tokio::test]
async fn a_login_leads_back_to_the_page_that_needs_it() {
    let pages = PagesTest::start().await;
    pages.test_app.register_and_confirm(EMAIL).await;
    for page in ["account", "account/email", "account/password", "account/sessions", "account/activity"] {
        let mut browser = pages.new_browser();
        let login = pages.open(&mut browser, page).await.expect_at(&pages.path("login"));
        let fields = [("email", EMAIL), ("password", WRONG_PASSWORD)];
        let again =
            browser.submit(&login, &pages.path("login"), &fields).await.expect_error(401, "invalid_credentials");
        let fields = [("email", EMAIL), ("password", PASSWORD)];
        browser.submit(&again, &pages.path("login"), &fields).await.expect_at(&pages.path(page));
    }
}

#[tokio::test]
async fn a_registration_continues_to_the_page_that_needs_it() {
    let pages = PagesTest::start().await;
    let mut browser = pages.new_browser();
    let login = pages.open(&mut browser, "account/activity").await;
    let register = login.links().into_iter().find(|link| link.starts_with(&pages.path("register"))).unwrap();
    let register = browser.open(&register).await;
    let fields = [("name", NAME), ("email", EMAIL), ("password", PASSWORD)];
    browser.submit(&register, &pages.path("register"), &fields).await.expect_at(&pages.path("confirm"));
    // The link in the mail has no `tx`, the parameter with the page to return to.
    let confirm = browser.open(&pages.mailed_link(EMAIL, 1, "confirm").await).await;
    browser.submit(&confirm, &pages.path("confirm"), &[]).await.expect_at(&pages.path("account/activity"));
}

#[tokio::test]
async fn a_forgotten_password_is_reset() {
    let pages = PagesTest::start().await;
    let mut logged_in = pages.logged_in_browser(EMAIL).await;
    let mut browser = pages.new_browser();
    let notice = pages.fill_in(&mut browser, "forgot", &[("email", EMAIL)]).await.expect_at(&pages.path("forgot"));
    assert!(notice.text().contains(EMAIL));
    assert!(!notice.address.contains("ada"), "the address is in no URL: {}", notice.address);
    let typed = notice.links().into_iter().find(|link| link.starts_with(&pages.path("reset"))).expect("a button");
    let typed = browser.open(&typed).await.expect_at(&pages.path("reset"));
    assert_eq!(typed.form(&pages.path("reset")).value("email"), EMAIL);
    let link = pages.mailed_link(EMAIL, 2, "reset").await;
    let reset = browser.open(&link).await.expect_at(&pages.path("reset"));
    let weak = browser.submit(&reset, &pages.path("reset"), &[("password", "x")]).await;
    let weak = weak.expect_error(400, "weak_password");
    let login = browser.submit(&weak, &pages.path("reset"), &[("password", NEW_PASSWORD)]).await;
    let login = login.expect_at(&pages.path("login"));
    assert!(login.text().contains("Your new password is set"), "{}", login.html);
    let mut other = pages.logged_in_browser("grace@example.com").await;
    let account = pages.open(&mut other, "login?notice=password_reset").await.expect_at(&pages.path("account"));
    assert!(account.text().contains("Your new password is set"), "{}", account.html);
    assert!(!pages.is_logged_in(&mut logged_in).await, "all sessions have ended");

    let again = browser.submit(&reset, &pages.path("reset"), &[("password", PASSWORD)]).await;
    again.expect_error(400, "invalid_code");
    pages.log_in(&mut browser, EMAIL, PASSWORD).await.expect_error(401, "invalid_credentials");
    pages.log_in(&mut browser, EMAIL, NEW_PASSWORD).await.expect_at(&pages.path("account"));
}

#[tokio::test]
async fn pages_are_in_the_language_that_the_user_chose() {
    let pages = PagesTest::start().await;
    let mut browser = pages.new_browser();
    let english = pages.open(&mut browser, "login").await;
    assert!(english.html.contains("<html lang=\"en\"") && english.text().contains("Log in"));
    let link = english.links().into_iter().find(|link| link.contains("lang=de")).expect("a link to German");
    let german = browser.open(&link).await;
    assert!(german.html.contains("<html lang=\"de\""), "{}", german.html);
    assert!(pages.open(&mut browser, "register").await.html.contains("<html lang=\"de\""), "the cookie keeps it");
}

#[tokio::test]
async fn a_mail_leads_to_the_applications_own_page_if_there_is_one() {
    let own = app().set("/mail/confirmURL", "https://shop.example.com/confirm?code={code}");
    let pages = PagesTest::of(own, Stack::builder()).await;
    pages.register(&mut pages.new_browser(), EMAIL, PASSWORD).await;
    let mail = pages.test_app.mail(EMAIL, 1).await;
    assert!(mail.text.contains("https://shop.example.com/confirm?code="), "{}", mail.text);
    pages.fill_in(&mut pages.new_browser(), "forgot", &[("email", EMAIL)]).await;
    pages.mailed_link(EMAIL, 2, "reset").await;
}

#[tokio::test]
async fn a_browser_session_gives_no_access_to_the_api_and_is_in_the_list_of_sessions() {
    let pages = PagesTest::start().await;
    let mut browser = pages.logged_in_browser(EMAIL).await;
    let client = pages.test_app.client();
    let cookies: Vec<String> = browser.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let request = client.request(http::Method::GET, &format!("v1/{}/user", pages.test_app.id()));
    let response = client.send(request.header("cookie", cookies.join("; "))).await;
    response.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    let signed_in = client.authenticate(pages.test_app.id(), EMAIL, PASSWORD).await;
    let listed = signed_in.get("sessions").await.expect(StatusCode::OK);
    let kinds: Vec<_> = listed.body["sessions"].as_array().unwrap().iter().map(|session| &session["kind"]).collect();
    assert!(kinds.iter().any(|kind| *kind == "browser"), "{kinds:?}");
    assert!(pages.is_logged_in(&mut browser).await);
}
