//! Concurrent requests to two servers: one wins, and nothing is done twice.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::future::join_all;
use http::{StatusCode, header::RETRY_AFTER};
use latchkey_tests::{client::ApiResponse, stack::Stack};
use sqlx::Row;
use tokio::{sync::Barrier, time::sleep};
use uuid::Uuid;

use crate::{
    fault_support::{Snapshot, expect_invalid_code, expect_invalid_credentials, unlimited_app},
    support::{NAME, NEW_PASSWORD, PASSWORD, TestApp, shape},
};

const EMAIL: &str = "ada@example.com";

/// Rounds of the races that chance decides.
const ROUNDS: u64 = 12;

/// Two servers over the same stores.
async fn two_servers() -> TestApp {
    TestApp::from_builder(unlimited_app("many"), Stack::builder().servers(2)).await
}

/// The responses to concurrent calls, each from its own client address, to the servers in turn.
async fn call_concurrently<F, Fut>(shop: &TestApp, calls: usize, call: F) -> Vec<ApiResponse>
where
    F: Fn(latchkey_tests::client::ApiClient, usize) -> Fut,
    Fut: Future<Output = ApiResponse> + Send + 'static,
{
    let start = Arc::new(Barrier::new(calls));
    let tasks: Vec<_> = (0..calls)
        .map(|number| {
            let call = call(shop.stack.client_of(number % shop.stack.servers().len()), number);
            let start = Arc::clone(&start);
            tokio::spawn(async move {
                start.wait().await;
                call.await
            })
        })
        .collect();
    join_all(tasks).await.into_iter().map(|task| task.expect("no call panics")).collect()
}

/// The response to a call once there is capacity for it. On a loaded machine the hashes of all calls take longer than
/// the longest wait. A call that is refused for capacity has done nothing. It is repeated after the time in
/// `Retry-After`.
async fn retry_if_overloaded<Fut: Future<Output = ApiResponse>>(call: impl Fn() -> Fut) -> ApiResponse {
    let mut answer = call().await;
    for _ in 0..60 {
        if answer.status != StatusCode::SERVICE_UNAVAILABLE {
            break;
        }
        let seconds = answer.headers[RETRY_AFTER].to_str().unwrap().parse().unwrap();
        sleep(Duration::from_secs(seconds)).await;
        answer = call().await;
    }
    answer
}

