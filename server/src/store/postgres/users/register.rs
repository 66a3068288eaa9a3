//! Registration. There is one statement for a new email address and one for a known address. Both take the same time.

use latchkey_crds::types::AppId;
use tokio::time::timeout_at;

use crate::{
    domain::{
        audit::{Event, EventKind},
        mail::Mail,
        ports::{CreateUserOutcome, NewUser, StoreError},
        user::{Epoch, UserId},
        webhook,
    },
    store::postgres::{PostgresStore, audit::EventColumns, outbox},
};

/// The users of an App are being deleted, and this server does not know that yet.
#[derive(Debug, thiserror::Error)]
#[error("the users of the App are being deleted")]
struct AppBeingDeleted;

pub(in crate::store::postgres) fn app_being_deleted() -> StoreError {
    StoreError::Unavailable { store: "Postgres", source: Box::new(AppBeingDeleted) }
}

impl PostgresStore {
    pub(super) async fn create_user(
        &self,
        app: &AppId,
        user: NewUser,
        mail: Option<Mail>,
    ) -> Result<CreateUserOutcome, StoreError> {
        let (kind, recipient, requested_at) = outbox::mail_columns(mail.as_ref());
        let webhooks = user.event.reporting_webhooks();
        let event = EventColumns::from_event(&user.event);
        let mut call = self.begin_call("create_user").await?;
        let (connection, deadline) = call.parts();
        // The lock on the App's row prevents a concurrent deletion of the App's users. A later deletion sees what is
        // written here. After an earlier deletion, nothing is written here. `apps::is_active` does the same in a
        // transaction.
        let query = sqlx::query!(
            r#"
            WITH gate AS (
                SELECT state FROM apps WHERE app_id = $1 FOR SHARE
            ), created AS (
                INSERT INTO users
                    (app_id, id, email, email_canonical, name, password_hash, created_at, updated_at)
                SELECT $1, $2, $3, $4, $5, $6, $7, $7
                WHERE NOT EXISTS (SELECT FROM gate WHERE state <> 'active')
                ON CONFLICT DO NOTHING
                RETURNING id, version
            ), queued AS (
                INSERT INTO outbox (app_id, kind, user_id, requested_at, payload)
                SELECT $1, $8, $9, $10, $18::text::jsonb FROM created WHERE $8::text IS NOT NULL
                RETURNING id
            ), recorded AS (
                INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
                SELECT $1, $12, $13, $14, id, $15, $16::text::inet, $17::text::jsonb FROM created
            ), reported AS (
                INSERT INTO webhook_events (app_id, webhook, id, kind, at, user_id, session_id, version, detail)
                SELECT $1, webhook, $12, $14, $13, created.id, $15, created.version, $17::text::jsonb
                FROM created CROSS JOIN unnest($19::text[]) AS webhook
                RETURNING app_id, webhook
            ), notified AS (
                SELECT pg_notify('latchkey_outbox', '') FROM queued WHERE $11
                UNION ALL
                SELECT pg_notify('latchkey_webhooks', app_id || '/' || webhook) FROM reported WHERE $11
            )
            SELECT (SELECT count(*) FROM created) + 0 * (SELECT count(*) FROM notified) AS "created!",
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
            recipient,
            requested_at,
            self.should_notify(),
            event.id,
            event.at,
            event.kind,
            event.session,
            event.ip,
            event.detail,
            outbox::trace_payload_json(),
            &webhooks,
        );
        let row = timeout_at(deadline, query.fetch_one(connection)).await;
        let row = call.end_call(row)?;
        if row.closed {
            return Err(app_being_deleted());
        }
        let created = row.created > 0;
        if created && mail.is_some() {
            self.notify_deliverer();
        }
        Ok(if created { CreateUserOutcome::Created } else { CreateUserOutcome::AddressTaken })
    }

    pub(super) async fn record_repeated_registration(
        &self,
        app: &AppId,
        user: UserId,
        epoch: Epoch,
        contest: bool,
        mail: Option<Mail>,
        event: Event,
    ) -> Result<(), StoreError> {
        let (kind, recipient, requested_at) = outbox::mail_columns(mail.as_ref());
        let webhooks = webhook::names_reporting(&event.webhooks, EventKind::Registered);
        let event = EventColumns::from_event(&event);
        let mut call = self.begin_call("registered_again").await?;
        let (connection, deadline) = call.parts();
        // The user's row is written even if it does not change, and rows for webhooks are written although they are
        // never delivered: `create_user` writes the same rows, and response times must not differ. The workers delete
        // the rows for webhooks later.
        let query = sqlx::query!(
            r#"
            WITH gate AS (
                SELECT state FROM apps WHERE app_id = $1 FOR SHARE
            ), touched AS (
                UPDATE users
                SET contested = contested OR ($4 AND email_verified_at IS NULL AND epoch = $3),
                    version = version
                        + CASE WHEN $4 AND email_verified_at IS NULL AND epoch = $3 AND NOT contested THEN 1 ELSE 0 END
                WHERE app_id = $1 AND id = $2 AND NOT EXISTS (SELECT FROM gate WHERE state <> 'active')
                RETURNING id, version
            ), queued AS (
                INSERT INTO outbox (app_id, kind, user_id, requested_at, payload)
                SELECT $1, $5, $6, $7, $15::text::jsonb
                WHERE $5::text IS NOT NULL AND NOT EXISTS (SELECT FROM gate WHERE state <> 'active')
                RETURNING id
            ), recorded AS (
                INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
                SELECT $1, $9, $10, $11, id, $12, $13::text::inet, $14::text::jsonb FROM touched
            ), reported AS (
                INSERT INTO webhook_events (app_id, webhook, id, kind, at, user_id, session_id, version, detail, due_at)
                SELECT $1, webhook, $9, $11, $10, touched.id, $12, touched.version, $14::text::jsonb, 'infinity'
                FROM touched CROSS JOIN unnest($16::text[]) AS webhook
                RETURNING app_id, webhook
            ), notified AS (
                SELECT pg_notify('latchkey_outbox', '') FROM queued WHERE $8
                UNION ALL
                SELECT pg_notify('latchkey_webhooks', app_id || '/' || webhook) FROM reported WHERE $8
            )
            SELECT (SELECT count(*) FROM touched) + 0 * (SELECT count(*) FROM notified) AS "touched!",
                EXISTS (SELECT FROM gate WHERE state <> 'active') AS "closed!"
            "#,
            app.as_str(),
            user.0,
            epoch.0,
            contest,
            kind,
            recipient,
            requested_at,
            self.should_notify(),
            event.id,
            event.at,
            event.kind,
            event.session,
            event.ip,
            event.detail,
            outbox::trace_payload_json(),
            &webhooks,
        );
        let row = timeout_at(deadline, query.fetch_one(connection)).await;
        if call.end_call(row)?.closed {
            return Err(app_being_deleted());
        }
        if mail.is_some() {
            self.notify_deliverer();
        }
        Ok(())
    }
}
