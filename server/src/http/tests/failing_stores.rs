//! One type that implements all ports. Stores, limits and hashing fail in the way that the test chooses. Providers
//! behave the same in every test: a social login can begin, except at the provider [`DOWN`], but never succeeds.

use std::{sync::Arc, time::Duration};

use latchkey_crds::{
    rendered::{LimitName, RenderedProvider, Window},
    types::{AppId, GroupName},
};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::{
    administration::{AdminUser, AuditRow, DeadLetterRow, Version},
    app::App,
    audit::{ActivityEntry, Event, Refusal},
    client::ClientAddress,
    code::{CodeKey, CodeRecord},
    email::{AccountKey, Email},
    flow::{FlowBinding, FlowId, LoginCodeKey, PendingLogin, StoredLogin},
    foreign_hash::HashClass,
    groups::{GroupTitle, GroupsChange, ManagedGroupName, Membership, ReportedGroups, UserGroups},
    identity::{
        AuthorizationCodeGrant, AuthorizationRequest, Identity, ProviderCapabilities, ProviderError, ProviderOperation,
        UnavailableReason, VerifiedIdentity,
    },
    mail::{EpochChange, Mail, MailKind},
    openid::{
        client_session::{ClientGrant, ClientSession, ListedClientSession, NewClientSession, SessionUse},
        code::{ClientCodeKey, ClientCodeRecord, ExchangedCode, Redemption, StoredClientCode},
        par::{PushedRequest, PushedRequestKey},
        scope::Scopes,
    },
    password::{Overloaded, Password, PasswordHash},
    ports::{
        AccountTransfer, AcquireError, AddressChange, AddressChangeRequest, AddressChanged, AuditLog, ChangeOutcome,
        ChangedUser, ClaimableWebhook, ClaimedEvent, ClaimedRow, ClientCodes, ClientSessions, Codes, Confirmation,
        Consents, CreateUserOutcome, DeliveryOutcome, DeliveryState, EventBacklog, EventFilter, EventOutcome, Flows,
        GroupAdministration, GroupChanges, GroupPage, GroupRemoval, Groups, Identities, IdentityRemoval, ImportOutcome,
        KnownWebhook, LinkOutcome, LinkRequest, LoginCandidate, MailOutcome, MemberOutcome, MemberPage, MemberPosition,
        NewAdministeredUser, NewConsent, NewFederatedUser, NewIdentity, NewUser, Outbox, OutboxBacklog, OwnAccounts,
        PasswordChange, PasswordHasher, PasswordReset, Providers, PushedRequests, PutGroupOutcome, RateLimitPermit,
        RateLimits, RemovalOutcome, Rename, Renamed, Replication, RetrySelection, RowPage, RowPosition, Sessions,
        StoreError, StoreFlowError, StoredConsent, UnlinkOutcome, UnlinkRequest, UserAdministration, UserChange,
        UserConflict, UserDeletion, UserFilter, UserPage, UserPosition, Users, WebhookEvents, WebhookKey,
    },
    rate_limits::{RateLimitCheck, RateLimited},
    session::{
        LiveSession, NewSession, OpenOutcome, Profile, RefreshOutcome, RefreshRules, Session, SessionId, SessionInfo,
    },
    token::RefreshToken,
    user::{Epoch, User, UserId},
    webhook::QueuedEvent,
};

/// How the stores fail. `Limited`: a rate limit is reached. `Overloaded`: hashing is at capacity. `Panicking`: a call
/// of a store panics, so that a test fails if it uses a store.
#[derive(Clone, Copy)]
pub(super) enum FailingStores {
    Unavailable,
    Broken,
    Limited,
    Overloaded,
    Panicking,
}

impl FailingStores {
    fn fail<T>(self) -> Result<T, StoreError> {
        let source = "secret-host:5432 refused".into();
        match self {
            Self::Unavailable | Self::Limited | Self::Overloaded => {
                Err(StoreError::Unavailable { store: "postgres", source })
            }
            Self::Broken => Err(StoreError::Unexpected { store: "postgres", source }),
            Self::Panicking => panic!("a store panics"),
        }
    }
}

/// The name of a provider that is unavailable, so that a login cannot begin.
pub(super) const DOWN: &str = "down";

const OVERLOADED: Overloaded = Overloaded { retry_after: Duration::from_millis(2_500) };

