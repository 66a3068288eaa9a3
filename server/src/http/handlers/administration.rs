//! The endpoints of the administration listener (specification: Administration), and the code that they share.

use std::{borrow::Cow, sync::Arc};

use http::{
    HeaderMap, HeaderValue,
    header::{ETAG, IF_MATCH},
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::{Map, Value, json, value::RawValue};
use uuid::Uuid;

use crate::{
    domain::{
        administration::{
            Actor, AdminIdentity, AdminUser, AdministratorCall, ChangeUserError, Metadata, UserState, Version,
        },
        app::App,
        call::Call,
        client::ClientInfo,
        ports::UserConflict,
        user::UserId,
    },
    http::{
        authentication::Caller,
        error::{ErrorCode, FieldCode, FieldProblem, Problem},
        openapi::{examples, patterns},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub mod dead_letters;
pub mod events;
pub mod export;
pub mod groups;
pub mod identities;
pub mod imports;
pub mod mails;
pub mod sessions;
pub mod users;
pub mod webhooks;

/// A user, as administrators see it. Fields without a value are null.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AdminUser")]
pub struct AdminUserResponse {
    pub id: String,
    /// The same as `id`.
    pub local_id: String,
    pub email: Option<String>,
    pub email_verified: bool,
    /// An email address that is not confirmed yet.
    pub pending_email: Option<String>,
    pub name: String,
    /// The first that applies: `disabled`, `contested` (somebody else registered the unverified address, too),
    /// `unverified`, `active`.
    #[schemars(schema_with = "state_schema")]
    pub state: &'static str,
    pub has_password: bool,
    /// The kind of the password hash, for example `argon2id`.
    pub password_algorithm: Option<String>,
    /// The id of the user in another system; unique in the App.
    pub external_id: Option<String>,
    /// What the application attached to the user. It is never in tokens.
    #[schemars(with = "Option<Map<String, Value>>")]
    pub metadata: Option<Box<RawValue>>,
    /// `registration`, `provider`, `administrator` or `import`.
    pub created_by: &'static str,
    /// Unix seconds.
    pub created_at: i64,
    /// Unix seconds; left out in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_signed_in_at: Option<Option<i64>>,
    /// Rises with every change except a login, a new hash of the same password, and a change of identities. It is also
    /// sent as the `ETag`.
    pub version: i64,
    /// Left out in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identities: Option<Vec<AdminIdentityResponse>>,
}

/// An identity of a user at a provider.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AdminIdentity")]
pub struct AdminIdentityResponse {
    /// The name of the provider when the identity was linked.
    pub provider: String,
    /// Who issued the subject, for example the issuer of the ID token.
    pub authority: String,
    pub subject: String,
    /// The email address that the provider sent.
    pub email: Option<String>,
    /// Unix seconds.
    pub linked_at: i64,
}

/// Stands for a value in the metadata of a request. Only its schema is used.
struct MetadataValue;

fn state_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": UserState::ALL.map(UserState::as_str) })
}

// === impl AdminUserResponse ===

impl AdminUserResponse {
    /// Returns the user as in a list: without the fields that lists leave out.
    pub fn listed(user: AdminUser) -> Self {
        Self { last_signed_in_at: None, identities: None, ..Self::from(user) }
    }

    pub(super) fn example() -> Value {
        let mut example = Self::listed_example();
        example["last_signed_in_at"] = json!(1_762_340_200);
        example["identities"] = json!([{
            "provider": "github",
            "authority": "github:https://github.com",
            "subject": "583231",
            "email": "ada@example.com",
            "linked_at": 1_762_339_700,
        }]);
        example
    }

    pub(super) fn listed_example() -> Value {
        json!({
            "id": examples::USER_ID,
            "local_id": examples::USER_ID,
            "email": "ada@example.com",
            "email_verified": true,
            "pending_email": null,
            "name": "Ada Lovelace",
            "state": "active",
            "has_password": true,
            "password_algorithm": "argon2id",
            "external_id": "crm:1815",
            "metadata": { "plan": "pro" },
            "created_by": "registration",
            "created_at": 1_762_339_600,
            "version": 3,
        })
    }
}

impl From<AdminUser> for AdminUserResponse {
    fn from(user: AdminUser) -> Self {
        Self {
            id: user.id.to_string(),
            local_id: user.id.to_string(),
            state: user.state().as_str(),
            email: user.email.as_ref().map(|email| email.as_str().to_owned()),
            email_verified: user.email_verified,
            pending_email: user.pending_email.as_ref().map(|email| email.as_str().to_owned()),
            name: user.name,
            has_password: user.password_hash.is_some(),
            password_algorithm: user.password_hash.as_ref().map(|hash| hash.algorithm().to_owned()),
            external_id: user.external_id.as_ref().map(|id| id.as_str().to_owned()),
            metadata: user.metadata.as_ref().map(|metadata| metadata.as_json().to_owned()),
            created_by: user.created_by.as_str(),
            created_at: user.created_at.unix_timestamp(),
            last_signed_in_at: Some(user.last_signed_in_at.map(|at| at.unix_timestamp())),
            version: user.version.0,
            identities: Some(user.identities.into_iter().map(AdminIdentityResponse::from).collect()),
        }
    }
}

impl From<AdminIdentity> for AdminIdentityResponse {
    fn from(identity: AdminIdentity) -> Self {
        Self {
            provider: identity.provider,
            authority: identity.authority,
            subject: identity.subject,
            email: identity.email,
            linked_at: identity.linked_at.unix_timestamp(),
        }
    }
}

// === impl MetadataValue ===

impl JsonSchema for MetadataValue {
    fn schema_name() -> Cow<'static, str> {
        "MetadataValue".into()
    }

    fn json_schema(schemas: &mut SchemaGenerator) -> Schema {
        let (min, max) = (*Metadata::NUMBERS.start(), *Metadata::NUMBERS.end());
        let value = schemas.subschema_for::<Self>();
        json_schema!({
            "description": format!(
                "Any JSON. A number is 0, or has an absolute value from {min:e} to {max:e}. Strings and keys have no \
                 U+0000."
            ),
            "anyOf": [{ "const": 0 }, { "minimum": min }, { "maximum": -min }],
            "minimum": -max,
            "maximum": max,
            "pattern": patterns::NO_NUL,
            "items": value,
            "propertyNames": { "pattern": patterns::NO_NUL },
            "additionalProperties": value,
        })
    }
}

/// The administrator that makes the call.
fn actor(caller: &Caller) -> Actor {
    Actor { namespace: caller.account.namespace().to_owned(), name: caller.account.name().to_owned() }
}

/// Returns the context in which an administrator's use case runs.
fn administrator_call<'a, S>(
    state: &'a Arc<State<S>>,
    app: &'a App,
    client: &'a ClientInfo,
    actor: &'a Actor,
) -> AdministratorCall<'a, S> {
    let call: Call<'a, S> = state.call(app, client);
    AdministratorCall { call, actor }
}

