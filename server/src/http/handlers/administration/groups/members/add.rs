//! `PUT /v1/{APPID}/groups/{GROUP}/members/{USER}`.

use std::sync::Arc;

use crate::{
    domain::{administration, app::App, rights::Right},
    http::{
        Ports,
        administration::Query,
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::{
            actor, administrator_call,
            groups::{group_and_user, group_problem},
        },
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::ManageUsers;

pub fn operation() -> Operation {
    Operation::new(
        "Add a member to a group",
        "Does nothing if an administrator has added the user before. A user is in at most 500 groups, those from \
         providers included.",
    )
    .requires_right(RIGHT)
    .response(Content::empty_object())
    .errors(&[ErrorCode::NotFound, ErrorCode::TooManyGroups])
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    caller: &Caller,
    mut request: InboundRequest,
) -> Result<Response, Problem> {
    Query::parse(&request.uri, &[])?;
    request.expect_no_data().await?;
    let (name, user) = group_and_user(&request)?;
    let actor = actor(caller);
    let admin = administrator_call(state, app, &request.client, &actor);
    administration::add_member(admin, &name, user).await.map_err(group_problem)?;
    response::empty_object()
}
