//! `GET /v1/{APPID}/users/{USER}/export`.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{administration, app::App, rights::Right},
    http::{
        Ports,
        administration::Query,
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::{
            AdminUserResponse, actor, administrator_call, events::AdministrationEvent, sessions::list::UserSession,
            user_id, user_not_found,
        },
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::Read;

/// All data of a user.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "UserExportResponse")]
pub struct UserExportResponse {
    pub user: AdminUserResponse,
    pub sessions: Vec<UserSession>,
    /// The newest 10,000 events, the newest first.
    pub events: Vec<AdministrationEvent>,
    /// Whether there are more events.
    pub events_truncated: bool,
    /// Unix seconds.
    pub exported_at: i64,
}

pub fn operation() -> Operation {
    Operation::new(
        "Export the data of a user",
        "Everything that is stored about the user, except password hash and tokens: for the user's legal right of \
         access.",
    )
    .requires_right(RIGHT)
    .response(Content::json::<UserExportResponse>(json!({
        "user": AdminUserResponse::example(),
        "sessions": [UserSession::example()],
        "events": [AdministrationEvent::example()],
        "events_truncated": false,
        "exported_at": 1_762_340_300,
    })))
    .errors(&[ErrorCode::NotFound])
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    caller: &Caller,
    request: InboundRequest,
) -> Result<Response, Problem> {
    Query::parse(&request.uri, &[])?;
    let actor = actor(caller);
    let admin = administrator_call(state, app, &request.client, &actor);
    let export = administration::export_user(admin, user_id(&request)?).await?.ok_or_else(user_not_found)?;
    response::json(&UserExportResponse {
        user: export.user.into(),
        sessions: export.sessions.into_iter().map(UserSession::from).collect(),
        events: export.events.into_iter().map(AdministrationEvent::from).collect(),
        events_truncated: export.events_truncated,
        exported_at: state.env.now().unix_timestamp(),
    })
}
