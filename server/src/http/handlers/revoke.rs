//! `POST /v1/{APPID}/revoke` (RFC 7009).

use serde_json::json;

use crate::{
    domain::{
        app::App,
        openid::{
            authenticate::RequestCount,
            revoke::{ClientRevokeError, revoke_client_token},
        },
        sessions::{self, UNKNOWN_KEY_RETRY},
        token::verify_any_access_token,
    },
    http::{
        Ports, clients,
        error::{ErrorCode, Problem},
        openapi::{
            examples,
            operation::{Content, Operation},
        },
        request::{InboundRequest, RawText, SentBody, parse_fields, request_body},
        response::{self, Response},
        routes::Route,
    },
    state::State,
};

request_body! {
    /// The request of *revoke*. A `token_type_hint` is not needed.
    pub struct RevokeRequest as "RevokeRequest" {
        /// A refresh token or an access token.
        token: RawText,
    }
}

pub fn operation() -> Operation {
    Operation::new(
        "End the session that a token belongs to (RFC 7009)",
        "Accepts a refresh token or an access token. An invalid token gets the same response. An OpenID Connect client \
         must send a form and authenticate as for *token*; the token of another client is refused.",
    )
    .request(Content::json_or_form::<RevokeRequest>(json!({ "token": examples::REFRESH_TOKEN })))
    .response(Content::empty_object())
    .errors(&[ErrorCode::InvalidGrant, ErrorCode::InvalidClient, ErrorCode::RateLimited])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let body = request.read_sent_body().await?;
    if clients::is_from_client(app, &request.headers, &body.fields) {
        return Box::pin(handle_client(state, app, &request, body)).await;
    }
    let RevokeRequest { token: RawText(token) } = parse_fields(body.fields)?;
    let verify = || verify_any_access_token(app, state.env.now(), &token);
    if app.has_clients() && verify().is_some_and(|claims| claims.is_of_client(app)) {
        // Only the client itself can revoke its token. Otherwise anybody who finds the token could end the session of
        // the client.
        return Err(clients::invalid_client(app, false));
    }
    sessions::revoke(state.call(app, &request.client), &token).await?;
    response::empty_object()
}

async fn handle_client<S: Ports>(
    state: &State<S>,
    app: &App,
    request: &InboundRequest,
    body: SentBody,
) -> Result<Response, Problem> {
    let count = RequestCount::NotCounted;
    let (client, form) = clients::authenticate(state, app, request, body, Route::Revoke, count).await?;
    let token = form.require("token")?;
    revoke_client_token(state.call(app, &request.client), client, token).await.map_err(|error| match error {
        ClientRevokeError::OtherClient => {
            Problem::new(ErrorCode::InvalidGrant, "the token was not issued to this client")
        }
        ClientRevokeError::UnknownKey => Problem::unavailable(UNKNOWN_KEY_RETRY).with_cause(error),
        ClientRevokeError::Common(error) => error.into(),
    })?;
    response::empty_object()
}
