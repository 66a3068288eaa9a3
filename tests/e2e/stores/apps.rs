//! Ownership of appIDs, and the deletion of an App's users.

use std::sync::Arc;

use latchkey_crds::rendered::{AppState, DELETED_APP_FORMAT, DeletedApp, DeletionProgress, Revision, RevisionChange};
use latchkey_server::{
    config::Apps,
    deletion,
    domain::{
        audit::EventKind,
        mail::EpochChange,
        ports::{CreateUserOutcome, NewUser, Sessions, StoreError, Users},
        session::{Amr, NewSession, OpenOutcome, Profile, SessionId},
        user::{Epoch, UserId},
    },
    ownership::OwnershipChecker,
    store::{
        Stores,
        postgres::{ClaimOutcome, DeleteOutcome, OwnershipClaim, ReleaseOutcome},
    },
};
use latchkey_tests::{eventually, proxy::Proxy};
use tokio::{
    sync::{broadcast, watch},
    task::{AbortHandle, JoinSet},
    time::timeout,
};
use uuid::Uuid;

use super::{Fixture, LIMIT, a_mail, a_new_user, an_app, an_event, now};

/// A namespace's claim to own the App's appID. `incarnation` identifies the App's keys.
fn a_claim(fixture: &Fixture, namespace: &str) -> OwnershipClaim {
    OwnershipClaim {
        app: fixture.app.clone(),
        namespace: namespace.to_owned(),
        incarnation: Some("i1".to_owned()),
        handover: 0,
    }
}

async fn claim_app(fixture: &Fixture, claim: &OwnershipClaim) -> ClaimOutcome {
    let outcomes = fixture.stores.postgres.claim_apps(std::slice::from_ref(claim)).await.unwrap();
    let [outcome] = outcomes[..] else { panic!("{outcomes:?}") };
    outcome
}

async fn register_user(fixture: &Fixture, number: usize) -> Result<NewUser, StoreError> {
    let user = a_new_user(&format!("user{number}@example.com"));
    let creation = fixture.stores.create_user(&fixture.app, user.clone(), Some(a_mail(Some(user.id)))).await?;
    assert_eq!(creation, CreateUserOutcome::Created);
    Ok(user)
}

async fn open_session(fixture: &Fixture, user: UserId) -> SessionId {
    let id = SessionId(Uuid::from_u128(rand::random()));
    let session = NewSession {
        kind: None,
        id,
        user,
        epoch: Epoch(1),
        profile: Profile { version: 1, email: None, email_verified: false, name: "Ada".to_owned() },
        amr: Amr::Password,
        auth_time: now(),
        ends_at: now() + time::Duration::days(1),
        idle_seconds: 3600,
        ip: "192.0.2.1".to_owned(),
        user_agent: None,
    };
    assert_eq!(fixture.stores.open_session(&fixture.app, &session).await.unwrap(), OpenOutcome::Opened);
    id
}

async fn delete_all_users(fixture: &Fixture, claim: &OwnershipClaim, batch_size: u32) -> usize {
    let mut batches = 1;
    let deleting = async {
        loop {
            match fixture.stores.delete_users(claim, batch_size, || true).await.unwrap() {
                DeleteOutcome::Partial => batches += 1,
                // A registration holds the lock of the App at this moment.
                DeleteOutcome::Contended => tokio::task::yield_now().await,
                DeleteOutcome::Done => return batches,
                other => panic!("{other:?}"),
            }
        }
    };
    timeout(LIMIT, deleting).await.expect("the deletion ends in time")
}

#[tokio::test]
async fn an_app_belongs_to_one_namespace_until_it_is_handed_over() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    assert_eq!(claim_app(&fixture, &claim).await, ClaimOutcome::Held);
    assert_eq!(claim_app(&fixture, &claim).await, ClaimOutcome::Held);
    let foreign_claim = a_claim(&fixture, "thief");
    assert_eq!(claim_app(&fixture, &foreign_claim).await, ClaimOutcome::OtherNamespace);
    let foreign_with_other_keys = OwnershipClaim { incarnation: Some("i2".to_owned()), ..foreign_claim.clone() };
    assert_eq!(claim_app(&fixture, &foreign_with_other_keys).await, ClaimOutcome::OtherNamespace);

    let handed_over = OwnershipClaim { handover: 1, ..a_claim(&fixture, "heir") };
    assert_eq!(claim_app(&fixture, &handed_over).await, ClaimOutcome::Held);
    assert_eq!(claim_app(&fixture, &claim).await, ClaimOutcome::OtherNamespace, "a document of the former owner");
}

