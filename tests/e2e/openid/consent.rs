//! The consent page: when it is shown, what it shows, and what a decision does.

use http::StatusCode;
use latchkey_tests::builders::Client;

use super::provider_test::{EMAIL, OTHER_EMAIL, ProviderTest, reply};

/// Makes a Client ask for consent once for the same scopes.
fn ask_once(client: Client) -> Client {
    client.set("/consent", "Once")
}

/// Makes a Client ask for consent in every authorization.
fn ask_always(client: Client) -> Client {
    client.set("/consent", "Always")
}

#[tokio::test]
async fn a_user_is_asked_once_for_the_same_scopes() {
    let test = ProviderTest::with_client(ask_once).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let some = [("scope", "openid email")];
    let page = test.authorize(&mut browser, &some).await.expect_at(&test.path("consent"));
    let text = page.text();
    for shown in ["Our Grafana", "grafana.example.com", EMAIL, "Your email address", "Your user ID"] {
        assert!(text.contains(shown), "{shown} in {text}");
    }
    assert!(!text.contains("Your name") && !text.contains("just opened"), "{text}");
    let silent = reply(&test.authorize(&mut browser, &[("scope", "openid"), ("prompt", "none")]).await);
    assert_eq!(silent["error"], "consent_required");
    assert_eq!(test.consent_count().await, 0);

    let code = reply(&test.decide(&mut browser, &page, "allow").await)["code"].clone();
    assert_eq!(test.exchange(&code).await.expect(StatusCode::OK).string("scope"), "openid email");
    assert_eq!(test.consent_count().await, 1);
    test.code(&mut browser, &some).await;
    test.code(&mut browser, &[("scope", "openid"), ("prompt", "none")]).await;
    test.wait_for_event(EMAIL, "consent_given").await;

    let more = [("scope", "openid groups offline_access")];
    let page = test.authorize(&mut browser, &more).await.expect_at(&test.path("consent"));
    assert!(page.text().contains("Your groups") && page.text().contains("Access while you are away"));
    reply(&test.decide(&mut browser, &page, "allow").await);
    // The later consent has added its scopes to the stored consent.
    test.code(&mut browser, &[("scope", "openid email groups offline_access")]).await;
    assert_eq!(test.consent_count().await, 1);
    let asked = [("scope", "openid email"), ("prompt", "consent")];
    test.authorize(&mut browser, &asked).await.expect_at(&test.path("consent"));
}

