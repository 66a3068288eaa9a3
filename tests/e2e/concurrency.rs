//! Concurrent requests to two servers: nothing is done twice, and no race leaves a session that should have ended.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::future::join_all;
use http::{StatusCode, header::RETRY_AFTER};
use latchkey_tests::{
    client::ApiResponse,
    passwords::{NEW_PASSWORD, PASSWORD},
    stack::Stack,
};
use sqlx::Row;
use tokio::{sync::Barrier, time::sleep};
use uuid::Uuid;

use crate::{
    fault_support::{Snapshot, expect_invalid_code, expect_invalid_credentials, unlimited_app},
    support::{NAME, TestApp, shape},
};

const EMAIL: &str = "ada@example.com";

/// How many times a race runs. The result of a single race depends on chance.
const ROUNDS: u64 = 12;

/// An App on two servers with the same stores.
async fn app_on_two_servers() -> TestApp {
    TestApp::from_builder(unlimited_app("many"), Stack::builder().servers(2)).await
}

/// Sends concurrent calls alternately to the two servers, each call from its own client address. Returns the responses.
async fn call_concurrently<F, Fut>(test_app: &TestApp, calls: usize, call: F) -> Vec<ApiResponse>
where
    F: Fn(latchkey_tests::client::ApiClient, usize) -> Fut,
    Fut: Future<Output = ApiResponse> + Send + 'static,
{
    let start = Arc::new(Barrier::new(calls));
    let tasks: Vec<_> = (0..calls)
        .map(|number| {
            let call = call(test_app.stack.client_of(number % test_app.stack.servers().len()), number);
            let start = Arc::clone(&start);
            tokio::spawn(async move {
                start.wait().await;
                call.await
            })
        })
        .collect();
    join_all(tasks).await.into_iter().map(|task| task.expect("no call panics")).collect()
}

/// Repeats a call while the server is overloaded. Waits for the time in `Retry-After` before each repetition. A loaded
/// machine cannot hash the passwords of all calls in time. A rejected call has done nothing.
async fn retry_if_overloaded<Fut: Future<Output = ApiResponse>>(call: impl Fn() -> Fut) -> ApiResponse {
    let mut response = call().await;
    for _ in 0..60 {
        if response.status != StatusCode::SERVICE_UNAVAILABLE {
            break;
        }
        let seconds = response.headers[RETRY_AFTER].to_str().unwrap().parse().unwrap();
        sleep(Duration::from_secs(seconds)).await;
        response = call().await;
    }
    response
}

/// Returns the successful responses. Asserts that all other responses are `invalid_code`.
fn winners(responses: Vec<ApiResponse>) -> Vec<ApiResponse> {
    let (won, lost): (Vec<_>, Vec<_>) = responses.into_iter().partition(|response| response.status == StatusCode::OK);
    lost.into_iter().for_each(|response| drop(expect_invalid_code(response)));
    won
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_concurrent_registrations_of_a_new_address_create_one_user() {
    let test_app = app_on_two_servers().await;
    let app = test_app.id().to_owned();
    let responses = call_concurrently(&test_app, 20, |client, _| {
        let app = app.clone();
        async move { retry_if_overloaded(|| client.register(&app, NAME, EMAIL, PASSWORD)).await }
    })
    .await;

    let shapes: Vec<_> = responses.iter().map(shape).collect();
    assert_eq!(shapes[0]["status"], 200, "{}", responses[0].text);
    assert!(shapes.iter().all(|shape| *shape == shapes[0]), "all responses are the same: {shapes:#?}");
    let mut ids: Vec<&str> = responses.iter().map(|response| response.string("local_id")).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 20, "no two responses have the same id");

    let users = test_app.query_number("SELECT count(*) FROM users").await;
    assert_eq!(users, 1);
    let user = test_app.query_row("SELECT id, contested, epoch FROM users").await.expect("one user");
    assert!(!user.get::<bool, _>("contested"), "all registered with one password");
    assert_eq!(user.get::<i64, _>("epoch"), 1);
    let id = user.get::<Uuid, _>("id").to_string();
    assert_eq!(ids.iter().filter(|responded| **responded == id).count(), 1, "one response has the account's id");

    // Each call causes a mail, and the code of each mail belongs to this account.
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 20);
    let code = test_app.code(EMAIL, 20).await;
    let confirmed = test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    assert_eq!(confirmed.string("local_id"), id);
    expect_invalid_code(test_app.client().confirm(test_app.id(), &test_app.code(EMAIL, 1).await).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_one_of_fifty_concurrent_uses_of_a_code_succeeds() {
    let test_app = app_on_two_servers().await;
    let app = test_app.id().to_owned();
    test_app.register(EMAIL).await;
    let code = test_app.code(EMAIL, 1).await;
    let responses = call_concurrently(&test_app, 50, |client, _| {
        let (app, code) = (app.clone(), code.clone());
        async move { client.confirm(&app, &code).await }
    })
    .await;
    assert_eq!(responses.len(), 50);
    let won = winners(responses);
    assert_eq!(won.len(), 1);
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, (2, true), "the epoch was raised once");
    test_app.verify(won[0].string("access_token")).await.expect(StatusCode::OK);

    // Fifty calls use the same reset code, each with a different new password.
    let code = test_app.request_reset_code(EMAIL, 2).await;
    let password = |number: usize| format!("{NEW_PASSWORD}-{number:02}");
    let responses = call_concurrently(&test_app, 50, |client, number| {
        let (app, code, password) = (app.clone(), code.clone(), password(number));
        async move { retry_if_overloaded(|| client.confirm_password(&app, EMAIL, &code, &password)).await }
    })
    .await;
    let winner = responses.iter().position(|response| response.status == StatusCode::OK).expect("one wins");
    assert_eq!(winners(responses).len(), 1);
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, (3, true));
    test_app.client().login(test_app.id(), EMAIL, &password(winner)).await.expect(StatusCode::OK);
    for other in [(winner + 1) % 50, (winner + 49) % 50] {
        expect_invalid_credentials(test_app.client().login(test_app.id(), EMAIL, &password(other)).await);
    }
    // Three mails: the code of the registration, the code of the reset, and one notice.
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 3);
}

