//! `GET /.well-known/oauth-authorization-server/{APPID}` (RFC 8414), and
//! `GET /{APPID}/.well-known/oauth-authorization-server`.

use super::{AuthorizationServerMetadata, metadata_response, openid_configuration::OpenIdConfiguration};
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
    let description = "Issuer, keys and endpoints. With OpenID Connect clients, the same as *openid-configuration*.";
    Operation::new("Metadata for services that check tokens of the App (RFC 8414)", description)
        .public_document(Content::json::<AuthorizationServerMetadata<'static>>(AuthorizationServerMetadata::example()))
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    if app.has_clients() {
        return metadata_response(&OpenIdConfiguration::for_app(state, app), &request);
    }
    metadata_response(&AuthorizationServerMetadata::for_app(state, app), &request)
}
