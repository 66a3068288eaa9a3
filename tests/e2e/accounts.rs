//! Register, login and verify: the response and the mail of each case (specification: Accounts, Register).

use argon2::{Algorithm, Argon2, Params, PasswordHasher, PasswordVerifier, Version, password_hash::phc};
use base64::{Engine, prelude::BASE64_STANDARD_NO_PAD as STANDARD_NO_PAD};
use http::StatusCode;
use latchkey_tests::{
    builders::App,
    client::ApiResponse,
    eventually,
    passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD},
    stack::Stack,
};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::{MAIL_LIMIT, NAME, TestApp, app, shape};

const EMAIL: &str = "Ada@Example.com";

// === register ===

#[tokio::test]
async fn register_responds_the_same_to_new_unverified_and_verified_addresses() {
    let test_app = TestApp::start().await;
    test_app.register_and_confirm(EMAIL).await;
    test_app.register("grace@example.com").await;

    let register = async |email: &str, password: &str| {
        let response = test_app.client().register(test_app.id(), NAME, email, password).await.expect(StatusCode::OK);
        assert_eq!(response.string("email"), email, "the address as it was sent");
        let mut shape = shape(&response);
        shape["body"]["email"] = Value::Null;
        (shape, response)
    };
    let (new_shape, response) = register("new@example.com", PASSWORD).await;
    let names: Vec<&str> = response.body.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["email", "expires_at", "expires_in", "local_id", "name"]);
    assert_eq!(response.integer("expires_in"), 86_400);
    assert_eq!(response.header("cache-control"), Some("no-store"));
    for (email, password) in [
        (EMAIL, PASSWORD),
        (EMAIL, NEW_PASSWORD),
        ("ada@example.COM", PASSWORD),
        ("grace@example.com", PASSWORD),
        ("grace@example.com", NEW_PASSWORD),
    ] {
        let (shape, _) = register(email, password).await;
        assert_eq!(shape, new_shape, "{email}");
    }
}

#[tokio::test]
async fn register_never_returns_the_same_local_id_twice() {
    let test_app = TestApp::start().await;
    test_app.register_and_confirm(EMAIL).await;
    let mut ids = Vec::new();
    for email in [EMAIL, EMAIL, "grace@example.com", "grace@example.com", "grace@example.com"] {
        let response = test_app.register(email).await;
        let id: Uuid = response.string("local_id").parse().unwrap();
        assert_eq!(id.get_version_num(), 7);
        let (created_at, _) = id.get_timestamp().unwrap().to_unix();
        let now = u64::try_from(response.integer("expires_at") - response.integer("expires_in")).unwrap();
        assert!(created_at.abs_diff(now) <= 5, "the time in a new id is now");
        ids.push(id);
    }
    let account_id = test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.body["user"]["id"].clone();
    ids.push(account_id.as_str().unwrap().parse().unwrap());
    let count = ids.len();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), count);
}

#[tokio::test]
async fn registering_a_verified_address_changes_nothing_and_notifies_its_owner() {
    let test_app = TestApp::start().await;
    test_app.register_and_confirm(EMAIL).await;
    let before = test_app.epoch_and_verified(EMAIL).await;
    let again = test_app.client().register(test_app.id(), "Mallory", "ada@example.com", NEW_PASSWORD).await;
    again.expect(StatusCode::OK);

    let notice = test_app.mail(EMAIL, 2).await;
    assert_eq!(notice.code, None, "the notice has no code");
    assert!(!notice.text.contains("Mallory") && !notice.html.contains("Mallory"), "and no text from the client");
    assert_ne!(notice.subject, test_app.mail(EMAIL, 1).await.subject);
    assert_eq!(notice.to, [EMAIL], "the notice goes to the stored address");
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, before);
    let login = test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(login.body["user"]["name"], NAME);
    let other = test_app.client().login(test_app.id(), EMAIL, NEW_PASSWORD).await;
    other.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
}

