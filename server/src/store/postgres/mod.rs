//! Users, identities, groups, the outbox, audit events, webhook events and the ownership of Apps in Postgres.
//!
//! `handle` contains the handle. `call` contains the code that all calls share. Each folder contains the calls for one
//! kind of data.
//!
//! A call that every login or registration needs is one statement. Rare changes are transactions of small statements
//! (docs/decisions/0032). Transactions lock rows in this order: apps, users, identities, groups, group members,
//! consents, outbox, audit events, webhooks, webhook events. Batches of imports into the same App run one after the
//! other (`administration/import.rs`).

mod administration;
mod apps;
mod audit;
mod call;
mod consents;
mod errors;
mod groups;
mod handle;
mod identities;
mod listener;
mod metrics;
pub mod migrate;
mod outage;
mod outbox;
mod pool;
mod users;
mod webhooks;

pub use apps::{ClaimOutcome, DeleteOutcome, OwnershipClaim, ReleaseOutcome};
pub use audit::AuditMetrics;
pub(crate) use audit::RefusalColumns;
pub use errors::{CallError, CallErrorKind};
pub use handle::{Options, PostgresStore};
pub use outbox::DeadLetter;
pub use pool::ConnectError;
pub use users::{ForeignHashExpiry, SetForeignHashOutcome, UnverifiedBatch, UnverifiedExpiry, UnverifiedPosition};

use handle::Shared;
