//! Rate limits: each at its bound and one beyond, what it counts, and what a refusal says and leaves unchanged
//! (specification: Limits, Rate limits).

use std::{fs, time::Duration};

use http::{Method, StatusCode};
use latchkey_tests::{
    builders::App,
    client::{ApiClient, ApiResponse},
    stack::Stack,
};
use serde_json::json;

use crate::support::{NAME, NEW_PASSWORD, PASSWORD, TestApp, WRONG_CODE, WRONG_PASSWORD, app, shape};

const EMAIL: &str = "ada@example.com";
/// Longer than any test takes.
const HOUR: u32 = 3600;

/// Asserts a refusal by this limit: its status, and the headers with the time to wait. Returns that time in seconds.
#[track_caller]
fn expect_rate_limited(answer: ApiResponse, name: &str, count: u32, window: u32) -> u64 {
    let answer = answer.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    let wait: u64 = answer.header("retry-after").expect("Retry-After").parse().expect("seconds");
    // A counted request expires at most a fiftieth of the window late.
    let longest = u64::from(window + window.div_ceil(50));
    assert!((1..=longest).contains(&wait), "{wait} s");
    let policy = format!("\"{name}\";q={count};w={window}");
    assert_eq!(answer.header("ratelimit-policy"), Some(policy.as_str()));
    assert_eq!(answer.header("ratelimit"), Some(format!("\"{name}\";r=0;t={wait}").as_str()));
    wait
}

async fn wrong_login(client: &ApiClient, shop: &TestApp, email: &str) -> ApiResponse {
    client.login(shop.id(), email, WRONG_PASSWORD).await
}

// === logins ===

