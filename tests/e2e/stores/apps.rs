//! Whose an App is, and the deletion of its users.

use std::sync::Arc;

use latchkey_crds::rendered::{AppState, Change, DeletedApp, Deletion, FORMAT, Revision};
use latchkey_server::{
    config::Apps,
    deletion,
    domain::{
        audit::EventKind,
        mail::EpochNews,
        ports::{Creation, NewUser, Sessions, StoreError, Users},
        session::{Amr, NewSession, Opening, Profile, SessionId},
        user::{Epoch, UserId},
    },
    store::{
        Stores,
        postgres::{AppClaim, Claim, Deleting, Releasing},
    },
    witness::Witness,
};
use latchkey_tests::{eventually, proxy::Proxy};
use tokio::{
    sync::{broadcast, watch},
    task::{AbortHandle, JoinSet},
    time::timeout,
};
use uuid::Uuid;

use super::{Fixture, LIMIT, a_mail, a_new_user, an_app, an_event, now};

fn a_claim(fixture: &Fixture, namespace: &str) -> Claim {
    Claim { app: fixture.app.clone(), namespace: namespace.to_owned(), incarnation: Some("i1".to_owned()), handover: 0 }
}

async fn claimed(fixture: &Fixture, claim: &Claim) -> AppClaim {
    let answers = fixture.stores.postgres.claim_apps(std::slice::from_ref(claim)).await.unwrap();
    let [answer] = answers[..] else { panic!("{answers:?}") };
    answer
}

async fn register(fixture: &Fixture, number: usize) -> Result<NewUser, StoreError> {
    let user = a_new_user(&format!("user{number}@example.com"));
    let creation = fixture.stores.create_user(&fixture.app, user.clone(), Some(a_mail(Some(user.id)))).await?;
    assert_eq!(creation, Creation::Created);
    Ok(user)
}

