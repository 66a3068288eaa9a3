//! The service as its users meet it: real programs over real stores. `make test` builds what these tests start.

mod accounts;
mod confirm;
mod cors;
mod documents;
mod errors;
mod harness;
mod input;
mod limits;
mod login_password;
mod mails;
mod make_run;
mod reset;
mod secrecy;
mod support;
