//! `GET /v1/{APPID}/users/{USER}`.

use std::sync::Arc;

use crate::{
    domain::{app::App, rights::Right},
    http::{
        Ports,
        administration::Query,
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::{AdminUserResponse, user_id, user_not_found, user_response},
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::Response,
    },
    state::State,
};

pub const RIGHT: Right = Right::Read;

pub fn operation() -> Operation {
    Operation::new("Read a user", "With identities and the time of the last login. The `ETag` is the user's version.")
        .requires_right(RIGHT)
        .response(Content::json::<AdminUserResponse>(AdminUserResponse::example()))
        .response_headers(&["ETag"])
        .errors(&[ErrorCode::NotFound])
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    _: &Caller,
    request: InboundRequest,
) -> Result<Response, Problem> {
    Query::parse(&request.uri, &[])?;
    let user = state.stores.administered_user(app.id(), user_id(&request)?).await?;
    user_response(user.ok_or_else(user_not_found)?)
}