async fn open(fixture: &Fixture, user: UserId) -> SessionId {
    let id = SessionId(Uuid::from_u128(rand::random()));
    let session = NewSession {
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
    assert_eq!(fixture.stores.open_session(&fixture.app, &session).await.unwrap(), Opening::Opened);
    id
}

async fn delete_all(fixture: &Fixture, claim: &Claim, most: u32) -> usize {
    let mut batches = 1;
    let deleting = async {
        loop {
            match fixture.stores.delete_users(claim, most, || true).await.unwrap() {
                Deleting::Some => batches += 1,
                // Somebody registers at this moment.
                Deleting::Elsewhere => tokio::task::yield_now().await,
                Deleting::Done => return batches,
                other => panic!("{other:?}"),
            }
        }
    };
    timeout(LIMIT, deleting).await.expect("it did not end")
}

#[tokio::test]
async fn an_app_belongs_to_one_namespace_until_it_is_handed_over() {
    let fixture = Fixture::new().await;
    let shop = a_claim(&fixture, "shop");
    assert_eq!(claimed(&fixture, &shop).await, AppClaim::Held);
    assert_eq!(claimed(&fixture, &shop).await, AppClaim::Held);
    let stray = a_claim(&fixture, "thief");
    assert_eq!(claimed(&fixture, &stray).await, AppClaim::OtherNamespace);
    let newer = Claim { incarnation: Some("i2".to_owned()), ..stray.clone() };
    assert_eq!(claimed(&fixture, &newer).await, AppClaim::OtherNamespace);

    let handed_over = Claim { handover: 1, ..a_claim(&fixture, "heir") };
    assert_eq!(claimed(&fixture, &handed_over).await, AppClaim::Held);
    assert_eq!(claimed(&fixture, &shop).await, AppClaim::OtherNamespace, "an old document of the former holder");
}

#[tokio::test]
async fn other_keys_than_those_of_the_users_are_refused_until_they_are_to_be_new() {
    let fixture = Fixture::new().await;
    let first = a_claim(&fixture, "shop");
    let other = Claim { incarnation: Some("i2".to_owned()), ..first.clone() };
    assert_eq!(claimed(&fixture, &first).await, AppClaim::Held);
    // Nobody is there yet who would feel it.
    assert_eq!(claimed(&fixture, &other).await, AppClaim::Held);
    assert_eq!(claimed(&fixture, &first).await, AppClaim::Held);
    register(&fixture, 0).await.unwrap();
    assert_eq!(claimed(&fixture, &other).await, AppClaim::KeysLost);
    // Those of a rendered document of before say nothing of it.
    assert_eq!(claimed(&fixture, &Claim { incarnation: None, ..first.clone() }).await, AppClaim::Held);
    assert_eq!(claimed(&fixture, &first).await, AppClaim::Held, "the first are put back from a copy");

    let anew = Claim { handover: 29_000_000, ..other };
    assert_eq!(claimed(&fixture, &anew).await, AppClaim::Held);
    assert_eq!(claimed(&fixture, &anew).await, AppClaim::Held);
    assert_eq!(claimed(&fixture, &first).await, AppClaim::KeysLost, "an old document");
    let stray = Claim { handover: 29_000_000, ..a_claim(&fixture, "thief") };
    assert_eq!(claimed(&fixture, &stray).await, AppClaim::OtherNamespace);
}

#[tokio::test]
async fn a_deletion_is_not_taken_back_by_other_keys() {
    let fixture = Fixture::new().await;
    let first = a_claim(&fixture, "shop");
    claimed(&fixture, &first).await;
    for number in 0..2 {
        register(&fixture, number).await.unwrap();
    }
    assert_eq!(fixture.stores.delete_users(&first, 1, || true).await.unwrap(), Deleting::Some);
    let other = Claim { incarnation: Some("i2".to_owned()), ..first };
    assert_eq!(claimed(&fixture, &other).await, AppClaim::KeysLost);
}

#[tokio::test]
async fn a_claim_that_changes_nothing_writes_nothing() {
    let fixture = Fixture::new().await;
    let claims: Vec<_> = (0..300).map(|_| Claim { app: an_app(), ..a_claim(&fixture, "shop") }).collect();
    let answers = fixture.stores.postgres.claim_apps(&claims).await.unwrap();
    assert!(answers.len() == 300 && answers.iter().all(|answer| *answer == AppClaim::Held));
    const VERSIONS: &str = "SELECT sum(xmin::text::bigint + xmax::text::bigint)::bigint FROM apps";
    let before = fixture.count(VERSIONS).await;
    fixture.stores.postgres.claim_apps(&claims).await.unwrap();
    assert_eq!(fixture.count(VERSIONS).await, before);
}

#[tokio::test]
async fn of_two_namespaces_that_claim_at_once_one_gets_it() {
    let fixture = Fixture::new().await;
    let mut tasks = JoinSet::new();
    for number in 0..8 {
        let (stores, claim) = (fixture.stores.clone(), a_claim(&fixture, &format!("n{number}")));
        tasks.spawn(async move { stores.postgres.claim_apps(&[claim]).await.unwrap()[0] });
    }
    let answers = tasks.join_all().await;
    assert_eq!(answers.iter().filter(|answer| **answer == AppClaim::Held).count(), 1, "{answers:?}");
}

#[tokio::test]
async fn deletion_leaves_nothing_of_the_app_and_all_of_the_others() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claimed(&fixture, &claim).await;
    let mut users = Vec::new();
    for number in 0..7 {
        users.push(register(&fixture, number).await.unwrap());
    }
    let session = open(&fixture, users[0].id).await;
    fixture
        .execute(&format!(
            "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
             VALUES ('{app}', 'https://idp.example', 'ada', '{user}', 'idp', now());
             INSERT INTO audit_events (app_id, id, at, kind) VALUES ('{app}', gen_random_uuid(), now(), 'login')",
            app = fixture.app,
            user = users[0].id,
        ))
        .await;
    let other = an_app();
    let spared = a_new_user("user0@example.com");
    fixture.stores.create_user(&other, spared.clone(), Some(a_mail(Some(spared.id)))).await.unwrap();

    assert_eq!(
        fixture.stores.delete_users(&claim, 3, || false).await.unwrap(),
        Deleting::Elsewhere,
        "taken back while Postgres was asked"
    );
    assert_eq!(fixture.stores.delete_users(&claim, 3, || true).await.unwrap(), Deleting::Some);
    let progress = fixture.stores.postgres.deletion(&claim).await.unwrap();
    assert_eq!((progress.users_left, progress.done), (4, false));
    assert_eq!(delete_all(&fixture, &claim, 3).await, 3, "the last looks, and finds nothing");
    let progress = fixture.stores.postgres.deletion(&claim).await.unwrap();
    assert_eq!((progress.users_left, progress.done), (0, true));
    for table in ["users", "identities", "outbox", "audit_events"] {
        let left = fixture.count(&format!("SELECT count(*) FROM {table} WHERE app_id = '{}'", fixture.app)).await;
        assert_eq!(left, 0, "{table}");
    }
    assert!(fixture.stores.session(&fixture.app, users[0].id, session).await.unwrap().is_none());
    assert!(fixture.stores.user(&other, spared.id).await.unwrap().is_some());
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 1);
    assert_eq!(fixture.stores.delete_users(&claim, 3, || true).await.unwrap(), Deleting::Done, "again");
}

