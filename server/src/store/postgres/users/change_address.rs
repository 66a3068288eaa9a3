//! Makes the pending email address the user's current email address.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;
use uuid::Uuid;

use super::{LockedUser, UserRow, lock_user, user_query};
use crate::{
    domain::{
        audit::{Detail, EventKind},
        mail::{EpochChange, Mail, MailKind},
        ports::{AddressChange, AddressChanged, StoreError},
        user::{Epoch, User, UserId},
    },
    store::postgres::{
        PostgresStore,
        audit::{self, BatchEvent},
        outbox,
    },
};

/// Maximum number of attempts. Each attempt sees the changes that made the previous attempt fail, so two attempts are
/// nearly always enough.
const ADDRESS_ATTEMPTS: u32 = 5;

/// In every attempt, another request took the email address first.
#[derive(Debug, thiserror::Error)]
#[error("other requests took the address at the same moment")]
struct AddressContended;

enum ChangeOutcome {
    /// The user after the change and, if the change removed an unverified account, the raised epoch of that account.
    Changed(Box<UserRow>, Option<EpochChange>),
    /// The user has changed since the code was sent, or another account has verified the address.
    Rejected,
    /// Another request took the address after this transaction had looked for an owner of the address. The next attempt
    /// sees the new owner.
    Contended,
}

impl PostgresStore {
    pub(super) async fn change_address(
        &self,
        app: &AppId,
        change: AddressChange,
    ) -> Result<Option<AddressChanged>, StoreError> {
        for _ in 0..ADDRESS_ATTEMPTS {
            let mut call = self.begin_call("change_address").await?;
            let (connection, deadline) = call.parts();
            let outcome = timeout_at(deadline, change_address(connection, app, &change, self.should_notify())).await;
            match call.end_call(outcome)? {
                ChangeOutcome::Changed(row, removed) => {
                    self.notify_deliverer();
                    return Ok(Some(AddressChanged { user: User::try_from(*row)?, removed }));
                }
                ChangeOutcome::Rejected => return Ok(None),
                ChangeOutcome::Contended => {}
            }
        }
        Err(StoreError::Unavailable { store: "Postgres", source: Box::new(AddressContended) })
    }
}

/// Changes the address in one transaction. Locks no other verified user: otherwise two users who want each other's
/// address would deadlock.
async fn change_address(
    connection: &mut PgConnection,
    app: &AppId,
    change: &AddressChange,
    notify: bool,
) -> Result<ChangeOutcome, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let before = lock_user(&mut transaction, app, change.user).await?;
    let before = before.filter(|user| user.is_active_at(change.epoch) && user.has_pending_address(&change.address));
    let Some(before) = before else {
        transaction.rollback().await?;
        return Ok(ChangeOutcome::Rejected);
    };
    let removed = delete_unverified_owner(&mut transaction, app, change).await?;
    let changed = match update_user(&mut transaction, app, change).await {
        Ok(Some(changed)) => changed,
        Ok(None) => {
            transaction.rollback().await?;
            return Ok(ChangeOutcome::Rejected);
        }
        Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
            transaction.rollback().await?;
            return Ok(ChangeOutcome::Contended);
        }
        Err(error) => return Err(error),
    };
    if let Some((removed, version)) = &removed {
        let users = [removed.user.0];
        outbox::delete_rows_of(&mut transaction, app, &users).await?;
        outbox::insert_epoch_change(&mut transaction, app, removed).await?;
        let event = BatchEvent {
            kind: EventKind::UserDeleted,
            at: change.event.at,
            detail: Detail::default(),
            webhooks: &change.event.webhooks,
        };
        audit::insert_for_users(&mut transaction, app, &event, &[(removed.user.0, *version)], notify).await?;
    }
    record_change(&mut transaction, app, change, &before, &changed, notify).await?;
    transaction.commit().await?;
    Ok(ChangeOutcome::Changed(Box::new(changed), removed.map(|(removed, _)| removed)))
}

/// Deletes the unverified account that has the address, if there is one. The identities of this account are deleted,
/// too. Returns the raised epoch and the raised version of the deleted account.
async fn delete_unverified_owner(
    connection: &mut PgConnection,
    app: &AppId,
    change: &AddressChange,
) -> Result<Option<(EpochChange, i64)>, sqlx::Error> {
    struct RemovedRow {
        id: Uuid,
        epoch: i64,
        version: i64,
    }
    let removed = sqlx::query_as!(
        RemovedRow,
        r#"
        DELETE FROM users
        WHERE app_id = $1 AND email_canonical = $2 AND id <> $3 AND email_verified_at IS NULL
        RETURNING id, epoch + 1 AS "epoch!", version + 1 AS "version!"
        "#,
        app.as_str(),
        change.address,
        change.user.0,
    )
    .fetch_optional(connection)
    .await?;
    Ok(removed.map(|row| {
        let change = EpochChange { user: UserId(row.id), epoch: Epoch(row.epoch), kept_session: None };
        (change, row.version)
    }))
}

/// Makes the pending address the user's verified address. Returns `None` if another account has verified the address.
async fn update_user(
    connection: &mut PgConnection,
    app: &AppId,
    change: &AddressChange,
) -> Result<Option<UserRow>, sqlx::Error> {
    user_query!(
        RETURNING
        "UPDATE users
         SET email = pending_email,
            email_canonical = pending_email_canonical,
            email_verified_at = $5,
            pending_email = NULL,
            pending_email_canonical = NULL,
            epoch = epoch + 1,
            version = version + 1,
            updated_at = $5
         WHERE app_id = $1 AND id = $2 AND epoch = $3 AND pending_email_canonical = $4
            AND NOT EXISTS (
                SELECT FROM users AS owner
                WHERE owner.app_id = $1 AND owner.email_canonical = $4 AND owner.id <> $2
                    AND owner.email_verified_at IS NOT NULL
            )",
        app.as_str(),
        change.user.0,
        change.epoch.0,
        change.address,
        change.at,
    )
    .fetch_optional(connection)
    .await
}

/// Inserts the outbox rows and the event of the change.
async fn record_change(
    connection: &mut PgConnection,
    app: &AppId,
    change: &AddressChange,
    before: &LockedUser,
    changed: &UserRow,
    notify: bool,
) -> Result<(), sqlx::Error> {
    let epoch_change = changed.epoch_change(Some(change.kept_session));
    outbox::insert_epoch_change(connection, app, &epoch_change).await?;
    if let Some(former) = &before.email {
        let notice = Mail { kind: MailKind::AddressChanged, recipient: Some(change.user), requested_at: change.at };
        outbox::insert_mail_to_former_address(connection, app, &notice, former, notify).await?;
    }
    audit::insert(connection, app, &change.event, notify).await
}