#[tokio::test]
async fn a_claim_with_other_keys_is_rejected_until_new_keys_are_requested() {
    let fixture = Fixture::new().await;
    let first_keys = a_claim(&fixture, "shop");
    let other_keys = OwnershipClaim { incarnation: Some("i2".to_owned()), ..first_keys.clone() };
    assert_eq!(claim_app(&fixture, &first_keys).await, ClaimOutcome::Held);
    // While the App has no users, a claim with other keys is accepted.
    assert_eq!(claim_app(&fixture, &other_keys).await, ClaimOutcome::Held);
    assert_eq!(claim_app(&fixture, &first_keys).await, ClaimOutcome::Held);
    register_user(&fixture, 0).await.unwrap();
    assert_eq!(claim_app(&fixture, &other_keys).await, ClaimOutcome::KeysLost);
    // A rendered document from an older operator has no `incarnation`, and is accepted with any keys.
    assert_eq!(
        claim_app(&fixture, &OwnershipClaim { incarnation: None, ..first_keys.clone() }).await,
        ClaimOutcome::Held
    );
    assert_eq!(claim_app(&fixture, &first_keys).await, ClaimOutcome::Held, "the first keys are restored from a copy");

    let with_new_keys = OwnershipClaim { handover: 29_000_000, ..other_keys };
    assert_eq!(claim_app(&fixture, &with_new_keys).await, ClaimOutcome::Held);
    assert_eq!(claim_app(&fixture, &with_new_keys).await, ClaimOutcome::Held);
    assert_eq!(claim_app(&fixture, &first_keys).await, ClaimOutcome::KeysLost, "an old document");
    let foreign_claim = OwnershipClaim { handover: 29_000_000, ..a_claim(&fixture, "thief") };
    assert_eq!(claim_app(&fixture, &foreign_claim).await, ClaimOutcome::OtherNamespace);
}

#[tokio::test]
async fn a_claim_with_other_keys_does_not_cancel_a_deletion() {
    let fixture = Fixture::new().await;
    let first_keys = a_claim(&fixture, "shop");
    claim_app(&fixture, &first_keys).await;
    for number in 0..2 {
        register_user(&fixture, number).await.unwrap();
    }
    assert_eq!(fixture.stores.delete_users(&first_keys, 1, || true).await.unwrap(), DeleteOutcome::Partial);
    let other_keys = OwnershipClaim { incarnation: Some("i2".to_owned()), ..first_keys };
    assert_eq!(claim_app(&fixture, &other_keys).await, ClaimOutcome::KeysLost);
}

#[tokio::test]
async fn a_repeated_claim_does_not_write_its_row_again() {
    let fixture = Fixture::new().await;
    let claims: Vec<_> = (0..300).map(|_| OwnershipClaim { app: an_app(), ..a_claim(&fixture, "shop") }).collect();
    let outcomes = fixture.stores.postgres.claim_apps(&claims).await.unwrap();
    assert!(outcomes.len() == 300 && outcomes.iter().all(|outcome| *outcome == ClaimOutcome::Held));
    const VERSIONS: &str = "SELECT sum(xmin::text::bigint + xmax::text::bigint)::bigint FROM apps";
    let before = fixture.count(VERSIONS).await;
    fixture.stores.postgres.claim_apps(&claims).await.unwrap();
    assert_eq!(fixture.count(VERSIONS).await, before);
}

#[tokio::test]
async fn only_one_of_several_concurrent_namespaces_gets_an_app() {
    let fixture = Fixture::new().await;
    let mut tasks = JoinSet::new();
    for number in 0..8 {
        let (stores, claim) = (fixture.stores.clone(), a_claim(&fixture, &format!("n{number}")));
        tasks.spawn(async move { stores.postgres.claim_apps(&[claim]).await.unwrap()[0] });
    }
    let outcomes = tasks.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == ClaimOutcome::Held).count(), 1, "{outcomes:?}");
}

