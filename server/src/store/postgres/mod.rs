//! Users, identities, the outbox, audit events and the ownership of Apps in Postgres.
//!
//! `store` has the handle, `call` what every call does, and the folders have the calls by subject. What every login and
//! registration needs is one statement. Rare changes are transactions of small statements (docs/decisions/0032), which
//! lock rows in the order apps, users, identities, outbox, audit events.

mod apps;
mod audit;
mod call;
mod errors;
mod identities;
mod metrics;
pub mod migrate;
mod outage;
mod outbox;
mod pool;
mod store;
mod users;

pub use apps::{ClaimOutcome, DeleteOutcome, OwnershipClaim, ReleaseOutcome};
pub use audit::AuditMetrics;
pub(crate) use audit::RefusalColumns;
pub use errors::{CallError, CallErrorKind};
pub use outbox::DeadLetter;
pub use pool::ConnectError;
pub use store::{Options, PostgresStore};
pub use users::{UnverifiedBatch, UnverifiedExpiry, UnverifiedPosition};

use store::Shared;
