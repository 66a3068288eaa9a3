//! Changes a user: writes only the fields that differ.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use super::{
    conflicts::{MAX_ATTEMPTS, UniqueValues, find_conflict, values_contended},
    read::{DetailedUser, read_user},
};
use crate::{
    domain::{
        administration::AdminUser,
        audit::{Detail, Event, EventKind},
        mail::{EpochChange, Mail, MailKind},
        ports::{ChangeOutcome, ChangedByAdministrator, StoreError, UserChange, UserConflict},
        user::{Epoch, Name},
    },
    store::postgres::{PostgresStore, audit, outbox},
};

/// The user before the change. The transaction has locked the row.
struct Before {
    email: Option<String>,
    email_canonical: Option<String>,
    email_verified_at: Option<OffsetDateTime>,
    name: String,
    contested: bool,
    disabled_at: Option<OffsetDateTime>,
    external_id: Option<String>,
    version: i64,
    /// Whether the stored metadata differ from the metadata in the change. Postgres makes the comparison, because it
    /// does not store numbers in the form in which they were sent.
    has_other_metadata: bool,
}

/// The user after the change, and the differences.
struct Difference<'a> {
    email: Option<&'a str>,
    email_canonical: Option<&'a str>,
    email_verified_at: Option<OffsetDateTime>,
    name: &'a str,
    disabled_at: Option<OffsetDateTime>,
    external_id: Option<&'a str>,
    /// Whether the change sets another email address. An address that differs only in case is the same address.
    has_new_address: bool,
    /// Whether a contested account (its email address was registered again with another password) becomes verified. If
    /// so, its password is removed, because somebody else may have set it.
    ends_contest: bool,
    raises_epoch: bool,
    changes_profile: bool,
    changes_metadata: bool,
    event_kind: EventKind,
    /// The names of the fields that differ.
    fields: Vec<&'static str>,
}

struct Changed {
    user: DetailedUser,
    epoch_change: Option<EpochChange>,
    profile_row: Option<Uuid>,
}

enum Outcome {
    Changed(Box<Changed>),
    Unchanged(Box<DetailedUser>),
    NotFound,
    VersionConflict,
    NoAddress,
    Conflict(UserConflict),
    /// Another request took a value after this transaction had found no owner of the value. The next attempt sees the
    /// new owner.
    Contended,
}

impl PostgresStore {
    pub(super) async fn change_administered_user(
        &self,
        app: &AppId,
        change: UserChange,
    ) -> Result<ChangeOutcome, StoreError> {
        let record_error = |error| self.record_error(error);
        for _ in 0..MAX_ATTEMPTS {
            let mut call = self.begin_administration("change_user").await?;
            let (connection, deadline) = call.parts();
            let outcome = timeout_at(deadline, change_user(connection, app, &change, self.should_notify())).await;
            return Ok(match call.end_call(outcome)? {
                Outcome::Changed(changed) => {
                    self.notify_deliverer();
                    let Changed { user, epoch_change, profile_row } = *changed;
                    let user = AdminUser::try_from(user).map_err(record_error)?;
                    ChangeOutcome::Changed(Box::new(ChangedByAdministrator { user, epoch_change, profile_row }))
                }
                Outcome::Unchanged(user) => {
                    ChangeOutcome::Unchanged(Box::new(AdminUser::try_from(*user).map_err(record_error)?))
                }
                Outcome::NotFound => ChangeOutcome::NotFound,
                Outcome::VersionConflict => ChangeOutcome::VersionConflict,
                Outcome::NoAddress => ChangeOutcome::NoAddress,
                Outcome::Conflict(conflict) => ChangeOutcome::Conflict(conflict),
                Outcome::Contended => continue,
            });
        }
        Err(values_contended())
    }
}