#[tokio::test]
async fn a_deletion_removes_everything_of_the_app_and_nothing_of_others() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claim_app(&fixture, &claim).await;
    let mut users = Vec::new();
    for number in 0..7 {
        users.push(register_user(&fixture, number).await.unwrap());
    }
    let session = open_session(&fixture, users[0].id).await;
    fixture
        .execute(&format!(
            "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
             VALUES ('{app}', 'https://idp.example', 'ada', '{user}', 'idp', now());
             INSERT INTO hash_classes (app_id, class, weight) VALUES ('{app}', 'bcrypt$10', 4);
             INSERT INTO audit_events (app_id, id, at, kind) VALUES ('{app}', gen_random_uuid(), now(), 'login')",
            app = fixture.app,
            user = users[0].id,
        ))
        .await;
    let other_app = an_app();
    let other_user = a_new_user("user0@example.com");
    fixture.stores.create_user(&other_app, other_user.clone(), Some(a_mail(Some(other_user.id)))).await.unwrap();

    assert_eq!(
        fixture.stores.delete_users(&claim, 3, || false).await.unwrap(),
        DeleteOutcome::Contended,
        "the deletion was cancelled during the statement"
    );
    assert_eq!(fixture.stores.delete_users(&claim, 3, || true).await.unwrap(), DeleteOutcome::Partial);
    let progress = fixture.stores.postgres.deletion_progress(&claim).await.unwrap();
    assert_eq!((progress.users_left, progress.done), (4, false));
    assert_eq!(delete_all_users(&fixture, &claim, 3).await, 3, "the last batch finds no users");
    let progress = fixture.stores.postgres.deletion_progress(&claim).await.unwrap();
    assert_eq!((progress.users_left, progress.done), (0, true));
    for table in ["users", "identities", "outbox", "audit_events", "hash_classes"] {
        let remaining = fixture.count(&format!("SELECT count(*) FROM {table} WHERE app_id = '{}'", fixture.app)).await;
        assert_eq!(remaining, 0, "{table}");
    }
    assert!(fixture.stores.session(&fixture.app, users[0].id, session).await.unwrap().is_none());
    assert!(fixture.stores.user(&other_app, other_user.id).await.unwrap().is_some());
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 1);
    assert_eq!(fixture.stores.delete_users(&claim, 3, || true).await.unwrap(), DeleteOutcome::Done, "again");
}

#[tokio::test]
async fn registrations_are_refused_while_an_app_is_being_deleted() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claim_app(&fixture, &claim).await;
    let user = register_user(&fixture, 0).await.unwrap();
    assert_eq!(fixture.stores.delete_users(&claim, 1, || true).await.unwrap(), DeleteOutcome::Partial);
    let refused = register_user(&fixture, 1).await.unwrap_err();
    assert!(matches!(refused, StoreError::Unavailable { .. }), "{refused:?}");
    let event = an_event(EventKind::RegisteredAgain, user.id);
    let repeated = fixture
        .stores
        .record_repeated_registration(&fixture.app, user.id, Epoch(1), true, Some(a_mail(None)), event)
        .await;
    assert!(matches!(repeated, Err(StoreError::Unavailable { .. })), "{repeated:?}");
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 0);
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 0);
}

#[tokio::test]
async fn a_registration_during_a_deletion_is_refused_or_deleted_too() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claim_app(&fixture, &claim).await;
    let mut tasks = JoinSet::new();
    for number in 0..40 {
        let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
        tasks.spawn(async move {
            // Either outcome is fine. The test checks the table at the end.
            let _ = stores.create_user(&app, a_new_user(&format!("user{number}@example.com")), None).await;
        });
    }
    delete_all_users(&fixture, &claim, 3).await;
    tasks.join_all().await;
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 0);
}

#[tokio::test]
async fn several_servers_can_delete_the_users_of_an_app_concurrently() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claim_app(&fixture, &claim).await;
    for number in 0..30 {
        register_user(&fixture, number).await.unwrap();
    }
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let (stores, claim) = (fixture.another_server().await, claim.clone());
        tasks.spawn(async move {
            while stores.delete_users(&claim, 4, || true).await.unwrap() != DeleteOutcome::Done {
                tokio::task::yield_now().await;
            }
        });
    }
    timeout(LIMIT, tasks.join_all()).await.expect("the tasks end in time");
    assert!(fixture.stores.postgres.deletion_progress(&claim).await.unwrap().done);
}

