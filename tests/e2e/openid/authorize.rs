//! Authorization requests: login, registration, POST from other sites, limits, outages, and attacks (RFC 9700).

use http::StatusCode;
use latchkey_tests::{builders::Client, page_browser::LoadedPage, stack::Stack};
use serde_json::json;

use super::provider_test::{CALLBACK, EMAIL, OTHER_EMAIL, ProviderTest, app, reply};

fn unchanged(client: Client) -> Client {
    client
}

/// The path and query of the link to `confirm` in the first mail to this address.
async fn confirm_link(test: &ProviderTest, email: &str) -> String {
    let mail = test.test_app.mail(email, 1).await;
    let begin = format!("{}{}?", test.test_app.stack.base_url(), test.path("confirm"));
    let (_, rest) = mail.text.split_once(&begin).unwrap_or_else(|| panic!("no {begin} in {}", mail.text));
    let query: String = rest.chars().take_while(|char| !char.is_whitespace() && *char != '>').collect();
    format!("{}?{}", test.path("confirm"), query.trim_end_matches(['.', ',']))
}

#[tokio::test]
async fn a_user_logs_in_once_and_gets_a_code_for_each_request() {
    let test = ProviderTest::start().await;
    test.test_app.register_and_confirm(EMAIL).await;
    let mut browser = test.new_browser();
    let login = test.authorize(&mut browser, &[("nonce", "n-1"), ("login_hint", EMAIL)]).await;
    let login = login.expect_at(&test.path("login"));
    assert_eq!(login.form(&test.path("login")).value("email"), EMAIL);
    let done = test.log_in_at(&mut browser, &login, EMAIL).await;
    let answer = reply(&done);
    assert!(done.external.as_deref().unwrap().starts_with(CALLBACK));
    assert_eq!((answer["state"].as_str(), &answer["iss"]), ("state-1", &test.issuer()));
    assert!(answer["code"].starts_with("lka_") && answer.len() == 3, "{answer:?}");
    let tokens = test.exchange(&answer["code"]).await.expect(StatusCode::OK);
    assert_eq!(crate::support::claims_of(tokens.string("id_token"))["nonce"], "n-1");

    let again = reply(&test.authorize(&mut browser, &[("prompt", "none"), ("state", "")]).await);
    assert!(again["code"].starts_with("lka_") && !again.contains_key("state"), "{again:?}");
    test.wait_for_event(EMAIL, "client_authorized").await;
    let activity = browser.open(&test.path("account/activity")).await;
    assert!(activity.text().contains("Logged in to an application"), "{}", activity.html);
}

#[tokio::test]
async fn a_registration_continues_to_the_client_in_the_tab_of_the_mail_link() {
    let test = ProviderTest::start().await;
    // The second request does not fit into the registration cookie.
    for (email, state) in [(EMAIL, "short".to_owned()), (OTHER_EMAIL, "s".repeat(2_000))] {
        let mut browser = test.new_browser();
        let page = test.authorize(&mut browser, &[("prompt", "create"), ("state", &state)]).await;
        let page = page.expect_at(&test.path("register"));
        test.register_at(&mut browser, &page, email).await.expect_at(&test.path("confirm"));
        // The link in the mail has no `tx`, the parameter with the authorization request.
        let confirm = browser.open(&confirm_link(&test, email).await).await.expect_at(&test.path("confirm"));
        let answer = reply(&browser.submit(&confirm, &test.path("confirm"), &[]).await);
        assert_eq!(answer["state"], state);
        test.exchange(&answer["code"]).await.expect(StatusCode::OK);
    }
}

#[tokio::test]
async fn a_client_can_ask_for_a_new_login() {
    let test = ProviderTest::start().await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    for change in [("prompt", "login"), ("max_age", "0")] {
        let login = test.authorize(&mut browser, &[change]).await.expect_at(&test.path("login"));
        assert!(login.text().contains("Please log in again"), "{}", login.html);
        let answer = reply(&test.log_in_at(&mut browser, &login, EMAIL).await);
        assert!(answer.contains_key("code"), "{answer:?}");
    }
    assert!(reply(&test.authorize(&mut browser, &[("max_age", "3600")]).await).contains_key("code"));
    let silent = reply(&test.authorize(&mut test.new_browser(), &[("prompt", "none")]).await);
    assert_eq!(silent["error"], "login_required");
}

#[tokio::test]
async fn a_request_for_another_user_needs_that_user() {
    let test = ProviderTest::start().await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let code = test.code(&mut browser, &[]).await;
    let hint = test.exchange(&code).await.expect(StatusCode::OK).string("id_token").to_owned();
    assert!(reply(&test.authorize(&mut browser, &[("id_token_hint", &hint)]).await).contains_key("code"));
    let mut other = test.logged_in_browser(OTHER_EMAIL).await;
    let login = test.authorize(&mut other, &[("id_token_hint", &hint)]).await.expect_at(&test.path("login"));
    // A login of the wrong user leads to the login page again.
    let login = test.log_in_at(&mut other, &login, OTHER_EMAIL).await.expect_at(&test.path("login"));
    assert!(reply(&test.log_in_at(&mut other, &login, EMAIL).await).contains_key("code"));
    let silent = reply(&test.authorize(&mut other, &[("id_token_hint", "x"), ("prompt", "none")]).await);
    assert_eq!(silent["error"], "invalid_request");
}

