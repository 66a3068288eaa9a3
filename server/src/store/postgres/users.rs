//! Users: each change is one statement, so that it is one transaction in one round trip.

use latchkey_crds::types::AppId;
use serde_json::json;
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use super::{audit::EventColumns, errors::Fault};
use crate::{
    domain::{
        audit::Event,
        email::Email,
        mail::{Mail, MailKind},
        password::PasswordHash,
        ports::{Changed, Confirmation, Creation, NewUser, PasswordReset, StoreError, Users},
        session::SessionId,
        user::{Epoch, User, UserId},
    },
    store::Stores,
};

pub(super) struct Row {
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

/// A row as a change left it.
struct ChangedRow {
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

// === impl Row ===

impl TryFrom<Row> for User {
    type Error = StoreError;

    fn try_from(row: Row) -> Result<Self, StoreError> {
        let address = |text: Option<String>| {
            text.map(|text| Email::parse(&text)).transpose().map_err(|_| StoreError::from(Fault::unreadable()))
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

impl TryFrom<ChangedRow> for Changed {
    type Error = StoreError;

    fn try_from(row: ChangedRow) -> Result<Self, StoreError> {
        let was_contested = row.was_contested;
        let row = Row {
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

/// A server that still serves an App whose users are being deleted; it will hear of that in a moment.
#[derive(Debug, thiserror::Error)]
#[error("the users of the App are being deleted")]
struct BeingDeleted;

pub(super) fn being_deleted() -> StoreError {
    StoreError::Unavailable { store: "Postgres", source: Box::new(BeingDeleted) }
}

/// A mail's columns in the outbox; none of them where there is no mail.
pub(super) fn columns(mail: Option<&Mail>) -> (Option<&'static str>, Option<Uuid>, Option<OffsetDateTime>) {
    match mail {
        None => (None, None, None),
        Some(mail) => (Some(mail.kind.as_str()), mail.user.map(|user| user.0), Some(mail.requested_at)),
    }
}

/// What is kept with a mail beside its columns, as JSON: the trace of the request that asked for it.
pub(super) fn payload() -> Option<String> {
    latchkey_trace::remember().map(|trace| json!({ "trace": trace }).to_string())
}

impl Users for Stores {
    async fn user(&self, app: &AppId, id: UserId) -> Result<Option<User>, StoreError> {
        let mut held = self.postgres.hold("user").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            Row,
            "SELECT id, email, email_verified_at, pending_email, name, password_hash, password_session, contested, \
             epoch, version, disabled_at, created_at, updated_at
             FROM users WHERE app_id = $1 AND id = $2",
            app.as_str(),
            id.0
        );
        let answer = timeout_at(until, query.fetch_optional(connection)).await;
        held.done(answer)?.map(User::try_from).transpose()
    }

    async fn user_by_email(&self, app: &AppId, email: &Email) -> Result<Option<User>, StoreError> {
        let mut held = self.postgres.hold("user_by_email").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            Row,
            "SELECT id, email, email_verified_at, pending_email, name, password_hash, password_session, contested, \
             epoch, version, disabled_at, created_at, updated_at
             FROM users WHERE app_id = $1 AND email_canonical = $2",
            app.as_str(),
            email.canonical()
        );
        let answer = timeout_at(until, query.fetch_optional(connection)).await;
        held.done(answer)?.map(User::try_from).transpose()
    }

    async fn create_user(&self, app: &AppId, user: NewUser, mail: Option<Mail>) -> Result<Creation, StoreError> {
        let (kind, to, requested_at) = columns(mail.as_ref());
        let event = EventColumns::of(&user.event);
        let mut held = self.postgres.hold("create_user").await?;
        let (connection, until) = held.parts();
        // The lock on the App's row orders this with the deletion of its users: what is written here is seen by that, or
        // nothing is written.
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
            self.postgres.tells(),
            event.id,
            event.at,
            event.kind,
            event.session,
            event.ip,
            event.detail,
            payload(),
        );
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        let answer = held.done(answer)?;
        if answer.closed {
            return Err(being_deleted());
        }
        let made = answer.made > 0;
        if made && mail.is_some() {
            self.postgres.wake();
        }
        Ok(if made { Creation::Created } else { Creation::AddressTaken })
    }

    async fn registered_again(
        &self,
        app: &AppId,
        user: UserId,
        epoch: Epoch,
        contest: bool,
        mail: Option<Mail>,
        event: Event,
    ) -> Result<(), StoreError> {
        let (kind, to, requested_at) = columns(mail.as_ref());
        let event = EventColumns::of(&event);
        let mut held = self.postgres.hold("registered_again").await?;
        let (connection, until) = held.parts();
        // The row is written whatever comes of it, as `create_user` writes one.
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
            self.postgres.tells(),
            event.id,
            event.at,
            event.kind,
            event.session,
            event.ip,
            event.detail,
            payload(),
        );
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        if held.done(answer)?.closed {
            return Err(being_deleted());
        }
        if mail.is_some() {
            self.postgres.wake();
        }
        Ok(())
    }

    async fn renew_hash(
        &self,
        app: &AppId,
        user: UserId,
        old: &PasswordHash,
        new: PasswordHash,
    ) -> Result<(), StoreError> {
        let mut held = self.postgres.hold("renew_hash").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query!(
            "UPDATE users SET password_hash = $4 WHERE app_id = $1 AND id = $2 AND password_hash = $3",
            app.as_str(),
            user.0,
            old.expose(),
            new.expose()
        );
        let answer = timeout_at(until, query.execute(connection)).await;
        held.done(answer).map(drop)
    }

    async fn confirm_address(&self, app: &AppId, change: Confirmation) -> Result<Option<Changed>, StoreError> {
        let event = EventColumns::of(&change.event);
        let mut held = self.postgres.hold("confirm_address").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            ChangedRow,
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
            EPOCH_DELAY_SECONDS,
            change.kept,
            event.id,
            event.at,
            event.kind,
            event.session,
            event.ip,
            event.detail,
        );
        let answer = timeout_at(until, query.fetch_optional(connection)).await;
        held.done(answer)?.map(Changed::try_from).transpose()
    }

    async fn reset_password(&self, app: &AppId, change: PasswordReset) -> Result<Option<Changed>, StoreError> {
        let event = EventColumns::of(&change.event);
        let mut held = self.postgres.hold("reset_password").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            ChangedRow,
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
            EPOCH_DELAY_SECONDS,
            MailKind::PasswordChanged.as_str(),
            self.postgres.tells(),
            event.id,
            event.at,
            event.kind,
            event.session,
            event.ip,
            event.detail,
            payload(),
        );
        let answer = timeout_at(until, query.fetch_optional(connection)).await;
        let changed = held.done(answer)?.map(Changed::try_from).transpose()?;
        if changed.is_some() {
            self.postgres.wake();
        }
        Ok(changed)
    }
}

/// How long the request has to carry a raised epoch itself before a worker takes its row.
pub(super) const EPOCH_DELAY_SECONDS: f64 = 5.0;
