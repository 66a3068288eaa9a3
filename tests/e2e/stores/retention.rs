//! Accounts that were not verified in time: which ones go, what goes with them, and what comes at the same moment.

use std::{collections::BTreeSet, sync::Arc};

use latchkey_server::{
    domain::{
        audit::EventKind,
        ports::{Confirmation, Outbox, Sessions, Users},
        session::{Amr, NewSession, Opening, SessionId},
        user::User,
    },
    store::{
        Stores,
        postgres::{Batch, Claim, Position, Unverified},
    },
};
use latchkey_tests::{
    eventually,
    proxy::{Proxy, Trap},
    redis::Redis as RedisServer,
};
use time::Duration;
use tokio::sync::Barrier;
use uuid::Uuid;

use super::{Fixture, LIMIT, a_mail, a_new_user, an_app, an_email, an_event, assert_unavailable, faults, now, stores};

const DAY: Duration = Duration::DAY;
const RETENTION: Duration = Duration::days(30);

/// A fixture whose App the database knows.
async fn claimed() -> Fixture {
    let fixture = Fixture::new().await;
    fixture.stores.postgres.claim_apps(&[claim(&fixture)]).await.unwrap();
    fixture
}

fn claim(fixture: &Fixture) -> Claim {
    Claim { app: fixture.app.clone(), namespace: "shop".to_owned(), incarnation: None, handover: 0 }
}

fn rule(fixture: &Fixture) -> Unverified {
    let now = now();
    Unverified { claim: claim(fixture), created_before: now - RETENTION, asked_before: now - DAY, now }
}

/// An unverified account that was made so long ago.
async fn registered(fixture: &Fixture, email: &str, ago: Duration) -> User {
    let created_at = now() - ago;
    let mut user = a_new_user(email);
    (user.created_at, user.event.at) = (created_at, created_at);
    fixture.stores.create_user(&fixture.app, user, None).await.unwrap();
    user_of(fixture, email).await.expect("it was made")
}

async fn user_of(fixture: &Fixture, email: &str) -> Option<User> {
    fixture.stores.user_by_email(&fixture.app, &an_email(email)).await.unwrap()
}

async fn session_of(stores: &Stores, fixture: &Fixture, user: &User, idle_seconds: u32) -> Opening {
    let session = NewSession {
        id: SessionId(Uuid::from_u128(rand::random())),
        user: user.id,
        epoch: user.epoch,
        profile: user.profile(),
        amr: Amr::Password,
        auth_time: now(),
        ip: "192.0.2.1".to_owned(),
        user_agent: None,
        ends_at: now() + RETENTION,
        idle_seconds,
    };
    stores.open_session(&fixture.app, &session).await.unwrap()
}

/// All that are past their time, in batches.
async fn sweep(stores: &Stores, rule: &Unverified, most: u32) -> u64 {
    let (mut deleted, mut after) = (0, None::<Position>);
    loop {
        let Batch { deleted: some, next } = stores.delete_unverified(rule, after, most).await.unwrap();
        assert!(some <= u64::from(most));
        deleted += some;
        if next.is_none() {
            return deleted;
        }
        after = next;
    }
}

async fn left(fixture: &Fixture) -> BTreeSet<String> {
    let mut connection = fixture.database.connect().await.unwrap();
    let emails: Vec<Option<String>> =
        sqlx::query_scalar("SELECT coalesce(email, pending_email) FROM users WHERE app_id = $1")
            .bind(fixture.app.as_str())
            .fetch_all(&mut connection)
            .await
            .unwrap();
    emails.into_iter().map(|email| email.unwrap_or_default().split('@').next().unwrap().to_owned()).collect()
}

fn confirmation(user: &User) -> Confirmation {
    let session = SessionId(Uuid::from_u128(rand::random()));
    let address = user.email.as_ref().unwrap().canonical().to_owned();
    let event = an_event(EventKind::Confirmed, user.id);
    Confirmation { user: user.id, epoch: user.epoch, address, session, kept: false, at: now(), event }
}

