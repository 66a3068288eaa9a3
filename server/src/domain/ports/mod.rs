//! Narrow traits for everything that the domain needs from outside. One type, `store::Stores`, implements all of them.
//! A use case is generic over that type and names only the traits that it needs.

mod administration;
mod audit_log;
mod codes;
mod error;
mod flows;
mod identities;
mod outbox;
mod own_accounts;
mod password_hasher;
mod providers;
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
pub use codes::Codes;
pub use error::StoreError;
pub use flows::{Flows, StoreFlowError};
pub use identities::{
    AccountTransfer, Identities, LinkOutcome, LinkRequest, NewFederatedUser, NewIdentity, UnlinkOutcome, UnlinkRequest,
};
pub use outbox::{ClaimedRow, DeliveryOutcome, Outbox, OutboxBacklog, OutboxTask};
pub use own_accounts::{
    AddressChange, AddressChangeRequest, AddressChanged, OwnAccounts, PasswordChange, Rename, Renamed, UserDeletion,
};
pub use password_hasher::PasswordHasher;
pub use providers::Providers;
pub use rate_limits::{AcquireError, RateLimitPermit, RateLimits};
pub use sessions::{Replication, Sessions};
pub use users::{ChangedUser, Confirmation, CreateUserOutcome, LoginCandidate, NewUser, PasswordReset, Users};
pub use webhook_events::{
    ClaimableWebhook, ClaimedEvent, DeliveryState, EventBacklog, EventOutcome, KnownWebhook, WebhookEvents, WebhookKey,
};