#[tokio::test]
async fn registering_an_unverified_address_again_sends_a_new_code_and_changes_nothing_else() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let again = test_app.client().register(test_app.id(), "Another Name", EMAIL, PASSWORD).await;
    again.expect(StatusCode::OK);
    let (first, second) = (test_app.code(EMAIL, 1).await, test_app.code(EMAIL, 2).await);
    assert_ne!(first, second);
    let confirmed = test_app.client().confirm(test_app.id(), &second).await.expect(StatusCode::OK);
    assert_eq!(confirmed.string("name"), NAME);
    assert_eq!(confirmed.body.get("password_required"), None, "it was the account's password");
    test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_mail_to_an_unverified_address_contains_no_text_from_the_client() {
    let app = app().template("confirm.txt", "Dear {{ name }}, {{ code }}").template("confirm.subject", "Hi {{ name }}");
    let test_app = TestApp::start_with(app).await;
    let caller = test_app.client();
    caller.register(test_app.id(), "Visit evil.example", EMAIL, PASSWORD).await.expect(StatusCode::OK);
    test_app.client().forgot_password(test_app.id(), EMAIL).await.expect(StatusCode::OK);
    for nth in [1, 2] {
        let mail = test_app.mail(EMAIL, nth).await;
        for part in [&mail.subject, &mail.text, &mail.html, &mail.raw] {
            assert!(!part.contains("evil.example"), "{part}");
        }
    }
}

#[tokio::test]
async fn a_verified_address_is_reported_as_taken_without_enumeration_protection() {
    let test_app = TestApp::start_with(app().set("/enumerationProtection", "Off")).await;
    test_app.register(EMAIL).await;
    let unverified = test_app.client().register(test_app.id(), NAME, EMAIL, PASSWORD).await;
    unverified.expect(StatusCode::OK);
    let code = test_app.code(EMAIL, 2).await;
    test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    let verified = test_app.client().register(test_app.id(), NAME, "ada@example.com", NEW_PASSWORD).await;
    verified.expect_error(StatusCode::CONFLICT, "email_taken");
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 2);
}

#[tokio::test]
async fn an_app_with_closed_sign_up_accepts_no_registrations() {
    let test_app = TestApp::start_with(app().set("/signUp", "Closed")).await;
    let response = test_app.client().register(test_app.id(), NAME, EMAIL, PASSWORD).await;
    response.expect_error(StatusCode::FORBIDDEN, "registration_disabled");
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 0);
}

#[tokio::test]
async fn allowed_email_domains_limit_registrations_and_make_login_require_a_verified_address() {
    let test_app = TestApp::start_with(app().set("/allowedEmailDomains", json!(["example.com"]))).await;
    let other_domain = test_app.client().register(test_app.id(), NAME, "ada@example.org", PASSWORD).await;
    let other_domain = other_domain.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    assert_eq!(other_domain.body["fields"][0]["field"], "email");
    let subdomain = test_app.client().register(test_app.id(), NAME, "ada@sub.example.com", PASSWORD).await;
    subdomain.expect_error(StatusCode::BAD_REQUEST, "invalid_request");

    test_app.register(EMAIL).await;
    let unverified = test_app.client().login(test_app.id(), EMAIL, PASSWORD).await;
    unverified.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    let code = test_app.code(EMAIL, 1).await;
    test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(test_app.settled_mail_count("ada@example.org").await, 0);
}

