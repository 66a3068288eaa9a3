//! `POST /v1/{APPID}/users/{USER}/mails`.

use std::sync::Arc;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{
        administration::{self, RequestMailError},
        app::App,
        mail::MailKind,
        rights::Right,
    },
    http::{
        Ports,
        administration::{Query, StrictBody},
        authentication::Caller,
        error::{ErrorCode, FieldCode, Problem},
        handlers::administration::{actor, administrator_call, user_id, user_not_found},
        openapi::operation::{Content, Operation},
        request::{InboundRequest, InvalidField},
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::ManageUsers;

/// Whether the call queued a mail.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "MailResponse")]
pub struct MailResponse {
    /// False if the user is disabled, has no address for the mail, has nothing to confirm, or (for an invitation)
    /// already has a password. Also false if a mail of this kind is already queued.
    pub queued: bool,
}

pub fn operation() -> Operation {
    Operation::new(
        "Send a mail to a user",
        "`confirm` has a code that confirms the email address, `reset` and `invitation` one that sets a password. The \
         limit `mailsPerRecipient` of the App applies; mails that users request are counted separately.",
    )
    .requires_right(RIGHT)
    .request(Content::json_with_schema(schema, json!({ "mail": "reset" })))
    .response(Content::json::<MailResponse>(json!({ "queued": true })))
    .errors(&[ErrorCode::NotFound])
}

fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "additionalProperties": false,
        "required": ["mail"],
        "properties": { "mail": { "type": "string", "enum": ["confirm", "reset", "invitation"] } },
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
    let mail = body.text("mail", |text| match text {
        "confirm" => Ok(MailKind::Confirm),
        "reset" => Ok(MailKind::Reset),
        "invitation" => Ok(MailKind::Invitation),
        _ => Err(InvalidField::new(FieldCode::Invalid, "is not confirm, reset or invitation")),
    });
    body.require("mail", mail.is_some());
    body.finish()?;
    let Some(mail) = mail else { return Err(Problem::server_error()) };
    let actor = actor(caller);
    let admin = administrator_call(state, app, &request.client, &actor);
    match administration::request_mail(admin, user_id(&request)?, mail).await {
        Ok(queued) => response::json(&MailResponse { queued }),
        Err(RequestMailError::NotFound) => Err(user_not_found()),
        Err(RequestMailError::Common(error)) => Err(error.into()),
    }
}