/// The successful responses. All others must be `expect_invalid_code`.
fn winners(answers: Vec<ApiResponse>) -> Vec<ApiResponse> {
    let (won, lost): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == StatusCode::OK);
    lost.into_iter().for_each(|answer| drop(expect_invalid_code(answer)));
    won
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_concurrent_registrations_of_a_new_address_create_one_user() {
    let shop = two_servers().await;
    let app = shop.id().to_owned();
    let answers = call_concurrently(&shop, 20, |client, _| {
        let app = app.clone();
        async move { retry_if_overloaded(|| client.register(&app, NAME, EMAIL, PASSWORD)).await }
    })
    .await;

    let shapes: Vec<_> = answers.iter().map(shape).collect();
    assert_eq!(shapes[0]["status"], 200, "{}", answers[0].text);
    assert!(shapes.iter().all(|shape| *shape == shapes[0]), "all responses are the same: {shapes:#?}");
    let mut ids: Vec<&str> = answers.iter().map(|answer| answer.string("local_id")).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 20, "no two responses have the same id");

    let users = shop.query_number("SELECT count(*) FROM users").await;
    assert_eq!(users, 1);
    let user = shop.query_row("SELECT id, contested, epoch FROM users").await.expect("one user");
    assert!(!user.get::<bool, _>("contested"), "all registered with one password");
    assert_eq!(user.get::<i64, _>("epoch"), 1);
    let id = user.get::<Uuid, _>("id").to_string();
    assert_eq!(ids.iter().filter(|answered| **answered == id).count(), 1, "one response has the account's id");

    // Each call has sent a mail, and each of their codes belongs to this account.
    assert_eq!(shop.settled_mail_count(EMAIL).await, 20);
    let code = shop.code(EMAIL, 20).await;
    let confirmed = shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
    assert_eq!(confirmed.string("local_id"), id);
    expect_invalid_code(shop.client().confirm(shop.id(), &shop.code(EMAIL, 1).await).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_code_redeemed_by_fifty_at_once_is_redeemed_once() {
    let shop = two_servers().await;
    let app = shop.id().to_owned();
    shop.register(EMAIL).await;
    let code = shop.code(EMAIL, 1).await;
    let answers = call_concurrently(&shop, 50, |client, _| {
        let (app, code) = (app.clone(), code.clone());
        async move { client.confirm(&app, &code).await }
    })
    .await;
    assert_eq!(answers.len(), 50);
    let won = winners(answers);
    assert_eq!(won.len(), 1);
    assert_eq!(shop.epoch_and_verified(EMAIL).await, (2, true), "the epoch was raised once");
    shop.verify(won[0].string("access_token")).await.expect(StatusCode::OK);

    // The same for a reset. Each of the fifty calls sets a different password.
    let code = shop.reset_code(EMAIL, 2).await;
    let password = |number: usize| format!("{NEW_PASSWORD}-{number:02}");
    let answers = call_concurrently(&shop, 50, |client, number| {
        let (app, code, password) = (app.clone(), code.clone(), password(number));
        async move { retry_if_overloaded(|| client.confirm_password(&app, EMAIL, &code, &password)).await }
    })
    .await;
    let winner = answers.iter().position(|answer| answer.status == StatusCode::OK).expect("one wins");
    assert_eq!(winners(answers).len(), 1);
    assert_eq!(shop.epoch_and_verified(EMAIL).await, (3, true));
    shop.client().login(shop.id(), EMAIL, &password(winner)).await.expect(StatusCode::OK);
    for other in [(winner + 1) % 50, (winner + 49) % 50] {
        expect_invalid_credentials(shop.client().login(shop.id(), EMAIL, &password(other)).await);
    }
    // The reset's code, and one notice that the password was changed.
    assert_eq!(shop.settled_mail_count(EMAIL).await, 3);
}

#[tokio::test]
async fn a_code_that_a_store_restores_is_invalid() {
    let shop = TestApp::from_builder(unlimited_app("back"), Stack::builder()).await;
    shop.register(EMAIL).await;
    let code = shop.code(EMAIL, 1).await;
    let before = Snapshot::capture(&shop).await;
    let session = shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
    let after = shop.epoch_and_verified(EMAIL).await;
    before.restore().await;
    assert!(before.removed_keys().await.is_empty(), "the code is in Redis again");
    expect_invalid_code(shop.client().confirm(shop.id(), &code).await);
    assert_eq!(shop.epoch_and_verified(EMAIL).await, after);
    shop.verify(session.string("access_token")).await.expect(StatusCode::OK);

    let code = shop.reset_code(EMAIL, 2).await;
    let before = Snapshot::capture(&shop).await;
    let reset = shop.client().confirm_password(shop.id(), EMAIL, &code, NEW_PASSWORD).await;
    reset.expect(StatusCode::OK);
    let after = shop.epoch_and_verified(EMAIL).await;
    before.restore().await;
    expect_invalid_code(shop.client().confirm_password(shop.id(), EMAIL, &code, PASSWORD).await);
    assert_eq!(shop.epoch_and_verified(EMAIL).await, after);
    expect_invalid_credentials(shop.client().login(shop.id(), EMAIL, PASSWORD).await);
    let token = shop.client().login(shop.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    shop.verify(token.string("token")).await.expect(StatusCode::OK);
    assert_eq!(shop.settled_mail_count(EMAIL).await, 3, "no second notice");

    // Only the epoch makes the code invalid: after a return to the old epoch, the same code works.
    before.restore().await;
    shop.sql("UPDATE users SET epoch = epoch - 1").await;
    let reset = shop.client().confirm_password(shop.id(), EMAIL, &code, PASSWORD).await;
    reset.expect(StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_login_that_races_a_reset_leaves_no_session() {
    let shop = two_servers().await;
    let app = shop.id().to_owned();
    shop.register_and_confirm(EMAIL).await;
    let password = |round: u64| format!("{PASSWORD}-{round:03}");
    let code = shop.reset_code(EMAIL, 2).await;
    shop.client().confirm_password(&app, EMAIL, &code, &password(0)).await.expect(StatusCode::OK);

    let mut opened = 0;
    for round in 0..ROUNDS {
        // Each round sends the code and a notice.
        let mails = shop.settled_mail_count(EMAIL).await;
        let code = shop.reset_code(EMAIL, mails + 1).await;
        let (old, new) = (password(round), password(round + 1));
        // The first call resets. The others log in with the old password, spread over the time of the reset.
        let answers = call_concurrently(&shop, 7, |client, number| {
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
        let mut answers = answers.into_iter();
        answers.next().expect("the reset's response").expect(StatusCode::OK);
        for login in answers {
            if login.status == StatusCode::OK {
                opened += 1;
                let verified = shop.verify(login.string("token")).await;
                verified.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
            } else {
                expect_invalid_credentials(login);
            }
        }
        expect_invalid_credentials(shop.client().login(&app, EMAIL, &old).await);
        // Not even a session that nobody could use.
        assert_eq!(shop.session_count().await, 0, "in round {round}");
    }
    assert!(opened > 0, "some logins came before the reset");
    shop.client().login(&app, EMAIL, &password(ROUNDS)).await.expect(StatusCode::OK);
    assert_eq!(shop.session_count().await, 1);
}

#[tokio::test]
async fn two_servers_serve_the_same_session() {
    let shop = two_servers().await;
    let (first, second) = (shop.stack.client_of(0), shop.stack.client_of(1));
    first.register(shop.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let code = shop.code(EMAIL, 1).await;
    let confirmed = second.confirm(shop.id(), &code).await.expect(StatusCode::OK);
    let login = first.login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    for token in [confirmed.string("access_token"), login.string("token")] {
        for client in [&first, &second] {
            client.with_token(shop.id(), token).verify().await.expect(StatusCode::OK);
        }
    }
    // Both have the same issuer and the same keys.
    let mut keys: HashMap<String, usize> = HashMap::new();
    for client in [&first, &second] {
        let jwks = client.get(&format!("{}/.well-known/jwks.json", shop.id())).await.expect(StatusCode::OK);
        *keys.entry(jwks.text).or_default() += 1;
    }
    assert_eq!(keys.len(), 1);

    let code = shop.reset_code(EMAIL, 2).await;
    second.confirm_password(shop.id(), EMAIL, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
    for token in [confirmed.string("access_token"), login.string("token")] {
        let verified = first.with_token(shop.id(), token).verify().await;
        verified.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    }
}
