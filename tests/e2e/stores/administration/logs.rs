//! Exports, audit events and dead letters.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use latchkey_server::{
    domain::{
        administration::AuditRow,
        audit::EventKind,
        ports::{
            AuditLog, ClaimedRow, DeliveryOutcome, EventFilter, NewAdministeredUser, Outbox, RetrySelection, RowPage,
            RowPosition, UserAdministration,
        },
        user::UserId,
    },
    store::{
        Stores, UrlSource,
        postgres::{self, PostgresStore},
    },
};
use latchkey_tests::eventually;
use uuid::Uuid;

use super::{Fixture, a_new_user, an_event, an_identity, create};
use crate::stores::{LIMIT, a_mail, a_user_id, an_app, assert_unavailable};

/// Returns all events that match a filter, fetched page by page, and the number of empty pages.
async fn all_events(fixture: &Fixture, filter: &EventFilter, limit: u16) -> (Vec<AuditRow>, usize) {
    let (mut events, mut empty_pages, mut after) = (Vec::new(), 0, None::<RowPosition>);
    loop {
        let page = fixture.stores.events(&fixture.app, filter, after, limit).await.unwrap();
        let RowPage { rows, next } = page;
        assert!(rows.len() <= usize::from(limit));
        empty_pages += usize::from(rows.is_empty());
        events.extend(rows);
        if next.is_none() {
            return (events, empty_pages);
        }
        assert_ne!(next, after, "each page reads on");
        after = next;
    }
}

/// Writes `count` events of a kind, a second apart, the newest `newest_age` seconds ago.
async fn write_events(fixture: &Fixture, kind: &str, user: Option<UserId>, count: u32, newest_age: u32) {
    let user = user.map_or_else(|| "NULL".to_owned(), |user| format!("'{user}'"));
    fixture
        .execute(&format!(
            "INSERT INTO audit_events (app_id, id, at, kind, user_id)
             SELECT '{}', gen_random_uuid(), date_trunc('second', now()) - make_interval(secs => {newest_age} + number),
                '{kind}', {user}
             FROM generate_series(0, {count} - 1) AS number",
            fixture.app
        ))
        .await;
}

#[tokio::test]
async fn an_export_lists_all_users_with_their_identities() {
    let fixture = Fixture::new().await;
    let mut created = Vec::new();
    for number in 0..5 {
        let identities = (0..number).map(|identity| an_identity(&format!("{number}-{identity}"))).collect();
        let new = NewAdministeredUser { identities, ..a_new_user(&format!("u{number}@example.com")) };
        created.push(create(&fixture, new).await);
    }
    created.sort_by_key(|user| user.id);
    let (mut exported, mut after) = (Vec::new(), None);
    loop {
        let page = fixture.stores.export_users(&fixture.app, after, 2).await.unwrap();
        assert!(page.len() <= 2);
        let Some(last) = page.last() else { break };
        after = Some(last.id);
        exported.extend(page);
    }
    assert_eq!(exported.len(), 5);
    for (exported, created) in exported.iter().zip(&created) {
        assert_eq!((exported.id, &exported.email), (created.id, &created.email));
        assert_eq!(exported.identities, created.identities);
        assert_eq!(exported.password_hash, created.password_hash);
    }
    assert!(fixture.stores.export_users(&an_app(), None, 2).await.unwrap().is_empty());
}

#[tokio::test]
async fn events_are_listed_newest_first_with_all_their_values() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let mut event = crate::stores::an_event(EventKind::LoggedIn, user);
    event.at = event.at.replace_microsecond(0).unwrap();
    event.detail = latchkey_server::domain::audit::Detail::from_session_count(3);
    fixture.stores.record(&fixture.app, event.clone()).await;
    fixture.stores.record_administration(&fixture.app, an_event(EventKind::Exported, None)).await.unwrap();
    write_events(&fixture, "of_tomorrow", None, 3, 100).await;
    let other_app = an_app();
    fixture.stores.record_administration(&other_app, an_event(EventKind::Exported, None)).await.unwrap();

    for limit in [1, 2, 5, 6] {
        let (events, _) = all_events(&fixture, &EventFilter::default(), limit).await;
        let kinds: Vec<_> = events.iter().map(|event| event.kind.as_str()).collect();
        assert_eq!(kinds, ["logged_in", "of_tomorrow", "of_tomorrow", "of_tomorrow", "exported"], "{limit}");
    }
    let (events, _) = all_events(&fixture, &EventFilter::default(), 500).await;
    let newest = &events[0];
    assert_eq!((newest.id, newest.at, newest.user), (event.id, event.at, Some(user)));
    assert_eq!((newest.ip.as_deref(), newest.count), (Some("192.0.2.1"), 1));
    assert_eq!(newest.detail, Some(serde_json::json!({ "sessions": 3 })));
    assert_eq!((events[4].user, events[4].ip.as_deref(), &events[4].detail), (None, None, &None));
}

