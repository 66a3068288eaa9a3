//! Fuzz targets for all parsers and validators of untrusted input, each with an oracle. `make test` runs the committed
//! inputs and some random ones. `make fuzz TARGET=… SECONDS=…` runs inputs that are guided by coverage.
//!
//! A target is one test. Its inputs are in the folder with its name: `__fuzz__/NAME/corpus` has small inputs of many
//! kinds, and `__fuzz__/NAME/crashes` has the inputs that found a bug.

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
