//! `GET /{APPID}/.well-known/jwks.json`: the public keys (RFC 7517).

use crate::{
    domain::app::App,
    http::{
        error::Problem,
        request::InboundRequest,
        response::{self, Response},
    },
};

pub fn handle(app: &App, request: &InboundRequest) -> Result<Response, Problem> {
    let keys = serde_json::to_vec(&app.keys.jwks()).map_err(|error| Problem::server_error().with_cause(error))?;
    Ok(response::public_document(keys, &request.headers))
}