#[tokio::test]
async fn events_are_filtered_by_user_kind_and_time() {
    let fixture = Fixture::new().await;
    let (ada, eva) = (a_user_id(), a_user_id());
    write_events(&fixture, "logged_in", Some(ada), 10, 0).await;
    write_events(&fixture, "logged_out", Some(ada), 5, 20).await;
    write_events(&fixture, "logged_in", Some(eva), 7, 30).await;
    let (all, _) = all_events(&fixture, &EventFilter::default(), 3).await;
    assert_eq!(all.len(), 22);
    let ids = |events: &[AuditRow]| events.iter().map(|event| event.id).collect::<Vec<_>>();
    for filter in [
        EventFilter { user: Some(ada), ..EventFilter::default() },
        EventFilter { user: Some(eva), ..EventFilter::default() },
        EventFilter { kind: Some("logged_in"), ..EventFilter::default() },
        EventFilter { kind: Some("exported"), ..EventFilter::default() },
        EventFilter { user: Some(ada), kind: Some("logged_out"), ..EventFilter::default() },
        EventFilter { after: Some(all[8].at), ..EventFilter::default() },
        EventFilter { before: Some(all[8].at), ..EventFilter::default() },
        EventFilter { user: Some(ada), after: Some(all[12].at), before: Some(all[3].at), kind: Some("logged_in") },
    ] {
        let expected: Vec<_> = all
            .iter()
            .filter(|event| filter.user.is_none_or(|user| event.user == Some(user)))
            .filter(|event| filter.kind.is_none_or(|kind| event.kind == kind))
            .filter(|event| filter.after.is_none_or(|after| event.at >= after))
            .filter(|event| filter.before.is_none_or(|before| event.at < before))
            .cloned()
            .collect();
        let (found, _) = all_events(&fixture, &filter, 3).await;
        assert_eq!(ids(&found), ids(&expected), "{filter:?}");
    }
}

#[tokio::test]
async fn events_with_the_same_time_are_all_listed() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    fixture
        .execute(&format!(
            "INSERT INTO audit_events (app_id, id, at, kind, user_id)
             SELECT '{}', gen_random_uuid(), '2026-03-04', 'logged_in', '{user}' FROM generate_series(1, 20)",
            fixture.app
        ))
        .await;
    for filter in [EventFilter::default(), EventFilter { user: Some(user), ..EventFilter::default() }] {
        let (events, _) = all_events(&fixture, &filter, 3).await;
        assert_eq!(events.iter().map(|event| event.id).collect::<BTreeSet<_>>().len(), 20);
        assert_eq!(events.len(), 20);
    }
}

#[tokio::test]
async fn a_page_of_a_rare_kind_reads_at_most_5000_events() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    write_events(&fixture, "logged_in", Some(user), 12_000, 0).await;
    write_events(&fixture, "exported", Some(user), 2, 12_001).await;
    for of_user in [None, Some(user)] {
        let filter = EventFilter { kind: Some("exported"), user: of_user, ..EventFilter::default() };
        let (events, empty_pages) = all_events(&fixture, &filter, 100).await;
        assert_eq!((events.len(), empty_pages), (2, 2), "two pages read 5,000 events each and find nothing");
    }
    let filter = EventFilter { kind: Some("logged_in"), ..EventFilter::default() };
    let (events, _) = all_events(&fixture, &filter, 500).await;
    assert_eq!(events.len(), 12_000);
}

/// Queues mails and makes them dead letters.
async fn make_dead_letters(fixture: &Fixture, app: &latchkey_crds::types::AppId, count: usize) -> Vec<Uuid> {
    fixture.enqueue_mails(app, count).await;
    let rows: Vec<ClaimedRow> = fixture.stores.claim(100, 100, Duration::from_secs(60)).await.unwrap();
    assert_eq!(rows.len(), count);
    for row in &rows {
        let outcome = DeliveryOutcome::Dead { error: "the relay refused, 550".to_owned() };
        fixture.stores.finish(row, outcome).await.unwrap();
    }
    rows.into_iter().map(|row| row.id).collect()
}

