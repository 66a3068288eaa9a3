//! `POST /v1/{APPID}/logout`.

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
    Operation::new(
        "End the session of the token",
        "Services that check only the signature accept the access tokens of the session until the tokens expire.",
    )
    .requires_access_token()
    .request(Content::empty_object())
    .response(Content::empty_object())
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    authentication::authenticate(state, app, &request).await?;
    request.expect_no_data().await?;
    let signed_in = authentication::authenticate_again(state, app, &request).await?;
    sessions::log_out(state.call(app, &request.client), &signed_in).await?;
    response::empty_object()
}
