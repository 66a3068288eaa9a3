//! Change of the email address: a user requests the change, and confirms it with an access token and the code that was
//! mailed to the new address. The old address gets a notice (specification: Accounts, Change of address).

use std::sync::Arc;

use http::StatusCode;
use latchkey_tests::{
    client::AuthenticatedClient,
    passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD},
    stack::Stack,
};
use serde_json::json;
use tokio::sync::Barrier;

use crate::{
    fault_support::{expect_invalid_code, expect_invalid_credentials, unlimited_app},
    support::{NAME, TestApp, WRONG_CODE, app, shape},
};

const EMAIL: &str = "ada@example.com";
const NEW_EMAIL: &str = "Ada@New.example";
const OTHER_EMAIL: &str = "grace@example.com";

// === the complete flow ===

#[tokio::test]
async fn a_new_address_is_requested_and_confirmed_and_the_old_address_is_notified() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let other_session = test_app.log_in_again(EMAIL).await;
    let (epoch, _) = test_app.epoch_and_verified(EMAIL).await;
    let response = owner.change_address(Some(PASSWORD), NEW_EMAIL).await.expect(StatusCode::OK);
    let names: Vec<&str> = response.body.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["email", "expires_at", "expires_in", "local_id", "name"], "as for register");
    assert_eq!((response.string("email"), response.string("name")), (NEW_EMAIL, NAME));
    assert_eq!((response.string("local_id"), response.integer("expires_in")), (owner.user.as_str(), 86_400));
    assert_eq!(response.header("cache-control"), Some("no-store"));

    // Until the user confirms the new address, the account keeps the old address, and no session ends.
    let notice = test_app.mail(EMAIL, 2).await;
    assert_eq!(notice.code, None);
    assert!(
        notice.subject.contains("is changing") && notice.text.contains(NAME),
        "{}: {}",
        notice.subject,
        notice.text
    );
    assert!(!notice.raw.to_lowercase().contains("new.example"), "the notice does not name the new address");
    let mail = test_app.mail(NEW_EMAIL, 1).await;
    assert!(!mail.raw.contains(NAME) && !mail.raw.contains(EMAIL), "no text of the client");
    let body = owner.get_user().await.expect(StatusCode::OK).body;
    assert_eq!((&body["email"], &body["email_verified"]), (&json!(EMAIL), &json!(true)));
    let early_login = test_app.client().login(test_app.id(), NEW_EMAIL, PASSWORD).await;
    expect_invalid_credentials(early_login);
    other_session.assert_live().await;
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, (epoch, true));

    let reset_code = test_app.request_reset_code(EMAIL, 3).await;
    let confirmed = owner.signed_in.confirm(&mail.code()).await.expect(StatusCode::OK);
    assert_eq!((confirmed.string("email"), confirmed.string("session_id")), (NEW_EMAIL, owner.session.as_str()));
    assert_eq!(confirmed.string("local_id"), owner.user);
    assert!(confirmed.body.get("password_required").is_none());
    owner.assert_live().await;
    other_session.assert_ended().await;
    assert_eq!(test_app.epoch_and_verified(NEW_EMAIL).await, (epoch + 1, true));
    let body = owner.get_user().await.expect(StatusCode::OK).body;
    assert_eq!(
        (&body["email"], &body["email_verified"], &body["has_password"]),
        (&json!(NEW_EMAIL), &json!(true), &json!(true))
    );
    expect_invalid_code(test_app.client().confirm_password(test_app.id(), EMAIL, &reset_code, NEW_PASSWORD).await);
    expect_invalid_code(test_app.client().confirm_password(test_app.id(), NEW_EMAIL, &reset_code, NEW_PASSWORD).await);
    expect_invalid_credentials(test_app.client().login(test_app.id(), EMAIL, PASSWORD).await);
    test_app.client().login(test_app.id(), NEW_EMAIL, PASSWORD).await.expect(StatusCode::OK);

    let second_notice = test_app.mail(EMAIL, 4).await;
    assert_eq!(second_notice.code, None);
    assert!(
        second_notice.subject.contains("was changed") && second_notice.text.contains(NAME),
        "{}",
        second_notice.subject
    );
    assert!(!second_notice.raw.to_lowercase().contains("new.example"));
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 4);
    assert_eq!(test_app.settled_mail_count(NEW_EMAIL).await, 1);

    // The old address has no account any more, and can be registered again.
    test_app.client().forgot_password(test_app.id(), EMAIL).await.expect(StatusCode::OK);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 4);
    test_app.register(EMAIL).await;
    test_app.mail(EMAIL, 5).await;
}

