//! The readers of the import formats, one file each. A *source* is the login service that wrote the input.

mod auth0;
mod cognito;
mod firebase;
mod gotrue;
mod keycloak;
mod kratos;
mod ndjson;

use crate::{args::Format, convert::Context, error::ImportError, input::Input};

/// Reads all input files, in the format given on the command line.
pub(crate) fn read(inputs: Vec<Input>, context: &mut Context<'_>) -> Result<(), ImportError> {
    match context.args.format {
        Format::Keycloak => keycloak::read(inputs, context),
        Format::Gotrue => gotrue::read(inputs, context),
        Format::Kratos => kratos::read(inputs, context),
        Format::Firebase => firebase::read(inputs, context),
        Format::Auth0 => auth0::read(inputs, context),
        Format::Cognito => cognito::read(inputs, context),
        Format::Ndjson => ndjson::read(inputs, context),
    }
}

/// Joins the parts of a name with spaces, and omits blank parts.
fn join_name(parts: &[Option<&str>]) -> String {
    let parts = parts.iter().flatten().map(|part| part.trim()).filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join(" ")
}
