//! The OpenAPI 3.1 document, made from the code's own types.

use std::collections::BTreeMap;

use http::StatusCode;
use latchkey_crds::types::{AppId, IssuerUrl, ProviderName};
use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use super::{
    error::{ErrorBody, ErrorCode, FieldCode, FieldProblem},
    handlers::{
        activity, discovery,
        email::{confirm, confirm_password, forgot_password, login, register, verify},
        identities, introspect, revoke, sessions, social, token, user,
    },
    routes::{Route, Verb},
};

/// What an operation says of itself.
struct Operation {
    summary: &'static str,
    description: &'static str,
    bearer: NeedsBearer,
    request: Option<Content>,
    answer: Content,
    /// Those of its own; see [`common_errors`] for the others.
    errors: &'static [ErrorCode],
}

enum NeedsBearer {
    No,
    Optional,
    Yes,
    /// That of a ServiceAccount.
    InCluster,
}

struct Content {
    schema: Schema,
    example: Value,
    required: bool,
    /// It may be a form as well.
    form: bool,
}

/// The document for a service that is reached at `base_url`.
pub fn document(base_url: &IssuerUrl) -> Value {
    let settings =
        SchemaSettings::draft2020_12().with(|settings| settings.definitions_path = "/components/schemas".into());
    let mut schemas = settings.for_serialize().into_generator();
    let error = schemas.subschema_for::<ErrorBody<'static>>();
    let app = schemas.subschema_for::<AppId>();
    let provider = schemas.subschema_for::<ProviderName>();

    let mut paths = Map::new();
    for route in Route::ALL.iter().copied() {
        let operation = Operation::of(route, &mut schemas).render(route, &error);
        let method = match route.verb() {
            Verb::Get | Verb::GetOnly => "get",
            Verb::Post => "post",
            Verb::Patch => "patch",
            Verb::Delete => "delete",
            // OpenAPI has no "any": the description says it.
            Verb::Any => "get",
        };
        let item = paths.entry(route.template()).or_insert_with(|| {
            let used = PARAMETERS.iter().filter(|name| route.template().contains(&format!("{{{name}}}")));
            let used: Vec<_> = used.map(|name| json!({ "$ref": format!("#/components/parameters/{name}") })).collect();
            if used.is_empty() { json!({}) } else { json!({ "parameters": used }) }
        });
        item[method] = operation;
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Latchkey",
            "summary": "Email and social login for the applications of a cluster",
            "description": "Every answer carries `X-Request-Id` and `X-Content-Type-Options: nosniff`. Times are Unix \
                seconds. Bodies are JSON in UTF-8, at most 64 KiB; unknown fields are ignored; a duplicate key, \
                nesting deeper than 16 or more than 1,000 values are refused.",
            "version": "1",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "servers": [{ "url": base_url.as_str() }],
        "paths": paths,
        "components": {
            "schemas": schemas.take_definitions(true),
            "parameters": {
                "APPID": {
                    "name": "APPID",
                    "in": "path",
                    "required": true,
                    "description": "Which App it is for.",
                    "schema": app,
                    "example": "shop",
                },
                "PROVIDER": {
                    "name": "PROVIDER",
                    "in": "path",
                    "required": true,
                    "description": "Which of the App's social providers it is for.",
                    "schema": provider,
                    "example": "github",
                },
                "SUFFIX": {
                    "name": "SUFFIX",
                    "in": "path",
                    "required": true,
                    "description": "Anything, slashes too.",
                    "schema": { "type": "string" },
                    "example": "basket/items",
                },
                "SESSION": {
                    "name": "SESSION",
                    "in": "path",
                    "required": true,
                    "description": "A session of the user.",
                    "schema": { "type": "string", "format": "uuid" },
                    "example": "019a8452-9f10-7e44-8a3d-5b6c7d8e9f00",
                },
            },
            "headers": headers(),
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "JWT",
                    "description": "The `token` of *login* or the `access_token` of *confirm*.",
                },
                "serviceAccount": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "JWT",
                    "description": "The token of a Kubernetes ServiceAccount, for the audience `latchkey`.",
                },
            },
        },
    })
}

