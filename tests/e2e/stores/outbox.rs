//! The outbox: fair to Apps, one holder a row, and nothing lost with a worker.

use std::{collections::BTreeMap, time::Duration};

use latchkey_crds::types::AppId;
use latchkey_server::{
    domain::{
        mail::EpochNews,
        ports::{Claimed, Outbox, Outcome, Task},
        session::SessionId,
        user::Epoch,
    },
    store::{
        Stores, UrlSource,
        postgres::{self, Postgres},
    },
};
use latchkey_tests::{eventually, proxy::Proxy};
use tokio::{task::JoinSet, time::timeout};
use uuid::Uuid;

use super::{Fixture, LIMIT, a_mail, a_user_id, an_app, now};

const LEASE: Duration = Duration::from_secs(60);

fn per_app(rows: &[Claimed]) -> BTreeMap<AppId, usize> {
    rows.iter().fold(BTreeMap::new(), |mut counts, row| {
        *counts.entry(row.app.clone()).or_default() += 1;
        counts
    })
}

#[tokio::test]
async fn apps_take_turns_however_long_their_lines_are() {
    let fixture = Fixture::new().await;
    let (busy, second, third) = (an_app(), an_app(), an_app());
    fixture.enqueue(&busy, 30).await;
    fixture.enqueue(&second, 2).await;
    fixture.enqueue(&third, 1).await;
    let rows = fixture.stores.claim(6, 4, LEASE).await.unwrap();
    let expected = BTreeMap::from([(busy.clone(), 3), (second.clone(), 2), (third, 1)]);
    assert_eq!(per_app(&rows), expected);
    // The busy one holds three of its four.
    let rows = fixture.stores.claim(6, 4, LEASE).await.unwrap();
    assert_eq!(per_app(&rows), BTreeMap::from([(busy, 1)]));
    assert!(fixture.stores.claim(6, 4, LEASE).await.unwrap().is_empty());
}

#[tokio::test]
async fn inside_an_app_the_oldest_come_first() {
    let fixture = Fixture::new().await;
    fixture.enqueue(&fixture.app, 6).await;
    let oldest =
        "SELECT array_agg(id ORDER BY due_at) FROM (SELECT id, due_at FROM outbox ORDER BY due_at LIMIT 2) AS o";
    let mut connection = fixture.database.connect().await.unwrap();
    let mut expected: Vec<Uuid> = sqlx::query_scalar(oldest).fetch_one(&mut connection).await.unwrap();
    let mut claimed: Vec<Uuid> =
        fixture.stores.claim(2, 4, LEASE).await.unwrap().into_iter().map(|row| row.id).collect();
    expected.sort();
    claimed.sort();
    assert_eq!(claimed, expected);
}

#[tokio::test]
async fn workers_at_once_hold_no_row_twice_and_no_more_than_an_app_may() {
    let fixture = Fixture::new().await;
    let (one, two) = (an_app(), an_app());
    fixture.enqueue(&one, 40).await;
    fixture.enqueue(&two, 3).await;
    let another = fixture.another().await;
    let mut tasks = JoinSet::new();
    for number in 0..10 {
        let stores = if number % 2 == 0 { fixture.stores.clone() } else { another.clone() };
        tasks.spawn(async move { stores.claim(20, 4, LEASE).await.unwrap() });
    }
    let rows: Vec<Claimed> = tasks.join_all().await.into_iter().flatten().collect();
    assert_eq!(per_app(&rows), BTreeMap::from([(one, 4), (two, 3)]));
    let mut ids: Vec<Uuid> = rows.iter().map(|row| row.id).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 7);
}