async fn change_user(
    connection: &mut PgConnection,
    app: &AppId,
    change: &UserChange,
    notify: bool,
) -> Result<Outcome, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let outcome = change_in_transaction(&mut transaction, app, change, notify).await?;
    if matches!(outcome, Outcome::Changed(_)) {
        transaction.commit().await?;
    } else {
        transaction.rollback().await?;
    }
    Ok(outcome)
}

async fn change_in_transaction(
    connection: &mut PgConnection,
    app: &AppId,
    change: &UserChange,
    notify: bool,
) -> Result<Outcome, sqlx::Error> {
    let Some(before) = lock(connection, app, change).await? else { return Ok(Outcome::NotFound) };
    if change.if_version.is_some_and(|version| version.0 != before.version) {
        return Ok(Outcome::VersionConflict);
    }
    if change.email_verified == Some(true) && change.email.is_none() && before.email.is_none() {
        return Ok(Outcome::NoAddress);
    }
    let difference = before.difference(change);
    if difference.fields.is_empty() {
        let user = read_user(connection, app, change.user).await?;
        return Ok(user.map_or(Outcome::NotFound, |user| Outcome::Unchanged(Box::new(user))));
    }
    // Conflicts are looked up before a unique index can reject the change. So two users who want each other's address
    // do not wait for each other, and Postgres logs no error.
    let values = UniqueValues {
        user: change.user,
        external_id: difference.external_id,
        email: difference.email_canonical,
        identities: &[],
    };
    if let Some(conflict) = find_conflict(connection, app, &values).await? {
        return Ok(Outcome::Conflict(conflict));
    }
    let epoch = match update(connection, app, change, &difference).await {
        Ok(epoch) => Epoch(epoch),
        Err(sqlx::Error::Database(error)) if error.is_unique_violation() => return Ok(Outcome::Contended),
        Err(error) => return Err(error),
    };
    if let Some(former) = before.email.as_deref().filter(|_| difference.has_new_address)
        && before.email_verified_at.is_some()
    {
        let notice = Mail { kind: MailKind::AddressChanged, recipient: Some(change.user), requested_at: change.at };
        outbox::insert_mail_to_former_address(connection, app, &notice, former, notify).await?;
    }
    let (mut epoch_change, mut profile_row) = (None, None);
    if difference.raises_epoch {
        let raised = EpochChange { user: change.user, epoch, kept_session: None };
        outbox::insert_epoch_change(connection, app, &raised).await?;
        epoch_change = Some(raised);
    } else if difference.changes_profile {
        profile_row = Some(outbox::insert_profile_change(connection, app, change.user).await?);
    }
    let detail = Detail { fields: difference.fields, ..change.event.detail.clone() };
    let event = Event { kind: difference.event_kind, detail, ..change.event.clone() };
    audit::insert(connection, app, &event, notify).await?;
    let user = read_user(connection, app, change.user).await?.ok_or(sqlx::Error::RowNotFound)?;
    Ok(Outcome::Changed(Box::new(Changed { user, epoch_change, profile_row })))
}

async fn lock(connection: &mut PgConnection, app: &AppId, change: &UserChange) -> Result<Option<Before>, sqlx::Error> {
    sqlx::query_as!(
        Before,
        r#"
        SELECT email, email_canonical, email_verified_at, name, contested, disabled_at, external_id, version,
            metadata IS DISTINCT FROM $3::text::jsonb AS "has_other_metadata!"
        FROM users WHERE app_id = $1 AND id = $2
        FOR UPDATE
        "#,
        app.as_str(),
        change.user.0,
        changed_metadata(change),
    )
    .fetch_optional(connection)
    .await
}

