//! The description of an operation. The file of each handler declares the operation of its endpoint.

use std::collections::BTreeMap;

use http::StatusCode;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use super::{components::header_references, errors::error_response};
use crate::{
    domain::rights::Right,
    http::{
        error::ErrorCode,
        response::NDJSON,
        routes::{RouteTable, Verb},
    },
};

/// The description of an operation in the OpenAPI document, without the parts that follow from its route.
pub struct Operation {
    summary: &'static str,
    description: &'static str,
    security: Security,
    query: Vec<Parameter>,
    request: Option<Content>,
    /// `None` if the response has no body.
    response: Option<Content>,
    /// The status of a successful response.
    success: StatusCode,
    /// The headers that a successful response has in addition to those of every response.
    response_headers: &'static [&'static str],
    /// Whether clients can cache the response and validate it by its ETag.
    is_public_document: bool,
    /// The description of the target, if the response can be a redirect.
    redirect: Option<&'static str>,
    errors: &'static [ErrorCode],
    /// The right that a ServiceAccount needs. Set only on the administration listener.
    right: Option<Right>,
    accepts_if_match: bool,
}

/// A parameter of the query.
pub struct Parameter {
    pub name: &'static str,
    pub description: &'static str,
    pub schema: Schema,
    pub is_required: bool,
    example: Option<Value>,
}

/// The body of a request or a response.
pub struct Content {
    schema: fn(&mut SchemaGenerator) -> Schema,
    /// The schema of the form, if its fields differ from those of the JSON body.
    form_schema: Option<fn(&mut SchemaGenerator) -> Schema>,
    example: Option<Value>,
    is_required: bool,
    media_types: &'static [&'static str],
}

/// Which token the request needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Security {
    None,
    OptionalAccessToken,
    AccessToken,
    /// The token of a Kubernetes ServiceAccount.
    ServiceAccount,
}

const JSON: &str = "application/json";
const FORM: &str = "application/x-www-form-urlencoded";

// === impl Operation ===

impl Operation {
    /// Describes an operation that has no authentication, no query, no bodies and no specific errors.
    pub fn new(summary: &'static str, description: &'static str) -> Self {
        Self {
            summary,
            description,
            security: Security::None,
            query: Vec::new(),
            request: None,
            response: None,
            success: StatusCode::OK,
            response_headers: &[],
            is_public_document: false,
            redirect: None,
            errors: &[],
            right: None,
            accepts_if_match: false,
        }
    }

    /// The request can have an access token.
    pub fn takes_optional_access_token(self) -> Self {
        Self { security: Security::OptionalAccessToken, ..self }
    }

    /// The request must have an access token; without it, the error is `invalid_token`.
    pub fn requires_access_token(self) -> Self {
        Self { security: Security::AccessToken, ..self }
    }

    /// The request must have the token of a ServiceAccount; without it, the error is `invalid_client`. If the
    /// ServiceAccount has no role for the operation, the error is `access_denied`.
    pub fn requires_service_account(self) -> Self {
        Self { security: Security::ServiceAccount, ..self }
    }

    /// The request must have the token of a ServiceAccount with this right.
    pub fn requires_right(self, right: Right) -> Self {
        Self { right: Some(right), ..self.requires_service_account() }
    }

    /// The request can have `If-Match` with the version of the user.
    pub fn accepts_if_match(self) -> Self {
        Self { accepts_if_match: true, ..self }
    }

    /// The parameters of the query.
    pub fn query(self, query: impl Into<Vec<Parameter>>) -> Self {
        Self { query: query.into(), ..self }
    }

    pub fn request(self, request: Content) -> Self {
        Self { request: Some(request), ..self }
    }

    pub fn response(self, response: Content) -> Self {
        Self { response: Some(response), ..self }
    }

    /// The response has the status 201.
    pub fn created(self) -> Self {
        Self { success: StatusCode::CREATED, ..self }
    }

    /// A response that clients can cache. The handler uses no store, so the operation has no error
    /// `temporarily_unavailable`.
    pub fn public_document(self, response: Content) -> Self {
        Self { is_public_document: true, ..self.response(response) }
    }