#[tokio::test]
async fn nobody_registers_at_an_app_that_is_being_deleted() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claimed(&fixture, &claim).await;
    let user = register(&fixture, 0).await.unwrap();
    assert_eq!(fixture.stores.delete_users(&claim, 1, || true).await.unwrap(), Deleting::Some);
    let refused = register(&fixture, 1).await.unwrap_err();
    assert!(matches!(refused, StoreError::Unavailable { .. }), "{refused:?}");
    let event = an_event(EventKind::RegisteredAgain, user.id);
    let again = fixture.stores.registered_again(&fixture.app, user.id, Epoch(1), true, Some(a_mail(None)), event).await;
    assert!(matches!(again, Err(StoreError::Unavailable { .. })), "{again:?}");
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 0);
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 0);
}

#[tokio::test]
async fn who_registers_while_users_are_deleted_is_refused_or_deleted_too() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claimed(&fixture, &claim).await;
    let mut tasks = JoinSet::new();
    for number in 0..40 {
        let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
        tasks.spawn(async move {
            // What comes of it is looked at in the table.
            let _ = stores.create_user(&app, a_new_user(&format!("user{number}@example.com")), None).await;
        });
    }
    delete_all(&fixture, &claim, 3).await;
    tasks.join_all().await;
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 0);
}

#[tokio::test]
async fn several_servers_delete_together_and_end() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claimed(&fixture, &claim).await;
    for number in 0..30 {
        register(&fixture, number).await.unwrap();
    }
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let (stores, claim) = (fixture.another().await, claim.clone());
        tasks.spawn(async move {
            while stores.delete_users(&claim, 4, || true).await.unwrap() != Deleting::Done {
                tokio::task::yield_now().await;
            }
        });
    }
    timeout(LIMIT, tasks.join_all()).await.expect("it did not end");
    assert!(fixture.stores.postgres.deletion(&claim).await.unwrap().done);
}

#[tokio::test]
async fn only_the_apps_own_document_deletes_its_users() {
    let fixture = Fixture::new().await;
    claimed(&fixture, &a_claim(&fixture, "shop")).await;
    register(&fixture, 0).await.unwrap();
    let stray = a_claim(&fixture, "thief");
    assert_eq!(fixture.stores.delete_users(&stray, 9, || true).await.unwrap(), Deleting::OtherNamespace);
    let later = Claim { incarnation: Some("i0".to_owned()), ..a_claim(&fixture, "shop") };
    assert_eq!(fixture.stores.delete_users(&later, 9, || true).await.unwrap(), Deleting::OtherApp);
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 1);
    register(&fixture, 1).await.unwrap();
}

#[tokio::test]
async fn a_deletion_can_be_taken_back_before_its_end_and_not_after_it() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claimed(&fixture, &claim).await;
    for number in 0..2 {
        register(&fixture, number).await.unwrap();
    }
    assert_eq!(fixture.stores.delete_users(&claim, 1, || true).await.unwrap(), Deleting::Some);
    assert_eq!(claimed(&fixture, &a_claim(&fixture, "thief")).await, AppClaim::OtherNamespace);
    assert_eq!(claimed(&fixture, &claim).await, AppClaim::Held);
    register(&fixture, 2).await.unwrap();
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 2);

    delete_all(&fixture, &claim, 9).await;
    assert_eq!(claimed(&fixture, &claim).await, AppClaim::Deleted);
    let anew = Claim { incarnation: Some("i2".to_owned()), ..a_claim(&fixture, "heir") };
    assert_eq!(claimed(&fixture, &anew).await, AppClaim::Held);
    register(&fixture, 3).await.unwrap();
}