fn headers() -> Value {
    let header = |description: &str, schema: Value| json!({ "description": description, "schema": schema });
    let text = || json!({ "type": "string" });
    json!({
        "X-Request-Id": header(
            "Names the request in the service's log. An incoming one that matches the pattern is kept.",
            json!({ "type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$" }),
        ),
        "Retry-After": header("Seconds after which to come again.", json!({ "type": "integer", "minimum": 1 })),
        "RateLimit-Policy": header("The limit that is reached: its name, quota `q` and window `w` in seconds.", text()),
        "RateLimit": header("What is left of the limit `r`, and the seconds until there is more `t`.", text()),
        "WWW-Authenticate": header("How to authenticate (RFC 6750).", text()),
        "Allow": header("The methods that the path takes.", text()),
        "X-Auth-User-Id": header("`local_id` of the user.", text()),
        "X-Auth-Email": header("The address where it is verified, else empty.", text()),
        "X-Auth-Email-Verified": header("Whether it is.", json!({ "type": "string", "enum": ["true", "false"] })),
        "X-Auth-Name": header("The name in UTF-8, percent-encoded.", text()),
        "X-Auth-Session-Id": header("The session.", text()),
        "Cache-Control": header("Whether the answer may be kept.", text()),
        "Location": header("Where the browser is sent.", text()),
        "Referrer-Policy": header("`no-referrer`.", text()),
        "Set-Cookie": header("What the browser keeps of its flow, or that it is over.", text()),
        "ETag": header("Names this version of the document, for `If-None-Match`.", text()),
    })
}

/// The placeholders of paths.
const PARAMETERS: [&str; 4] = ["APPID", "PROVIDER", "SESSION", "SUFFIX"];

/// What any operation may answer.
fn common_errors(route: Route) -> &'static [ErrorCode] {
    use ErrorCode::{
        AppNotFound, InvalidRequest, MethodNotAllowed, PayloadTooLarge, RateLimited, ServerError,
        TemporarilyUnavailable, UnsupportedMediaType,
    };
    match (route.verb(), route) {
        // A limit drops its mail, not its answer.
        (Verb::Post, Route::ForgotPassword) => &[
            InvalidRequest,
            AppNotFound,
            MethodNotAllowed,
            PayloadTooLarge,
            UnsupportedMediaType,
            ServerError,
            TemporarilyUnavailable,
        ],
        (Verb::Patch, _) => &[
            InvalidRequest,
            AppNotFound,
            MethodNotAllowed,
            PayloadTooLarge,
            UnsupportedMediaType,
            ServerError,
            TemporarilyUnavailable,
        ],
        (Verb::Post, _) | (Verb::Delete, Route::DeleteUser) => &[
            InvalidRequest,
            AppNotFound,
            MethodNotAllowed,
            PayloadTooLarge,
            UnsupportedMediaType,
            RateLimited,
            ServerError,
            TemporarilyUnavailable,
        ],
        (Verb::Get, Route::OpenApi) => &[MethodNotAllowed, ServerError],
        (Verb::Any, _) => &[AppNotFound, ServerError, TemporarilyUnavailable],
        (Verb::Get, Route::Sessions | Route::User | Route::UserInfo | Route::Activity | Route::Identities)
        | (Verb::Delete, _) => &[AppNotFound, MethodNotAllowed, ServerError, TemporarilyUnavailable],
        (Verb::GetOnly, _) => {
            &[InvalidRequest, AppNotFound, MethodNotAllowed, RateLimited, ServerError, TemporarilyUnavailable]
        }
        (Verb::Get, _) => &[AppNotFound, MethodNotAllowed, ServerError],
    }
}

// === impl Operation ===

