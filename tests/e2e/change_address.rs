//! Another address (contract 4): asked for, confirmed by its code and the own session, and told to the old one.

use std::sync::Arc;

use http::StatusCode;
use latchkey_tests::{client::SignedIn, stack::Stack};
use serde_json::json;
use tokio::sync::Barrier;

use crate::{
    support::{NAME, NEW_PASSWORD, PASSWORD, Shop, WRONG_CODE, WRONG_PASSWORD, app, shape},
    trouble::{invalid_code, invalid_credentials, loose},
};

const EMAIL: &str = "ada@example.com";
const NEW: &str = "Ada@New.example";
const OTHER: &str = "grace@example.com";

// === the whole way ===

#[tokio::test]
async fn the_new_address_is_asked_for_confirmed_and_told_to_the_old_one() {
    let shop = Shop::open().await;
    let owner = shop.owner(EMAIL).await;
    let other = shop.another_login(EMAIL).await;
    let (epoch, _) = shop.user(EMAIL).await;
    let asked = owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let names: Vec<&str> = asked.body.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["email", "expires_at", "expires_in", "local_id", "name"], "as register");
    assert_eq!((asked.string("email"), asked.string("name")), (NEW, NAME));
    assert_eq!((asked.string("local_id"), asked.integer("expires_in")), (owner.user.as_str(), 86_400));
    assert_eq!(asked.header("cache-control"), Some("no-store"));

    // Until it is confirmed the old one is the address, and nobody is logged out.
    let told = shop.mail(EMAIL, 2).await;
    assert_eq!(told.code, None);
    assert!(told.subject.contains("is changing") && told.text.contains(NAME), "{}: {}", told.subject, told.text);
    assert!(!told.raw.to_lowercase().contains("new.example"), "the new address is not told to the old one");
    let mail = shop.mail(NEW, 1).await;
    assert!(!mail.raw.contains(NAME) && !mail.raw.contains(EMAIL), "nothing that a caller wrote");
    let body = owner.read().await.expect(StatusCode::OK).body;
    assert_eq!((&body["email"], &body["email_verified"]), (&json!(EMAIL), &json!(true)));
    let early = shop.client().login(shop.id(), NEW, PASSWORD).await;
    invalid_credentials(early);
    other.goes_on().await;
    assert_eq!(shop.user(EMAIL).await, (epoch, true));

    let reset = shop.reset_code(EMAIL, 3).await;
    let confirmed = owner.signed_in.confirm(&mail.code()).await.expect(StatusCode::OK);
    assert_eq!((confirmed.string("email"), confirmed.string("session_id")), (NEW, owner.session.as_str()));
    assert_eq!(confirmed.string("local_id"), owner.user);
    assert!(confirmed.body.get("password_required").is_none());
    owner.goes_on().await;
    other.is_out().await;
    assert_eq!(shop.user(NEW).await, (epoch + 1, true));
    let body = owner.read().await.expect(StatusCode::OK).body;
    assert_eq!(
        (&body["email"], &body["email_verified"], &body["has_password"]),
        (&json!(NEW), &json!(true), &json!(true))
    );
    invalid_code(shop.client().confirm_password(shop.id(), EMAIL, &reset, NEW_PASSWORD).await);
    invalid_code(shop.client().confirm_password(shop.id(), NEW, &reset, NEW_PASSWORD).await);
    invalid_credentials(shop.client().login(shop.id(), EMAIL, PASSWORD).await);
    shop.client().login(shop.id(), NEW, PASSWORD).await.expect(StatusCode::OK);

    let changed = shop.mail(EMAIL, 4).await;
    assert_eq!(changed.code, None);
    assert!(changed.subject.contains("was changed") && changed.text.contains(NAME), "{}", changed.subject);
    assert!(!changed.raw.to_lowercase().contains("new.example"));
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 4);
    assert_eq!(shop.mails_in_the_end(NEW).await, 1);

    // From now on the old one is anybody's.
    shop.client().forgot_password(shop.id(), EMAIL).await.expect(StatusCode::OK);
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 4);
    shop.register(EMAIL).await;
    shop.mail(EMAIL, 5).await;
}

