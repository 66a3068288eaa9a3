//! `POST /v1/{APPID}/revoke` (RFC 7009).

use serde_json::json;

use crate::{
    domain::{app::App, sessions},
    http::{
        Ports,
        error::Problem,
        openapi::{
            examples,
            operation::{Content, Operation},
        },
        request::{InboundRequest, RawText, request_body},
        response::{self, Response},
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
        "Accepts a refresh token or an access token. An invalid token gets the same response.",
    )
    .request(Content::json_or_form::<RevokeRequest>(json!({ "token": examples::REFRESH_TOKEN })))
    .response(Content::empty_object())
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let RevokeRequest { token: RawText(token) } = request.read_json_or_form().await?;
    sessions::revoke(state.call(app, &request.client), &token).await?;
    response::empty_object()
}