impl Operation {
    fn of(route: Route, schemas: &mut SchemaGenerator) -> Self {
        let token = "eyJhbGciOiJFUzI1NiIsImtpZCI6InMxIiwidHlwIjoiYXQrand0In0.…";
        let refresh_token = "lkr_AAAAAQGahF…";
        let local_id = "019a8452-7c3e-7d5a-9b51-0c2f6a1d4e88";
        let session_id = "019a8452-9f10-7e44-8a3d-5b6c7d8e9f00";
        match route {
            Route::Login => Self {
                summary: "Log in with address and password",
                description: "An unverified user may log in, unless the App demands a verified address.",
                bearer: NeedsBearer::No,
                request: Some(Content::of::<login::Request>(
                    schemas,
                    json!({ "email": "ada@example.com", "password": "correct horse battery" }),
                )),
                answer: Content::of::<login::Answer>(
                    schemas,
                    json!({
                        "token": token,
                        "user": { "id": local_id, "email": "ada@example.com", "name": "Ada Lovelace" },
                        "refresh_token": refresh_token,
                        "session_id": session_id,
                        "expires_in": 874,
                        "expires_at": 1_762_340_474,
                    }),
                ),
                errors: &[ErrorCode::InvalidCredentials, ErrorCode::EmailNotVerified, ErrorCode::UserDisabled],
            },
            Route::Register => Self {
                summary: "Register with name, address and password",
                description: "Makes the user and sends the confirmation mail. The answer is the same for an address \
                    that has an account already.",
                bearer: NeedsBearer::No,
                request: Some(Content::of::<register::Request>(
                    schemas,
                    json!({ "name": "Ada Lovelace", "email": "ada@example.com", "password": "correct horse battery" }),
                )),
                answer: Content::of::<register::Answer>(
                    schemas,
                    json!({
                        "email": "ada@example.com",
                        "name": "Ada Lovelace",
                        "local_id": local_id,
                        "expires_in": 86_400,
                        "expires_at": 1_762_426_000,
                    }),
                ),
                errors: &[ErrorCode::WeakPassword, ErrorCode::RegistrationDisabled, ErrorCode::EmailTaken],
            },
            Route::Verify => Self {
                summary: "Send the confirmation code again",
                description: "For the user of the token. Where the address is verified already nothing is sent.",
                bearer: NeedsBearer::Yes,
                request: Some(Content::nothing()),
                answer: Content::of::<verify::Answer>(schemas, json!({ "email": "ada@example.com" })),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::Confirm => Self {
                summary: "Confirm the address by the code from the mail",
                description: "Ends every other session and code. With the token of the same account its session goes \
                    on, else a new one is opened.",
                bearer: NeedsBearer::Optional,
                request: Some(Content::of::<confirm::Request>(schemas, json!({ "code": "7H2KM-Q4VXD" }))),
                answer: Content::of::<confirm::Answer>(
                    schemas,
                    json!({
                        "access_token": token,
                        "refresh_token": refresh_token,
                        "expires_in": 874,
                        "expires_at": 1_762_340_474,
                        "name": "Ada Lovelace",
                        "local_id": local_id,
                        "email": "ada@example.com",
                        "session_id": session_id,
                    }),
                ),
                errors: &[ErrorCode::InvalidCode],
            },
            Route::ForgotPassword => Self {
                summary: "Ask for a password reset by mail",
                description: "The answer is the same whether the address has an account or not.",
                bearer: NeedsBearer::No,
                request: Some(Content::of::<forgot_password::Request>(schemas, json!({ "email": "ada@example.com" }))),
                answer: Content::of::<forgot_password::Answer>(schemas, json!({ "email": "ada@example.com" })),
                errors: &[],
            },
            Route::ConfirmPassword => Self {
                summary: "Set a new password by the code from the mail",
                description: "Ends all sessions and other codes of the user, and marks the address as verified.",
                bearer: NeedsBearer::No,
                request: Some(Content::of::<confirm_password::Request>(
                    schemas,
                    json!({ "email": "ada@example.com", "code": "7H2KM-Q4VXD", "password": "a better horse battery" }),
                )),
                answer: Content::of::<confirm_password::Answer>(schemas, json!({ "email": "ada@example.com" })),
                errors: &[ErrorCode::InvalidCode, ErrorCode::WeakPassword],
            },
            Route::Token => Self {
                summary: "Refresh: a new access token and a new refresh token; or exchange a social login's code",
                description: "The same refresh token again gives the same answer for the App's grace time, so tabs may \
                    race and a lost answer may be asked for again. A token that is older than the last ends its \
                    session: two hold it.",
                bearer: NeedsBearer::No,
                request: Some(Content::or_form::<token::Request>(
                    schemas,
                    json!({ "grant_type": "refresh_token", "refresh_token": refresh_token }),
                )),
                answer: Content::of::<token::Answer>(
                    schemas,
                    json!({
                        "access_token": token,
                        "refresh_token": refresh_token,
                        "token_type": "Bearer",
                        "expires_in": 874,
                        "expires_at": 1_762_340_474,
                        "session_id": session_id,
                        "local_id": local_id,
                    }),
                ),
                errors: &[ErrorCode::UnsupportedGrantType, ErrorCode::InvalidGrant],
            },
            Route::Revoke => Self {
                summary: "End the session that a token belongs to (RFC 7009)",
                description: "Of a refresh token or an access token. A token that is none is answered alike.",
                bearer: NeedsBearer::No,
                request: Some(Content::or_form::<revoke::Request>(schemas, json!({ "token": refresh_token }))),
                answer: Content::nothing(),
                errors: &[],
            },
            Route::User => Self {
                summary: "The user's account",
                description: "As it is now; the address is there whether it is verified or not.",
                bearer: NeedsBearer::Yes,
                request: None,
                answer: Content::of::<user::Answer>(schemas, account(local_id)),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::RenameUser => Self {
                summary: "Rename the user",
                description: "Tokens carry the new name from the next refresh.",
                bearer: NeedsBearer::Yes,
                request: Some(Content::of::<user::Renaming>(schemas, json!({ "name": "Ada Lovelace" }))),
                answer: Content::of::<user::Answer>(schemas, account(local_id)),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::DeleteUser => Self {
                summary: "Delete the account",
                description: "By the password, or after a login in the last five minutes. Ends all sessions; access \
                    tokens stay valid until they end for those who check the signature alone.",
                bearer: NeedsBearer::Yes,
                request: Some(Content {
                    required: false,
                    ..Content::of::<user::Deletion>(schemas, json!({ "password": "correct horse battery" }))
                }),
                answer: Content::nothing(),
                errors: &[
                    ErrorCode::InvalidToken,
                    ErrorCode::InvalidCredentials,
                    ErrorCode::ReauthenticationRequired,
                    ErrorCode::EmailNotVerified,
                ],
            },
            Route::ChangePassword => Self {
                summary: "Set a new password",
                description: "By the old one, or after a login in the last five minutes. Ends all other sessions, all \
                    codes and a change of the address that waits.",
                bearer: NeedsBearer::Yes,
                request: Some(Content::of::<user::password::Request>(
                    schemas,
                    json!({ "password": "a better horse battery", "current_password": "correct horse battery" }),
                )),
                answer: Content::nothing(),
                errors: &[
                    ErrorCode::WeakPassword,
                    ErrorCode::InvalidToken,
                    ErrorCode::InvalidCredentials,
                    ErrorCode::ReauthenticationRequired,
                    ErrorCode::EmailNotVerified,
                ],
            },
            Route::ChangeAddress => Self {
                summary: "Ask for another address",
                description: "By the password; where there is none, after a login in the last five minutes. The code \
                    goes to the new address and counts at *confirm* with the token of this account alone. The answer is \
                    the same for an address that another account has.",
                bearer: NeedsBearer::Yes,
                request: Some(Content::of::<user::email::Request>(
                    schemas,
                    json!({ "email": "ada@example.org", "password": "correct horse battery" }),
                )),
                answer: Content::of::<register::Answer>(
                    schemas,
                    json!({
                        "email": "ada@example.org",
                        "name": "Ada Lovelace",
                        "local_id": local_id,
                        "expires_in": 86_400,
                        "expires_at": 1_762_426_000,
                    }),
                ),
                errors: &[
                    ErrorCode::InvalidToken,
                    ErrorCode::InvalidCredentials,
                    ErrorCode::ReauthenticationRequired,
                    ErrorCode::EmailNotVerified,
                    ErrorCode::EmailTaken,
                ],
            },
            Route::UserInfo => Self {
                summary: "The user's claims (OpenID Connect Core 1.0, 5.3)",
                description: "The address only when it is verified.",
                bearer: NeedsBearer::Yes,
                request: None,
                answer: Content::of::<user::userinfo::Answer>(
                    schemas,
                    json!({
                        "sub": local_id,
                        "name": "Ada Lovelace",
                        "email": "ada@example.com",
                        "email_verified": true,
                        "updated_at": 1_762_339_600,
                    }),
                ),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::Logout => Self {
                summary: "End the session of the token",
                description: "Its access tokens stay valid until they end for those who check the signature alone.",
                bearer: NeedsBearer::Yes,
                request: Some(Content::nothing()),
                answer: Content::nothing(),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::Sessions => Self {
                summary: "The user's live sessions",
                description: "The one used last first; a use is noted at most once a minute.",
                bearer: NeedsBearer::Yes,
                request: None,
                answer: Content::of::<sessions::Answer>(
                    schemas,
                    json!({ "sessions": [{
                        "id": session_id,
                        "created_at": 1_762_339_600,
                        "last_used_at": 1_762_340_200,
                        "ip": "203.0.113.7",
                        "user_agent": "Mozilla/5.0",
                        "amr": ["pwd"],
                        "current": true,
                    }] }),
                ),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::EndOtherSessions => Self {
                summary: "End all other sessions of the user",
                description: "The session of the token goes on.",
                bearer: NeedsBearer::Yes,
                request: None,
                answer: Content::nothing(),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::EndSession => Self {
                summary: "End a session of the user",
                description: "Also that of the token itself.",
                bearer: NeedsBearer::Yes,
                request: None,
                answer: Content::nothing(),
                errors: &[ErrorCode::InvalidToken, ErrorCode::NotFound],
            },
            Route::Identities => Self {
                summary: "The providers' accounts by which the user may sign in",
                description: "The oldest first.",
                bearer: NeedsBearer::Yes,
                request: None,
                answer: Content::of::<identities::Answer>(
                    schemas,
                    json!({ "identities": [{
                        "provider": "github",
                        "subject": "583231",
                        "email": "ada@example.com",
                        "linked_at": 1_762_339_600,
                    }] }),
                ),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::LinkIdentity => Self {
                summary: "Link a provider's account, by a token of the provider",
                description: "Needs a login in the last five minutes, and a verified address where the account has one.",
                bearer: NeedsBearer::Yes,
                request: Some(Content::of::<social::login::Request>(schemas, json!({ "token": "gho_16C7e42F292c…" }))),
                answer: Content::nothing(),
                errors: &[
                    ErrorCode::InvalidToken,
                    ErrorCode::ReauthenticationRequired,
                    ErrorCode::InvalidProviderToken,
                    ErrorCode::EmailNotVerified,
                    ErrorCode::AccessDenied,
                    ErrorCode::ProviderNotFound,
                    ErrorCode::ProviderError,
                ],
            },
            Route::UnlinkIdentity => Self {
                summary: "Take a provider's account from the user",
                description: "Never the last way into the account.",
                bearer: NeedsBearer::Yes,
                request: None,
                answer: Content::nothing(),
                errors: &[ErrorCode::InvalidToken, ErrorCode::NotFound, ErrorCode::LastIdentity],
            },
            Route::SocialRedirect => Self {
                summary: "Send the user to the provider's login page",
                description: "Without `format=json` the answer is a redirect. The flow is bound to the browser by a \
                    cookie; one begun with `format=json` only from a page of the same site (`Sec-Fetch-Site`).",
                bearer: NeedsBearer::No,
                request: None,
                answer: Content::of::<social::redirect::Answer>(
                    schemas,
                    json!({ "url": "https://github.com/login/oauth/authorize?client_id=…&redirect_uri=…&scope=…" }),
                ),
                errors: &[
                    ErrorCode::RedirectUrlNotAllowed,
                    ErrorCode::OriginNotAllowed,
                    ErrorCode::ProviderNotFound,
                    ErrorCode::ProviderError,
                ],
            },
            Route::SocialCallback | Route::SocialCallbackForm => Self {
                summary: "Where the provider sends the user back to",
                description: "Not for the application itself: it is the address to register at the provider. The \
                    answer is a redirect to the `redirect_url` of the flow, with a session, a `code` or an `error`; \
                    JSON only where the App has no redirect addresses, or where there is none to go to.",
                bearer: NeedsBearer::No,
                request: None,
                answer: Content::of::<social::callback::Answer>(
                    schemas,
                    json!({
                        "access_token": token,
                        "refresh_token": refresh_token,
                        "session_id": session_id,
                        "local_id": local_id,
                        "email_verified": true,
                        "expires_at": 1_762_340_474,
                        "expires_in": 874,
                    }),
                ),
                errors: &[
                    ErrorCode::InvalidState,
                    ErrorCode::RedirectUrlNotAllowed,
                    ErrorCode::EmailNotVerified,
                    ErrorCode::RegistrationDisabled,
                    ErrorCode::UserDisabled,
                    ErrorCode::AccessDenied,
                    ErrorCode::ProviderNotFound,
                    ErrorCode::AccountLinkRequired,
                    ErrorCode::ProviderError,
                ],
            },
            Route::SocialLogin => Self {
                summary: "Log in with a token of the provider",
                description: "For apps that log in by the provider's own SDK. Only tokens that were issued for one of \
                    the Provider's client ids are accepted; a provider that offers no way to check this is refused.",
                bearer: NeedsBearer::No,
                request: Some(Content::of::<social::login::Request>(schemas, json!({ "token": "gho_16C7e42F292c…" }))),
                answer: Content::of::<social::Session>(
                    schemas,
                    json!({
                        "access_token": token,
                        "refresh_token": refresh_token,
                        "session_id": session_id,
                        "local_id": local_id,
                        "email_verified": true,
                        "expires_at": 1_762_340_474,
                        "expires_in": 874,
                    }),
                ),
                errors: &[
                    ErrorCode::InvalidProviderToken,
                    ErrorCode::EmailNotVerified,
                    ErrorCode::RegistrationDisabled,
                    ErrorCode::UserDisabled,
                    ErrorCode::AccessDenied,
                    ErrorCode::ProviderNotFound,
                    ErrorCode::AccountLinkRequired,
                    ErrorCode::ProviderError,
                ],
            },
            Route::Introspect => Self {
                summary: "What a token is worth now (RFC 7662)",
                description: "For the ServiceAccounts that the App lists as administrators, whatever their role. What is \
                    not a token of this App with a live session, a refresh token that was replaced too, is \
                    `{\"active\": false}` and no more.",
                bearer: NeedsBearer::InCluster,
                request: Some(Content::or_form::<introspect::Request>(schemas, json!({ "token": token }))),
                answer: Content::of::<introspect::Answer<'static>>(
                    schemas,
                    json!({
                        "active": true,
                        "token_type": "Bearer",
                        "iss": "https://auth.example.com/shop",
                        "client_id": "shop",
                        "sub": local_id,
                        "sid": session_id,
                        "email": "ada@example.com",
                        "email_verified": true,
                        "name": "Ada Lovelace",
                        "auth_time": 1_762_339_600,
                        "amr": ["pwd"],
                        "aud": "shop",
                        "iat": 1_762_339_600,
                        "exp": 1_762_340_474,
                        "jti": "019a8452-a0b1-7c2d-8e3f-405162738495",
                    }),
                ),
                errors: &[ErrorCode::InvalidClient],
            },
            Route::Authorize | Route::AuthorizeBelow => Self {
                summary: "The gate for ingresses: whether the token is that of a live session",
                description: "By any method, whatever the body. Without CORS: OPTIONS needs a token too. A session that \
                    ends is refused within a second.",
                bearer: NeedsBearer::Yes,
                request: None,
                answer: Content::none(),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::Activity => Self {
                summary: "What happened to the user's account lately",
                description: "The newest 100 events: log-ins, changes, and refusals, which are counted by quarters of an \
                    hour and shown when theirs is over.",
                bearer: NeedsBearer::Yes,
                request: None,
                answer: Content::of::<activity::Answer>(
                    schemas,
                    json!({ "events": [
                        {
                            "at": 1_762_339_600, "kind": "logged_in", "ip": "203.0.113.7", "session_id": session_id,
                            "count": 1,
                        },
                        {
                            "at": 1_762_338_600, "kind": "login_refused", "ip": "198.51.100.23", "session_id": null,
                            "count": 4,
                        },
                    ] }),
                ),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::Jwks => Self {
                summary: "The keys that tokens of the App are signed with",
                description: "A JWK Set (RFC 7517), with keys published ahead and keys retired.",
                bearer: NeedsBearer::No,
                request: None,
                answer: Content {
                    schema: schemars::json_schema!({
                        "type": "object",
                        "properties": { "keys": { "type": "array", "items": { "type": "object" } } },
                        "required": ["keys"],
                    }),
                    example: json!({ "keys": [{
                        "kty": "EC", "crv": "P-256", "use": "sig", "alg": "ES256", "kid": "s1",
                        "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
                        "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0",
                    }] }),
                    required: true,
                    form: false,
                },
                errors: &[],
            },
            Route::OpenIdConfiguration => Self {
                summary: "What checks tokens of the App finds here (OpenID Connect Discovery)",
                description: "Issuer, keys and endpoints. No authorization endpoint: this is no OpenID provider.",
                bearer: NeedsBearer::No,
                request: None,
                answer: Content::of::<discovery::OpenIdMetadata<'static>>(
                    schemas,
                    json!({
                        "issuer": "https://auth.example.com/shop",
                        "jwks_uri": "https://auth.example.com/shop/.well-known/jwks.json",
                        "token_endpoint": "https://auth.example.com/v1/shop/token",
                        "revocation_endpoint": "https://auth.example.com/v1/shop/revoke",
                        "introspection_endpoint": "https://auth.example.com/v1/shop/introspect",
                        "response_types_supported": ["none"],
                        "grant_types_supported": ["authorization_code", "refresh_token"],
                        "code_challenge_methods_supported": ["S256"],
                        "token_endpoint_auth_methods_supported": ["none"],
                        "revocation_endpoint_auth_methods_supported": ["none"],
                        "introspection_endpoint_auth_methods_supported": ["Bearer"],
                        "userinfo_endpoint": "https://auth.example.com/v1/shop/userinfo",
                        "subject_types_supported": ["public"],
                        "id_token_signing_alg_values_supported": ["ES256"],
                        "claims_supported": ["sub", "name", "email", "email_verified", "updated_at"],
                    }),
                ),
                errors: &[],
            },
            Route::AuthorizationServer | Route::AuthorizationServerOfApp => Self {
                summary: "What checks tokens of the App finds here (RFC 8414)",
                description: "Issuer, keys and endpoints.",
                bearer: NeedsBearer::No,
                request: None,
                answer: Content::of::<discovery::Metadata<'static>>(
                    schemas,
                    json!({
                        "issuer": "https://auth.example.com/shop",
                        "jwks_uri": "https://auth.example.com/shop/.well-known/jwks.json",
                        "token_endpoint": "https://auth.example.com/v1/shop/token",
                        "revocation_endpoint": "https://auth.example.com/v1/shop/revoke",
                        "introspection_endpoint": "https://auth.example.com/v1/shop/introspect",
                        "response_types_supported": ["none"],
                        "grant_types_supported": ["authorization_code", "refresh_token"],
                        "code_challenge_methods_supported": ["S256"],
                        "token_endpoint_auth_methods_supported": ["none"],
                        "revocation_endpoint_auth_methods_supported": ["none"],
                        "introspection_endpoint_auth_methods_supported": ["Bearer"],
                    }),
                ),
                errors: &[],
            },
            Route::OpenApi => Self {
                summary: "This document",
                description: "OpenAPI 3.1.",
                bearer: NeedsBearer::No,
                request: None,
                answer: Content {
                    schema: schemars::json_schema!({ "type": "object" }),
                    example: json!({ "openapi": "3.1.0" }),
                    required: true,
                    form: false,
                },
                errors: &[],
            },
        }
    }

    fn render(self, route: Route, error: &Schema) -> Value {
        let public = route.verb() == Verb::Get && matches!(self.bearer, NeedsBearer::No);
        let success = if public {
            &["X-Request-Id", "Cache-Control", "ETag"][..]
        } else if route.verb() == Verb::Any {
            &[
                "X-Request-Id",
                "Cache-Control",
                "X-Auth-User-Id",
                "X-Auth-Email",
                "X-Auth-Email-Verified",
                "X-Auth-Name",
                "X-Auth-Session-Id",
            ][..]
        } else {
            &["X-Request-Id", "Cache-Control"][..]
        };
        let mut responses = Map::new();
        responses.insert(
            "200".to_owned(),
            json!({ "description": "Done.", "headers": named(success), "content": self.answer.render() }),
        );
        if public {
            let kept = json!({ "description": "The document is the one that `If-None-Match` names.", "headers": named(success) });
            responses.insert("304".to_owned(), kept);
        }
        if let Some(description) = redirects(route) {
            let headers = named(&["X-Request-Id", "Cache-Control", "Location", "Referrer-Policy", "Set-Cookie"]);
            responses.insert("302".to_owned(), json!({ "description": description, "headers": headers }));
        }
        let mut by_status: BTreeMap<u16, Vec<ErrorCode>> = BTreeMap::new();
        for code in self.errors.iter().chain(common_errors(route)) {
            by_status.entry(code.status().as_u16()).or_default().push(*code);
        }
        if self.request.is_some() {
            by_status.insert(StatusCode::REQUEST_TIMEOUT.as_u16(), vec![ErrorCode::InvalidRequest]);
        }
        for (status, codes) in by_status {
            responses.insert(status.to_string(), refusal(status, &codes, error));
        }
        responses.insert("431".to_owned(), json!({ "description": "The headers are over 32 KiB. Without a body." }));
        let mut operation = json!({
            "operationId": route.name(),
            "summary": self.summary,
            "description": self.description,
            "security": match self.bearer {
                NeedsBearer::No => json!([]),
                NeedsBearer::Optional => json!([{}, { "bearer": [] }]),
                NeedsBearer::Yes => json!([{ "bearer": [] }]),
                NeedsBearer::InCluster => json!([{ "serviceAccount": [] }]),
            },
            "responses": responses,
        });
        let parameters = query(route);
        if route == Route::SocialCallbackForm {
            let fields: Map<_, _> = CALLBACK
                .iter()
                .map(|(name, about)| ((*name).to_owned(), json!({ "type": "string", "description": about })))
                .collect();
            let form = json!({ "schema": { "type": "object", "properties": fields } });
            operation["requestBody"] =
                json!({ "required": true, "content": { "application/x-www-form-urlencoded": form } });
        } else if !parameters.is_empty() {
            operation["parameters"] = parameters.into();
        }
        if let Some(request) = self.request {
            operation["requestBody"] = json!({ "required": request.required, "content": request.render() });
        }
        operation
    }
}

fn account(local_id: &str) -> Value {
    json!({
        "id": local_id,
        "local_id": local_id,
        "email": "ada@example.com",
        "email_verified": true,
        "name": "Ada Lovelace",
        "created_at": 1_762_339_600,
        "has_password": true,
    })
}

/// What *redirect* takes.
const REDIRECT: [(&str, &str); 7] = [
    ("format", "`json` answers the provider's address as JSON; `redirect`, the default, leads there."),
    (
        "redirect_url",
        "Where the user goes in the end: an address on the App's list, byte for byte (the port of an `http` loopback \
         address aside). Default: the first of the list.",
    ),
    ("state", "Comes back unchanged beside the parameters of *callback*; at most 512 characters."),
    ("prompt", "Passed on where the provider knows it."),
    ("login_hint", "Passed on where the provider knows it."),
    ("code_challenge", "By S256 (RFC 7636): the flow ends with a `code` for *token*."),
    ("code_challenge_method", "`S256`, the default."),
];
/// What *callback* takes, from the provider.
const CALLBACK: [(&str, &str); 5] = [
    ("state", "That of the flow."),
    ("code", "The provider's code."),
    ("iss", "The provider's issuer (RFC 9207)."),
    ("error", "Why the provider gives no code (RFC 6749, 4.1.2.1)."),
    ("error_description", "Not passed on."),
];

/// The parameters of an operation's query.
fn query(route: Route) -> Vec<Value> {
    let parameters: &[(&str, &str)] = match route {
        Route::SocialRedirect => &REDIRECT,
        Route::SocialCallback => &CALLBACK,
        _ => &[],
    };
    let parameter = |(name, description): &(&str, &str)| json!({ "name": name, "in": "query", "description": description, "schema": { "type": "string" } });
    parameters.iter().map(parameter).collect()
}

/// Where an operation redirects to, where it does.
fn redirects(route: Route) -> Option<&'static str> {
    match route {
        Route::SocialRedirect => Some("To the provider's login page."),
        Route::SocialCallback | Route::SocialCallbackForm => Some(
            "To the flow's `redirect_url`, with the fields of the JSON answer as parameters, or with `error` and \
             `error_description`, and the `state` that was given to *redirect*.",
        ),
        _ => None,
    }
}

/// The answer for all codes of one status.
fn refusal(status: u16, codes: &[ErrorCode], error: &Schema) -> Value {
    let headers = match status {
        401 => &["X-Request-Id", "Cache-Control", "WWW-Authenticate"][..],
        405 => &["X-Request-Id", "Cache-Control", "Allow"][..],
        429 => &["X-Request-Id", "Cache-Control", "Retry-After", "RateLimit", "RateLimit-Policy"][..],
        503 => &["X-Request-Id", "Cache-Control", "Retry-After"][..],
        _ => &["X-Request-Id", "Cache-Control"][..],
    };
    let names: Vec<_> = codes.iter().map(|code| format!("`{}`", code.as_str())).collect();
    let examples: Map<_, _> = codes
        .iter()
        .map(|code| (code.as_str().to_owned(), json!({ "summary": code.meaning(), "value": example(*code) })))
        .collect();
    json!({
        "description": names.join(", "),
        "headers": named(headers),
        "content": { "application/json": { "schema": error, "examples": examples } },
    })
}

fn example(code: ErrorCode) -> Value {
    let field = |description: &str, field: &'static str, code: FieldCode, message: &'static str| {
        (description.to_owned(), vec![FieldProblem { field, code, message: message.into() }])
    };
    let (description, fields) = if code == ErrorCode::InvalidRequest {
        field("email is not an email address", "email", FieldCode::Invalid, "is not an email address")
    } else if code == ErrorCode::WeakPassword {
        let message = "is too easy to guess; use a longer or less common one";
        field(&format!("password {message}"), "password", FieldCode::Guessable, message)
    } else {
        ("…".to_owned(), Vec::new())
    };
    let body = ErrorBody {
        error: code,
        error_description: &description,
        fields: &fields,
        request_id: "019a8452-a0b1-7c2d-8e3f-405162738495",
    };
    json!(body)
}

fn named(headers: &[&str]) -> Map<String, Value> {
    headers.iter().map(|name| ((*name).to_owned(), json!({ "$ref": format!("#/components/headers/{name}") }))).collect()
}

// === impl Content ===

impl Content {
    fn of<T: JsonSchema>(schemas: &mut SchemaGenerator, example: Value) -> Self {
        Self { schema: schemas.subschema_for::<T>(), example, required: true, form: false }
    }

    /// Of a request that may be a form as well.
    fn or_form<T: JsonSchema>(schemas: &mut SchemaGenerator, example: Value) -> Self {
        Self { form: true, ..Self::of::<T>(schemas, example) }
    }

    /// `{}`: a call without data, or an answer with nothing to say.
    fn nothing() -> Self {
        let schema = schemars::json_schema!({ "type": "object", "maxProperties": 0 });
        Self { schema, example: json!({}), required: false, form: false }
    }

    /// No body.
    fn none() -> Self {
        Self { schema: Schema::default(), example: Value::Null, required: false, form: false }
    }

    fn render(&self) -> Value {
        if self.example.is_null() {
            return json!({});
        }
        let media = json!({ "schema": self.schema, "example": self.example });
        if self.form {
            json!({ "application/json": media, "application/x-www-form-urlencoded": media })
        } else {
            json!({ "application/json": media })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made() -> Value {
        document(&"https://auth.example.com".parse().unwrap())
    }

    #[test]
    fn the_document_that_is_kept_is_the_one_the_code_makes() {
        let text = serde_json::to_string_pretty(&made()).unwrap() + "\n";
        crate::http::docs::assert_kept("openapi.json", &text);
    }

    /// Every `$ref` of a document.
    fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(object) => {
                if let Some(Value::String(reference)) = object.get("$ref") {
                    found.push(reference);
                }
                object.values().for_each(|inner| references(inner, found));
            }
            Value::Array(items) => items.iter().for_each(|inner| references(inner, found)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    #[test]
    fn every_reference_leads_somewhere() {
        let document = made();
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(found.len() > 50);
        for reference in found {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
    }

    #[test]
    fn the_enum_of_errors_is_that_of_the_code() {
        let document = made();
        let listed = document.pointer("/components/schemas/ErrorCode").unwrap();
        for code in ErrorCode::ALL {
            assert!(listed.to_string().contains(&format!("\"{}\"", code.as_str())), "{}", code.as_str());
        }
    }

    /// The ids of a path's operations.
    fn methods(item: &Value) -> Vec<&str> {
        item.as_object().unwrap().values().filter_map(|operation| operation["operationId"].as_str()).collect()
    }

    #[test]
    fn every_route_is_described() {
        let document = made();
        let mut operations: Vec<_> = document["paths"].as_object().unwrap().values().flat_map(methods).collect();
        operations.sort();
        let mut names: Vec<_> = Route::ALL.iter().map(|route| route.name()).collect();
        names.sort();
        assert_eq!(operations, names);
    }
}
