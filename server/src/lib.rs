//! The login API of Latchkey: a stateless server that reads rendered Apps and stores codes and sessions in Redis and
//! users in Postgres.

pub mod args;
pub mod audit;
pub mod callers;
pub mod client_metrics;
pub mod config;
pub mod deletion;
pub mod domain;
#[cfg(test)]
mod fixtures;
pub mod foreign_hashes;
pub mod hashing;
pub mod http;
pub mod import_metrics;
pub mod json;
pub mod mail;
pub mod memory;
pub mod outbound;
pub mod ownership;
pub mod pages;
pub mod providers;
pub mod retention;
pub mod settings;
pub mod state;
pub mod store;
pub mod token_cache;
pub mod webhooks;
