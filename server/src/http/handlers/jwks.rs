//! `GET /{APPID}/.well-known/jwks.json`: the public keys (RFC 7517).

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::json;

use crate::{
    domain::app::App,
    http::{
        Ports,
        error::Problem,
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub fn operation() -> Operation {
    Operation::new(
        "The keys that sign the tokens of the App",
        "A JWK Set (RFC 7517), including keys that are published in advance and retired keys.",
    )
    .public_document(Content::json_with_schema(
        key_set_schema,
        json!({ "keys": [{
            "kty": "EC", "crv": "P-256", "use": "sig", "alg": "ES256", "kid": "s1",
            "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
            "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0",
        }] }),
    ))
}

fn key_set_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "properties": { "keys": { "type": "array", "items": { "type": "object" } } },
        "required": ["keys"],
    })
}

pub async fn handle<S: Ports>(_: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let keys = serde_json::to_vec(&app.keys.jwks()).map_err(|error| Problem::server_error().with_cause(error))?;
    Ok(response::public_document(keys, &request.headers))
}
