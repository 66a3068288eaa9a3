//! `GET /v1/{APPID}/user`.

use super::{UserResponse, account_problem};
use crate::{
    domain::{app::App, own_account},
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
        "The user's account",
        "The current state. The email address is included whether or not it is verified.",
    )
    .requires_access_token()
    .response(Content::json::<UserResponse>(UserResponse::example()))
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, &request).await?;
    let user = own_account::load_user(state.call(app, &request.client), &signed_in).await;
    response::json(&UserResponse::from(user.map_err(|error| account_problem(app, error))?))
}