impl UserAdministration for FailingStores {
    async fn users(&self, _: &AppId, _: &UserFilter, _: Option<&UserPosition>, _: u16) -> Result<UserPage, StoreError> {
        self.fail()
    }
    async fn administered_user(&self, _: &AppId, _: UserId) -> Result<Option<AdminUser>, StoreError> {
        self.fail()
    }
    async fn create_administered_user(
        &self,
        _: &AppId,
        _: NewAdministeredUser,
        _: Option<MailKind>,
        _: Event,
    ) -> Result<Result<AdminUser, UserConflict>, StoreError> {
        self.fail()
    }
    async fn change_user(&self, _: &AppId, _: UserChange) -> Result<ChangeOutcome, StoreError> {
        self.fail()
    }
    async fn remove_user(
        &self,
        _: &AppId,
        _: UserId,
        _: Option<Version>,
        _: Event,
    ) -> Result<RemovalOutcome, StoreError> {
        self.fail()
    }
    async fn end_all_sessions(&self, _: &AppId, _: UserId, _: Event) -> Result<Option<EpochChange>, StoreError> {
        self.fail()
    }
    async fn queue_mail(&self, _: &AppId, _: UserId, _: MailKind, _: Event) -> Result<MailOutcome, StoreError> {
        self.fail()
    }
    async fn remove_identities(&self, _: &AppId, _: UserId, _: &str, _: Event) -> Result<IdentityRemoval, StoreError> {
        self.fail()
    }
    async fn import_users(
        &self,
        _: &AppId,
        _: Vec<NewAdministeredUser>,
        _: bool,
        _: Event,
    ) -> Result<Vec<ImportOutcome>, StoreError> {
        self.fail()
    }
    async fn export_users(&self, _: &AppId, _: Option<UserId>, _: u16) -> Result<Vec<AdminUser>, StoreError> {
        self.fail()
    }
    async fn events(
        &self,
        _: &AppId,
        _: &EventFilter,
        _: Option<RowPosition>,
        _: u16,
    ) -> Result<RowPage<AuditRow>, StoreError> {
        self.fail()
    }
    async fn app_dead_letters(
        &self,
        _: &AppId,
        _: Option<&'static str>,
        _: Option<RowPosition>,
        _: u16,
    ) -> Result<RowPage<DeadLetterRow>, StoreError> {
        self.fail()
    }
    async fn retry_dead_letters(&self, _: &AppId, _: RetrySelection) -> Result<u64, StoreError> {
        self.fail()
    }
    async fn record_administration(&self, _: &AppId, _: Event) -> Result<(), StoreError> {
        self.fail()
    }
}

impl Users for FailingStores {
    async fn user(&self, _: &AppId, _: UserId) -> Result<Option<User>, StoreError> {
        self.fail()
    }
    async fn user_by_email(&self, _: &AppId, _: &Email) -> Result<Option<User>, StoreError> {
        match self {
            Self::Overloaded => Ok(None),
            other => other.fail(),
        }
    }
    async fn login_candidate(&self, app: &AppId, email: &Email) -> Result<LoginCandidate, StoreError> {
        let user = self.user_by_email(app, email).await?;
        Ok(LoginCandidate { user, hash_classes: Vec::new() })
    }
    async fn create_user(&self, _: &AppId, _: NewUser, _: Option<Mail>) -> Result<CreateUserOutcome, StoreError> {
        self.fail()
    }
    async fn record_repeated_registration(
        &self,
        _: &AppId,
        _: UserId,
        _: Epoch,
        _: bool,
        _: Option<Mail>,
        _: Event,
    ) -> Result<(), StoreError> {
        self.fail()
    }
    async fn replace_hash(&self, _: &AppId, _: UserId, _: &PasswordHash, _: PasswordHash) -> Result<(), StoreError> {
        self.fail()
    }
    async fn confirm_address(&self, _: &AppId, _: Confirmation) -> Result<Option<ChangedUser>, StoreError> {
        self.fail()
    }
    async fn reset_password(&self, _: &AppId, _: PasswordReset) -> Result<Option<ChangedUser>, StoreError> {
        self.fail()
    }
}