#[tokio::test]
async fn an_app_sees_and_retries_only_its_own_dead_letters() {
    let fixture = Fixture::new().await;
    let (stores, app, other) = (&fixture.stores, &fixture.app, an_app());
    let own = make_dead_letters(&fixture, app, 5).await;
    let foreign = make_dead_letters(&fixture, &other, 2).await;
    fixture.execute(&format!("UPDATE outbox SET kind = 'reset' WHERE id IN ('{}', '{}')", own[0], own[1])).await;
    let user = a_user_id();
    stores.enqueue(app, a_mail(Some(user))).await.unwrap();

    let list = async |kind: Option<&'static str>, limit: u16| {
        let (mut letters, mut after) = (Vec::new(), None);
        loop {
            let RowPage { rows, next } = stores.app_dead_letters(app, kind, after, limit).await.unwrap();
            assert!(rows.len() <= usize::from(limit));
            letters.extend(rows);
            after = next;
            if after.is_none() {
                return letters;
            }
        }
    };
    for limit in [1, 2, 5, 500] {
        let letters = list(None, limit).await;
        assert!(letters.is_sorted_by(|a, b| (a.dead_at, a.id) > (b.dead_at, b.id)), "newest first");
        assert_eq!(letters.iter().map(|row| row.id).collect::<BTreeSet<_>>(), own.iter().copied().collect());
        assert_eq!(list(Some("reset"), limit).await.len(), 2);
        assert_eq!(list(Some("confirm"), limit).await.len(), 3);
    }
    let letter = list(Some("confirm"), 1).await.remove(0);
    assert_eq!((letter.attempts, letter.error.as_deref()), (1, Some("the relay refused, 550")));
    assert!(list(Some("new-sign-in"), 1).await.is_empty());

    let retry = async |ids: &[Uuid]| stores.retry_dead_letters(app, RetrySelection::Ids(ids.to_vec())).await.unwrap();
    assert_eq!(retry(&foreign).await, 0);
    assert_eq!(retry(&[own[0], own[0], foreign[0], Uuid::nil(), own[2]]).await, 2);
    assert_eq!(retry(&[own[0], own[2]]).await, 0, "they are no dead letters any more");
    assert_eq!(list(None, 500).await.len(), 3);
    assert_eq!(fixture.count("SELECT count(*) FROM outbox WHERE dead_at IS NULL AND attempts = 0").await, 3);
    assert_eq!(stores.app_dead_letters(&other, None, None, 500).await.unwrap().rows.len(), 2);
}

#[tokio::test]
async fn calls_from_administrators_use_a_quarter_of_the_pool_but_at_least_two_connections() {
    let fixture = Fixture::new().await;
    for (max_connections, administrators) in [(4, 2), (16, 4)] {
        let options = postgres::Options {
            listen: false,
            max_connections,
            ..postgres::Options::new(UrlSource::from_value(&fixture.database.url))
        };
        let stores = Stores { postgres: PostgresStore::connect(options).unwrap(), ..fixture.stores.clone() };
        // Another transaction has locked the events, so that each of these calls waits in Postgres.
        let mut blocker = fixture.database.connect().await.unwrap();
        sqlx::raw_sql("BEGIN; LOCK TABLE audit_events").execute(&mut blocker).await.unwrap();
        let started = Instant::now();
        let calls: Vec<_> = (0..12)
            .map(|_| {
                let (stores, app) = (stores.clone(), fixture.app.clone());
                tokio::spawn(async move { stores.events(&app, &EventFilter::default(), None, 10).await })
            })
            .collect();
        let waiting = async || {
            let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = '";
            fixture.count(&format!("{waiting}{}'", fixture.database.name)).await
        };
        eventually("the calls wait in Postgres", LIMIT, async || (waiting().await >= administrators).then_some(()))
            .await;
        // Calls from users still get a connection.
        stores.backlog().await.unwrap();
        assert_eq!(waiting().await, administrators);
        for call in calls {
            assert_unavailable(call.await.unwrap());
        }
        assert!(started.elapsed() < Duration::from_secs(8), "all calls end at their deadline: {:?}", started.elapsed());
        sqlx::raw_sql("ROLLBACK").execute(&mut blocker).await.unwrap();
        eventually("the permits are free again", LIMIT, async || {
            stores.events(&fixture.app, &EventFilter::default(), None, 10).await.ok()
        })
        .await;
    }
}
