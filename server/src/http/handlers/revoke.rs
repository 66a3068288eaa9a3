//! `POST /v1/{APPID}/revoke` (RFC 7009).

use crate::{
    domain::{app::App, refresh},
    http::{
        Ports,
        error::Problem,
        request::{Inbound, Text, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// What *revoke* takes. A `token_type_hint` is not needed.
    pub struct Request as "RevokeRequest" {
        /// A refresh token or an access token.
        token: Text,
    }
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    let Request { token: Text(token) } = request.read_form().await?;
    refresh::revoke(&state.stores, &state.env, app, &request.caller, &token).await?;
    response::nothing()
}
