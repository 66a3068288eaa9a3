//! Creates, changes and deletes users.

use tracing::warn;

use super::{AdminUser, AdministratorCall, CreatedBy, ExternalId, Metadata, Version};
use crate::domain::{
    audit::EventKind,
    email::Email,
    epochs::propagate_epoch_change,
    error::CommonError,
    mail::MailKind,
    password::{self, Password, PasswordHash, WeakPassword},
    password_policy::{PasswordPolicyError, check_password_policy},
    ports::{
        ChangeOutcome, ChangedByAdministrator, NewAdministeredIdentity, NewAdministeredUser, Outbox, OwnAccounts,
        PasswordHasher, RemovalOutcome, Sessions, UserAdministration, UserChange, UserConflict,
    },
    user::{Name, UserId},
};

/// A user to create. The endpoint has checked that the App allows the domain of the email address and has the Providers
/// of the identities.
pub struct CreateUserInput {
    pub external_id: Option<ExternalId>,
    pub email: Option<Email>,
    pub email_verified: bool,
    pub name: Option<Name>,
    pub disabled: bool,
    pub metadata: Option<Metadata>,
    pub identities: Vec<NewAdministeredIdentity>,
    /// At most one of `password` and `password_hash` is set.
    pub password: Option<Password>,
    pub password_hash: Option<PasswordHash>,
    pub mail: Option<MailKind>,
}

#[derive(Debug, thiserror::Error)]
pub enum CreateUserError {
    #[error(transparent)]
    Weak(#[from] WeakPassword),
    #[error("another user already has a value that must be unique")]
    Conflict(UserConflict),
    #[error(transparent)]
    Common(#[from] CommonError),
}

/// A change to a user. A field that is `None` stays as it is.
pub struct ChangeUserInput {
    pub if_version: Option<Version>,
    pub name: Option<Option<Name>>,
    pub email: Option<Email>,
    pub email_verified: Option<bool>,
    pub disabled: Option<bool>,
    /// `Some(None)` removes the metadata.
    pub metadata: Option<Option<Metadata>>,
    /// `Some(None)` removes the external id.
    pub external_id: Option<Option<ExternalId>>,
}

/// Why a change or deletion of a user failed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeUserError {
    #[error("there is no such user")]
    NotFound,
    #[error("the user has another version")]
    VersionConflict,
    #[error("the user has no email address that can be verified")]
    NoAddress,
    #[error("another user already has one of the new values")]
    Conflict(UserConflict),
    #[error(transparent)]
    Common(#[from] CommonError),
}

// === impl CreateUserError ===

impl From<PasswordPolicyError> for CreateUserError {
    fn from(error: PasswordPolicyError) -> Self {
        match error {
            PasswordPolicyError::Weak(weak) => Self::Weak(weak),
            PasswordPolicyError::Common(error) => Self::Common(error),
        }
    }
}

/// Creates a user. The App's password policy applies. The App's setting `signUp` does not apply.
pub async fn create_user<S: UserAdministration + PasswordHasher>(
    admin: AdministratorCall<'_, S>,
    input: CreateUserInput,
) -> Result<AdminUser, CreateUserError> {
    let call = admin.call;
    let password_hash = match &input.password {
        None => input.password_hash,
        Some(password) => {
            let guesses = password::likely_guesses(input.email.as_ref(), input.name.as_ref());
            check_password_policy(call, password, guesses).await?;
            let hash = call.stores.hash(call.app, call.client_address(), password).await;
            Some(hash.map_err(CommonError::from)?)
        }
    };
    let native = call.stores.class_of_new_hashes();
    let foreign_class = password_hash.as_ref().and_then(|hash| hash.foreign_class(native));
    let user = NewAdministeredUser {
        id: UserId(call.env.new_uuid()),
        external_id: input.external_id,
        email: input.email,
        email_verified: input.email_verified,
        name: input.name,
        disabled: input.disabled,
        password_hash,
        foreign_class,
        metadata: input.metadata,
        identities: input.identities,
        created_by: CreatedBy::Administrator,
        created_at: call.env.now(),
    };
    let event = admin.event(EventKind::UserCreated, user.id);
    let created = call.stores.create_administered_user(admin.app_id(), user, input.mail, event).await;
    created.map_err(CommonError::from)?.map_err(CreateUserError::Conflict)
}

/// Changes a user, and returns the user after the change.
pub async fn change_user<S: UserAdministration + OwnAccounts + Sessions + Outbox>(
    admin: AdministratorCall<'_, S>,
    user: UserId,
    input: ChangeUserInput,
) -> Result<AdminUser, ChangeUserError> {
    let event = admin.event(EventKind::UserChanged, user);
    let change = UserChange {
        user,
        if_version: input.if_version,
        name: input.name,
        email: input.email,
        email_verified: input.email_verified,
        disabled: input.disabled,
        metadata: input.metadata,
        external_id: input.external_id,
        at: event.at,
        event,
    };
    match admin.stores().change_user(admin.app_id(), change).await.map_err(CommonError::from)? {
        ChangeOutcome::Changed(changed) => {
            propagate(admin, &changed).await;
            Ok(changed.user)
        }
        ChangeOutcome::Unchanged(user) => Ok(*user),
        ChangeOutcome::NotFound => Err(ChangeUserError::NotFound),
        ChangeOutcome::VersionConflict => Err(ChangeUserError::VersionConflict),
        ChangeOutcome::NoAddress => Err(ChangeUserError::NoAddress),
        ChangeOutcome::Conflict(conflict) => Err(ChangeUserError::Conflict(conflict)),
    }
}

/// Writes the raised epoch or the changed profile to Redis before the response. If that fails, the outbox worker
/// writes it later.
async fn propagate<S: OwnAccounts + Sessions + Outbox>(
    admin: AdministratorCall<'_, S>,
    changed: &ChangedByAdministrator,
) {
    let profile = changed.user.profile();
    if let Some(change) = &changed.epoch_change {
        propagate_epoch_change(admin.call, change, Some(&profile)).await;
    }
    let Some(row) = changed.profile_row else { return };
    let propagated = async {
        admin.stores().store_profile(admin.app_id(), changed.user.id, &profile).await?;
        admin.stores().remove_profile_row(admin.app_id(), row).await
    };
    if let Err(error) = propagated.await {
        warn!(
            app = %admin.app_id(),
            error = &error as &dyn std::error::Error,
            "a changed profile was not written to Redis now; the outbox worker writes it later"
        );
    }
}

/// Deletes a user. The effect is the same as if the user called *delete-user*.
pub async fn remove_user<S: UserAdministration + Sessions + Outbox>(
    admin: AdministratorCall<'_, S>,
    user: UserId,
    if_version: Option<Version>,
) -> Result<(), ChangeUserError> {
    let event = admin.event(EventKind::UserDeleted, user);
    match admin.stores().remove_user(admin.app_id(), user, if_version, event).await.map_err(CommonError::from)? {
        RemovalOutcome::Removed(change) => {
            propagate_epoch_change(admin.call, &change, None).await;
            Ok(())
        }
        RemovalOutcome::NotFound => Err(ChangeUserError::NotFound),
        RemovalOutcome::VersionConflict => Err(ChangeUserError::VersionConflict),
    }
}
