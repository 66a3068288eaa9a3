//! The outbox: it is fair to Apps, one server at a time has the lease of a row, and no row is lost if a server dies.

use std::{collections::BTreeMap, time::Duration};

use latchkey_crds::types::AppId;
use latchkey_server::{
    domain::{
        mail::EpochChange,
        ports::{ClaimedRow, DeliveryOutcome, Outbox, OutboxTask},
        session::SessionId,
        user::Epoch,
    },
    store::{
        Stores, UrlSource,
        postgres::{self, PostgresStore},
    },
};
use latchkey_tests::{eventually, proxy::Proxy};
use tokio::{task::JoinSet, time::timeout};
use uuid::Uuid;

use super::{Fixture, LIMIT, a_mail, a_user_id, an_app, now};

const LEASE: Duration = Duration::from_secs(60);

fn rows_per_app(rows: &[ClaimedRow]) -> BTreeMap<AppId, usize> {
    rows.iter().fold(BTreeMap::new(), |mut counts, row| {
        *counts.entry(row.app.clone()).or_default() += 1;
        counts
    })
}

#[tokio::test]
async fn apps_take_turns_however_long_their_queues_are() {
    let fixture = Fixture::new().await;
    let (busy, second, third) = (an_app(), an_app(), an_app());
    fixture.enqueue_mails(&busy, 30).await;
    fixture.enqueue_mails(&second, 2).await;
    fixture.enqueue_mails(&third, 1).await;
    let rows = fixture.stores.claim(6, 4, LEASE).await.unwrap();
    let expected = BTreeMap::from([(busy.clone(), 3), (second.clone(), 2), (third, 1)]);
    assert_eq!(rows_per_app(&rows), expected);
    // The busy App has three rows in flight, and its maximum is four.
    let rows = fixture.stores.claim(6, 4, LEASE).await.unwrap();
    assert_eq!(rows_per_app(&rows), BTreeMap::from([(busy, 1)]));
    assert!(fixture.stores.claim(6, 4, LEASE).await.unwrap().is_empty());
}

#[tokio::test]
async fn the_oldest_rows_of_an_app_come_first() {
    let fixture = Fixture::new().await;
    fixture.enqueue_mails(&fixture.app, 6).await;
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
async fn concurrent_workers_never_claim_the_same_row_and_respect_the_limit_per_app() {
    let fixture = Fixture::new().await;
    let (one, two) = (an_app(), an_app());
    fixture.enqueue_mails(&one, 40).await;
    fixture.enqueue_mails(&two, 3).await;
    let another = fixture.another_server().await;
    let mut tasks = JoinSet::new();
    for number in 0..10 {
        let stores = if number % 2 == 0 { fixture.stores.clone() } else { another.clone() };
        tasks.spawn(async move { stores.claim(20, 4, LEASE).await.unwrap() });
    }
    let rows: Vec<ClaimedRow> = tasks.join_all().await.into_iter().flatten().collect();
    assert_eq!(rows_per_app(&rows), BTreeMap::from([(one, 4), (two, 3)]));
    let mut ids: Vec<Uuid> = rows.iter().map(|row| row.id).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 7);
}

#[tokio::test]
async fn a_row_can_be_claimed_again_when_its_lease_ends() {
    let fixture = Fixture::new().await;
    fixture.enqueue_mails(&fixture.app, 1).await;
    let [lost_row] = fixture.stores.claim(1, 4, Duration::from_millis(200)).await.unwrap().try_into().unwrap();
    assert!(fixture.stores.claim(1, 4, LEASE).await.unwrap().is_empty(), "it is held");
    let another = fixture.another_server().await;
    let row = eventually("the lease ends", LIMIT, async || another.claim(1, 4, LEASE).await.unwrap().pop()).await;
    assert_eq!((row.id, row.attempts), (lost_row.id, 0));

    // The first server returns after a long pause. Its lease on the row has ended.
    let in_an_hour = now() + time::Duration::hours(1);
    for outcome in [
        DeliveryOutcome::Done,
        DeliveryOutcome::Retry { at: in_an_hour, error: "late".to_owned() },
        DeliveryOutcome::Wait { at: in_an_hour },
        DeliveryOutcome::Dead { error: "late".to_owned() },
    ] {
        fixture.stores.finish(&lost_row, outcome).await.unwrap();
    }
    let untouched = "SELECT count(*) FROM outbox WHERE lease_until > now() AND attempts = 0 AND dead_at IS NULL";
    assert_eq!(fixture.count(untouched).await, 1);
    another.finish(&row, DeliveryOutcome::Done).await.unwrap();
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 0);
}

#[tokio::test]
async fn a_worker_finishes_a_row_after_its_lease_if_no_other_worker_claimed_the_row() {
    let fixture = Fixture::new().await;
    fixture.enqueue_mails(&fixture.app, 1).await;
    let [row] = fixture.stores.claim(1, 4, Duration::ZERO).await.unwrap().try_into().unwrap();
    fixture.stores.finish(&row, DeliveryOutcome::Done).await.unwrap();
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 0);
}

