//! The service as its users meet it: real programs over real stores. `make test` builds what these tests start.

mod accounts;
mod confirm;
mod cors;
mod documents;
mod errors;
mod input;
mod limits;
mod mails;
mod reset;
mod secrecy;
mod support;
