//! `GET /v1/{APPID}/dead-letters`.

use std::sync::Arc;

use schemars::{JsonSchema, json_schema};
use serde::Serialize;
use serde_json::json;
use uuid::Uuid;

use crate::{
    domain::{administration::DeadLetterRow, app::App, mail::MailKind, rights::Right},
    http::{
        Ports,
        administration::{Cursor, Query},
        authentication::Caller,
        error::Problem,
        handlers::administration::events::position_at,
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

/// A page of dead letters.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "DeadLettersResponse")]
pub struct DeadLettersResponse {
    /// The newest first.
    pub dead_letters: Vec<DeadLetter>,
    /// The `cursor` of the next page; left out on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A delivery that was given up.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "DeadLetter")]
pub struct DeadLetter {
    pub id: String,
    /// The name of the mail; `webhook` for an event that was not delivered to a webhook.
    pub kind: String,
    /// The name of the webhook; null for a mail.
    pub webhook: Option<String>,
    pub user_id: Option<String>,
    pub attempts: i32,
    /// Unix seconds.
    pub created_at: i64,
    /// When the delivery was given up, in Unix seconds.
    pub dead_at: i64,
    /// Why the last attempt failed. Never contains text from the receiver.
    pub error: Option<String>,
}

// === impl DeadLetter ===

impl From<DeadLetterRow> for DeadLetter {
    fn from(row: DeadLetterRow) -> Self {
        Self {
            id: row.id.to_string(),
            kind: row.kind,
            webhook: row.webhook,
            user_id: row.user.map(|user| user.to_string()),
            attempts: row.attempts,
            created_at: row.created_at.unix_timestamp(),
            dead_at: row.dead_at.unix_timestamp(),
            error: row.error,
        }
    }
}

pub fn operation() -> Operation {
    Operation::new("List dead letters", "Mails and webhook events whose delivery was given up, newest first.")
        .requires_right(RIGHT)
        .query([
            Parameter::new(
                "kind",
                "The name of a mail, or `webhook`.",
                json_schema!({ "type": "string", "enum": kinds().collect::<Vec<_>>() }),
            ),
            Query::limit_parameter(),
            Cursor::parameter(),
        ])
        .response(Content::json::<DeadLettersResponse>(json!({
            "dead_letters": [{
                "id": "5b1f7f0c-2f39-4f1e-9d64-9a4f0c6f7a11",
                "kind": "confirm",
                "webhook": null,
                "user_id": examples::USER_ID,
                "attempts": 12,
                "created_at": 1_762_339_600,
                "dead_at": 1_762_426_000,
                "error": "the relay refused the recipient",
            }],
        })))
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    _: &Caller,
    request: InboundRequest,
) -> Result<Response, Problem> {
    let query = Query::parse(&request.uri, &["kind", "limit", "cursor"])?;
    let find_kind = |text: &str| kinds().find(|name| *name == text);
    let kind = query.parse_value("kind", "is neither the name of a mail nor webhook", find_kind)?;
    let limit = query.limit()?;
    let cursor = Cursor::new(app.id(), "dead-letters", &kind);
    let after = cursor.position::<(i128, Uuid)>(&query)?.map(|(at, id)| position_at(at, id)).transpose()?;
    let page = state.stores.app_dead_letters(app.id(), kind, after, limit).await?;
    response::json(&DeadLettersResponse {
        dead_letters: page.rows.into_iter().map(DeadLetter::from).collect(),
        next: page.next.map(|next| cursor.encode(&(next.at.unix_timestamp_nanos(), next.id))),
    })
}

/// The kinds of dead letters.
fn kinds() -> impl Iterator<Item = &'static str> {
    MailKind::ALL.into_iter().map(MailKind::as_str).chain([DeadLetterRow::WEBHOOK])
}
