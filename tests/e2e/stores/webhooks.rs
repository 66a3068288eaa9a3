//! The queue of webhook events.

use std::{sync::Arc, time::Duration};

use latchkey_server::{
    domain::{
        audit::{Event, EventKind},
        ports::{
            AuditLog, ClaimableWebhook, ClaimedEvent, DeliveryState, EventOutcome, KnownWebhook, OwnAccounts, Rename,
            RetrySelection, UserAdministration, Users, WebhookEvents, WebhookKey,
        },
        user::{Epoch, Name, UserId},
        webhook::Webhook,
    },
    store::{
        Stores, UrlSource,
        postgres::{self, DeleteOutcome, OwnershipClaim, PostgresStore, UnverifiedExpiry},
    },
};
use latchkey_tests::eventually;
use serde_json::json;
use sqlx::postgres::PgListener;
use tokio::time::timeout;
use uuid::Uuid;

use super::{Fixture, LIMIT, a_new_user, an_event, now};

const LEASE: Duration = Duration::from_secs(60);

/// An App with the pull webhook `sync`, which reports what happens to users and sessions.
struct WebhookFixture {
    fixture: Fixture,
    claim: OwnershipClaim,
    webhooks: Arc<[Webhook]>,
}

impl WebhookFixture {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        let claim =
            OwnershipClaim { app: fixture.app.clone(), namespace: "shop".to_owned(), incarnation: None, handover: 0 };
        fixture.stores.postgres.claim_apps(std::slice::from_ref(&claim)).await.unwrap();
        let rendered = json!({
            "name": "sync",
            "events": ["user.created", "user.updated", "user.deleted", "session.created"],
            "delivery": { "pull": { "namespace": "shop", "name": "fetches" } },
        });
        let webhook = Webhook::new(&serde_json::from_value(rendered).unwrap()).unwrap();
        Self { fixture, claim, webhooks: Arc::from([webhook]) }
    }

    /// The stores of a server that listens for notifications or, if `listen` is false, only polls.
    fn server(&self, listen: bool) -> Stores {
        let url = UrlSource::from_value(&self.fixture.database.url);
        let postgres = PostgresStore::connect(postgres::Options { listen, ..postgres::Options::new(url) }).unwrap();
        Stores { postgres, ..self.fixture.stores.clone() }
    }

    fn key(&self) -> WebhookKey {
        WebhookKey { app: self.fixture.app.clone(), webhook: "sync".parse().unwrap() }
    }

    fn event(&self, kind: EventKind, user: UserId) -> Event {
        Event { webhooks: Arc::clone(&self.webhooks), ..an_event(kind, user) }
    }

    async fn create_user(&self, stores: &Stores, email: &str) -> UserId {
        let mut user = a_new_user(email);
        user.event.webhooks = Arc::clone(&self.webhooks);
        let id = user.id;
        stores.create_user(&self.fixture.app, user, None).await.unwrap();
        id
    }

    /// Queues an event, and claims it.
    async fn claim_event(&self) -> ClaimedEvent {
        self.fixture
            .execute(&format!(
                "DELETE FROM webhook_events;
                 INSERT INTO webhook_events (app_id, webhook, id, kind, at)
                 VALUES ('{}', 'sync', gen_random_uuid(), 'registered', now())",
                self.fixture.app
            ))
            .await;
        let webhook = ClaimableWebhook { key: self.key(), namespace: "shop".to_owned(), room: 1 };
        let [claimed] = self.fixture.stores.claim_events(&[webhook], 1, LEASE).await.unwrap().try_into().unwrap();
        claimed
    }

    /// Runs `change` while another transaction has locked the state of the webhook, as a claim does. Asserts that
    /// `change` waits without a lock on an event. Otherwise, it could deadlock with a claim.
    async fn assert_locks_state_first(&self, change: impl Future<Output = ()> + Send + 'static) {
        let mut claim = self.fixture.database.connect().await.unwrap();
        sqlx::raw_sql("BEGIN; SELECT FROM webhooks FOR UPDATE").execute(&mut claim).await.unwrap();
        let change = tokio::spawn(change);
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = '";
        let waiting = format!("{waiting}{}'", self.fixture.database.name);
        eventually("the change waits", LIMIT, async || (self.fixture.count(&waiting).await == 1).then_some(())).await;
        // This statement fails if `change` has locked an event.
        self.fixture.execute("SELECT FROM webhook_events FOR UPDATE NOWAIT").await;
        sqlx::raw_sql("ROLLBACK").execute(&mut claim).await.unwrap();
        timeout(LIMIT, change).await.expect("the change ends").unwrap();
    }

    /// Creates events in every way that a server does, makes all of them dead letters, and retries these. Returns in how
    /// many transactions servers created or retried events.
    async fn make_events(&self, stores: &Stores) -> usize {
        let app = &self.fixture.app;
        let ada = self.create_user(stores, "ada@example.com").await;
        let grace = self.create_user(stores, "grace@example.com").await;
        let again = self.event(EventKind::RegisteredAgain, ada);
        stores.record_repeated_registration(app, ada, Epoch(1), false, None, again).await.unwrap();
        let (name, event) = (Name::parse("Countess").unwrap(), self.event(EventKind::Renamed, ada));
        let renamed = stores.rename(app, Rename { user: ada, epoch: Epoch(1), name, at: now(), event }).await.unwrap();
        assert!(renamed.is_some());
        stores.record(app, self.event(EventKind::LoggedIn, ada)).await;
        // `record` can return before the event is written, because it waits only for a limited time.
        stores.postgres.flush_audit().await;
        stores.remove_user(app, grace, None, self.event(EventKind::UserDeleted, grace)).await.unwrap();
        let tomorrow = now() + time::Duration::DAY;
        let expiry = UnverifiedExpiry {
            claim: self.claim.clone(),
            created_before: tomorrow,
            code_sent_before: tomorrow,
            now: now(),
            webhooks: Arc::clone(&self.webhooks),
        };
        assert_eq!(stores.delete_unverified(&expiry, None, 10).await.unwrap().deleted, 1);

        // Two creations, a repeated registration, a change, a login, and two deletions.
        assert_eq!(self.fixture.count("SELECT count(*) FROM webhook_events").await, 7);
        self.fixture
            .execute(&format!(
                "INSERT INTO webhooks (app_id, name) VALUES ('{app}', 'sync');
                 UPDATE webhook_events SET dead_at = now()"
            ))
            .await;
        let mut connection = self.fixture.database.connect().await.unwrap();
        let letter: Uuid =
            sqlx::query_scalar("SELECT id FROM webhook_events LIMIT 1").fetch_one(&mut connection).await.unwrap();
        let retry = async |selection| stores.retry_dead_letters(app, selection).await.unwrap();
        assert_eq!(retry(RetrySelection::Ids(vec![letter])).await, 1);
        assert_eq!(retry(RetrySelection::Webhook("sync".parse().unwrap())).await, 6);
        7 + 2
    }
}