#[tokio::test]
async fn a_name_is_trimmed_and_an_address_is_stored_as_given() {
    let test_app = TestApp::start().await;
    let response = test_app.client().register(test_app.id(), "  Ada \u{1f680} Lovelace\t", EMAIL, PASSWORD).await;
    let response = response.expect(StatusCode::OK);
    assert_eq!((response.string("name"), response.string("email")), ("Ada \u{1f680} Lovelace", EMAIL));
    let login = test_app.client().login(test_app.id(), "aDA@eXAMPLE.COM", PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(login.body["user"]["email"], EMAIL);
    assert_eq!(login.body["user"]["name"], "Ada \u{1f680} Lovelace");
    let forgot = test_app.client().forgot_password(test_app.id(), "ada@example.com").await.expect(StatusCode::OK);
    assert_eq!(forgot.string("email"), "ada@example.com");
    assert_eq!(test_app.mail(EMAIL, 2).await.to, [EMAIL], "mail goes to the stored address");
}

#[tokio::test]
async fn the_same_address_in_two_apps_belongs_to_two_accounts() {
    let (one, other) = (app(), app());
    let stack = Stack::builder().app(&one).app(&other).start().await;
    let client = stack.client();
    client.register(one.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let login = client.login(other.id(), EMAIL, PASSWORD).await;
    login.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    client.register(other.id(), NAME, EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    let ids: Vec<Value> = [
        client.login(one.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK),
        client.login(other.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK),
    ]
    .map(|login| login.body["user"]["id"].clone())
    .to_vec();
    assert_ne!(ids[0], ids[1]);
}

// === login ===

#[tokio::test]
async fn login_returns_a_token_the_user_and_the_session() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let login = test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let names: Vec<&str> = login.body.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["expires_at", "expires_in", "refresh_token", "session_id", "token", "user"]);
    assert_eq!(login.header("cache-control"), Some("no-store"));
    let id: Uuid = login.body["user"]["id"].as_str().unwrap().parse().unwrap();
    assert_eq!(id.get_version_num(), 7);
    assert!(login.string("refresh_token").starts_with("lkr_"));
    assert!((855..=900).contains(&login.integer("expires_in")), "15 min, up to 5 % off");
}

#[tokio::test]
async fn unknown_address_and_wrong_password_get_the_same_response() {
    let test_app = TestApp::start().await;
    test_app.register_and_confirm(EMAIL).await;
    let login = async |email: &str, password: &str| {
        let response = test_app.client().login(test_app.id(), email, password).await;
        shape(&response.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials"))
    };
    let wrong = login(EMAIL, WRONG_PASSWORD).await;
    assert_eq!(login("nobody@example.com", WRONG_PASSWORD).await, wrong);
    assert_eq!(login(EMAIL, "x").await, wrong, "an impossible password");
    assert_eq!(login(EMAIL, &"x".repeat(5000)).await, wrong);
    test_app.sql("UPDATE users SET password_hash = NULL").await;
    assert_eq!(login(EMAIL, PASSWORD).await, wrong, "an account without a password");
}

#[tokio::test]
async fn a_password_matches_in_all_unicode_forms_and_is_never_trimmed() {
    let test_app = TestApp::start().await;
    let (composed, decomposed) =
        (" Cr\u{e8}me-br\u{fb}l\u{e9}e \u{0}34 ", " Cre\u{300}me-bru\u{302}le\u{301}e \u{0}34 ");
    test_app.client().register(test_app.id(), NAME, EMAIL, composed).await.expect(StatusCode::OK);
    for same in [composed, decomposed] {
        test_app.client().login(test_app.id(), EMAIL, same).await.expect(StatusCode::OK);
    }
    for other in [composed.trim(), &composed.replace('\0', ""), &composed.to_lowercase()] {
        let response = test_app.client().login(test_app.id(), EMAIL, other).await;
        response.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    }
}

#[tokio::test]
async fn an_unverified_user_cannot_log_in_if_a_verified_address_is_required() {
    let strict = app().set("/requireVerifiedEmail", true);
    let revealing = app().set("/requireVerifiedEmail", true).set("/enumerationProtection", "Off");
    let stack = Stack::builder().app(&strict).app(&revealing).start().await;
    let login = async |app: &App, email: &str, password: &str| -> ApiResponse {
        stack.client().login(app.id(), email, password).await
    };
    for app in [&strict, &revealing] {
        stack.client().register(app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    }
    let unverified = login(&strict, EMAIL, PASSWORD).await;
    let unverified = unverified.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    let unknown = login(&strict, "nobody@example.com", PASSWORD).await;
    assert_eq!(shape(&unverified), shape(&unknown));

    login(&revealing, EMAIL, PASSWORD).await.expect_error(StatusCode::FORBIDDEN, "email_not_verified");
    let wrong = login(&revealing, EMAIL, WRONG_PASSWORD).await;
    wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
}

#[tokio::test]
async fn forgot_password_sends_a_code_even_if_a_verified_address_is_required() {
    let test_app = TestApp::start_with(app().set("/requireVerifiedEmail", true)).await;
    test_app.register(EMAIL).await;
    let code = test_app.request_reset_code(EMAIL, 2).await;
    let reset = test_app.client().confirm_password(test_app.id(), EMAIL, &code, NEW_PASSWORD).await;
    reset.expect(StatusCode::OK);
    test_app.client().login(test_app.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn only_the_right_password_reveals_that_a_user_is_disabled() {
    let test_app = TestApp::start().await;
    let signed_in = test_app.register_and_confirm(EMAIL).await.authenticate(test_app.id(), EMAIL, PASSWORD).await;
    test_app.sql("UPDATE users SET disabled_at = now(), epoch = epoch + 1").await;
    let right = test_app.client().login(test_app.id(), EMAIL, PASSWORD).await;
    right.expect_error(StatusCode::FORBIDDEN, "user_disabled");
    let wrong = test_app.client().login(test_app.id(), EMAIL, WRONG_PASSWORD).await;
    wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    signed_in.verify().await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
}

#[tokio::test]
async fn a_successful_login_replaces_a_hash_that_has_old_parameters_or_another_algorithm() {
    let test_app = TestApp::start().await;
    let client = test_app.register_and_confirm(EMAIL).await;
    for (algorithm, version, m_cost, phc_prefix) in [
        (Algorithm::Argon2id, Version::V0x13, 8192, "$argon2id$v=19$m=8192,t=1,p=1$"),
        (Algorithm::Argon2i, Version::V0x10, 1024, "$argon2i$v=16$m=1024,t=1,p=1$"),
    ] {
        let mut hash = [0; 32];
        let params = Params::new(m_cost, 1, 1, None).unwrap();
        let argon2 = Argon2::new(algorithm, version, params);
        argon2.hash_password_into(PASSWORD.as_bytes(), b"sixteen bytes !!", &mut hash).unwrap();
        let encoded = format!("{}${}", STANDARD_NO_PAD.encode(b"sixteen bytes !!"), STANDARD_NO_PAD.encode(hash));
        test_app.sql(&format!("UPDATE users SET password_hash = '{phc_prefix}{encoded}'")).await;
        let epoch = test_app.epoch_and_verified(EMAIL).await;

        let wrong = client.login(test_app.id(), EMAIL, WRONG_PASSWORD).await;
        wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
        let stored_hash = async || {
            let mut connection = test_app.stack.database.connect().await.unwrap();
            let hash = sqlx::query_scalar("SELECT password_hash FROM users").fetch_one(&mut connection);
            hash.await.map(|hash: String| hash).unwrap()
        };
        assert!(stored_hash().await.starts_with(phc_prefix), "a wrong password replaces nothing");
        client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
        eventually("a hash with the current parameters", MAIL_LIMIT, || async {
            stored_hash().await.starts_with("$argon2id$v=19$m=19456,t=2,p=1$").then_some(())
        })
        .await;
        client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
        assert_eq!(test_app.epoch_and_verified(EMAIL).await, epoch, "the new hash logs nobody out");
    }
}

#[tokio::test]
async fn every_instruction_set_computes_and_verifies_standard_argon2_hashes() {
    for kernel in argon2_simd::Kernel::supported() {
        let builder = Stack::builder().env("LATCHKEY_HASHING_KERNEL", kernel.name());
        let test_app = TestApp::from_builder(app(), builder).await;
        let client = test_app.register_and_confirm(EMAIL).await;
        let mut connection = test_app.stack.database.connect().await.unwrap();
        let stored = sqlx::query_scalar("SELECT password_hash FROM users").fetch_one(&mut connection);
        let stored: String = stored.await.unwrap();
        let parsed = phc::PasswordHash::new(&stored).unwrap();
        assert!(Argon2::default().verify_password(PASSWORD.as_bytes(), &parsed).is_ok(), "{kernel:?}");

        let other_password = "another long password";
        let hash = Argon2::default().hash_password_with_salt(other_password.as_bytes(), &[9; 16]).unwrap();
        test_app.sql(&format!("UPDATE users SET password_hash = '{hash}'")).await;
        client.login(test_app.id(), EMAIL, other_password).await.expect(StatusCode::OK);
        let old = client.login(test_app.id(), EMAIL, PASSWORD).await;
        old.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
        let log = test_app.stack.server().read_log();
        assert!(log.contains(kernel.name()), "the log names the instruction set: {log}");
    }
}

#[tokio::test]
async fn an_expired_access_token_is_refused() {
    let test_app = TestApp::start().await;
    test_app.edit_rendered(|document| document["tokens"]["accessLifetimeSeconds"] = json!(1)).await;
    test_app.register(EMAIL).await;
    let client = test_app.client();
    let login = client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    test_app.wait_until_past(u64::try_from(login.integer("expires_at")).unwrap()).await;
    let refused = client.with_token(test_app.id(), login.string("token")).verify().await;
    let refused = refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    assert!(refused.header("www-authenticate").unwrap().contains("error=\"invalid_token\""), "RFC 6750, 3.1");
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 1);
}

// === verify ===

#[tokio::test]
async fn verify_sends_a_new_code_to_the_user_of_the_session() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let signed_in = test_app.client().authenticate(test_app.id(), "ada@example.com", PASSWORD).await;
    let response = signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(response.body, json!({ "email": EMAIL }));
    assert_eq!(response.header("cache-control"), Some("no-store"));
    let code = test_app.code(EMAIL, 2).await;
    test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn verify_accepts_only_an_empty_object_or_no_body() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let signed_in = test_app.client().authenticate(test_app.id(), EMAIL, PASSWORD).await;
    let verify = async |content_type: Option<&str>, body: &'static str| {
        let mut request = signed_in.request(http::Method::POST, "email/verify").body(body);
        if let Some(content_type) = content_type {
            request = request.header("content-type", content_type);
        }
        signed_in.send(request).await
    };
    let json = Some("application/json");
    for (content_type, body) in
        [(None, ""), (json, "{}"), (json, " {\n} "), (Some("application/json; charset=utf-8"), "{}")]
    {
        verify(content_type, body).await.expect(StatusCode::OK);
    }
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 5);
    for body in ["{\"email\":\"ada@example.com\"}", "{\"a\":null}", "[]", "null", "0", "\"\"", "{} {}", "x"] {
        verify(json, body).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    verify(None, "{}").await.expect_error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type");
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 5);
}

#[tokio::test]
async fn verify_sends_no_mail_to_a_verified_address() {
    let test_app = TestApp::start().await;
    let signed_in = test_app.register_and_confirm(EMAIL).await.authenticate(test_app.id(), EMAIL, PASSWORD).await;
    let response = signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(response.body, json!({ "email": EMAIL }));
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 1);
}

