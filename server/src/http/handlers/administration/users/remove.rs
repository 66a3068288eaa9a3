//! `DELETE /v1/{APPID}/users/{USER}`.

use std::sync::Arc;

use crate::{
    domain::{administration, app::App, rights::Right},
    http::{
        Ports,
        administration::Query,
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::{actor, administrator_call, change_problem, if_match, user_id, user_not_found},
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::ManageUsers;

pub fn operation() -> Operation {
    Operation::new(
        "Delete a user",
        "Ends all sessions, and deletes the user with identities and waiting mails. Only the user's events stay, until \
         their retention ends. A repeated call is 404.",
    )
    .requires_right(RIGHT)
    .accepts_if_match()
    .response(Content::empty_object())
    .errors(&[ErrorCode::NotFound, ErrorCode::VersionConflict])
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
    let if_version = match if_match(&request.headers) {
        Ok(if_version) => if_version,
        // If the user does not exist, the response is 404, whatever `If-Match` contains.
        Err(conflict) => {
            let found = state.stores.administered_user(app.id(), user).await?;
            return Err(found.map_or_else(user_not_found, |_| conflict));
        }
    };
    let actor = actor(caller);
    let admin = administrator_call(state, app, &request.client, &actor);
    administration::remove_user(admin, user, if_version).await.map_err(change_problem)?;
    response::empty_object()
}
