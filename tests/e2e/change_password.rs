//! Change of password by a logged-in user: how users prove who they are, which sessions end, and who gets a notice
//! (specification: Accounts, Change of password).

use std::{sync::Arc, time::Duration};

use http::{Method, StatusCode};
use latchkey_tests::{
    client::ApiResponse,
    passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD},
    stack::Stack,
};
use serde_json::json;
use tokio::sync::Barrier;

use crate::{
    fault_support::{expect_invalid_code, expect_invalid_credentials, unlimited_app},
    support::{NAME, TestApp, app},
    user_session::UserSession,
};

const EMAIL: &str = "ada@example.com";
const THIRD_PASSWORD: &str = "third-Harbour-quilt-64";

/// Whether a login with this password succeeds.
async fn can_log_in(test_app: &TestApp, password: &str) -> bool {
    let login = test_app.client().login(test_app.id(), EMAIL, password).await;
    if login.status == StatusCode::OK {
        return true;
    }
    expect_invalid_credentials(login);
    false
}

#[tokio::test]
async fn a_change_with_the_old_password_ends_all_other_sessions_and_codes() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let others = [test_app.log_in_again(EMAIL).await, test_app.log_in_again(EMAIL).await];
    let reset = test_app.request_reset_code(EMAIL, 2).await;
    test_app.make_login_stale(&owner).await;
    let (epoch, _) = test_app.epoch_and_verified(EMAIL).await;

    let response = owner.change_password(Some(PASSWORD), NEW_PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(response.body, json!({}));
    assert_eq!(response.header("cache-control"), Some("no-store"));
    owner.assert_live().await;
    for other in others {
        other.assert_ended().await;
    }
    expect_invalid_code(test_app.client().confirm_password(test_app.id(), EMAIL, &reset, THIRD_PASSWORD).await);
    assert!(!can_log_in(&test_app, PASSWORD).await);
    assert!(can_log_in(&test_app, NEW_PASSWORD).await);
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, (epoch + 1, true));
    let notice = test_app.mail(EMAIL, 3).await;
    assert_eq!(notice.code, None);
    assert!(notice.subject.contains("password") && notice.text.contains(NAME), "{}: {}", notice.subject, notice.text);
    for body in [&notice.text, &notice.html] {
        assert!(body.contains("All other devices were logged out."), "{body}");
    }
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 3);
}

#[tokio::test]
async fn a_change_without_the_old_password_needs_a_recent_login() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    owner.change_password(None, NEW_PASSWORD).await.expect(StatusCode::OK);
    owner.assert_live().await;

    test_app.settled_mail_count(EMAIL).await;
    let before = test_app.database_checksum().await;
    test_app.make_login_stale(&owner).await;
    let stale = owner.change_password(None, THIRD_PASSWORD).await;
    let stale = stale.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
    let challenge = stale.header("www-authenticate").unwrap();
    assert!(challenge.starts_with("Bearer") && !challenge.contains("invalid_token"), "{challenge}");
    // A refresh does not count as a recent login.
    let refreshed = owner.refresh().await.expect(StatusCode::OK);
    let refreshed = owner.client.with_token(test_app.id(), refreshed.string("access_token"));
    let stale = refreshed.post("user/password", &json!({ "password": THIRD_PASSWORD })).await;
    stale.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
    assert_eq!(test_app.database_checksum().await, before);
    assert!(can_log_in(&test_app, NEW_PASSWORD).await);
    // A login is recent for five minutes. This login was four minutes ago.
    let recent_login = test_app.log_in(test_app.client(), EMAIL, NEW_PASSWORD).await;
    test_app.backdate_login(&recent_login.user, &recent_login.session, 240).await;
    recent_login.change_password(None, THIRD_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_wrong_old_password_is_refused_even_after_a_recent_login_and_changes_nothing() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let other = test_app.log_in_again(EMAIL).await;
    test_app.settled_mail_count(EMAIL).await;
    let before = test_app.database_checksum().await;
    for wrong in [WRONG_PASSWORD, NEW_PASSWORD, "x", &"x".repeat(5000), &format!(" {PASSWORD}")] {
        expect_invalid_credentials(owner.change_password(Some(wrong), NEW_PASSWORD).await);
    }
    assert_eq!(test_app.database_checksum().await, before);
    owner.assert_live().await;
    other.assert_live().await;
    assert!(can_log_in(&test_app, PASSWORD).await);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 1);
}

#[tokio::test]
async fn an_account_without_a_password_can_set_one_after_a_recent_login() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    test_app.sql("UPDATE users SET password_hash = NULL").await;
    expect_invalid_credentials(owner.change_password(Some(PASSWORD), NEW_PASSWORD).await);
    test_app.make_login_stale(&owner).await;
    let stale = owner.change_password(None, NEW_PASSWORD).await;
    stale.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
    assert_eq!(owner.get_user().await.body["has_password"], false);
    test_app.backdate_login(&owner.user, &owner.session, -301).await;
    owner.change_password(None, NEW_PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(owner.get_user().await.body["has_password"], true);
    assert!(can_log_in(&test_app, NEW_PASSWORD).await);
}

