//! Foreign password hashes, and their classes (algorithm and cost): what an import writes, what a login reads, and what
//! the upkeep removes.

use std::sync::Arc;

use latchkey_server::{
    domain::{
        audit::EventKind,
        foreign_hash::HashClass,
        password::PasswordHash,
        ports::{NewUser, PasswordReset, Users},
        user::{Epoch, UserId},
    },
    store::postgres::{ForeignHashExpiry, OwnershipClaim, SetForeignHashOutcome},
};
use tokio::task::JoinSet;

use super::{Fixture, REQUESTED_AT, a_new_user, a_user_id, an_app, an_email, an_event};

const BCRYPT: &str = "$2b$10$......................AesgC8c2NCv6R248WVftVw.gqvWdlCq";
const BCRYPT_13: &str = "$2b$13$......................AesgC8c2NCv6R248WVftVw.gqvWdlCq";
const PBKDF2: &str = "$pbkdf2-sha1$i=1,l=20$c2FsdA$DGDID5YfDnHzqbUkr2ASBi/gN6Y";
const NATIVE: &str = "$argon2id$v=19$m=19456,t=2,p=1$AAECAwQFBgcICQoLDA0ODw$AAECAwQFBgcICQoLDA0ODw";

/// The class (algorithm and cost) of `NATIVE`, a hash that is not foreign. A login reads such a class from the hashes
/// of the users.
const NATIVE_CLASS: &str = "argon2id$v=19$m=19456,t=2,p=1";

async fn create_user(fixture: &Fixture, email: &str) -> NewUser {
    let user = a_new_user(email);
    fixture.stores.create_user(&fixture.app, user.clone(), None).await.unwrap();
    user
}

async fn set_hash(fixture: &Fixture, user: UserId, hash: &str) -> SetForeignHashOutcome {
    let hash = PasswordHash::new(hash);
    fixture.stores.postgres.set_foreign_hash(&fixture.app, user, &hash, REQUESTED_AT).await.unwrap()
}

async fn classes(fixture: &Fixture) -> Vec<String> {
    let candidate = fixture.stores.login_candidate(&fixture.app, &an_email("nobody@example.com")).await.unwrap();
    assert!(candidate.user.is_none());
    let mut classes: Vec<_> = candidate.hash_classes.iter().map(HashClass::to_string).collect();
    classes.sort();
    classes
}

/// Returns the number of users with a foreign hash, and the number of users with only one of the two columns of a
/// foreign hash.
async fn foreign_users(fixture: &Fixture) -> (i64, i64) {
    (
        fixture.count("SELECT count(*) FROM users WHERE foreign_hash IS NOT NULL").await,
        fixture.count("SELECT count(*) FROM users WHERE (foreign_hash IS NULL) <> (foreign_hash_at IS NULL)").await,
    )
}

#[tokio::test]
async fn a_login_reads_the_user_and_the_classes_of_the_app() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "Ada@example.com").await;
    assert_eq!(classes(&fixture).await, [""; 0]);
    assert_eq!(set_hash(&fixture, user.id, BCRYPT).await, SetForeignHashOutcome::Stored);
    let found = fixture.stores.login_candidate(&fixture.app, &an_email("aDA@example.com")).await.unwrap();
    let found_user = found.user.unwrap();
    let read = fixture.stores.user(&fixture.app, user.id).await.unwrap().unwrap();
    assert_eq!(format!("{found_user:?}"), format!("{read:?}"), "all columns");
    assert_eq!(found_user.password_hash, Some(PasswordHash::new(BCRYPT)));
    assert_eq!(found.hash_classes, ["bcrypt$10".parse::<HashClass>().unwrap()]);
    assert_eq!(classes(&fixture).await, ["bcrypt$10"], "also for an unknown address");
    let other = fixture.stores.login_candidate(&an_app(), &user.email).await.unwrap();
    assert!(other.user.is_none() && other.hash_classes.is_empty(), "of another App");
    // A newer server has stored a class that this server does not know.
    fixture
        .execute(&format!(
            "INSERT INTO hash_classes (app_id, class, weight) VALUES ('{}', 'yescrypt$j9T', 1)",
            fixture.app
        ))
        .await;
    assert_eq!(classes(&fixture).await, ["bcrypt$10"]);
}