#[tokio::test]
async fn only_the_apps_own_document_deletes_its_users() {
    let fixture = Fixture::new().await;
    claim_app(&fixture, &a_claim(&fixture, "shop")).await;
    register_user(&fixture, 0).await.unwrap();
    let foreign_claim = a_claim(&fixture, "thief");
    assert_eq!(fixture.stores.delete_users(&foreign_claim, 9, || true).await.unwrap(), DeleteOutcome::OtherNamespace);
    let with_other_keys = OwnershipClaim { incarnation: Some("i0".to_owned()), ..a_claim(&fixture, "shop") };
    assert_eq!(fixture.stores.delete_users(&with_other_keys, 9, || true).await.unwrap(), DeleteOutcome::OtherApp);
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 1);
    register_user(&fixture, 1).await.unwrap();
}

#[tokio::test]
async fn a_deletion_can_be_cancelled_only_before_its_end() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claim_app(&fixture, &claim).await;
    for number in 0..2 {
        register_user(&fixture, number).await.unwrap();
    }
    assert_eq!(fixture.stores.delete_users(&claim, 1, || true).await.unwrap(), DeleteOutcome::Partial);
    assert_eq!(claim_app(&fixture, &a_claim(&fixture, "thief")).await, ClaimOutcome::OtherNamespace);
    assert_eq!(claim_app(&fixture, &claim).await, ClaimOutcome::Held);
    register_user(&fixture, 2).await.unwrap();
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 2);

    delete_all_users(&fixture, &claim, 9).await;
    assert_eq!(claim_app(&fixture, &claim).await, ClaimOutcome::Deleted);
    let with_new_keys = OwnershipClaim { incarnation: Some("i2".to_owned()), ..a_claim(&fixture, "heir") };
    assert_eq!(claim_app(&fixture, &with_new_keys).await, ClaimOutcome::Held);
    register_user(&fixture, 3).await.unwrap();
}

#[tokio::test]
async fn the_epochs_of_a_deleted_apps_users_are_deleted() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claim_app(&fixture, &claim).await;
    let user = register_user(&fixture, 0).await.unwrap();
    let epoch_change = EpochChange { user: user.id, epoch: Epoch(5), kept_session: None };
    fixture.stores.raise_epoch(&fixture.app, &epoch_change, None).await.unwrap();
    delete_all_users(&fixture, &claim, 9).await;
    // The new session has the epoch 1. Redis would reject the session if it still had the user's epoch 5.
    open_session(&fixture, user.id).await;
}

async fn release_app(stores: &Stores, claim: &OwnershipClaim) -> ReleaseOutcome {
    stores.postgres.release_app(claim, || true).await.unwrap()
}

#[tokio::test]
async fn an_app_without_users_is_released_and_free_for_every_namespace() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claim_app(&fixture, &claim).await;
    let cancelled = fixture.stores.postgres.release_app(&claim, || false).await.unwrap();
    assert_eq!(cancelled, ReleaseOutcome::Contended);
    // Audit events without a user, and mails without a recipient, do not reserve the appID.
    fixture
        .execute(&format!(
            "INSERT INTO audit_events (app_id, id, at, kind) VALUES ('{app}', gen_random_uuid(), now(), 'login_failed');
             INSERT INTO hash_classes (app_id, class, weight) VALUES ('{app}', 'bcrypt$10', 4);
             INSERT INTO outbox (app_id, kind, requested_at) VALUES ('{app}', 'confirm', now())",
            app = fixture.app
        ))
        .await;
    let mut outcome = release_app(&fixture.stores, &claim).await;
    if outcome == ReleaseOutcome::Contended {
        outcome = release_app(&fixture.stores, &claim).await;
    }
    assert_eq!(outcome, ReleaseOutcome::Freed);
    assert_eq!(release_app(&fixture.stores, &claim).await, ReleaseOutcome::Freed, "again");
    super::assert_unavailable(register_user(&fixture, 0).await.map(drop));
    for table in ["users", "outbox", "audit_events", "hash_classes"] {
        assert_eq!(fixture.count(&format!("SELECT count(*) FROM {table}")).await, 0, "{table}");
    }
    let thief = OwnershipClaim { incarnation: Some("i2".to_owned()), ..a_claim(&fixture, "thief") };
    assert_eq!(claim_app(&fixture, &thief).await, ClaimOutcome::Held);
    register_user(&fixture, 1).await.unwrap();
    assert_eq!(claim_app(&fixture, &claim).await, ClaimOutcome::OtherNamespace);
    assert_eq!(release_app(&fixture.stores, &claim).await, ReleaseOutcome::OtherNamespace);
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 1);
}

