//! The OpenAPI 3.1 document, generated from the code's own types.

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

/// The description of an operation.
struct Operation {
    summary: &'static str,
    description: &'static str,
    security: Security,
    request: Option<Content>,
    response: Content,
    /// The operation's own errors; [`common_errors`] has the others.
    errors: &'static [ErrorCode],
}

enum Security {
    None,
    Optional,
    Required,
    /// With the token of a ServiceAccount.
    ServiceAccount,
}

struct Content {
    schema: Schema,
    example: Value,
    required: bool,
    /// Whether it can also be a form.
    form: bool,
}

/// Generates the document for a service at `base_url`.
pub fn document(base_url: &IssuerUrl) -> Value {
    let settings =
        SchemaSettings::draft2020_12().with(|settings| settings.definitions_path = "/components/schemas".into());
    let mut schemas = settings.for_serialize().into_generator();
    let error = schemas.subschema_for::<ErrorBody<'static>>();
    let app = schemas.subschema_for::<AppId>();
    let provider = schemas.subschema_for::<ProviderName>();

    let mut paths = Map::new();
    for route in Route::ALL.iter().copied() {
        let operation = Operation::for_route(route, &mut schemas).render(route, &error);
        let method = match route.verb() {
            Verb::Get | Verb::GetOnly => "get",
            Verb::Post => "post",
            Verb::Patch => "patch",
            Verb::Delete => "delete",
            // OpenAPI has no "any method": the description says so.
            Verb::Any => "get",
        };
        let item = paths.entry(route.template()).or_insert_with(|| {
            let used = PATH_PARAMETERS.iter().filter(|name| route.template().contains(&format!("{{{name}}}")));
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
            "description": "Every response carries `X-Request-Id` and `X-Content-Type-Options: nosniff`. Times are \
                Unix seconds. Bodies are JSON in UTF-8, at most 64 KiB. Unknown fields are ignored. A duplicate key, \
                nesting deeper than 16 or more than 1,000 values are rejected.",
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
                    "description": "The appID of the App.",
                    "schema": app,
                    "example": "shop",
                },
                "PROVIDER": {
                    "name": "PROVIDER",
                    "in": "path",
                    "required": true,
                    "description": "The name of the provider in the App.",
                    "schema": provider,
                    "example": "github",
                },
                "SUFFIX": {
                    "name": "SUFFIX",
                    "in": "path",
                    "required": true,
                    "description": "Any text, including slashes.",
                    "schema": { "type": "string" },
                    "example": "basket/items",
                },
                "SESSION": {
                    "name": "SESSION",
                    "in": "path",
                    "required": true,
                    "description": "The id of a session of the user.",
                    "schema": { "type": "string", "format": "uuid" },
                    "example": "019a8452-9f10-7e44-8a3d-5b6c7d8e9f00",
                },
            },
            "headers": response_headers(),
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "JWT",
                    "description": "The `token` of *login*, or an `access_token`.",
                },
                "serviceAccount": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "JWT",
                    "description": "The token of a Kubernetes ServiceAccount with the audience `latchkey`.",
                },
            },
        },
    })
}

fn response_headers() -> Value {
    let header = |description: &str, schema: Value| json!({ "description": description, "schema": schema });
    let text = || json!({ "type": "string" });
    json!({
        "X-Request-Id": header(
            "Identifies the request in the service's log. An incoming value that matches the pattern is kept.",
            json!({ "type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$" }),
        ),
        "Retry-After": header("Seconds to wait before trying again.", json!({ "type": "integer", "minimum": 1 })),
        "RateLimit-Policy": header("The limit that is reached: its name, quota `q` and window `w` in seconds.", text()),
        "RateLimit": header("The remaining quota `r`, and the seconds `t` until more is available.", text()),
        "WWW-Authenticate": header("How to authenticate (RFC 6750).", text()),
        "Allow": header("The methods that the path supports.", text()),
        "X-Auth-User-Id": header("The `local_id` of the user.", text()),
        "X-Auth-Email": header("The email address if it is verified, otherwise empty.", text()),
        "X-Auth-Email-Verified": header(
            "Whether the email address is verified.",
            json!({ "type": "string", "enum": ["true", "false"] }),
        ),
        "X-Auth-Name": header("The user's name in UTF-8, percent-encoded.", text()),
        "X-Auth-Session-Id": header("The id of the session.", text()),
        "Cache-Control": header("Whether the response can be cached.", text()),
        "Location": header("The redirect target.", text()),
        "Referrer-Policy": header("Always `no-referrer`.", text()),
        "Set-Cookie": header("Sets or clears the cookie of the login flow.", text()),
        "ETag": header("Identifies this version of the document, for `If-None-Match`.", text()),
    })
}