#[tokio::test]
async fn an_app_has_at_most_four_classes_and_a_total_weight_of_at_most_32() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    assert_eq!(set_hash(&fixture, a_user_id(), BCRYPT).await, SetForeignHashOutcome::NoUser);
    assert_eq!(classes(&fixture).await, [""; 0], "nothing is written without a user");
    assert_eq!(set_hash(&fixture, user.id, BCRYPT_13).await, SetForeignHashOutcome::Stored, "weight 32");
    assert_eq!(set_hash(&fixture, user.id, PBKDF2).await, SetForeignHashOutcome::TooManyKinds);
    assert_eq!(set_hash(&fixture, user.id, BCRYPT_13).await, SetForeignHashOutcome::Stored, "the same class again");
    assert_eq!(set_hash(&fixture, user.id, NATIVE).await, SetForeignHashOutcome::Stored, "a native hash has no class");
    assert_eq!(foreign_users(&fixture).await, (0, 0));
    fixture.execute("DELETE FROM hash_classes").await;
    for cost in 4..8 {
        let hash = BCRYPT.replace("$10$", &format!("$0{cost}$"));
        assert_eq!(set_hash(&fixture, user.id, &hash).await, SetForeignHashOutcome::Stored);
    }
    let stored = fixture.stores.user(&fixture.app, user.id).await.unwrap().unwrap().password_hash;
    assert_eq!(set_hash(&fixture, user.id, PBKDF2).await, SetForeignHashOutcome::TooManyKinds);
    let unchanged = fixture.stores.user(&fixture.app, user.id).await.unwrap().unwrap().password_hash;
    assert_eq!(stored, unchanged);
    assert_eq!(classes(&fixture).await, ["bcrypt$4", "bcrypt$5", "bcrypt$6", "bcrypt$7"]);
}

#[tokio::test]
async fn concurrent_imports_never_exceed_the_maximum_number_of_classes() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    let mut tasks = JoinSet::new();
    for iterations in 1..=12 {
        let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
        let hash = PasswordHash::new(PBKDF2.replace("i=1,", &format!("i={iterations},")));
        tasks.spawn(async move { stores.postgres.set_foreign_hash(&app, user.id, &hash, REQUESTED_AT).await.unwrap() });
    }
    let stored = tasks.join_all().await.into_iter().filter(|outcome| *outcome == SetForeignHashOutcome::Stored);
    assert_eq!(stored.count(), 4);
    assert_eq!(classes(&fixture).await.len(), 4);
}

#[tokio::test]
async fn a_new_password_replaces_the_foreign_hash() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    set_hash(&fixture, user.id, BCRYPT).await;
    assert_eq!(foreign_users(&fixture).await, (1, 0));
    let (stores, app) = (&fixture.stores, &fixture.app);
    stores.replace_hash(app, user.id, &PasswordHash::new(PBKDF2), PasswordHash::new(NATIVE)).await.unwrap();
    assert_eq!(foreign_users(&fixture).await, (1, 0), "another hash is stored");
    stores.replace_hash(app, user.id, &PasswordHash::new(BCRYPT), PasswordHash::new(NATIVE)).await.unwrap();
    assert_eq!(foreign_users(&fixture).await, (0, 0));

    set_hash(&fixture, user.id, BCRYPT).await;
    let reset = PasswordReset {
        user: user.id,
        epoch: Epoch(1),
        address: "ada@example.com".to_owned(),
        password_hash: PasswordHash::new(NATIVE),
        at: REQUESTED_AT,
        event: an_event(EventKind::PasswordReset, user.id),
    };
    stores.reset_password(app, reset).await.unwrap().unwrap();
    assert_eq!(foreign_users(&fixture).await, (0, 0));
}