#[tokio::test]
async fn servers_are_notified_of_events_only_if_they_listen() {
    for listen in [true, false] {
        let test = WebhookFixture::new().await;
        let mut listener = PgListener::connect(&test.fixture.database.url).await.unwrap();
        listener.listen("latchkey_webhooks").await.unwrap();
        let transactions = test.make_events(&test.server(listen)).await;
        // Notifications arrive in the order of their commits, so this one is the last.
        test.fixture.execute("SELECT pg_notify('latchkey_webhooks', 'last')").await;
        let mut payloads = Vec::new();
        while payloads.last().is_none_or(|payload| payload != "last") {
            let notification = timeout(LIMIT, listener.recv()).await.expect("another notification").unwrap();
            payloads.push(notification.payload().to_owned());
        }
        payloads.pop();
        let expected = if listen { transactions } else { 0 };
        assert_eq!(payloads, vec![format!("{}/sync", test.fixture.app); expected], "listen: {listen}");
    }
}

#[tokio::test]
async fn the_failures_of_a_webhook_are_counted_until_it_changes() {
    let test = WebhookFixture::new().await;
    let state = async |fingerprint: char| {
        let webhook = KnownWebhook { key: test.key(), fingerprint: fingerprint.to_string().repeat(64) };
        test.fixture.stores.delivery_states(&[webhook]).await.unwrap().remove(&test.key()).unwrap()
    };
    let failing = DeliveryState { failures: 12, stopped_for: None, oldest: None };
    // Inserts the row without a fingerprint of the webhook's settings and keys, as a claim does.
    let claimed = "INSERT INTO webhooks (app_id, name, failures, stopped_for) VALUES";
    test.fixture.execute(&format!("{claimed} ('{}', 'sync', 12, repeat('a', 64))", test.fixture.app)).await;
    let stopped = DeliveryState { stopped_for: Some("a".repeat(64)), ..failing };
    assert_eq!([state('a').await, state('a').await], [stopped.clone(), stopped.clone()]);
    let changed = DeliveryState { failures: 0, ..stopped };
    assert_eq!([state('b').await, state('b').await], [changed.clone(), changed.clone()]);
    test.fixture.execute("UPDATE webhooks SET failures = 3").await;
    assert_eq!(state('b').await, DeliveryState { failures: 3, ..changed });
}

