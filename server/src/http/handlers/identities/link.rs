//! `POST /v1/{APPID}/user/identities/{PROVIDER}`.

use crate::{
    domain::{
        app::App,
        social::{self, LinkError},
    },
    http::{
        Ports, authentication,
        error::{ErrorCode, Problem},
        handlers::social::{login::ProviderTokenRequest, provider_problem, requested_provider},
        openapi::operation::{Content, Operation},
        request::{InboundRequest, RawText},
        response::{self, Response},
    },
    state::State,
};

pub fn operation() -> Operation {
    Operation::new(
        "Link a provider account, with a token of the provider",
        "Requires a login in the last five minutes and, if the account has an email address, that it is verified.",
    )
    .requires_access_token()
    .request(Content::json::<ProviderTokenRequest>(ProviderTokenRequest::example()))
    .response(Content::empty_object())
    .errors(&[
        ErrorCode::ReauthenticationRequired,
        ErrorCode::InvalidProviderToken,
        ErrorCode::EmailNotVerified,
        ErrorCode::AccessDenied,
        ErrorCode::ProviderNotFound,
        ErrorCode::RateLimited,
        ErrorCode::ProviderError,
    ])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    authentication::authenticate(state, app, &request).await?;
    let provider = requested_provider(app, &request)?;
    let ProviderTokenRequest { token, nonce } = request.read_json().await?;
    let signed_in = authentication::authenticate_again(state, app, &request).await?;
    let nonce = nonce.as_ref().map(|RawText(nonce)| nonce.as_str());
    let linked = social::link_identity(state.call(app, &request.client), &signed_in, provider, &token.0, nonce).await;
    linked.map_err(|error| link_problem(app, error))?;
    response::empty_object()
}

pub fn link_problem(app: &App, error: LinkError) -> Problem {
    match error {
        LinkError::ReauthenticationRequired => Problem::unauthorized(
            ErrorCode::ReauthenticationRequired,
            "linking requires a login in the last five minutes",
            authentication::challenge(app, None),
        ),
        LinkError::EmailNotVerified => {
            Problem::new(ErrorCode::EmailNotVerified, "confirm the email address of the account first")
        }
        LinkError::AlreadyLinked => Problem::new(ErrorCode::AccessDenied, "this identity belongs to another account"),
        LinkError::InvalidToken => authentication::invalid_token(app, true),
        LinkError::Provider(error) => provider_problem(app, error),
        LinkError::Common(error) => error.into(),
    }
}