#[tokio::test]
async fn an_account_without_an_address_can_set_a_password() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    test_app.sql("UPDATE users SET email = NULL, email_canonical = NULL, email_verified_at = NULL").await;
    owner.change_password(Some(PASSWORD), NEW_PASSWORD).await.expect(StatusCode::OK);
    owner.assert_live().await;
    expect_invalid_credentials(owner.change_password(Some(PASSWORD), THIRD_PASSWORD).await);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 1, "there is nowhere to send a notice to");
}

#[tokio::test]
async fn a_confirm_that_removes_the_password_lets_its_session_set_one_without_a_recent_login() {
    let test_app = TestApp::start().await;
    for (email, with_bearer) in [("ada@example.com", false), ("grace@example.com", true)] {
        test_app.register(email).await;
        let client = test_app.client();
        client.register(test_app.id(), NAME, email, THIRD_PASSWORD).await.expect(StatusCode::OK);
        let own_session = test_app.log_in(client.clone(), email, PASSWORD).await;
        let code = test_app.code(email, 2).await;
        let confirmed = if with_bearer {
            own_session.signed_in.confirm(&code).await
        } else {
            client.confirm(test_app.id(), &code).await
        };
        let confirmed = confirmed.expect(StatusCode::OK);
        assert_eq!(confirmed.body["password_required"], true);
        let session = confirmed.string("session_id");
        assert_eq!(session == own_session.session, with_bearer);
        let token = confirmed.string("access_token");
        test_app.backdate_login(&own_session.user, session, 3600).await;
        let signed_in = client.with_token(test_app.id(), token);
        let body = signed_in.get("user").await.expect(StatusCode::OK).body;
        assert_eq!((&body["has_password"], &body["email_verified"]), (&json!(false), &json!(true)));

        // The account has no password, so every old password is wrong.
        let set_password = |password: &str, current: Option<&str>| {
            let mut body = json!({ "password": password });
            if let Some(current) = current {
                body["current_password"] = json!(current);
            }
            let signed_in = signed_in.clone();
            async move { signed_in.post("user/password", &body).await }
        };
        for removed in [PASSWORD, THIRD_PASSWORD] {
            expect_invalid_credentials(set_password(NEW_PASSWORD, Some(removed)).await);
        }
        set_password("password", None).await.expect_error(StatusCode::BAD_REQUEST, "weak_password");
        set_password(NEW_PASSWORD, None).await.expect(StatusCode::OK);
        client.login(test_app.id(), email, NEW_PASSWORD).await.expect(StatusCode::OK);
        // The account has a password again, so a change requires the old password.
        let refused = set_password(THIRD_PASSWORD, None).await;
        refused.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
        set_password(THIRD_PASSWORD, Some(NEW_PASSWORD)).await.expect(StatusCode::OK);
    }
}

#[tokio::test]
async fn other_sessions_need_a_recent_login_to_set_a_password_after_a_confirm_has_removed_it() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let client = test_app.client();
    client.register(test_app.id(), NAME, EMAIL, THIRD_PASSWORD).await.expect(StatusCode::OK);
    let code = test_app.code(EMAIL, 2).await;
    let confirmed = client.confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    let confirm_session = client.with_token(test_app.id(), confirmed.string("access_token"));

    // Opens another session, then removes the password again and makes the login of the other session stale.
    test_app.sql(&format!("UPDATE users SET password_hash = '{}'", TestApp::imported_hash(WRONG_PASSWORD))).await;
    let other_session = test_app.log_in(test_app.client(), EMAIL, WRONG_PASSWORD).await;
    test_app.sql("UPDATE users SET password_hash = NULL").await;
    test_app.make_login_stale(&other_session).await;
    let refused = other_session.change_password(None, NEW_PASSWORD).await;
    refused.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");

    // After a password reset, the session that *confirm* opened can no longer set a password.
    let code = test_app.request_reset_code(EMAIL, 3).await;
    test_app.client().confirm_password(test_app.id(), EMAIL, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
    let rejected = confirm_session.post("user/password", &json!({ "password": THIRD_PASSWORD })).await;
    rejected.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    let remaining = test_app.query_number("SELECT count(*) FROM users WHERE password_session IS NOT NULL").await;
    assert_eq!(remaining, 0);
}

