//! Change of address: requested, confirmed by its code with a session of the account, and reported to the old address
//! (specification: Accounts, Change of address).

use std::sync::Arc;

use http::StatusCode;
use latchkey_tests::{client::AuthenticatedClient, stack::Stack};
use serde_json::json;
use tokio::sync::Barrier;

use crate::{
    fault_support::{expect_invalid_code, expect_invalid_credentials, unlimited_app},
    support::{NAME, NEW_PASSWORD, PASSWORD, TestApp, WRONG_CODE, WRONG_PASSWORD, app, shape},
};

const EMAIL: &str = "ada@example.com";
const NEW: &str = "Ada@New.example";
const OTHER: &str = "grace@example.com";

// === the complete flow ===

#[tokio::test]
async fn a_new_address_is_requested_confirmed_and_reported_to_the_old_one() {
    let shop = TestApp::start().await;
    let owner = shop.log_in_new_user(EMAIL).await;
    let other = shop.log_in_again(EMAIL).await;
    let (epoch, _) = shop.epoch_and_verified(EMAIL).await;
    let response = owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let names: Vec<&str> = response.body.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["email", "expires_at", "expires_in", "local_id", "name"], "as for register");
    assert_eq!((response.string("email"), response.string("name")), (NEW, NAME));
    assert_eq!((response.string("local_id"), response.integer("expires_in")), (owner.user.as_str(), 86_400));
    assert_eq!(response.header("cache-control"), Some("no-store"));

    // Until the confirmation the old address stays, and nobody is logged out.
    let notice = shop.mail(EMAIL, 2).await;
    assert_eq!(notice.code, None);
    assert!(
        notice.subject.contains("is changing") && notice.text.contains(NAME),
        "{}: {}",
        notice.subject,
        notice.text
    );
    assert!(!notice.raw.to_lowercase().contains("new.example"), "the notice does not name the new address");
    let mail = shop.mail(NEW, 1).await;
    assert!(!mail.raw.contains(NAME) && !mail.raw.contains(EMAIL), "no text of the client");
    let body = owner.get_user().await.expect(StatusCode::OK).body;
    assert_eq!((&body["email"], &body["email_verified"]), (&json!(EMAIL), &json!(true)));
    let early = shop.client().login(shop.id(), NEW, PASSWORD).await;
    expect_invalid_credentials(early);
    other.assert_live().await;
    assert_eq!(shop.epoch_and_verified(EMAIL).await, (epoch, true));

    let reset = shop.reset_code(EMAIL, 3).await;
    let confirmed = owner.signed_in.confirm(&mail.code()).await.expect(StatusCode::OK);
    assert_eq!((confirmed.string("email"), confirmed.string("session_id")), (NEW, owner.session.as_str()));
    assert_eq!(confirmed.string("local_id"), owner.user);
    assert!(confirmed.body.get("password_required").is_none());
    owner.assert_live().await;
    other.assert_ended().await;
    assert_eq!(shop.epoch_and_verified(NEW).await, (epoch + 1, true));
    let body = owner.get_user().await.expect(StatusCode::OK).body;
    assert_eq!(
        (&body["email"], &body["email_verified"], &body["has_password"]),
        (&json!(NEW), &json!(true), &json!(true))
    );
    expect_invalid_code(shop.client().confirm_password(shop.id(), EMAIL, &reset, NEW_PASSWORD).await);
    expect_invalid_code(shop.client().confirm_password(shop.id(), NEW, &reset, NEW_PASSWORD).await);
    expect_invalid_credentials(shop.client().login(shop.id(), EMAIL, PASSWORD).await);
    shop.client().login(shop.id(), NEW, PASSWORD).await.expect(StatusCode::OK);

    let changed = shop.mail(EMAIL, 4).await;
    assert_eq!(changed.code, None);
    assert!(changed.subject.contains("was changed") && changed.text.contains(NAME), "{}", changed.subject);
    assert!(!changed.raw.to_lowercase().contains("new.example"));
    assert_eq!(shop.settled_mail_count(EMAIL).await, 4);
    assert_eq!(shop.settled_mail_count(NEW).await, 1);

    // From now on anybody can register the old address.
    shop.client().forgot_password(shop.id(), EMAIL).await.expect(StatusCode::OK);
    assert_eq!(shop.settled_mail_count(EMAIL).await, 4);
    shop.register(EMAIL).await;
    shop.mail(EMAIL, 5).await;
}

