//! The stores behind the domain's ports: Postgres for users and the outbox, Redis for codes, sessions and limits.

use crate::{hashing::HashingPool, providers::SocialProviders};

mod audit;
mod hashing;
pub mod postgres;
mod providers;
pub mod redis;
mod source;

pub use source::{UrlReadError, UrlSource};

/// Implements every port that the use cases need.
#[derive(Clone)]
pub struct Stores {
    pub postgres: postgres::PostgresStore,
    pub redis: redis::RedisStore,
    pub hashing: HashingPool,
    pub providers: SocialProviders,
}