#[tokio::test]
async fn a_change_code_works_only_with_a_token_of_the_requesting_account() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let other_user = test_app.log_in_new_user(OTHER_EMAIL).await;
    owner.change_address(Some(PASSWORD), NEW_EMAIL).await.expect(StatusCode::OK);
    let code = test_app.code(NEW_EMAIL, 1).await;
    let before = test_app.epoch_and_verified(EMAIL).await;
    let invalid_token = test_app.client().with_token(test_app.id(), "x.y.z");
    let ended_session = test_app.log_in_again(EMAIL).await;
    ended_session.signed_in.post("logout", &json!({})).await.expect(StatusCode::OK);
    for refused in [
        test_app.client().confirm(test_app.id(), &code).await,
        other_user.signed_in.confirm(&code).await,
        invalid_token.confirm(&code).await,
        ended_session.signed_in.confirm(&code).await,
        test_app.client().confirm_password(test_app.id(), EMAIL, &code, NEW_PASSWORD).await,
        test_app.client().confirm_password(test_app.id(), NEW_EMAIL, &code, NEW_PASSWORD).await,
    ] {
        expect_invalid_code(refused);
    }
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, before);
    other_user.assert_live().await;
    // The code is still valid, and any session of the account can use it.
    let second_session = test_app.log_in_again(EMAIL).await;
    let confirmed = second_session.signed_in.confirm(&code).await.expect(StatusCode::OK);
    assert_eq!(confirmed.string("session_id"), second_session.session);
    owner.assert_ended().await;
    second_session.assert_live().await;
    expect_invalid_code(second_session.signed_in.confirm(&code).await);
}

#[tokio::test]
async fn a_change_code_without_the_token_counts_as_a_wrong_code() {
    let test_app = TestApp::start_with(app().limit("codesPerClient", &[(3, 600)])).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    owner.change_address(Some(PASSWORD), NEW_EMAIL).await.expect(StatusCode::OK);
    let code = test_app.code(NEW_EMAIL, 1).await;
    let thief = test_app.client();
    for _ in 0..3 {
        expect_invalid_code(thief.confirm(test_app.id(), &code).await);
    }
    let limited = thief.confirm(test_app.id(), &code).await;
    limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    owner.signed_in.confirm(&code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn only_the_last_requested_address_is_pending_and_verify_sends_it_a_new_code() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    owner.change_address(Some(PASSWORD), "first@new.example").await.expect(StatusCode::OK);
    let first_code = test_app.code("first@new.example", 1).await;
    owner.change_address(Some(PASSWORD), NEW_EMAIL).await.expect(StatusCode::OK);
    let second_code = test_app.code(NEW_EMAIL, 1).await;
    let verify = owner.signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(verify.body, json!({ "email": NEW_EMAIL }));
    let third_code = test_app.code(NEW_EMAIL, 2).await;
    expect_invalid_code(owner.signed_in.confirm(&first_code).await);
    let confirmed = owner.signed_in.confirm(&third_code).await.expect(StatusCode::OK);
    assert_eq!(confirmed.string("email"), NEW_EMAIL);
    expect_invalid_code(owner.signed_in.confirm(&second_code).await);
    // No new address is pending any more.
    let verify = owner.signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(verify.body, json!({ "email": NEW_EMAIL }));
    assert_eq!(test_app.settled_mail_count(NEW_EMAIL).await, 2);
    assert_eq!(test_app.settled_mail_count("first@new.example").await, 1);
}

#[tokio::test]
async fn a_new_password_cancels_a_pending_change_of_address() {
    let test_app = TestApp::start().await;
    for by_reset in [false, true] {
        let email = if by_reset { OTHER_EMAIL } else { EMAIL };
        let target = format!("{by_reset}@new.example");
        let owner = test_app.log_in_new_user(email).await;
        owner.change_address(Some(PASSWORD), &target).await.expect(StatusCode::OK);
        let code = test_app.code(&target, 1).await;
        let owner = if by_reset {
            let reset = test_app.request_reset_code(email, 3).await;
            let client = test_app.client();
            client.confirm_password(test_app.id(), email, &reset, NEW_PASSWORD).await.expect(StatusCode::OK);
            test_app.log_in(client, email, NEW_PASSWORD).await
        } else {
            owner.change_password(Some(PASSWORD), NEW_PASSWORD).await.expect(StatusCode::OK);
            owner
        };
        expect_invalid_code(owner.signed_in.confirm(&code).await);
        let verify = owner.signed_in.verify().await.expect(StatusCode::OK);
        assert_eq!(verify.body, json!({ "email": email }), "nothing is left to verify");
        assert_eq!(test_app.settled_mail_count(&target).await, 1);
        assert_eq!(owner.get_user().await.body["email"], email);
    }
}

#[tokio::test]
async fn a_user_can_change_the_spelling_of_the_address() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    owner.change_address(Some(PASSWORD), "ADA@Example.com").await.expect(StatusCode::OK);
    // Three mails: the code of the registration, the notice, and the code of the change. The last two arrive in any
    // order.
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 3);
    let mails = test_app.stack.mails().to(EMAIL);
    let mail = mails.iter().rfind(|mail| mail.code.is_some()).expect("a code");
    assert_eq!(mail.to, ["ADA@Example.com"]);
    owner.signed_in.confirm(&mail.code()).await.expect(StatusCode::OK);
    assert_eq!(owner.get_user().await.body["email"], "ADA@Example.com");
    test_app.client().login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