#[tokio::test]
async fn verify_sends_a_code_to_a_pending_address_and_returns_that_address() {
    let test_app = TestApp::start().await;
    let signed_in = test_app.register_and_confirm(EMAIL).await.authenticate(test_app.id(), EMAIL, PASSWORD).await;
    test_app.sql("UPDATE users SET pending_email = 'Ada@new.test', pending_email_canonical = 'ada@new.test'").await;
    let response = signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(response.body, json!({ "email": "Ada@new.test" }));
    let mail = test_app.mail("Ada@new.test", 1).await;
    assert!(mail.code.is_some());
    assert!(!mail.raw.contains(NAME), "it is not proven that the user owns the address");
    // The code confirms a change of the email address, so it is valid only with an access token of the account.
    let without_token = test_app.client().confirm(test_app.id(), &mail.code()).await;
    without_token.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 1);
}

#[tokio::test]
async fn a_second_verify_soon_after_the_first_is_refused() {
    let test_app = TestApp::start_with(App::new("shop")).await;
    test_app.register(EMAIL).await;
    let signed_in = test_app.client().authenticate(test_app.id(), EMAIL, PASSWORD).await;
    // After the login, the client address is known to the account. Known client addresses have a separate mail limit
    // per recipient, so the first *verify* succeeds although *register* has just sent a mail.
    signed_in.verify().await.expect(StatusCode::OK);
    let refused = signed_in.verify().await.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert!(refused.header("ratelimit-policy").unwrap().contains("mailsPerRecipient"), "{:?}", refused.headers);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 2);
}

#[tokio::test]
async fn verify_needs_an_access_token_of_the_app() {
    let (one, other) = (app(), app());
    let stack = Stack::builder().app(&one).app(&other).start().await;
    let client = stack.client();
    for app in [&one, &other] {
        client.register(app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    }
    let other_login = client.login(other.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let own_login = client.login(one.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let path = format!("v1/{}/email/verify", one.id());
    let without_token = client.post_without_body(&path).await;
    let without_token = without_token.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    assert!(without_token.header("www-authenticate").unwrap().starts_with("Bearer"));
    let cut_token = &own_login.string("token")[..own_login.string("token").len() - 3];
    for token in [other_login.string("token"), own_login.string("refresh_token"), cut_token, "x", "a.b.c", ""] {
        let response = client.with_token(one.id(), token).verify().await;
        let response = response.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
        assert!(response.header("www-authenticate").unwrap().starts_with("Bearer"));
    }
    client.with_token(one.id(), own_login.string("token")).verify().await.expect(StatusCode::OK);
}