/// Writes the change. Returns the epoch of the user after the change.
async fn update(
    connection: &mut PgConnection,
    app: &AppId,
    change: &UserChange,
    difference: &Difference<'_>,
) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar!(
        "UPDATE users
         SET email = $3,
            email_canonical = $4,
            email_verified_at = $5,
            pending_email = CASE WHEN $6 THEN NULL ELSE pending_email END,
            pending_email_canonical = CASE WHEN $6 THEN NULL ELSE pending_email_canonical END,
            name = $7,
            disabled_at = $8,
            external_id = $9,
            metadata = CASE WHEN $10 THEN $11::text::jsonb ELSE metadata END,
            password_hash = CASE WHEN $12 THEN NULL ELSE password_hash END,
            foreign_hash = CASE WHEN $12 THEN NULL ELSE foreign_hash END,
            foreign_hash_at = CASE WHEN $12 THEN NULL ELSE foreign_hash_at END,
            password_session = CASE WHEN $12 THEN NULL ELSE password_session END,
            contested = contested AND NOT $12,
            epoch = epoch + CASE WHEN $13 THEN 1 ELSE 0 END,
            version = version + 1,
            updated_at = $14
         WHERE app_id = $1 AND id = $2
         RETURNING epoch",
        app.as_str(),
        change.user.0,
        difference.email,
        difference.email_canonical,
        difference.email_verified_at,
        difference.has_new_address,
        difference.name,
        difference.disabled_at,
        difference.external_id,
        difference.changes_metadata,
        changed_metadata(change),
        difference.ends_contest,
        difference.raises_epoch,
        change.at,
    )
    .fetch_one(connection)
    .await
}

/// Returns the metadata after the change. The result has no meaning if the change leaves the metadata as they are.
fn changed_metadata(change: &UserChange) -> Option<&str> {
    let metadata = change.metadata.as_ref().and_then(Option::as_ref);
    metadata.map(|metadata| metadata.as_json().get())
}

// === impl Before ===

impl Before {
    fn difference<'a>(&'a self, change: &'a UserChange) -> Difference<'a> {
        let (email, email_canonical) = match &change.email {
            Some(email) => (Some(email.as_str()), Some(email.canonical())),
            None => (self.email.as_deref(), self.email_canonical.as_deref()),
        };
        let has_new_address = email_canonical != self.email_canonical.as_deref();
        let was_verified = self.email_verified_at.is_some();
        // A new address is unverified, unless the change says otherwise.
        let is_verified = change.email_verified.unwrap_or(was_verified && !has_new_address) && email.is_some();
        let verified_earlier = self.email_verified_at.filter(|_| !has_new_address);
        let email_verified_at = verified_earlier.or(Some(change.at)).filter(|_| is_verified);
        let name = match &change.name {
            Some(name) => name.as_ref().map_or("", Name::as_str),
            None => self.name.as_str(),
        };
        let is_disabled = change.disabled.unwrap_or(self.disabled_at.is_some());
        let disabled_at = self.disabled_at.or(Some(change.at)).filter(|_| is_disabled);
        let external_id = match &change.external_id {
            Some(external_id) => external_id.as_ref().map(|external_id| external_id.as_str()),
            None => self.external_id.as_deref(),
        };
        let changes_disabled = is_disabled != self.disabled_at.is_some();
        let changes_metadata = change.metadata.is_some() && self.has_other_metadata;
        let changes = [
            ("name", name != self.name),
            ("email", email != self.email.as_deref()),
            ("email_verified", is_verified != was_verified),
            ("disabled", changes_disabled),
            ("metadata", changes_metadata),
            ("external_id", external_id != self.external_id.as_deref()),
        ];
        let fields: Vec<_> = changes.into_iter().filter(|(_, differs)| *differs).map(|(field, _)| field).collect();
        Difference {
            email,
            email_canonical,
            email_verified_at,
            name,
            disabled_at,
            external_id,
            has_new_address,
            ends_contest: self.contested && is_verified,
            raises_epoch: has_new_address || is_verified != was_verified || (changes_disabled && is_disabled),
            changes_profile: fields.contains(&"name") || fields.contains(&"email"),
            changes_metadata,
            event_kind: match (changes_disabled, is_disabled) {
                (true, true) => EventKind::UserDisabled,
                (true, false) => EventKind::UserEnabled,
                (false, _) => EventKind::UserChanged,
            },
            fields,
        }
    }
}
