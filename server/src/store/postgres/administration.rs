//! The `UserAdministration` port. Each change is a transaction of small statements (docs/decisions/0032). A page of a
//! list is read with one statement. All calls of administrators together use only a part of the pool
//! (`begin_administration`).

use latchkey_crds::types::AppId;

use crate::{
    domain::{
        administration::{AdminUser, AuditRow, DeadLetterRow, Version},
        audit::Event,
        mail::{EpochChange, MailKind},
        ports::{
            ChangeOutcome, EventFilter, IdentityRemoval, ImportOutcome, MailOutcome, NewAdministeredUser,
            RemovalOutcome, RetrySelection, RowPage, RowPosition, StoreError, UserAdministration, UserChange,
            UserConflict, UserFilter, UserPage, UserPosition,
        },
        user::UserId,
    },
    store::Stores,
};

mod change;
mod conflicts;
mod create;
mod dead_letters;
mod events;
mod export;
mod identities;
mod import;
mod insert;
mod list;
mod mails;
mod read;
mod remove;
mod row;
mod sessions;

impl UserAdministration for Stores {
    async fn users(
        &self,
        app: &AppId,
        filter: &UserFilter,
        after: Option<&UserPosition>,
        limit: u16,
    ) -> Result<UserPage, StoreError> {
        self.postgres.administered_users(app, filter, after, limit).await
    }

    async fn administered_user(&self, app: &AppId, user: UserId) -> Result<Option<AdminUser>, StoreError> {
        self.postgres.administered_user(app, user).await
    }

    async fn create_administered_user(
        &self,
        app: &AppId,
        user: NewAdministeredUser,
        mail: Option<MailKind>,
        event: Event,
    ) -> Result<Result<AdminUser, UserConflict>, StoreError> {
        self.postgres.create_administered_user(app, &user, mail, &event).await
    }

    async fn change_user(&self, app: &AppId, change: UserChange) -> Result<ChangeOutcome, StoreError> {
        self.postgres.change_administered_user(app, change).await
    }

    async fn remove_user(
        &self,
        app: &AppId,
        user: UserId,
        if_version: Option<Version>,
        event: Event,
    ) -> Result<RemovalOutcome, StoreError> {
        self.postgres.remove_user(app, user, if_version, &event).await
    }

    async fn end_all_sessions(
        &self,
        app: &AppId,
        user: UserId,
        event: Event,
    ) -> Result<Option<EpochChange>, StoreError> {
        self.postgres.end_all_sessions(app, user, &event).await
    }

    async fn queue_mail(
        &self,
        app: &AppId,
        user: UserId,
        kind: MailKind,
        event: Event,
    ) -> Result<MailOutcome, StoreError> {
        self.postgres.queue_mail(app, user, kind, &event).await
    }

    async fn remove_identities(
        &self,
        app: &AppId,
        user: UserId,
        provider: &str,
        event: Event,
    ) -> Result<IdentityRemoval, StoreError> {
        self.postgres.remove_identities(app, user, provider, &event).await
    }

    async fn import_users(
        &self,
        app: &AppId,
        users: Vec<NewAdministeredUser>,
        dry_run: bool,
        event: Event,
    ) -> Result<Vec<ImportOutcome>, StoreError> {
        self.postgres.import_users(app, &users, dry_run, event).await
    }

    async fn export_users(&self, app: &AppId, after: Option<UserId>, limit: u16) -> Result<Vec<AdminUser>, StoreError> {
        self.postgres.export_users(app, after, limit).await
    }

    async fn events(
        &self,
        app: &AppId,
        filter: &EventFilter,
        after: Option<RowPosition>,
        limit: u16,
    ) -> Result<RowPage<AuditRow>, StoreError> {
        self.postgres.events(app, filter, after, limit).await
    }

    async fn app_dead_letters(
        &self,
        app: &AppId,
        kind: Option<&'static str>,
        after: Option<RowPosition>,
        limit: u16,
    ) -> Result<RowPage<DeadLetterRow>, StoreError> {
        self.postgres.app_dead_letters(app, kind, after, limit).await
    }

    async fn retry_dead_letters(&self, app: &AppId, selection: RetrySelection) -> Result<u64, StoreError> {
        self.postgres.retry_dead_letters(app, selection).await
    }

    async fn record_administration(&self, app: &AppId, event: Event) -> Result<(), StoreError> {
        self.postgres.record_administration(app, &event).await
    }
}
