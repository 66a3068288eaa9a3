//! The stores behind the domain's ports: Postgres for users and the outbox, Redis for codes, sessions and limits.

mod audit;
mod hashing;
pub mod postgres;
mod providers;
pub mod redis;
mod source;
mod stores;

pub use source::{UrlReadError, UrlSource};
pub use stores::Stores;