impl OwnAccounts for FailingStores {
    async fn user_of_session(&self, _: &AppId, _: &Session) -> Result<Option<User>, StoreError> {
        self.fail()
    }
    async fn rename(&self, _: &AppId, _: Rename) -> Result<Option<Renamed>, StoreError> {
        self.fail()
    }
    async fn remove_profile_row(&self, _: &AppId, _: Uuid) -> Result<(), StoreError> {
        self.fail()
    }
    async fn set_password(&self, _: &AppId, _: PasswordChange) -> Result<Option<User>, StoreError> {
        self.fail()
    }
    async fn request_address_change(&self, _: &AppId, _: AddressChangeRequest) -> Result<Option<User>, StoreError> {
        self.fail()
    }
    async fn change_address(&self, _: &AppId, _: AddressChange) -> Result<Option<AddressChanged>, StoreError> {
        self.fail()
    }
    async fn delete_user(&self, _: &AppId, _: UserDeletion) -> Result<Option<Epoch>, StoreError> {
        self.fail()
    }
}

impl WebhookEvents for FailingStores {
    async fn webhooks_with_due_events(&self) -> Result<Vec<WebhookKey>, StoreError> {
        self.fail()
    }
    async fn claim_events(
        &self,
        _: &[ClaimableWebhook],
        _: usize,
        _: Duration,
    ) -> Result<Vec<ClaimedEvent>, StoreError> {
        self.fail()
    }
    async fn finish_event(&self, _: &ClaimedEvent, _: EventOutcome) -> Result<(), StoreError> {
        self.fail()
    }
    async fn fetch_events(&self, _: &WebhookKey, _: u16, _: Duration) -> Result<Vec<QueuedEvent>, StoreError> {
        self.fail()
    }
    async fn acknowledge_events(&self, _: &WebhookKey, _: &[Uuid]) -> Result<u64, StoreError> {
        self.fail()
    }
    fn subscribe_to_new_events(&self) -> tokio::sync::broadcast::Receiver<String> {
        tokio::sync::broadcast::Sender::new(1).subscribe()
    }
    async fn delivery_states(
        &self,
        _: &[KnownWebhook],
    ) -> Result<std::collections::BTreeMap<WebhookKey, DeliveryState>, StoreError> {
        self.fail()
    }
    async fn delete_dummy_events(&self) -> Result<u64, StoreError> {
        self.fail()
    }
    async fn event_backlog(&self) -> Result<EventBacklog, StoreError> {
        self.fail()
    }
}

impl Outbox for FailingStores {
    async fn enqueue(&self, _: &AppId, _: Mail) -> Result<(), StoreError> {
        self.fail()
    }
    async fn claim(&self, _: usize, _: usize, _: Duration) -> Result<Vec<ClaimedRow>, StoreError> {
        self.fail()
    }
    async fn finish(&self, _: &ClaimedRow, _: DeliveryOutcome) -> Result<(), StoreError> {
        self.fail()
    }
    async fn remove_epoch_row(&self, _: &AppId, _: &EpochChange) -> Result<(), StoreError> {
        self.fail()
    }
    async fn wait_for_notification(&self) {}
    async fn backlog(&self) -> Result<OutboxBacklog, StoreError> {
        self.fail()
    }
}

impl Codes for FailingStores {
    async fn store_code(&self, _: &AppId, _: &CodeKey, _: &CodeRecord) -> Result<(), StoreError> {
        self.fail()
    }
    async fn find_code(&self, _: &AppId, _: &[CodeKey]) -> Result<Option<(CodeKey, CodeRecord)>, StoreError> {
        self.fail()
    }
    async fn consume_code(&self, _: &AppId, _: &CodeKey) -> Result<Option<CodeRecord>, StoreError> {
        self.fail()
    }
}

