//! Confirmation of an email address: which session continues, which sessions end, and which codes are valid
//! (specification: Accounts, Confirm).

use http::{Method, StatusCode};
use latchkey_tests::{
    client::AuthenticatedClient,
    passwords::{NEW_PASSWORD, PASSWORD},
    stack::Stack,
};
use serde_json::json;

use crate::support::{NAME, TestApp, WRONG_CODE, app};

const EMAIL: &str = "ada@example.com";

#[tokio::test]
async fn confirm_marks_the_address_verified_and_opens_a_session() {
    let test_app = TestApp::start().await;
    let registered = test_app.register(EMAIL).await;
    let before = test_app.epoch_and_verified(EMAIL).await;
    let code = test_app.code(EMAIL, 1).await;
    let client = test_app.client();
    let response = client.confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    let names: Vec<&str> = response.body.as_object().unwrap().keys().map(String::as_str).collect();
    let expected =
        ["access_token", "email", "expires_at", "expires_in", "local_id", "name", "refresh_token", "session_id"];
    assert_eq!(names, expected, "and no password_required");
    assert_eq!(response.header("cache-control"), Some("no-store"));
    assert_eq!((response.string("email"), response.string("name")), (EMAIL, NAME));
    assert_eq!(response.string("local_id"), registered.string("local_id"));

    let (epoch, verified) = test_app.epoch_and_verified(EMAIL).await;
    assert!(verified && epoch > before.0, "confirming raises the epoch");
    let signed_in = client.with_token(test_app.id(), response.string("access_token"));
    signed_in.verify().await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_code_cannot_be_redeemed_twice() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let code = test_app.code(EMAIL, 1).await;
    test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    let epoch = test_app.epoch_and_verified(EMAIL).await;
    let again = test_app.client().confirm(test_app.id(), &code).await;
    again.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, epoch);
}

#[tokio::test]
async fn wrong_used_expired_and_malformed_codes_get_the_same_response() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let used = test_app.code(EMAIL, 1).await;
    test_app.client().confirm(test_app.id(), &used).await.expect(StatusCode::OK);
    test_app.edit_rendered(|document| document["mail"]["confirmCodeLifetimeSeconds"] = json!(1)).await;
    let registered = test_app.register("grace@example.com").await;
    assert_eq!(registered.integer("expires_in"), 1);
    let mail = test_app.mail("grace@example.com", 1).await;
    test_app.wait_until_past(mail.received_at + 1).await;
    let expired = mail.code();

    let mut responses = Vec::new();
    for code in [WRONG_CODE, &used, &expired, "x", "UUUUU-UUUUU", "ABCDE-12345-6", &"9".repeat(10_000), "\u{0}"] {
        let response = test_app.client().confirm(test_app.id(), code).await;
        let mut response = response.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
        response.body["request_id"] = json!(null);
        responses.push(response.body);
    }
    responses.dedup();
    assert_eq!(responses.len(), 1, "{responses:#?}");
    assert!(!test_app.epoch_and_verified("grace@example.com").await.1);
}

#[tokio::test]
async fn hyphens_spaces_and_case_of_a_code_do_not_matter() {
    let test_app = TestApp::start().await;
    for (index, change_spelling) in [
        |code: &str| code.to_lowercase(),
        |code: &str| code.replace('-', ""),
        |code: &str| format!("  {}\t{} ", &code[..3].to_lowercase(), &code[3..]),
        |code: &str| code.chars().flat_map(|symbol| [symbol, '-']).collect(),
    ]
    .into_iter()
    .enumerate()
    {
        let email = format!("ada{index}@example.com");
        test_app.register(&email).await;
        let code = test_app.code(&email, 1).await;
        test_app.client().confirm(test_app.id(), &change_spelling(&code)).await.expect(StatusCode::OK);
    }
}

#[tokio::test]
async fn the_letter_o_in_a_code_is_read_as_0_and_the_letters_i_and_l_as_1() {
    let test_app = TestApp::start().await;
    let mut registered = 0;
    for (symbol, misread) in [('0', "O"), ('0', "o"), ('1', "I"), ('1', "l")] {
        // Registers users until a code contains the symbol. About one code in four contains it.
        let code = loop {
            registered += 1;
            let email = format!("ada{registered}@example.com");
            test_app.register(&email).await;
            let code = test_app.code(&email, 1).await;
            if code.contains(symbol) {
                break code;
            }
        };
        test_app.client().confirm(test_app.id(), &code.replace(symbol, misread)).await.expect(StatusCode::OK);
    }
}

