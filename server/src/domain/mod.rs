//! The rules of the service. Nothing here knows HTTP, SQL or Redis: what the rules need from outside comes through the
//! traits in [`ports`].

pub mod administration;
pub mod app;
pub mod audit;
pub mod authentication;
pub mod call;
pub mod client;
pub mod clock;
pub mod code;
pub mod email;
pub mod email_account;
mod epochs;
pub mod error;
pub mod flow;
pub mod foreign_hash;
pub mod identity;
pub mod keys;
mod login_limits;
pub mod mail;
mod mail_limits;
pub mod name;
pub mod own_account;
pub mod pages;
pub mod password;
mod password_policy;
pub mod password_settings;
pub mod ports;
pub mod rate_limits;
pub mod redirect;
pub mod rights;
pub mod session;
pub mod sessions;
pub mod social;
mod stored_codes;
pub mod token;
pub mod user;
pub mod webhook;