#[tokio::test]
async fn the_sweep_removes_unused_classes_an_hour_after_the_last_import() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    set_hash(&fixture, user.id, PBKDF2).await;
    set_hash(&fixture, user.id, BCRYPT).await;
    let sweep = async || fixture.stores.postgres.sweep_hash_classes().await.unwrap();
    assert_eq!(sweep().await, 0, "an import may be about to add users of the unused class");
    fixture.execute("UPDATE hash_classes SET touched_at = now() - interval '61 minutes'").await;
    assert_eq!(sweep().await, 1);
    assert_eq!(classes(&fixture).await, ["bcrypt$10"]);
    fixture
        .stores
        .replace_hash(&fixture.app, user.id, &PasswordHash::new(BCRYPT), PasswordHash::new(NATIVE))
        .await
        .unwrap();
    assert_eq!(sweep().await, 1);
    assert_eq!(classes(&fixture).await, [NATIVE_CLASS]);
}

#[tokio::test]
async fn a_class_that_an_import_touches_is_not_swept() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    set_hash(&fixture, user.id, BCRYPT).await;
    fixture.execute("UPDATE users SET foreign_hash = NULL, foreign_hash_at = NULL").await;
    fixture.execute("UPDATE hash_classes SET touched_at = now() - interval '61 minutes'").await;
    // Begins an import that has touched the class and has not committed yet.
    let mut import = fixture.database.connect().await.unwrap();
    let begin = "BEGIN; UPDATE hash_classes SET touched_at = clock_timestamp()";
    sqlx::raw_sql(begin).execute(&mut import).await.unwrap();
    let stores = fixture.stores.clone();
    let sweep = tokio::spawn(async move { stores.postgres.sweep_hash_classes().await.unwrap() });
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
    let waiting = async || (fixture.count(waits).await > 0).then_some(());
    latchkey_tests::eventually("the sweep waits for the import", super::LIMIT, waiting).await;
    sqlx::raw_sql("COMMIT").execute(&mut import).await.unwrap();
    assert_eq!(sweep.await.unwrap(), 0);
    assert_eq!(classes(&fixture).await, ["bcrypt$10"]);
}

