//! Rate limits: the last allowed and the first rejected request, what each limit counts, and what a refusal contains
//! and leaves unchanged (specification: Limits, Rate limits).

use std::{fs, time::Duration};

use http::{Method, StatusCode};
use latchkey_tests::{
    builders::App,
    client::{ApiClient, ApiResponse},
    passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD},
    stack::Stack,
};
use serde_json::json;

use crate::support::{NAME, TestApp, WRONG_CODE, app, shape};

const EMAIL: &str = "ada@example.com";
/// A window that is longer than any test, in seconds.
const HOUR: u32 = 3600;

/// Asserts that the limit `name` rejected the request: checks the status and the headers. Returns the time to wait
/// before a retry, in seconds.
#[track_caller]
fn expect_rate_limited(response: ApiResponse, name: &str, count: u32, window: u32) -> u64 {
    let response = response.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    let wait: u64 = response.header("retry-after").expect("Retry-After").parse().expect("seconds");
    // A window has 50 buckets. So a request is counted for the time of the window, or up to a fiftieth longer.
    let max_wait = u64::from(window + window.div_ceil(50));
    assert!((1..=max_wait).contains(&wait), "{wait} s");
    let policy = format!("\"{name}\";q={count};w={window}");
    assert_eq!(response.header("ratelimit-policy"), Some(policy.as_str()));
    assert_eq!(response.header("ratelimit"), Some(format!("\"{name}\";r=0;t={wait}").as_str()));
    wait
}

async fn wrong_login(client: &ApiClient, test_app: &TestApp, email: &str) -> ApiResponse {
    client.login(test_app.id(), email, WRONG_PASSWORD).await
}

// === logins ===

