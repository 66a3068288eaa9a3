//! End-to-end tests: real programs and real stores, as users meet them. `make test` builds the programs.

// Always true here. It makes Clippy treat the helpers as test code, in which a failed step is a failed test.
#[cfg(test)]
mod accounts;
#[cfg(test)]
mod admission;
#[cfg(test)]
mod audit;
#[cfg(test)]
#[path = "../../crds/src/templates/bombs.rs"]
mod bombs;
#[cfg(test)]
mod callers;
#[cfg(test)]
mod change_address;
#[cfg(test)]
mod change_password;
#[cfg(test)]
mod chaos;
#[cfg(test)]
mod chart;
#[cfg(test)]
mod clock;
#[cfg(test)]
mod cluster;
#[cfg(test)]
mod concurrency;
#[cfg(test)]
mod confirm;
#[cfg(test)]
mod connections;
#[cfg(test)]
mod control_plane;
#[cfg(test)]
mod cors;
#[cfg(test)]
mod documents;
#[cfg(test)]
mod errors;
#[cfg(test)]
mod fault_support;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod forward_auth;
#[cfg(test)]
mod harness;
#[cfg(test)]
mod input;
#[cfg(test)]
mod introspect;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod login_browser;
#[cfg(test)]
mod login_password;
#[cfg(test)]
mod mail_faults;
#[cfg(test)]
mod mails;
#[cfg(test)]
mod make_run;
#[cfg(test)]
mod operator;
#[cfg(test)]
mod provider_down;
#[cfg(test)]
mod providers;
#[cfg(test)]
mod redis_deployments;
#[cfg(test)]
mod reset;
#[cfg(test)]
mod retention;
#[cfg(test)]
mod secrecy;
#[cfg(test)]
mod social;
#[cfg(test)]
mod stores;
#[cfg(test)]
mod storm;
#[cfg(test)]
mod support;
#[cfg(test)]
mod template_bombs;
#[cfg(test)]
mod token;
#[cfg(test)]
mod traces;
#[cfg(test)]
mod user;
#[cfg(test)]
mod user_session;
