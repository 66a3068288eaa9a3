//! `DELETE /v1/{APPID}/sessions`.

use crate::{
    domain::{app::App, sessions},
    http::{
        Ports, authentication,
        error::Problem,
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub fn operation() -> Operation {
    Operation::new("End all other sessions of the user", "The session of the token continues.")
        .requires_access_token()
        .response(Content::empty_object())
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, &request).await?;
    sessions::end_other_sessions(state.call(app, &request.client), &signed_in).await?;
    response::empty_object()
}