#[tokio::test]
async fn a_weak_new_password_is_refused_as_in_register_and_is_not_a_login_failure() {
    let name = "Bartholomew Quetzalcoatl";
    let test_app = TestApp::start_with(app().limit("loginFailuresPerClient", &[(2, 600)])).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    owner.rename_user(name).await.expect(StatusCode::OK);
    let before = test_app.database_checksum().await;
    for (weak, code) in [
        ("short-7", "too_short"),
        (&"x9-Q".repeat(33), "too_long"),
        ("password1234", "guessable"),
        (EMAIL, "guessable"),
        ("bartholomewquetzalcoatl", "guessable"),
    ] {
        for current in [None, Some(PASSWORD), Some(WRONG_PASSWORD)] {
            let refused = owner.change_password(current, weak).await;
            let refused = refused.expect_error(StatusCode::BAD_REQUEST, "weak_password");
            assert_eq!(refused.body["fields"][0]["field"], "password");
            assert_eq!(refused.body["fields"][0]["code"], code, "{weak}");
        }
    }
    assert_eq!(test_app.database_checksum().await, before);
    owner.change_password(Some(PASSWORD), NEW_PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn the_refusal_of_an_invalid_body_names_every_invalid_field() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let before = test_app.database_checksum().await;
    for (body, fields) in [
        (json!({}), vec![("password", "missing")]),
        (json!({ "current_password": PASSWORD }), vec![("password", "missing")]),
        (json!({ "password": "" }), vec![("password", "empty")]),
        (json!({ "password": NEW_PASSWORD, "current_password": null }), vec![("current_password", "invalid")]),
        (json!({ "password": NEW_PASSWORD, "current_password": "" }), vec![("current_password", "empty")]),
        (
            json!({ "password": 5, "current_password": {} }),
            vec![("password", "invalid"), ("current_password", "invalid")],
        ),
    ] {
        let response = owner.signed_in.post("user/password", &body).await;
        let response = response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        let found: Vec<_> = response.body["fields"].as_array().unwrap().iter().collect();
        let found: Vec<_> =
            found.iter().map(|entry| (entry["field"].as_str().unwrap(), entry["code"].as_str().unwrap())).collect();
        assert_eq!(found, fields, "{body}");
    }
    let without_body = owner.signed_in.send(owner.signed_in.request(Method::POST, "user/password")).await;
    without_body.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    assert_eq!(test_app.database_checksum().await, before);
}

#[tokio::test]
async fn the_limits_on_logins_also_apply_to_checks_of_the_old_password() {
    let test_app = TestApp::start_with(app().limit("loginFailuresPerClient", &[(3, 600)])).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    for _ in 0..3 {
        expect_invalid_credentials(owner.change_password(Some(WRONG_PASSWORD), NEW_PASSWORD).await);
    }
    let limited = owner.change_password(Some(PASSWORD), NEW_PASSWORD).await;
    limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    let login = owner.client.login(test_app.id(), EMAIL, PASSWORD).await;
    login.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    // Neither a right password nor a change without an old password is counted as a failure.
    let other_session = test_app.log_in_again(EMAIL).await;
    for (old, new) in
        [(PASSWORD, NEW_PASSWORD), (NEW_PASSWORD, PASSWORD), (PASSWORD, NEW_PASSWORD), (NEW_PASSWORD, PASSWORD)]
    {
        other_session.change_password(Some(old), new).await.expect(StatusCode::OK);
    }
    other_session.change_password(None, NEW_PASSWORD).await.expect(StatusCode::OK);

    let test_app = TestApp::start_with(app().limit("loginsPerClient", &[(4, 600)])).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    for password in [NEW_PASSWORD, PASSWORD, NEW_PASSWORD] {
        let current = if password == NEW_PASSWORD { PASSWORD } else { NEW_PASSWORD };
        owner.change_password(Some(current), password).await.expect(StatusCode::OK);
    }
    let limited = owner.change_password(Some(NEW_PASSWORD), PASSWORD).await;
    let limited = limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert!(limited.header("ratelimit-policy").unwrap().contains("loginsPerClient"));
}

#[tokio::test]
async fn a_change_is_counted_in_logins_per_client_even_without_the_old_password_or_with_a_weak_new_one() {
    let test_app = TestApp::start_with(app().limit("loginsPerClient", &[(3, 600)])).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    owner.change_password(None, NEW_PASSWORD).await.expect(StatusCode::OK);
    let weak = owner.change_password(None, "password1234").await;
    weak.expect_error(StatusCode::BAD_REQUEST, "weak_password");
    let limited = owner.change_password(None, "password1234").await;
    let limited = limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert!(limited.header("ratelimit-policy").unwrap().contains("loginsPerClient"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_login_with_the_old_password_during_the_change_leaves_no_session() {
    let test_app = TestApp::from_builder(unlimited_app("race"), Stack::builder().servers(2)).await;
    let owner = Arc::new(test_app.log_in_new_user(EMAIL).await);
    let password = |round: u64| if round == 0 { PASSWORD.to_owned() } else { format!("{NEW_PASSWORD}-{round:03}") };
    let mut opened = 0;
    for round in 0..10_u64 {
        let (old, new) = (password(round), password(round + 1));
        let start = Arc::new(Barrier::new(7));
        let logins: Vec<_> = (0..6_u64)
            .map(|number| {
                let (start, app, old) = (start.clone(), test_app.id().to_owned(), old.clone());
                let client = test_app.stack.client_of(usize::try_from(number % 2).unwrap());
                tokio::spawn(async move {
                    start.wait().await;
                    tokio::time::sleep(Duration::from_millis(number * (4 + round))).await;
                    client.login(&app, EMAIL, &old).await
                })
            })
            .collect();
        start.wait().await;
        owner.change_password(Some(&old), &new).await.expect(StatusCode::OK);
        for login in logins {
            let login = login.await.expect("no call panics");
            if login.status == StatusCode::OK {
                opened += 1;
                test_app.verify(login.string("token")).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
            } else {
                expect_invalid_credentials(login);
            }
        }
        assert_eq!(test_app.session_count().await, 1, "only the owner's session, in round {round}");
        owner.get_user().await.expect(StatusCode::OK);
    }
    assert!(opened > 0, "some logins came before the change");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_does_not_interrupt_other_tabs_of_the_session() {
    let test_app = TestApp::from_builder(unlimited_app("tabs"), Stack::builder().servers(2)).await;
    let owner = Arc::new(test_app.log_in_new_user(EMAIL).await);
    let stop = tokio_util::sync::CancellationToken::new();
    let tabs: Vec<_> = (0..4_usize)
        .map(|number| {
            let tab = test_app.stack.client_of(number % 2).with_token(test_app.id(), owner.signed_in.token());
            let stop = stop.clone();
            tokio::spawn(async move {
                let mut read = 0;
                while !stop.is_cancelled() {
                    tab.get("user").await.expect(StatusCode::OK);
                    read += 1;
                }
                read
            })
        })
        .collect();
    for _ in 0..15 {
        owner.change_password(None, NEW_PASSWORD).await.expect(StatusCode::OK);
    }
    stop.cancel();
    for tab in tabs {
        assert!(tab.await.expect("no tab is logged out") > 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_one_of_several_concurrent_changes_succeeds_and_the_session_continues() {
    let test_app = TestApp::from_builder(unlimited_app("both"), Stack::builder().servers(2)).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let start = Arc::new(Barrier::new(6));
    let tasks: Vec<_> = (0..6_usize)
        .map(|number| {
            let tab = test_app.stack.client_of(number % 2).with_token(test_app.id(), owner.signed_in.token());
            let start = start.clone();
            tokio::spawn(async move {
                start.wait().await;
                let body = json!({ "password": format!("{NEW_PASSWORD}-{number}"), "current_password": PASSWORD });
                tab.post("user/password", &body).await
            })
        })
        .collect();
    let mut won = Vec::new();
    for (number, task) in tasks.into_iter().enumerate() {
        let response: ApiResponse = task.await.expect("no call panics");
        if response.status == StatusCode::OK { won.push(number) } else { drop(expect_invalid_credentials(response)) }
    }
    assert_eq!(won.len(), 1, "{won:?}");
    assert!(can_log_in(&test_app, &format!("{NEW_PASSWORD}-{}", won[0])).await);
    owner.assert_live().await;
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 2);
}

#[tokio::test]
async fn delivery_of_the_raised_epoch_keeps_the_session_that_changed_the_password() {
    let test_app = TestApp::start().await;
    let owner: UserSession = test_app.log_in_new_user(EMAIL).await;
    let other_session = test_app.log_in_again(EMAIL).await;
    test_app.settled_mail_count(EMAIL).await;
    // Creates the state that remains if a server dies between its writes to Postgres and to Redis.
    test_app
        .sql(&format!(
            "UPDATE users SET epoch = epoch + 1, version = version + 1;
         INSERT INTO outbox (app_id, kind, user_id, epoch, keep_session, due_at)
         SELECT app_id, 'epoch', id, epoch, '{}', now() + interval '1 h' FROM users",
            owner.session
        ))
        .await;
    // The raised epoch has not reached Redis yet, so it has not ended any session there. Even so, the session that
    // changed the password continues, and the other session has ended.
    owner.get_user().await.expect(StatusCode::OK);
    other_session.get_user().await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    owner.change_password(Some(PASSWORD), NEW_PASSWORD).await.expect(StatusCode::OK);
    test_app.make_outbox_due().await;
    test_app.settled_mail_count(EMAIL).await;
    owner.assert_live().await;
    other_session.assert_ended().await;
}
