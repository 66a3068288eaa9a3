//! Identities: links between users and subjects of providers. Each change is one transaction with its audit event.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use super::{
    audit,
    outbox::{self, PROPAGATION_DELAY_SECONDS},
    users::{UserRow, app_being_deleted},
};
use crate::{
    domain::{
        identity::Identity,
        mail::{Mail, MailKind},
        ports::{
            AccountTransfer, Identities, LinkOutcome, LinkRequest, NewFederatedUser, NewIdentity, StoreError,
            UnlinkOutcome, UnlinkRequest,
        },
        user::{User, UserId},
    },
    store::Stores,
};

struct IdentityRow {
    provider: String,
    subject: String,
    email: Option<String>,
    linked_at: OffsetDateTime,
}

/// The outcome of `create`.
enum CreateOutcome {
    Created,
    /// Another user has the email address or the identity.
    Taken,
    /// The App's users are being deleted.
    AppBeingDeleted,
}

// === impl IdentityRow ===

impl From<IdentityRow> for Identity {
    fn from(row: IdentityRow) -> Self {
        Self { provider: row.provider, subject: row.subject, email: row.email, linked_at: row.linked_at }
    }
}

/// Links an identity to a user. Returns `false` if it is linked already: of concurrent calls, one succeeds.
async fn insert_identity(
    connection: &mut PgConnection,
    app: &AppId,
    user: Uuid,
    identity: &NewIdentity,
) -> Result<bool, sqlx::Error> {
    let inserted = sqlx::query!(
        "INSERT INTO identities (app_id, authority, subject, user_id, provider, email, linked_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7)
         ON CONFLICT DO NOTHING",
        app.as_str(),
        identity.authority,
        identity.subject,
        user,
        identity.provider.as_str(),
        identity.email.as_ref().map(|email| email.as_str()),
        identity.at,
    )
    .execute(connection)
    .await?;
    Ok(inserted.rows_affected() > 0)
}

async fn create_user(
    connection: &mut PgConnection,
    app: &AppId,
    user: &NewFederatedUser,
    identity: &NewIdentity,
    mail: Option<&Mail>,
    tells: bool,
) -> Result<CreateOutcome, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    // The lock on the App's row orders this with the deletion of the App's users, as in `create_user`.
    let made = sqlx::query!(
        r#"
        WITH gate AS (
            SELECT state FROM apps WHERE app_id = $1 FOR SHARE
        ), made AS (
            INSERT INTO users
                (app_id, id, email, email_canonical, email_verified_at, pending_email, pending_email_canonical, name,
                    created_at, updated_at)
            SELECT $1, $2, $3, $4, CASE WHEN $3::text IS NULL THEN NULL ELSE $8::timestamptz END, $5, $6, $7, $8, $8
            WHERE NOT EXISTS (SELECT FROM gate WHERE state <> 'active')
            ON CONFLICT DO NOTHING
            RETURNING id
        )
        SELECT (SELECT count(*) FROM made) AS "made!",
            EXISTS (SELECT FROM gate WHERE state <> 'active') AS "closed!"
        "#,
        app.as_str(),
        user.id.0,
        user.email.as_ref().map(|email| email.as_str()),
        user.email.as_ref().map(|email| email.canonical()),
        user.pending_email.as_ref().map(|email| email.as_str()),
        user.pending_email.as_ref().map(|email| email.canonical()),
        user.name,
        user.created_at,
    )
    .fetch_one(&mut *transaction)
    .await?;
    if made.closed {
        return Ok(CreateOutcome::AppBeingDeleted);
    }
    if made.made == 0 || !insert_identity(&mut transaction, app, user.id.0, identity).await? {
        // Dropping the transaction rolls back the user.
        return Ok(CreateOutcome::Taken);
    }
    if let Some(mail) = mail {
        outbox::insert_mail(&mut transaction, app, mail, tells).await?;
    }
    audit::insert(&mut transaction, app, &user.event).await?;
    transaction.commit().await?;
    Ok(CreateOutcome::Created)
}

