//! Fuzz targets for all parsers and validators of untrusted input. Each target has an oracle: a rule that decides
//! whether the result for an input is correct. `make test` runs the committed inputs and some random inputs. `make fuzz
//! TARGET=… SECONDS=…` generates inputs, guided by code coverage.
//!
//! A target is one test. The committed inputs of the target NAME are in the folder `__fuzz__/NAME`: `corpus` has small
//! inputs of many kinds, and `crashes` has the inputs that found a bug.

#![expect(clippy::unwrap_used, reason = "an unwrap that fails is a finding, or a bug in the target")]

mod access_token;
mod address;
mod app;
mod authorization_request;
mod claims_parameter;
mod client_address;
mod client_assertion;
mod client_authentication;
mod client_keys;
mod code;
mod draw;
mod flow;
mod foreign_hash;
mod harness;
mod id_token;
mod id_token_hint;
mod import_files;
mod logo;
mod mail;
mod manifest;
mod name;
mod openid_app;
mod page_cookies;
mod page_state;
mod page_texts;
mod password;
mod password_hash;
mod provider_documents;
mod provider_keys;
mod provider_memory;
mod redirect;
mod refresh_token;
mod request_body;
mod request_form;
mod route;
mod template;