#[tokio::test]
async fn using_one_of_several_codes_invalidates_the_others() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    test_app.register(EMAIL).await;
    let (first, second) = (test_app.code(EMAIL, 1).await, test_app.code(EMAIL, 2).await);
    let reset = test_app.request_reset_code(EMAIL, 3).await;
    test_app.client().confirm(test_app.id(), &first).await.expect(StatusCode::OK);
    let other = test_app.client().confirm(test_app.id(), &second).await;
    other.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    let reset = test_app.client().confirm_password(test_app.id(), EMAIL, &reset, NEW_PASSWORD).await;
    reset.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_code_works_only_for_its_purpose_and_app_and_a_wrong_use_does_not_consume_it() {
    let (one, other) = (app(), app());
    let stack = Stack::builder().app(&one).app(&other).start().await;
    let test_app = TestApp { stack, app: one };
    test_app.register(EMAIL).await;
    let confirm_code = test_app.code(EMAIL, 1).await;
    let reset_code = test_app.request_reset_code(EMAIL, 2).await;

    let client = test_app.client();
    let refused = client.confirm(test_app.id(), &reset_code).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    let refused = client.confirm_password(test_app.id(), EMAIL, &confirm_code, NEW_PASSWORD).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    client.confirm(other.id(), &confirm_code).await.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    let refused = client.confirm_password(other.id(), EMAIL, &reset_code, NEW_PASSWORD).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "invalid_code");

    test_app.client().confirm(test_app.id(), &confirm_code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_code_from_an_earlier_epoch_is_invalid() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let confirm_code = test_app.code(EMAIL, 1).await;
    let reset_code = test_app.request_reset_code(EMAIL, 2).await;
    test_app.sql("UPDATE users SET epoch = epoch + 1").await;
    let before = test_app.epoch_and_verified(EMAIL).await;
    let refused = test_app.client().confirm(test_app.id(), &confirm_code).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    let refused = test_app.client().confirm_password(test_app.id(), EMAIL, &reset_code, NEW_PASSWORD).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, before);
    test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_contested_account_loses_its_password_at_confirm() {
    // A second registration with another password makes the account contested. Either registration can be the owner's,
    // so the test runs once with the first code and once with the second code.
    for nth_code in [1, 2] {
        let test_app = TestApp::start().await;
        test_app.register(EMAIL).await;
        let earlier_session = test_app.client().authenticate(test_app.id(), EMAIL, PASSWORD).await;
        let second = test_app.client().register(test_app.id(), "Another", EMAIL, NEW_PASSWORD).await;
        second.expect(StatusCode::OK);
        let refused = test_app.client().login(test_app.id(), EMAIL, NEW_PASSWORD).await;
        refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
        test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);

        test_app.code(EMAIL, 2).await;
        let code = test_app.code(EMAIL, nth_code).await;
        let client = test_app.client();
        let confirmed = client.confirm(test_app.id(), &code).await.expect(StatusCode::OK);
        assert_eq!(confirmed.body["password_required"], true);
        for password in [PASSWORD, NEW_PASSWORD] {
            let refused = test_app.client().login(test_app.id(), EMAIL, password).await;
            refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
        }
        earlier_session.verify().await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
        let own_session = client.with_token(test_app.id(), confirmed.string("access_token"));
        own_session.verify().await.expect(StatusCode::OK);

        // With a reset, the account gets a password again.
        let reset = test_app.request_reset_code(EMAIL, 3).await;
        let reset_response = test_app.client().confirm_password(test_app.id(), EMAIL, &reset, NEW_PASSWORD).await;
        reset_response.expect(StatusCode::OK);
        test_app.client().login(test_app.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    }
}

#[tokio::test]
async fn a_session_from_before_the_confirmation_ends_when_somebody_else_confirms() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let earlier_session = test_app.client().authenticate(test_app.id(), EMAIL, PASSWORD).await;
    earlier_session.verify().await.expect(StatusCode::OK);
    let code = test_app.code(EMAIL, 1).await;
    test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    earlier_session.verify().await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
}

