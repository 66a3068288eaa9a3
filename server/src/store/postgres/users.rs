//! Users. Each change is one statement, so that it is one transaction in one round trip.

use latchkey_crds::types::AppId;
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use super::{
    audit::EventColumns,
    errors::CallError,
    outbox::{PROPAGATION_DELAY_SECONDS, mail_columns, mail_payload},
};
use crate::{
    domain::{
        audit::Event,
        email::Email,
        mail::{Mail, MailKind},
        password::PasswordHash,
        ports::{ChangedUser, Confirmation, CreateUserOutcome, NewUser, PasswordReset, StoreError, Users},
        session::SessionId,
        user::{Epoch, User, UserId},
    },
    store::Stores,
};

mod own_account;
mod unverified;

pub use unverified::{UnverifiedBatch, UnverifiedExpiry, UnverifiedPosition};

pub(super) struct UserRow {
    pub(super) id: Uuid,
    pub(super) email: Option<String>,
    pub(super) email_verified_at: Option<OffsetDateTime>,
    pub(super) pending_email: Option<String>,
    pub(super) name: String,
    pub(super) password_hash: Option<String>,
    pub(super) password_session: Option<Uuid>,
    pub(super) contested: bool,
    pub(super) epoch: i64,
    pub(super) version: i64,
    pub(super) disabled_at: Option<OffsetDateTime>,
    pub(super) created_at: OffsetDateTime,
    pub(super) updated_at: OffsetDateTime,
}

/// A row after a change.
struct ChangedUserRow {
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
    was_contested: bool,
}

// === impl UserRow ===

impl TryFrom<UserRow> for User {
    type Error = StoreError;

    fn try_from(row: UserRow) -> Result<Self, StoreError> {
        let address = |text: Option<String>| {
            text.map(|text| Email::parse(&text)).transpose().map_err(|_| StoreError::from(CallError::unexpected_row()))
        };
        Ok(Self {
            id: UserId(row.id),
            email: address(row.email)?,
            email_verified: row.email_verified_at.is_some(),
            pending_email: address(row.pending_email)?,
            name: row.name,
            password_hash: row.password_hash.map(PasswordHash::new),
            password_session: row.password_session.map(SessionId),
            contested: row.contested,
            disabled: row.disabled_at.is_some(),
            epoch: Epoch(row.epoch),
            version: row.version,
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    }
}

impl TryFrom<ChangedUserRow> for ChangedUser {
    type Error = StoreError;

    fn try_from(row: ChangedUserRow) -> Result<Self, StoreError> {
        let was_contested = row.was_contested;
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
        Ok(Self { user: row.try_into()?, was_contested })
    }
}

/// The users of an App are being deleted, and this server does not know it yet.
#[derive(Debug, thiserror::Error)]
#[error("the users of the App are being deleted")]
struct AppBeingDeleted;

pub(super) fn app_being_deleted() -> StoreError {
    StoreError::Unavailable { store: "Postgres", source: Box::new(AppBeingDeleted) }
}

impl Users for Stores {
    async fn user(&self, app: &AppId, id: UserId) -> Result<Option<User>, StoreError> {
        let mut held = self.postgres.begin_call("user").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            UserRow,
            "SELECT id, email, email_verified_at, pending_email, name, password_hash, password_session, contested, \
             epoch, version, disabled_at, created_at, updated_at
             FROM users WHERE app_id = $1 AND id = $2",
            app.as_str(),
            id.0
        );
        let answer = timeout_at(until, query.fetch_optional(connection)).await;
        held.end_call(answer)?.map(User::try_from).transpose()
    }

    async fn user_by_email(&self, app: &AppId, email: &Email) -> Result<Option<User>, StoreError> {
        let mut held = self.postgres.begin_call("user_by_email").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            UserRow,
            "SELECT id, email, email_verified_at, pending_email, name, password_hash, password_session, contested, \
             epoch, version, disabled_at, created_at, updated_at
             FROM users WHERE app_id = $1 AND email_canonical = $2",
            app.as_str(),
            email.canonical()
        );
        let answer = timeout_at(until, query.fetch_optional(connection)).await;
        held.end_call(answer)?.map(User::try_from).transpose()
    }

