//! The errors that end an import early.

use std::io;

/// An error that ends the import early. No error message quotes the input, because the input contains password hashes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImportError {
    #[error("{0}")]
    Usage(String),
    #[error("cannot read {name}: {error}")]
    Input { name: String, error: io::Error },
    #[error("{name} is not JSON, at line {line}, column {column}")]
    Syntax { name: String, line: usize, column: usize },
    #[error("{name} {reason}")]
    Content { name: String, reason: &'static str },
    #[error("cannot use a temporary file: {0}; set TMPDIR to a folder with as much free space as the input has bytes")]
    Temporary(io::Error),
    #[error("cannot write {name}: {error}")]
    Output { name: String, error: io::Error },
    #[error("cannot print the report: {0}")]
    Print(io::Error),
    #[error("cannot read the token file {name}: {error}")]
    TokenFile { name: String, error: io::Error },
    #[error("the token file {name} has no token")]
    NoToken { name: String },
    #[error(
        "the server does not accept the token (401). The App must list the ServiceAccount in spec.administrators with \
         the role Importer or UserAdmin, and the token must be valid and have the audience latchkey"
    )]
    Unauthorized,
    #[error("the ServiceAccount must not import (403). The App must list it with the role Importer or UserAdmin")]
    Forbidden,
    #[error("the server does not serve the App (404)")]
    UnknownApp,
    #[error("the server rejects the request: {status} {code}")]
    Rejected { status: u16, code: String },
    #[error("the server sends a response that is not that of an import")]
    BadResponse,
    #[error("{attempts} attempts failed, the last one with: {last}. Repeat the command to resume")]
    Unavailable { attempts: u32, last: String },
    #[error("cannot start the client: {0}")]
    Start(io::Error),
}