#[tokio::test]
async fn only_old_accounts_without_verified_address_identity_and_live_session_go() {
    let fixture = claimed().await;
    let old = RETENTION + DAY;
    for name in ["forgotten", "expired", "verified", "linked", "pending", "social", "disabled", "asked", "bare"] {
        registered(&fixture, &format!("{name}@x.test"), old).await;
    }
    registered(&fixture, "young@x.test", RETENTION - Duration::HOUR).await;
    let live = registered(&fixture, "live@x.test", old).await;
    assert_eq!(session_of(&fixture.stores, &fixture, &live, 3600).await, Opening::Opened);
    let expired = user_of(&fixture, "expired@x.test").await.unwrap();
    assert_eq!(session_of(&fixture.stores, &fixture, &expired, 60).await, Opening::Opened);
    let set = async |name: &str, sql: &str| {
        fixture.execute(&format!("UPDATE users SET {sql} WHERE email = '{name}@x.test'")).await;
    };
    set("verified", "email_verified_at = now()").await;
    set("disabled", "disabled_at = now()").await;
    let identity = |name: &str| {
        format!(
            "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
         SELECT app_id, 'https://id.test', '{name}', id, 'test', now() FROM users WHERE email = '{name}@x.test'"
        )
    };
    fixture.execute(&identity("linked")).await;
    fixture.execute(&identity("social")).await;
    for name in ["pending", "social"] {
        set(name, "pending_email = email, pending_email_canonical = email, email = NULL, email_canonical = NULL").await;
    }
    set("bare", "email = NULL, email_canonical = NULL").await;
    let asked = user_of(&fixture, "asked@x.test").await.unwrap();
    let again = an_event(EventKind::RegisteredAgain, asked.id);
    fixture.stores.registered_again(&fixture.app, asked.id, asked.epoch, false, None, again).await.unwrap();

    // By a clock at which the short session has ended.
    let later = fixture.later(Duration::minutes(2)).await;
    assert_eq!(sweep(&later, &rule(&fixture), 100).await, 3);
    let stay = ["asked", "bare", "disabled", "linked", "live", "social", "verified", "young"];
    let expected: BTreeSet<String> =
        stay.iter().map(|name| if *name == "bare" { String::new() } else { (*name).to_owned() }).collect();
    assert_eq!(left(&fixture).await, expected);
    assert_eq!(sweep(&later, &rule(&fixture), 100).await, 0);
    // A new start for one of them.
    registered(&fixture, "forgotten@x.test", Duration::ZERO).await;
}

#[tokio::test]
async fn with_an_account_go_its_mails_and_its_event_says_so() {
    let fixture = claimed().await;
    let user = registered(&fixture, "ada@x.test", RETENTION + DAY).await;
    let other = registered(&fixture, "grace@x.test", DAY).await;
    for id in [user.id, other.id] {
        fixture.stores.enqueue(&fixture.app, a_mail(Some(id))).await.unwrap();
    }
    let rule = rule(&fixture);
    assert_eq!(sweep(&fixture.stores, &rule, 100).await, 1);
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 1, "the other's");
    let kinds = "SELECT count(*) FROM audit_events WHERE kind = 'user_expired' AND ip IS NULL AND session_id IS NULL";
    assert_eq!(fixture.count(&format!("{kinds} AND user_id = '{}'", user.id)).await, 1);
    assert_eq!(fixture.count(kinds).await, 1);
    // A login that read the account before it went opens no session, and nothing of it stays in Redis for long.
    assert_eq!(session_of(&fixture.stores, &fixture, &user, 3600).await, Opening::Stale);
    let mut redis = RedisServer::shared().await.connect().await.unwrap();
    let of_user = format!("lk:{{{}:{}}}:*", fixture.app, user.id);
    let keys: Vec<String> = redis::cmd("KEYS").arg(of_user).query_async(&mut redis).await.unwrap();
    assert_eq!(keys.len(), 1, "{keys:?}");
    let seconds: i64 = redis::cmd("TTL").arg(&keys[0]).query_async(&mut redis).await.unwrap();
    assert!((1..=300).contains(&seconds), "{seconds} s");
}

#[tokio::test]
async fn two_servers_at_once_delete_each_account_once_in_batches() {
    let fixture = Arc::new(claimed().await);
    for number in 0..250 {
        registered(&fixture, &format!("old{number}@x.test"), RETENTION + DAY).await;
    }
    for number in 0..30 {
        let user = registered(&fixture, &format!("live{number}@x.test"), RETENTION + DAY).await;
        assert_eq!(session_of(&fixture.stores, &fixture, &user, 3600).await, Opening::Opened);
    }
    let (one, other) = (fixture.another().await, fixture.another().await);
    let rule = rule(&fixture);
    let (one, other) = tokio::join!(sweep(&one, &rule, 20), sweep(&other, &rule, 20));
    assert_eq!(one + other, 250, "{one} and {other}");
    assert_eq!(left(&fixture).await.len(), 30);
    let events = "SELECT count(*) FROM audit_events WHERE kind = 'user_expired'";
    assert_eq!(fixture.count(events).await, 250);
    assert_eq!(fixture.count(&events.replace("count(*)", "count(DISTINCT user_id)")).await, 250);
}

#[tokio::test]
async fn nothing_is_deleted_where_the_app_is_another_namespaces_or_of_no_server() {
    let fixture = claimed().await;
    registered(&fixture, "ada@x.test", RETENTION + DAY).await;
    let mut other = rule(&fixture);
    other.claim.namespace = "blog".to_owned();
    assert_eq!(sweep(&fixture.stores, &other, 100).await, 0);
    fixture.execute("UPDATE apps SET state = 'deleting'").await;
    assert_eq!(sweep(&fixture.stores, &rule(&fixture), 100).await, 0);
    fixture.execute("DELETE FROM apps").await;
    assert_eq!(sweep(&fixture.stores, &rule(&fixture), 100).await, 0);
    assert_eq!(left(&fixture).await.len(), 1);
}