#[tokio::test]
async fn the_state_of_a_webhook_is_locked_before_its_events() {
    let test = WebhookFixture::new().await;
    let error = || "the receiver responded with status 410".to_owned();
    for outcome in [
        EventOutcome::Sent,
        EventOutcome::Failed { after: LEASE, error: error() },
        EventOutcome::GivenUp { error: error() },
        EventOutcome::Gone { fingerprint: "a".repeat(64), error: error() },
    ] {
        let (stores, claimed) = (test.fixture.stores.clone(), test.claim_event().await);
        // A success changes the state only after a failure.
        test.fixture.execute("UPDATE webhooks SET failures = 1").await;
        test.assert_locks_state_first(async move { stores.finish_event(&claimed, outcome).await.unwrap() }).await;
        let unfinished = "SELECT count(*) FROM webhook_events WHERE lease_until IS NOT NULL";
        assert_eq!(test.fixture.count(unfinished).await, 0);
    }
    test.claim_event().await;
    let (stores, claim) = (test.fixture.stores.clone(), test.claim.clone());
    test.assert_locks_state_first(async move {
        assert_eq!(stores.delete_users(&claim, 10, || true).await.unwrap(), DeleteOutcome::Partial);
    })
    .await;
    assert_eq!(test.fixture.count("SELECT count(*) FROM webhook_events").await, 0);
}

#[tokio::test]
async fn a_retry_of_a_webhook_takes_its_oldest_ten_thousand_dead_letters() {
    let test = WebhookFixture::new().await;
    let app = &test.fixture.app;
    // `attempts` is the rank of the dead letter; the newest has rank 1.
    test.fixture
        .execute(&format!(
            "INSERT INTO webhook_events (app_id, webhook, id, kind, at, attempts, dead_at)
             SELECT '{app}', webhook, gen_random_uuid(), 'registered', now(), number, now() - number * interval '1 s'
             FROM generate_series(1, 10003) AS number, unnest(ARRAY['sync', 'other']) AS webhook"
        ))
        .await;
    let retry = async || {
        let webhook = RetrySelection::Webhook("sync".parse().unwrap());
        test.fixture.stores.retry_dead_letters(app, webhook).await.unwrap()
    };
    let dead = async |webhook: &str| {
        let dead = "SELECT coalesce(sum(attempts), 0) FROM webhook_events WHERE dead_at IS NOT NULL AND webhook = '";
        test.fixture.count(&format!("{dead}{webhook}'")).await
    };
    let of_other = dead("other").await;
    assert_eq!(retry().await, 10_000);
    assert_eq!(dead("sync").await, 1 + 2 + 3, "the newest three are left");
    assert_eq!(retry().await, 3);
    assert_eq!((retry().await, dead("sync").await, dead("other").await), (0, 0, of_other));
}
