//! `DELETE /v1/{APPID}/users/{USER}/identities/{PROVIDER}`.

use std::sync::Arc;

use crate::{
    domain::{administration, app::App, ports::IdentityRemoval, rights::Right},
    http::{
        Ports,
        administration::Query,
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::{actor, administrator_call, user_id},
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::ManageUsers;

pub fn operation() -> Operation {
    Operation::new(
        "Unlink a provider from a user",
        "409 if the user would have neither an email address nor another identity. Also works if the provider was \
         removed from the App.",
    )
    .requires_right(RIGHT)
    .response(Content::empty_object())
    .errors(&[ErrorCode::NotFound, ErrorCode::LastIdentity])
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    caller: &Caller,
    mut request: InboundRequest,
) -> Result<Response, Problem> {
    Query::parse(&request.uri, &[])?;
    request.expect_no_data().await?;
    let user = user_id(&request)?;
    let actor = actor(caller);
    let admin = administrator_call(state, app, &request.client, &actor);
    match administration::remove_identities(admin, user, request.path_parameter(1)).await? {
        IdentityRemoval::Removed => response::empty_object(),
        IdentityRemoval::NotFound => {
            Err(Problem::new(ErrorCode::NotFound, "the user has no identity of this provider"))
        }
        IdentityRemoval::LastIdentity => Err(Problem::new(
            ErrorCode::LastIdentity,
            "the user has no email address and no other identity; add one of them first",
        )),
    }
}
