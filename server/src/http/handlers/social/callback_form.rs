//! `POST /{APPID}/{PROVIDER}/callback`, for providers that send the user back with a form.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Map, json};

use super::callback;
use crate::{
    domain::app::App,
    http::{
        Ports,
        error::Problem,
        openapi::operation::{Content, Operation},
        parameters::Parameters,
        request::InboundRequest,
        response::Response,
    },
    state::State,
};

pub fn operation() -> Operation {
    callback::operation_without_parameters().request(Content::form(form_schema))
}

fn form_schema(_: &mut SchemaGenerator) -> Schema {
    let fields: Map<_, _> = callback::PARAMETERS
        .iter()
        .map(|(name, about)| ((*name).to_owned(), json!({ "type": "string", "description": about })))
        .collect();
    json_schema!({ "type": "object", "properties": fields })
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let provider = super::requested_provider(app, &request)?;
    let form = request.read_form_text().await?;
    let parameters = Parameters::parse(&form)?;
    callback::finish_flow(state, app, provider, &request, &parameters, parameters.get_once("user")?).await
}