#[tokio::test]
async fn the_epoch_of_a_deleted_user_is_forgotten() {
    let fixture = Fixture::new().await;
    let claim = a_claim(&fixture, "shop");
    claimed(&fixture, &claim).await;
    let user = register(&fixture, 0).await.unwrap();
    let news = EpochNews { user: user.id, epoch: Epoch(5), keep: None };
    fixture.stores.raise_epoch(&fixture.app, &news, None).await.unwrap();
    delete_all(&fixture, &claim, 9).await;
    // Redis would refuse a session of an older epoch.
    open(&fixture, user.id).await;
}

async fn released(stores: &Stores, claim: &Claim) -> Releasing {
    stores.postgres.release_app(claim, || true).await.unwrap()
}

#[tokio::test]
async fn an_app_without_users_is_released_and_then_anybodys() {
    let fixture = Fixture::new().await;
    let shop = a_claim(&fixture, "shop");
    claimed(&fixture, &shop).await;
    let taken_back = fixture.stores.postgres.release_app(&shop, || false).await.unwrap();
    assert_eq!(taken_back, Releasing::Elsewhere);
    // Refusals of nobody's and mails without a reader keep nothing.
    fixture
        .execute(&format!(
            "INSERT INTO audit_events (app_id, id, at, kind) VALUES ('{app}', gen_random_uuid(), now(), 'login_failed');
             INSERT INTO outbox (app_id, kind, requested_at) VALUES ('{app}', 'confirm', now())",
            app = fixture.app
        ))
        .await;
    let mut answer = released(&fixture.stores, &shop).await;
    if answer == Releasing::Elsewhere {
        answer = released(&fixture.stores, &shop).await;
    }
    assert_eq!(answer, Releasing::Freed);
    assert_eq!(released(&fixture.stores, &shop).await, Releasing::Freed, "again");
    super::assert_unavailable(register(&fixture, 0).await.map(drop));
    for table in ["users", "outbox", "audit_events"] {
        assert_eq!(fixture.count(&format!("SELECT count(*) FROM {table}")).await, 0, "{table}");
    }
    let thief = Claim { incarnation: Some("i2".to_owned()), ..a_claim(&fixture, "thief") };
    assert_eq!(claimed(&fixture, &thief).await, AppClaim::Held);
    register(&fixture, 1).await.unwrap();
    assert_eq!(claimed(&fixture, &shop).await, AppClaim::OtherNamespace);
    assert_eq!(released(&fixture.stores, &shop).await, Releasing::OtherNamespace);
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 1);
}

#[tokio::test]
async fn an_app_with_a_user_or_what_one_did_stays_reserved() {
    let fixture = Fixture::new().await;
    let shop = a_claim(&fixture, "shop");
    claimed(&fixture, &shop).await;
    let user = register(&fixture, 0).await.unwrap();
    assert_eq!(released(&fixture.stores, &shop).await, Releasing::Reserved { users: 1 });
    assert!(fixture.stores.user(&fixture.app, user.id).await.unwrap().is_some());
    register(&fixture, 1).await.expect("it is served as before");
    fixture.execute("DELETE FROM users").await;
    let events = fixture.count("SELECT count(*) FROM audit_events WHERE user_id IS NOT NULL").await;
    assert!(events > 0);
    assert_eq!(released(&fixture.stores, &shop).await, Releasing::Reserved { users: 1 });
    assert_eq!(fixture.count("SELECT count(*) FROM audit_events WHERE user_id IS NOT NULL").await, events);
    assert_eq!(claimed(&fixture, &a_claim(&fixture, "thief")).await, AppClaim::OtherNamespace);
}

