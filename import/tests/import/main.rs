//! Tests of whole imports, from files to a file or to a server.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod sources;
mod support;
mod upload;