#[tokio::test]
async fn a_used_code_that_reappears_in_redis_is_invalid() {
    let test_app = TestApp::from_builder(unlimited_app("back"), Stack::builder()).await;
    test_app.register(EMAIL).await;
    let code = test_app.code(EMAIL, 1).await;
    let before = Snapshot::capture(&test_app).await;
    let session = test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    let after = test_app.epoch_and_verified(EMAIL).await;
    before.restore().await;
    assert!(before.removed_keys().await.is_empty(), "the code is in Redis again");
    expect_invalid_code(test_app.client().confirm(test_app.id(), &code).await);
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, after);
    test_app.verify(session.string("access_token")).await.expect(StatusCode::OK);

    let code = test_app.request_reset_code(EMAIL, 2).await;
    let before = Snapshot::capture(&test_app).await;
    let reset = test_app.client().confirm_password(test_app.id(), EMAIL, &code, NEW_PASSWORD).await;
    reset.expect(StatusCode::OK);
    let after = test_app.epoch_and_verified(EMAIL).await;
    before.restore().await;
    expect_invalid_code(test_app.client().confirm_password(test_app.id(), EMAIL, &code, PASSWORD).await);
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, after);
    expect_invalid_credentials(test_app.client().login(test_app.id(), EMAIL, PASSWORD).await);
    let token = test_app.client().login(test_app.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    test_app.verify(token.string("token")).await.expect(StatusCode::OK);
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 3, "no second notice");

    // The first use raised the user's epoch, which made the code invalid: with the old epoch, the same code works.
    before.restore().await;
    test_app.sql("UPDATE users SET epoch = epoch - 1").await;
    let reset = test_app.client().confirm_password(test_app.id(), EMAIL, &code, PASSWORD).await;
    reset.expect(StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_login_that_races_a_reset_leaves_no_session() {
    let test_app = app_on_two_servers().await;
    let app = test_app.id().to_owned();
    test_app.register_and_confirm(EMAIL).await;
    let password = |round: u64| format!("{PASSWORD}-{round:03}");
    let code = test_app.request_reset_code(EMAIL, 2).await;
    test_app.client().confirm_password(&app, EMAIL, &code, &password(0)).await.expect(StatusCode::OK);

    let mut opened = 0;
    for round in 0..ROUNDS {
        // Each round sends two mails: the code and a notice.
        let mails = test_app.settled_mail_count(EMAIL).await;
        let code = test_app.request_reset_code(EMAIL, mails + 1).await;
        let (old, new) = (password(round), password(round + 1));
        // The first call resets the password. The other calls log in with the old password, at different times
        // during the reset.
        let responses = call_concurrently(&test_app, 7, |client, number| {
            let (app, code, old, new) = (app.clone(), code.clone(), old.clone(), new.clone());
            async move {
                if number == 0 {
                    return client.confirm_password(&app, EMAIL, &code, &new).await;
                }
                let number = u64::try_from(number).unwrap_or_default();
                tokio::time::sleep(Duration::from_millis(number * (3 + round))).await;
                client.login(&app, EMAIL, &old).await
            }
        })
        .await;
        let mut responses = responses.into_iter();
        responses.next().expect("the reset's response").expect(StatusCode::OK);
        for login in responses {
            if login.status == StatusCode::OK {
                opened += 1;
                let verified = test_app.verify(login.string("token")).await;
                verified.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
            } else {
                expect_invalid_credentials(login);
            }
        }
        expect_invalid_credentials(test_app.client().login(&app, EMAIL, &old).await);
        // Redis has no session at all, not even one with an older epoch.
        assert_eq!(test_app.session_count().await, 0, "in round {round}");
    }
    assert!(opened > 0, "some logins came before the reset");
    test_app.client().login(&app, EMAIL, &password(ROUNDS)).await.expect(StatusCode::OK);
    assert_eq!(test_app.session_count().await, 1);
}

#[tokio::test]
async fn two_servers_serve_the_same_session() {
    let test_app = app_on_two_servers().await;
    let (first, second) = (test_app.stack.client_of(0), test_app.stack.client_of(1));
    first.register(test_app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let code = test_app.code(EMAIL, 1).await;
    let confirmed = second.confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    let login = first.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    for token in [confirmed.string("access_token"), login.string("token")] {
        for client in [&first, &second] {
            client.with_token(test_app.id(), token).verify().await.expect(StatusCode::OK);
        }
    }
    // Both servers have the same issuer and the same keys.
    let mut keys: HashMap<String, usize> = HashMap::new();
    for client in [&first, &second] {
        let jwks = client.get(&format!("{}/.well-known/jwks.json", test_app.id())).await.expect(StatusCode::OK);
        *keys.entry(jwks.text).or_default() += 1;
    }
    assert_eq!(keys.len(), 1);

    let code = test_app.request_reset_code(EMAIL, 2).await;
    second.confirm_password(test_app.id(), EMAIL, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
    for token in [confirmed.string("access_token"), login.string("token")] {
        let verified = first.with_token(test_app.id(), token).verify().await;
        verified.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    }
}