#[tokio::test]
async fn an_app_with_a_user_or_with_events_of_a_user_stays_reserved() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claim_app(&fixture, &claim).await;
    let user = register_user(&fixture, 0).await.unwrap();
    assert_eq!(release_app(&fixture.stores, &claim).await, ReleaseOutcome::Reserved { users: 1 });
    assert!(fixture.stores.user(&fixture.app, user.id).await.unwrap().is_some());
    register_user(&fixture, 1).await.expect("the App is served as before");
    fixture.execute("DELETE FROM users").await;
    let events = fixture.count("SELECT count(*) FROM audit_events WHERE user_id IS NOT NULL").await;
    assert!(events > 0);
    assert_eq!(release_app(&fixture.stores, &claim).await, ReleaseOutcome::Reserved { users: 1 });
    assert_eq!(fixture.count("SELECT count(*) FROM audit_events WHERE user_id IS NOT NULL").await, events);
    assert_eq!(claim_app(&fixture, &a_claim(&fixture, "thief")).await, ClaimOutcome::OtherNamespace);
}

#[tokio::test]
async fn an_old_document_does_not_release_a_recreated_app() {
    let fixture = Fixture::new().await;
    let old_claim = a_claim(&fixture, "shop");
    let recreated = OwnershipClaim { handover: 1, ..old_claim.clone() };
    claim_app(&fixture, &old_claim).await;
    claim_app(&fixture, &recreated).await;
    assert_eq!(
        release_app(&fixture.stores, &old_claim).await,
        ReleaseOutcome::OtherApp,
        "a server with an older document"
    );
    register_user(&fixture, 0).await.unwrap();
    fixture.execute("DELETE FROM users; DELETE FROM outbox; DELETE FROM audit_events").await;

    // Now the App is released first, and then recreated again. The claim of the recreated App gets the appID.
    assert_eq!(release_app(&fixture.stores, &recreated).await, ReleaseOutcome::Freed);
    let next_claim = OwnershipClaim { handover: 2, ..old_claim.clone() };
    assert_eq!(claim_app(&fixture, &next_claim).await, ClaimOutcome::Held);
    for stale in [&old_claim, &recreated] {
        assert_eq!(release_app(&fixture.stores, stale).await, ReleaseOutcome::OtherApp);
    }
    register_user(&fixture, 1).await.unwrap();
    fixture.execute("DELETE FROM users; DELETE FROM outbox; DELETE FROM audit_events").await;
    let other_keys = OwnershipClaim { incarnation: Some("i0".to_owned()), handover: 9, ..old_claim };
    assert_eq!(release_app(&fixture.stores, &other_keys).await, ReleaseOutcome::OtherApp);
}

