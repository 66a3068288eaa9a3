//! `DELETE /v1/{APPID}/groups/{GROUP}/members/{USER}`.

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
        "Remove a member from a group",
        "Does nothing if the user is not a member. Also removes a membership that a provider reported; the next login \
         with this provider adds it again if the provider still reports it.",
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
    let (name, user) = group_and_user(&request)?;
    let actor = actor(caller);
    let admin = administrator_call(state, app, &request.client, &actor);
    administration::remove_member(admin, &name, user).await.map_err(group_problem)?;
    response::empty_object()
}