#[tokio::test]
async fn a_post_from_another_site_does_not_end_the_browser_session() {
    let test = ProviderTest::start().await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    // Browsers do not send cookies with `SameSite=Lax` in a POST from another site.
    let mut without_cookies = browser.clone();
    without_cookies.cookies.clear();
    let origin = [("origin", "https://grafana.example.com")];
    let fields = test.parameters(&[("nonce", "n")]);
    let posted = without_cookies.post(&test.path("authorize"), &fields, &origin).await;
    assert_eq!((posted.status, posted.headers.get("set-cookie")), (StatusCode::SEE_OTHER, None));
    assert!(without_cookies.cookies.is_empty());
    let location = posted.header("location").unwrap().to_owned();
    assert!(reply(&browser.open(&location).await).contains_key("code"));
    // Every browser can open this URL, but a browser without a session gets only the login page.
    test.new_browser().open(&location).await.expect_at(&test.path("login"));
    let login = location.replace("/authorize?", "/login?");
    browser.open(&login).await.expect_error(400, "invalid_state");
}

#[tokio::test]
async fn a_form_post_response_has_the_code_only_in_its_form() {
    let test = ProviderTest::start().await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let page = test.authorize(&mut browser, &[("response_mode", "form_post")]).await;
    assert_eq!(page.status, StatusCode::OK, "{}", page.html);
    assert!(page.headers["content-security-policy"].to_str().unwrap().contains("script-src 'self'"));
    let form = page.form(CALLBACK);
    let names: Vec<&str> = form.fields.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["code", "state", "iss"]);
    assert!(!page.address.contains(form.value("code")));
    test.exchange(form.value("code")).await.expect(StatusCode::OK);
    let refused = test.authorize(&mut browser, &[("response_mode", "form_post"), ("prompt", "none consent")]).await;
    assert_eq!(refused.form(CALLBACK).value("error"), "invalid_request");
}

#[tokio::test]
async fn codes_are_limited_for_each_client_address() {
    let limited = app().limit("authorizationsPerClientAddress", &[(2, 600)]);
    let test = ProviderTest::of(limited, unchanged, Stack::builder()).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    for _ in 0..2 {
        test.code(&mut browser, &[]).await;
    }
    let refused = test.authorize(&mut browser, &[]).await.expect_error(429, "rate_limited");
    assert!(refused.headers.contains_key("retry-after"));
    test.authorize(&mut browser, &[("prompt", "none")]).await.expect_error(429, "rate_limited");
}

#[tokio::test]
async fn only_users_that_the_client_allows_get_a_code() {
    let restricted = |client: Client| client.set("/allow/groups", json!(["operations"]));
    let test = ProviderTest::with_client(restricted).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let refused = reply(&test.authorize(&mut browser, &[]).await);
    assert_eq!((refused["error"].as_str(), refused.get("code")), ("access_denied", None));
    test.apply(&test.client.clone().set("/allow/groups", json!([]))).await;
    test.code(&mut browser, &[]).await;
}

#[tokio::test]
async fn a_request_is_checked_again_after_the_login() {
    let test = ProviderTest::start().await;
    test.test_app.register_and_confirm(EMAIL).await;
    let mut browser = test.new_browser();
    let login = test.authorize(&mut browser, &[]).await.expect_at(&test.path("login"));
    test.apply(&test.client.clone().set_own("redirectURLs", json!(["https://new.example.com/callback"]))).await;
    let refused = test.log_in_at(&mut browser, &login, EMAIL).await;
    refused.expect_error(400, "redirect_url_not_allowed");
}

#[tokio::test]
async fn nobody_gets_a_code_without_redis() {
    let test = ProviderTest::of(app(), unchanged, Stack::builder().proxied()).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    test.test_app.stack.redis_proxy.as_ref().expect("a proxy").refuse().await;
    let page = test.authorize(&mut browser, &[]).await.expect_error(503, "temporarily_unavailable");
    assert!(page.headers.contains_key("retry-after"));
    let silent = reply(&test.authorize(&mut browser, &[("prompt", "none")]).await);
    assert_eq!(silent["error"], "temporarily_unavailable");
}

#[tokio::test]
async fn only_clients_that_need_no_stored_consent_get_codes_without_postgres() {
    let test = ProviderTest::of(app(), unchanged, Stack::builder().proxied()).await;
    let once = Client::web("once", &test.test_app.app, CALLBACK).set("/consent", "Once");
    test.apply(&once).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    test.test_app.stack.postgres_proxy.as_ref().expect("a proxy").refuse().await;
    test.code(&mut browser, &[]).await;
    let once_id = once.client_id();
    let refused = test.authorize(&mut browser, &[("client_id", &once_id)]).await;
    refused.expect_error(503, "temporarily_unavailable");
    browser.open(&test.path("account/applications")).await.expect_error(503, "temporarily_unavailable");
}

