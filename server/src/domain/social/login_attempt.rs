//! The steps of a login with a verified identity, for *callback* and for *login* with a provider's token.

use latchkey_crds::rendered::RenderedProvider;
use time::OffsetDateTime;

use super::{
    error::ProviderLoginError,
    groups::replace_groups,
    plan::{Plan, plan_new_identity},
    provider::{new_identity, provider_detail},
};
use crate::domain::{
    audit::{Event, EventKind},
    call::Call,
    email::Email,
    epochs::propagate_epoch,
    error::CommonError,
    flow::IdentityToLink,
    identity::{ProviderOperation, VerifiedIdentity},
    login_limits::remember_client,
    mail::{Mail, MailKind},
    mail_limits::{acquire_mail_limit, release_mail_limit},
    ports::{
        AccountTransfer, AuditLog, GroupChanges, Identities, LinkOutcome, LinkRequest, NewFederatedUser, NewIdentity,
        Outbox, Providers, RateLimits, Sessions, StoreError, Users,
    },
    rate_limits::{self, MailPurpose},
    session::Amr,
    sessions::open::open_session,
    token::Tokens,
    user::{Epoch, User, UserId},
};

/// The maximum number of attempts at a login while concurrent requests change the user. Each new attempt means that
/// another request has succeeded.
const MAX_ATTEMPTS: u32 = 5;

/// A user with a new session.
pub struct ProviderLogin {
    pub user: User,
    pub tokens: Tokens,
}

/// Acquires a permit to call the provider, and the rate limit of the client.
///
/// The permit is acquired first, so that a call for which there is no capacity does not count towards the rate limit.
/// Each callback counts as a login, because anybody can start flows and send invented codes, for which the server calls
/// the provider.
pub(super) async fn acquire_provider_permit<S: RateLimits + Providers>(
    call: Call<'_, S>,
    operation: ProviderOperation,
    provider: &RenderedProvider,
) -> Result<S::Permit, ProviderLoginError> {
    let permit = call.stores.try_acquire(operation, call.app, provider, call.client_address())?;
    call.stores.acquire(call.app_id(), rate_limits::logins(call.app, call.client_address())).await?;
    Ok(permit)
}

/// A login with a provider: the parameters that its steps share.
pub(super) struct LoginAttempt<'a, S> {
    pub(super) call: Call<'a, S>,
    pub(super) provider: &'a RenderedProvider,
}

