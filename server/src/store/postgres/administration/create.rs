//! Creates a user with the user's identities.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use super::{
    conflicts::{MAX_ATTEMPTS, UniqueValues, find_conflict, values_contended},
    insert::{insert_identities, insert_users},
    read::{DetailedUser, read_user},
};
use crate::{
    domain::{
        administration::AdminUser,
        audit::Event,
        mail::{Mail, MailKind},
        ports::{NewAdministeredUser, StoreError, UserConflict},
    },
    store::postgres::{
        PostgresStore, apps, audit, outbox,
        users::{add_hash_class, app_being_deleted},
    },
};

enum CreateOutcome {
    Created(Box<DetailedUser>),
    Conflict(UserConflict),
    /// Another user had one of the values when this user was inserted, but no longer has it.
    Contended,
    /// The App's users are being deleted.
    AppBeingDeleted,
}

impl PostgresStore {
    pub(super) async fn create_administered_user(
        &self,
        app: &AppId,
        user: &NewAdministeredUser,
        mail: Option<MailKind>,
        event: &Event,
    ) -> Result<Result<AdminUser, UserConflict>, StoreError> {
        let mail = mail.map(|kind| Mail { kind, recipient: Some(user.id), requested_at: event.at });
        for _ in 0..MAX_ATTEMPTS {
            let mut call = self.begin_administration("create_administered_user").await?;
            let (connection, deadline) = call.parts();
            let creating = create(connection, app, user, mail.as_ref(), event, self.should_notify());
            let outcome = timeout_at(deadline, creating).await;
            match call.end_call(outcome)? {
                CreateOutcome::Created(created) => {
                    if mail.is_some() {
                        self.notify_deliverer();
                    }
                    return AdminUser::try_from(*created).map(Ok).map_err(|error| self.record_error(error));
                }
                CreateOutcome::Conflict(conflict) => return Ok(Err(conflict)),
                CreateOutcome::Contended => {}
                CreateOutcome::AppBeingDeleted => return Err(app_being_deleted()),
            }
        }
        Err(values_contended())
    }
}

async fn create(
    connection: &mut PgConnection,
    app: &AppId,
    user: &NewAdministeredUser,
    mail: Option<&Mail>,
    event: &Event,
    notify: bool,
) -> Result<CreateOutcome, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    if !apps::is_active(&mut transaction, app).await? {
        transaction.rollback().await?;
        return Ok(CreateOutcome::AppBeingDeleted);
    }
    if let Some(class) = user.foreign_class
        && !add_hash_class(&mut transaction, app, class).await?
    {
        transaction.rollback().await?;
        return Ok(CreateOutcome::Conflict(UserConflict::TooManyHashKinds));
    }
    // Concurrent calls with the same values wait here until the first of them has ended.
    if !insert_users(&mut transaction, app, &[user], event.at).await?
        || !insert_identities(&mut transaction, app, &[user], event.at).await?
    {
        let values = UniqueValues {
            user: user.id,
            external_id: user.external_id.as_ref().map(|external_id| external_id.as_str()),
            email: user.email.as_ref().map(|email| email.canonical()),
            identities: &user.identities,
        };
        let conflict = find_conflict(&mut transaction, app, &values).await?;
        transaction.rollback().await?;
        return Ok(conflict.map_or(CreateOutcome::Contended, CreateOutcome::Conflict));
    }
    if let Some(mail) = mail {
        outbox::insert_mail(&mut transaction, app, mail, notify).await?;
    }
    audit::insert(&mut transaction, app, event, notify).await?;
    let created = read_user(&mut transaction, app, user.id).await?.ok_or(sqlx::Error::RowNotFound)?;
    transaction.commit().await?;
    Ok(CreateOutcome::Created(Box::new(created)))
}