#[tokio::test]
async fn a_change_code_works_only_with_a_token_of_the_requesting_account() {
    let shop = TestApp::start().await;
    let owner = shop.log_in_new_user(EMAIL).await;
    let other_user = shop.log_in_new_user(OTHER).await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let code = shop.code(NEW, 1).await;
    let before = shop.epoch_and_verified(EMAIL).await;
    let invalid = shop.client().with_token(shop.id(), "x.y.z");
    let ended = shop.log_in_again(EMAIL).await;
    ended.signed_in.post("logout", &json!({})).await.expect(StatusCode::OK);
    for refused in [
        shop.client().confirm(shop.id(), &code).await,
        other_user.signed_in.confirm(&code).await,
        invalid.confirm(&code).await,
        ended.signed_in.confirm(&code).await,
        shop.client().confirm_password(shop.id(), EMAIL, &code, NEW_PASSWORD).await,
        shop.client().confirm_password(shop.id(), NEW, &code, NEW_PASSWORD).await,
    ] {
        expect_invalid_code(refused);
    }
    assert_eq!(shop.epoch_and_verified(EMAIL).await, before);
    other_user.assert_live().await;
    // The code was not consumed, and any session of the account can use it.
    let second = shop.log_in_again(EMAIL).await;
    let confirmed = second.signed_in.confirm(&code).await.expect(StatusCode::OK);
    assert_eq!(confirmed.string("session_id"), second.session);
    owner.assert_ended().await;
    second.assert_live().await;
    expect_invalid_code(second.signed_in.confirm(&code).await);
}