// === proof of ownership ===

#[tokio::test]
async fn an_account_with_a_password_needs_it_and_an_account_without_one_needs_a_recent_login() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let before = test_app.database_checksum().await;
    let without_password = owner.change_address(None, NEW_EMAIL).await;
    let without_password = without_password.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
    assert!(without_password.header("www-authenticate").unwrap().starts_with("Bearer"));
    for wrong in [WRONG_PASSWORD, "x", &"x".repeat(5000)] {
        expect_invalid_credentials(owner.change_address(Some(wrong), NEW_EMAIL).await);
    }
    assert_eq!(test_app.database_checksum().await, before);

    test_app.sql("UPDATE users SET password_hash = NULL").await;
    let before = test_app.database_checksum().await;
    expect_invalid_credentials(owner.change_address(Some(PASSWORD), NEW_EMAIL).await);
    test_app.make_login_stale(&owner).await;
    let stale = owner.change_address(None, NEW_EMAIL).await;
    stale.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
    assert_eq!(test_app.database_checksum().await, before);
    assert_eq!(test_app.settled_mail_count(NEW_EMAIL).await, 0);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 1);
    test_app.backdate_login(&owner.user, &owner.session, -301).await;
    owner.change_address(None, NEW_EMAIL).await.expect(StatusCode::OK);
    owner.signed_in.confirm(&test_app.code(NEW_EMAIL, 1).await).await.expect(StatusCode::OK);
    owner.assert_live().await;
}

#[tokio::test]
async fn a_wrong_password_for_a_change_of_address_counts_as_a_login_failure() {
    let test_app = TestApp::start_with(app().limit("loginFailuresPerClient", &[(2, 600)])).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    for _ in 0..2 {
        expect_invalid_credentials(owner.change_address(Some(WRONG_PASSWORD), NEW_EMAIL).await);
    }
    let limited = owner.change_address(Some(PASSWORD), NEW_EMAIL).await;
    limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert_eq!(test_app.settled_mail_count(NEW_EMAIL).await, 0);
}

#[tokio::test]
async fn a_change_of_address_without_a_password_is_counted_in_logins_per_client() {
    let test_app = TestApp::start_with(app().limit("loginsPerClient", &[(2, 600)])).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    test_app.sql("UPDATE users SET password_hash = NULL").await;
    owner.change_address(None, NEW_EMAIL).await.expect(StatusCode::OK);
    let limited = owner.change_address(None, "third@example.com").await;
    limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert_eq!(test_app.settled_mail_count("third@example.com").await, 0);
}