#[tokio::test]
async fn an_old_document_releases_nothing_of_an_app_that_was_made_anew() {
    let fixture = Fixture::new().await;
    let before = a_claim(&fixture, "shop");
    let again = Claim { handover: 1, ..before.clone() };
    claimed(&fixture, &before).await;
    claimed(&fixture, &again).await;
    assert_eq!(released(&fixture.stores, &before).await, Releasing::OtherApp, "a server that is behind");
    register(&fixture, 0).await.unwrap();
    fixture.execute("DELETE FROM users; DELETE FROM outbox; DELETE FROM audit_events").await;

    // In the other order the App that was made anew gets the appID back.
    assert_eq!(released(&fixture.stores, &again).await, Releasing::Freed);
    let next = Claim { handover: 2, ..before.clone() };
    assert_eq!(claimed(&fixture, &next).await, AppClaim::Held);
    for stale in [&before, &again] {
        assert_eq!(released(&fixture.stores, stale).await, Releasing::OtherApp);
    }
    register(&fixture, 1).await.unwrap();
    fixture.execute("DELETE FROM users; DELETE FROM outbox; DELETE FROM audit_events").await;
    let other_keys = Claim { incarnation: Some("i0".to_owned()), handover: 9, ..before };
    assert_eq!(released(&fixture.stores, &other_keys).await, Releasing::OtherApp);
}

#[tokio::test]
async fn a_late_document_of_the_former_namespace_does_not_take_an_app_id_that_was_freed() {
    let fixture = Fixture::new().await;
    let former = Claim { handover: 3, ..a_claim(&fixture, "shop") };
    assert_eq!(claimed(&fixture, &former).await, AppClaim::Held);
    assert_eq!(released(&fixture.stores, &former).await, Releasing::Freed);
    let next = Claim { incarnation: Some("i2".to_owned()), ..a_claim(&fixture, "next") };
    assert_eq!(claimed(&fixture, &next).await, AppClaim::Held);
    let later = Claim { handover: 29_000_000, ..former.clone() };
    let unknown = Claim { incarnation: None, ..former.clone() };
    for users in 0..2 {
        for late in [&former, &later, &unknown] {
            assert_eq!(claimed(&fixture, late).await, AppClaim::OtherNamespace, "{late:?}");
            let deleting = fixture.stores.delete_users(late, 9, || true).await.unwrap();
            assert_eq!(deleting, Deleting::OtherNamespace, "{late:?}");
            assert_eq!(released(&fixture.stores, late).await, Releasing::OtherNamespace, "{late:?}");
        }
        assert_eq!(claimed(&fixture, &next).await, AppClaim::Held);
        register(&fixture, users).await.unwrap();
    }
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 2);

    // The platform team can still hand it over: the keys stay, and are counted from where they began.
    let heir = Claim { namespace: "heir".to_owned(), handover: 1, ..next.clone() };
    assert_eq!(claimed(&fixture, &heir).await, AppClaim::Held);
    assert_eq!(claimed(&fixture, &next).await, AppClaim::OtherNamespace);
    assert_eq!(claimed(&fixture, &later).await, AppClaim::OtherNamespace);
}

#[tokio::test]
async fn a_handover_and_other_keys_count_only_one_after_the_other() {
    let fixture = Fixture::new().await;
    let shop = a_claim(&fixture, "shop");
    assert_eq!(claimed(&fixture, &shop).await, AppClaim::Held);
    let heir = Claim { namespace: "heir".to_owned(), handover: 1, ..shop.clone() };
    let anew = Claim { incarnation: Some("i2".to_owned()), handover: 29_000_000, ..heir.clone() };
    assert_eq!(claimed(&fixture, &anew).await, AppClaim::OtherNamespace);
    // One after the other.
    assert_eq!(claimed(&fixture, &heir).await, AppClaim::Held);
    assert_eq!(claimed(&fixture, &anew).await, AppClaim::Held);
}

#[tokio::test]
async fn an_empty_database_frees_nothing_and_gets_no_row() {
    let fixture = Fixture::new().await;
    let shop = a_claim(&fixture, "shop");
    for _ in 0..2 {
        assert_eq!(released(&fixture.stores, &shop).await, Releasing::Reserved { users: 1 });
        assert_eq!(fixture.count("SELECT count(*) FROM apps").await, 0);
    }
    assert_eq!(claimed(&fixture, &shop).await, AppClaim::Held);
    register(&fixture, 0).await.unwrap();
}

