//! Users. A call that every login or registration needs is one statement. Rare changes are transactions.

use latchkey_crds::types::AppId;
use uuid::Uuid;

use crate::{
    domain::{
        audit::Event,
        email::Email,
        mail::Mail,
        password::PasswordHash,
        ports::{
            AddressChange, AddressChangeRequest, AddressChanged, ChangedUser, Confirmation, CreateUserOutcome,
            LoginCandidate, NewUser, OwnAccounts, PasswordChange, PasswordReset, Rename, Renamed, StoreError,
            UserDeletion, Users,
        },
        session::Session,
        user::{Epoch, User, UserId},
    },
    store::Stores,
};

mod change_address;
mod change_password;
mod confirm;
mod delete;
mod foreign_hashes;
mod lock;
mod login;
mod read;
mod register;
mod rename;
mod renew_hash;
mod request_address;
mod reset_password;
mod row;
mod unverified;

pub(super) use foreign_hashes::add_hash_class;
pub use foreign_hashes::{ForeignHashExpiry, SetForeignHashOutcome};
pub(super) use lock::{LockedUser, lock_user};
pub(super) use register::app_being_deleted;
pub(super) use row::{UserRow, user_query};
pub use unverified::{UnverifiedBatch, UnverifiedExpiry, UnverifiedPosition};

impl Users for Stores {
    async fn user(&self, app: &AppId, id: UserId) -> Result<Option<User>, StoreError> {
        self.postgres.user(app, id).await
    }

    async fn user_by_email(&self, app: &AppId, email: &Email) -> Result<Option<User>, StoreError> {
        self.postgres.user_by_email(app, email).await
    }

    async fn login_candidate(&self, app: &AppId, email: &Email) -> Result<LoginCandidate, StoreError> {
        self.postgres.login_candidate(app, email).await
    }

    async fn create_user(
        &self,
        app: &AppId,
        user: NewUser,
        mail: Option<Mail>,
    ) -> Result<CreateUserOutcome, StoreError> {
        self.postgres.create_user(app, user, mail).await
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
        self.postgres.record_repeated_registration(app, user, epoch, contest, mail, event).await
    }

    async fn replace_hash(
        &self,
        app: &AppId,
        user: UserId,
        old: &PasswordHash,
        new: PasswordHash,
    ) -> Result<(), StoreError> {
        self.postgres.replace_hash(app, user, old, new).await
    }

    async fn confirm_address(&self, app: &AppId, change: Confirmation) -> Result<Option<ChangedUser>, StoreError> {
        self.postgres.confirm_address(app, change).await
    }

    async fn reset_password(&self, app: &AppId, change: PasswordReset) -> Result<Option<ChangedUser>, StoreError> {
        self.postgres.reset_password(app, change).await
    }
}

impl OwnAccounts for Stores {
    async fn user_of_session(&self, app: &AppId, session: &Session) -> Result<Option<User>, StoreError> {
        self.postgres.user_of_session(app, session).await
    }

    async fn rename(&self, app: &AppId, change: Rename) -> Result<Option<Renamed>, StoreError> {
        self.postgres.rename(app, change).await
    }

    async fn remove_profile_row(&self, app: &AppId, row: Uuid) -> Result<(), StoreError> {
        self.postgres.remove_profile_row(app, row).await
    }

    async fn set_password(&self, app: &AppId, change: PasswordChange) -> Result<Option<User>, StoreError> {
        self.postgres.set_password(app, change).await
    }

    async fn request_address_change(
        &self,
        app: &AppId,
        request: AddressChangeRequest,
    ) -> Result<Option<User>, StoreError> {
        self.postgres.request_address_change(app, request).await
    }

    async fn change_address(&self, app: &AppId, change: AddressChange) -> Result<Option<AddressChanged>, StoreError> {
        self.postgres.change_address(app, change).await
    }

    async fn delete_user(&self, app: &AppId, removal: UserDeletion) -> Result<Option<Epoch>, StoreError> {
        self.postgres.delete_user(app, removal).await
    }
}
