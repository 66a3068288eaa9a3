//! `GET /v1/{APPID}/user/activity`.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::json;
use time::Duration;

use crate::{
    domain::{
        app::App,
        audit::{ActivityEntry, EventKind},
        user::UserId,
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

/// The response of *activity*.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ActivityResponse")]
pub struct ActivityResponse {
    /// The newest event first, at most 100.
    pub events: Vec<ActivityEvent>,
}

/// An event of the account.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Event")]
pub struct ActivityEvent {
    /// Unix seconds. For refusals, which are counted per quarter of an hour: the start of that quarter.
    pub at: i64,
    #[schemars(schema_with = "event_kind_schema")]
    pub kind: &'static str,
    /// The IP address of the client. For refusals from IPv6, the /64; null if they came from too many addresses to
    /// list.
    pub ip: Option<String>,
    /// The session that caused the event, or that the event opened.
    pub session_id: Option<String>,
    /// The number of refusals; 1 for other events.
    pub count: u64,
}

fn event_kind_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": EventKind::ALL.map(EventKind::as_str).as_slice() })
}

// === impl ActivityEvent ===

impl From<ActivityEntry> for ActivityEvent {
    fn from(event: ActivityEntry) -> Self {
        Self {
            at: event.at.unix_timestamp(),
            kind: event.kind.as_str(),
            ip: event.ip,
            session_id: event.session.map(|session| session.to_string()),
            count: event.count,
        }
    }
}

pub fn operation() -> Operation {
    Operation::new(
        "Recent events of the user's account",
        "The newest 100 events: logins, changes and refusals. Refusals are counted per quarter of an hour and shown \
         when it is over.",
    )
    .requires_access_token()
    .response(Content::json::<ActivityResponse>(json!({ "events": [
        {
            "at": 1_762_339_600,
            "kind": "logged_in",
            "ip": "203.0.113.7",
            "session_id": examples::SESSION_ID,
            "count": 1,
        },
        {
            "at": 1_762_338_600,
            "kind": "login_refused",
            "ip": "198.51.100.23",
            "session_id": null,
            "count": 4,
        },
    ] })))
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, &request).await?;
    let events = recent_events(state, app, signed_in.user_id()).await?;
    response::json(&ActivityResponse { events: events.into_iter().map(ActivityEvent::from).collect() })
}

/// The newest events of the user. Events that are older than the retention time are not shown, even if they are not
/// deleted yet.
pub async fn recent_events<S: Ports>(state: &State<S>, app: &App, user: UserId) -> Result<Vec<ActivityEntry>, Problem> {
    let since = state.env.now() - Duration::days(i64::from(app.doc.audit_retention_days));
    Ok(state.stores.activity(app.id(), user, since).await?)
}
