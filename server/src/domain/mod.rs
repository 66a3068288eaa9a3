//! The rules of the service. Nothing here knows HTTP, SQL or Redis: what the rules need from outside comes through the
//! traits in [`ports`].

pub mod app;
pub mod audit;
pub mod authentication;
pub mod client;
pub mod clock;
pub mod code;
pub mod email;
pub mod email_account;
pub mod flow;
pub mod identity;
pub mod keys;
pub mod mail;
pub mod own_account;
pub mod password;
pub mod ports;
pub mod rate_limits;
pub mod redirect;
pub mod session;
pub mod sessions;
pub mod social;
pub mod token;
pub mod user;