#[tokio::test]
async fn a_claim_that_is_requested_without_its_scope_is_shown() {
    let test = ProviderTest::with_client(ask_once).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let claims = [("claims", r#"{"userinfo": {"email": null}}"#)];
    let page = test.authorize(&mut browser, &claims).await.expect_at(&test.path("consent"));
    assert!(page.text().contains("Your email address"), "{}", page.html);
}

#[tokio::test]
async fn a_refusal_goes_to_the_client_and_changes_nothing() {
    let test = ProviderTest::with_client(ask_once).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let page = test.authorize(&mut browser, &[]).await.expect_at(&test.path("consent"));
    let denied = reply(&test.decide(&mut browser, &page, "deny").await);
    assert_eq!((denied["error"].as_str(), denied["state"].as_str()), ("access_denied", "state-1"));
    assert!(!denied.contains_key("code"));
    assert_eq!(test.consent_count().await, 0);
    test.decide(&mut browser, &page, "perhaps").await.expect_error(400, "invalid_request");
    test.authorize(&mut browser, &[]).await.expect_at(&test.path("consent"));
}

#[tokio::test]
async fn a_user_can_use_another_account() {
    let test = ProviderTest::with_client(ask_always).await;
    test.test_app.register_and_confirm(OTHER_EMAIL).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let page = test.authorize(&mut browser, &[]).await.expect_at(&test.path("consent"));
    let login = test.decide(&mut browser, &page, "switch").await.expect_at(&test.path("login"));
    assert!(login.text().contains("the account that you want to use"), "{}", login.html);
    let page = test.log_in_at(&mut browser, &login, OTHER_EMAIL).await.expect_at(&test.path("consent"));
    assert!(page.text().contains(OTHER_EMAIL) && !page.text().contains(EMAIL), "{}", page.html);
    let code = reply(&test.decide(&mut browser, &page, "allow").await)["code"].clone();
    test.exchange(&code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn prompt_select_account_shows_the_account_of_the_session() {
    let test = ProviderTest::start().await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let page = test.authorize(&mut browser, &[("prompt", "select_account")]).await.expect_at(&test.path("consent"));
    assert!(page.text().contains(EMAIL));
    assert!(reply(&test.decide(&mut browser, &page, "allow").await).contains_key("code"));
    assert_eq!(test.consent_count().await, 0, "only consent: Once is stored");
}

#[tokio::test]
async fn a_decision_counts_only_for_the_account_that_the_page_showed() {
    let test = ProviderTest::with_client(ask_always).await;
    test.test_app.register_and_confirm(OTHER_EMAIL).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let page = test.authorize(&mut browser, &[]).await.expect_at(&test.path("consent"));
    // In another tab, the first user logs out and another user logs in.
    let question = browser.open(&test.path("logout")).await;
    browser.submit(&question, &test.path("logout"), &[]).await.expect_at(&test.path("logout"));
    let login = browser.open(&test.path("login")).await;
    test.log_in_at(&mut browser, &login, OTHER_EMAIL).await.expect_at(&test.path("account"));
    let asked = test.decide(&mut browser, &page, "allow").await.expect_at(&test.path("consent"));
    assert!(asked.text().contains(OTHER_EMAIL), "{}", asked.html);
    assert!(!test.events(OTHER_EMAIL).await.contains(&"consent_given".to_owned()));
    assert!(reply(&test.decide(&mut browser, &asked, "allow").await).contains_key("code"));
}

#[tokio::test]
async fn a_decision_after_the_end_of_the_session_leads_to_the_login() {
    let test = ProviderTest::with_client(ask_once).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let page = test.authorize(&mut browser, &[]).await.expect_at(&test.path("consent"));
    assert!(browser.forget("latchkey-session."));
    let login = test.decide(&mut browser, &page, "allow").await.expect_at(&test.path("login"));
    assert_eq!(test.consent_count().await, 0);
    test.log_in_at(&mut browser, &login, EMAIL).await.expect_at(&test.path("consent"));
}

#[tokio::test]
async fn a_form_from_another_browser_allows_nothing() {
    let test = ProviderTest::with_client(ask_once).await;
    let mut attacker = test.logged_in_browser(OTHER_EMAIL).await;
    let page = test.authorize(&mut attacker, &[]).await.expect_at(&test.path("consent"));
    let mut fields = page.form(&test.path("consent")).fields;
    fields.push(("decision".to_owned(), "allow".to_owned()));
    let mut victim = test.logged_in_browser(EMAIL).await;
    let refused = victim.post(&test.path("consent"), &fields, &[]).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{}", refused.text);
    // The victim's own form is refused, too, if another site sends it.
    let page = test.authorize(&mut victim, &[]).await.expect_at(&test.path("consent"));
    let mut fields = page.form(&test.path("consent")).fields;
    fields.push(("decision".to_owned(), "allow".to_owned()));
    let refused = victim.post(&test.path("consent"), &fields, &[("origin", "https://evil.example")]).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN, "{}", refused.text);
    assert_eq!(test.consent_count().await, 0);
}

const CHALLENGE: [(&str, &str); 2] =
    [("code_challenge", "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM"), ("code_challenge_method", "S256")];

#[tokio::test]
async fn a_program_on_the_device_needs_the_user_for_each_code() {
    for callback in ["com.example.program:/done", "http://127.0.0.1/done"] {
        let test = ProviderTest::of_device(callback).await;
        let mut browser = test.logged_in_browser(EMAIL).await;
        let page = test.authorize(&mut browser, &CHALLENGE).await.expect_at(&test.path("consent"));
        assert!(page.text().contains("just opened \u{2068}Our Program\u{2069} on this device"), "{}", page.html);
        assert!(reply(&test.decide(&mut browser, &page, "allow").await).contains_key("code"));
        test.authorize(&mut browser, &CHALLENGE).await.expect_at(&test.path("consent"));
        let silent: Vec<(&str, &str)> = CHALLENGE.iter().copied().chain([("prompt", "none")]).collect();
        assert_eq!(reply(&test.authorize(&mut browser, &silent).await)["error"], "interaction_required");
        // A login on the login page of this request shows that the user is there, so there is no consent page.
        let mut new_browser = test.new_browser();
        let login = test.authorize(&mut new_browser, &CHALLENGE).await.expect_at(&test.path("login"));
        assert!(reply(&test.log_in_at(&mut new_browser, &login, EMAIL).await).contains_key("code"));
    }
}

#[tokio::test]
async fn a_later_login_for_another_purpose_does_not_allow_an_earlier_posted_request() {
    let test = ProviderTest::of_device("com.example.program:/done").await;
    test.test_app.register_and_confirm(EMAIL).await;
    // A program prepares the request before the user logs in for another purpose.
    let mut program = test.new_browser();
    let posted = program.post(&test.path("authorize"), &test.parameters(&CHALLENGE), &[("origin", "null")]).await;
    let prepared = posted.header("location").unwrap().to_owned();
    let mut browser = test.new_browser();
    let login = browser.open(&test.path("login")).await;
    test.log_in_at(&mut browser, &login, EMAIL).await.expect_at(&test.path("account"));
    browser.open(&prepared).await.expect_at(&test.path("consent"));
}

#[tokio::test]
async fn a_login_for_another_purpose_does_not_replace_the_consent() {
    let test = ProviderTest::of_device("com.example.program:/done").await;
    test.test_app.register_and_confirm(EMAIL).await;
    let mut browser = test.new_browser();
    let waiting = test.authorize(&mut browser, &CHALLENGE).await.expect_at(&test.path("login"));
    let tx = waiting.form(&test.path("login")).value("tx").to_owned();
    // The user logs in to the account page in another tab.
    let login = browser.open(&test.path("login")).await;
    test.log_in_at(&mut browser, &login, EMAIL).await.expect_at(&test.path("account"));
    for page in ["authorize", "consent"] {
        browser.open(&test.path(&format!("{page}?tx={tx}"))).await.expect_at(&test.path("consent"));
    }
    // A login on the login page of the request still counts for the request.
    assert!(reply(&test.log_in_at(&mut browser, &waiting, EMAIL).await).contains_key("code"));
}