impl Sessions for FailingStores {
    async fn open_session(&self, _: &AppId, _: &NewSession) -> Result<OpenOutcome, StoreError> {
        self.fail()
    }
    async fn session(&self, _: &AppId, _: UserId, _: SessionId) -> Result<Option<LiveSession>, StoreError> {
        self.fail()
    }
    async fn browser_session(
        &self,
        _: &AppId,
        _: UserId,
        _: SessionId,
        _: Option<u64>,
    ) -> Result<Option<LiveSession>, StoreError> {
        self.fail()
    }
    async fn renew_browser_session(&self, _: &AppId, _: &NewSession) -> Result<bool, StoreError> {
        self.fail()
    }
    async fn sessions(&self, _: &AppId, _: UserId) -> Result<Vec<SessionInfo>, StoreError> {
        self.fail()
    }
    async fn refresh(&self, _: &AppId, _: &RefreshToken, _: &RefreshRules) -> Result<RefreshOutcome, StoreError> {
        self.fail()
    }
    async fn end_session(&self, _: &AppId, _: UserId, _: SessionId) -> Result<bool, StoreError> {
        self.fail()
    }
    async fn end_other_sessions(&self, _: &AppId, _: UserId, _: SessionId) -> Result<Vec<SessionId>, StoreError> {
        self.fail()
    }
    async fn raise_epoch(&self, _: &AppId, _: &EpochChange, _: Option<&Profile>) -> Result<Replication, StoreError> {
        self.fail()
    }
    async fn store_profile(&self, _: &AppId, _: UserId, _: &Profile) -> Result<(), StoreError> {
        self.fail()
    }
}

impl ClientCodes for FailingStores {
    async fn store_client_code(&self, _: &AppId, _: &ClientCodeKey, _: &ClientCodeRecord) -> Result<(), StoreError> {
        self.fail()
    }
    async fn find_client_code(&self, _: &AppId, _: &ClientCodeKey) -> Result<Option<StoredClientCode>, StoreError> {
        self.fail()
    }
    async fn redeem_client_code(
        &self,
        _: &AppId,
        _: &ClientCodeKey,
        _: &ExchangedCode,
        _: SessionId,
    ) -> Result<Redemption, StoreError> {
        self.fail()
    }
    async fn use_assertion(&self, _: &AppId, _: &str, _: &str, _: i64) -> Result<bool, StoreError> {
        self.fail()
    }
}

impl ClientSessions for FailingStores {
    async fn open_client_session(&self, _: &AppId, _: &NewClientSession) -> Result<OpenOutcome, StoreError> {
        self.fail()
    }
    async fn client_session(
        &self,
        _: &AppId,
        _: UserId,
        _: SessionId,
        _: SessionUse,
    ) -> Result<Option<ClientSession>, StoreError> {
        self.fail()
    }
    async fn refresh_client_session(
        &self,
        _: &AppId,
        _: &RefreshToken,
        _: &ClientGrant,
        _: &RefreshRules,
    ) -> Result<RefreshOutcome, StoreError> {
        self.fail()
    }
    async fn client_sessions(&self, _: &AppId, _: UserId) -> Result<Vec<ListedClientSession>, StoreError> {
        self.fail()
    }
    async fn end_client_sessions(&self, _: &AppId, _: UserId, _: &str) -> Result<Vec<SessionId>, StoreError> {
        self.fail()
    }
}

impl PushedRequests for FailingStores {
    async fn store_pushed_request(
        &self,
        _: &AppId,
        _: &PushedRequestKey,
        _: &PushedRequest,
        _: ClientAddress,
    ) -> Result<(), StoreError> {
        self.fail()
    }
    async fn find_pushed_request(&self, _: &AppId, _: &PushedRequestKey) -> Result<Option<PushedRequest>, StoreError> {
        self.fail()
    }
    async fn use_pushed_request(&self, _: &AppId, _: &PushedRequestKey) -> Result<bool, StoreError> {
        self.fail()
    }
}

impl Groups for FailingStores {
    async fn of_user(&self, _: &AppId, _: UserId) -> Result<Arc<[Membership]>, StoreError> {
        self.fail()
    }
}

impl Identities for FailingStores {
    async fn user_by_identity(&self, _: &AppId, _: &str, _: &str) -> Result<Option<User>, StoreError> {
        self.fail()
    }
    async fn create_federated_user(
        &self,
        _: &AppId,
        _: NewFederatedUser,
        _: NewIdentity,
        _: Option<Mail>,
    ) -> Result<bool, StoreError> {
        self.fail()
    }
    async fn link_identity(&self, _: &AppId, _: LinkRequest) -> Result<LinkOutcome, StoreError> {
        self.fail()
    }
    async fn transfer_account(&self, _: &AppId, _: AccountTransfer) -> Result<Option<User>, StoreError> {
        self.fail()
    }
    async fn identities(&self, _: &AppId, _: UserId) -> Result<Vec<Identity>, StoreError> {
        self.fail()
    }
    async fn unlink_identity(&self, _: &AppId, _: UnlinkRequest) -> Result<UnlinkOutcome, StoreError> {
        self.fail()
    }
}

