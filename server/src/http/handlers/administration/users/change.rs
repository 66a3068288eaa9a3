//! `PATCH /v1/{APPID}/users/{USER}`.

use std::sync::Arc;

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::json;

use crate::{
    domain::{
        administration::{self, ChangeUserInput, ExternalId, Metadata},
        app::App,
        rights::Right,
        user::Name,
    },
    http::{
        Ports,
        administration::{Query, StrictBody},
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::{
            AdminUserResponse, actor, administrator_call, change_problem, if_match, metadata_schema, user_id,
            user_not_found, user_response,
        },
        openapi::{
            operation::{Content, Operation},
            patterns,
        },
        request::InboundRequest,
        response::Response,
    },
    state::State,
};

pub const RIGHT: Right = Right::ManageUsers;

pub fn operation() -> Operation {
    Operation::new(
        "Change a user",
        "Only the fields in the body change. A new `email` takes effect immediately; it is unverified unless the call also sends \
         `email_verified`, and a former verified address gets a notice. A new address, another verification and \
         `disabled: true` end all sessions. Verifying a contested account removes its password.",
    )
    .requires_right(RIGHT)
    .accepts_if_match()
    .request(Content::json_with_schema(schema, json!({ "disabled": true, "metadata": { "reason": "chargeback" } })))
    .response(Content::json::<AdminUserResponse>(AdminUserResponse::example()))
    .response_headers(&["ETag"])
    .errors(&[ErrorCode::NotFound, ErrorCode::VersionConflict, ErrorCode::ExternalIdTaken, ErrorCode::EmailTaken])
}

fn schema(schemas: &mut SchemaGenerator) -> Schema {
    let mut metadata = metadata_schema(schemas);
    let description =
        format!("At most {} bytes as compact JSON. Replaces the metadata; null removes it.", Metadata::MAX_BYTES);
    metadata.insert("type".to_owned(), json!(["object", "null"]));
    metadata.insert("description".to_owned(), description.into());
    json_schema!({
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "name": {
                "type": "string",
                "maxLength": Name::MAX_CHARS,
                "pattern": patterns::NAME,
                "description": "Without control characters; leading and trailing white space is removed. Empty removes \
                    the name.",
            },
            "email": { "type": "string", "format": "email", "minLength": 3, "maxLength": 254 },
            "email_verified": { "type": "boolean" },
            "disabled": { "type": "boolean" },
            "metadata": metadata,
            "external_id": {
                "type": ["string", "null"],
                "minLength": 1,
                "maxLength": ExternalId::MAX_BYTES,
                "pattern": patterns::NO_CONTROL_CHARACTERS,
                "description": "The id of the user in another system. null removes it.",
            },
        },
    })
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    caller: &Caller,
    mut request: InboundRequest,
) -> Result<Response, Problem> {
    Query::parse(&request.uri, &[])?;
    let mut body = StrictBody::new(request.read_json_object().await?);
    body.refuse_null("email");
    body.refuse_null("name");
    let input = ChangeUserInput {
        if_version: None,
        name: body.name(),
        email: body.email(app),
        email_verified: body.boolean("email_verified"),
        disabled: body.boolean("disabled"),
        metadata: body.clearable("metadata", StrictBody::metadata),
        external_id: body.clearable("external_id", StrictBody::external_id),
    };
    body.finish()?;
    let user = user_id(&request)?;
    let if_version = match if_match(&request.headers) {
        Ok(if_version) => if_version,
        // If the user does not exist, the response is 404, whatever `If-Match` contains.
        Err(conflict) => {
            let found = state.stores.administered_user(app.id(), user).await?;
            return Err(found.map_or_else(user_not_found, |_| conflict));
        }
    };
    let actor = actor(caller);
    let admin = administrator_call(state, app, &request.client, &actor);
    let input = ChangeUserInput { if_version, ..input };
    user_response(administration::change_user(admin, user, input).await.map_err(change_problem)?)
}
