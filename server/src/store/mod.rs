//! The stores behind the domain's ports: Postgres for users, identities, groups, consents, the outbox, audit events and
//! webhook events; Redis for sessions, codes, flows and limits.

mod audit;
mod groups;
mod hashing;
pub mod postgres;
mod providers;
pub mod redis;
mod source;
mod stores;

pub use source::{UrlReadError, UrlSource};
pub use stores::Stores;