#[tokio::test]
async fn a_change_of_address_is_counted_once_in_logins_per_client_even_if_the_epoch_rises_during_the_call() {
    let test_app = TestApp::start_with(app().limit("loginsPerClient", &[(2, 600)])).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let with_password = owner.change_address(Some(PASSWORD), NEW_EMAIL);
    test_app.raise_epoch_during(&owner, with_password).await.expect(StatusCode::OK);

    let other_owner = test_app.log_in_new_user(OTHER_EMAIL).await;
    test_app.sql("UPDATE users SET password_hash = NULL").await;
    let without_password = other_owner.change_address(None, "third@example.com");
    test_app.raise_epoch_during(&other_owner, without_password).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn an_account_without_an_address_can_set_one() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    test_app
        .sql("UPDATE users SET password_hash = NULL, email = NULL, email_canonical = NULL, email_verified_at = NULL")
        .await;
    owner.change_address(None, NEW_EMAIL).await.expect(StatusCode::OK);
    let body = owner.get_user().await.expect(StatusCode::OK).body;
    assert_eq!((&body["email"], &body["email_verified"]), (&json!(null), &json!(false)));
    let code = test_app.code(NEW_EMAIL, 1).await;
    expect_invalid_code(test_app.client().confirm(test_app.id(), &code).await);
    owner.signed_in.confirm(&code).await.expect(StatusCode::OK);
    let body = owner.get_user().await.expect(StatusCode::OK).body;
    assert_eq!((&body["email"], &body["email_verified"]), (&json!(NEW_EMAIL), &json!(true)));
    owner.assert_live().await;
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 1, "there is no old address to notify");
}

// === ownership of the address ===

#[tokio::test]
async fn a_taken_address_is_not_revealed_and_its_owner_is_notified() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let bystander = test_app.log_in_new_user(OTHER_EMAIL).await;
    let unused = owner.change_address(Some(PASSWORD), "nobody@new.example").await.expect(StatusCode::OK);
    let code = test_app.code("nobody@new.example", 1).await;
    let taken = owner.change_address(Some(PASSWORD), "Grace@Example.com").await.expect(StatusCode::OK);
    let (mut unused, mut taken) = (shape(&unused), shape(&taken));
    assert_eq!(taken["body"]["email"], "Grace@Example.com");
    unused["body"]["email"] = json!(null);
    taken["body"]["email"] = json!(null);
    assert_eq!(taken, unused);
    let notice = test_app.mail(OTHER_EMAIL, 2).await;
    assert_eq!(notice.code, None, "no code goes to an address that somebody else has confirmed");
    assert!(notice.subject.contains("already have an account"), "{}", notice.subject);
    assert!(!notice.raw.contains(EMAIL));
    // A later *verify* does not reveal that the address is taken, either.
    let verify = owner.signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(verify.body, json!({ "email": "Grace@Example.com" }));
    let notice = test_app.mail(OTHER_EMAIL, 3).await;
    assert_eq!(notice.code, None);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 3, "the old address is notified of each");
    // The address that was requested first is no longer pending.
    expect_invalid_code(owner.signed_in.confirm(&code).await);
    assert_eq!(owner.get_user().await.body["email"], EMAIL);
    bystander.assert_live().await;

    // The owner of a disabled account gets no mail.
    test_app.sql("UPDATE users SET disabled_at = now() WHERE email_canonical = 'grace@example.com'").await;
    owner.change_address(Some(PASSWORD), OTHER_EMAIL).await.expect(StatusCode::OK);
    assert_eq!(test_app.settled_mail_count(OTHER_EMAIL).await, 3);
}

#[tokio::test]
async fn an_unverified_account_with_the_new_address_is_deleted_when_the_code_is_used() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    // Somebody registers an email address that they do not own.
    test_app.register(NEW_EMAIL).await;
    let squatter = test_app.log_in_again(NEW_EMAIL).await;
    let squatter_code = test_app.code(NEW_EMAIL, 1).await;
    test_app
        .sql(&format!(
            "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
         SELECT app_id, 'https://id.example', 'x', id, 'id', now() FROM users WHERE id = '{}'",
            squatter.user
        ))
        .await;
    owner.change_address(Some(PASSWORD), NEW_EMAIL).await.expect(StatusCode::OK);
    let code = test_app.code(NEW_EMAIL, 2).await;
    squatter.assert_live().await;
    owner.signed_in.confirm(&code).await.expect(StatusCode::OK);
    owner.assert_live().await;
    let refused = squatter.get_user().await;
    refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    assert_eq!(test_app.query_number("SELECT count(*) FROM users").await, 1);
    assert_eq!(test_app.query_number("SELECT count(*) FROM identities").await, 0);
    expect_invalid_code(test_app.client().confirm(test_app.id(), &squatter_code).await);
    assert_eq!(test_app.session_count().await, 1, "the squatter's session is deleted from Redis too");
    assert_eq!(owner.get_user().await.body["email"], NEW_EMAIL);
}

