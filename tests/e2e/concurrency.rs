//! Two at once, over two servers: one wins, and nothing is done twice (contract 2, 3 and 4).

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::future::join_all;
use http::{StatusCode, header::RETRY_AFTER};
use latchkey_tests::{client::Answer, stack::Stack};
use sqlx::Row;
use tokio::{sync::Barrier, time::sleep};
use uuid::Uuid;

use crate::{
    support::{NAME, NEW_PASSWORD, PASSWORD, Shop, shape},
    trouble::{Snapshot, invalid_code, invalid_credentials, loose},
};

const EMAIL: &str = "ada@example.com";

/// Rounds of the races that are decided by chance.
const ROUNDS: u64 = 12;

/// Two servers over the same stores.
async fn two_servers() -> Shop {
    Shop::of(loose("many"), Stack::builder().servers(2)).await
}

/// The answers to so many calls at once, each from a client address of its own, the servers in turn.
async fn at_once<F, Fut>(shop: &Shop, calls: usize, call: F) -> Vec<Answer>
where
    F: Fn(latchkey_tests::client::Anonymous, usize) -> Fut,
    Fut: Future<Output = Answer> + Send + 'static,
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
    join_all(tasks).await.into_iter().map(|task| task.expect("a call does not panic")).collect()
}

/// The answer to a call once there is room for it: on a loaded machine the hashes of all calls take longer than one waits.
/// A call that is refused for capacity has done nothing, and is made again after the time in `Retry-After`.
async fn admitted<Fut: Future<Output = Answer>>(call: impl Fn() -> Fut) -> Answer {
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

/// How many of the answers succeeded; the others are all `invalid_code`.
fn winners(answers: Vec<Answer>) -> Vec<Answer> {
    let (won, lost): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == StatusCode::OK);
    lost.into_iter().for_each(|answer| drop(invalid_code(answer)));
    won
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_new_address_registered_by_twenty_at_once_is_one_user() {
    let shop = two_servers().await;
    let app = shop.id().to_owned();
    let answers = at_once(&shop, 20, |client, _| {
        let app = app.clone();
        async move { admitted(|| client.register(&app, NAME, EMAIL, PASSWORD)).await }
    })
    .await;

    let shapes: Vec<_> = answers.iter().map(shape).collect();
    assert_eq!(shapes[0]["status"], 200, "{}", answers[0].text);
    assert!(shapes.iter().all(|shape| *shape == shapes[0]), "all answers are alike: {shapes:#?}");
    let mut ids: Vec<&str> = answers.iter().map(|answer| answer.string("local_id")).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 20, "no two answers carry one id");

    let users = shop.count("SELECT count(*) FROM users").await;
    assert_eq!(users, 1);
    let user = shop.row("SELECT id, contested, epoch FROM users").await.expect("one user");
    assert!(!user.get::<bool, _>("contested"), "all registered with one password");
    assert_eq!(user.get::<i64, _>("epoch"), 1);
    let id = user.get::<Uuid, _>("id").to_string();
    assert_eq!(ids.iter().filter(|answered| **answered == id).count(), 1, "one of the answers tells the account's id");

    // Each call has sent a mail, and every code of them is one of this account.
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 20);
    let code = shop.code(EMAIL, 20).await;
    let confirmed = shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
    assert_eq!(confirmed.string("local_id"), id);
    invalid_code(shop.client().confirm(shop.id(), &shop.code(EMAIL, 1).await).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_code_redeemed_by_fifty_at_once_is_redeemed_once() {
    let shop = two_servers().await;
    let app = shop.id().to_owned();
    shop.register(EMAIL).await;
    let code = shop.code(EMAIL, 1).await;
    let answers = at_once(&shop, 50, |client, _| {
        let (app, code) = (app.clone(), code.clone());
        async move { client.confirm(&app, &code).await }
    })
    .await;
    assert_eq!(answers.len(), 50);
    let won = winners(answers);
    assert_eq!(won.len(), 1);
    assert_eq!(shop.user(EMAIL).await, (2, true), "the epoch was raised once");
    shop.look(won[0].string("access_token")).await.expect(StatusCode::OK);

    // The same for a reset: each of the fifty wants a password of its own.
    let code = shop.reset_code(EMAIL, 2).await;
    let password = |number: usize| format!("{NEW_PASSWORD}-{number:02}");
    let answers = at_once(&shop, 50, |client, number| {
        let (app, code, password) = (app.clone(), code.clone(), password(number));
        async move { admitted(|| client.confirm_password(&app, EMAIL, &code, &password)).await }
    })
    .await;
    let winner = answers.iter().position(|answer| answer.status == StatusCode::OK).expect("one wins");
    assert_eq!(winners(answers).len(), 1);
    assert_eq!(shop.user(EMAIL).await, (3, true));
    shop.client().login(shop.id(), EMAIL, &password(winner)).await.expect(StatusCode::OK);
    for other in [(winner + 1) % 50, (winner + 49) % 50] {
        invalid_credentials(shop.client().login(shop.id(), EMAIL, &password(other)).await);
    }
    // The reset's code, and one notice that the password was changed.
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 3);
}

