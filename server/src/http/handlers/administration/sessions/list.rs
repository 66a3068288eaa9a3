//! `GET /v1/{APPID}/users/{USER}/sessions`.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    domain::{administration, app::App, rights::Right, session::SessionInfo},
    http::{
        Ports,
        administration::Query,
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::{actor, administrator_call, user_id, user_not_found},
        openapi::{
            examples,
            operation::{Content, Operation},
        },
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::Read;

/// The live sessions of a user.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "UserSessionsResponse")]
pub struct UserSessionsResponse {
    /// The most recently used first.
    pub sessions: Vec<UserSession>,
}

/// A live session of a user.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "UserSession")]
pub struct UserSession {
    pub id: String,
    /// `browser` for a browser that is logged in to the pages, `client` for an OpenID Connect client. Omitted for a
    /// session of the App.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// The client, if `kind` is `client`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
    /// Unix seconds.
    pub created_at: i64,
    /// Unix seconds; updated by each refresh, and by other uses at most once per minute.
    pub last_used_at: i64,
    /// The IP address from which it was opened.
    pub ip: String,
    /// The `User-Agent` of the client that opened it.
    pub user_agent: Option<String>,
    /// The authentication method (RFC 8176).
    pub amr: [&'static str; 1],
}

// === impl UserSession ===

impl UserSession {
    pub(in crate::http::handlers::administration) fn example() -> Value {
        json!({
            "id": examples::SESSION_ID,
            "created_at": 1_762_339_600,
            "last_used_at": 1_762_340_200,
            "ip": "203.0.113.7",
            "user_agent": "Mozilla/5.0",
            "amr": ["pwd"],
        })
    }
}

impl From<SessionInfo> for UserSession {
    fn from(info: SessionInfo) -> Self {
        Self {
            id: info.id.to_string(),
            kind: info.kind_name(),
            client_id: info.client_id,
            created_at: info.created_at.unix_timestamp(),
            last_used_at: info.last_used_at.unix_timestamp(),
            ip: info.ip,
            user_agent: info.user_agent,
            amr: [info.amr.as_str()],
        }
    }
}

pub fn operation() -> Operation {
    Operation::new("List the sessions of a user", "The live sessions, the most recently used first.")
        .requires_right(RIGHT)
        .response(Content::json::<UserSessionsResponse>(json!({ "sessions": [UserSession::example()] })))
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
    let sessions = administration::user_sessions(admin, user_id(&request)?).await?.ok_or_else(user_not_found)?;
    response::json(&UserSessionsResponse { sessions: sessions.into_iter().map(UserSession::from).collect() })
}

#[cfg(test)]
mod tests {
    use time::OffsetDateTime;
    use uuid::Uuid;

    use super::*;
    use crate::domain::session::{Amr, SessionId, SessionKind};

    #[test]
    fn only_a_browser_session_and_a_client_session_have_a_kind() {
        let listed = |kind, client_id: Option<&str>| -> Value {
            let info = SessionInfo {
                kind,
                id: SessionId(Uuid::from_u128(9)),
                created_at: OffsetDateTime::UNIX_EPOCH,
                last_used_at: OffsetDateTime::UNIX_EPOCH,
                ip: "192.0.2.1".to_owned(),
                user_agent: None,
                amr: Amr::Password,
                client_id: client_id.map(str::to_owned),
            };
            serde_json::to_value(UserSession::from(info)).unwrap()
        };
        assert_eq!(listed(Some(SessionKind::Browser), None)["kind"], "browser");
        let of_client = listed(None, Some("monitoring.grafana"));
        assert_eq!((&of_client["kind"], &of_client["client_id"]), (&"client".into(), &"monitoring.grafana".into()));
        for name in ["kind", "client_id"] {
            assert!(listed(None, None).get(name).is_none(), "{name}");
        }
    }
}