#[tokio::test]
async fn a_code_for_another_address_counts_only_with_the_bearer_of_the_account_that_asked() {
    let shop = Shop::open().await;
    let owner = shop.owner(EMAIL).await;
    let stranger = shop.owner(OTHER).await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let code = shop.code(NEW, 1).await;
    let before = shop.user(EMAIL).await;
    let invalid = shop.client().signed_in(shop.id(), "x.y.z");
    let ended = shop.another_login(EMAIL).await;
    ended.signed_in.post("logout", &json!({})).await.expect(StatusCode::OK);
    for refused in [
        shop.client().confirm(shop.id(), &code).await,
        stranger.signed_in.confirm(&code).await,
        invalid.confirm(&code).await,
        ended.signed_in.confirm(&code).await,
        shop.client().confirm_password(shop.id(), EMAIL, &code, NEW_PASSWORD).await,
        shop.client().confirm_password(shop.id(), NEW, &code, NEW_PASSWORD).await,
    ] {
        invalid_code(refused);
    }
    assert_eq!(shop.user(EMAIL).await, before);
    stranger.goes_on().await;
    // It was not used up, and any session of the account will do.
    let second = shop.another_login(EMAIL).await;
    let confirmed = second.signed_in.confirm(&code).await.expect(StatusCode::OK);
    assert_eq!(confirmed.string("session_id"), second.session);
    owner.is_out().await;
    second.goes_on().await;
    invalid_code(second.signed_in.confirm(&code).await);
}

#[tokio::test]
async fn a_code_tried_without_the_bearer_counts_as_a_wrong_one() {
    let shop = Shop::with(app().limit("codesPerClient", &[(3, 600)])).await;
    let owner = shop.owner(EMAIL).await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let code = shop.code(NEW, 1).await;
    let thief = shop.client();
    for _ in 0..3 {
        invalid_code(thief.confirm(shop.id(), &code).await);
    }
    let limited = thief.confirm(shop.id(), &code).await;
    limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    owner.signed_in.confirm(&code).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn only_the_last_address_asked_for_is_waiting_and_verify_sends_its_code_again() {
    let shop = Shop::open().await;
    let owner = shop.owner(EMAIL).await;
    owner.change_address(Some(PASSWORD), "first@new.example").await.expect(StatusCode::OK);
    let first = shop.code("first@new.example", 1).await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let second = shop.code(NEW, 1).await;
    let verify = owner.signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(verify.body, json!({ "email": NEW }));
    let third = shop.code(NEW, 2).await;
    invalid_code(owner.signed_in.confirm(&first).await);
    let confirmed = owner.signed_in.confirm(&third).await.expect(StatusCode::OK);
    assert_eq!(confirmed.string("email"), NEW);
    invalid_code(owner.signed_in.confirm(&second).await);
    // Nothing waits any more.
    let verify = owner.signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(verify.body, json!({ "email": NEW }));
    assert_eq!(shop.mails_in_the_end(NEW).await, 2);
    assert_eq!(shop.mails_in_the_end("first@new.example").await, 1);
}

#[tokio::test]
async fn a_new_password_ends_the_change_that_waits() {
    let shop = Shop::open().await;
    for by_reset in [false, true] {
        let email = if by_reset { OTHER } else { EMAIL };
        let target = format!("{by_reset}@new.example");
        let owner = shop.owner(email).await;
        owner.change_address(Some(PASSWORD), &target).await.expect(StatusCode::OK);
        let code = shop.code(&target, 1).await;
        let owner = if by_reset {
            let reset = shop.reset_code(email, 3).await;
            let client = shop.client();
            client.confirm_password(shop.id(), email, &reset, NEW_PASSWORD).await.expect(StatusCode::OK);
            shop.login(client, email, NEW_PASSWORD).await
        } else {
            owner.change_password(Some(PASSWORD), NEW_PASSWORD).await.expect(StatusCode::OK);
            owner
        };
        invalid_code(owner.signed_in.confirm(&code).await);
        let verify = owner.signed_in.verify().await.expect(StatusCode::OK);
        assert_eq!(verify.body, json!({ "email": email }), "nothing is left to verify");
        assert_eq!(shop.mails_in_the_end(&target).await, 1);
        assert_eq!(owner.read().await.body["email"], email);
    }
}

#[tokio::test]
async fn an_address_may_be_written_anew() {
    let shop = Shop::open().await;
    let owner = shop.owner(EMAIL).await;
    owner.change_address(Some(PASSWORD), "ADA@Example.com").await.expect(StatusCode::OK);
    // Beside the notice, which may come first.
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 3);
    let mails = shop.stack.mails().to(EMAIL);
    let mail = mails.iter().rfind(|mail| mail.code.is_some()).expect("a code");
    assert_eq!(mail.to, ["ADA@Example.com"]);
    owner.signed_in.confirm(&mail.code()).await.expect(StatusCode::OK);
    assert_eq!(owner.read().await.body["email"], "ADA@Example.com");
    shop.client().login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
}