#[tokio::test]
async fn a_change_code_without_the_token_counts_as_a_wrong_code() {
    let shop = TestApp::start_with(app().limit("codesPerClient", &[(3, 600)])).await;
    let owner = shop.log_in_new_user(EMAIL).await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let code = shop.code(NEW, 1).await;
    let thief = shop.client();
    for _ in 0..3 {
        expect_invalid_code(thief.confirm(shop.id(), &code).await);
    }
    let limited = thief.confirm(shop.id(), &code).await;
    limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    owner.signed_in.confirm(&code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn only_the_last_requested_address_is_pending_and_verify_resends_its_code() {
    let shop = TestApp::start().await;
    let owner = shop.log_in_new_user(EMAIL).await;
    owner.change_address(Some(PASSWORD), "first@new.example").await.expect(StatusCode::OK);
    let first = shop.code("first@new.example", 1).await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let second = shop.code(NEW, 1).await;
    let verify = owner.signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(verify.body, json!({ "email": NEW }));
    let third = shop.code(NEW, 2).await;
    expect_invalid_code(owner.signed_in.confirm(&first).await);
    let confirmed = owner.signed_in.confirm(&third).await.expect(StatusCode::OK);
    assert_eq!(confirmed.string("email"), NEW);
    expect_invalid_code(owner.signed_in.confirm(&second).await);
    // Nothing is pending any more.
    let verify = owner.signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(verify.body, json!({ "email": NEW }));
    assert_eq!(shop.settled_mail_count(NEW).await, 2);
    assert_eq!(shop.settled_mail_count("first@new.example").await, 1);
}

#[tokio::test]
async fn a_new_password_ends_a_pending_change() {
    let shop = TestApp::start().await;
    for by_reset in [false, true] {
        let email = if by_reset { OTHER } else { EMAIL };
        let target = format!("{by_reset}@new.example");
        let owner = shop.log_in_new_user(email).await;
        owner.change_address(Some(PASSWORD), &target).await.expect(StatusCode::OK);
        let code = shop.code(&target, 1).await;
        let owner = if by_reset {
            let reset = shop.reset_code(email, 3).await;
            let client = shop.client();
            client.confirm_password(shop.id(), email, &reset, NEW_PASSWORD).await.expect(StatusCode::OK);
            shop.log_in(client, email, NEW_PASSWORD).await
        } else {
            owner.change_password(Some(PASSWORD), NEW_PASSWORD).await.expect(StatusCode::OK);
            owner
        };
        expect_invalid_code(owner.signed_in.confirm(&code).await);
        let verify = owner.signed_in.verify().await.expect(StatusCode::OK);
        assert_eq!(verify.body, json!({ "email": email }), "nothing is left to verify");
        assert_eq!(shop.settled_mail_count(&target).await, 1);
        assert_eq!(owner.get_user().await.body["email"], email);
    }
}

#[tokio::test]
async fn an_address_can_change_its_spelling() {
    let shop = TestApp::start().await;
    let owner = shop.log_in_new_user(EMAIL).await;
    owner.change_address(Some(PASSWORD), "ADA@Example.com").await.expect(StatusCode::OK);
    // In addition to the notice, which can come first.
    assert_eq!(shop.settled_mail_count(EMAIL).await, 3);
    let mails = shop.stack.mails().to(EMAIL);
    let mail = mails.iter().rfind(|mail| mail.code.is_some()).expect("a code");
    assert_eq!(mail.to, ["ADA@Example.com"]);
    owner.signed_in.confirm(&mail.code()).await.expect(StatusCode::OK);
    assert_eq!(owner.get_user().await.body["email"], "ADA@Example.com");
    shop.client().login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

// === proof of ownership ===

#[tokio::test]
async fn an_account_with_a_password_needs_it_and_one_without_needs_a_recent_login() {
    let shop = TestApp::start().await;
    let owner = shop.log_in_new_user(EMAIL).await;
    let before = shop.database_checksum().await;
    let none = owner.change_address(None, NEW).await;
    let none = none.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
    assert!(none.header("www-authenticate").unwrap().starts_with("Bearer"));
    for wrong in [WRONG_PASSWORD, "x", &"x".repeat(5000)] {
        expect_invalid_credentials(owner.change_address(Some(wrong), NEW).await);
    }
    assert_eq!(shop.database_checksum().await, before);

    shop.sql("UPDATE users SET password_hash = NULL").await;
    let before = shop.database_checksum().await;
    expect_invalid_credentials(owner.change_address(Some(PASSWORD), NEW).await);
    shop.make_login_stale(&owner).await;
    let stale = owner.change_address(None, NEW).await;
    stale.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
    assert_eq!(shop.database_checksum().await, before);
    assert_eq!(shop.settled_mail_count(NEW).await, 0);
    assert_eq!(shop.settled_mail_count(EMAIL).await, 1);
    shop.backdate_login(&owner.user, &owner.session, -301).await;
    owner.change_address(None, NEW).await.expect(StatusCode::OK);
    owner.signed_in.confirm(&shop.code(NEW, 1).await).await.expect(StatusCode::OK);
    owner.assert_live().await;
}

#[tokio::test]
async fn a_password_check_for_a_change_of_address_counts_as_a_login() {
    let shop = TestApp::start_with(app().limit("loginFailuresPerClient", &[(2, 600)])).await;
    let owner = shop.log_in_new_user(EMAIL).await;
    for _ in 0..2 {
        expect_invalid_credentials(owner.change_address(Some(WRONG_PASSWORD), NEW).await);
    }
    let limited = owner.change_address(Some(PASSWORD), NEW).await;
    limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert_eq!(shop.settled_mail_count(NEW).await, 0);
}

#[tokio::test]
async fn an_account_without_an_address_can_set_one() {
    let shop = TestApp::start().await;
    let owner = shop.log_in_new_user(EMAIL).await;
    shop.sql("UPDATE users SET password_hash = NULL, email = NULL, email_canonical = NULL, email_verified_at = NULL")
        .await;
    owner.change_address(None, NEW).await.expect(StatusCode::OK);
    let body = owner.get_user().await.expect(StatusCode::OK).body;
    assert_eq!((&body["email"], &body["email_verified"]), (&json!(null), &json!(false)));
    let code = shop.code(NEW, 1).await;
    expect_invalid_code(shop.client().confirm(shop.id(), &code).await);
    owner.signed_in.confirm(&code).await.expect(StatusCode::OK);
    let body = owner.get_user().await.expect(StatusCode::OK).body;
    assert_eq!((&body["email"], &body["email_verified"]), (&json!(NEW), &json!(true)));
    owner.assert_live().await;
    assert_eq!(shop.settled_mail_count(EMAIL).await, 1, "there is no old address to notify");
}

// === ownership of the address ===

#[tokio::test]
async fn a_taken_address_gets_the_same_response_and_its_owner_is_notified() {
    let shop = TestApp::start().await;
    let owner = shop.log_in_new_user(EMAIL).await;
    let bystander = shop.log_in_new_user(OTHER).await;
    let unknown = owner.change_address(Some(PASSWORD), "nobody@new.example").await.expect(StatusCode::OK);
    let code = shop.code("nobody@new.example", 1).await;
    let known = owner.change_address(Some(PASSWORD), "Grace@Example.com").await.expect(StatusCode::OK);
    let (mut unknown, mut known) = (shape(&unknown), shape(&known));
    assert_eq!(known["body"]["email"], "Grace@Example.com");
    unknown["body"]["email"] = json!(null);
    known["body"]["email"] = json!(null);
    assert_eq!(known, unknown);
    let notice = shop.mail(OTHER, 2).await;
    assert_eq!(notice.code, None, "no code goes to an address that somebody else has confirmed");
    assert!(notice.subject.contains("already have an account"), "{}", notice.subject);
    assert!(!notice.raw.contains(EMAIL));
    // Verify does not reveal it later either.
    let verify = owner.signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(verify.body, json!({ "email": "Grace@Example.com" }));
    let notice = shop.mail(OTHER, 3).await;
    assert_eq!(notice.code, None);
    assert_eq!(shop.settled_mail_count(EMAIL).await, 3, "the old address is notified of each");
    // The earlier address is no longer pending.
    expect_invalid_code(owner.signed_in.confirm(&code).await);
    assert_eq!(owner.get_user().await.body["email"], EMAIL);
    bystander.assert_live().await;

    // The owner of a disabled account gets no mail.
    shop.sql("UPDATE users SET disabled_at = now() WHERE email_canonical = 'grace@example.com'").await;
    owner.change_address(Some(PASSWORD), OTHER).await.expect(StatusCode::OK);
    assert_eq!(shop.settled_mail_count(OTHER).await, 3);
}

#[tokio::test]
async fn an_unverified_account_of_the_address_is_deleted_when_the_code_is_used() {
    let shop = TestApp::start().await;
    let owner = shop.log_in_new_user(EMAIL).await;
    // Somebody registers an address that they do not own.
    shop.register(NEW).await;
    let squatter = shop.log_in_again(NEW).await;
    let planted = shop.code(NEW, 1).await;
    shop.sql(&format!(
        "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
         SELECT app_id, 'https://id.example', 'x', id, 'id', now() FROM users WHERE id = '{}'",
        squatter.user
    ))
    .await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let code = shop.code(NEW, 2).await;
    squatter.assert_live().await;
    owner.signed_in.confirm(&code).await.expect(StatusCode::OK);
    owner.assert_live().await;
    let out = squatter.get_user().await;
    out.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    assert_eq!(shop.query_number("SELECT count(*) FROM users").await, 1);
    assert_eq!(shop.query_number("SELECT count(*) FROM identities").await, 0);
    expect_invalid_code(shop.client().confirm(shop.id(), &planted).await);
    assert_eq!(shop.session_count().await, 1, "the squatter's session is deleted from Redis too");
    assert_eq!(owner.get_user().await.body["email"], NEW);
}

#[tokio::test]
async fn an_account_that_has_confirmed_the_address_meanwhile_wins() {
    let shop = TestApp::start().await;
    let owner = shop.log_in_new_user(EMAIL).await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let code = shop.code(NEW, 1).await;
    shop.register(NEW).await;
    let winner_code = shop.code(NEW, 2).await;
    let winner = shop.client();
    winner.confirm(shop.id(), &winner_code).await.expect(StatusCode::OK);
    let before = shop.epoch_and_verified(EMAIL).await;
    let other = shop.log_in_again(EMAIL).await;
    expect_invalid_code(owner.signed_in.confirm(&code).await);
    assert_eq!(shop.epoch_and_verified(EMAIL).await, before);
    owner.assert_live().await;
    other.assert_live().await;
    winner.login(shop.id(), NEW, PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(shop.settled_mail_count(EMAIL).await, 2, "nothing was changed, so no second notice");
}

#[tokio::test]
async fn without_enumeration_protection_the_right_password_reveals_a_taken_address() {
    let shop = TestApp::start_with(app().set("/enumerationProtection", "Off")).await;
    let owner = shop.log_in_new_user(EMAIL).await;
    shop.log_in_new_user(OTHER).await;
    shop.register("joan@example.com").await;
    shop.settled_mail_count(OTHER).await;
    let before = shop.database_checksum().await;
    expect_invalid_credentials(owner.change_address(Some(WRONG_PASSWORD), OTHER).await);
    let taken = owner.change_address(Some(PASSWORD), OTHER).await;
    taken.expect_error(StatusCode::CONFLICT, "email_taken");
    assert_eq!(shop.database_checksum().await, before);
    assert_eq!(shop.settled_mail_count(OTHER).await, 1);
    // An address that is only unverified is not taken, and neither is the account's own.
    owner.change_address(Some(PASSWORD), "joan@example.com").await.expect(StatusCode::OK);
    owner.change_address(Some(PASSWORD), "Ada@example.com").await.expect(StatusCode::OK);
}

// === input and limits ===

#[tokio::test]
async fn an_invalid_or_disallowed_address_is_refused_and_changes_nothing() {
    let shop = TestApp::start_with(app().set("/allowedEmailDomains", json!(["example.com", "new.example"]))).await;
    let owner = shop.log_in_new_user(EMAIL).await;
    let before = shop.database_checksum().await;
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
        (json!({ "email": NEW, "password": null }), "password", "invalid"),
        (json!({ "email": NEW, "password": "" }), "password", "empty"),
    ] {
        let answer = owner.signed_in.post("user/email", &body).await;
        let answer = answer.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        assert_eq!(
            (&answer.body["fields"][0]["field"], &answer.body["fields"][0]["code"]),
            (&json!(field), &json!(code)),
            "{body}"
        );
    }
    assert_eq!(shop.database_checksum().await, before);
    assert_eq!(shop.settled_mail_count(EMAIL).await, 1);
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    shop.mail(NEW, 1).await;
}

#[tokio::test]
async fn a_mail_limit_drops_only_the_mail_to_the_new_address() {
    let shop = TestApp::start_with(app().limit("mailsPerRecipient", &[(1, 600)])).await;
    let owner = shop.log_in_new_user(EMAIL).await;
    for _ in 0..3 {
        owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    }
    assert_eq!(shop.settled_mail_count(NEW).await, 1);
    assert_eq!(shop.settled_mail_count(EMAIL).await, 4, "notices are never limited");
    // A register mail to that address has the same limit, because a client must not distinguish the two.
    shop.register(NEW).await;
    assert_eq!(shop.settled_mail_count(NEW).await, 1);
    let soon = owner.signed_in.verify().await;
    soon.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    // The earlier code stays valid.
    owner.signed_in.confirm(&shop.code(NEW, 1).await).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn deleting_an_account_deletes_its_pending_address() {
    let shop = TestApp::start().await;
    let owner = shop.log_in_new_user(EMAIL).await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let code = shop.code(NEW, 1).await;
    owner.delete_user(&json!({ "password": PASSWORD })).await.expect(StatusCode::OK);
    expect_invalid_code(owner.signed_in.confirm(&code).await);
    expect_invalid_code(owner.signed_in.confirm(WRONG_CODE).await);
    assert_eq!(shop.query_number("SELECT count(*) FROM users").await, 0);
}

// === concurrency ===

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_accounts_that_confirm_one_address_at_once_one_wins() {
    let shop = TestApp::from_builder(unlimited_app("one"), Stack::builder().servers(2)).await;
    for round in 0..8 {
        let target = format!("prize{round}@new.example");
        let mut claims: Vec<(String, AuthenticatedClient, String)> = Vec::new();
        for who in 0..3 {
            let email = format!("user{round}x{who}@example.com");
            let owner = shop.log_in_new_user(&email).await;
            owner.change_address(Some(PASSWORD), &target).await.expect(StatusCode::OK);
            let code = shop.code(&target, who + 1).await;
            claims.push((email, owner.signed_in, code));
        }
        // Another client registers it at the same moment.
        let start = Arc::new(Barrier::new(4));
        let registered = {
            let (start, client, app, target) = (start.clone(), shop.client(), shop.id().to_owned(), target.clone());
            tokio::spawn(async move {
                start.wait().await;
                client.register(&app, NAME, &target, PASSWORD).await.expect(StatusCode::OK)
            })
        };
        let tasks: Vec<_> = claims
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
            let (email, answer) = task.await.expect("no call panics");
            if answer.status == StatusCode::OK { won.push(email) } else { drop(expect_invalid_code(answer)) }
        }
        registered.await.expect("no call panics");
        assert_eq!(won.len(), 1, "{won:?} in round {round}");
        let users = format!("SELECT count(*) FROM users WHERE email_canonical = '{target}'");
        assert_eq!(shop.query_number(&users).await, 1);
        assert!(shop.epoch_and_verified(&target).await.1);
        let remaining = format!("SELECT count(*) FROM users WHERE email_canonical = '{}'", won[0]);
        assert_eq!(shop.query_number(&remaining).await, 0, "the winner has the new address, and the others their own");
        let own = format!("SELECT count(*) FROM users WHERE email_canonical LIKE 'user{round}x%'");
        assert_eq!(shop.query_number(&own).await, 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_codes_of_one_pending_address_used_at_once_one_works() {
    let shop = TestApp::from_builder(unlimited_app("codes"), Stack::builder().servers(2)).await;
    let owner = shop.log_in_new_user(EMAIL).await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    shop.code(NEW, 1).await;
    owner.signed_in.verify().await.expect(StatusCode::OK);
    let codes = [shop.code(NEW, 1).await, shop.code(NEW, 2).await];
    let (epoch, _) = shop.epoch_and_verified(EMAIL).await;
    let start = Arc::new(Barrier::new(8));
    let tasks: Vec<_> = (0..8_usize)
        .map(|number| {
            let tab = shop.stack.client_of(number % 2).with_token(shop.id(), owner.signed_in.token());
            let (start, code) = (start.clone(), codes[number / 4].clone());
            tokio::spawn(async move {
                start.wait().await;
                tab.confirm(&code).await
            })
        })
        .collect();
    let mut won = 0;
    for task in tasks {
        let answer = task.await.expect("no call panics");
        if answer.status == StatusCode::OK { won += 1 } else { drop(expect_invalid_code(answer)) }
    }
    assert_eq!(won, 1);
    assert_eq!(shop.epoch_and_verified(NEW).await, (epoch + 1, true));
    owner.assert_live().await;
    assert_eq!(shop.settled_mail_count(EMAIL).await, 3);
}
