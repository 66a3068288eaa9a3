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
        error::Problem,
        handlers::administration::parse_uuid,
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::ManageUsers;

/// Maximum number of ids in one call.
const MAX_IDS: usize = 100;

/// How many dead letters are due again.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "RetryResponse")]
pub struct RetryResponse {
    pub retried: u64,
}

pub fn operation() -> Operation {
    Operation::new("Retry dead letters", "Makes dead letters due again. Ids that are not dead letters are ignored.")
        .requires_right(RIGHT)
        .request(Content::json_with_schema(schema, json!({ "ids": ["5b1f7f0c-2f39-4f1e-9d64-9a4f0c6f7a11"] })))
        .response(Content::json::<RetryResponse>(json!({ "retried": 1 })))
}

fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "additionalProperties": false,
        "required": ["ids"],
        "properties": {
            "ids": {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_IDS,
                "items": { "type": "string", "format": "uuid" },
            },
        },
    })
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
    body.require("ids", ids.is_some());
    body.finish()?;
    let selection = RetrySelection::Ids(ids.unwrap_or_default());
    response::json(&RetryResponse { retried: state.stores.retry_dead_letters(app.id(), selection).await? })
}