    /// Adds headers that not every response has. `components.rs` describes these headers.
    pub fn response_headers(self, response_headers: &'static [&'static str]) -> Self {
        Self { response_headers, ..self }
    }

    /// The response can be a redirect to this target.
    pub fn redirect(self, target: &'static str) -> Self {
        Self { redirect: Some(target), ..self }
    }

    /// The operation's own errors. [`Operation::render`] adds the errors that follow from authentication, request,
    /// response and route.
    pub fn errors(self, errors: &'static [ErrorCode]) -> Self {
        Self { errors, ..self }
    }

    /// The operation as JSON. `error` is the schema of error bodies.
    pub fn render(&self, route: impl RouteTable, schemas: &mut SchemaGenerator, error: &Schema) -> Value {
        let request_body = self.request.as_ref().map(|request| request.render_request(schemas));
        let mut operation = json!({
            "operationId": route.name(),
            "summary": self.summary,
            "description": self.right.map_or_else(
                || self.description.to_owned(),
                |right| format!("{} Needs {}.", self.description, requirement(right)),
            ),
            "security": match self.security {
                Security::None => json!([]),
                Security::OptionalAccessToken => json!([{}, { "bearer": [] }]),
                Security::AccessToken => json!([{ "bearer": [] }]),
                Security::ServiceAccount => json!([{ "serviceAccount": [] }]),
            },
            "responses": self.render_responses(route, schemas, error),
        });
        let mut parameters: Vec<_> = self.query.iter().map(Parameter::render).collect();
        if self.accepts_if_match {
            parameters.push(json!({
                "name": "If-Match",
                "in": "header",
                "description": "The `ETag` of the user: the call is 412 if the user has changed. Weak tags never match.",
                "schema": { "type": "string" },
                "example": "\"3\"",
            }));
        }
        if !parameters.is_empty() {
            operation["parameters"] = parameters.into();
        }
        if let Some(request_body) = request_body {
            operation["requestBody"] = request_body;
        }
        operation
    }

    fn render_responses(
        &self,
        route: impl RouteTable,
        schemas: &mut SchemaGenerator,
        error: &Schema,
    ) -> Map<String, Value> {
        let content = self.response.as_ref().map_or_else(|| json!({}), |response| response.render(schemas));
        let mut headers = vec!["X-Request-Id", "Cache-Control"];
        if self.is_public_document {
            headers.push("ETag");
        }
        headers.extend(self.response_headers);
        let headers = header_references(&headers);

        let mut responses = Map::new();
        let mut add = |status: StatusCode, response| responses.insert(status.as_str().to_owned(), response);
        add(self.success, json!({ "description": "Success.", "headers": headers, "content": content }));
        if self.is_public_document {
            let description = "The document is unchanged: it has the ETag in `If-None-Match`.";
            add(StatusCode::NOT_MODIFIED, json!({ "description": description, "headers": headers }));
        }
        if let Some(target) = self.redirect {
            let headers =
                header_references(&["X-Request-Id", "Cache-Control", "Location", "Referrer-Policy", "Set-Cookie"]);
            add(StatusCode::FOUND, json!({ "description": target, "headers": headers }));
        }
        for (status, codes) in self.errors_by_status(route) {
            add(status, error_response(status, &codes, error));
        }
        let description = "The headers exceed 32 KiB or 100 fields. There is no body.";
        add(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, json!({ "description": description }));
        responses
    }

    fn errors_by_status(&self, route: impl RouteTable) -> BTreeMap<StatusCode, Vec<ErrorCode>> {
        let mut by_status: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for code in self.all_errors(route) {
            let codes = by_status.entry(code.status()).or_default();
            if !codes.contains(&code) {
                codes.push(code);
            }
        }
        // 408: the body was not received in time.
        if self.request.is_some() {
            by_status.insert(StatusCode::REQUEST_TIMEOUT, vec![ErrorCode::InvalidRequest]);
        }
        by_status
    }

    /// The operation's own errors, and those that follow from authentication, request, response and route.
    fn all_errors(&self, route: impl RouteTable) -> Vec<ErrorCode> {
        let mut errors = match self.security {
            Security::None | Security::OptionalAccessToken => Vec::new(),
            Security::AccessToken => vec![ErrorCode::InvalidToken],
            Security::ServiceAccount => vec![ErrorCode::InvalidClient, ErrorCode::AccessDenied],
        };
        errors.extend(self.errors);
        if self.right.is_some() {
            errors.extend([ErrorCode::AccessDenied, ErrorCode::RateLimited]);
        }
        if self.request.is_some() || !self.query.is_empty() || self.right.is_some() {
            errors.push(ErrorCode::InvalidRequest);
        }
        if self.request.is_some() {
            errors.extend([ErrorCode::PayloadTooLarge, ErrorCode::UnsupportedMediaType]);
        }
        if route.path_template().contains("{APPID}") {
            errors.push(ErrorCode::AppNotFound);
        }
        if route.verb() != Verb::Any {
            errors.push(ErrorCode::MethodNotAllowed);
        }
        if !self.is_public_document {
            errors.push(ErrorCode::TemporarilyUnavailable);
        }
        errors.push(ErrorCode::ServerError);
        errors
    }
}