async fn link_in_transaction(
    connection: &mut PgConnection,
    app: &AppId,
    linking: &LinkRequest,
    tells: bool,
) -> Result<LinkOutcome, sqlx::Error> {
    let identity = &linking.identity;
    let mut transaction = connection.begin().await?;
    let owner = sqlx::query!(
        r#"
        SELECT email_verified_at IS NOT NULL AS "verified!" FROM users
        WHERE app_id = $1 AND id = $2 AND epoch = $3 AND disabled_at IS NULL
            AND CASE WHEN $4::text IS NULL THEN email IS NULL OR email_verified_at IS NOT NULL
                ELSE email_canonical = $4 AND email_verified_at IS NOT NULL END
        FOR UPDATE
        "#,
        app.as_str(),
        linking.user.0,
        linking.epoch.0,
        linking.address,
    )
    .fetch_optional(&mut *transaction)
    .await?;
    let Some(owner) = owner else { return Ok(LinkOutcome::UserChanged) };
    if !insert_identity(&mut transaction, app, linking.user.0, identity).await? {
        let holder = sqlx::query_scalar!(
            "SELECT user_id FROM identities WHERE app_id = $1 AND authority = $2 AND subject = $3",
            app.as_str(),
            identity.authority,
            identity.subject,
        )
        .fetch_optional(&mut *transaction)
        .await?;
        return Ok(holder.map_or(LinkOutcome::UserChanged, |holder| LinkOutcome::AlreadyLinked(UserId(holder))));
    }
    if owner.verified {
        let notice = Mail { kind: MailKind::NewSignIn, recipient: Some(linking.user), requested_at: identity.at };
        outbox::insert_mail(&mut transaction, app, &notice, tells).await?;
    }
    audit::insert(&mut transaction, app, &linking.event).await?;
    transaction.commit().await?;
    Ok(LinkOutcome::Done)
}

async fn transfer_in_transaction(
    connection: &mut PgConnection,
    app: &AppId,
    change: &AccountTransfer,
) -> Result<Option<UserRow>, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let row = sqlx::query_as!(
        UserRow,
        r#"
        WITH changed AS (
            UPDATE users
            SET email_verified_at = $5,
                epoch = epoch + 1,
                version = version + 1,
                password_hash = NULL,
                contested = false,
                pending_email = NULL,
                pending_email_canonical = NULL,
                name = $6,
                updated_at = $5
            WHERE app_id = $1 AND id = $2 AND epoch = $3 AND email_canonical = $4 AND email_verified_at IS NULL
                AND disabled_at IS NULL
            RETURNING *
        ), unlinked AS (
            DELETE FROM identities USING changed
            WHERE identities.app_id = $1 AND identities.user_id = changed.id
        ), carried AS (
            INSERT INTO outbox (app_id, kind, user_id, epoch, due_at)
            SELECT $1, 'epoch', id, epoch, statement_timestamp() + make_interval(secs => $7) FROM changed
        )
        SELECT id, email, email_verified_at, pending_email, name, password_hash, password_session, contested, epoch,
            version, disabled_at, created_at, updated_at
        FROM changed
        "#,
        app.as_str(),
        change.user.0,
        change.epoch.0,
        change.address,
        change.identity.at,
        change.name,
        PROPAGATION_DELAY_SECONDS,
    )
    .fetch_optional(&mut *transaction)
    .await?;
    let Some(row) = row else { return Ok(None) };
    if !insert_identity(&mut transaction, app, row.id, &change.identity).await? {
        return Ok(None);
    }
    audit::insert(&mut transaction, app, &change.event).await?;
    transaction.commit().await?;
    Ok(Some(row))
}

async fn unlink_in_transaction(
    connection: &mut PgConnection,
    app: &AppId,
    unlinking: &UnlinkRequest,
) -> Result<UnlinkOutcome, sqlx::Error> {
    let UnlinkRequest { user, provider, usable, event } = unlinking;
    let usable: Vec<String> = usable.iter().map(|name| name.as_str().to_owned()).collect();
    let mut transaction = connection.begin().await?;
    // A separate statement takes the lock, so that the next one sees what concurrent calls have removed.
    let owner = sqlx::query!(
        r#"
        SELECT email IS NOT NULL AND password_hash IS NOT NULL AS "has_password!" FROM users
        WHERE app_id = $1 AND id = $2
        FOR UPDATE
        "#,
        app.as_str(),
        user.0,
    )
    .fetch_optional(&mut *transaction)
    .await?;
    let Some(owner) = owner else { return Ok(UnlinkOutcome::NotLinked) };
    let counts = sqlx::query!(
        r#"
        SELECT count(*) FILTER (WHERE provider = $3) AS "own!",
            count(*) FILTER (WHERE provider <> $3 AND provider = ANY ($4)) AS "others!"
        FROM identities WHERE app_id = $1 AND user_id = $2
        "#,
        app.as_str(),
        user.0,
        provider.as_str(),
        &usable,
    )
    .fetch_one(&mut *transaction)
    .await?;
    if counts.own == 0 {
        return Ok(UnlinkOutcome::NotLinked);
    }
    if !owner.has_password && counts.others == 0 {
        return Ok(UnlinkOutcome::LastLoginMethod);
    }
    sqlx::query!(
        "DELETE FROM identities WHERE app_id = $1 AND user_id = $2 AND provider = $3",
        app.as_str(),
        user.0,
        provider.as_str(),
    )
    .execute(&mut *transaction)
    .await?;
    audit::insert(&mut transaction, app, event).await?;
    transaction.commit().await?;
    Ok(UnlinkOutcome::Done)
}