#[tokio::test]
async fn login_failures_per_client_are_counted_for_each_account_and_client_address() {
    let test_app = TestApp::start_with(app().limit("loginFailuresPerClient", &[(3, HOUR)])).await;
    test_app.register_and_confirm(EMAIL).await;
    test_app.register_and_confirm("grace@example.com").await;
    // Logins for known and unknown email addresses count alike, in upper and lower case.
    for email in [EMAIL, "nobody@example.com"] {
        let client = test_app.client();
        for email in [email, &email.to_uppercase(), email] {
            wrong_login(&client, &test_app, email).await.expect(StatusCode::UNAUTHORIZED);
        }
        let refused = client.login(test_app.id(), email, PASSWORD).await;
        expect_rate_limited(refused, "loginFailuresPerClient", 3, HOUR);
        client.login(test_app.id(), "grace@example.com", PASSWORD).await.expect(StatusCode::OK);
    }
    test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_right_password_does_not_count_as_a_failure() {
    let test_app = TestApp::start_with(app().limit("loginFailuresPerClient", &[(2, HOUR)])).await;
    let client = test_app.register_and_confirm(EMAIL).await;
    wrong_login(&client, &test_app, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
    for _ in 0..4 {
        client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    }
    wrong_login(&client, &test_app, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
    expect_rate_limited(wrong_login(&client, &test_app, EMAIL).await, "loginFailuresPerClient", 2, HOUR);
}

#[tokio::test]
async fn login_failures_per_account_are_counted_only_for_unknown_client_addresses() {
    let test_app = TestApp::start_with(app().limit("loginFailuresPerAccount", &[(3, HOUR)])).await;
    let confirm_client = test_app.register_and_confirm(EMAIL).await;
    let login_client = test_app.client();
    login_client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    for email in [EMAIL, "nobody@example.com"] {
        for _ in 0..3 {
            wrong_login(&test_app.client(), &test_app, email).await.expect(StatusCode::UNAUTHORIZED);
        }
        let refused = test_app.client().login(test_app.id(), email, PASSWORD).await;
        expect_rate_limited(refused, "loginFailuresPerAccount", 3, HOUR);
    }
    for known_client in [&confirm_client, &login_client] {
        for _ in 0..4 {
            wrong_login(known_client, &test_app, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
        }
        known_client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    }
    // If the limit rejects a user at a new client address, the user can reset the password by mail and log in.
    let new_client = test_app.client();
    new_client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::TOO_MANY_REQUESTS);
    new_client.forgot_password(test_app.id(), EMAIL).await.expect(StatusCode::OK);
    let code = test_app.code(EMAIL, 2).await;
    new_client.confirm_password(test_app.id(), EMAIL, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
    new_client.login(test_app.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn login_failures_per_client_overall_are_counted_over_all_accounts() {
    let test_app = TestApp::start_with(app().limit("loginFailuresPerClientOverall", &[(3, HOUR)])).await;
    test_app.register_and_confirm(EMAIL).await;
    let client = test_app.client();
    for index in 0..3 {
        let response = wrong_login(&client, &test_app, &format!("nobody{index}@example.com")).await;
        response.expect(StatusCode::UNAUTHORIZED);
    }
    let refused = client.login(test_app.id(), EMAIL, PASSWORD).await;
    expect_rate_limited(refused, "loginFailuresPerClientOverall", 3, HOUR);
    test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn logins_per_client_are_counted_whatever_their_outcome() {
    let test_app = TestApp::start_with(app().limit("loginsPerClient", &[(3, HOUR)])).await;
    test_app.register_and_confirm(EMAIL).await;
    let client = test_app.client();
    client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    wrong_login(&client, &test_app, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
    wrong_login(&client, &test_app, "nobody@example.com").await.expect(StatusCode::UNAUTHORIZED);
    expect_rate_limited(client.login(test_app.id(), EMAIL, PASSWORD).await, "loginsPerClient", 3, HOUR);
    test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn three_default_limits_are_those_of_the_specification() {
    let test_app = TestApp::start_with(App::new("shop")).await;
    let client = test_app.client();
    for _ in 0..10 {
        wrong_login(&client, &test_app, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
    }
    expect_rate_limited(wrong_login(&client, &test_app, EMAIL).await, "loginFailuresPerClient", 10, 900);
    // The login that the limit on failures rejected was not counted, so 50 of the 60 logins per minute are left.
    for index in 0..50 {
        let response = wrong_login(&client, &test_app, &format!("nobody{}@example.com", index / 9)).await;
        response.expect(StatusCode::UNAUTHORIZED);
    }
    expect_rate_limited(wrong_login(&client, &test_app, "nobody@example.com").await, "loginsPerClient", 60, 60);
    for _ in 0..10 {
        client.confirm(test_app.id(), WRONG_CODE).await.expect(StatusCode::BAD_REQUEST);
    }
    expect_rate_limited(client.confirm(test_app.id(), WRONG_CODE).await, "codesPerClient", 10, 60);
}

#[tokio::test]
async fn a_refusal_never_reveals_whether_an_account_exists() {
    let test_app = TestApp::start_with(app().limit("loginFailuresPerClient", &[(1, HOUR)])).await;
    test_app.register_and_confirm(EMAIL).await;
    let client = test_app.client();
    let mut refusals = Vec::new();
    for email in [EMAIL, "nobody@example.com"] {
        wrong_login(&client, &test_app, email).await.expect(StatusCode::UNAUTHORIZED);
        refusals.push(shape(&wrong_login(&client, &test_app, email).await.expect(StatusCode::TOO_MANY_REQUESTS)));
    }
    assert_eq!(refusals[0], refusals[1]);
}

// === windows ===

#[tokio::test]
async fn a_refusal_consumes_nothing_and_a_request_after_the_wait_is_allowed() {
    let app = app().limit("loginsPerClient", &[(2, 6)]).limit("loginFailuresPerClient", &[(3, HOUR)]);
    let test_app = TestApp::start_with(app).await;
    let client = test_app.client();
    for _ in 0..2 {
        wrong_login(&client, &test_app, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
    }
    let wait = expect_rate_limited(wrong_login(&client, &test_app, EMAIL).await, "loginsPerClient", 2, 6);
    let end = tokio::time::Instant::now() + Duration::from_secs(wait);
    for _ in 0..5 {
        expect_rate_limited(wrong_login(&client, &test_app, EMAIL).await, "loginsPerClient", 2, 6);
    }
    tokio::time::sleep_until(end).await;
    // The limit allows this login, so the limit did not count the rejected logins.
    wrong_login(&client, &test_app, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn all_windows_of_a_limit_apply() {
    let test_app = TestApp::start_with(app().limit("codesPerClient", &[(2, 5), (3, HOUR)])).await;
    let client = test_app.client();
    let confirm = async || client.confirm(test_app.id(), WRONG_CODE).await;
    confirm().await.expect(StatusCode::BAD_REQUEST);
    confirm().await.expect(StatusCode::BAD_REQUEST);
    let refused = confirm().await.expect(StatusCode::TOO_MANY_REQUESTS);
    let wait = refused.header("retry-after").unwrap().parse().unwrap();
    assert!(refused.header("ratelimit-policy").unwrap().contains("q=2;w=5"), "{:?}", refused.headers);
    tokio::time::sleep(Duration::from_secs(wait)).await;
    confirm().await.expect(StatusCode::BAD_REQUEST);
    expect_rate_limited(confirm().await, "codesPerClient", 3, HOUR);
}

#[tokio::test]
async fn a_limit_is_never_looser_than_the_ceiling_of_the_installation() {
    let file = latchkey_tests::process::fresh_dir("ceilings").join("ceilings.json");
    let ceilings = json!({ "loginsPerClient": [{ "count": 2, "windowSeconds": HOUR }] });
    fs::write(&file, ceilings.to_string()).unwrap();
    let (loose, tight) = (app().limit("loginsPerClient", &[(1000, 60)]), app().limit("loginsPerClient", &[(1, HOUR)]));
    let args = ["--limit-ceilings".to_owned(), file.display().to_string()];
    let stack = Stack::builder().app(&loose).app(&tight).args(args).start().await;
    for (app, allowed) in [(&loose, 2), (&tight, 1)] {
        let client = stack.client();
        for _ in 0..allowed {
            client.login(app.id(), EMAIL, PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
        }
        client.login(app.id(), EMAIL, PASSWORD).await.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    }
}

#[tokio::test]
async fn two_servers_share_the_counts_of_an_app() {
    let app = app().limit("loginFailuresPerClient", &[(3, HOUR)]).limit("codesPerClient", &[(2, HOUR)]);
    let stack = Stack::builder().app(&app).servers(2).start().await;
    let first = stack.client();
    let second = ApiClient::from_address(stack.servers()[1].public, first.address());
    for client in [&first, &second, &first] {
        client.login(app.id(), EMAIL, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    }
    expect_rate_limited(second.login(app.id(), EMAIL, PASSWORD).await, "loginFailuresPerClient", 3, HOUR);
    for client in [&first, &second] {
        client.confirm(app.id(), WRONG_CODE).await.expect(StatusCode::BAD_REQUEST);
    }
    expect_rate_limited(first.confirm(app.id(), WRONG_CODE).await, "codesPerClient", 2, HOUR);
}

#[tokio::test]
async fn two_apps_have_separate_counts() {
    let (one, other) = (app().limit("loginsPerClient", &[(1, HOUR)]), app().limit("loginsPerClient", &[(1, HOUR)]));
    let stack = Stack::builder().app(&one).app(&other).start().await;
    let client = stack.client();
    client.login(one.id(), EMAIL, PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    client.login(one.id(), EMAIL, PASSWORD).await.expect(StatusCode::TOO_MANY_REQUESTS);
    client.login(other.id(), EMAIL, PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
}

// === registrations, codes ===

#[tokio::test]
async fn registrations_per_client_include_new_and_known_addresses() {
    let test_app = TestApp::start_with(app().limit("registrationsPerClient", &[(3, HOUR)])).await;
    test_app.register_and_confirm(EMAIL).await;
    let client = test_app.client();
    for email in [EMAIL, "new@example.com", "new@example.com"] {
        client.register(test_app.id(), NAME, email, PASSWORD).await.expect(StatusCode::OK);
    }
    for email in [EMAIL, "later@example.com"] {
        let refused = client.register(test_app.id(), NAME, email, PASSWORD).await;
        expect_rate_limited(refused, "registrationsPerClient", 3, HOUR);
    }
    assert_eq!(test_app.settled_mail_count("later@example.com").await, 0);
    let login = test_app.client().login(test_app.id(), "later@example.com", PASSWORD).await;
    login.expect(StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn codes_per_client_include_wrong_confirm_and_reset_codes_but_no_right_codes() {
    let test_app = TestApp::start_with(app().limit("codesPerClient", &[(2, HOUR)])).await;
    let client = test_app.client();
    for index in 0..3 {
        let email = format!("user{index}@example.com");
        test_app.register(&email).await;
        let code = test_app.code(&email, 1).await;
        client.confirm(test_app.id(), &code).await.expect(StatusCode::OK);
        let code = test_app.request_reset_code(&email, 2).await;
        let reset = client.confirm_password(test_app.id(), &email, &code, NEW_PASSWORD).await;
        reset.expect(StatusCode::OK);
    }
    test_app.register(EMAIL).await;
    let code = test_app.code(EMAIL, 1).await;
    client.confirm(test_app.id(), WRONG_CODE).await.expect(StatusCode::BAD_REQUEST);
    let wrong = client.confirm_password(test_app.id(), "nobody@example.com", WRONG_CODE, NEW_PASSWORD).await;
    wrong.expect(StatusCode::BAD_REQUEST);
    expect_rate_limited(client.confirm(test_app.id(), &code).await, "codesPerClient", 2, HOUR);
    let refused = client.confirm_password(test_app.id(), EMAIL, WRONG_CODE, NEW_PASSWORD).await;
    expect_rate_limited(refused, "codesPerClient", 2, HOUR);
    // A rejected call does not use up its code.
    test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_reset_with_a_weak_password_counts_like_a_wrong_code() {
    let test_app = TestApp::start_with(app().limit("codesPerClient", &[(3, HOUR)])).await;
    let client = test_app.client();
    test_app.register(EMAIL).await;
    let code = test_app.request_reset_code(EMAIL, 2).await;
    for (code, weak) in [(code.as_str(), "password1234"), (WRONG_CODE, "short-7"), (WRONG_CODE, EMAIL)] {
        let refused = client.confirm_password(test_app.id(), EMAIL, code, weak).await;
        refused.expect_error(StatusCode::BAD_REQUEST, "weak_password");
    }
    expect_rate_limited(
        client.confirm_password(test_app.id(), EMAIL, &code, "password1234").await,
        "codesPerClient",
        3,
        HOUR,
    );
    // The code is still valid: another client address can use it.
    let reset = test_app.client().confirm_password(test_app.id(), EMAIL, &code, NEW_PASSWORD).await;
    reset.expect(StatusCode::OK);
}

// === mails ===

#[tokio::test]
async fn a_mail_limit_drops_only_the_mail_and_the_earlier_code_stays_valid() {
    let test_app = TestApp::start_with(app().limit("mailsPerRecipient", &[(1, HOUR)])).await;
    let first = test_app.register(EMAIL).await;
    let second = test_app.register(&EMAIL.to_uppercase()).await;
    assert_eq!(shape(&first)["headers"], shape(&second)["headers"]);
    // Mails for another purpose are counted separately.
    for _ in 0..2 {
        test_app.client().forgot_password(test_app.id(), EMAIL).await.expect(StatusCode::OK);
    }
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 2);
    let mails = test_app.stack.mails().to(EMAIL);
    let mut confirmed = 0;
    for mail in mails {
        let response = test_app.client().confirm(test_app.id(), &mail.code()).await;
        confirmed += u32::from(response.status == StatusCode::OK);
    }
    assert_eq!(confirmed, 1);
}

#[tokio::test]
async fn mails_that_the_owner_requests_are_counted_separately_from_mails_that_a_stranger_requests() {
    let test_app = TestApp::start_with(app().limit("mailsPerRecipient", &[(1, HOUR)])).await;
    let owner = test_app.register_and_confirm(EMAIL).await;
    for _ in 0..2 {
        test_app.client().forgot_password(test_app.id(), EMAIL).await.expect(StatusCode::OK);
    }
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 2);
    for _ in 0..2 {
        owner.forgot_password(test_app.id(), EMAIL).await.expect(StatusCode::OK);
    }
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 3);
}

#[tokio::test]
async fn mails_per_client_are_counted_over_all_recipients() {
    let test_app = TestApp::start_with(app().limit("mailsPerClient", &[(2, HOUR)])).await;
    let client = test_app.client();
    client.register(test_app.id(), NAME, "one@example.com", PASSWORD).await.expect(StatusCode::OK);
    client.forgot_password(test_app.id(), "nobody@example.com").await.expect(StatusCode::OK);
    client.register(test_app.id(), NAME, "two@example.com", PASSWORD).await.expect(StatusCode::OK);
    client.forgot_password(test_app.id(), "one@example.com").await.expect(StatusCode::OK);
    assert_eq!(test_app.settled_mail_count("one@example.com").await, 1);
    assert_eq!(test_app.settled_mail_count("two@example.com").await, 0);
    // The account exists although its mail was dropped. *verify*, which needs an access token, reports the limit.
    let signed_in = client.authenticate(test_app.id(), "two@example.com", PASSWORD).await;
    expect_rate_limited(signed_in.verify().await, "mailsPerClient", 2, HOUR);
    let other_client = test_app.client().authenticate(test_app.id(), "two@example.com", PASSWORD).await;
    other_client.verify().await.expect(StatusCode::OK);
    test_app.mail("two@example.com", 1).await;
}

#[tokio::test]
async fn notices_are_never_limited() {
    let app = app().limit("mailsPerRecipient", &[(1, HOUR)]).limit("mailsPerClient", &[(2, HOUR)]);
    let test_app = TestApp::start_with(app).await;
    let client = test_app.client();
    client.register(test_app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    client.forgot_password(test_app.id(), EMAIL).await.expect(StatusCode::OK);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 2);
    let mut notices = 0;
    for mail in test_app.stack.mails().to(EMAIL) {
        let reset = client.confirm_password(test_app.id(), EMAIL, &mail.code(), NEW_PASSWORD).await;
        notices += usize::from(reset.status == StatusCode::OK);
    }
    assert_eq!(notices, 1);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 3);
}

// === client addresses ===

/// A login with these `X-Forwarded-For` headers.
async fn login_from(client: &ApiClient, app: &App, forwarded: &[&str]) -> ApiResponse {
    let mut request = client.request(Method::POST, &format!("v1/{}/email/login", app.id()));
    for value in forwarded {
        request = request.header("x-forwarded-for", *value);
    }
    client.send(request.json(&json!({ "email": EMAIL, "password": PASSWORD }))).await
}

#[tokio::test]
async fn x_forwarded_for_from_an_unlisted_peer_is_ignored() {
    let app = app().limit("loginsPerClient", &[(2, HOUR)]);
    let stack = Stack::with(&app).await;
    let client = stack.client();
    for forwarded in ["203.0.113.1", "203.0.113.2"] {
        login_from(&client, &app, &[forwarded]).await.expect(StatusCode::UNAUTHORIZED);
    }
    expect_rate_limited(login_from(&client, &app, &["203.0.113.3"]).await, "loginsPerClient", 2, HOUR);
}

#[tokio::test]
async fn the_client_address_behind_listed_proxies_is_the_rightmost_unlisted_address() {
    let app = app().limit("loginsPerClient", &[(2, HOUR)]);
    let stack = Stack::builder().app(&app).args(["--trusted-proxies", "127.0.0.0/8,10.0.0.0/8"]).start().await;
    let (one, other) = (stack.client(), stack.client());
    login_from(&one, &app, &["203.0.113.7"]).await.expect(StatusCode::UNAUTHORIZED);
    login_from(&other, &app, &["198.51.100.1, 203.0.113.7, 10.1.2.3"]).await.expect(StatusCode::UNAUTHORIZED);
    for forged in [
        &["203.0.113.7"][..],
        &["198.51.100.2,203.0.113.7"],
        &["garbage, 203.0.113.7"],
        &["198.51.100.3", "203.0.113.7", "10.9.9.9, 127.0.0.9"],
        &["::ffff:203.0.113.7"],
        &["203.0.113.7:49152"],
        &["[::ffff:203.0.113.7]:443, 10.1.2.3:80"],
    ] {
        expect_rate_limited(login_from(&one, &app, forged).await, "loginsPerClient", 2, HOUR);
    }
    login_from(&one, &app, &["203.0.113.8"]).await.expect(StatusCode::UNAUTHORIZED);
    // Without the header, the client address is the address of the peer of the connection.
    for _ in 0..2 {
        login_from(&one, &app, &[]).await.expect(StatusCode::UNAUTHORIZED);
    }
    expect_rate_limited(login_from(&one, &app, &[]).await, "loginsPerClient", 2, HOUR);
    login_from(&other, &app, &[]).await.expect(StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn ipv6_clients_are_counted_per_64_bit_prefix_and_a_48_bit_prefix_has_ten_times_the_limit() {
    let app = app().limit("loginsPerClient", &[(2, HOUR)]).limit("loginFailuresPerAccount", &[(1000, HOUR)]);
    let stack = Stack::builder().app(&app).args(["--trusted-proxies", "127.0.0.0/8"]).start().await;
    let client = stack.client();
    for network in 0..10 {
        for host in ["::1", "1:2:3:4"] {
            let address = format!("2001:db8:7:{network:x}{}{host}", if host.starts_with(':') { "" } else { ":" });
            login_from(&client, &app, &[&address]).await.expect(StatusCode::UNAUTHORIZED);
        }
        if network == 0 {
            expect_rate_limited(login_from(&client, &app, &["2001:db8:7::9"]).await, "loginsPerClient", 2, HOUR);
        }
    }
    expect_rate_limited(login_from(&client, &app, &["2001:db8:7:a::1"]).await, "loginsPerClient", 20, HOUR);
    login_from(&client, &app, &["2001:db8:8::1"]).await.expect(StatusCode::UNAUTHORIZED);
}