/// Returns the roles (or the webhook) that give a caller this right. In the description of the operation, this text
/// follows "Needs".
fn requirement(right: Right) -> &'static str {
    match right {
        Right::Introspect => "the role `Introspector`, `Reader` or `UserAdmin`",
        Right::Read => "the role `Reader` or `UserAdmin`",
        Right::Import => "the role `Importer` or `UserAdmin`",
        Right::ManageUsers => "the role `UserAdmin`",
        Right::FetchEvents => "to be the ServiceAccount in `pull` of the webhook",
    }
}

// === impl Parameter ===

impl Parameter {
    /// A parameter that can be left out.
    pub fn new(name: &'static str, description: &'static str, schema: Schema) -> Self {
        Self { name, description, schema, is_required: false, example: None }
    }

    /// A parameter that can be any text.
    pub fn text(name: &'static str, description: &'static str) -> Self {
        Self::new(name, description, json_schema!({ "type": "string" }))
    }

    /// A parameter that is `true` or `false`. The default is `false`.
    pub fn flag(name: &'static str, description: &'static str) -> Self {
        Self::new(name, description, json_schema!({ "type": "boolean", "default": false }))
    }

    /// Makes the parameter required: without it, the call fails.
    pub fn required(self) -> Self {
        Self { is_required: true, ..self }
    }

    pub fn example(self, example: impl Into<Value>) -> Self {
        Self { example: Some(example.into()), ..self }
    }

    fn render(&self) -> Value {
        let mut parameter =
            json!({ "name": self.name, "in": "query", "description": self.description, "schema": self.schema });
        if self.is_required {
            parameter["required"] = true.into();
        }
        if let Some(example) = &self.example {
            parameter["example"] = example.clone();
        }
        parameter
    }
}

// === impl Content ===

impl Content {
    pub fn json<T: JsonSchema>(example: Value) -> Self {
        Self::json_with_schema(SchemaGenerator::subschema_for::<T>, example)
    }

    /// A JSON body with a schema that no Rust type declares.
    pub fn json_with_schema(schema: fn(&mut SchemaGenerator) -> Schema, example: Value) -> Self {
        Self { schema, form_schema: None, example: Some(example), is_required: true, media_types: &[JSON] }
    }

    /// A JSON body that can be left out.
    pub fn optional_json<T: JsonSchema>(example: Value) -> Self {
        Self { is_required: false, ..Self::json::<T>(example) }
    }

    /// The request can leave out this body.
    pub fn optional(self) -> Self {
        Self { is_required: false, ..self }
    }

    /// JSON, or a form with the same fields.
    pub fn json_or_form<T: JsonSchema>(example: Value) -> Self {
        Self { media_types: &[JSON, FORM], ..Self::json::<T>(example) }
    }

    /// Gives the form its own schema. Otherwise, a form has the schema of the JSON body.
    pub fn with_form<T: JsonSchema>(self) -> Self {
        Self { form_schema: Some(SchemaGenerator::subschema_for::<T>), ..self }
    }

    /// Lines of JSON. In a request, the schema describes one line. In a response, it describes the whole text.
    pub fn ndjson(schema: fn(&mut SchemaGenerator) -> Schema, example: Value) -> Self {
        Self { schema, form_schema: None, example: Some(example), is_required: true, media_types: &[NDJSON] }
    }

    /// A form. JSON is not accepted.
    pub fn form(schema: fn(&mut SchemaGenerator) -> Schema) -> Self {
        Self { schema, form_schema: None, example: None, is_required: true, media_types: &[FORM] }
    }

    /// The body `{}` of a response or a request without data. A request can leave out this body.
    pub fn empty_object() -> Self {
        let schema = |_: &mut SchemaGenerator| json_schema!({ "type": "object", "maxProperties": 0 });
        Self { is_required: false, ..Self::json_with_schema(schema, json!({})) }
    }

    fn render_request(&self, schemas: &mut SchemaGenerator) -> Value {
        json!({ "required": self.is_required, "content": self.render(schemas) })
    }

    fn render(&self, schemas: &mut SchemaGenerator) -> Value {
        let mut media = |media_type: &str| {
            let schema = self.form_schema.filter(|_| media_type == FORM).unwrap_or(self.schema);
            let mut media = json!({ "schema": schema(schemas) });
            if let Some(example) = &self.example {
                media["example"] = example.clone();
            }
            media
        };
        self.media_types.iter().copied().map(|media_type| (media_type.to_owned(), media(media_type))).collect()
    }
}
