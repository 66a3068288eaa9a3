//! Password reset (specification: Accounts, Forgot password).

use std::time::{Duration, Instant};

use http::StatusCode;
use latchkey_tests::{
    passwords::{NEW_PASSWORD, PASSWORD},
    stack::Stack,
};
use serde_json::json;

use crate::{
    fault_support::unlimited_app,
    support::{NAME, TestApp, WRONG_CODE, app, shape},
};

const EMAIL: &str = "ada@example.com";
/// The name of a user. [`PASSWORD_FROM_NAME`] is a strong password for everybody else, and a weak one for this user.
const LONG_NAME: &str = "Bartholomew Quetzalcoatl";
const PASSWORD_FROM_NAME: &str = "bartholomewquetzalcoatl";

#[tokio::test]
async fn forgot_password_responds_the_same_to_every_address_and_mails_only_known_addresses() {
    let test_app = TestApp::start().await;
    test_app.register_and_confirm(EMAIL).await;
    test_app.register("grace@example.com").await;
    let forgot = async |email: &str| {
        let response = test_app.client().forgot_password(test_app.id(), email).await.expect(StatusCode::OK);
        assert_eq!(response.body, json!({ "email": email }), "the address as sent");
        assert_eq!(response.header("cache-control"), Some("no-store"));
        let mut shape = shape(&response);
        shape["body"] = json!(null);
        shape
    };
    let unknown = forgot("nobody@example.com").await;
    for known in [EMAIL, "ADA@example.com", "grace@example.com"] {
        assert_eq!(forgot(known).await, unknown, "{known}");
    }
    assert_eq!(test_app.settled_mail_count("nobody@example.com").await, 0);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 3);
    assert_eq!(
        test_app.settled_mail_count("grace@example.com").await,
        2,
        "an unverified account gets the mail as well"
    );
}