/// The placeholders of paths.
const PATH_PARAMETERS: [&str; 4] = ["APPID", "PROVIDER", "SESSION", "SUFFIX"];

/// Errors that any operation with this verb can return.
fn common_errors(route: Route) -> &'static [ErrorCode] {
    use ErrorCode::{
        AppNotFound, InvalidRequest, MethodNotAllowed, PayloadTooLarge, RateLimited, ServerError,
        TemporarilyUnavailable, UnsupportedMediaType,
    };
    match (route.verb(), route) {
        // A limit drops the email, not the response.
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
    fn for_route(route: Route, schemas: &mut SchemaGenerator) -> Self {
        let token = "eyJhbGciOiJFUzI1NiIsImtpZCI6InMxIiwidHlwIjoiYXQrand0In0.…";
        let refresh_token = "lkr_AAAAAQGahF…";
        let local_id = "019a8452-7c3e-7d5a-9b51-0c2f6a1d4e88";
        let session_id = "019a8452-9f10-7e44-8a3d-5b6c7d8e9f00";
        match route {
            Route::Login => Self {
                summary: "Log in with email address and password",
                description: "A user with an unverified email address can log in, unless the App requires a verified \
                    one.",
                security: Security::None,
                request: Some(Content::json::<login::LoginRequest>(
                    schemas,
                    json!({ "email": "ada@example.com", "password": "correct horse battery" }),
                )),
                response: Content::json::<login::LoginResponse>(
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
                summary: "Register with name, email address and password",
                description: "Creates the user and sends the confirmation email. With enumeration protection, the \
                    response is the same for an address that already has an account.",
                security: Security::None,
                request: Some(Content::json::<register::RegisterRequest>(
                    schemas,
                    json!({ "name": "Ada Lovelace", "email": "ada@example.com", "password": "correct horse battery" }),
                )),
                response: Content::json::<register::RegisterResponse>(
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
                description: "Sends it to the user of the token, unless the email address is already verified.",
                security: Security::Required,
                request: Some(Content::empty_object()),
                response: Content::json::<verify::VerifyResponse>(schemas, json!({ "email": "ada@example.com" })),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::Confirm => Self {
                summary: "Confirm the email address with the code from the email",
                description: "Ends every other session and code. With a token of the same account, its session \
                    continues; otherwise a new session is opened.",
                security: Security::Optional,
                request: Some(Content::json::<confirm::ConfirmRequest>(schemas, json!({ "code": "7H2KM-Q4VXD" }))),
                response: Content::json::<confirm::ConfirmResponse>(
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
                summary: "Request a password reset by email",
                description: "The response is the same whether or not the address has an account.",
                security: Security::None,
                request: Some(Content::json::<forgot_password::ForgotPasswordRequest>(
                    schemas,
                    json!({ "email": "ada@example.com" }),
                )),
                response: Content::json::<forgot_password::ForgotPasswordResponse>(
                    schemas,
                    json!({ "email": "ada@example.com" }),
                ),
                errors: &[],
            },
            Route::ConfirmPassword => Self {
                summary: "Set a new password with the code from the email",
                description: "Ends all sessions and other codes of the user, and marks the email address as verified.",
                security: Security::None,
                request: Some(Content::json::<confirm_password::ConfirmPasswordRequest>(
                    schemas,
                    json!({ "email": "ada@example.com", "code": "7H2KM-Q4VXD", "password": "a better horse battery" }),
                )),
                response: Content::json::<confirm_password::ConfirmPasswordResponse>(
                    schemas,
                    json!({ "email": "ada@example.com" }),
                ),
                errors: &[ErrorCode::InvalidCode, ErrorCode::WeakPassword],
            },
            Route::Token => Self {
                summary: "Refresh the tokens of a session, or exchange the code of a social login",
                description: "Within the App's grace period, the same refresh token gets the same response again, so \
                    tabs can race and a client can repeat a request if the response was lost. A refresh token that is \
                    older than the previous one ends its session, because two parties hold it.",
                security: Security::None,
                request: Some(Content::json_or_form::<token::TokenRequest>(
                    schemas,
                    json!({ "grant_type": "refresh_token", "refresh_token": refresh_token }),
                )),
                response: Content::json::<token::TokenResponse>(
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
                description: "Accepts a refresh token or an access token. An invalid token gets the same response.",
                security: Security::None,
                request: Some(Content::json_or_form::<revoke::RevokeRequest>(
                    schemas,
                    json!({ "token": refresh_token }),
                )),
                response: Content::empty_object(),
                errors: &[],
            },
            Route::User => Self {
                summary: "The user's account",
                description: "The current state. The email address is included whether or not it is verified.",
                security: Security::Required,
                request: None,
                response: Content::json::<user::UserResponse>(schemas, account_example(local_id)),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::RenameUser => Self {
                summary: "Rename the user",
                description: "Tokens contain the new name from the next refresh on.",
                security: Security::Required,
                request: Some(Content::json::<user::RenameRequest>(schemas, json!({ "name": "Ada Lovelace" }))),
                response: Content::json::<user::UserResponse>(schemas, account_example(local_id)),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::DeleteUser => Self {
                summary: "Delete the account",
                description: "Requires the password or a login in the last five minutes. Ends all sessions. Services \
                    that check only the signature accept access tokens until they expire.",
                security: Security::Required,
                request: Some(Content {
                    required: false,
                    ..Content::json::<user::DeleteUserRequest>(schemas, json!({ "password": "correct horse battery" }))
                }),
                response: Content::empty_object(),
                errors: &[
                    ErrorCode::InvalidToken,
                    ErrorCode::InvalidCredentials,
                    ErrorCode::ReauthenticationRequired,
                    ErrorCode::EmailNotVerified,
                ],
            },
            Route::ChangePassword => Self {
                summary: "Set a new password",
                description: "Requires the current password or a login in the last five minutes. Ends all other \
                    sessions, all codes and a pending change of the email address.",
                security: Security::Required,
                request: Some(Content::json::<user::password::ChangePasswordRequest>(
                    schemas,
                    json!({ "password": "a better horse battery", "current_password": "correct horse battery" }),
                )),
                response: Content::empty_object(),
                errors: &[
                    ErrorCode::WeakPassword,
                    ErrorCode::InvalidToken,
                    ErrorCode::InvalidCredentials,
                    ErrorCode::ReauthenticationRequired,
                    ErrorCode::EmailNotVerified,
                ],
            },
            Route::ChangeAddress => Self {
                summary: "Request a change of the email address",
                description: "Requires the password or, if there is none, a login in the last five minutes. The code \
                    goes to the new address and is valid at *confirm* only with a token of this account. With \
                    enumeration protection, the response is the same for an address of another account.",
                security: Security::Required,
                request: Some(Content::json::<user::email::ChangeAddressRequest>(
                    schemas,
                    json!({ "email": "ada@example.org", "password": "correct horse battery" }),
                )),
                response: Content::json::<register::RegisterResponse>(
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
                description: "The email address is included only if it is verified.",
                security: Security::Required,
                request: None,
                response: Content::json::<user::userinfo::UserInfoResponse>(
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
                description: "Services that check only the signature accept its access tokens until they expire.",
                security: Security::Required,
                request: Some(Content::empty_object()),
                response: Content::empty_object(),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::Sessions => Self {
                summary: "The live sessions of the user",
                description: "The most recently used first. A use is recorded at most once per minute.",
                security: Security::Required,
                request: None,
                response: Content::json::<sessions::SessionsResponse>(
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
                description: "The session of the token continues.",
                security: Security::Required,
                request: None,
                response: Content::empty_object(),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::EndSession => Self {
                summary: "End a session of the user",
                description: "It can be the session of the token itself.",
                security: Security::Required,
                request: None,
                response: Content::empty_object(),
                errors: &[ErrorCode::InvalidToken, ErrorCode::NotFound],
            },
            Route::Identities => Self {
                summary: "The provider accounts with which the user can log in",
                description: "The oldest first.",
                security: Security::Required,
                request: None,
                response: Content::json::<identities::IdentitiesResponse>(
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
                summary: "Link a provider account, with a token of the provider",
                description: "Requires a login in the last five minutes and, if the account has an email address, that \
                    it is verified.",
                security: Security::Required,
                request: Some(Content::json::<social::login::ProviderTokenRequest>(
                    schemas,
                    json!({ "token": "gho_16C7e42F292c…" }),
                )),
                response: Content::empty_object(),
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
                summary: "Unlink a provider account from the user",
                description: "The last way to log in to the account cannot be removed.",
                security: Security::Required,
                request: None,
                response: Content::empty_object(),
                errors: &[ErrorCode::InvalidToken, ErrorCode::NotFound, ErrorCode::LastIdentity],
            },
            Route::SocialRedirect => Self {
                summary: "Send the user to the provider's login page",
                description: "Without `format=json`, the response is a redirect. A cookie binds the flow to the \
                    browser; with `format=json`, only if the call comes from a page of the same site \
                    (`Sec-Fetch-Site`).",
                security: Security::None,
                request: None,
                response: Content::json::<social::redirect::RedirectResponse>(
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
                summary: "The address to which the provider returns the user",
                description: "Not for the application itself: register this address at the provider. The response is a \
                    redirect to the `redirect_url` of the flow, with a session, a `code` or an `error`. It is JSON \
                    only if the App has no redirect addresses, or if the address of the flow is unknown or no longer \
                    allowed.",
                security: Security::None,
                request: None,
                response: Content::json::<social::callback::CallbackResponse>(
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
                description: "For apps that log in with the provider's own SDK. Only tokens that were issued for one \
                    of the Provider's client IDs are accepted. If the provider offers no way to check this, the call \
                    is refused.",
                security: Security::None,
                request: Some(Content::json::<social::login::ProviderTokenRequest>(
                    schemas,
                    json!({ "token": "gho_16C7e42F292c…" }),
                )),
                response: Content::json::<social::SessionResponse>(
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
                summary: "The current state of a token (RFC 7662)",
                description: "For the ServiceAccounts that the App lists as administrators, in any role. For anything \
                    but a token of this App with a live session, the response is only `{\"active\": false}`; this \
                    includes a refresh token that was replaced.",
                security: Security::ServiceAccount,
                request: Some(Content::json_or_form::<introspect::IntrospectRequest>(
                    schemas,
                    json!({ "token": token }),
                )),
                response: Content::json::<introspect::IntrospectResponse<'static>>(
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
                summary: "Forward auth for ingresses: whether the token belongs to a live session",
                description: "Accepts any method and ignores the body. Without CORS: OPTIONS needs a token too. A \
                    session that ends is refused within a second.",
                security: Security::Required,
                request: None,
                response: Content::no_body(),
                errors: &[ErrorCode::InvalidToken],
            },
            Route::Activity => Self {
                summary: "Recent events of the user's account",
                description: "The newest 100 events: logins, changes and refusals. Refusals are counted per quarter of \
                    an hour and shown when it is over.",
                security: Security::Required,
                request: None,
                response: Content::json::<activity::ActivityResponse>(
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
                summary: "The keys that sign the tokens of the App",
                description: "A JWK Set (RFC 7517), including keys that are published in advance and retired keys.",
                security: Security::None,
                request: None,
                response: Content {
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
                summary: "Metadata for services that check tokens of the App (OpenID Connect Discovery)",
                description: "Issuer, keys and endpoints. There is no authorization endpoint: this is not an OpenID \
                    provider.",
                security: Security::None,
                request: None,
                response: Content::json::<discovery::OpenIdConfiguration<'static>>(
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
                summary: "Metadata for services that check tokens of the App (RFC 8414)",
                description: "Issuer, keys and endpoints.",
                security: Security::None,
                request: None,
                response: Content::json::<discovery::AuthorizationServerMetadata<'static>>(
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
                security: Security::None,
                request: None,
                response: Content {
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
        let public = route.verb() == Verb::Get && matches!(self.security, Security::None);
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
            json!({ "description": "Success.", "headers": header_references(success), "content": self.response.render() }),
        );
        if public {
            let kept = json!({ "description": "The document is unchanged: it has the ETag in `If-None-Match`.", "headers": header_references(success) });
            responses.insert("304".to_owned(), kept);
        }
        if let Some(description) = redirect_description(route) {
            let headers =
                header_references(&["X-Request-Id", "Cache-Control", "Location", "Referrer-Policy", "Set-Cookie"]);
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
            responses.insert(status.to_string(), error_response(status, &codes, error));
        }
        responses.insert("431".to_owned(), json!({ "description": "The headers exceed 32 KiB. There is no body." }));
        let mut operation = json!({
            "operationId": route.name(),
            "summary": self.summary,
            "description": self.description,
            "security": match self.security {
                Security::None => json!([]),
                Security::Optional => json!([{}, { "bearer": [] }]),
                Security::Required => json!([{ "bearer": [] }]),
                Security::ServiceAccount => json!([{ "serviceAccount": [] }]),
            },
            "responses": responses,
        });
        let parameters = query_parameters(route);
        if route == Route::SocialCallbackForm {
            let fields: Map<_, _> = CALLBACK_PARAMETERS
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

fn account_example(local_id: &str) -> Value {
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

/// The parameters of *redirect*.
const REDIRECT_PARAMETERS: [(&str, &str); 7] = [
    ("format", "`json` returns the provider's address as JSON; `redirect`, the default, redirects to it."),
    (
        "redirect_url",
        "The address to which the user returns at the end. It must be on the App's list, byte for byte, except for the \
         port of an `http` loopback address. Default: the first of the list.",
    ),
    ("state", "Returned unchanged with the parameters of *callback*; at most 512 characters."),
    ("prompt", "Passed to the provider if it supports it."),
    ("login_hint", "Passed to the provider if it supports it."),
    ("code_challenge", "With S256 (RFC 7636): the flow ends with a `code` for *token*."),
    ("code_challenge_method", "`S256`, the default."),
];
/// The parameters of *callback*, which the provider sends.
const CALLBACK_PARAMETERS: [(&str, &str); 5] = [
    ("state", "The `state` of the flow."),
    ("code", "The provider's code."),
    ("iss", "The provider's issuer (RFC 9207)."),
    ("error", "Why the provider returns no code (RFC 6749, 4.1.2.1)."),
    ("error_description", "Ignored."),
];

/// The query parameters of an operation.
fn query_parameters(route: Route) -> Vec<Value> {
    let parameters: &[(&str, &str)] = match route {
        Route::SocialRedirect => &REDIRECT_PARAMETERS,
        Route::SocialCallback => &CALLBACK_PARAMETERS,
        _ => &[],
    };
    let parameter = |(name, description): &(&str, &str)| json!({ "name": name, "in": "query", "description": description, "schema": { "type": "string" } });
    parameters.iter().map(parameter).collect()
}

/// The target of an operation's redirect, if it has one.
fn redirect_description(route: Route) -> Option<&'static str> {
    match route {
        Route::SocialRedirect => Some("To the provider's login page."),
        Route::SocialCallback | Route::SocialCallbackForm => Some(
            "To the `redirect_url` of the flow. Its parameters are the fields of the JSON response, or `error` and \
             `error_description`, and the `state` that was given to *redirect*.",
        ),
        _ => None,
    }
}

/// The response for all error codes of one status.
fn error_response(status: u16, codes: &[ErrorCode], error: &Schema) -> Value {
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
        .map(|code| (code.as_str().to_owned(), json!({ "summary": code.meaning(), "value": error_example(*code) })))
        .collect();
    json!({
        "description": names.join(", "),
        "headers": header_references(headers),
        "content": { "application/json": { "schema": error, "examples": examples } },
    })
}

fn error_example(code: ErrorCode) -> Value {
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

fn header_references(headers: &[&str]) -> Map<String, Value> {
    headers.iter().map(|name| ((*name).to_owned(), json!({ "$ref": format!("#/components/headers/{name}") }))).collect()
}

// === impl Content ===

impl Content {
    fn json<T: JsonSchema>(schemas: &mut SchemaGenerator, example: Value) -> Self {
        Self { schema: schemas.subschema_for::<T>(), example, required: true, form: false }
    }

    /// A request that can also be a form.
    fn json_or_form<T: JsonSchema>(schemas: &mut SchemaGenerator, example: Value) -> Self {
        Self { form: true, ..Self::json::<T>(schemas, example) }
    }

    /// `{}`: a request or response without data.
    fn empty_object() -> Self {
        let schema = schemars::json_schema!({ "type": "object", "maxProperties": 0 });
        Self { schema, example: json!({}), required: false, form: false }
    }

    /// No body.
    fn no_body() -> Self {
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

    fn generated() -> Value {
        document(&"https://auth.example.com".parse().unwrap())
    }

    #[test]
    fn the_stored_document_matches_the_code() {
        let text = serde_json::to_string_pretty(&generated()).unwrap() + "\n";
        crate::http::docs::assert_up_to_date("openapi.json", &text);
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
    fn every_reference_resolves() {
        let document = generated();
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(found.len() > 50);
        for reference in found {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
    }

    #[test]
    fn the_error_enum_matches_the_code() {
        let document = generated();
        let listed = document.pointer("/components/schemas/ErrorCode").unwrap();
        for code in ErrorCode::ALL {
            assert!(listed.to_string().contains(&format!("\"{}\"", code.as_str())), "{}", code.as_str());
        }
    }

    /// The operation ids of a path.
    fn operation_ids(item: &Value) -> Vec<&str> {
        item.as_object().unwrap().values().filter_map(|operation| operation["operationId"].as_str()).collect()
    }

    #[test]
    fn every_route_is_described() {
        let document = generated();
        let mut operations: Vec<_> = document["paths"].as_object().unwrap().values().flat_map(operation_ids).collect();
        operations.sort();
        let mut names: Vec<_> = Route::ALL.iter().map(|route| route.name()).collect();
        names.sort();
        assert_eq!(operations, names);
    }
}
