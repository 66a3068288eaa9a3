//! Fuzz targets for all parsers and validators of untrusted input, each with an oracle. `make test` runs the committed
//! inputs and some random ones; `make fuzz TARGET=… SECONDS=…` is guided by coverage.
//!
//! A target is one test. Its name is also the folder of its inputs: `__fuzz__/NAME/corpus` has a few dozen that reach
//! all branches, `__fuzz__/NAME/crashes` has former findings.

#![expect(clippy::unwrap_used, reason = "an unwrap that fails is a finding, or a bug in the target")]

mod access_token;
mod address;
mod app;
mod client_address;
mod code;
mod draw;
mod flow;
mod harness;
mod id_token;
mod mail;
mod manifest;
mod name;
mod password;
mod provider_documents;
mod provider_keys;
mod provider_memory;
mod redirect;
mod refresh_token;
mod request_body;
mod request_form;
mod route;
mod template;