#[tokio::test]
async fn expired_foreign_hashes_are_removed_with_an_event() {
    let fixture = Fixture::new().await;
    let mut users = Vec::new();
    for (name, hash) in [("old", BCRYPT), ("other", PBKDF2), ("young", BCRYPT), ("replaced", BCRYPT)] {
        let user = create_user(&fixture, &format!("{name}@example.com")).await;
        set_hash(&fixture, user.id, hash).await;
        users.push(user.id);
    }
    // A server of an earlier version has replaced the hash, but not its class.
    fixture
        .execute(&format!(
            "UPDATE users SET foreign_hash_at = now() WHERE email LIKE 'young@%';
             UPDATE users SET password_hash = '{NATIVE}' WHERE email LIKE 'replaced@%'"
        ))
        .await;
    let now = REQUESTED_AT + time::Duration::days(30);
    let claim = OwnershipClaim {
        app: fixture.app.clone(),
        namespace: "shop".to_owned(),
        incarnation: Some("i1".to_owned()),
        handover: 0,
    };
    let other_owner = OwnershipClaim { namespace: "thief".to_owned(), ..claim.clone() };
    fixture.stores.postgres.claim_apps(std::slice::from_ref(&claim)).await.unwrap();
    let remove_with = async |native: &str, claim: &OwnershipClaim, days, max| {
        let expiry = ForeignHashExpiry {
            claim: claim.clone(),
            imported_before: now - time::Duration::days(days),
            native: native.parse().unwrap(),
            now,
            webhooks: Arc::default(),
        };
        fixture.stores.postgres.remove_expired_foreign_hashes(&expiry, max).await.unwrap()
    };
    let remove = async |claim: &OwnershipClaim, days, max| remove_with(NATIVE_CLASS, claim, days, max).await;
    assert_eq!(remove(&claim, 30, 10).await, 0, "not older than the retention");
    assert_eq!(remove(&other_owner, 29, 10).await, 0, "the App belongs to another namespace");
    let version = |id: UserId| format!("SELECT version FROM users WHERE id = '{id}'");
    let version_before = fixture.count(&version(users[0])).await;
    for removed in [1, 1, 0] {
        assert_eq!(remove(&claim, 29, 1).await, removed);
    }
    assert_eq!(fixture.count(&version(users[0])).await, version_before + 1);
    let has_password = async |id| fixture.stores.user(&fixture.app, id).await.unwrap().unwrap().password_hash.is_some();
    let mut left = Vec::new();
    for id in &users {
        left.push(has_password(*id).await);
    }
    assert_eq!(left, [false, false, true, true]);
    let events = "SELECT count(*) FROM audit_events WHERE kind = 'password_removed' AND detail IS NULL AND ip IS NULL";
    assert_eq!(fixture.count(events).await, 2);
    assert_eq!(fixture.count(&format!("{events} AND user_id = '{}'", users[0])).await, 1);

    // After the import of this hash, the installation chooses the parameters of the hash for its own hashes. So the
    // hash counts as one of its own.
    let stronger = NATIVE.replace("t=2", "t=3");
    set_hash(&fixture, users[0], &stronger).await;
    let class = "argon2id$v=19$m=19456,t=3,p=1";
    fixture.execute("UPDATE users SET foreign_hash = NULL, foreign_hash_at = NULL WHERE email LIKE 'replaced@%'").await;
    assert_eq!(remove_with(class, &claim, 29, 10).await, 0, "the hash is native now");
    assert_eq!(remove_with(NATIVE_CLASS, &claim, 29, 10).await, 1);
}

#[tokio::test]
async fn a_login_reads_the_parameters_of_the_hashes_that_servers_made() {
    let fixture = Fixture::new().await;
    let hash = |parameters: &str| NATIVE.replace("m=19456,t=2,p=1", parameters);
    let new = ["m=19456,t=2,p=1", "m=19456,t=2,p=1", "m=65536,t=3,p=1", "m=20480,t=2,p=1", "m=65536,t=3,p=1"];
    for (number, parameters) in new.into_iter().enumerate() {
        let user = NewUser {
            password_hash: PasswordHash::new(hash(parameters)),
            ..a_new_user(&format!("u{number}@example.com"))
        };
        fixture.stores.create_user(&fixture.app, user, None).await.unwrap();
    }
    let imported = create_user(&fixture, "imported@example.com").await;
    set_hash(&fixture, imported.id, &hash("m=30720,t=2,p=1")).await;
    let class = |parameters: &str| format!("argon2id$v=19${parameters}");
    let expected = ["m=19456,t=2,p=1", "m=20480,t=2,p=1", "m=30720,t=2,p=1", "m=65536,t=3,p=1"].map(class);
    assert_eq!(classes(&fixture).await, expected, "each once, with the class of the import");
    let other = fixture.stores.login_candidate(&an_app(), &an_email("u0@example.com")).await.unwrap();
    assert!(other.hash_classes.is_empty(), "of another App");

    // Replaces the hashes, as logins do after the installation has changed its parameters to m=65536,t=3,p=1.
    fixture
        .execute(&format!("UPDATE users SET password_hash = '{}' WHERE email LIKE 'u%'", hash("m=65536,t=3,p=1")))
        .await;
    assert_eq!(classes(&fixture).await, ["m=30720,t=2,p=1", "m=65536,t=3,p=1"].map(class));
    fixture.execute("UPDATE users SET password_hash = NULL WHERE email LIKE 'u%'").await;
    assert_eq!(classes(&fixture).await, ["m=30720,t=2,p=1"].map(class), "users without a password have no class");
}