#[tokio::test]
async fn a_late_document_from_the_former_namespace_does_not_take_a_freed_app_id() {
    let fixture = Fixture::new().await;
    let former_claim = OwnershipClaim { handover: 3, ..a_claim(&fixture, "shop") };
    assert_eq!(claim_app(&fixture, &former_claim).await, ClaimOutcome::Held);
    assert_eq!(release_app(&fixture.stores, &former_claim).await, ReleaseOutcome::Freed);
    let next_claim = OwnershipClaim { incarnation: Some("i2".to_owned()), ..a_claim(&fixture, "next") };
    assert_eq!(claim_app(&fixture, &next_claim).await, ClaimOutcome::Held);
    let with_later_handover = OwnershipClaim { handover: 29_000_000, ..former_claim.clone() };
    let without_incarnation = OwnershipClaim { incarnation: None, ..former_claim.clone() };
    for users in 0..2 {
        for late_claim in [&former_claim, &with_later_handover, &without_incarnation] {
            assert_eq!(claim_app(&fixture, late_claim).await, ClaimOutcome::OtherNamespace, "{late_claim:?}");
            let deleting = fixture.stores.delete_users(late_claim, 9, || true).await.unwrap();
            assert_eq!(deleting, DeleteOutcome::OtherNamespace, "{late_claim:?}");
            assert_eq!(
                release_app(&fixture.stores, late_claim).await,
                ReleaseOutcome::OtherNamespace,
                "{late_claim:?}"
            );
        }
        assert_eq!(claim_app(&fixture, &next_claim).await, ClaimOutcome::Held);
        register_user(&fixture, users).await.unwrap();
    }
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 2);

    // The platform team can still hand the appID over. The keys stay, and the handover counter starts again at one.
    let heir = OwnershipClaim { namespace: "heir".to_owned(), handover: 1, ..next_claim.clone() };
    assert_eq!(claim_app(&fixture, &heir).await, ClaimOutcome::Held);
    assert_eq!(claim_app(&fixture, &next_claim).await, ClaimOutcome::OtherNamespace);
    assert_eq!(claim_app(&fixture, &with_later_handover).await, ClaimOutcome::OtherNamespace);
}

#[tokio::test]
async fn a_handover_and_new_keys_are_accepted_only_one_after_the_other() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    assert_eq!(claim_app(&fixture, &claim).await, ClaimOutcome::Held);
    let heir = OwnershipClaim { namespace: "heir".to_owned(), handover: 1, ..claim.clone() };
    let with_new_keys = OwnershipClaim { incarnation: Some("i2".to_owned()), handover: 29_000_000, ..heir.clone() };
    assert_eq!(claim_app(&fixture, &with_new_keys).await, ClaimOutcome::OtherNamespace);
    // First the handover, then the new keys.
    assert_eq!(claim_app(&fixture, &heir).await, ClaimOutcome::Held);
    assert_eq!(claim_app(&fixture, &with_new_keys).await, ClaimOutcome::Held);
}

#[tokio::test]
async fn a_release_in_an_empty_database_frees_no_app_id_and_writes_no_row() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    for _ in 0..2 {
        assert_eq!(release_app(&fixture.stores, &claim).await, ReleaseOutcome::Reserved { users: 1 });
        assert_eq!(fixture.count("SELECT count(*) FROM apps").await, 0);
    }
    assert_eq!(claim_app(&fixture, &claim).await, ClaimOutcome::Held);
    register_user(&fixture, 0).await.unwrap();
}

