//! `POST /v1/{APPID}/users`.

use std::sync::Arc;

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use crate::{
    domain::{
        administration::{self, CreateUserError, CreateUserInput, ExternalId},
        app::App,
        mail::MailKind,
        password::Password,
        rights::Right,
        user::Name,
    },
    http::{
        Ports,
        administration::{NewUserFields, Query, StrictBody},
        authentication::Caller,
        error::{ErrorCode, FieldCode, Problem},
        handlers::administration::{
            AdminUserResponse, actor, administrator_call, conflict_problem, metadata_schema, user_response,
        },
        openapi::{
            operation::{Content, Operation},
            patterns,
        },
        request::{InboundRequest, InvalidField},
        response::Response,
    },
    state::State,
};

pub const RIGHT: Right = Right::ManageUsers;

pub fn operation() -> Operation {
    Operation::new(
        "Create a user",
        "Does not depend on `signUp`. The password policy and the allowed domains of the App apply. Without a password, \
         the user sets one with the code of an invitation, or with *forgot-password*. A repeated call is 409 and sends \
         no mail.",
    )
    .requires_right(RIGHT)
    .request(Content::json_with_schema(
        schema,
        json!({
            "email": "grace@example.com",
            "name": "Grace Hopper",
            "external_id": "crm:1906",
            "mail": "invitation",
        }),
    ))
    .response(Content::json::<AdminUserResponse>(AdminUserResponse::example()))
    .response_headers(&["ETag"])
    .errors(&[
        ErrorCode::WeakPassword,
        ErrorCode::ExternalIdTaken,
        ErrorCode::EmailTaken,
        ErrorCode::IdentityTaken,
    ])
}

/// The schema of the fields of a new user.
pub(in crate::http::handlers::administration) fn new_user_properties(schemas: &mut SchemaGenerator) -> Value {
    json!({
        "external_id": {
            "type": "string",
            "minLength": 1,
            "maxLength": ExternalId::MAX_BYTES,
            "pattern": patterns::NO_CONTROL_CHARACTERS,
            "description": "The id of the user in another system, without control characters; unique in the App.",
        },
        "email": {
            "type": "string",
            "format": "email",
            "minLength": 3,
            "maxLength": 254,
            "description": "Required, unless the App allows users without an email address and there is an identity.",
        },
        "email_verified": { "type": "boolean", "default": false },
        "name": {
            "type": "string",
            "maxLength": Name::MAX_CHARS,
            "pattern": patterns::NAME,
            "default": "",
            "description": "Without control characters; leading and trailing white space is removed.",
        },
        "disabled": { "type": "boolean", "default": false },
        "password_hash": {
            "type": "string",
            "description": "A password hash of this or another service, in PHC or MCF form (Argon2, bcrypt, PBKDF2, \
                scrypt, Firebase scrypt). The first login replaces a foreign hash.",
        },
        "metadata": metadata_schema(schemas),
        "identities": {
            "type": "array",
            "maxItems": 10,
            "items": {
                "type": "object",
                "additionalProperties": false,
                "required": ["provider", "subject"],
                "properties": {
                    "provider": { "type": "string", "description": "The name of a provider of the App." },
                    "subject": { "type": "string", "minLength": 1, "maxLength": 512 },
                    "authority": {
                        "type": "string",
                        "description": "Only for `microsoft` without a fixed tenant, and required there: the issuer of \
                            the user's tenant.",
                    },
                },
            },
        },
    })
}

fn schema(schemas: &mut SchemaGenerator) -> Schema {
    let mut properties = new_user_properties(schemas);
    properties["password"] = json!({
        "type": "string",
        "format": "password",
        "minLength": 1,
        "description": "A password in clear text; needs an email address.",
    });
    properties["mail"] = json!({
        "type": "string",
        "enum": ["none", "confirm", "invitation"],
        "default": "none",
        "description": "The mail that the user gets. `confirm` has a code that confirms the email address. `invitation` has a \
            code with which the user sets a password, and needs a user without one.",
    });
    json_schema!({ "type": "object", "additionalProperties": false, "properties": properties })
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    caller: &Caller,
    mut request: InboundRequest,
) -> Result<Response, Problem> {
    Query::parse(&request.uri, &[])?;
    let mut body = StrictBody::new(request.read_json_object().await?);
    let NewUserFields { external_id, email, email_verified, name, disabled, password_hash, metadata, identities } =
        body.new_user(&state.stores, app);
    let password: Option<Password> = body.non_empty("password");
    let mail = body.text("mail", parse_mail).flatten();
    if password_hash.is_some() && email.is_none() {
        body.reject("password_hash", "needs an email address");
    }
    if password.is_some() && password_hash.is_some() {
        body.reject("password", "cannot be sent together with password_hash");
    }
    if password.is_some() && email.is_none() {
        body.reject("password", "needs an email address");
    }
    if mail == Some(MailKind::Confirm) && (email.is_none() || email_verified) {
        body.reject("mail", "needs an email address that is not verified");
    }
    if mail == Some(MailKind::Invitation) && email.is_none() {
        body.reject("mail", "needs an email address");
    }
    if mail == Some(MailKind::Invitation) && (password.is_some() || password_hash.is_some()) {
        body.reject("mail", "cannot be an invitation together with a password");
    }
    if mail.is_some() && disabled {
        body.reject("mail", "is not sent to a disabled user");
    }
    body.finish()?;
    let input = CreateUserInput {
        external_id,
        email,
        email_verified,
        name,
        disabled,
        metadata,
        identities,
        password,
        password_hash,
        mail,
    };
    let actor = actor(caller);
    let admin = administrator_call(state, app, &request.client, &actor);
    user_response(administration::create_user(admin, input).await.map_err(create_problem)?)
}

fn parse_mail(text: &str) -> Result<Option<MailKind>, InvalidField> {
    match text {
        "none" => Ok(None),
        "confirm" => Ok(Some(MailKind::Confirm)),
        "invitation" => Ok(Some(MailKind::Invitation)),
        _ => Err(InvalidField::new(FieldCode::Invalid, "is not none, confirm or invitation")),
    }
}

fn create_problem(error: CreateUserError) -> Problem {
    match error {
        CreateUserError::Weak(weak) => Problem::weak_password(weak),
        CreateUserError::Conflict(conflict) => conflict_problem(conflict),
        CreateUserError::Common(error) => error.into(),
    }
}
