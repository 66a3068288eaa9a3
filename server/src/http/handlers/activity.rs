//! `GET /v1/{APPID}/user/activity`.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use time::Duration;

use crate::{
    domain::{
        app::App,
        audit::{Activity, EventKind},
    },
    http::{
        Ports,
        error::Problem,
        guard,
        request::Inbound,
        response::{self, Response},
    },
    state::State,
};

/// What *activity* answers.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ActivityResponse")]
pub struct Answer {
    /// The newest first, at most 100.
    pub events: Vec<Entry>,
}

/// Something that happened to the account.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Event")]
pub struct Entry {
    /// Unix seconds; of refusals the beginning of their quarter of an hour.
    pub at: i64,
    #[schemars(schema_with = "kinds")]
    pub kind: &'static str,
    /// Where it came from. Of refusals an IPv6 address is its /64; null where they came from too many to tell.
    pub ip: Option<String>,
    /// By which session it was done, or which one it opened.
    pub session_id: Option<String>,
    /// Of refusals, how many there were; else 1.
    pub count: u64,
}

fn kinds(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": EventKind::ALL.map(EventKind::as_str) })
}

// === impl Entry ===

impl From<Activity> for Entry {
    fn from(event: Activity) -> Self {
        Self {
            at: event.at.unix_timestamp(),
            kind: event.kind.as_str(),
            ip: event.ip,
            session_id: event.session.map(|session| session.to_string()),
            count: event.count,
        }
    }
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: Inbound) -> Result<Response, Problem> {
    let signed_in = guard::signed_in(state, app, &request.headers).await?;
    // What is past its time is not shown, whether it is deleted yet or not.
    let since = state.env.now() - Duration::days(i64::from(app.doc.audit_retention_days));
    let events = state.stores.activity(app.id(), signed_in.user(), since).await?;
    response::json(&Answer { events: events.into_iter().map(Entry::from).collect() })
}
