//! `GET /v1/{APPID}/events`.

use std::sync::Arc;

use schemars::{JsonSchema, Schema, json_schema};
use serde::Serialize;
use serde_json::{Value, json};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use crate::{
    domain::{
        administration::AuditRow,
        app::App,
        audit::EventKind,
        ports::{EventFilter, RowPosition},
        rights::Right,
        user::UserId,
    },
    http::{
        Ports,
        administration::{Cursor, Query},
        authentication::Caller,
        error::Problem,
        handlers::administration::parse_uuid,
        openapi::{
            examples,
            operation::{Content, Operation, Parameter},
        },
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::Read;

/// The last second of the year 9999.
const MAX_SECONDS: i64 = 253_402_300_799;

/// A page of events.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "EventsResponse")]
pub struct EventsResponse {
    /// The newest first. Can be empty although there is a next page: a page reads at most 5,000 rows.
    pub events: Vec<AdministrationEvent>,
    /// The `cursor` of the next page; left out on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// An event of the audit log.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AdministrationEvent")]
pub struct AdministrationEvent {
    pub id: String,
    /// Unix seconds. For refusals, which are counted per quarter of an hour: the start of that quarter.
    pub at: i64,
    /// The name of the kind. Later versions add kinds.
    pub kind: String,
    pub user_id: Option<String>,
    pub session_id: Option<String>,
    /// The IP address of the client; null for events of administrators.
    pub ip: Option<String>,
    /// The number of refusals; 1 for other events.
    pub count: i64,
    /// More about the event. The content depends on its kind. `actor` is the administrator who caused it.
    pub detail: Option<Value>,
}

// === impl AdministrationEvent ===

impl AdministrationEvent {
    pub(super) fn example() -> Value {
        json!({
            "id": "019a8452-a0b1-7c2d-8e3f-405162738495",
            "at": 1_762_339_600,
            "kind": "user_disabled",
            "user_id": examples::USER_ID,
            "session_id": null,
            "ip": null,
            "count": 1,
            "detail": { "actor": { "namespace": "shop", "name": "backoffice" }, "fields": ["disabled"] },
        })
    }
}

impl From<AuditRow> for AdministrationEvent {
    fn from(row: AuditRow) -> Self {
        Self {
            id: row.id.to_string(),
            at: row.at.unix_timestamp(),
            kind: row.kind,
            user_id: row.user.map(|user| user.to_string()),
            session_id: row.session.map(|session| session.to_string()),
            ip: row.ip,
            count: row.count,
            detail: row.detail,
        }
    }
}

pub fn operation() -> Operation {
    Operation::new(
        "List events",
        "The audit log of the App, newest first. A page reads at most 5,000 rows, so it can be empty and still have \
         `next`.",
    )
    .requires_right(RIGHT)
    .query([
        Parameter::new("user", "The id of a user.", json_schema!({ "type": "string", "format": "uuid" })),
        Parameter::new(
            "kind",
            "The name of an event kind.",
            json_schema!({ "type": "string", "enum": EventKind::ALL.map(EventKind::as_str).as_slice() }),
        ),
        Parameter::new("after", "At or after this time, in Unix seconds.", time_schema()),
        Parameter::new("before", "Before this time, in Unix seconds.", time_schema()),
        Query::limit_parameter(),
        Cursor::parameter(),
    ])
    .response(Content::json::<EventsResponse>(json!({
        "events": [AdministrationEvent::example()],
        "next": "nE6t0jDxvQ3WeyJpZCI6IjAxOWE4NDUyIn0",
    })))
}

fn time_schema() -> Schema {
    json_schema!({ "type": "integer", "format": "int64", "minimum": 0, "maximum": MAX_SECONDS })
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    _: &Caller,
    request: InboundRequest,
) -> Result<Response, Problem> {
    let query = Query::parse(&request.uri, &["user", "kind", "after", "before", "limit", "cursor"])?;
    // Negative times are refused: no event is older than 1970, and Postgres cannot store times before the year -4712.
    let time = |text: &str| {
        let seconds = text.parse().ok().filter(|seconds| (0..=MAX_SECONDS).contains(seconds))?;
        OffsetDateTime::from_unix_timestamp(seconds).ok()
    };
    let filter = EventFilter {
        user: query.parse_value("user", "is not a UUID", |text| parse_uuid(text).map(UserId))?,
        kind: query.parse_value("kind", "is not the name of an event kind", |text| {
            EventKind::from_name(text).map(EventKind::as_str)
        })?,
        after: query.parse_value("after", "is not a time in Unix seconds", time)?,
        before: query.parse_value("before", "is not a time in Unix seconds", time)?,
    };
    let limit = query.limit()?;
    let cursor = Cursor::new(app.id(), "events", &filter);
    let position = cursor.position::<(i128, Uuid)>(&query)?;
    let after = position.map(|(at, id)| position_at(at, id)).transpose()?;
    // Events that are older than the retention time are not shown, even if they are not deleted yet.
    let oldest = state.env.now() - Duration::days(i64::from(app.doc.audit_retention_days));
    let filter = EventFilter { after: Some(filter.after.map_or(oldest, |after| after.max(oldest))), ..filter };
    let page = state.stores.events(app.id(), &filter, after, limit).await?;
    response::json(&EventsResponse {
        events: page.rows.into_iter().map(AdministrationEvent::from).collect(),
        next: page.next.map(|next| cursor.encode(&(next.at.unix_timestamp_nanos(), next.id))),
    })
}

/// Returns the row position that a cursor contains: the id of the row, and its time in Unix nanoseconds (`at`).
pub(super) fn position_at(at: i128, id: Uuid) -> Result<RowPosition, Problem> {
    let at = OffsetDateTime::from_unix_timestamp_nanos(at).ok().filter(|_| at >= 0);
    let at = at.ok_or_else(|| Problem::invalid_request("cursor is not a cursor of this call with these filters"))?;
    Ok(RowPosition { at, id })
}
