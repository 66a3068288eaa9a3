//! End-to-end tests of the real programs with real stores. `make test` builds the programs.

// The condition is always true here. The attribute makes Clippy treat the helpers as test code, in which `unwrap` is
// allowed.
#![cfg(test)]

mod accounts;
mod administration;
mod admission;
mod audit;
#[path = "../../crds/src/templates/bombs.rs"]
mod bombs;
mod browser;
mod callers;
mod change_address;
mod change_password;
mod chaos;
mod chart;
mod clients;
mod clock;
mod cluster;
mod concurrency;
mod confirm;
mod connections;
mod control_plane;
mod cors;
mod documents;
mod errors;
mod fault_support;
mod faults;
mod foreign_hashes;
mod forward_auth;
mod harness;
mod hashing_parameters;
mod input;
mod introspect;
mod limits;
mod login_browser;
mod login_password;
mod mail_faults;
mod mails;
mod make_run;
mod openid;
mod operator;
mod pages;
mod provider_down;
mod providers;
mod redis_deployments;
mod reset;
mod retention;
mod secrecy;
mod social;
mod stores;
mod storm;
mod support;
mod template_bombs;
mod token;
mod traces;
mod typescript;
mod user;
mod user_session;
mod webhooks;