#[tokio::test]
async fn a_row_comes_back_when_its_holder_is_gone() {
    let fixture = Fixture::new().await;
    fixture.enqueue(&fixture.app, 1).await;
    let [lost] = fixture.stores.claim(1, 4, Duration::from_millis(200)).await.unwrap().try_into().unwrap();
    assert!(fixture.stores.claim(1, 4, LEASE).await.unwrap().is_empty(), "it is held");
    let another = fixture.another().await;
    let row = eventually("the lease ends", LIMIT, async || another.claim(1, 4, LEASE).await.unwrap().pop()).await;
    assert_eq!((row.id, row.attempts), (lost.id, 0));

    // The first comes back from a long sleep: the row is not its any more.
    let later = now() + time::Duration::hours(1);
    for outcome in [
        Outcome::Done,
        Outcome::Retry { at: later, error: "late".to_owned() },
        Outcome::Wait { at: later },
        Outcome::Dead { error: "late".to_owned() },
    ] {
        fixture.stores.settle(&lost, outcome).await.unwrap();
    }
    let untouched = "SELECT count(*) FROM outbox WHERE lease_until > now() AND attempts = 0 AND dead_at IS NULL";
    assert_eq!(fixture.count(untouched).await, 1);
    another.settle(&row, Outcome::Done).await.unwrap();
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 0);
}

#[tokio::test]
async fn a_late_holder_settles_what_nobody_else_took() {
    let fixture = Fixture::new().await;
    fixture.enqueue(&fixture.app, 1).await;
    let [row] = fixture.stores.claim(1, 4, Duration::ZERO).await.unwrap().try_into().unwrap();
    fixture.stores.settle(&row, Outcome::Done).await.unwrap();
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 0);
}

#[tokio::test]
async fn outcomes_leave_a_row_as_they_say() {
    let fixture = Fixture::new().await;
    let stores = &fixture.stores;
    fixture.enqueue(&fixture.app, 1).await;
    let claim = async || stores.claim(1, 4, LEASE).await.unwrap().pop();
    let row = claim().await.unwrap();
    stores.settle(&row, Outcome::Wait { at: now() + time::Duration::hours(1) }).await.unwrap();
    assert!(claim().await.is_none());
    fixture.execute("UPDATE outbox SET due_at = now()").await;
    let row = claim().await.unwrap();
    assert_eq!(row.attempts, 0, "waiting is no attempt");
    stores
        .settle(&row, Outcome::Retry { at: now() - time::Duration::seconds(1), error: "é".repeat(600) })
        .await
        .unwrap();
    let row = claim().await.unwrap();
    assert_eq!(row.attempts, 1);
    assert!(stores.postgres.dead_letters().await.unwrap().is_empty());
    stores.settle(&row, Outcome::Dead { error: "the relay refused, 550".to_owned() }).await.unwrap();
    assert!(claim().await.is_none());

    let [letter] = stores.postgres.dead_letters().await.unwrap().try_into().unwrap();
    assert_eq!((letter.id, letter.app.as_str(), letter.attempts), (row.id, fixture.app.as_str(), 2));
    assert_eq!((letter.kind.as_str(), letter.error.as_deref()), ("confirm", Some("the relay refused, 550")));
    assert!(
        letter.to_string().starts_with(&format!("{}\t{}\tconfirm\t-\tattempts=2\t", row.id, fixture.app)),
        "{letter}"
    );
    assert!(!stores.postgres.retry_dead_letter(Uuid::from_u128(1)).await.unwrap());
    assert!(stores.postgres.retry_dead_letter(row.id).await.unwrap());
    assert!(!stores.postgres.retry_dead_letter(row.id).await.unwrap(), "it is not dead any more");
    let again = claim().await.unwrap();
    assert_eq!((again.id, again.attempts), (row.id, 0));
}