#[tokio::test]
async fn the_language_in_the_request_is_used_if_the_user_has_chosen_none() {
    let test = ProviderTest::start().await;
    let german = test.authorize(&mut test.new_browser(), &[("ui_locales", "fr de")]).await;
    assert!(german.html.contains("<html lang=\"de\""), "{}", german.html);
}

// The following tests are about attacks that RFC 9700 describes.

/// Asserts the security headers of a page that must not be framed or cached.
fn assert_protected(page: &LoadedPage) {
    assert_eq!(page.headers["x-frame-options"], "DENY");
    assert!(page.headers["content-security-policy"].to_str().unwrap().contains("frame-ancestors 'none'"));
    assert_eq!(page.headers["cache-control"], "no-store");
}

#[tokio::test]
async fn a_code_works_only_for_its_client_and_redirect_url() {
    let test = ProviderTest::with_client(|client| {
        client.set_own("redirectURLs", json!([CALLBACK, "https://grafana.example.com/other"]))
    })
    .await;
    let other = Client::web("other", &test.test_app.app, CALLBACK);
    test.apply(&other).await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    // An attacker injects a code of another client. Both clients have the same redirect URL.
    let other_id = other.client_id();
    let injected = test.code(&mut browser, &[("client_id", &other_id)]).await;
    test.exchange(&injected).await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    let elsewhere = test.code(&mut browser, &[("redirect_uri", "https://grafana.example.com/other")]).await;
    test.exchange(&elsewhere).await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    let code = test.code(&mut browser, &[]).await;
    test.exchange(&code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn pkce_cannot_be_removed_or_added() {
    let challenge = "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM";
    let verifier = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk";
    let test = ProviderTest::start().await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    let with_pkce = [("code_challenge", challenge), ("code_challenge_method", "S256")];
    let code = test.code(&mut browser, &with_pkce).await;
    let mut fields = vec![("grant_type", "authorization_code"), ("code", &code), ("redirect_uri", CALLBACK)];
    test.token(&fields).await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    fields.push(("code_verifier", verifier));
    test.token(&fields).await.expect(StatusCode::OK);
    // A stolen code without a challenge cannot be exchanged with the thief's verifier.
    let plain = test.code(&mut browser, &[]).await;
    let fields = [
        ("grant_type", "authorization_code"),
        ("code", plain.as_str()),
        ("redirect_uri", CALLBACK),
        ("code_verifier", verifier),
    ];
    test.token(&fields).await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    let downgraded = [("code_challenge", verifier), ("code_challenge_method", "plain")];
    assert_eq!(reply(&test.authorize(&mut browser, &downgraded).await)["error"], "invalid_request");
}

#[tokio::test]
async fn every_authorization_response_names_the_issuer() {
    let test = ProviderTest::start().await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    for changes in
        [&[("nonce", "n")][..], &[("scope", "email")], &[("prompt", "none login")], &[("response_type", "token")]]
    {
        let answer = reply(&test.authorize(&mut browser, changes).await);
        assert_eq!(answer["iss"], test.issuer(), "{changes:?}");
        assert_eq!(answer["state"], "state-1", "{changes:?}");
    }
}

#[tokio::test]
async fn no_page_can_be_framed_and_no_page_url_contains_a_code() {
    let test = ProviderTest::with_client(|client| client.set("/consent", "Always")).await;
    test.test_app.register_and_confirm(EMAIL).await;
    let mut browser = test.new_browser();
    let login = test.authorize(&mut browser, &[]).await.expect_at(&test.path("login"));
    let consent = test.log_in_at(&mut browser, &login, EMAIL).await.expect_at(&test.path("consent"));
    let form_post = test.authorize(&mut browser, &[("response_mode", "form_post"), ("scope", "x")]).await;
    let unknown = test.authorize(&mut browser, &[("client_id", "x")]).await.expect_error(400, "invalid_client");
    for page in [&login, &consent, &form_post, &unknown] {
        assert_protected(page);
        assert!(!page.address.contains("lka_") && !page.address.contains("code="), "{}", page.address);
    }
    // The response to the POST is a redirect that no browser follows with another POST.
    let done = test.decide(&mut browser, &consent, "allow").await;
    assert_eq!(done.status, StatusCode::SEE_OTHER);
    assert!(reply(&done).contains_key("code"));
}

#[tokio::test]
async fn a_replaced_client_id_is_unknown_immediately() {
    let test = ProviderTest::start().await;
    let mut browser = test.logged_in_browser(EMAIL).await;
    test.code(&mut browser, &[]).await;
    test.apply(&test.client.clone().set("/clientID", "renamed")).await;
    test.authorize(&mut browser, &[]).await.expect_error(400, "invalid_client");
    assert!(reply(&test.authorize(&mut browser, &[("client_id", "renamed")]).await).contains_key("code"));
}
