//! Queues a mail that an administrator requests.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use crate::{
    domain::{
        audit::Event,
        mail::{Mail, MailKind},
        ports::{MailOutcome, StoreError},
        user::UserId,
    },
    store::postgres::{PostgresStore, audit, outbox, users::lock_user},
};

impl PostgresStore {
    pub(super) async fn queue_mail(
        &self,
        app: &AppId,
        user: UserId,
        kind: MailKind,
        event: &Event,
    ) -> Result<MailOutcome, StoreError> {
        let mail = Mail { kind, recipient: Some(user), requested_at: event.at };
        let mut call = self.begin_administration("queue_mail").await?;
        let (connection, deadline) = call.parts();
        let outcome = timeout_at(deadline, queue(connection, app, user, &mail, event, self.should_notify())).await;
        let outcome = call.end_call(outcome)?;
        if outcome == MailOutcome::Queued {
            self.notify_deliverer();
        }
        Ok(outcome)
    }
}

async fn queue(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
    mail: &Mail,
    event: &Event,
    notify: bool,
) -> Result<MailOutcome, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    // Because of the lock, concurrent calls run one after the other, and each sees the mails of the earlier calls. The
    // user may have changed since the use case read the user.
    let Some(locked) = lock_user(&mut transaction, app, user).await? else {
        transaction.rollback().await?;
        return Ok(MailOutcome::NotFound);
    };
    if !locked.can_get_code(mail.kind) {
        transaction.rollback().await?;
        return Ok(MailOutcome::NotPossible);
    }
    let is_waiting = sqlx::query_scalar!(
        r#"
        SELECT EXISTS (
            SELECT FROM outbox WHERE app_id = $1 AND user_id = $2 AND kind = $3 AND dead_at IS NULL
        ) AS "waiting!"
        "#,
        app.as_str(),
        user.0,
        mail.kind.as_str(),
    )
    .fetch_one(&mut *transaction)
    .await?;
    if is_waiting {
        transaction.rollback().await?;
        return Ok(MailOutcome::Waiting);
    }
    outbox::insert_mail(&mut transaction, app, mail, notify).await?;
    audit::insert(&mut transaction, app, event, notify).await?;
    transaction.commit().await?;
    Ok(MailOutcome::Queued)
}