#[tokio::test]
async fn a_code_that_a_store_brings_back_is_dead() {
    let shop = Shop::of(loose("back"), Stack::builder()).await;
    shop.register(EMAIL).await;
    let code = shop.code(EMAIL, 1).await;
    let before = Snapshot::take(&shop).await;
    let session = shop.client().confirm(shop.id(), &code).await.expect(StatusCode::OK);
    let after = shop.user(EMAIL).await;
    before.bring_back().await;
    assert!(before.gone().await.is_empty(), "the code is in Redis again");
    invalid_code(shop.client().confirm(shop.id(), &code).await);
    assert_eq!(shop.user(EMAIL).await, after);
    shop.look(session.string("access_token")).await.expect(StatusCode::OK);

    let code = shop.reset_code(EMAIL, 2).await;
    let before = Snapshot::take(&shop).await;
    let reset = shop.client().confirm_password(shop.id(), EMAIL, &code, NEW_PASSWORD).await;
    reset.expect(StatusCode::OK);
    let after = shop.user(EMAIL).await;
    before.bring_back().await;
    invalid_code(shop.client().confirm_password(shop.id(), EMAIL, &code, PASSWORD).await);
    assert_eq!(shop.user(EMAIL).await, after);
    invalid_credentials(shop.client().login(shop.id(), EMAIL, PASSWORD).await);
    let token = shop.client().login(shop.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    shop.look(token.string("token")).await.expect(StatusCode::OK);
    assert_eq!(shop.mails_in_the_end(EMAIL).await, 3, "no second notice");

    // It is the epoch alone that makes it dead: turned back, the very code would do.
    before.bring_back().await;
    shop.sql("UPDATE users SET epoch = epoch - 1").await;
    let reset = shop.client().confirm_password(shop.id(), EMAIL, &code, PASSWORD).await;
    reset.expect(StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_login_that_races_a_reset_leaves_no_session() {
    let shop = two_servers().await;
    let app = shop.id().to_owned();
    shop.confirmed(EMAIL).await;
    let password = |round: u64| format!("{PASSWORD}-{round:03}");
    let code = shop.reset_code(EMAIL, 2).await;
    shop.client().confirm_password(&app, EMAIL, &code, &password(0)).await.expect(StatusCode::OK);

    let mut opened = 0;
    for round in 0..ROUNDS {
        // Each round sends the code and a notice.
        let mails = shop.mails_in_the_end(EMAIL).await;
        let code = shop.reset_code(EMAIL, mails + 1).await;
        let (old, new) = (password(round), password(round + 1));
        // The first call resets; the others log in with the old password, spread over the time that it takes.
        let answers = at_once(&shop, 7, |client, number| {
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
        answers.next().expect("the reset's answer").expect(StatusCode::OK);
        for login in answers {
            if login.status == StatusCode::OK {
                opened += 1;
                let looked = shop.look(login.string("token")).await;
                looked.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
            } else {
                invalid_credentials(login);
            }
        }
        invalid_credentials(shop.client().login(&app, EMAIL, &old).await);
        // Not even one that nobody could use.
        assert_eq!(shop.sessions().await, 0, "in round {round}");
    }
    assert!(opened > 0, "some log-ins came before the reset");
    shop.client().login(&app, EMAIL, &password(ROUNDS)).await.expect(StatusCode::OK);
    assert_eq!(shop.sessions().await, 1);
}

#[tokio::test]
async fn two_servers_serve_one_users_session() {
    let shop = two_servers().await;
    let (first, second) = (shop.stack.client_of(0), shop.stack.client_of(1));
    first.register(shop.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let code = shop.code(EMAIL, 1).await;
    let confirmed = second.confirm(shop.id(), &code).await.expect(StatusCode::OK);
    let login = first.login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    for token in [confirmed.string("access_token"), login.string("token")] {
        for client in [&first, &second] {
            client.signed_in(shop.id(), token).verify().await.expect(StatusCode::OK);
        }
    }
    // Both name the issuer and the keys alike.
    let mut keys: HashMap<String, usize> = HashMap::new();
    for client in [&first, &second] {
        let jwks = client.get(&format!("{}/.well-known/jwks.json", shop.id())).await.expect(StatusCode::OK);
        *keys.entry(jwks.text).or_default() += 1;
    }
    assert_eq!(keys.len(), 1);

    let code = shop.reset_code(EMAIL, 2).await;
    second.confirm_password(shop.id(), EMAIL, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
    for token in [confirmed.string("access_token"), login.string("token")] {
        let looked = first.signed_in(shop.id(), token).verify().await;
        looked.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    }
}