#[tokio::test]
async fn an_account_that_confirmed_the_address_first_keeps_it() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    owner.change_address(Some(PASSWORD), NEW_EMAIL).await.expect(StatusCode::OK);
    let code = test_app.code(NEW_EMAIL, 1).await;
    test_app.register(NEW_EMAIL).await;
    let winner_code = test_app.code(NEW_EMAIL, 2).await;
    let winner = test_app.client();
    winner.confirm(test_app.id(), &winner_code).await.expect(StatusCode::OK);
    let before = test_app.epoch_and_verified(EMAIL).await;
    let other_session = test_app.log_in_again(EMAIL).await;
    expect_invalid_code(owner.signed_in.confirm(&code).await);
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, before);
    owner.assert_live().await;
    other_session.assert_live().await;
    winner.login(test_app.id(), NEW_EMAIL, PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 2, "nothing was changed, so no second notice");
}

#[tokio::test]
async fn the_right_password_reveals_a_taken_address_without_enumeration_protection() {
    let test_app = TestApp::start_with(app().set("/enumerationProtection", "Off")).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    test_app.log_in_new_user(OTHER_EMAIL).await;
    test_app.register("joan@example.com").await;
    test_app.settled_mail_count(OTHER_EMAIL).await;
    let before = test_app.database_checksum().await;
    expect_invalid_credentials(owner.change_address(Some(WRONG_PASSWORD), OTHER_EMAIL).await);
    let taken = owner.change_address(Some(PASSWORD), OTHER_EMAIL).await;
    taken.expect_error(StatusCode::CONFLICT, "email_taken");
    assert_eq!(test_app.database_checksum().await, before);
    assert_eq!(test_app.settled_mail_count(OTHER_EMAIL).await, 1);
    // Neither the address of an unverified account nor another spelling of the account's own address counts as taken.
    owner.change_address(Some(PASSWORD), "joan@example.com").await.expect(StatusCode::OK);
    owner.change_address(Some(PASSWORD), "Ada@example.com").await.expect(StatusCode::OK);
}

// === input and limits ===

#[tokio::test]
async fn an_invalid_or_disallowed_address_is_refused_and_changes_nothing() {
    let test_app = TestApp::start_with(app().set("/allowedEmailDomains", json!(["example.com", "new.example"]))).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let before = test_app.database_checksum().await;
    for (body, field, code) in [
        (json!({}), "email", "missing"),
        (json!({ "password": PASSWORD }), "email", "missing"),
        (json!({ "email": "", "password": PASSWORD }), "email", "empty"),
        (json!({ "email": "ada", "password": PASSWORD }), "email", "invalid"),
        (json!({ "email": "a@b.example\r\nBcc: c@d.example", "password": PASSWORD }), "email", "invalid"),
        (json!({ "email": ["a@new.example"], "password": PASSWORD }), "email", "invalid"),
        (json!({ "email": format!("{}@new.example", "x".repeat(300)), "password": PASSWORD }), "email", "too_long"),
        (json!({ "email": "ada@sub.new.example", "password": PASSWORD }), "email", "domain_not_allowed"),
        (json!({ "email": "ada@example.org", "password": WRONG_PASSWORD }), "email", "domain_not_allowed"),
        (json!({ "email": NEW_EMAIL, "password": null }), "password", "invalid"),
        (json!({ "email": NEW_EMAIL, "password": "" }), "password", "empty"),
    ] {
        let response = owner.signed_in.post("user/email", &body).await;
        let response = response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        assert_eq!(
            (&response.body["fields"][0]["field"], &response.body["fields"][0]["code"]),
            (&json!(field), &json!(code)),
            "{body}"
        );
    }
    assert_eq!(test_app.database_checksum().await, before);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 1);
    owner.change_address(Some(PASSWORD), NEW_EMAIL).await.expect(StatusCode::OK);
    test_app.mail(NEW_EMAIL, 1).await;
}

#[tokio::test]
async fn a_mail_limit_drops_only_the_mail_to_the_new_address() {
    let test_app = TestApp::start_with(app().limit("mailsPerRecipient", &[(1, 600)])).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    for _ in 0..3 {
        owner.change_address(Some(PASSWORD), NEW_EMAIL).await.expect(StatusCode::OK);
    }
    assert_eq!(test_app.settled_mail_count(NEW_EMAIL).await, 1);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 4, "notices are never limited");
    // The same limit applies to a *register* mail to this address. Otherwise a client could distinguish *register*
    // mails from the mails for a change of address.
    test_app.register(NEW_EMAIL).await;
    assert_eq!(test_app.settled_mail_count(NEW_EMAIL).await, 1);
    let limited = owner.signed_in.verify().await;
    limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    // The earlier code stays valid.
    owner.signed_in.confirm(&test_app.code(NEW_EMAIL, 1).await).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn deleting_an_account_deletes_its_pending_address() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    owner.change_address(Some(PASSWORD), NEW_EMAIL).await.expect(StatusCode::OK);
    let code = test_app.code(NEW_EMAIL, 1).await;
    owner.delete_user(&json!({ "password": PASSWORD })).await.expect(StatusCode::OK);
    expect_invalid_code(owner.signed_in.confirm(&code).await);
    expect_invalid_code(owner.signed_in.confirm(WRONG_CODE).await);
    assert_eq!(test_app.query_number("SELECT count(*) FROM users").await, 0);
}

