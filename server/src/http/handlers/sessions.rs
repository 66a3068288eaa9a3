//! `GET` and `DELETE /v1/{APPID}/sessions`, `DELETE …/sessions/{id}` and `POST /v1/{APPID}/logout`.

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::{
        app::App,
        session::{SessionId, SessionInfo},
        sessions,
    },
    http::{
        Ports, authentication,
        error::{ErrorCode, Problem},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

/// The response of the list of sessions.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "SessionsResponse")]
pub struct SessionsResponse {
    pub sessions: Vec<ListedSession>,
}

/// A live session of the user.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Session")]
pub struct ListedSession {
    pub id: String,
    /// Unix seconds.
    pub created_at: i64,
    /// Unix seconds; updated at most once per minute.
    pub last_used_at: i64,
    /// The IP address from which it was opened.
    pub ip: String,
    /// The `User-Agent` of the client that opened it.
    pub user_agent: Option<String>,
    /// The authentication method (RFC 8176).
    pub amr: [&'static str; 1],
    /// Whether it is the session of the token.
    pub current: bool,
}

// === impl ListedSession ===

impl ListedSession {
    fn new(info: SessionInfo, current: SessionId) -> Self {
        Self {
            current: info.id == current,
            id: info.id.to_string(),
            created_at: info.created_at.unix_timestamp(),
            last_used_at: info.last_used_at.unix_timestamp(),
            ip: info.ip,
            user_agent: info.user_agent,
            amr: [info.amr.as_str()],
        }
    }
}

pub async fn list<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, &request).await?;
    let listed = sessions::list_sessions(state.call(app, &request.client), &signed_in).await?;
    let current = signed_in.session.id;
    response::json(&SessionsResponse {
        sessions: listed.into_iter().map(|info| ListedSession::new(info, current)).collect(),
    })
}

pub async fn end_session<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, &request).await?;
    let session: Option<SessionId> = request.path_parameter.as_deref().and_then(|id| id.parse().ok());
    let was_live = match session {
        Some(session) => sessions::end_session(state.call(app, &request.client), &signed_in, session).await?,
        None => false,
    };
    if !was_live {
        return Err(Problem::new(ErrorCode::NotFound, "you have no such session"));
    }
    response::empty_object()
}

pub async fn end_others<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, &request).await?;
    sessions::end_other_sessions(state.call(app, &request.client), &signed_in).await?;
    response::empty_object()
}

pub async fn log_out<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    authentication::authenticate(state, app, &request).await?;
    request.expect_no_data().await?;
    let signed_in = authentication::authenticate_again(state, app, &request).await?;
    sessions::log_out(state.call(app, &request.client), &signed_in).await?;
    response::empty_object()
}
