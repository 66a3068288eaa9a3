//! `POST /v1/{APPID}/revoke` (RFC 7009).

use crate::{
    domain::{app::App, sessions},
    http::{
        Ports,
        error::Problem,
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

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let RevokeRequest { token: RawText(token) } = request.read_json_or_form().await?;
    sessions::revoke(state.call(app, &request.client), &token).await?;
    response::empty_object()
}