    async fn create_user(
        &self,
        app: &AppId,
        user: NewUser,
        mail: Option<Mail>,
    ) -> Result<CreateUserOutcome, StoreError> {
        let (kind, to, requested_at) = mail_columns(mail.as_ref());
        let event = EventColumns::from_event(&user.event);
        let mut held = self.postgres.begin_call("create_user").await?;
        let (connection, until) = held.parts();
        // The lock on the App's row orders this with the deletion of the App's users: the deletion sees what is written
        // here, or nothing is written.
        let query = sqlx::query!(
            r#"
            WITH gate AS (
                SELECT state FROM apps WHERE app_id = $1 FOR SHARE
            ), made AS (
                INSERT INTO users
                    (app_id, id, email, email_canonical, name, password_hash, created_at, updated_at)
                SELECT $1, $2, $3, $4, $5, $6, $7, $7
                WHERE NOT EXISTS (SELECT FROM gate WHERE state <> 'active')
                ON CONFLICT DO NOTHING
                RETURNING id
            ), queued AS (
                INSERT INTO outbox (app_id, kind, user_id, requested_at, payload)
                SELECT $1, $8, $9, $10, $18::text::jsonb FROM made WHERE $8::text IS NOT NULL
                RETURNING id
            ), recorded AS (
                INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
                SELECT $1, $12, $13, $14, id, $15, $16::text::inet, $17::text::jsonb FROM made
            ), told AS (
                SELECT pg_notify('latchkey_outbox', '') FROM queued WHERE $11
            )
            SELECT (SELECT count(*) FROM made) + 0 * (SELECT count(*) FROM told) AS "made!",
                EXISTS (SELECT FROM gate WHERE state <> 'active') AS "closed!"
            "#,
            app.as_str(),
            user.id.0,
            user.email.as_str(),
            user.email.canonical(),
            user.name.as_str(),
            user.password_hash.expose(),
            user.created_at,
            kind,
            to,
            requested_at,
            self.postgres.should_notify(),
            event.id,
            event.at,
            event.kind,
            event.session,
            event.ip,
            event.detail,
            mail_payload(),
        );
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        let answer = held.end_call(answer)?;
        if answer.closed {
            return Err(app_being_deleted());
        }
        let made = answer.made > 0;
        if made && mail.is_some() {
            self.postgres.notify_deliverer();
        }
        Ok(if made { CreateUserOutcome::Created } else { CreateUserOutcome::AddressTaken })
    }

    async fn record_repeated_registration(
        &self,
        app: &AppId,
        user: UserId,
        epoch: Epoch,
        contest: bool,
        mail: Option<Mail>,
        event: Event,
    ) -> Result<(), StoreError> {
        let (kind, to, requested_at) = mail_columns(mail.as_ref());
        let event = EventColumns::from_event(&event);
        let mut held = self.postgres.begin_call("registered_again").await?;
        let (connection, until) = held.parts();
        // The row is written even if it does not change, since `create_user` writes a row too: response times do not
        // differ.
        let query = sqlx::query!(
            r#"
            WITH gate AS (
                SELECT state FROM apps WHERE app_id = $1 FOR SHARE
            ), touched AS (
                UPDATE users
                SET contested = contested OR ($4 AND email_verified_at IS NULL AND epoch = $3)
                WHERE app_id = $1 AND id = $2 AND NOT EXISTS (SELECT FROM gate WHERE state <> 'active')
                RETURNING id
            ), queued AS (
                INSERT INTO outbox (app_id, kind, user_id, requested_at, payload)
                SELECT $1, $5, $6, $7, $15::text::jsonb
                WHERE $5::text IS NOT NULL AND NOT EXISTS (SELECT FROM gate WHERE state <> 'active')
                RETURNING id
            ), recorded AS (
                INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
                SELECT $1, $9, $10, $11, id, $12, $13::text::inet, $14::text::jsonb FROM touched
            ), told AS (
                SELECT pg_notify('latchkey_outbox', '') FROM queued WHERE $8
            )
            SELECT (SELECT count(*) FROM touched) + 0 * (SELECT count(*) FROM told) AS "touched!",
                EXISTS (SELECT FROM gate WHERE state <> 'active') AS "closed!"
            "#,
            app.as_str(),
            user.0,
            epoch.0,
            contest,
            kind,
            to,
            requested_at,
            self.postgres.should_notify(),
            event.id,
            event.at,
            event.kind,
            event.session,
            event.ip,
            event.detail,
            mail_payload(),
        );
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        if held.end_call(answer)?.closed {
            return Err(app_being_deleted());
        }
        if mail.is_some() {
            self.postgres.notify_deliverer();
        }
        Ok(())
    }

    async fn replace_hash(
        &self,
        app: &AppId,
        user: UserId,
        old: &PasswordHash,
        new: PasswordHash,
    ) -> Result<(), StoreError> {
        let mut held = self.postgres.begin_call("renew_hash").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query!(
            "UPDATE users SET password_hash = $4 WHERE app_id = $1 AND id = $2 AND password_hash = $3",
            app.as_str(),
            user.0,
            old.expose(),
            new.expose()
        );
        let answer = timeout_at(until, query.execute(connection)).await;
        held.end_call(answer).map(drop)
    }

