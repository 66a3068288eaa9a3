//! `POST /{APPID}/{PROVIDER}/callback`, for providers that send the user back with a form.

use schemars::{Schema, SchemaGenerator};

use super::callback;
use crate::{
    domain::app::App,
    http::{
        Ports,
        error::Problem,
        openapi::operation::{Content, Operation},
        parameters::Parameters,
        request::{InboundRequest, object_schema},
        response::Response,
    },
    state::State,
};

pub fn operation() -> Operation {
    callback::operation_without_parameters().request(Content::form(form_schema))
}

fn form_schema(_: &mut SchemaGenerator) -> Schema {
    let fields = callback::parameters().map(|field| (field.name, field.description, field.schema, field.is_required));
    object_schema(fields)
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let provider = super::requested_provider(app, &request)?;
    let form = request.read_form_text().await?;
    let parameters = Parameters::parse(&form)?;
    callback::finish_flow(state, app, provider, &request, &parameters, parameters.get_once("user")?).await
}
