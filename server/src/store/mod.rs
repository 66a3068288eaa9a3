//! The stores behind the ports of the domain: Postgres for users and the outbox, Redis for codes, sessions and limits.

use crate::{hashing::Hashing, providers::SocialProviders};

mod audit;
mod hashing;
pub mod postgres;
mod providers;
pub mod redis;
mod source;

pub use source::{Unreadable, UrlSource};

/// Everything the use-cases need from outside, on one type.
#[derive(Clone)]
pub struct Stores {
    pub postgres: postgres::Postgres,
    pub redis: redis::Redis,
    pub hashing: Hashing,
    pub providers: SocialProviders,
}
