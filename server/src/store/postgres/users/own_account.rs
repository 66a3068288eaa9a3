//! Changes that users make to their own accounts. Each change is one statement, as in `users`.

use latchkey_crds::types::AppId;
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use super::UserRow;
use crate::{
    domain::{
        audit::EventKind,
        mail::{EpochChange, MailKind},
        ports::{
            AddressChange, AddressChangeRequest, AddressChanged, OwnAccounts, PasswordChange, Rename, Renamed,
            StoreError, UserDeletion,
        },
        session::Session,
        user::{Epoch, User, UserId},
    },
    store::{
        Stores,
        postgres::{
            audit::EventColumns,
            outbox::{PROPAGATION_DELAY_SECONDS, mail_payload},
        },
    },
};

/// Each attempt sees what made the previous one fail, so two are nearly always enough.
const ADDRESS_ATTEMPTS: u32 = 5;

/// In every attempt, another request took the address first.
#[derive(Debug, thiserror::Error)]
#[error("other requests took the address at the same moment")]
struct AddressContended;

/// A row after a change of address, and the unverified user that the change removed.
struct AddressChangedRow {
    id: Uuid,
    email: Option<String>,
    email_verified_at: Option<OffsetDateTime>,
    pending_email: Option<String>,
    name: String,
    password_hash: Option<String>,
    password_session: Option<Uuid>,
    contested: bool,
    epoch: i64,
    version: i64,
    disabled_at: Option<OffsetDateTime>,
    created_at: OffsetDateTime,
    updated_at: OffsetDateTime,
    removed_id: Option<Uuid>,
    removed_epoch: Option<i64>,
}

// === impl AddressChangedRow ===

impl TryFrom<AddressChangedRow> for AddressChanged {
    type Error = StoreError;

    fn try_from(row: AddressChangedRow) -> Result<Self, StoreError> {
        let removed = row.removed_id.zip(row.removed_epoch);
        let row = UserRow {
            id: row.id,
            email: row.email,
            email_verified_at: row.email_verified_at,
            pending_email: row.pending_email,
            name: row.name,
            password_hash: row.password_hash,
            password_session: row.password_session,
            contested: row.contested,
            epoch: row.epoch,
            version: row.version,
            disabled_at: row.disabled_at,
            created_at: row.created_at,
            updated_at: row.updated_at,
        };
        let removed =
            removed.map(|(user, epoch)| EpochChange { user: UserId(user), epoch: Epoch(epoch), kept_session: None });
        Ok(Self { user: row.try_into()?, removed })
    }
}

