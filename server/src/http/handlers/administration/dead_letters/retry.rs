//! `POST /v1/{APPID}/dead-letters/retry`.

use std::sync::Arc;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{app::App, ports::RetrySelection, rights::Right},
    http::{
        Ports,
        administration::{Query, StrictBody},
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::{ids_schema, parse_uuid, webhooks::webhook_not_found},
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::ManageUsers;

/// Maximum number of ids in one call.
const MAX_IDS: usize = 100;

/// How many dead letters were queued for delivery again.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "RetryResponse")]
pub struct RetryResponse {
    pub retried: u64,
}

pub fn operation() -> Operation {
    Operation::new(
        "Retry dead letters",
        "Queues dead letters for delivery again: those with these ids, or the oldest 10,000 of a webhook. Ids that are \
         not dead letters are ignored.",
    )
    .requires_right(RIGHT)
    .request(Content::json_with_schema(schema, json!({ "ids": ["5b1f7f0c-2f39-4f1e-9d64-9a4f0c6f7a11"] })))
    .response(Content::json::<RetryResponse>(json!({ "retried": 1 })))
    .errors(&[ErrorCode::NotFound])
}

fn schema(_: &mut SchemaGenerator) -> Schema {
    let webhook = json_schema!({
        "type": "object",
        "additionalProperties": false,
        "required": ["webhook"],
        "properties": { "webhook": { "type": "string", "description": "The name of a webhook of the App." } },
    });
    json_schema!({ "oneOf": [ids_schema(MAX_IDS), webhook] })
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    _: &Caller,
    mut request: InboundRequest,
) -> Result<Response, Problem> {
    Query::parse(&request.uri, &[])?;
    let mut body = StrictBody::new(request.read_json_object().await?);
    let ids = body.texts("ids", MAX_IDS, parse_uuid);
    let webhook = body.text("webhook", |text| Ok(text.to_owned()));
    match (&ids, &webhook) {
        (None, None) => body.require("ids", false),
        (Some(_), Some(_)) => body.reject("webhook", "cannot be set together with ids"),
        (Some(_), None) | (None, Some(_)) => {}
    }
    body.finish()?;
    let selection = match webhook {
        Some(name) => RetrySelection::Webhook(app.webhook(&name).ok_or_else(webhook_not_found)?.name.clone()),
        None => RetrySelection::Ids(ids.unwrap_or_default()),
    };
    response::json(&RetryResponse { retried: state.stores.retry_dead_letters(app.id(), selection).await? })
}