// === what proves the owner ===

#[tokio::test]
async fn an_account_with_a_password_must_show_it_and_one_without_must_have_logged_in_of_late() {
    let shop = Shop::open().await;
    let owner = shop.owner(EMAIL).await;
    let before = shop.everything().await;
    let none = owner.change_address(None, NEW).await;
    let none = none.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
    assert!(none.header("www-authenticate").unwrap().starts_with("Bearer"));
    for wrong in [WRONG_PASSWORD, "x", &"x".repeat(5000)] {
        invalid_credentials(owner.change_address(Some(wrong), NEW).await);
    }
    assert_eq!(shop.everything().await, before);

    shop.sql("UPDATE users SET password_hash = NULL").await;
    let before = shop.everything().await;
    invalid_credentials(owner.change_address(Some(PASSWORD), NEW).await);
    shop.stale(&owner).await;
    let stale = owner.change_address(None, NEW).await;
    stale.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
    assert_eq!(shop.everything().await, before);
    assert_eq!(shop.mails_in_the_end(NEW).await, 0);
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 1);
    shop.logged_in_before(&owner.user, &owner.session, -301).await;
    owner.change_address(None, NEW).await.expect(StatusCode::OK);
    owner.signed_in.confirm(&shop.code(NEW, 1).await).await.expect(StatusCode::OK);
    owner.goes_on().await;
}

#[tokio::test]
async fn a_password_that_is_checked_for_an_address_counts_as_a_login() {
    let shop = Shop::with(app().limit("loginFailuresPerClient", &[(2, 600)])).await;
    let owner = shop.owner(EMAIL).await;
    for _ in 0..2 {
        invalid_credentials(owner.change_address(Some(WRONG_PASSWORD), NEW).await);
    }
    let limited = owner.change_address(Some(PASSWORD), NEW).await;
    limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert_eq!(shop.mails_in_the_end(NEW).await, 0);
}

#[tokio::test]
async fn an_account_without_any_address_gets_one() {
    let shop = Shop::open().await;
    let owner = shop.owner(EMAIL).await;
    shop.sql("UPDATE users SET password_hash = NULL, email = NULL, email_canonical = NULL, email_verified_at = NULL")
        .await;
    owner.change_address(None, NEW).await.expect(StatusCode::OK);
    let body = owner.read().await.expect(StatusCode::OK).body;
    assert_eq!((&body["email"], &body["email_verified"]), (&json!(null), &json!(false)));
    let code = shop.code(NEW, 1).await;
    invalid_code(shop.client().confirm(shop.id(), &code).await);
    owner.signed_in.confirm(&code).await.expect(StatusCode::OK);
    let body = owner.read().await.expect(StatusCode::OK).body;
    assert_eq!((&body["email"], &body["email_verified"]), (&json!(NEW), &json!(true)));
    owner.goes_on().await;
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 1, "there is no old address to be told");
}

// === whose the address is ===

