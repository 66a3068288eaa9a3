//! Codes, sessions, flows, limits and refusal counts in Redis.

mod client;
mod connect;
mod eviction;
mod metrics;
mod scripts;
mod store;
mod stores;

pub use client::{
    error::{CallError, CallErrorKind},
    url::{ConnectError, RedisUrlError},
};
pub use connect::Options;
pub use store::RedisStore;
pub(crate) use stores::refusals;
