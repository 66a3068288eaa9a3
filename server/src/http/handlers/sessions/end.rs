//! `DELETE /v1/{APPID}/sessions/{SESSION}`.

use crate::{
    domain::{app::App, session::SessionId, sessions},
    http::{
        Ports, authentication,
        error::{ErrorCode, Problem},
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub fn operation() -> Operation {
    Operation::new("End a session of the user", "It can be the session of the token itself.")
        .requires_access_token()
        .response(Content::empty_object())
        .errors(&[ErrorCode::NotFound])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, &request).await?;
    let session: Option<SessionId> = request.path_parameter(0).parse().ok();
    let was_live = match session {
        Some(session) => sessions::end_session(state.call(app, &request.client), &signed_in, session).await?,
        None => false,
    };
    if !was_live {
        return Err(no_such_session());
    }
    response::empty_object()
}

pub fn no_such_session() -> Problem {
    Problem::new(ErrorCode::NotFound, "you have no such session")
}