#[tokio::test]
async fn a_concurrent_registration_and_release_never_leave_a_user_in_a_free_app() {
    let fixture = Fixture::new().await;
    let stores = [fixture.another_server().await, fixture.another_server().await];
    for round in 0..60 {
        let claim = OwnershipClaim { app: an_app(), ..a_claim(&fixture, "shop") };
        fixture.stores.postgres.claim_apps(std::slice::from_ref(&claim)).await.unwrap();
        let mut tasks = JoinSet::new();
        for number in 0..3 {
            let (stores, app) = (fixture.stores.clone(), claim.app.clone());
            tasks.spawn(async move {
                // Yields, so that sometimes the registration and sometimes the release comes first.
                for _ in 0..round * 3 {
                    tokio::task::yield_now().await;
                }
                // Either outcome is fine. The test checks the table at the end.
                let _ = stores.create_user(&app, a_new_user(&format!("user{number}@example.com")), None).await;
            });
        }
        for stores in &stores {
            let (stores, claim) = (stores.clone(), claim.clone());
            tasks.spawn(async move {
                while release_app(&stores, &claim).await == ReleaseOutcome::Contended {
                    tokio::task::yield_now().await;
                }
            });
        }
        timeout(LIMIT, tasks.join_all()).await.expect("the tasks end in time");
        let users = fixture.count(&format!("SELECT count(*) FROM users WHERE app_id = '{}'", claim.app)).await;
        let thief = OwnershipClaim { incarnation: Some("i2".to_owned()), namespace: "thief".to_owned(), ..claim };
        let outcomes = fixture.stores.postgres.claim_apps(&[thief]).await.unwrap();
        match outcomes[..] {
            [ClaimOutcome::Held] => assert_eq!(users, 0, "another namespace owns the appID now"),
            [ClaimOutcome::OtherNamespace] => assert!(users > 0, "the appID is reserved although there is no user"),
            ref other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn every_server_reports_whether_a_released_app_has_users_and_deletes_none() {
    let fixture = Fixture::new().await;
    claim_app(&fixture, &a_claim(&fixture, "shop")).await;
    register_user(&fixture, 0).await.unwrap();
    let mut document: DeletedApp =
        std::str::from_utf8(&a_document_of_a_deleted_app(&fixture)).unwrap().parse().unwrap();
    document.state = AppState::Released;
    let document = document.to_bytes();
    let mut servers = Vec::new();
    for _ in 0..2 {
        let apps = Arc::new(Apps::default());
        apps.put(&fixture.app, &document);
        let changes = apps.subscribe_changes();
        tokio::spawn(deletion::run(
            Arc::clone(&apps),
            fixture.another_server().await,
            watch::Sender::new(true).subscribe(),
        ));
        servers.push((apps, changes));
    }
    for (_, changes) in &mut servers {
        let change = wait_for_change(changes, |change| change.deletion.is_some()).await;
        assert_eq!(change.deletion, Some(DeletionProgress { users_left: 1, done: false }));
        assert_eq!(change.revision, Some(Revision::of(&document)));
    }
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 1);
    fixture.execute("DELETE FROM users; DELETE FROM outbox; DELETE FROM audit_events").await;
    for (_, changes) in &mut servers {
        let change = wait_for_change(changes, |change| change.deletion.is_some_and(|deletion| deletion.done)).await;
        assert_eq!(change.deletion, Some(DeletionProgress { users_left: 0, done: true }));
    }
}

fn serving_apps(fixture: &Fixture) -> Arc<Apps> {
    let apps = Apps::default();
    let mut doc = super::codes::loaded_app(fixture).doc;
    doc.incarnation = Some("i2".to_owned());
    apps.put(&fixture.app, &doc.to_bytes());
    assert!(apps.get(fixture.app.as_str()).is_some());
    Arc::new(apps)
}

fn start_ownership_checker(apps: &Arc<Apps>, stores: &Stores) -> AbortHandle {
    let checker = OwnershipChecker::new(Arc::clone(apps), stores.postgres.clone());
    tokio::spawn(checker.run(watch::Sender::new(true).subscribe())).abort_handle()
}

async fn wait_for_change(
    changes: &mut broadcast::Receiver<RevisionChange>,
    fits: impl Fn(&RevisionChange) -> bool,
) -> RevisionChange {
    let fitting = async {
        loop {
            let change = changes.recv().await.unwrap();
            if fits(&change) {
                return change;
            }
        }
    };
    timeout(LIMIT, fitting).await.expect("the change was not reported in time")
}

fn a_document_of_a_deleted_app(fixture: &Fixture) -> Vec<u8> {
    let doc = DeletedApp {
        format: DELETED_APP_FORMAT,
        app_id: fixture.app.clone(),
        namespace: "shop".to_owned(),
        name: "shop".to_owned(),
        state: AppState::Deleted,
        incarnation: Some("i1".to_owned()),
        handover: None,
    };
    doc.to_bytes()
}

#[tokio::test]
async fn an_app_is_suspended_while_another_namespace_owns_its_app_id() {
    let fixture = Fixture::new().await;
    let holder = a_claim(&fixture, "holder");
    claim_app(&fixture, &holder).await;
    let apps = serving_apps(&fixture);
    let mut changes = apps.subscribe_changes();
    let _checker = start_ownership_checker(&apps, &fixture.stores);
    let change = wait_for_change(&mut changes, |_| true).await;
    assert!(change.revision.is_none() && change.refused.is_some(), "{change:?}");
    assert!(apps.get(fixture.app.as_str()).is_none());
    delete_all_users(&fixture, &holder, 9).await;
    let change = wait_for_change(&mut changes, |change| change.revision.is_some()).await;
    assert_eq!(change.refused, None);
    assert!(apps.get(fixture.app.as_str()).is_some());
}

#[tokio::test]
async fn an_app_that_has_lost_the_keys_of_its_users_is_suspended_and_reported() {
    let fixture = Fixture::new().await;
    let namespace = super::codes::loaded_app(&fixture).doc.namespace;
    claim_app(&fixture, &a_claim(&fixture, &namespace)).await;
    register_user(&fixture, 0).await.unwrap();
    let apps = serving_apps(&fixture);
    let mut changes = apps.subscribe_changes();
    let _checker = start_ownership_checker(&apps, &fixture.stores);
    let change = wait_for_change(&mut changes, |_| true).await;
    assert!(
        change.revision.is_none() && change.refused.as_ref().is_some_and(|refused| refused.keys_lost),
        "{change:?}"
    );
    assert!(apps.subscribe(String::new()).0.refused[&fixture.app].keys_lost);
    assert!(apps.get(fixture.app.as_str()).is_none());

    let mut with_new_keys = super::codes::loaded_app(&fixture).doc;
    (with_new_keys.incarnation, with_new_keys.handover) = (Some("i2".to_owned()), Some(29_000_000));
    apps.put(&fixture.app, &with_new_keys.to_bytes());
    let change = wait_for_change(&mut changes, |change| change.revision.is_some()).await;
    assert_eq!(change.refused, None);
    let first_keys = a_claim(&fixture, &namespace);
    eventually("the database has the new keys", LIMIT, || async {
        (claim_app(&fixture, &first_keys).await == ClaimOutcome::KeysLost).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_app_is_served_without_postgres_and_checked_later() {
    let fixture = Fixture::new().await;
    claim_app(&fixture, &a_claim(&fixture, "holder")).await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    proxy.refuse().await;
    let stores = super::faults::stores_via(&fixture, &proxy);
    super::assert_unavailable(stores.postgres.claim_apps(&[a_claim(&fixture, "shop")]).await);
    let apps = serving_apps(&fixture);
    let mut changes = apps.subscribe_changes();
    let _checker = start_ownership_checker(&apps, &stores);
    tokio::task::yield_now().await;
    assert!(changes.try_recv().is_err() && apps.get(fixture.app.as_str()).is_some());
    proxy.restore().unwrap();
    assert!(wait_for_change(&mut changes, |_| true).await.refused.is_some());
}

#[tokio::test]
async fn every_server_reports_the_progress_of_a_deletion() {
    let fixture = Fixture::new().await;
    claim_app(&fixture, &a_claim(&fixture, "shop")).await;
    for number in 0..3 {
        register_user(&fixture, number).await.unwrap();
    }
    let document = a_document_of_a_deleted_app(&fixture);
    let has_all_documents = watch::Sender::new(false);
    let mut servers = Vec::new();
    for _ in 0..2 {
        let apps = Arc::new(Apps::default());
        apps.put(&fixture.app, &document);
        let changes = apps.subscribe_changes();
        tokio::spawn(deletion::run(Arc::clone(&apps), fixture.another_server().await, has_all_documents.subscribe()));
        servers.push((apps, changes));
    }
    tokio::task::yield_now().await;
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 3, "not before all documents were read");
    has_all_documents.send_replace(true);
    for (apps, mut changes) in servers {
        let change =
            wait_for_change(&mut changes, |change| change.deletion.is_some_and(|deletion| deletion.done)).await;
        assert_eq!(change.revision, Some(Revision::of(&document)));
        let (hello, _) = apps.subscribe(String::new());
        assert_eq!(hello.deletions.get(&fixture.app), Some(&DeletionProgress { users_left: 0, done: true }));
    }
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 0);
}

#[tokio::test]
async fn a_deletion_that_the_database_rejects_is_reported() {
    let fixture = Fixture::new().await;
    claim_app(&fixture, &a_claim(&fixture, "holder")).await;
    register_user(&fixture, 0).await.unwrap();
    let apps = Arc::new(Apps::default());
    apps.put(&fixture.app, &a_document_of_a_deleted_app(&fixture));
    let mut changes = apps.subscribe_changes();
    let has_all_documents = watch::Sender::new(true);
    tokio::spawn(deletion::run(Arc::clone(&apps), fixture.stores.clone(), has_all_documents.subscribe()));
    assert!(wait_for_change(&mut changes, |_| true).await.refused.is_some());
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 1);
}