#[tokio::test]
async fn a_verified_address_of_another_account_is_answered_alike_and_its_owner_hears_of_it() {
    let shop = Shop::open().await;
    let owner = shop.owner(EMAIL).await;
    let bystander = shop.owner(OTHER).await;
    let unknown = owner.change_address(Some(PASSWORD), "nobody@new.example").await.expect(StatusCode::OK);
    let code = shop.code("nobody@new.example", 1).await;
    let known = owner.change_address(Some(PASSWORD), "Grace@Example.com").await.expect(StatusCode::OK);
    let (mut unknown, mut known) = (shape(&unknown), shape(&known));
    assert_eq!(known["body"]["email"], "Grace@Example.com");
    unknown["body"]["email"] = json!(null);
    known["body"]["email"] = json!(null);
    assert_eq!(known, unknown);
    let told = shop.mail(OTHER, 2).await;
    assert_eq!(told.code, None, "no code goes to an address that somebody else has confirmed");
    assert!(told.subject.contains("already have an account"), "{}", told.subject);
    assert!(!told.raw.contains(EMAIL));
    // Nor later: the answer does not tell either.
    let verify = owner.signed_in.verify().await.expect(StatusCode::OK);
    assert_eq!(verify.body, json!({ "email": "Grace@Example.com" }));
    let told = shop.mail(OTHER, 3).await;
    assert_eq!(told.code, None);
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 3, "the old address is told of each");
    // The address before it waits no more.
    invalid_code(owner.signed_in.confirm(&code).await);
    assert_eq!(owner.read().await.body["email"], EMAIL);
    bystander.goes_on().await;

    // A disabled account's owner is not bothered.
    shop.sql("UPDATE users SET disabled_at = now() WHERE email_canonical = 'grace@example.com'").await;
    owner.change_address(Some(PASSWORD), OTHER).await.expect(StatusCode::OK);
    assert_eq!(shop.mails_in_the_end(OTHER).await, 3);
}

#[tokio::test]
async fn an_unverified_account_of_the_address_is_deleted_when_the_code_is_used() {
    let shop = Shop::open().await;
    let owner = shop.owner(EMAIL).await;
    // Somebody registers an address that is not theirs.
    shop.register(NEW).await;
    let squatter = shop.another_login(NEW).await;
    let planted = shop.code(NEW, 1).await;
    shop.sql(&format!(
        "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
         SELECT app_id, 'https://id.example', 'x', id, 'id', now() FROM users WHERE id = '{}'",
        squatter.user
    ))
    .await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let code = shop.code(NEW, 2).await;
    squatter.goes_on().await;
    owner.signed_in.confirm(&code).await.expect(StatusCode::OK);
    owner.goes_on().await;
    let out = squatter.read().await;
    out.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    assert_eq!(shop.count("SELECT count(*) FROM users").await, 1);
    assert_eq!(shop.count("SELECT count(*) FROM identities").await, 0);
    invalid_code(shop.client().confirm(shop.id(), &planted).await);
    assert_eq!(shop.sessions().await, 1, "the squatter's session is gone from Redis too");
    assert_eq!(owner.read().await.body["email"], NEW);
}

#[tokio::test]
async fn an_account_that_has_confirmed_the_address_meanwhile_wins() {
    let shop = Shop::open().await;
    let owner = shop.owner(EMAIL).await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let code = shop.code(NEW, 1).await;
    shop.register(NEW).await;
    let theirs = shop.code(NEW, 2).await;
    let winner = shop.client();
    winner.confirm(shop.id(), &theirs).await.expect(StatusCode::OK);
    let before = shop.user(EMAIL).await;
    let other = shop.another_login(EMAIL).await;
    invalid_code(owner.signed_in.confirm(&code).await);
    assert_eq!(shop.user(EMAIL).await, before);
    owner.goes_on().await;
    other.goes_on().await;
    winner.login(shop.id(), NEW, PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 2, "nothing was changed, so no second notice");
}

#[tokio::test]
async fn without_enumeration_protection_a_taken_address_is_told_to_who_has_shown_the_password() {
    let shop = Shop::with(app().set("/enumerationProtection", "Off")).await;
    let owner = shop.owner(EMAIL).await;
    shop.owner(OTHER).await;
    shop.register("joan@example.com").await;
    shop.mails_in_the_end(OTHER).await;
    let before = shop.everything().await;
    invalid_credentials(owner.change_address(Some(WRONG_PASSWORD), OTHER).await);
    let taken = owner.change_address(Some(PASSWORD), OTHER).await;
    taken.expect_error(StatusCode::CONFLICT, "email_taken");
    assert_eq!(shop.everything().await, before);
    assert_eq!(shop.mails_in_the_end(OTHER).await, 1);
    // An unverified one is nobody's, and one's own is one's own.
    owner.change_address(Some(PASSWORD), "joan@example.com").await.expect(StatusCode::OK);
    owner.change_address(Some(PASSWORD), "Ada@example.com").await.expect(StatusCode::OK);
}

// === input and limits ===

#[tokio::test]
async fn an_address_that_is_none_or_of_another_domain_is_refused_and_changes_nothing() {
    let shop = Shop::with(app().set("/allowedEmailDomains", json!(["example.com", "new.example"]))).await;
    let owner = shop.owner(EMAIL).await;
    let before = shop.everything().await;
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
    assert_eq!(shop.everything().await, before);
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 1);
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    shop.mail(NEW, 1).await;
}