impl GroupChanges for FailingStores {
    async fn current_groups(&self, _: &AppId, _: UserId) -> Result<Option<UserGroups>, StoreError> {
        self.fail()
    }
    async fn store_groups(&self, _: &AppId, _: UserId, _: &UserGroups) -> Result<Replication, StoreError> {
        self.fail()
    }
    async fn remove_groups_rows(&self, _: &AppId, _: &[Uuid]) -> Result<(), StoreError> {
        self.fail()
    }
    async fn replace_reported_groups(
        &self,
        _: &AppId,
        _: ReportedGroups,
        _: Event,
    ) -> Result<Option<GroupsChange>, StoreError> {
        self.fail()
    }
}

impl GroupAdministration for FailingStores {
    async fn groups(&self, _: &AppId, _: Option<&GroupName>, _: u16) -> Result<GroupPage, StoreError> {
        self.fail()
    }
    async fn put_group(
        &self,
        _: &AppId,
        _: &ManagedGroupName,
        _: Option<&GroupTitle>,
        _: OffsetDateTime,
    ) -> Result<PutGroupOutcome, StoreError> {
        self.fail()
    }
    async fn remove_group(&self, _: &AppId, _: &ManagedGroupName, _: Event) -> Result<GroupRemoval, StoreError> {
        self.fail()
    }
    async fn group_members(
        &self,
        _: &AppId,
        _: &ManagedGroupName,
        _: Option<&MemberPosition>,
        _: u16,
    ) -> Result<Option<MemberPage>, StoreError> {
        self.fail()
    }
    async fn add_member(
        &self,
        _: &AppId,
        _: &ManagedGroupName,
        _: UserId,
        _: Event,
    ) -> Result<MemberOutcome, StoreError> {
        self.fail()
    }
    async fn remove_member(
        &self,
        _: &AppId,
        _: &ManagedGroupName,
        _: UserId,
        _: Event,
    ) -> Result<MemberOutcome, StoreError> {
        self.fail()
    }
    async fn memberships(&self, _: &AppId, _: UserId) -> Result<Option<Vec<Membership>>, StoreError> {
        self.fail()
    }
}

impl Flows for FailingStores {
    async fn store_flow(&self, _: &AppId, _: &FlowId, _: &str, _: ClientAddress, _: i64) -> Result<(), StoreFlowError> {
        self.fail().map_err(StoreFlowError::Store)
    }
    async fn find_flow(&self, _: &AppId, _: &FlowId) -> Result<Option<String>, StoreError> {
        self.fail()
    }
    async fn consume_flow(&self, _: &AppId, _: &FlowId, _: FlowBinding) -> Result<bool, StoreError> {
        self.fail()
    }
    async fn store_login(&self, _: &AppId, _: &LoginCodeKey, _: &PendingLogin) -> Result<(), StoreError> {
        self.fail()
    }
    async fn find_login(&self, _: &AppId, _: &LoginCodeKey) -> Result<Option<StoredLogin>, StoreError> {
        self.fail()
    }
    async fn redeem_login(&self, _: &AppId, _: &LoginCodeKey, _: SessionId) -> Result<Option<SessionId>, StoreError> {
        self.fail()
    }
}

impl Consents for FailingStores {
    async fn consented_scopes(&self, _: &AppId, _: UserId, _: &str) -> Result<Scopes, StoreError> {
        self.fail()
    }
    async fn consents(&self, _: &AppId, _: UserId) -> Result<Vec<StoredConsent>, StoreError> {
        self.fail()
    }
    async fn add_consent(&self, _: &AppId, _: NewConsent) -> Result<bool, StoreError> {
        self.fail()
    }
    async fn remove_consent(&self, _: &AppId, _: UserId, _: &str, _: Event) -> Result<bool, StoreError> {
        self.fail()
    }
}

impl Providers for FailingStores {
    type Permit = ();

