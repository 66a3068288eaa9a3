//! The struct of all stores. The other files in this folder, and the files in `redis/stores` and `postgres`, implement
//! the ports.

use super::{postgres::PostgresStore, redis::RedisStore};
use crate::{hashing::HashingPool, providers::SocialProviders};

/// Implements every port that the use cases need.
#[derive(Clone)]
pub struct Stores {
    pub postgres: PostgresStore,
    pub redis: RedisStore,
    pub hashing: HashingPool,
    pub providers: SocialProviders,
}
