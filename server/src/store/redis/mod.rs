//! Sessions, codes, flows, pushed requests, groups, limits and refusal counts in Redis.

mod client;
mod connect;
mod eviction;
mod handle;
mod metrics;
mod scripts;
mod stores;

pub use client::{
    error::{CallError, CallErrorKind},
    url::{ConnectError, RedisUrlError},
};
pub use connect::Options;
pub use handle::RedisStore;
pub(crate) use stores::refusals;
