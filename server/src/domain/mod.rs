//! The rules of the contract. Nothing here knows HTTP, SQL or Redis: what the rules need from outside comes through the
//! traits in [`ports`].

pub mod accounts;
pub mod app;
pub mod audit;
pub mod client;
pub mod clock;
pub mod code;
pub mod email;
pub mod flow;
pub mod gate;
pub mod identity;
pub mod introspection;
pub mod keys;
pub mod limits;
pub mod mail;
pub mod own_account;
pub mod password;
pub mod ports;
pub mod redirect;
pub mod refresh;
pub mod session;
pub mod signed_in;
pub mod social;
pub mod token;
pub mod user;