#[tokio::test]
async fn a_kind_of_a_newer_server_is_left_to_it() {
    let fixture = Fixture::new().await;
    fixture.enqueue(&fixture.app, 2).await;
    fixture.execute("UPDATE outbox SET kind = 'of-tomorrow' WHERE id = (SELECT id FROM outbox LIMIT 1)").await;
    assert_eq!(fixture.stores.claim(10, 10, LEASE).await.unwrap().len(), 1);
    assert!(fixture.stores.claim(10, 10, LEASE).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_carried_epoch_takes_its_row_and_those_before_it() {
    let fixture = Fixture::new().await;
    let (user, other) = (a_user_id(), a_user_id());
    let keep = Uuid::from_u128(9);
    for (user, epoch) in [(user, 2), (user, 3), (user, 4), (other, 3)] {
        fixture
            .execute(&format!(
                "INSERT INTO outbox (app_id, kind, user_id, epoch, keep_session)
                 VALUES ('{}', 'epoch', '{user}', {epoch}, '{keep}')",
                fixture.app
            ))
            .await;
    }
    let news = EpochNews { user, epoch: Epoch(3), keep: None };
    fixture.stores.epoch_carried(&an_app(), &news).await.unwrap();
    fixture.stores.epoch_carried(&fixture.app, &news).await.unwrap();
    let mut left: Vec<(bool, i64)> = Vec::new();
    for row in fixture.stores.claim(10, 10, LEASE).await.unwrap() {
        let Task::CarryEpoch(news) = row.task else { panic!("{row:?}") };
        assert_eq!(news.keep, Some(SessionId(keep)));
        left.push((news.user == user, news.epoch.0));
    }
    left.sort();
    assert_eq!(left, [(false, 3), (true, 4)]);
}

#[tokio::test]
async fn the_backlog_counts_what_is_due_and_what_is_dead() {
    let fixture = Fixture::new().await;
    let empty = fixture.stores.backlog().await.unwrap();
    assert_eq!((empty.due, empty.dead), (0, 0));
    assert!(empty.oldest_due_seconds.abs() < f64::EPSILON);
    fixture.enqueue(&fixture.app, 5).await;
    fixture.execute("UPDATE outbox SET due_at = now() - interval '90 s'").await;
    fixture
        .execute(
            "WITH n AS (SELECT id, row_number() OVER () AS n FROM outbox)
             UPDATE outbox SET dead_at = CASE WHEN n.n = 1 THEN now() END,
                 due_at = CASE WHEN n.n = 2 THEN now() + interval '1 h' ELSE due_at END
             FROM n WHERE outbox.id = n.id",
        )
        .await;
    let backlog = fixture.stores.backlog().await.unwrap();
    assert_eq!((backlog.due, backlog.dead), (3, 1));
    assert!((90.0..150.0).contains(&backlog.oldest_due_seconds), "{backlog:?}");
}

#[tokio::test]
async fn a_listening_server_hears_of_rows_of_another_and_again_after_a_cut() {
    let fixture = Fixture::new().await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    let url = fixture.database.url.replace(&fixture.database.addr.to_string(), &proxy.addr().to_string());
    let listening = Postgres::connect(postgres::Options::new(UrlSource::given(url))).unwrap();
    let listening = Stores { postgres: listening, ..fixture.stores.clone() };
    let telling = Postgres::connect(postgres::Options::new(UrlSource::given(&fixture.database.url))).unwrap();
    let telling = Stores { postgres: telling, ..fixture.stores.clone() };
    for _ in 0..2 {
        // Told once when it starts to listen, since it may have missed some.
        timeout(LIMIT, listening.notified()).await.unwrap();
        telling.enqueue(&fixture.app, a_mail(None)).await.unwrap();
        timeout(LIMIT, listening.notified()).await.unwrap();
        let nothing = timeout(Duration::from_millis(200), listening.notified()).await;
        assert!(nothing.is_err(), "told without news");
        proxy.cut();
    }
}

#[tokio::test]
async fn a_server_that_does_not_listen_still_hears_of_its_own_rows() {
    let fixture = Fixture::new().await;
    let nothing = timeout(Duration::from_millis(200), fixture.stores.notified()).await;
    assert!(nothing.is_err());
    fixture.enqueue(&fixture.app, 1).await;
    timeout(LIMIT, fixture.stores.notified()).await.unwrap();
}
