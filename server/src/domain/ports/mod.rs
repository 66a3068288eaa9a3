//! Narrow traits for everything that the domain needs from outside. One type, `store::Stores`, implements all of them.
//! A use case is generic over that type and names only the traits that it needs.

mod administration;
mod audit_log;
mod client_codes;
mod client_sessions;
mod codes;
mod consents;
mod error;
mod flows;
mod groups;
mod identities;
mod outbox;
mod own_accounts;
mod password_hasher;
mod providers;
mod pushed_requests;
mod rate_limits;
mod sessions;
mod users;
mod webhook_events;

pub use administration::{
    ChangeOutcome, ChangedByAdministrator, EventFilter, IdentityRemoval, ImportOutcome, MailOutcome,
    NewAdministeredIdentity, NewAdministeredUser, Order, RemovalOutcome, RetrySelection, RowPage, RowPosition,
    SubjectOf, UserAdministration, UserChange, UserConflict, UserFilter, UserPage, UserPosition,
};
pub use audit_log::AuditLog;
pub use client_codes::ClientCodes;
pub use client_sessions::ClientSessions;
pub use codes::Codes;
pub use consents::{Consents, MAX_CONSENTS, NewConsent, StoredConsent};
pub use error::StoreError;
pub use flows::{Flows, StoreFlowError};
pub use groups::{
    GroupAdministration, GroupChanges, GroupPage, GroupRemoval, Groups, MemberOutcome, MemberPage, MemberPosition,
    PutGroupOutcome,
};
pub use identities::{
    AccountTransfer, Identities, LinkOutcome, LinkRequest, NewFederatedUser, NewIdentity, UnlinkOutcome, UnlinkRequest,
};
pub use outbox::{ClaimedRow, DeliveryOutcome, Outbox, OutboxBacklog, OutboxTask};
pub use own_accounts::{
    AddressChange, AddressChangeRequest, AddressChanged, OwnAccounts, PasswordChange, Rename, Renamed, UserDeletion,
};
pub use password_hasher::PasswordHasher;
pub use providers::Providers;
pub use pushed_requests::PushedRequests;
pub use rate_limits::{AcquireError, RateLimitPermit, RateLimits};
pub use sessions::{Replication, Sessions};
pub use users::{ChangedUser, Confirmation, CreateUserOutcome, LoginCandidate, NewUser, PasswordReset, Users};
pub use webhook_events::{
    ClaimableWebhook, ClaimedEvent, DeliveryState, EventBacklog, EventOutcome, KnownWebhook, WebhookEvents, WebhookKey,
};