#[tokio::test]
async fn login_failures_per_client_count_one_account_from_one_client_address() {
    let shop = TestApp::start_with(app().limit("loginFailuresPerClient", &[(3, HOUR)])).await;
    shop.register_and_confirm(EMAIL).await;
    shop.register_and_confirm("grace@example.com").await;
    // Known and unknown addresses count alike, whatever their case.
    for email in [EMAIL, "nobody@example.com"] {
        let client = shop.client();
        for email in [email, &email.to_uppercase(), email] {
            wrong_login(&client, &shop, email).await.expect(StatusCode::UNAUTHORIZED);
        }
        let refused = client.login(shop.id(), email, PASSWORD).await;
        expect_rate_limited(refused, "loginFailuresPerClient", 3, HOUR);
        client.login(shop.id(), "grace@example.com", PASSWORD).await.expect(StatusCode::OK);
    }
    shop.client().login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_right_password_does_not_count_as_a_failure() {
    let shop = TestApp::start_with(app().limit("loginFailuresPerClient", &[(2, HOUR)])).await;
    let client = shop.register_and_confirm(EMAIL).await;
    wrong_login(&client, &shop, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
    for _ in 0..4 {
        client.login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    }
    wrong_login(&client, &shop, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
    expect_rate_limited(wrong_login(&client, &shop, EMAIL).await, "loginFailuresPerClient", 2, HOUR);
}

#[tokio::test]
async fn login_failures_per_account_count_only_from_unknown_client_addresses() {
    let shop = TestApp::start_with(app().limit("loginFailuresPerAccount", &[(3, HOUR)])).await;
    let confirmed_here = shop.register_and_confirm(EMAIL).await;
    let signed_in_here = shop.client();
    signed_in_here.login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    for email in [EMAIL, "nobody@example.com"] {
        for _ in 0..3 {
            wrong_login(&shop.client(), &shop, email).await.expect(StatusCode::UNAUTHORIZED);
        }
        let refused = shop.client().login(shop.id(), email, PASSWORD).await;
        expect_rate_limited(refused, "loginFailuresPerAccount", 3, HOUR);
    }
    for known in [&confirmed_here, &signed_in_here] {
        for _ in 0..4 {
            wrong_login(known, &shop, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
        }
        known.login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    }
    // A user who is refused from a new client address can reset the password by mail and log in.
    let new_place = shop.client();
    new_place.login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::TOO_MANY_REQUESTS);
    new_place.forgot_password(shop.id(), EMAIL).await.expect(StatusCode::OK);
    let code = shop.code(EMAIL, 2).await;
    new_place.confirm_password(shop.id(), EMAIL, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
    new_place.login(shop.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn login_failures_per_client_overall_count_over_all_accounts() {
    let shop = TestApp::start_with(app().limit("loginFailuresPerClientOverall", &[(3, HOUR)])).await;
    shop.register_and_confirm(EMAIL).await;
    let client = shop.client();
    for index in 0..3 {
        let answer = wrong_login(&client, &shop, &format!("nobody{index}@example.com")).await;
        answer.expect(StatusCode::UNAUTHORIZED);
    }
    let refused = client.login(shop.id(), EMAIL, PASSWORD).await;
    expect_rate_limited(refused, "loginFailuresPerClientOverall", 3, HOUR);
    shop.client().login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn logins_per_client_count_whatever_the_outcome() {
    let shop = TestApp::start_with(app().limit("loginsPerClient", &[(3, HOUR)])).await;
    shop.register_and_confirm(EMAIL).await;
    let client = shop.client();
    client.login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    wrong_login(&client, &shop, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
    wrong_login(&client, &shop, "nobody@example.com").await.expect(StatusCode::UNAUTHORIZED);
    expect_rate_limited(client.login(shop.id(), EMAIL, PASSWORD).await, "loginsPerClient", 3, HOUR);
    shop.client().login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn the_defaults_are_those_of_the_specification() {
    let shop = TestApp::start_with(App::new("shop")).await;
    let client = shop.client();
    for _ in 0..10 {
        wrong_login(&client, &shop, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
    }
    expect_rate_limited(wrong_login(&client, &shop, EMAIL).await, "loginFailuresPerClient", 10, 900);
    // The refused logins did not count, so 50 of the 60 per minute are left.
    for index in 0..50 {
        let answer = wrong_login(&client, &shop, &format!("nobody{}@example.com", index / 9)).await;
        answer.expect(StatusCode::UNAUTHORIZED);
    }
    expect_rate_limited(wrong_login(&client, &shop, "nobody@example.com").await, "loginsPerClient", 60, 60);
    for _ in 0..10 {
        client.confirm(shop.id(), WRONG_CODE).await.expect(StatusCode::BAD_REQUEST);
    }
    expect_rate_limited(client.confirm(shop.id(), WRONG_CODE).await, "codesPerClient", 10, 60);
}

#[tokio::test]
async fn a_refusal_never_reveals_whether_an_account_exists() {
    let shop = TestApp::start_with(app().limit("loginFailuresPerClient", &[(1, HOUR)])).await;
    shop.register_and_confirm(EMAIL).await;
    let client = shop.client();
    let mut refusals = Vec::new();
    for email in [EMAIL, "nobody@example.com"] {
        wrong_login(&client, &shop, email).await.expect(StatusCode::UNAUTHORIZED);
        refusals.push(shape(&wrong_login(&client, &shop, email).await.expect(StatusCode::TOO_MANY_REQUESTS)));
    }
    assert_eq!(refusals[0], refusals[1]);
}

// === windows ===

#[tokio::test]
async fn a_refusal_consumes_nothing_and_after_retry_after_a_request_succeeds() {
    let app = app().limit("loginsPerClient", &[(2, 6)]).limit("loginFailuresPerClient", &[(3, HOUR)]);
    let shop = TestApp::start_with(app).await;
    let client = shop.client();
    for _ in 0..2 {
        wrong_login(&client, &shop, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
    }
    let wait = expect_rate_limited(wrong_login(&client, &shop, EMAIL).await, "loginsPerClient", 2, 6);
    let end = tokio::time::Instant::now() + Duration::from_secs(wait);
    for _ in 0..5 {
        expect_rate_limited(wrong_login(&client, &shop, EMAIL).await, "loginsPerClient", 2, 6);
    }
    tokio::time::sleep_until(end).await;
    // This is the third failure, so none of the refused attempts counted.
    wrong_login(&client, &shop, EMAIL).await.expect(StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn all_windows_of_a_limit_apply() {
    let shop = TestApp::start_with(app().limit("codesPerClient", &[(2, 5), (3, HOUR)])).await;
    let client = shop.client();
    let confirm = async || client.confirm(shop.id(), WRONG_CODE).await;
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
async fn a_limit_is_never_looser_than_the_installs_ceiling() {
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
async fn two_servers_count_together() {
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
async fn two_apps_count_separately() {
    let (one, other) = (app().limit("loginsPerClient", &[(1, HOUR)]), app().limit("loginsPerClient", &[(1, HOUR)]));
    let stack = Stack::builder().app(&one).app(&other).start().await;
    let client = stack.client();
    client.login(one.id(), EMAIL, PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    client.login(one.id(), EMAIL, PASSWORD).await.expect(StatusCode::TOO_MANY_REQUESTS);
    client.login(other.id(), EMAIL, PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
}

// === registrations, codes ===

#[tokio::test]
async fn registrations_per_client_count_new_and_known_addresses_alike() {
    let shop = TestApp::start_with(app().limit("registrationsPerClient", &[(3, HOUR)])).await;
    shop.register_and_confirm(EMAIL).await;
    let client = shop.client();
    for email in [EMAIL, "new@example.com", "new@example.com"] {
        client.register(shop.id(), NAME, email, PASSWORD).await.expect(StatusCode::OK);
    }
    for email in [EMAIL, "later@example.com"] {
        let refused = client.register(shop.id(), NAME, email, PASSWORD).await;
        expect_rate_limited(refused, "registrationsPerClient", 3, HOUR);
    }
    assert_eq!(shop.settled_mail_count("later@example.com").await, 0);
    let login = shop.client().login(shop.id(), "later@example.com", PASSWORD).await;
    login.expect(StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn codes_per_client_count_only_wrong_codes_of_both_kinds() {
    let shop = TestApp::start_with(app().limit("codesPerClient", &[(2, HOUR)])).await;
    let client = shop.client();
    for index in 0..3 {
        let email = format!("user{index}@example.com");
        shop.register(&email).await;
        let code = shop.code(&email, 1).await;
        client.confirm(shop.id(), &code).await.expect(StatusCode::OK);
        let code = shop.reset_code(&email, 2).await;
        let reset = client.confirm_password(shop.id(), &email, &code, NEW_PASSWORD).await;
        reset.expect(StatusCode::OK);
    }
    shop.register(EMAIL).await;
    let code = shop.code(EMAIL, 1).await;
    client.confirm(shop.id(), WRONG_CODE).await.expect(StatusCode::BAD_REQUEST);
    let wrong = client.confirm_password(shop.id(), "nobody@example.com", WRONG_CODE, NEW_PASSWORD).await;
    wrong.expect(StatusCode::BAD_REQUEST);
    expect_rate_limited(client.confirm(shop.id(), &code).await, "codesPerClient", 2, HOUR);
    let refused = client.confirm_password(shop.id(), EMAIL, WRONG_CODE, NEW_PASSWORD).await;
    expect_rate_limited(refused, "codesPerClient", 2, HOUR);
    // The right code of a refused call is not consumed.
    shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_password_too_weak_to_reset_counts_like_a_wrong_code() {
    let shop = TestApp::start_with(app().limit("codesPerClient", &[(3, HOUR)])).await;
    let client = shop.client();
    shop.register(EMAIL).await;
    let code = shop.reset_code(EMAIL, 2).await;
    for (code, weak) in [(code.as_str(), "password1234"), (WRONG_CODE, "short-7"), (WRONG_CODE, EMAIL)] {
        let refused = client.confirm_password(shop.id(), EMAIL, code, weak).await;
        refused.expect_error(StatusCode::BAD_REQUEST, "weak_password");
    }
    expect_rate_limited(
        client.confirm_password(shop.id(), EMAIL, &code, "password1234").await,
        "codesPerClient",
        3,
        HOUR,
    );
    // The code is still valid, from another client address.
    let reset = shop.client().confirm_password(shop.id(), EMAIL, &code, NEW_PASSWORD).await;
    reset.expect(StatusCode::OK);
}

// === mails ===

#[tokio::test]
async fn a_mail_limit_drops_only_the_mail_and_the_earlier_code_stays_valid() {
    let shop = TestApp::start_with(app().limit("mailsPerRecipient", &[(1, HOUR)])).await;
    let first = shop.register(EMAIL).await;
    let second = shop.register(&EMAIL.to_uppercase()).await;
    assert_eq!(shape(&first)["headers"], shape(&second)["headers"]);
    // Another purpose counts separately.
    for _ in 0..2 {
        shop.client().forgot_password(shop.id(), EMAIL).await.expect(StatusCode::OK);
    }
    assert_eq!(shop.settled_mail_count(EMAIL).await, 2);
    let mails = shop.stack.mails().to(EMAIL);
    let mut confirmed = 0;
    for mail in mails {
        let answer = shop.client().confirm(shop.id(), &mail.code()).await;
        confirmed += u32::from(answer.status == StatusCode::OK);
    }
    assert_eq!(confirmed, 1);
}

#[tokio::test]
async fn mails_requested_by_the_owner_count_separately_from_a_strangers() {
    let shop = TestApp::start_with(app().limit("mailsPerRecipient", &[(1, HOUR)])).await;
    let owner = shop.register_and_confirm(EMAIL).await;
    for _ in 0..2 {
        shop.client().forgot_password(shop.id(), EMAIL).await.expect(StatusCode::OK);
    }
    assert_eq!(shop.settled_mail_count(EMAIL).await, 2);
    for _ in 0..2 {
        owner.forgot_password(shop.id(), EMAIL).await.expect(StatusCode::OK);
    }
    assert_eq!(shop.settled_mail_count(EMAIL).await, 3);
}

#[tokio::test]
async fn mails_per_client_count_over_all_recipients() {
    let shop = TestApp::start_with(app().limit("mailsPerClient", &[(2, HOUR)])).await;
    let client = shop.client();
    client.register(shop.id(), NAME, "one@example.com", PASSWORD).await.expect(StatusCode::OK);
    client.forgot_password(shop.id(), "nobody@example.com").await.expect(StatusCode::OK);
    client.register(shop.id(), NAME, "two@example.com", PASSWORD).await.expect(StatusCode::OK);
    client.forgot_password(shop.id(), "one@example.com").await.expect(StatusCode::OK);
    assert_eq!(shop.settled_mail_count("one@example.com").await, 1);
    assert_eq!(shop.settled_mail_count("two@example.com").await, 0);
    // The account exists nevertheless, and verify returns the refusal.
    let signed_in = client.authenticate(shop.id(), "two@example.com", PASSWORD).await;
    expect_rate_limited(signed_in.verify().await, "mailsPerClient", 2, HOUR);
    let elsewhere = shop.client().authenticate(shop.id(), "two@example.com", PASSWORD).await;
    elsewhere.verify().await.expect(StatusCode::OK);
    shop.mail("two@example.com", 1).await;
}

#[tokio::test]
async fn notices_are_never_limited() {
    let app = app().limit("mailsPerRecipient", &[(1, HOUR)]).limit("mailsPerClient", &[(2, HOUR)]);
    let shop = TestApp::start_with(app).await;
    let client = shop.client();
    client.register(shop.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    client.forgot_password(shop.id(), EMAIL).await.expect(StatusCode::OK);
    assert_eq!(shop.settled_mail_count(EMAIL).await, 2);
    let mut notices = 0;
    for mail in shop.stack.mails().to(EMAIL) {
        let reset = client.confirm_password(shop.id(), EMAIL, &mail.code(), NEW_PASSWORD).await;
        notices += usize::from(reset.status == StatusCode::OK);
    }
    assert_eq!(notices, 1);
    assert_eq!(shop.settled_mail_count(EMAIL).await, 3);
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
async fn x_forwarded_for_of_an_unlisted_peer_is_ignored() {
    let app = app().limit("loginsPerClient", &[(2, HOUR)]);
    let stack = Stack::with(&app).await;
    let client = stack.client();
    for forwarded in ["203.0.113.1", "203.0.113.2"] {
        login_from(&client, &app, &[forwarded]).await.expect(StatusCode::UNAUTHORIZED);
    }
    expect_rate_limited(login_from(&client, &app, &["203.0.113.3"]).await, "loginsPerClient", 2, HOUR);
}

#[tokio::test]
async fn behind_listed_proxies_the_client_is_the_rightmost_unlisted_address() {
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
    // Without the header the address of the peer counts.
    for _ in 0..2 {
        login_from(&one, &app, &[]).await.expect(StatusCode::UNAUTHORIZED);
    }
    expect_rate_limited(login_from(&one, &app, &[]).await, "loginsPerClient", 2, HOUR);
    login_from(&other, &app, &[]).await.expect(StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn an_ipv6_client_counts_by_its_64_prefix_and_its_48_prefix_has_ten_times_the_count() {
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