#[tokio::test]
async fn a_server_whose_clock_is_ahead_deletes_nothing_too_early() {
    let fixture = claimed().await;
    registered(&fixture, "old@x.test", RETENTION + DAY).await;
    registered(&fixture, "young@x.test", DAY).await;
    let ahead = |rule: Unverified, by: Duration| Unverified {
        created_before: rule.created_before + by,
        asked_before: rule.asked_before + by,
        now: rule.now + by,
        ..rule
    };
    // Behind, it waits.
    assert_eq!(sweep(&fixture.stores, &ahead(rule(&fixture), -400 * DAY), 100).await, 0);
    assert_eq!(sweep(&fixture.stores, &ahead(rule(&fixture), 400 * DAY), 100).await, 1);
    assert_eq!(left(&fixture).await, BTreeSet::from(["young".to_owned()]));
}

/// An account either is confirmed and stays, or is deleted and its code is worth nothing.
#[tokio::test]
async fn a_confirmation_at_the_same_moment_wins_or_comes_too_late() {
    let fixture = Arc::new(claimed().await);
    let (mut confirmed, mut deleted) = (0, 0);
    for round in 0..40 {
        let email = format!("ada{round}@x.test");
        let user = registered(&fixture, &email, RETENTION + DAY).await;
        let barrier = Barrier::new(2);
        let confirming = async {
            barrier.wait().await;
            fixture.stores.confirm_address(&fixture.app, confirmation(&user)).await.unwrap()
        };
        let rule = rule(&fixture);
        let sweeping = async {
            barrier.wait().await;
            sweep(&fixture.stores, &rule, 100).await
        };
        let (changed, swept) = tokio::join!(confirming, sweeping);
        let there = user_of(&fixture, &email).await;
        match (changed, swept) {
            (Some(_), 0) => {
                assert!(there.unwrap().email_verified);
                confirmed += 1;
            }
            (None, 1) => {
                assert!(there.is_none());
                deleted += 1;
            }
            (changed, swept) => panic!("round {round}: confirmed {}, deleted {swept}", changed.is_some()),
        }
    }
    println!("{confirmed} confirmed, {deleted} deleted");
}

/// A login reads the account, and opens its session at any moment of the deletion.
#[tokio::test]
async fn a_session_opened_at_the_same_moment_keeps_the_account_or_is_not_opened() {
    let fixture = Arc::new(claimed().await);
    for round in 0..40 {
        let email = format!("ada{round}@x.test");
        let user = registered(&fixture, &email, RETENTION + DAY).await;
        let barrier = Barrier::new(2);
        let login = async {
            barrier.wait().await;
            session_of(&fixture.stores, &fixture, &user, 3600).await
        };
        let rule = rule(&fixture);
        let sweeping = async {
            barrier.wait().await;
            sweep(&fixture.stores, &rule, 100).await
        };
        let (opening, swept) = tokio::join!(login, sweeping);
        let there = user_of(&fixture, &email).await.is_some();
        let sessions = fixture.stores.sessions(&fixture.app, user.id).await.unwrap().len();
        match opening {
            Opening::Opened => assert_eq!((swept, there, sessions), (0, true, 1), "round {round}"),
            Opening::Stale => assert_eq!((swept, there, sessions), (1, false, 0), "round {round}"),
        }
    }
}

#[tokio::test]
async fn a_store_that_is_cut_in_the_middle_leaves_whole_accounts() {
    let fixture = claimed().await;
    for number in 0..10 {
        registered(&fixture, &format!("ada{number}@x.test"), RETENTION + DAY).await;
    }
    let rule = rule(&fixture);
    // Without Redis nobody knows which sessions there are.
    let blind = stores(&fixture.database.url, "redis://127.0.0.1:1/");
    assert_unavailable(blind.delete_unverified(&rule, None, 100).await);
    assert_eq!(left(&fixture).await.len(), 10);
    // The first statement of the deletion, and the last.
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    for text in ["unmailed", "user_expired"] {
        let cut = faults::through(&fixture, &proxy);
        proxy.set_trap(Trap::Before(text.into()));
        assert_unavailable(cut.delete_unverified(&rule, None, 100).await);
        proxy.sprung().await;
        assert_eq!(left(&fixture).await.len(), 10, "cut before {text}");
        // Locked rows are passed over.
        let open = "SELECT count(*) FROM pg_stat_activity
                    WHERE datname = current_database() AND xact_start IS NOT NULL AND pid <> pg_backend_pid()";
        let ended = || async { (fixture.count(open).await == 0).then_some(()) };
        eventually("the end of the transaction", LIMIT, ended).await;
    }
    assert_eq!(fixture.count("SELECT count(*) FROM audit_events WHERE kind = 'user_expired'").await, 0);
    // Some of it was done in Redis: the next sweep finishes it.
    assert_eq!(sweep(&fixture.stores, &rule, 100).await, 10);
}

#[tokio::test]
async fn an_account_of_another_app_is_not_looked_at() {
    let fixture = claimed().await;
    registered(&fixture, "ada@x.test", RETENTION + DAY).await;
    let mut other = rule(&fixture);
    other.claim.app = an_app();
    fixture.stores.postgres.claim_apps(std::slice::from_ref(&other.claim)).await.unwrap();
    assert_eq!(sweep(&fixture.stores, &other, 100).await, 0);
    assert_eq!(left(&fixture).await.len(), 1);
}