#[tokio::test]
async fn confirm_password_sets_the_password_and_returns_the_address() {
    let test_app = TestApp::start().await;
    test_app.register_and_confirm(EMAIL).await;
    let code = test_app.request_reset_code(EMAIL, 2).await;
    let response =
        test_app.client().confirm_password(test_app.id(), "Ada@Example.com", &code.to_lowercase(), NEW_PASSWORD).await;
    let response = response.expect(StatusCode::OK);
    assert_eq!(response.body, json!({ "email": "Ada@Example.com" }));
    assert_eq!(response.header("cache-control"), Some("no-store"));
    let old = test_app.client().login(test_app.id(), EMAIL, PASSWORD).await;
    old.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    test_app.client().login(test_app.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_reset_ends_all_sessions_and_other_codes_and_sends_a_notice() {
    let test_app = TestApp::start().await;
    let client = test_app.register_and_confirm(EMAIL).await;
    let sessions = [
        client.authenticate(test_app.id(), EMAIL, PASSWORD).await,
        test_app.client().authenticate(test_app.id(), EMAIL, PASSWORD).await,
    ];
    let (first_code, second_code) =
        (test_app.request_reset_code(EMAIL, 2).await, test_app.request_reset_code(EMAIL, 3).await);
    let reset = client.confirm_password(test_app.id(), EMAIL, &first_code, NEW_PASSWORD).await;
    reset.expect(StatusCode::OK);
    for session in sessions {
        session.verify().await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    }
    for code in [first_code, second_code] {
        let again = test_app.client().confirm_password(test_app.id(), EMAIL, &code, PASSWORD).await;
        again.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    }
    let notice = test_app.mail(EMAIL, 4).await;
    assert_eq!(notice.code, None);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 4);
    test_app.client().login(test_app.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_reset_by_an_unverified_account_verifies_its_address() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let confirm_code = test_app.code(EMAIL, 1).await;
    let reset_code = test_app.request_reset_code(EMAIL, 2).await;
    let response = test_app.client().confirm_password(test_app.id(), EMAIL, &reset_code, NEW_PASSWORD).await;
    response.expect(StatusCode::OK);
    assert!(test_app.epoch_and_verified(EMAIL).await.1);
    let refused = test_app.client().confirm(test_app.id(), &confirm_code).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    let signed_in = test_app.client().authenticate(test_app.id(), EMAIL, NEW_PASSWORD).await;
    signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 3, "confirm, reset, notice; verify had nothing to send");
}

#[tokio::test]
async fn confirm_password_ends_the_contested_state() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    test_app.client().register(test_app.id(), NAME, EMAIL, "third-Harbour-quilt-64").await.expect(StatusCode::OK);
    let reset = test_app.request_reset_code(EMAIL, 3).await;
    let response = test_app.client().confirm_password(test_app.id(), EMAIL, &reset, NEW_PASSWORD).await;
    response.expect(StatusCode::OK);
    for removed in [PASSWORD, "third-Harbour-quilt-64"] {
        let refused = test_app.client().login(test_app.id(), EMAIL, removed).await;
        refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    }
    test_app.client().login(test_app.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    let mut connection = test_app.stack.database.connect().await.unwrap();
    let contested: bool = sqlx::query_scalar("SELECT contested FROM users").fetch_one(&mut connection).await.unwrap();
    assert!(!contested);
}

#[tokio::test]
async fn wrong_used_and_expired_codes_and_unknown_addresses_get_the_same_response() {
    let test_app = TestApp::start().await;
    test_app.register_and_confirm(EMAIL).await;
    test_app.register_and_confirm("grace@example.com").await;
    let used = test_app.request_reset_code(EMAIL, 2).await;
    test_app.client().confirm_password(test_app.id(), EMAIL, &used, NEW_PASSWORD).await.expect(StatusCode::OK);
    test_app.mail(EMAIL, 3).await;
    let other_users_code = test_app.request_reset_code("grace@example.com", 2).await;
    test_app.edit_rendered(|document| document["mail"]["resetCodeLifetimeSeconds"] = json!(1)).await;
    test_app.client().forgot_password(test_app.id(), EMAIL).await.expect(StatusCode::OK);
    let mail = test_app.mail(EMAIL, 4).await;
    test_app.wait_until_past(mail.received_at + 1).await;
    let expired = mail.code();

    let mut responses = Vec::new();
    for (email, code) in [
        (EMAIL, WRONG_CODE),
        (EMAIL, &used),
        (EMAIL, &expired),
        (EMAIL, &other_users_code),
        (EMAIL, "not a code"),
        ("nobody@example.com", WRONG_CODE),
        ("nobody@example.com", &other_users_code),
    ] {
        let response = test_app.client().confirm_password(test_app.id(), email, code, PASSWORD).await;
        responses.push(shape(&response.expect_error(StatusCode::BAD_REQUEST, "invalid_code")));
    }
    responses.dedup();
    assert_eq!(responses.len(), 1, "{responses:#?}");
    test_app.client().login(test_app.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    // The attempt with another email address did not use up the code.
    let right =
        test_app.client().confirm_password(test_app.id(), "grace@example.com", &other_users_code, NEW_PASSWORD).await;
    right.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_weak_password_does_not_consume_the_code_and_is_checked_before_the_code() {
    let test_app = TestApp::start().await;
    test_app.register_and_confirm(EMAIL).await;
    let code = test_app.request_reset_code(EMAIL, 2).await;
    let before = test_app.epoch_and_verified(EMAIL).await;
    for weak in ["short-7", "password1234", "ada@example.com", &"x9-Q".repeat(33)] {
        for code in [code.as_str(), WRONG_CODE] {
            let refused = test_app.client().confirm_password(test_app.id(), EMAIL, code, weak).await;
            let refused = refused.expect_error(StatusCode::BAD_REQUEST, "weak_password");
            assert_eq!(refused.body["fields"][0]["field"], "password");
        }
    }
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, before);
    test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    test_app.client().confirm_password(test_app.id(), EMAIL, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_hostile_password_takes_no_longer_to_check_than_three_logins() {
    let test_app = TestApp::from_builder(unlimited_app("hostile"), Stack::builder()).await;
    test_app.register_and_confirm(EMAIL).await;
    let client = test_app.client();
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let mut logins = Vec::new();
    for _ in 0..9 {
        let started = Instant::now();
        client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
        logins.push(started.elapsed());
    }
    let login = median(logins);
    // Two passwords consist of symbols that zxcvbn can read as letters. The third password is a run of keypad keys. The
    // run is so long that the number of guesses would overflow in zxcvbn.
    let symbols = "4@8({[<3691!|70$5+%2".repeat(4);
    for hostile in [symbols[..76].to_owned(), symbols, "69".repeat(32)] {
        let mut times = Vec::new();
        for _ in 0..9 {
            let started = Instant::now();
            let response = client.confirm_password(test_app.id(), EMAIL, WRONG_CODE, &hostile).await;
            assert_eq!(response.status, StatusCode::BAD_REQUEST);
            times.push(started.elapsed());
        }
        let took = median(times);
        assert!(took < login * 3, "{took:?}, a login {login:?}");
    }
    client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_password_is_compared_with_the_name_only_if_the_code_is_right() {
    let test_app = TestApp::start().await;
    let client = test_app.client();
    let refused = client.register(test_app.id(), LONG_NAME, EMAIL, PASSWORD_FROM_NAME).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "weak_password");
    client.register(test_app.id(), LONG_NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let code = test_app.request_reset_code(EMAIL, 2).await;

    for (email, wrong) in [(EMAIL, WRONG_CODE), ("nobody@example.com", WRONG_CODE), ("nobody@example.com", &code)] {
        let response = client.confirm_password(test_app.id(), email, wrong, PASSWORD_FROM_NAME).await;
        response.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    }
    let response = client.confirm_password(test_app.id(), EMAIL, &code, PASSWORD_FROM_NAME).await;
    response.expect_error(StatusCode::BAD_REQUEST, "weak_password");
    client.confirm_password(test_app.id(), EMAIL, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn the_apps_own_password_rules_apply_to_register_and_reset() {
    let app = app().set("/password/minimumLength", 30).set("/password/minimumStrength", 0);
    let test_app = TestApp::start_with(app).await;
    let (short, long) = ("a".repeat(29), "a".repeat(30));
    let refused = test_app.client().register(test_app.id(), NAME, EMAIL, &short).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "weak_password");
    test_app.client().register(test_app.id(), NAME, EMAIL, &long).await.expect(StatusCode::OK);
    let code = test_app.request_reset_code(EMAIL, 2).await;
    let refused = test_app.client().confirm_password(test_app.id(), EMAIL, &code, &short).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "weak_password");
    let long = "b".repeat(30);
    test_app.client().confirm_password(test_app.id(), EMAIL, &code, &long).await.expect(StatusCode::OK);
    test_app.client().login(test_app.id(), EMAIL, &long).await.expect(StatusCode::OK);
}
