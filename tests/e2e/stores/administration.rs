//! What administrators do with users: lists, changes, imports, exports, events and dead letters.

use std::sync::Arc;

use std::time::Duration;

use latchkey_server::domain::{
    administration::{AdminUser, CreatedBy, ExternalId, Metadata},
    audit::{Detail, Event, EventKind, ImportCounts},
    mail::MailKind,
    password::PasswordHash,
    ports::{
        ClaimedRow, NewAdministeredIdentity, NewAdministeredUser, Outbox, OutboxTask, UserAdministration, UserChange,
        UserFilter, UserPage, UserPosition,
    },
    user::{Name, UserId},
};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{Fixture, REQUESTED_AT, a_user_id, an_email};

mod changes;
mod create;
mod imports;
mod lists;
mod logs;
mod query_plans;

const CHANGED_AT: time::OffsetDateTime = time::macros::datetime!(2026-03-04 06:00:00 UTC);
const AUTHORITY: &str = "https://idp.example";

fn a_new_user(email: &str) -> NewAdministeredUser {
    NewAdministeredUser {
        id: a_user_id(),
        external_id: None,
        email: Some(an_email(email)),
        email_verified: true,
        name: Some(Name::parse("Ada Lovelace").unwrap()),
        disabled: false,
        password_hash: Some(PasswordHash::new("$argon2id$first")),
        foreign_class: None,
        metadata: None,
        identities: Vec::new(),
        created_by: CreatedBy::Administrator,
        created_at: REQUESTED_AT,
    }
}

fn an_identity(subject: &str) -> NewAdministeredIdentity {
    NewAdministeredIdentity {
        provider: "idp".parse().unwrap(),
        authority: AUTHORITY.to_owned(),
        subject: subject.to_owned(),
    }
}

fn an_external_id(text: &str) -> ExternalId {
    ExternalId::parse(text).unwrap()
}

fn metadata(value: Value) -> Metadata {
    let Value::Object(object) = value else { panic!("an object") };
    Metadata::new(object).unwrap()
}

fn an_event(kind: EventKind, user: impl Into<Option<UserId>>) -> Event {
    Event {
        id: Uuid::from_u128(rand::random()),
        kind,
        user: user.into(),
        session: None,
        ip: None,
        at: CHANGED_AT,
        detail: Detail::default(),
        webhooks: Arc::default(),
    }
}

fn an_import_event() -> Event {
    let counts = ImportCounts { source: "keycloak".to_owned(), created: 0, unchanged: 0, refused: 0 };
    let detail = Detail { import: Some(counts), ..Detail::default() };
    an_event(EventKind::UsersImported, None).with_detail(detail)
}

/// Returns a change that changes no field. Tests add the fields to change.
fn a_change(user: UserId) -> UserChange {
    UserChange {
        user,
        if_version: None,
        name: None,
        email: None,
        email_verified: None,
        disabled: None,
        metadata: None,
        external_id: None,
        at: CHANGED_AT,
        event: an_event(EventKind::UserChanged, user),
    }
}

async fn create(fixture: &Fixture, user: NewAdministeredUser) -> AdminUser {
    let event = an_event(EventKind::UserCreated, user.id);
    fixture.stores.create_administered_user(&fixture.app, user, None, event).await.unwrap().unwrap()
}

async fn read(fixture: &Fixture, user: UserId) -> AdminUser {
    fixture.stores.administered_user(&fixture.app, user).await.unwrap().expect("the user exists")
}

/// Returns all users that match a filter, fetched page by page.
async fn all_pages(fixture: &Fixture, filter: &UserFilter, limit: u16) -> Vec<AdminUser> {
    let (mut users, mut after) = (Vec::new(), None::<UserPosition>);
    loop {
        let page = fixture.stores.users(&fixture.app, filter, after.as_ref(), limit).await.unwrap();
        let UserPage { users: page, next } = page;
        assert!(page.len() <= usize::from(limit));
        assert!(next.is_none() || page.len() == usize::from(limit), "only the last page is shorter");
        users.extend(page);
        match next {
            Some(next) => after = Some(next),
            None => return users,
        }
    }
}

/// The kinds of the outbox rows, sorted. Claims all rows, also those that are not due yet.
async fn outbox_kinds(fixture: &Fixture) -> Vec<&'static str> {
    fixture.execute("UPDATE outbox SET due_at = now() - interval '1 s', lease_until = NULL").await;
    let rows: Vec<ClaimedRow> = fixture.stores.claim(100, 100, Duration::from_secs(60)).await.unwrap();
    let kind = |row: &ClaimedRow| match &row.task {
        OutboxTask::Mail(mail) => mail.kind.as_str(),
        OutboxTask::MailToFormerAddress(mail, _) => {
            assert_eq!(mail.kind, MailKind::AddressChanged);
            "to-former"
        }
        OutboxTask::PropagateEpoch(_) => "epoch",
        OutboxTask::PropagateProfile(_) => "profile",
        OutboxTask::PropagateGroups(_) => "groups",
    };
    let mut kinds: Vec<_> = rows.iter().map(kind).collect();
    kinds.sort_unstable();
    kinds
}

/// The kind and the detail of each event of the App, the oldest first.
async fn events(fixture: &Fixture) -> Vec<(String, Value)> {
    let mut connection = fixture.database.connect().await.unwrap();
    let rows: Vec<(String, Option<Value>)> =
        sqlx::query_as("SELECT kind, detail FROM audit_events WHERE app_id = $1 ORDER BY at, id")
            .bind(fixture.app.as_str())
            .fetch_all(&mut connection)
            .await
            .unwrap();
    rows.into_iter().map(|(kind, detail)| (kind, detail.unwrap_or(json!(null)))).collect()
}

/// Returns a checksum of all users, identities, outbox rows and audit events of all Apps. Equal checksums show that
/// nothing has changed.
async fn digest(fixture: &Fixture) -> i64 {
    fixture
        .count(
            "SELECT (SELECT coalesce(sum(hashtext(users::text)), 0) FROM users)
                + (SELECT coalesce(sum(hashtext(identities::text)), 0) FROM identities)
                + (SELECT coalesce(sum(hashtext(outbox::text)), 0) FROM outbox)
                + (SELECT coalesce(sum(hashtext(audit_events::text)), 0) FROM audit_events)",
        )
        .await
}

/// Claims the App and begins the deletion of its users.
async fn start_app_deletion(fixture: &Fixture) {
    fixture
        .execute(&format!(
            "INSERT INTO apps (app_id, namespace, state) VALUES ('{0}', 'shop', 'deleting')
             ON CONFLICT (app_id) DO UPDATE SET state = 'deleting'",
            fixture.app
        ))
        .await;
}
