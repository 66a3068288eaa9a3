//! `GET /openapi.json`: the OpenAPI document, rendered once.

use bytes::Bytes;
use schemars::json_schema;
use serde_json::json;

use crate::http::{
    error::Problem,
    openapi::operation::{Content, Operation},
    request::InboundRequest,
    response::{self, Response},
};

pub fn operation() -> Operation {
    Operation::new("This document", "OpenAPI 3.1.").public_document(Content::json_with_schema(
        |_| json_schema!({ "type": "object" }),
        json!({ "openapi": "3.1.0" }),
    ))
}

pub async fn handle(document: &Bytes, request: InboundRequest) -> Result<Response, Problem> {
    Ok(response::public_document(document.clone(), &request.headers))
}
