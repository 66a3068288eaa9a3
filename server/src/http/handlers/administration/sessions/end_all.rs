//! `DELETE /v1/{APPID}/users/{USER}/sessions`.

use std::sync::Arc;

use crate::{
    domain::{administration, app::App, rights::Right},
    http::{
        Ports,
        administration::Query,
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::{actor, administrator_call, user_id, user_not_found},
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::ManageUsers;

pub fn operation() -> Operation {
    Operation::new(
        "End all sessions of a user",
        "Also makes the codes invalid that were mailed to the user. Works without Redis: the sessions then end when \
         Redis is back.",
    )
    .requires_right(RIGHT)
    .response(Content::empty_object())
    .errors(&[ErrorCode::NotFound])
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    caller: &Caller,
    mut request: InboundRequest,
) -> Result<Response, Problem> {
    Query::parse(&request.uri, &[])?;
    request.expect_no_data().await?;
    let actor = actor(caller);
    let admin = administrator_call(state, app, &request.client, &actor);
    if administration::end_user_sessions(admin, user_id(&request)?).await? {
        response::empty_object()
    } else {
        Err(user_not_found())
    }
}