impl OwnAccounts for Stores {
    async fn user_of_session(&self, app: &AppId, session: &Session) -> Result<Option<User>, StoreError> {
        let mut held = self.postgres.begin_call("user_of_session").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            UserRow,
            "SELECT id, email, email_verified_at, pending_email, name, password_hash, password_session, contested, \
             epoch, version, disabled_at, created_at, updated_at
             FROM users
             WHERE app_id = $1 AND id = $2 AND disabled_at IS NULL
                AND (epoch = $3 OR EXISTS (
                    SELECT FROM outbox
                    WHERE outbox.app_id = $1 AND outbox.user_id = $2 AND outbox.kind = 'epoch'
                        AND outbox.epoch = users.epoch AND outbox.keep_session = $4
                ))",
            app.as_str(),
            session.user.0,
            session.epoch.0,
            session.id.0
        );
        let answer = timeout_at(until, query.fetch_optional(connection)).await;
        held.end_call(answer)?.map(User::try_from).transpose()
    }

    async fn rename(&self, app: &AppId, change: Rename) -> Result<Option<Renamed>, StoreError> {
        let event = EventColumns::from_event(&change.event);
        let mut held = self.postgres.begin_call("rename").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query!(
            r#"
            WITH renamed AS (
                UPDATE users
                SET name = $4, version = version + 1, updated_at = $5
                WHERE app_id = $1 AND id = $2 AND epoch = $3 AND disabled_at IS NULL
                RETURNING *
            ), carried AS (
                INSERT INTO outbox (app_id, kind, user_id, due_at)
                SELECT $1, 'profile', id, statement_timestamp() + make_interval(secs => $6) FROM renamed
                RETURNING id
            ), recorded AS (
                INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
                SELECT $1, $7, $8, $9, id, $10, $11::text::inet, $12::text::jsonb FROM renamed
            )
            SELECT renamed.id, email, email_verified_at, pending_email, name, password_hash, password_session,
                contested, epoch, version, disabled_at, created_at, updated_at, carried.id AS row
            FROM renamed, carried
            "#,
            app.as_str(),
            change.user.0,
            change.epoch.0,
            change.name.as_str(),
            change.at,
            PROPAGATION_DELAY_SECONDS,
            event.id,
            event.at,
            event.kind,
            event.session,
            event.ip,
            event.detail,
        );
        let answer = timeout_at(until, query.fetch_optional(connection)).await;
        let Some(row) = held.end_call(answer)? else { return Ok(None) };
        let user = UserRow {
            id: row.id,
            email: row.email,
            email_verified_at: row.email_verified_at,
            pending_email: row.pending_email,
            name: row.name,
            password_hash: row.password_hash,
            password_session: row.password_session,
            contested: row.contested,
            epoch: row.epoch,
            version: row.version,
            disabled_at: row.disabled_at,
            created_at: row.created_at,
            updated_at: row.updated_at,
        };
        Ok(Some(Renamed { user: user.try_into()?, outbox_row: row.row }))
    }

    async fn set_password(&self, app: &AppId, change: PasswordChange) -> Result<Option<User>, StoreError> {
        let event = EventColumns::from_event(&change.event);
        let mut held = self.postgres.begin_call("set_password").await?;
        let (connection, until) = held.parts();
        // A pending change of address ends, as do its codes: a user who gets the notice without having asked for the
        // change sets a new password. If the pending address is the account's only one, it stays pending.
        let query = sqlx::query_as!(
            UserRow,
            r#"
            WITH changed AS (
                UPDATE users
                SET password_hash = $5,
                    password_session = NULL,
                    pending_email = CASE WHEN email IS NULL THEN pending_email END,
                    pending_email_canonical = CASE WHEN email IS NULL THEN pending_email_canonical END,
                    epoch = epoch + 1,
                    version = version + 1,
                    updated_at = $6
                WHERE app_id = $1 AND id = $2 AND epoch = $3 AND disabled_at IS NULL
                    AND (email IS NULL OR email_verified_at IS NOT NULL)
                RETURNING *
            ), carried AS (
                INSERT INTO outbox (app_id, kind, user_id, epoch, keep_session, due_at)
                SELECT $1, 'epoch', id, epoch, $4, statement_timestamp() + make_interval(secs => $7) FROM changed
            ), queued AS (
                INSERT INTO outbox (app_id, kind, user_id, requested_at, payload)
                SELECT $1, $8, id, $6, $16::text::jsonb FROM changed WHERE email_verified_at IS NOT NULL
                RETURNING id
            ), told AS (
                SELECT count(pg_notify('latchkey_outbox', '')) AS times FROM queued WHERE $9
            ), recorded AS (
                INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
                SELECT $1, $10, $11, $12, id, $13, $14::text::inet, $15::text::jsonb FROM changed
            )
            SELECT id AS "id!", email, email_verified_at, pending_email, name AS "name!", password_hash,
                password_session, contested AS "contested!", epoch AS "epoch!", version AS "version!", disabled_at,
                created_at AS "created_at!", updated_at AS "updated_at!"
            FROM changed, told
            WHERE told.times >= 0
            "#,
            app.as_str(),
            change.user.0,
            change.epoch.0,
            change.kept_session.0,
            change.password_hash.expose(),
            change.at,
            PROPAGATION_DELAY_SECONDS,
            MailKind::PasswordChanged.as_str(),
            self.postgres.should_notify(),
            event.id,
            event.at,
            event.kind,
            event.session,
            event.ip,
            event.detail,
            mail_payload(),
        );
        let answer = timeout_at(until, query.fetch_optional(connection)).await;
        let changed = held.end_call(answer)?.map(User::try_from).transpose()?;
        if changed.is_some() {
            self.postgres.notify_deliverer();
        }
        Ok(changed)
    }

    async fn request_address_change(
        &self,
        app: &AppId,
        request: AddressChangeRequest,
    ) -> Result<Option<User>, StoreError> {
        let event = EventColumns::from_event(&request.event);
        let mut held = self.postgres.begin_call("ask_for_address").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            UserRow,
            r#"
            WITH changed AS (
                UPDATE users
                SET pending_email = $4, pending_email_canonical = $5, version = version + 1, updated_at = $6
                WHERE app_id = $1 AND id = $2 AND epoch = $3 AND disabled_at IS NULL
                    AND (email IS NULL OR email_verified_at IS NOT NULL)
                RETURNING *
            ), queued AS (
                INSERT INTO outbox (app_id, kind, user_id, requested_at, payload)
                SELECT $1, mails.kind, changed.id, $6, $17::text::jsonb
                FROM changed, (VALUES ($7::text, $8::boolean), ($9, true)) AS mails (kind, wanted)
                WHERE mails.wanted AND (mails.kind <> $9 OR changed.email IS NOT NULL)
                RETURNING id
            ), told AS (
                SELECT count(pg_notify('latchkey_outbox', '')) AS times FROM queued WHERE $10
            ), recorded AS (
                INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
                SELECT $1, $11, $12, $13, id, $14, $15::text::inet, $16::text::jsonb FROM changed
            )
            SELECT id AS "id!", email, email_verified_at, pending_email, name AS "name!", password_hash,
                password_session, contested AS "contested!", epoch AS "epoch!", version AS "version!", disabled_at,
                created_at AS "created_at!", updated_at AS "updated_at!"
            FROM changed, told
            WHERE told.times >= 0
            "#,
            app.as_str(),
            request.user.0,
            request.epoch.0,
            request.address.as_str(),
            request.address.canonical(),
            request.at,
            MailKind::Confirm.as_str(),
            request.is_mailed,
            MailKind::AddressChanging.as_str(),
            self.postgres.should_notify(),
            event.id,
            event.at,
            event.kind,
            event.session,
            event.ip,
            event.detail,
            mail_payload(),
        );
        let answer = timeout_at(until, query.fetch_optional(connection)).await;
        let changed = held.end_call(answer)?.map(User::try_from).transpose()?;
        if changed.is_some() {
            self.postgres.notify_deliverer();
        }
        Ok(changed)
    }

    async fn change_address(&self, app: &AppId, change: AddressChange) -> Result<Option<AddressChanged>, StoreError> {
        let event = EventColumns::from_event(&change.event);
        for _ in 0..ADDRESS_ATTEMPTS {
            let mut held = self.postgres.begin_call("change_address").await?;
            let (connection, until) = held.parts();
            // Of the other users, only an unverified one is locked: otherwise two users who want each other's address
            // would deadlock. `changed` reads `cleared`, so the address is free before it is taken.
            let query = sqlx::query_as!(
                AddressChangedRow,
                r#"
                WITH before AS (
                    SELECT id, email FROM users
                    WHERE app_id = $1 AND id = $2 AND epoch = $3 AND pending_email_canonical = $4
                        AND disabled_at IS NULL
                    FOR UPDATE
                ), other AS (
                    SELECT users.id FROM users, before
                    WHERE users.app_id = $1 AND users.email_canonical = $4 AND users.id <> before.id
                        AND users.email_verified_at IS NULL
                    FOR UPDATE OF users
                ), removed AS (
                    DELETE FROM users USING other
                    WHERE users.app_id = $1 AND users.id = other.id
                    RETURNING users.id, users.epoch + 1 AS epoch
                ), unmailed AS (
                    DELETE FROM outbox USING removed WHERE outbox.app_id = $1 AND outbox.user_id = removed.id
                ), cleared AS (
                    SELECT count(*) AS others FROM removed
                ), changed AS (
                    UPDATE users
                    SET email = users.pending_email,
                        email_canonical = users.pending_email_canonical,
                        email_verified_at = $5,
                        pending_email = NULL,
                        pending_email_canonical = NULL,
                        epoch = users.epoch + 1,
                        version = users.version + 1,
                        updated_at = $5
                    FROM before, cleared
                    WHERE users.app_id = $1 AND users.id = before.id AND cleared.others >= 0
                        AND NOT EXISTS (
                            SELECT FROM users AS owner
                            WHERE owner.app_id = $1 AND owner.email_canonical = $4 AND owner.id <> $2
                                AND owner.email_verified_at IS NOT NULL
                        )
                    RETURNING users.*, before.email AS former
                ), carried AS (
                    INSERT INTO outbox (app_id, kind, user_id, epoch, keep_session, due_at)
                    SELECT $1, 'epoch', news.id, news.epoch, news.keep,
                        statement_timestamp() + make_interval(secs => $7)
                    FROM (
                        SELECT id, epoch, $6::uuid AS keep FROM changed UNION ALL SELECT id, epoch, NULL FROM removed
                    ) AS news
                ), queued AS (
                    INSERT INTO outbox (app_id, kind, user_id, requested_at, payload)
                    SELECT $1, $8, id, $5, jsonb_build_object('former', former) || coalesce($17::text::jsonb, '{}')
                    FROM changed WHERE former IS NOT NULL
                    RETURNING id
                ), told AS (
                    SELECT count(pg_notify('latchkey_outbox', '')) AS times FROM queued WHERE $9
                ), recorded AS (
                    INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
                    SELECT $1, $10::uuid, $11::timestamptz, $12::text, id, $13::uuid, $14::text::inet, $15::text::jsonb FROM changed
                    UNION ALL
                    SELECT $1, gen_random_uuid(), $11, $16::text, id, NULL, NULL, NULL FROM removed
                )
                SELECT changed.id AS "id!", email, email_verified_at, pending_email, name AS "name!", password_hash,
                    password_session, contested AS "contested!", changed.epoch AS "epoch!", version AS "version!",
                    disabled_at, created_at AS "created_at!", updated_at AS "updated_at!",
                    removed.id AS "removed_id?", removed.epoch AS "removed_epoch?"
                FROM changed CROSS JOIN told LEFT JOIN removed ON true
                WHERE told.times >= 0
                "#,
                app.as_str(),
                change.user.0,
                change.epoch.0,
                change.address,
                change.at,
                change.kept_session.0,
                PROPAGATION_DELAY_SECONDS,
                MailKind::AddressChanged.as_str(),
                self.postgres.should_notify(),
                event.id,
                event.at,
                event.kind,
                event.session,
                event.ip.as_deref(),
                event.detail.as_deref(),
                EventKind::UserDeleted.as_str(),
                mail_payload(),
            );
            let answer = timeout_at(until, query.fetch_optional(connection)).await;
            let answer = answer.map(|answer| match answer {
                // Another request took the address since the statement began. The next attempt sees it.
                Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(None),
                other => other.map(Some),
            });
            let Some(row) = held.end_call(answer)? else { continue };
            let changed = row.map(AddressChanged::try_from).transpose()?;
            if changed.is_some() {
                self.postgres.notify_deliverer();
            }
            return Ok(changed);
        }
        Err(StoreError::Unavailable { store: "Postgres", source: Box::new(AddressContended) })
    }

    async fn delete_user(&self, app: &AppId, removal: UserDeletion) -> Result<Option<Epoch>, StoreError> {
        let event = EventColumns::from_event(&removal.event);
        let mut held = self.postgres.begin_call("delete_user").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_scalar!(
            r#"
            WITH gone AS (
                DELETE FROM users
                WHERE app_id = $1 AND id = $2 AND epoch = $3 AND disabled_at IS NULL
                    AND (email IS NULL OR email_verified_at IS NOT NULL)
                RETURNING id, epoch + 1 AS epoch
            ), unmailed AS (
                DELETE FROM outbox USING gone WHERE outbox.app_id = $1 AND outbox.user_id = gone.id
            ), carried AS (
                INSERT INTO outbox (app_id, kind, user_id, epoch, due_at)
                SELECT $1, 'epoch', id, epoch, statement_timestamp() + make_interval(secs => $4) FROM gone
            ), recorded AS (
                INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
                SELECT $1, $5, $6, $7, id, $8, $9::text::inet, $10::text::jsonb FROM gone
            )
            SELECT epoch AS "epoch!" FROM gone
            "#,
            app.as_str(),
            removal.user.0,
            removal.epoch.0,
            PROPAGATION_DELAY_SECONDS,
            event.id,
            event.at,
            event.kind,
            event.session,
            event.ip,
            event.detail,
        );
        let answer = timeout_at(until, query.fetch_optional(connection)).await;
        Ok(held.end_call(answer)?.map(Epoch))
    }

    async fn remove_profile_row(&self, app: &AppId, row: Uuid) -> Result<(), StoreError> {
        let mut held = self.postgres.begin_call("profile_carried").await?;
        let (connection, until) = held.parts();
        let query =
            sqlx::query!("DELETE FROM outbox WHERE app_id = $1 AND id = $2 AND kind = 'profile'", app.as_str(), row);
        let answer = timeout_at(until, query.execute(connection)).await;
        held.end_call(answer).map(drop)
    }
}