/// Returns the id of the user in the path.
fn user_id(request: &InboundRequest) -> Result<UserId, Problem> {
    user_id_at(request, 0)
}

/// Returns the id of the user from the path placeholder with this index.
fn user_id_at(request: &InboundRequest, index: usize) -> Result<UserId, Problem> {
    parse_uuid(request.path_parameter(index)).map(UserId).ok_or_else(user_not_found)
}

/// Parses a UUID. Only its usual form is accepted, so that each id has one spelling.
fn parse_uuid(text: &str) -> Option<Uuid> {
    text.parse::<Uuid>().ok().filter(|uuid| uuid.to_string() == text)
}

/// The schema of metadata in a request.
fn metadata_schema(schemas: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "description": format!("At most {} bytes as compact JSON.", Metadata::MAX_BYTES),
        "propertyNames": { "pattern": patterns::NO_NUL },
        "additionalProperties": schemas.subschema_for::<MetadataValue>(),
    })
}

/// The schema of a body with 1 to `max` ids.
fn ids_schema(max: usize) -> Schema {
    json_schema!({
        "type": "object",
        "additionalProperties": false,
        "required": ["ids"],
        "properties": {
            "ids": {
                "type": "array",
                "minItems": 1,
                "maxItems": max,
                "items": { "type": "string", "format": "uuid" },
            },
        },
    })
}

fn user_not_found() -> Problem {
    Problem::new(ErrorCode::NotFound, "there is no such user")
}

/// Returns the version in `If-Match` (RFC 9110, 13.1.1), or `None` if the header is missing or is `*`.
///
/// # Errors
///
/// 412 if the header has several tags, a weak tag or a text that is not a version.
fn if_match(headers: &HeaderMap) -> Result<Option<Version>, Problem> {
    let mut fields = headers.get_all(IF_MATCH).iter();
    let text = match (fields.next(), fields.next()) {
        (None, _) => return Ok(None),
        (Some(only), None) => only.to_str().unwrap_or_default().trim(),
        (Some(_), Some(_)) => "",
    };
    if text == "*" {
        return Ok(None);
    }
    let text = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or_default();
    // A version has one spelling: no sign, no leading zero.
    let version = text.parse::<i64>().ok().filter(|version| version.to_string() == text);
    version.map(|version| Some(Version(version))).ok_or_else(version_conflict)
}

fn version_conflict() -> Problem {
    let why = "the user has changed; read it again and repeat the call with its new ETag";
    Problem::new(ErrorCode::VersionConflict, why)
}

/// Returns the response with a user. Its `ETag` is the version of the user.
fn user_response(user: AdminUser) -> Result<Response, Problem> {
    let tag = HeaderValue::try_from(format!("\"{}\"", user.version.0)).expect("a number in quotes is ASCII");
    let mut response = response::json(&AdminUserResponse::from(user))?;
    response.headers_mut().insert(ETAG, tag);
    Ok(response)
}

fn change_problem(error: ChangeUserError) -> Problem {
    match error {
        ChangeUserError::NotFound => user_not_found(),
        ChangeUserError::VersionConflict => version_conflict(),
        ChangeUserError::NoAddress => Problem::invalid_fields(vec![FieldProblem {
            field: "email_verified".into(),
            code: FieldCode::Invalid,
            message: "is true, but the user has no email address".into(),
        }]),
        ChangeUserError::Conflict(conflict) => conflict_problem(conflict),
        ChangeUserError::Common(error) => error.into(),
    }
}

/// Returns the error for a conflict. If the conflict is with another user, the error contains the id of that user.
fn conflict_problem(conflict: UserConflict) -> Problem {
    let (code, why, user) = match conflict {
        UserConflict::ExternalIdTaken(user) => {
            (ErrorCode::ExternalIdTaken, "another user has this external_id; user_id names the user", user)
        }
        UserConflict::EmailTaken(user) => {
            (ErrorCode::EmailTaken, "another user has this email address; user_id names the user", user)
        }
        UserConflict::IdentityTaken(user) => {
            (ErrorCode::IdentityTaken, "another user has this identity; user_id names the user", user)
        }
        UserConflict::TooManyHashKinds => {
            return Problem::invalid_fields(vec![FieldProblem {
                field: "password_hash".into(),
                code: FieldCode::TooManyHashKinds,
                message: "is of a new kind, and the App already has hashes of too many other kinds or costs".into(),
            }]);
        }
    };
    Problem { user_id: Some(Box::new(user)), ..Problem::new(code, why) }
}
