//! `POST /v1/{APPID}/webhooks/{WEBHOOK}/acknowledge`.

use std::sync::Arc;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde_json::json;

use super::webhook_key;
use crate::{
    domain::{app::App, rights::Right},
    http::{
        Ports,
        administration::{Query, StrictBody},
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::{ids_schema, parse_uuid},
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::FetchEvents;

/// Maximum number of ids in one call.
const MAX_IDS: usize = 100;

/// How many events were removed.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AcknowledgeResponse")]
pub struct AcknowledgeResponse {
    pub acknowledged: u64,
}

pub fn operation() -> Operation {
    Operation::new(
        "Acknowledge events of a pull webhook",
        "The events do not come again. Unknown ids are ignored, so the call can be repeated.",
    )
    .requires_right(RIGHT)
    .request(Content::json_with_schema(schema, json!({ "ids": ["0197a3c4-8f1e-7b3a-9c55-0d5f0a6c2b11"] })))
    .response(Content::json::<AcknowledgeResponse>(json!({ "acknowledged": 1 })))
    .errors(&[ErrorCode::NotFound])
}

fn schema(_: &mut SchemaGenerator) -> Schema {
    ids_schema(MAX_IDS)
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
    let key = webhook_key(app, &request)?;
    let acknowledged = state.stores.acknowledge_events(&key, &ids.unwrap_or_default()).await?;
    response::json(&AcknowledgeResponse { acknowledged })
}