#[tokio::test]
async fn a_mail_limit_drops_the_mail_to_the_new_address_and_neither_the_answer_nor_the_notice() {
    let shop = Shop::with(app().limit("mailsPerRecipient", &[(1, 600)])).await;
    let owner = shop.owner(EMAIL).await;
    for _ in 0..3 {
        owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    }
    assert_eq!(shop.mails_in_the_end(NEW).await, 1);
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 4, "notices are never limited");
    // What register sends to that address counts with it: who asks cannot tell them apart.
    shop.register(NEW).await;
    assert_eq!(shop.mails_in_the_end(NEW).await, 1);
    let soon = owner.signed_in.verify().await;
    soon.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    // The code sent before stays live.
    owner.signed_in.confirm(&shop.code(NEW, 1).await).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn an_account_that_is_deleted_takes_its_pending_address_with_it() {
    let shop = Shop::open().await;
    let owner = shop.owner(EMAIL).await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    let code = shop.code(NEW, 1).await;
    owner.delete(&json!({ "password": PASSWORD })).await.expect(StatusCode::OK);
    invalid_code(owner.signed_in.confirm(&code).await);
    invalid_code(owner.signed_in.confirm(WRONG_CODE).await);
    assert_eq!(shop.count("SELECT count(*) FROM users").await, 0);
}

// === two at once ===

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_accounts_that_confirm_one_address_at_once_one_gets_it() {
    let shop = Shop::of(loose("one"), Stack::builder().servers(2)).await;
    for round in 0..8 {
        let target = format!("prize{round}@new.example");
        let mut claims: Vec<(String, SignedIn, String)> = Vec::new();
        for who in 0..3 {
            let email = format!("user{round}x{who}@example.com");
            let owner = shop.owner(&email).await;
            owner.change_address(Some(PASSWORD), &target).await.expect(StatusCode::OK);
            let code = shop.code(&target, who + 1).await;
            claims.push((email, owner.signed_in, code));
        }
        // One more registers it at that moment.
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
            let (email, answer) = task.await.expect("a call does not panic");
            if answer.status == StatusCode::OK { won.push(email) } else { drop(invalid_code(answer)) }
        }
        registered.await.expect("a call does not panic");
        assert_eq!(won.len(), 1, "{won:?} in round {round}");
        let users = format!("SELECT count(*) FROM users WHERE email_canonical = '{target}'");
        assert_eq!(shop.count(&users).await, 1);
        assert!(shop.user(&target).await.1);
        let left = format!("SELECT count(*) FROM users WHERE email_canonical = '{}'", won[0]);
        assert_eq!(shop.count(&left).await, 0, "the winner has the new address, and the others their own");
        let own = format!("SELECT count(*) FROM users WHERE email_canonical LIKE 'user{round}x%'");
        assert_eq!(shop.count(&own).await, 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_codes_of_one_pending_address_used_at_once_are_used_once() {
    let shop = Shop::of(loose("codes"), Stack::builder().servers(2)).await;
    let owner = shop.owner(EMAIL).await;
    owner.change_address(Some(PASSWORD), NEW).await.expect(StatusCode::OK);
    shop.code(NEW, 1).await;
    owner.signed_in.verify().await.expect(StatusCode::OK);
    let codes = [shop.code(NEW, 1).await, shop.code(NEW, 2).await];
    let (epoch, _) = shop.user(EMAIL).await;
    let start = Arc::new(Barrier::new(8));
    let tasks: Vec<_> = (0..8_usize)
        .map(|number| {
            let tab = shop.stack.client_of(number % 2).signed_in(shop.id(), owner.signed_in.token());
            let (start, code) = (start.clone(), codes[number / 4].clone());
            tokio::spawn(async move {
                start.wait().await;
                tab.confirm(&code).await
            })
        })
        .collect();
    let mut won = 0;
    for task in tasks {
        let answer = task.await.expect("a call does not panic");
        if answer.status == StatusCode::OK { won += 1 } else { drop(invalid_code(answer)) }
    }
    assert_eq!(won, 1);
    assert_eq!(shop.user(NEW).await, (epoch + 1, true));
    owner.goes_on().await;
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 3);
}
