//! `DELETE /v1/{APPID}/users/{USER}/sessions/{SESSION}`.

use std::sync::Arc;

use crate::{
    domain::{administration, app::App, rights::Right, session::SessionId},
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
    Operation::new("End a session of a user", "404 unless the session is live.")
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
    let user = user_id(&request)?;
    let session: Option<SessionId> = request.path_parameter(1).parse().ok();
    let actor = actor(caller);
    let admin = administrator_call(state, app, &request.client, &actor);
    let was_live = match session {
        Some(session) => administration::end_user_session(admin, user, session).await?,
        None => false,
    };
    if was_live {
        response::empty_object()
    } else {
        Err(Problem::new(ErrorCode::NotFound, "the user has no such live session"))
    }
}