    async fn confirm_address(&self, app: &AppId, change: Confirmation) -> Result<Option<ChangedUser>, StoreError> {
        let event = EventColumns::from_event(&change.event);
        let mut held = self.postgres.begin_call("confirm_address").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            ChangedUserRow,
            r#"
            WITH before AS (
                SELECT contested FROM users
                WHERE app_id = $1 AND id = $2 AND epoch = $3 AND email_canonical = $4 AND disabled_at IS NULL
                FOR UPDATE
            ), changed AS (
                UPDATE users
                SET email_verified_at = coalesce(email_verified_at, $5),
                    epoch = epoch + 1,
                    version = version + 1,
                    password_hash = CASE WHEN users.contested THEN NULL ELSE password_hash END,
                    password_session = CASE WHEN users.contested THEN $6 ELSE password_session END,
                    contested = false,
                    updated_at = $5
                FROM before
                WHERE app_id = $1 AND id = $2 AND epoch = $3 AND email_canonical = $4 AND disabled_at IS NULL
                RETURNING users.*, before.contested AS was_contested
            ), unlinked AS (
                DELETE FROM identities USING changed
                WHERE identities.app_id = $1 AND identities.user_id = changed.id AND NOT $8
            ), carried AS (
                INSERT INTO outbox (app_id, kind, user_id, epoch, keep_session, due_at)
                SELECT $1, 'epoch', id, epoch, CASE WHEN $8 THEN $6::uuid END,
                    statement_timestamp() + make_interval(secs => $7)
                FROM changed
            ), recorded AS (
                INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
                SELECT $1, $9, $10, $11, id, $12, $13::text::inet, $14::text::jsonb FROM changed
            )
            SELECT id, email, email_verified_at, pending_email, name, password_hash, password_session, contested,
                epoch, version, disabled_at, created_at, updated_at, was_contested
            FROM changed
            "#,
            app.as_str(),
            change.user.0,
            change.epoch.0,
            change.address,
            change.at,
            change.session.0,
            PROPAGATION_DELAY_SECONDS,
            change.keeps_session,
            event.id,
            event.at,
            event.kind,
            event.session,
            event.ip,
            event.detail,
        );
        let answer = timeout_at(until, query.fetch_optional(connection)).await;
        held.end_call(answer)?.map(ChangedUser::try_from).transpose()
    }

    async fn reset_password(&self, app: &AppId, change: PasswordReset) -> Result<Option<ChangedUser>, StoreError> {
        let event = EventColumns::from_event(&change.event);
        let mut held = self.postgres.begin_call("reset_password").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            ChangedUserRow,
            r#"
            WITH before AS (
                SELECT contested, email_verified_at IS NULL AS was_unverified FROM users
                WHERE app_id = $1 AND id = $2 AND epoch = $3 AND email_canonical = $4 AND disabled_at IS NULL
                FOR UPDATE
            ), changed AS (
                UPDATE users
                SET email_verified_at = coalesce(email_verified_at, $5),
                    epoch = epoch + 1,
                    version = version + 1,
                    password_hash = $6,
                    password_session = NULL,
                    contested = false,
                    pending_email = NULL,
                    pending_email_canonical = NULL,
                    updated_at = $5
                FROM before
                WHERE app_id = $1 AND id = $2 AND epoch = $3 AND email_canonical = $4 AND disabled_at IS NULL
                RETURNING users.*, before.contested AS was_contested, before.was_unverified
            ), unlinked AS (
                DELETE FROM identities USING changed
                WHERE identities.app_id = $1 AND identities.user_id = changed.id AND changed.was_unverified
            ), carried AS (
                INSERT INTO outbox (app_id, kind, user_id, epoch, due_at)
                SELECT $1, 'epoch', id, epoch, statement_timestamp() + make_interval(secs => $7) FROM changed
            ), recorded AS (
                INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
                SELECT $1, $10, $11, $12, id, $13, $14::text::inet, $15::text::jsonb FROM changed
            ), queued AS (
                INSERT INTO outbox (app_id, kind, user_id, requested_at, payload)
                SELECT $1, $8, id, $5, $16::text::jsonb FROM changed
                RETURNING id
            ), told AS (
                SELECT count(pg_notify('latchkey_outbox', '')) AS times FROM queued WHERE $9
            )
            SELECT id AS "id!", email, email_verified_at, pending_email, name AS "name!", password_hash,
                password_session, contested AS "contested!", epoch AS "epoch!", version AS "version!", disabled_at,
                created_at AS "created_at!", updated_at AS "updated_at!", was_contested AS "was_contested!"
            FROM changed, told
            WHERE told.times >= 0
            "#,
            app.as_str(),
            change.user.0,
            change.epoch.0,
            change.address,
            change.at,
            change.password_hash.expose(),
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
        let changed = held.end_call(answer)?.map(ChangedUser::try_from).transpose()?;
        if changed.is_some() {
            self.postgres.notify_deliverer();
        }
        Ok(changed)
    }
}