#[tokio::test]
async fn each_outcome_updates_its_row() {
    let fixture = Fixture::new().await;
    let stores = &fixture.stores;
    fixture.enqueue_mails(&fixture.app, 1).await;
    let claim = async || stores.claim(1, 4, LEASE).await.unwrap().pop();
    let row = claim().await.unwrap();
    stores.finish(&row, DeliveryOutcome::Wait { at: now() + time::Duration::hours(1) }).await.unwrap();
    assert!(claim().await.is_none());
    fixture.execute("UPDATE outbox SET due_at = now()").await;
    let row = claim().await.unwrap();
    assert_eq!(row.attempts, 0, "a wait is not an attempt");
    stores
        .finish(&row, DeliveryOutcome::Retry { at: now() - time::Duration::seconds(1), error: "é".repeat(600) })
        .await
        .unwrap();
    let row = claim().await.unwrap();
    assert_eq!(row.attempts, 1);
    assert!(stores.postgres.dead_letters().await.unwrap().is_empty());
    stores.finish(&row, DeliveryOutcome::Dead { error: "the relay refused, 550".to_owned() }).await.unwrap();
    assert!(claim().await.is_none());

    let [dead_letter] = stores.postgres.dead_letters().await.unwrap().try_into().unwrap();
    assert_eq!((dead_letter.id, dead_letter.app.as_str(), dead_letter.attempts), (row.id, fixture.app.as_str(), 2));
    assert_eq!((dead_letter.kind.as_str(), dead_letter.error.as_deref()), ("confirm", Some("the relay refused, 550")));
    assert!(
        dead_letter.to_string().starts_with(&format!("{}\t{}\tconfirm\t-\tattempts=2\t", row.id, fixture.app)),
        "{dead_letter}"
    );
    assert!(!stores.postgres.retry_dead_letter(Uuid::from_u128(1)).await.unwrap());
    assert!(stores.postgres.retry_dead_letter(row.id).await.unwrap());
    assert!(!stores.postgres.retry_dead_letter(row.id).await.unwrap(), "the row is no longer a dead letter");
    let retried = claim().await.unwrap();
    assert_eq!((retried.id, retried.attempts), (row.id, 0));
}

#[tokio::test]
async fn rows_of_an_unknown_kind_are_left_to_newer_servers() {
    let fixture = Fixture::new().await;
    fixture.enqueue_mails(&fixture.app, 2).await;
    fixture.execute("UPDATE outbox SET kind = 'of-tomorrow' WHERE id = (SELECT id FROM outbox LIMIT 1)").await;
    assert_eq!(fixture.stores.claim(10, 10, LEASE).await.unwrap().len(), 1);
    assert!(fixture.stores.claim(10, 10, LEASE).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_propagated_epoch_deletes_its_row_and_the_rows_of_earlier_epochs() {
    let fixture = Fixture::new().await;
    let (user, other) = (a_user_id(), a_user_id());
    let kept_session = Uuid::from_u128(9);
    for (user, epoch) in [(user, 2), (user, 3), (user, 4), (other, 3)] {
        fixture
            .execute(&format!(
                "INSERT INTO outbox (app_id, kind, user_id, epoch, keep_session)
                 VALUES ('{}', 'epoch', '{user}', {epoch}, '{kept_session}')",
                fixture.app
            ))
            .await;
    }
    let epoch_change = EpochChange { user, epoch: Epoch(3), kept_session: None };
    fixture.stores.remove_epoch_row(&an_app(), &epoch_change).await.unwrap();
    fixture.stores.remove_epoch_row(&fixture.app, &epoch_change).await.unwrap();
    let mut remaining: Vec<(bool, i64)> = Vec::new();
    for row in fixture.stores.claim(10, 10, LEASE).await.unwrap() {
        let OutboxTask::PropagateEpoch(epoch_change) = row.task else { panic!("{row:?}") };
        assert_eq!(epoch_change.kept_session, Some(SessionId(kept_session)));
        remaining.push((epoch_change.user == user, epoch_change.epoch.0));
    }
    remaining.sort();
    assert_eq!(remaining, [(false, 3), (true, 4)]);
}

#[tokio::test]
async fn the_backlog_counts_due_rows_and_dead_letters() {
    let fixture = Fixture::new().await;
    let empty = fixture.stores.backlog().await.unwrap();
    assert_eq!((empty.due, empty.dead), (0, 0));
    assert!(empty.oldest_due_seconds.abs() < f64::EPSILON);
    fixture.enqueue_mails(&fixture.app, 5).await;
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
async fn a_listening_server_is_notified_of_rows_from_other_servers_even_after_a_cut_connection() {
    let fixture = Fixture::new().await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    let url = fixture.database.url.replace(&fixture.database.addr.to_string(), &proxy.addr().to_string());
    let listening = PostgresStore::connect(postgres::Options::new(UrlSource::from_value(url))).unwrap();
    let listening = Stores { postgres: listening, ..fixture.stores.clone() };
    let notifying =
        PostgresStore::connect(postgres::Options::new(UrlSource::from_value(&fixture.database.url))).unwrap();
    let notifying = Stores { postgres: notifying, ..fixture.stores.clone() };
    for _ in 0..2 {
        // A server is notified once when it starts to listen, because it can have missed rows.
        timeout(LIMIT, listening.wait_for_notification()).await.unwrap();
        notifying.enqueue(&fixture.app, a_mail(None)).await.unwrap();
        timeout(LIMIT, listening.wait_for_notification()).await.unwrap();
        let notification = timeout(Duration::from_millis(200), listening.wait_for_notification()).await;
        assert!(notification.is_err(), "a notification without a new row");
        proxy.cut();
    }
}

#[tokio::test]
async fn a_server_that_does_not_listen_is_still_notified_of_its_own_rows() {
    let fixture = Fixture::new().await;
    let notification = timeout(Duration::from_millis(200), fixture.stores.wait_for_notification()).await;
    assert!(notification.is_err());
    fixture.enqueue_mails(&fixture.app, 1).await;
    timeout(LIMIT, fixture.stores.wait_for_notification()).await.unwrap();
}