// === concurrency ===

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_one_of_three_accounts_that_confirm_the_same_address_concurrently_wins() {
    let test_app = TestApp::from_builder(unlimited_app("one"), Stack::builder().servers(2)).await;
    for round in 0..8 {
        let target = format!("prize{round}@new.example");
        let mut attempts: Vec<(String, AuthenticatedClient, String)> = Vec::new();
        for index in 0..3 {
            let email = format!("user{round}x{index}@example.com");
            let owner = test_app.log_in_new_user(&email).await;
            owner.change_address(Some(PASSWORD), &target).await.expect(StatusCode::OK);
            let code = test_app.code(&target, index + 1).await;
            attempts.push((email, owner.signed_in, code));
        }
        // Another client registers the same address at the same time.
        let start = Arc::new(Barrier::new(4));
        let registered = {
            let (start, client, app, target) =
                (start.clone(), test_app.client(), test_app.id().to_owned(), target.clone());
            tokio::spawn(async move {
                start.wait().await;
                client.register(&app, NAME, &target, PASSWORD).await.expect(StatusCode::OK)
            })
        };
        let tasks: Vec<_> = attempts
            .into_iter()
            .map(|(email, signed_in, code)| {
                let start = start.clone();
                tokio::spawn(async move {
                    start.wait().await;
                    (email, signed_in.confirm(&code).await)
                })
            })
            .collect();
        let mut won = Vec::new();
        for task in tasks {
            let (email, response) = task.await.expect("no call panics");
            if response.status == StatusCode::OK { won.push(email) } else { drop(expect_invalid_code(response)) }
        }
        registered.await.expect("no call panics");
        assert_eq!(won.len(), 1, "{won:?} in round {round}");
        let users = format!("SELECT count(*) FROM users WHERE email_canonical = '{target}'");
        assert_eq!(test_app.query_number(&users).await, 1);
        assert!(test_app.epoch_and_verified(&target).await.1);
        let remaining = format!("SELECT count(*) FROM users WHERE email_canonical = '{}'", won[0]);
        assert_eq!(
            test_app.query_number(&remaining).await,
            0,
            "the winner has the new address, and the others their own"
        );
        let losers = format!("SELECT count(*) FROM users WHERE email_canonical LIKE 'user{round}x%'");
        assert_eq!(test_app.query_number(&losers).await, 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_one_of_two_codes_for_a_pending_address_works_if_both_are_used_concurrently() {
    let test_app = TestApp::from_builder(unlimited_app("codes"), Stack::builder().servers(2)).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    owner.change_address(Some(PASSWORD), NEW_EMAIL).await.expect(StatusCode::OK);
    test_app.code(NEW_EMAIL, 1).await;
    owner.signed_in.verify().await.expect(StatusCode::OK);
    let codes = [test_app.code(NEW_EMAIL, 1).await, test_app.code(NEW_EMAIL, 2).await];
    let (epoch, _) = test_app.epoch_and_verified(EMAIL).await;
    let start = Arc::new(Barrier::new(8));
    let tasks: Vec<_> = (0..8_usize)
        .map(|number| {
            let client = test_app.stack.client_of(number % 2).with_token(test_app.id(), owner.signed_in.token());
            let (start, code) = (start.clone(), codes[number / 4].clone());
            tokio::spawn(async move {
                start.wait().await;
                client.confirm(&code).await
            })
        })
        .collect();
    let mut successes = 0;
    for task in tasks {
        let response = task.await.expect("no call panics");
        if response.status == StatusCode::OK { successes += 1 } else { drop(expect_invalid_code(response)) }
    }
    assert_eq!(successes, 1);
    assert_eq!(test_app.epoch_and_verified(NEW_EMAIL).await, (epoch + 1, true));
    owner.assert_live().await;
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 3);
}
