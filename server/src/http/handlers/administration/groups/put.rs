//! `PUT /v1/{APPID}/groups/{GROUP}`.

use std::sync::Arc;

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::json;

use super::{group_name, group_problem};
use crate::{
    domain::{
        administration,
        app::App,
        groups::{GroupTitle, InvalidGroupTitle},
        rights::Right,
    },
    http::{
        Ports,
        administration::{Query, StrictBody},
        authentication::Caller,
        error::{ErrorCode, FieldCode, Problem},
        handlers::administration::{actor, administrator_call},
        openapi::{
            operation::{Content, Operation},
            patterns,
        },
        request::{InboundRequest, InvalidField},
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::ManageUsers;

pub fn operation() -> Operation {
    Operation::new(
        "Create a group, or change its title",
        "Sets the title to that of the body; without `title`, the group has none. An App has at most 10,000 groups.",
    )
    .requires_right(RIGHT)
    .request(Content::json_with_schema(schema, json!({ "title": "Argo CD administrators" })).optional())
    .response(Content::empty_object())
    .errors(&[ErrorCode::NotFound, ErrorCode::TooManyGroups])
}

fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "title": {
                "type": ["string", "null"],
                "maxLength": GroupTitle::MAX_CHARS,
                "pattern": patterns::NAME,
                "description": "A name for people, without control characters; leading and trailing white space is \
                    removed. Empty or null: no title.",
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
    let mut body = StrictBody::new(request.read_optional_json_object().await?);
    let title = body.text("title", parse_title).flatten();
    body.finish()?;
    let name = group_name(&request)?;
    let actor = actor(caller);
    let admin = administrator_call(state, app, &request.client, &actor);
    administration::put_group(admin, &name, title.as_ref()).await.map_err(group_problem)?;
    response::empty_object()
}

/// Parses a title. Returns `None` if the text is empty.
fn parse_title(text: &str) -> Result<Option<GroupTitle>, InvalidField> {
    match GroupTitle::parse(text) {
        Ok(title) => Ok(Some(title)),
        Err(InvalidGroupTitle::Empty) => Ok(None),
        Err(error @ InvalidGroupTitle::TooLong) => Err(InvalidField::new(FieldCode::TooLong, error.to_string())),
        Err(error @ InvalidGroupTitle::ControlCharacter) => {
            Err(InvalidField::new(FieldCode::Invalid, error.to_string()))
        }
    }
}
