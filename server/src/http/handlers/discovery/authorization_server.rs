//! `GET /.well-known/oauth-authorization-server/{APPID}` (RFC 8414), and
//! `GET /{APPID}/.well-known/oauth-authorization-server`.

use super::{AuthorizationServerMetadata, metadata_response};
use crate::{
    domain::app::App,
    http::{
        Ports,
        error::Problem,
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::Response,
    },
    state::State,
};

pub fn operation() -> Operation {
    Operation::new("Metadata for services that check tokens of the App (RFC 8414)", "Issuer, keys and endpoints.")
        .public_document(Content::json::<AuthorizationServerMetadata<'static>>(AuthorizationServerMetadata::example()))
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    metadata_response(&AuthorizationServerMetadata::for_app(&state.settings.base_url, app), &request)
}