#[tokio::test]
async fn identities_are_deleted_unless_a_session_of_the_account_confirms() {
    let test_app = TestApp::start().await;
    for (email, with_bearer) in [("ada@example.com", false), ("grace@example.com", true)] {
        test_app.register(email).await;
        let client = test_app.client();
        let signed_in = client.authenticate(test_app.id(), email, PASSWORD).await;
        test_app.sql(&format!(
            "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
             SELECT app_id, 'https://id.example', id::text, id, 'id', now() FROM users WHERE email_canonical = '{email}'"
        ))
        .await;
        let code = test_app.code(email, 1).await;
        if with_bearer {
            signed_in.confirm(&code).await.expect(StatusCode::OK);
        } else {
            client.confirm(test_app.id(), &code).await.expect(StatusCode::OK);
        }
        let mut connection = test_app.stack.database.connect().await.unwrap();
        let remaining: i64 =
            sqlx::query_scalar("SELECT count(*) FROM identities").fetch_one(&mut connection).await.unwrap();
        assert_eq!(remaining, i64::from(with_bearer));
    }
}

#[tokio::test]
async fn a_confirm_with_an_access_token_continues_that_session_and_ends_all_others() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let client = test_app.client();
    let login = client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let own_session = client.with_token(test_app.id(), login.string("token"));
    let other_session = test_app.client().authenticate(test_app.id(), EMAIL, PASSWORD).await;

    let code = test_app.code(EMAIL, 1).await;
    let confirmed = own_session.confirm(&code).await.expect(StatusCode::OK);
    assert_eq!(confirmed.string("session_id"), login.string("session_id"));
    own_session.verify().await.expect(StatusCode::OK);
    client.with_token(test_app.id(), confirmed.string("access_token")).verify().await.expect(StatusCode::OK);
    other_session.verify().await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_confirm_removes_a_contested_password_even_with_a_token_of_the_account() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let own_session = test_app.client().authenticate(test_app.id(), EMAIL, PASSWORD).await;
    let second = test_app.client().register(test_app.id(), NAME, EMAIL, NEW_PASSWORD).await;
    second.expect(StatusCode::OK);
    let code = test_app.code(EMAIL, 2).await;
    let confirmed = own_session.confirm(&code).await.expect(StatusCode::OK);
    assert_eq!(confirmed.body["password_required"], true);
    let refused = test_app.client().login(test_app.id(), EMAIL, PASSWORD).await;
    refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
}

#[tokio::test]
async fn an_invalid_token_or_a_token_of_another_account_is_ignored() {
    let test_app = TestApp::start().await;
    let stranger = test_app.register_and_confirm("mallory@example.com").await;
    let stranger_login = stranger.login(test_app.id(), "mallory@example.com", PASSWORD).await.expect(StatusCode::OK);
    let stranger = stranger.with_token(test_app.id(), stranger_login.string("token"));
    let invalid_token = test_app.client().with_token(test_app.id(), "x.y.z");
    for (index, bearer) in [&stranger, &invalid_token].into_iter().enumerate() {
        let email = format!("ada{index}@example.com");
        test_app.register(&email).await;
        let earlier_session = test_app.client().authenticate(test_app.id(), &email, PASSWORD).await;
        let code = test_app.code(&email, 1).await;
        let confirmed = bearer.confirm(&code).await.expect(StatusCode::OK);
        assert_eq!(confirmed.string("email"), email);
        assert_ne!(confirmed.string("session_id"), stranger_login.string("session_id"));
        earlier_session.verify().await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    }
    stranger.verify().await.expect(StatusCode::OK);
}

#[tokio::test]
async fn two_authorization_headers_are_ignored() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let own_session = test_app.client().authenticate(test_app.id(), EMAIL, PASSWORD).await;
    let with_two_headers = |signed_in: &AuthenticatedClient, operation: &str| {
        let request = signed_in.request(Method::POST, operation);
        request.header("authorization", format!("Bearer {}", signed_in.token()))
    };
    let refused = own_session.send(with_two_headers(&own_session, "email/verify")).await;
    refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    let code = test_app.code(EMAIL, 1).await;
    own_session
        .send(with_two_headers(&own_session, "email/confirm").json(&json!({ "code": code })))
        .await
        .expect(StatusCode::OK);
    own_session.verify().await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
}

#[tokio::test]
async fn the_confirmation_mail_has_the_time_of_registration_and_says_when_to_ignore_it() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let mail = test_app.mail(EMAIL, 1).await;
    let mut connection = test_app.stack.database.connect().await.unwrap();
    let year: String =
        sqlx::query_scalar("SELECT to_char(created_at, 'YYYY') FROM users").fetch_one(&mut connection).await.unwrap();
    for part in [&mail.text, &mail.html] {
        assert!(part.contains(&year) && part.contains("UTC"), "no time in {part}");
        assert!(part.to_lowercase().contains("ignore"), "{part}");
        assert!(part.contains(&mail.code()), "{part}");
        assert!(part.contains("The Shop"), "{part}");
    }
}
