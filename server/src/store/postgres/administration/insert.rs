//! Inserts users and their identities, with one statement for each table.

use std::collections::BTreeMap;

use latchkey_crds::types::AppId;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::{ports::NewAdministeredUser, user::Name};

/// The columns of several users, one array for each column, for UNNEST.
#[derive(Default)]
struct UserColumns {
    ids: Vec<Uuid>,
    external_ids: Vec<Option<String>>,
    emails: Vec<Option<String>>,
    canonical_emails: Vec<Option<String>>,
    are_verified: Vec<bool>,
    names: Vec<String>,
    are_disabled: Vec<bool>,
    password_hashes: Vec<Option<String>>,
    /// The classes (kind and cost) of the users' foreign hashes.
    hash_classes: Vec<Option<String>>,
    metadata: Vec<Option<String>>,
    created_by: Vec<String>,
    creation_times: Vec<OffsetDateTime>,
}

/// The columns of several identities, one array for each column, for UNNEST.
#[derive(Default)]
struct IdentityColumns {
    users: Vec<Uuid>,
    providers: Vec<String>,
    authorities: Vec<String>,
    subjects: Vec<String>,
}

/// Inserts the users. Skips each user with a unique value that another user already has. Returns whether all users were
/// inserted.
pub(super) async fn insert_users(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[&NewAdministeredUser],
    at: OffsetDateTime,
) -> Result<bool, sqlx::Error> {
    let mut columns = UserColumns::default();
    users.iter().for_each(|user| columns.push(user));
    let inserted = sqlx::query!(
        r#"
        INSERT INTO users
            (app_id, id, external_id, email, email_canonical, email_verified_at, name, disabled_at, password_hash,
                metadata, created_by, created_at, updated_at, foreign_hash, foreign_hash_at)
        SELECT $1, id, external_id, email, email_canonical, CASE WHEN is_verified THEN $13::timestamptz END, name,
            CASE WHEN is_disabled THEN $13::timestamptz END, password_hash, metadata::jsonb, created_by, created_at, $13,
            hash_class, CASE WHEN hash_class IS NOT NULL THEN $13::timestamptz END
        FROM unnest(
            $2::uuid[], $3::text[], $4::text[], $5::text[], $6::boolean[], $7::text[], $8::boolean[], $9::text[],
            $10::text[], $11::text[], $12::timestamptz[], $14::text[]
        ) AS new (
            id, external_id, email, email_canonical, is_verified, name, is_disabled, password_hash, metadata, created_by,
            created_at, hash_class
        )
        ON CONFLICT DO NOTHING
        "#,
        app.as_str(),
        &columns.ids,
        &columns.external_ids as &[Option<String>],
        &columns.emails as &[Option<String>],
        &columns.canonical_emails as &[Option<String>],
        &columns.are_verified,
        &columns.names,
        &columns.are_disabled,
        &columns.password_hashes as &[Option<String>],
        &columns.metadata as &[Option<String>],
        &columns.created_by,
        &columns.creation_times,
        at,
        &columns.hash_classes as &[Option<String>],
    )
    .execute(connection)
    .await?;
    Ok(inserted.rows_affected() == users.len() as u64)
}

/// Links the identities of the users. Returns `false` if at least one identity is linked to another user. The
/// identities are inserted in a fixed order, so that two transactions do not deadlock.
pub(super) async fn insert_identities(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[&NewAdministeredUser],
    at: OffsetDateTime,
) -> Result<bool, sqlx::Error> {
    let mut links = BTreeMap::new();
    for user in users {
        for identity in &user.identities {
            let key = (identity.authority.as_str(), identity.subject.as_str());
            links.entry(key).or_insert((user.id.0, identity.provider.as_str()));
        }
    }
    if links.is_empty() {
        return Ok(true);
    }
    let mut columns = IdentityColumns::default();
    for ((authority, subject), (user, provider)) in &links {
        columns.users.push(*user);
        columns.providers.push((*provider).to_owned());
        columns.authorities.push((*authority).to_owned());
        columns.subjects.push((*subject).to_owned());
    }
    let inserted = sqlx::query!(
        "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
         SELECT $1, authority, subject, user_id, provider, $6
         FROM unnest($2::text[], $3::text[], $4::uuid[], $5::text[]) AS new (authority, subject, user_id, provider)
         ON CONFLICT DO NOTHING",
        app.as_str(),
        &columns.authorities,
        &columns.subjects,
        &columns.users,
        &columns.providers,
        at,
    )
    .execute(connection)
    .await?;
    Ok(inserted.rows_affected() == links.len() as u64)
}

// === impl UserColumns ===

impl UserColumns {
    fn push(&mut self, user: &NewAdministeredUser) {
        self.ids.push(user.id.0);
        self.external_ids.push(user.external_id.as_ref().map(|external_id| external_id.as_str().to_owned()));
        self.emails.push(user.email.as_ref().map(|email| email.as_str().to_owned()));
        self.canonical_emails.push(user.email.as_ref().map(|email| email.canonical().to_owned()));
        self.are_verified.push(user.email_verified && user.email.is_some());
        self.names.push(user.name.as_ref().map_or("", Name::as_str).to_owned());
        self.are_disabled.push(user.disabled);
        self.password_hashes.push(user.password_hash.as_ref().map(|hash| hash.expose().to_owned()));
        self.hash_classes.push(user.foreign_class.map(|class| class.to_string()));
        self.metadata.push(user.metadata.as_ref().map(|metadata| metadata.as_json().get().to_owned()));
        self.created_by.push(user.created_by.as_str().to_owned());
        self.creation_times.push(user.created_at);
    }
}