    fn capabilities(&self, _: &RenderedProvider) -> ProviderCapabilities {
        ProviderCapabilities { has_nonce: true, uses_form_post: false }
    }
    fn identity_authority(&self, _: &RenderedProvider, _: Option<&str>) -> Option<String> {
        None
    }
    fn try_acquire(
        &self,
        _: ProviderOperation,
        _: &App,
        _: &RenderedProvider,
        _: ClientAddress,
    ) -> Result<(), ProviderError> {
        Ok(())
    }
    async fn authorization_url(
        &self,
        (): &(),
        provider: &RenderedProvider,
        request: &AuthorizationRequest<'_>,
    ) -> Result<String, ProviderError> {
        if provider.name.as_str() == DOWN {
            return Err(ProviderError::Unavailable(UnavailableReason::Timeout));
        }
        Ok(format!("https://provider.example/authorize?state={}", request.state))
    }
    async fn validate_issuer(&self, (): &(), _: &RenderedProvider, _: Option<&str>) -> Result<(), ProviderError> {
        Ok(())
    }
    async fn exchange_code(
        &self,
        (): &(),
        _: &RenderedProvider,
        _: &AuthorizationCodeGrant<'_>,
    ) -> Result<VerifiedIdentity, ProviderError> {
        Err(ProviderError::Unavailable(UnavailableReason::Timeout))
    }
    async fn validate_token(
        &self,
        (): &(),
        _: &RenderedProvider,
        _: &str,
        _: Option<&str>,
    ) -> Result<VerifiedIdentity, ProviderError> {
        Err(ProviderError::NoTokenCheck)
    }
}

impl RateLimits for FailingStores {
    async fn acquire(&self, _: &AppId, checks: Vec<RateLimitCheck>) -> Result<RateLimitPermit, AcquireError> {
        match self {
            Self::Overloaded => Ok(RateLimitPermit(checks.into_iter().map(|check| (check, 0)).collect())),
            Self::Limited => Err(AcquireError::RateLimited(RateLimited {
                limit: LimitName::LoginsPerClient.into(),
                window: Window { count: 60, window_seconds: 60 },
                retry_after: Duration::from_secs(9),
            })),
            other => other.fail().map_err(AcquireError::Store),
        }
    }
    async fn check_limits(&self, app: &AppId, checks: Vec<RateLimitCheck>) -> Result<(), AcquireError> {
        self.acquire(app, checks).await.map(drop)
    }
    async fn release(&self, _: &AppId, _: RateLimitPermit) {}
    async fn is_known_client(&self, _: &AppId, _: &AccountKey, _: ClientAddress) -> Result<bool, StoreError> {
        match self {
            Self::Limited | Self::Overloaded => Ok(false),
            other => other.fail(),
        }
    }
    async fn remember_client(&self, _: &AppId, _: &AccountKey, _: ClientAddress) {}
}

impl PasswordHasher for FailingStores {
    fn class_of_new_hashes(&self) -> HashClass {
        HashClass::DEFAULT_NATIVE
    }
    fn check_capacity(&self, _: &App, _: ClientAddress) -> Result<(), Overloaded> {
        Ok(())
    }
    async fn hash(&self, _: &App, _: ClientAddress, _: &Password) -> Result<PasswordHash, Overloaded> {
        Err(OVERLOADED)
    }
    async fn verify(
        &self,
        _: &App,
        _: ClientAddress,
        _: &Password,
        _: Option<&PasswordHash>,
    ) -> Result<bool, Overloaded> {
        Err(OVERLOADED)
    }
    async fn verify_login(
        &self,
        _: &App,
        _: ClientAddress,
        _: &Password,
        _: Option<&PasswordHash>,
        _: &[HashClass],
    ) -> Result<bool, Overloaded> {
        Err(OVERLOADED)
    }
    async fn is_strong_enough(
        &self,
        _: &App,
        _: ClientAddress,
        _: &Password,
        _: Vec<String>,
    ) -> Result<bool, Overloaded> {
        Err(OVERLOADED)
    }
}

impl AuditLog for FailingStores {
    async fn record(&self, _: &AppId, _: Event) {}
    fn record_later(&self, _: &AppId, _: Event) {}
    fn count_refusal(&self, _: &AppId, _: Refusal) {}
    async fn activity(&self, _: &AppId, _: UserId, _: OffsetDateTime) -> Result<Vec<ActivityEntry>, StoreError> {
        self.fail()
    }
}
