//! Deletion of accounts that were not verified in time: which accounts are deleted, what is deleted with them, and what
//! concurrent calls do.

use std::{collections::BTreeSet, sync::Arc};

use latchkey_server::{
    domain::{
        audit::EventKind,
        mail::MailKind,
        ports::{Confirmation, Outbox, Sessions, UserAdministration, Users},
        session::{Amr, NewSession, OpenOutcome, SessionId},
        user::User,
    },
    store::{
        Stores,
        postgres::{OwnershipClaim, UnverifiedBatch, UnverifiedExpiry, UnverifiedPosition},
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

/// A fixture with an App that owns its appID in the database.
async fn claimed_fixture() -> Fixture {
    let fixture = Fixture::new().await;
    fixture.stores.postgres.claim_apps(&[claim(&fixture)]).await.unwrap();
    fixture
}

fn claim(fixture: &Fixture) -> OwnershipClaim {
    OwnershipClaim { app: fixture.app.clone(), namespace: "shop".to_owned(), incarnation: None, handover: 0 }
}

fn retention_rule(fixture: &Fixture) -> UnverifiedExpiry {
    let now = now();
    UnverifiedExpiry {
        claim: claim(fixture),
        created_before: now - RETENTION,
        code_sent_before: now - DAY,
        now,
        webhooks: Arc::default(),
    }
}

/// Creates an unverified account of this age.
async fn register_aged(fixture: &Fixture, email: &str, age: Duration) -> User {
    let created_at = now() - age;
    let mut user = a_new_user(email);
    (user.created_at, user.event.at) = (created_at, created_at);
    fixture.stores.create_user(&fixture.app, user, None).await.unwrap();
    user_of(fixture, email).await.expect("the user exists")
}

async fn user_of(fixture: &Fixture, email: &str) -> Option<User> {
    fixture.stores.user_by_email(&fixture.app, &an_email(email)).await.unwrap()
}

async fn open_session(stores: &Stores, fixture: &Fixture, user: &User, idle_seconds: u32) -> OpenOutcome {
    let session = NewSession {
        kind: None,
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

/// Deletes all expired accounts in batches.
async fn sweep(stores: &Stores, rule: &UnverifiedExpiry, batch_size: u32) -> u64 {
    let (mut deleted, mut after) = (0, None::<UnverifiedPosition>);
    loop {
        let UnverifiedBatch { deleted: batch_deleted, next } =
            stores.delete_unverified(rule, after, batch_size).await.unwrap();
        assert!(batch_deleted <= u64::from(batch_size));
        deleted += batch_deleted;
        if next.is_none() {
            return deleted;
        }
        after = next;
    }
}

async fn remaining_users(fixture: &Fixture) -> BTreeSet<String> {
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
    Confirmation { user: user.id, epoch: user.epoch, address, session, keeps_session: false, at: now(), event }
}

#[tokio::test]
async fn only_old_accounts_without_verified_address_identity_or_live_session_are_deleted() {
    let fixture = claimed_fixture().await;
    let old = RETENTION + DAY;
    // `asked` requests another code below. `bare` has neither an email address nor an identity.
    for name in ["forgotten", "expired", "verified", "linked", "pending", "social", "disabled", "asked", "bare"] {
        register_aged(&fixture, &format!("{name}@x.test"), old).await;
    }
    register_aged(&fixture, "young@x.test", RETENTION - Duration::HOUR).await;
    let live = register_aged(&fixture, "live@x.test", old).await;
    assert_eq!(open_session(&fixture.stores, &fixture, &live, 3600).await, OpenOutcome::Opened);
    let expired = user_of(&fixture, "expired@x.test").await.unwrap();
    assert_eq!(open_session(&fixture.stores, &fixture, &expired, 60).await, OpenOutcome::Opened);
    let update_user = async |name: &str, sql: &str| {
        fixture.execute(&format!("UPDATE users SET {sql} WHERE email = '{name}@x.test'")).await;
    };
    update_user("verified", "email_verified_at = now()").await;
    update_user("disabled", "disabled_at = now()").await;
    let identity = |name: &str| {
        format!(
            "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
         SELECT app_id, 'https://id.test', '{name}', id, 'test', now() FROM users WHERE email = '{name}@x.test'"
        )
    };
    fixture.execute(&identity("linked")).await;
    fixture.execute(&identity("social")).await;
    for name in ["pending", "social"] {
        update_user(
            name,
            "pending_email = email, pending_email_canonical = email, email = NULL, email_canonical = NULL",
        )
        .await;
    }
    update_user("bare", "email = NULL, email_canonical = NULL").await;
    let asked = user_of(&fixture, "asked@x.test").await.unwrap();
    let event = an_event(EventKind::RegisteredAgain, asked.id);
    fixture.stores.record_repeated_registration(&fixture.app, asked.id, asked.epoch, false, None, event).await.unwrap();

    // The clock is two minutes later, so the session of `expired` (60 s) has expired.
    let later = fixture.with_later_clock(Duration::minutes(2)).await;
    assert_eq!(sweep(&later, &retention_rule(&fixture), 100).await, 3);
    let remaining_names = ["asked", "bare", "disabled", "linked", "live", "social", "verified", "young"];
    let expected: BTreeSet<String> =
        remaining_names.iter().map(|name| if *name == "bare" { String::new() } else { (*name).to_owned() }).collect();
    assert_eq!(remaining_users(&fixture).await, expected);
    assert_eq!(sweep(&later, &retention_rule(&fixture), 100).await, 0);
    // The email address of a deleted account can be registered again.
    register_aged(&fixture, "forgotten@x.test", Duration::ZERO).await;
}

#[tokio::test]
async fn only_accounts_that_registered_are_deleted() {
    let fixture = claimed_fixture().await;
    for name in ["registration", "provider", "administrator", "import"] {
        register_aged(&fixture, &format!("{name}@x.test"), RETENTION + DAY).await;
        let update = format!("UPDATE users SET created_by = '{name}' WHERE email = '{name}@x.test'");
        fixture.execute(&update).await;
    }
    assert_eq!(sweep(&fixture.stores, &retention_rule(&fixture), 100).await, 1);
    let expected = ["administrator", "import", "provider"].map(str::to_owned);
    assert_eq!(remaining_users(&fixture).await, BTreeSet::from(expected));
}

#[tokio::test]
async fn an_account_to_which_an_administrator_sent_a_mail_is_not_deleted_yet() {
    let fixture = claimed_fixture().await;
    let user = register_aged(&fixture, "ada@x.test", RETENTION + DAY).await;
    let mut event = an_event(EventKind::MailRequested, user.id);
    fixture.stores.queue_mail(&fixture.app, user.id, MailKind::Confirm, event.clone()).await.unwrap();
    assert_eq!(sweep(&fixture.stores, &retention_rule(&fixture), 100).await, 0);
    fixture.execute("DELETE FROM audit_events").await;
    (event.id, event.at) = (Uuid::from_u128(rand::random()), now() - DAY - Duration::MINUTE);
    fixture.stores.record_administration(&fixture.app, event).await.unwrap();
    assert_eq!(sweep(&fixture.stores, &retention_rule(&fixture), 100).await, 1);
}

#[tokio::test]
async fn an_account_is_deleted_with_its_mails_and_the_event_is_recorded() {
    let fixture = claimed_fixture().await;
    let user = register_aged(&fixture, "ada@x.test", RETENTION + DAY).await;
    let other = register_aged(&fixture, "grace@x.test", DAY).await;
    for id in [user.id, other.id] {
        fixture.stores.enqueue(&fixture.app, a_mail(Some(id))).await.unwrap();
    }
    let rule = retention_rule(&fixture);
    assert_eq!(sweep(&fixture.stores, &rule, 100).await, 1);
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 1, "the mail of the other account");
    let expiry_events =
        "SELECT count(*) FROM audit_events WHERE kind = 'user_deleted' AND ip IS NULL AND session_id IS NULL
            AND detail = '{\"reason\": \"unverified\"}'";
    assert_eq!(fixture.count(&format!("{expiry_events} AND user_id = '{}'", user.id)).await, 1);
    assert_eq!(fixture.count(expiry_events).await, 1);
    // A login that read the account before the deletion opens no session. The user's data in Redis expires soon.
    assert_eq!(open_session(&fixture.stores, &fixture, &user, 3600).await, OpenOutcome::EpochRaised);
    let mut redis = RedisServer::shared().await.connect().await.unwrap();
    let of_user = format!("lk:{{{}:{}}}:*", fixture.app, user.id);
    let keys: Vec<String> = redis::cmd("KEYS").arg(of_user).query_async(&mut redis).await.unwrap();
    assert_eq!(keys.len(), 1, "{keys:?}");
    let seconds: i64 = redis::cmd("TTL").arg(&keys[0]).query_async(&mut redis).await.unwrap();
    assert!((1..=300).contains(&seconds), "{seconds} s");
}

#[tokio::test]
async fn two_concurrent_servers_delete_each_account_once_in_batches() {
    let fixture = Arc::new(claimed_fixture().await);
    for number in 0..250 {
        register_aged(&fixture, &format!("old{number}@x.test"), RETENTION + DAY).await;
    }
    for number in 0..30 {
        let user = register_aged(&fixture, &format!("live{number}@x.test"), RETENTION + DAY).await;
        assert_eq!(open_session(&fixture.stores, &fixture, &user, 3600).await, OpenOutcome::Opened);
    }
    let (one, other) = (fixture.another_server().await, fixture.another_server().await);
    let rule = retention_rule(&fixture);
    let (one, other) = tokio::join!(sweep(&one, &rule, 20), sweep(&other, &rule, 20));
    assert_eq!(one + other, 250, "{one} and {other}");
    assert_eq!(remaining_users(&fixture).await.len(), 30);
    let events = "SELECT count(*) FROM audit_events WHERE kind = 'user_deleted'";
    assert_eq!(fixture.count(events).await, 250);
    assert_eq!(fixture.count(&events.replace("count(*)", "count(DISTINCT user_id)")).await, 250);
}

#[tokio::test]
async fn nothing_is_deleted_if_the_app_has_another_owner_or_is_not_active() {
    let fixture = claimed_fixture().await;
    register_aged(&fixture, "ada@x.test", RETENTION + DAY).await;
    let mut other_rule = retention_rule(&fixture);
    other_rule.claim.namespace = "blog".to_owned();
    assert_eq!(sweep(&fixture.stores, &other_rule, 100).await, 0);
    fixture.execute("UPDATE apps SET state = 'deleting'").await;
    assert_eq!(sweep(&fixture.stores, &retention_rule(&fixture), 100).await, 0);
    fixture.execute("DELETE FROM apps").await;
    assert_eq!(sweep(&fixture.stores, &retention_rule(&fixture), 100).await, 0);
    assert_eq!(remaining_users(&fixture).await.len(), 1);
}

#[tokio::test]
async fn a_server_with_a_clock_that_is_ahead_deletes_nothing_too_early() {
    let fixture = claimed_fixture().await;
    register_aged(&fixture, "old@x.test", RETENTION + DAY).await;
    register_aged(&fixture, "young@x.test", DAY).await;
    let with_clock_offset = |rule: UnverifiedExpiry, by: Duration| UnverifiedExpiry {
        created_before: rule.created_before + by,
        code_sent_before: rule.code_sent_before + by,
        now: rule.now + by,
        ..rule
    };
    // A server with a clock that is behind deletes nothing.
    assert_eq!(sweep(&fixture.stores, &with_clock_offset(retention_rule(&fixture), -400 * DAY), 100).await, 0);
    assert_eq!(sweep(&fixture.stores, &with_clock_offset(retention_rule(&fixture), 400 * DAY), 100).await, 1);
    assert_eq!(remaining_users(&fixture).await, BTreeSet::from(["young".to_owned()]));
}

/// Either the account is confirmed and stays, or it is deleted and the code is invalid.
#[tokio::test]
async fn a_concurrent_confirmation_wins_or_comes_too_late() {
    let fixture = Arc::new(claimed_fixture().await);
    let (mut confirmed, mut deleted) = (0, 0);
    for round in 0..40 {
        let email = format!("ada{round}@x.test");
        let user = register_aged(&fixture, &email, RETENTION + DAY).await;
        let barrier = Barrier::new(2);
        let confirming = async {
            barrier.wait().await;
            fixture.stores.confirm_address(&fixture.app, confirmation(&user)).await.unwrap()
        };
        let rule = retention_rule(&fixture);
        let sweeping = async {
            barrier.wait().await;
            sweep(&fixture.stores, &rule, 100).await
        };
        let (changed, swept) = tokio::join!(confirming, sweeping);
        let remaining_user = user_of(&fixture, &email).await;
        match (changed, swept) {
            (Some(_), 0) => {
                assert!(remaining_user.unwrap().email_verified);
                confirmed += 1;
            }
            (None, 1) => {
                assert!(remaining_user.is_none());
                deleted += 1;
            }
            (changed, swept) => panic!("round {round}: confirmed {}, deleted {swept}", changed.is_some()),
        }
    }
    println!("{confirmed} confirmed, {deleted} deleted");
}

/// A login has read the account, and opens a session while the account is being deleted.
#[tokio::test]
async fn a_concurrently_opened_session_keeps_the_account_or_is_not_opened() {
    let fixture = Arc::new(claimed_fixture().await);
    for round in 0..40 {
        let email = format!("ada{round}@x.test");
        let user = register_aged(&fixture, &email, RETENTION + DAY).await;
        let barrier = Barrier::new(2);
        let login = async {
            barrier.wait().await;
            open_session(&fixture.stores, &fixture, &user, 3600).await
        };
        let rule = retention_rule(&fixture);
        let sweeping = async {
            barrier.wait().await;
            sweep(&fixture.stores, &rule, 100).await
        };
        let (opening, swept) = tokio::join!(login, sweeping);
        let user_exists = user_of(&fixture, &email).await.is_some();
        let sessions = fixture.stores.sessions(&fixture.app, user.id).await.unwrap().len();
        match opening {
            OpenOutcome::Opened => assert_eq!((swept, user_exists, sessions), (0, true, 1), "round {round}"),
            OpenOutcome::EpochRaised => assert_eq!((swept, user_exists, sessions), (1, false, 0), "round {round}"),
        }
    }
}

#[tokio::test]
async fn a_deletion_that_is_cut_off_in_the_middle_leaves_complete_accounts() {
    let fixture = claimed_fixture().await;
    for number in 0..10 {
        register_aged(&fixture, &format!("ada{number}@x.test"), RETENTION + DAY).await;
    }
    let rule = retention_rule(&fixture);
    // Without Redis the server does not know whether an account has sessions, so it deletes nothing.
    let without_redis = stores(&fixture.database.url, "redis://127.0.0.1:1/");
    assert_unavailable(without_redis.delete_unverified(&rule, None, 100).await);
    assert_eq!(remaining_users(&fixture).await.len(), 10);
    // Cuts the connection before the first and before the last statement of the deletion.
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    for text in ["DELETE FROM users", "user_deleted"] {
        let cut_stores = faults::stores_via(&fixture, &proxy);
        proxy.set_trap(Trap::Before(text.into()));
        assert_unavailable(cut_stores.delete_unverified(&rule, None, 100).await);
        proxy.trap_triggered().await;
        assert_eq!(remaining_users(&fixture).await.len(), 10, "cut before {text}");
        // Waits for the end of the transaction that was cut off, because the next deletion skips locked rows.
        let open_transactions = "SELECT count(*) FROM pg_stat_activity
                    WHERE datname = current_database() AND xact_start IS NOT NULL AND pid <> pg_backend_pid()";
        let ended = || async { (fixture.count(open_transactions).await == 0).then_some(()) };
        eventually("the end of the transaction", LIMIT, ended).await;
    }
    assert_eq!(fixture.count("SELECT count(*) FROM audit_events WHERE kind = 'user_deleted'").await, 0);
    // Both interrupted calls had already changed Redis. The next call repeats all steps, and deletes the ten accounts.
    assert_eq!(sweep(&fixture.stores, &rule, 100).await, 10);
}

#[tokio::test]
async fn an_account_of_another_app_is_not_touched() {
    let fixture = claimed_fixture().await;
    register_aged(&fixture, "ada@x.test", RETENTION + DAY).await;
    let mut other_rule = retention_rule(&fixture);
    other_rule.claim.app = an_app();
    fixture.stores.postgres.claim_apps(std::slice::from_ref(&other_rule.claim)).await.unwrap();
    assert_eq!(sweep(&fixture.stores, &other_rule, 100).await, 0);
    assert_eq!(remaining_users(&fixture).await.len(), 1);
}
