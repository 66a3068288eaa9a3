//! `DELETE /v1/{APPID}/groups/{GROUP}`.

use std::sync::Arc;

use super::{group_name, group_problem};
use crate::{
    domain::{administration, app::App, rights::Right},
    http::{
        Ports,
        administration::Query,
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::{actor, administrator_call},
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::ManageUsers;

pub fn operation() -> Operation {
    Operation::new(
        "Delete a group",
        "Removes all its members first, also those from providers. If the group has so many members that this takes \
         longer than 30 seconds, the call is 503; repeat it. A repeated call is 404.",
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
    let name = group_name(&request)?;
    let actor = actor(caller);
    let admin = administrator_call(state, app, &request.client, &actor);
    administration::remove_group(admin, &name).await.map_err(group_problem)?;
    response::empty_object()
}
