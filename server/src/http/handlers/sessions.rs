//! `GET` and `DELETE /v1/{APPID}/sessions`, `DELETE …/sessions/{id}` and `POST /v1/{APPID}/logout`.

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::{
        app::App,
        audit::{Detail, Event, EventKind},
        session::{SessionId, SessionInfo},
        signed_in::SignedIn,
    },
    http::{
        Ports,
        error::{ErrorCode, Problem},
        guard,
        request::Inbound,
        response::{self, Response},
    },
    state::State,
};

/// What the list of sessions answers.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "SessionsResponse")]
pub struct Answer {
    pub sessions: Vec<Listed>,
}

/// A live session of the user.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Session")]
pub struct Listed {
    pub id: String,
    /// Unix seconds.
    pub created_at: i64,
    /// Unix seconds; noted at most once a minute.
    pub last_used_at: i64,
    /// The address that it was opened from.
    pub ip: String,
    /// What opened it said of itself.
    pub user_agent: Option<String>,
    /// How the user showed who they are (RFC 8176).
    pub amr: [&'static str; 1],
    /// Whether it is that of the token.
    pub current: bool,
}

// === impl Listed ===

impl Listed {
    fn of(info: SessionInfo, current: SessionId) -> Self {
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

pub async fn list<S: Ports>(state: &State<S>, app: &App, request: Inbound) -> Result<Response, Problem> {
    let signed_in = guard::signed_in(state, app, &request.headers).await?;
    let sessions = state.stores.sessions(app.id(), signed_in.user()).await?;
    let current = signed_in.session.id;
    response::json(&Answer { sessions: sessions.into_iter().map(|info| Listed::of(info, current)).collect() })
}

pub async fn end<S: Ports>(state: &State<S>, app: &App, request: Inbound) -> Result<Response, Problem> {
    let signed_in = guard::signed_in(state, app, &request.headers).await?;
    let session: Option<SessionId> = request.item.as_deref().and_then(|id| id.parse().ok());
    let ended = match session {
        Some(session) => state.stores.end_session(app.id(), signed_in.user(), session).await?,
        None => false,
    };
    let Some(session) = session.filter(|_| ended) else {
        return Err(Problem::new(ErrorCode::NotFound, "you have no such session"));
    };
    record(state, app, &request, &signed_in, EventKind::SessionEnded, Detail::ended(session));
    response::nothing()
}

pub async fn end_others<S: Ports>(state: &State<S>, app: &App, request: Inbound) -> Result<Response, Problem> {
    let signed_in = guard::signed_in(state, app, &request.headers).await?;
    let ended = state.stores.end_other_sessions(app.id(), signed_in.user(), signed_in.session.id).await?;
    if !ended.is_empty() {
        record(state, app, &request, &signed_in, EventKind::SessionsEnded, Detail::sessions(ended.len()));
    }
    response::nothing()
}

pub async fn log_out<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    guard::signed_in(state, app, &request.headers).await?;
    request.read_nothing().await?;
    let signed_in = guard::signed_in_still(state, app, &request.headers).await?;
    if state.stores.end_session(app.id(), signed_in.user(), signed_in.session.id).await? {
        record(state, app, &request, &signed_in, EventKind::LoggedOut, Detail::default());
    }
    response::nothing()
}

/// Later: these go on without Postgres.
fn record<S: Ports>(
    state: &State<S>,
    app: &App,
    request: &Inbound,
    signed_in: &SignedIn,
    kind: EventKind,
    detail: Detail,
) {
    let event = Event::new(&state.env, &request.caller, kind, signed_in.user());
    state.stores.record_later(app.id(), event.in_session(signed_in.session.id).with(detail));
}