impl<S: Users + Identities + GroupChanges + RateLimits + Outbox + Sessions + AuditLog> LoginAttempt<'_, S> {
    /// Opens a session for the user of a verified identity.
    pub(super) async fn log_in(&self, verified: &VerifiedIdentity) -> Result<ProviderLogin, ProviderLoginError> {
        for _ in 0..MAX_ATTEMPTS {
            let user = self.find_or_create_user(verified).await?;
            let opened = open_session(self.call, &user, Amr::Federated).await?;
            if let Some(tokens) = opened {
                remember_client(self.call, &user).await;
                return Ok(ProviderLogin { user, tokens });
            }
            // The user's epoch has risen since the user was read: start again.
        }
        Err(contention_error().into())
    }

    /// Finds the user by the identity. If the identity is new, links it to an account, transfers an account, or creates
    /// a user (see [`Plan`]). If the user can log in, takes over the groups that the provider reports.
    pub(super) async fn find_or_create_user(&self, verified: &VerifiedIdentity) -> Result<User, ProviderLoginError> {
        for _ in 0..MAX_ATTEMPTS {
            let (authority, subject) = (&verified.authority, &verified.subject);
            let known = self.call.stores.user_by_identity(self.call.app_id(), authority, subject).await?;
            let user = match known {
                Some(user) => Some(user),
                None => {
                    let find_user = |email| self.call.stores.user_by_email(self.call.app_id(), email);
                    self.execute(plan_new_identity(self.call.app, self.provider, verified, find_user).await?, verified)
                        .await?
                }
            };
            let Some(user) = user else { continue };
            if user.disabled {
                return Err(ProviderLoginError::Disabled);
            }
            if self.call.app.doc.require_verified_email && !user.email_verified {
                return Err(ProviderLoginError::EmailNotVerified);
            }
            replace_groups(self.call, self.provider, user.id, verified).await?;
            return Ok(user);
        }
        Err(contention_error().into())
    }

    /// Executes a plan. Returns `None` if a concurrent request has changed the user or the identity: nothing was
    /// written, and the login starts again.
    async fn execute(&self, plan: Plan, verified: &VerifiedIdentity) -> Result<Option<User>, CommonError> {
        let now = self.call.env.now();
        let identity = new_identity(self.provider, verified, now);
        match plan {
            Plan::Link(user) => {
                let address = user.email.as_ref().map(|email| email.canonical().to_owned());
                let event = self.event(EventKind::IdentityLinked, user.id);
                let linking = LinkRequest { user: user.id, epoch: user.epoch, address, identity, event };
                match self.call.stores.link_identity(self.call.app_id(), linking).await? {
                    LinkOutcome::Done => Ok(Some(user)),
                    LinkOutcome::AlreadyLinked(_) | LinkOutcome::UserChanged => Ok(None),
                }
            }
            Plan::Transfer(user, email) => {
                let change = AccountTransfer {
                    user: user.id,
                    epoch: user.epoch,
                    address: email.canonical().to_owned(),
                    name: name_or_empty(verified),
                    identity,
                    event: self.event(EventKind::IdentityLinked, user.id),
                };
                let changed = self.call.stores.transfer_account(self.call.app_id(), change).await?;
                if let Some(user) = &changed {
                    propagate_epoch(self.call, user, None).await;
                }
                Ok(changed)
            }
            Plan::Create { email, pending } => self.create_user(email, pending, verified, identity, now).await,
        }
    }

    async fn create_user(
        &self,
        email: Option<Email>,
        pending: Option<Email>,
        verified: &VerifiedIdentity,
        identity: NewIdentity,
        now: OffsetDateTime,
    ) -> Result<Option<User>, CommonError> {
        let id = UserId(self.call.env.new_uuid());
        let mut mail_permit = None;
        let mut mail = None;
        if let Some(address) = &pending {
            // The mail is chosen before the limit is acquired. If the choice fails, the limit has counted nothing.
            let pending_mail = self.mail_to_pending_address(address, id, now).await?;
            mail_permit = acquire_mail_limit(self.call, address, MailPurpose::Confirm).await?;
            mail = mail_permit.is_some().then_some(pending_mail);
        }
        let user = NewFederatedUser {
            id,
            email: email.clone(),
            pending_email: pending.clone(),
            name: name_or_empty(verified),
            created_at: now,
            event: self.event(EventKind::Registered, id),
        };
        let is_created = self.call.stores.create_federated_user(self.call.app_id(), user, identity, mail).await;
        if !matches!(is_created, Ok(true)) {
            release_mail_limit(self.call, mail_permit).await;
        }
        if !is_created? {
            return Ok(None);
        }
        Ok(Some(User {
            id,
            email_verified: email.is_some(),
            email,
            pending_email: pending,
            name: name_or_empty(verified),
            password_hash: None,
            password_session: None,
            contested: false,
            disabled: false,
            epoch: Epoch(1),
            version: 1,
            created_at: now,
            updated_at: now,
        }))
    }

    /// Returns the mail to a pending email address: the confirmation code or, if another account has verified the
    /// address, the notice that there is such an account.
    async fn mail_to_pending_address(
        &self,
        address: &Email,
        id: UserId,
        now: OffsetDateTime,
    ) -> Result<Mail, CommonError> {
        let owner =
            self.call.stores.user_by_email(self.call.app_id(), address).await?.filter(|owner| owner.email_verified);
        Ok(match owner {
            None => Mail { kind: MailKind::Confirm, recipient: Some(id), requested_at: now },
            // The owner of a disabled account gets no mail: the outbox row is written, but sends nothing.
            Some(owner) => Mail {
                kind: MailKind::AccountExists,
                recipient: (!owner.disabled).then_some(owner.id),
                requested_at: now,
            },
        })
    }

    /// Converts the identity to the form that is stored until the page *continue* links it.
    pub(super) fn identity_to_link(&self, verified: &VerifiedIdentity) -> IdentityToLink {
        IdentityToLink {
            provider: self.provider.name.clone(),
            authority: verified.authority.clone(),
            subject: verified.subject.clone(),
            email: verified.email.as_ref().map(|provider_email| provider_email.email.as_str().to_owned()),
        }
    }

    fn event(&self, kind: EventKind, user: UserId) -> Event {
        self.call.event(kind, user).with_detail(provider_detail(&self.provider.name))
    }
}

fn name_or_empty(verified: &VerifiedIdentity) -> String {
    verified.name.as_ref().map_or_else(String::new, |name| name.as_str().to_owned())
}

/// The error of a login for which all attempts failed, because concurrent requests changed the user during each of them.
fn contention_error() -> StoreError {
    StoreError::Unavailable { store: "Postgres", source: "the account is being changed".into() }
}
