//! `DELETE /v1/{APPID}/user/identities/{PROVIDER}`.

use latchkey_crds::types::ProviderName;

use crate::{
    domain::{app::App, ports::UnlinkOutcome, social},
    http::{
        Ports, authentication,
        error::{ErrorCode, Problem},
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub fn operation() -> Operation {
    Operation::new(
        "Unlink a provider account from the user",
        "The last way to log in to the account cannot be removed.",
    )
    .requires_access_token()
    .response(Content::empty_object())
    .errors(&[ErrorCode::NotFound, ErrorCode::LastIdentity, ErrorCode::RateLimited])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, &request).await?;
    // The name is not looked up in the App: an identity of a provider that the App no longer has can be unlinked, too.
    let name = request.path_parameter(0).parse::<ProviderName>().ok();
    let name = name.ok_or_else(not_linked)?;
    require_unlinked(social::unlink_identity(state.call(app, &request.client), &signed_in, &name).await?)?;
    response::empty_object()
}

/// Returns the error if nothing was unlinked.
pub fn require_unlinked(outcome: UnlinkOutcome) -> Result<(), Problem> {
    match outcome {
        UnlinkOutcome::Done => Ok(()),
        UnlinkOutcome::NotLinked => Err(not_linked()),
        UnlinkOutcome::LastLoginMethod => {
            let why = "it is the last way to log in to the account; set a password first";
            Err(Problem::new(ErrorCode::LastIdentity, why))
        }
    }
}

pub fn not_linked() -> Problem {
    Problem::new(ErrorCode::NotFound, "you have no identity of this provider")
}