impl Identities for Stores {
    async fn user_by_identity(&self, app: &AppId, authority: &str, subject: &str) -> Result<Option<User>, StoreError> {
        let mut held = self.postgres.begin_call("user_by_identity").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            UserRow,
            "SELECT users.id, users.email, email_verified_at, pending_email, name, password_hash, \
             password_session, contested, epoch, version, disabled_at, created_at, updated_at
             FROM identities JOIN users ON users.app_id = identities.app_id AND users.id = identities.user_id
             WHERE identities.app_id = $1 AND authority = $2 AND subject = $3",
            app.as_str(),
            authority,
            subject,
        );
        let answer = timeout_at(until, query.fetch_optional(connection)).await;
        held.end_call(answer)?.map(User::try_from).transpose()
    }

    async fn create_federated_user(
        &self,
        app: &AppId,
        user: NewFederatedUser,
        identity: NewIdentity,
        mail: Option<Mail>,
    ) -> Result<bool, StoreError> {
        let tells = self.postgres.should_notify();
        let mut held = self.postgres.begin_call("create_federated").await?;
        let (connection, until) = held.parts();
        let made = timeout_at(until, create_user(connection, app, &user, &identity, mail.as_ref(), tells)).await;
        match held.end_call(made)? {
            CreateOutcome::Created => {
                if mail.is_some() {
                    self.postgres.notify_deliverer();
                }
                Ok(true)
            }
            CreateOutcome::Taken => Ok(false),
            CreateOutcome::AppBeingDeleted => Err(app_being_deleted()),
        }
    }

    async fn link_identity(&self, app: &AppId, linking: LinkRequest) -> Result<LinkOutcome, StoreError> {
        let tells = self.postgres.should_notify();
        let mut held = self.postgres.begin_call("link_identity").await?;
        let (connection, until) = held.parts();
        let linked = timeout_at(until, link_in_transaction(connection, app, &linking, tells)).await;
        let linked = held.end_call(linked)?;
        if linked == LinkOutcome::Done {
            self.postgres.notify_deliverer();
        }
        Ok(linked)
    }

    async fn transfer_account(&self, app: &AppId, change: AccountTransfer) -> Result<Option<User>, StoreError> {
        let mut held = self.postgres.begin_call("take_over").await?;
        let (connection, until) = held.parts();
        let changed = timeout_at(until, transfer_in_transaction(connection, app, &change)).await;
        held.end_call(changed)?.map(User::try_from).transpose()
    }

    async fn identities(&self, app: &AppId, user: UserId) -> Result<Vec<Identity>, StoreError> {
        let mut held = self.postgres.begin_call("identities").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            IdentityRow,
            "SELECT provider, subject, email, linked_at FROM identities
             WHERE app_id = $1 AND user_id = $2
             ORDER BY linked_at, authority, subject",
            app.as_str(),
            user.0,
        );
        let answer = timeout_at(until, query.fetch_all(connection)).await;
        Ok(held.end_call(answer)?.into_iter().map(Identity::from).collect())
    }

    async fn unlink_identity(&self, app: &AppId, unlinking: UnlinkRequest) -> Result<UnlinkOutcome, StoreError> {
        let mut held = self.postgres.begin_call("unlink_identity").await?;
        let (connection, until) = held.parts();
        let unlinked = timeout_at(until, unlink_in_transaction(connection, app, &unlinking)).await;
        held.end_call(unlinked)
    }
}