#[tokio::test]
async fn a_registration_and_a_release_at_once_never_leave_a_user_in_a_free_app() {
    let fixture = Fixture::new().await;
    let stores = [fixture.another().await, fixture.another().await];
    for round in 0..60 {
        let claim = Claim { app: an_app(), ..a_claim(&fixture, "shop") };
        fixture.stores.postgres.claim_apps(std::slice::from_ref(&claim)).await.unwrap();
        let mut tasks = JoinSet::new();
        for number in 0..3 {
            let (stores, app) = (fixture.stores.clone(), claim.app.clone());
            tasks.spawn(async move {
                // So that either may come first.
                for _ in 0..round * 3 {
                    tokio::task::yield_now().await;
                }
                // What comes of it is looked at in the table.
                let _ = stores.create_user(&app, a_new_user(&format!("user{number}@example.com")), None).await;
            });
        }
        for stores in &stores {
            let (stores, claim) = (stores.clone(), claim.clone());
            tasks.spawn(async move {
                while released(&stores, &claim).await == Releasing::Elsewhere {
                    tokio::task::yield_now().await;
                }
            });
        }
        timeout(LIMIT, tasks.join_all()).await.expect("it did not end");
        let users = fixture.count(&format!("SELECT count(*) FROM users WHERE app_id = '{}'", claim.app)).await;
        let thief = Claim { incarnation: Some("i2".to_owned()), namespace: "thief".to_owned(), ..claim };
        let answers = fixture.stores.postgres.claim_apps(&[thief]).await.unwrap();
        match answers[..] {
            [AppClaim::Held] => assert_eq!(users, 0, "another namespace has them now"),
            [AppClaim::OtherNamespace] => assert!(users > 0, "nobody is there for whom it is reserved"),
            ref other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn every_server_reports_whether_an_app_that_is_gone_has_users_and_deletes_none() {
    let fixture = Fixture::new().await;
    claimed(&fixture, &a_claim(&fixture, "shop")).await;
    register(&fixture, 0).await.unwrap();
    let mut document: DeletedApp = std::str::from_utf8(&a_deleted(&fixture)).unwrap().parse().unwrap();
    document.state = AppState::Released;
    let document = document.to_bytes();
    let mut servers = Vec::new();
    for _ in 0..2 {
        let apps = Arc::new(Apps::default());
        apps.put(&fixture.app, &document);
        let changes = apps.changes();
        tokio::spawn(deletion::run(Arc::clone(&apps), fixture.another().await, watch::Sender::new(true).subscribe()));
        servers.push((apps, changes));
    }
    for (_, changes) in &mut servers {
        let told = until(changes, |change| change.deletion.is_some()).await;
        assert_eq!(told.deletion, Some(Deletion { users_left: 1, done: false }));
        assert_eq!(told.revision, Some(Revision::of(&document)));
    }
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 1);
    fixture.execute("DELETE FROM users; DELETE FROM outbox; DELETE FROM audit_events").await;
    for (_, changes) in &mut servers {
        let told = until(changes, |change| change.deletion.is_some_and(|deletion| deletion.done)).await;
        assert_eq!(told.deletion, Some(Deletion { users_left: 0, done: true }));
    }
}

fn serving(fixture: &Fixture) -> Arc<Apps> {
    let apps = Apps::default();
    let mut doc = super::codes::loaded(fixture).doc;
    doc.incarnation = Some("i2".to_owned());
    apps.put(&fixture.app, &doc.to_bytes());
    assert!(apps.get(fixture.app.as_str()).is_some());
    Arc::new(apps)
}

fn a_witness(apps: &Arc<Apps>, stores: &Stores) -> AbortHandle {
    let witness = Witness::new(Arc::clone(apps), stores.postgres.clone());
    tokio::spawn(witness.run(watch::Sender::new(true).subscribe())).abort_handle()
}

async fn until(changes: &mut broadcast::Receiver<Change>, fits: impl Fn(&Change) -> bool) -> Change {
    let fitting = async {
        loop {
            let told = changes.recv().await.unwrap();
            if fits(&told) {
                return told;
            }
        }
    };
    timeout(LIMIT, fitting).await.expect("the change was not told in time")
}

fn a_deleted(fixture: &Fixture) -> Vec<u8> {
    let doc = DeletedApp {
        format: FORMAT,
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
async fn an_app_of_another_namespace_is_withheld_until_the_users_of_the_first_are_gone() {
    let fixture = Fixture::new().await;
    let holder = a_claim(&fixture, "holder");
    claimed(&fixture, &holder).await;
    let apps = serving(&fixture);
    let mut changes = apps.changes();
    let _witness = a_witness(&apps, &fixture.stores);
    let told = until(&mut changes, |_| true).await;
    assert!(told.revision.is_none() && told.refused.is_some(), "{told:?}");
    assert!(apps.get(fixture.app.as_str()).is_none());
    delete_all(&fixture, &holder, 9).await;
    let told = until(&mut changes, |change| change.revision.is_some()).await;
    assert_eq!(told.refused, None);
    assert!(apps.get(fixture.app.as_str()).is_some());
}

#[tokio::test]
async fn an_app_with_other_keys_than_its_users_have_is_withheld_and_told_as_such() {
    let fixture = Fixture::new().await;
    let namespace = super::codes::loaded(&fixture).doc.namespace;
    claimed(&fixture, &a_claim(&fixture, &namespace)).await;
    register(&fixture, 0).await.unwrap();
    let apps = serving(&fixture);
    let mut changes = apps.changes();
    let _witness = a_witness(&apps, &fixture.stores);
    let told = until(&mut changes, |_| true).await;
    assert!(told.revision.is_none() && told.refused.as_ref().is_some_and(|refused| refused.keys_lost), "{told:?}");
    assert!(apps.subscribe(String::new()).0.refused[&fixture.app].keys_lost);
    assert!(apps.get(fixture.app.as_str()).is_none());

    let mut anew = super::codes::loaded(&fixture).doc;
    (anew.incarnation, anew.handover) = (Some("i2".to_owned()), Some(29_000_000));
    apps.put(&fixture.app, &anew.to_bytes());
    let told = until(&mut changes, |change| change.revision.is_some()).await;
    assert_eq!(told.refused, None);
    let first = a_claim(&fixture, &namespace);
    eventually("the database knows the new keys", LIMIT, || async {
        (claimed(&fixture, &first).await == AppClaim::KeysLost).then_some(())
    })
    .await;
}

#[tokio::test]
async fn with_postgres_away_an_app_is_served_and_asked_for_later() {
    let fixture = Fixture::new().await;
    claimed(&fixture, &a_claim(&fixture, "holder")).await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    proxy.refuse().await;
    let stores = super::faults::through(&fixture, &proxy);
    super::assert_unavailable(stores.postgres.claim_apps(&[a_claim(&fixture, "shop")]).await);
    let apps = serving(&fixture);
    let mut changes = apps.changes();
    let _witness = a_witness(&apps, &stores);
    tokio::task::yield_now().await;
    assert!(changes.try_recv().is_err() && apps.get(fixture.app.as_str()).is_some());
    proxy.restore().unwrap();
    assert!(until(&mut changes, |_| true).await.refused.is_some());
}

#[tokio::test]
async fn every_server_tells_how_far_a_deletion_is_until_it_is_done() {
    let fixture = Fixture::new().await;
    claimed(&fixture, &a_claim(&fixture, "shop")).await;
    for number in 0..3 {
        register(&fixture, number).await.unwrap();
    }
    let document = a_deleted(&fixture);
    let current = watch::Sender::new(false);
    let mut servers = Vec::new();
    for _ in 0..2 {
        let apps = Arc::new(Apps::default());
        apps.put(&fixture.app, &document);
        let changes = apps.changes();
        tokio::spawn(deletion::run(Arc::clone(&apps), fixture.another().await, current.subscribe()));
        servers.push((apps, changes));
    }
    tokio::task::yield_now().await;
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 3, "not before the whole set was read");
    current.send_replace(true);
    for (apps, mut changes) in servers {
        let told = until(&mut changes, |change| change.deletion.is_some_and(|deletion| deletion.done)).await;
        assert_eq!(told.revision, Some(Revision::of(&document)));
        let (hello, _) = apps.subscribe(String::new());
        assert_eq!(hello.deletions.get(&fixture.app), Some(&Deletion { users_left: 0, done: true }));
    }
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 0);
}

#[tokio::test]
async fn a_deletion_that_the_database_refuses_is_told() {
    let fixture = Fixture::new().await;
    claimed(&fixture, &a_claim(&fixture, "holder")).await;
    register(&fixture, 0).await.unwrap();
    let apps = Arc::new(Apps::default());
    apps.put(&fixture.app, &a_deleted(&fixture));
    let mut changes = apps.changes();
    let current = watch::Sender::new(true);
    tokio::spawn(deletion::run(Arc::clone(&apps), fixture.stores.clone(), current.subscribe()));
    assert!(until(&mut changes, |_| true).await.refused.is_some());
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 1);
}
