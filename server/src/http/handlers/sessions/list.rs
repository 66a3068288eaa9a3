//! `GET /v1/{APPID}/sessions`.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{
        app::App,
        session::{SessionId, SessionInfo},
        sessions,
    },
    http::{
        Ports, authentication,
        error::Problem,
        openapi::{
            examples,
            operation::{Content, Operation},
        },
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
    /// Whether it is the session of the token.
    pub current: bool,
}

// === impl ListedSession ===

impl ListedSession {
    fn new(info: SessionInfo, current: SessionId) -> Self {
        Self {
            current: info.id == current,
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
    Operation::new(
        "The live sessions of the user",
        "The most recently used first. A refresh is always recorded, and other uses at most once per minute.",
    )
    .requires_access_token()
    .response(Content::json::<SessionsResponse>(json!({ "sessions": [{
        "id": examples::SESSION_ID,
        "created_at": 1_762_339_600,
        "last_used_at": 1_762_340_200,
        "ip": "203.0.113.7",
        "user_agent": "Mozilla/5.0",
        "amr": ["pwd"],
        "current": true,
    }] })))
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, &request).await?;
    let listed = sessions::list_sessions(state.call(app, &request.client), &signed_in).await?;
    let current = signed_in.session.id;
    response::json(&SessionsResponse {
        sessions: listed.into_iter().map(|info| ListedSession::new(info, current)).collect(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use time::OffsetDateTime;
    use uuid::Uuid;

    use super::*;
    use crate::domain::session::{Amr, SessionKind};

    #[test]
    fn only_a_browser_session_and_a_client_session_have_a_kind() {
        let listed = |kind, client_id: Option<&str>| -> Value {
            let id = SessionId(Uuid::from_u128(9));
            let info = SessionInfo {
                kind,
                id,
                created_at: OffsetDateTime::UNIX_EPOCH,
                last_used_at: OffsetDateTime::UNIX_EPOCH,
                ip: "192.0.2.1".to_owned(),
                user_agent: None,
                amr: Amr::Password,
                client_id: client_id.map(str::to_owned),
            };
            serde_json::to_value(ListedSession::new(info, id)).unwrap()
        };
        assert_eq!(listed(Some(SessionKind::Browser), None)["kind"], "browser");
        let of_client = listed(None, Some("monitoring.grafana"));
        assert_eq!((&of_client["kind"], &of_client["client_id"]), (&"client".into(), &"monitoring.grafana".into()));
        for name in ["kind", "client_id"] {
            assert!(listed(None, None).get(name).is_none(), "the response of an App without pages does not change");
        }
    }
}
