//! What the operations share: path parameters, response headers and security schemes.

use latchkey_crds::types::{AppId, ProviderName, WebhookName};
use schemars::SchemaGenerator;
use serde_json::{Map, Value, json};

use crate::domain::groups::ManagedGroupName;

/// The placeholders of paths.
const PATH_PARAMETERS: [&str; 7] = ["APPID", "GROUP", "PROVIDER", "SESSION", "SUFFIX", "USER", "WEBHOOK"];

/// Returns a `$ref` for each parameter in a path.
pub(super) fn path_parameter_references(path: &str) -> Vec<Value> {
    let used = PATH_PARAMETERS.iter().filter(|name| path.contains(&format!("{{{name}}}")));
    used.map(|name| json!({ "$ref": format!("#/components/parameters/{name}") })).collect()
}

/// Returns the parameters that occur in these paths.
pub(super) fn path_parameters(schemas: &mut SchemaGenerator, paths: &Map<String, Value>) -> Value {
    let mut parameters = all_path_parameters(schemas);
    if let Some(parameters) = parameters.as_object_mut() {
        parameters.retain(|name, _| paths.keys().any(|path| path.contains(&format!("{{{name}}}"))));
    }
    parameters
}

fn all_path_parameters(schemas: &mut SchemaGenerator) -> Value {
    json!({
        "APPID": {
            "name": "APPID",
            "in": "path",
            "required": true,
            "description": "The appID of the App.",
            "schema": schemas.subschema_for::<AppId>(),
            "example": "shop",
        },
        "GROUP": {
            "name": "GROUP",
            "in": "path",
            "required": true,
            "description": "The name of a group. A text that is not the name of a group is 404. `:` and `@` can be \
                percent-encoded.",
            "schema": { "type": "string", "pattern": ManagedGroupName::PATTERN },
            "example": "argo:admins",
        },
        "PROVIDER": {
            "name": "PROVIDER",
            "in": "path",
            "required": true,
            "description": "The name of the provider in the App.",
            "schema": schemas.subschema_for::<ProviderName>(),
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
        "USER": {
            "name": "USER",
            "in": "path",
            "required": true,
            "description": "The id of a user. A text that is not a UUID is 404.",
            "schema": { "type": "string", "format": "uuid" },
            "example": super::examples::USER_ID,
        },
        "SESSION": {
            "name": "SESSION",
            "in": "path",
            "required": true,
            "description": "The id of a session of the user.",
            "schema": { "type": "string", "format": "uuid" },
            "example": super::examples::SESSION_ID,
        },
        "WEBHOOK": {
            "name": "WEBHOOK",
            "in": "path",
            "required": true,
            "description": "The name of a webhook of the App.",
            "schema": schemas.subschema_for::<WebhookName>(),
            "example": "sync",
        },
    })
}

/// Returns a `$ref` for each of these response headers.
pub(super) fn header_references(headers: &[&str]) -> Map<String, Value> {
    headers.iter().map(|name| ((*name).to_owned(), json!({ "$ref": format!("#/components/headers/{name}") }))).collect()
}

pub(super) fn response_headers() -> Value {
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

pub(super) fn security_schemes() -> Value {
    json!({
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
    })
}
