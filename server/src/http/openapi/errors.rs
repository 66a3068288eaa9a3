//! The error responses of operations.

use http::StatusCode;
use schemars::Schema;
use serde_json::{Map, Value, json};

use super::components::header_references;
use crate::http::error::{ErrorBody, ErrorCode, FieldCode, FieldProblem};

/// The response for all error codes of one status.
pub(super) fn error_response(status: StatusCode, codes: &[ErrorCode], error: &Schema) -> Value {
    let headers = match status {
        StatusCode::UNAUTHORIZED => &["X-Request-Id", "Cache-Control", "WWW-Authenticate"][..],
        StatusCode::METHOD_NOT_ALLOWED => &["X-Request-Id", "Cache-Control", "Allow"][..],
        StatusCode::TOO_MANY_REQUESTS => {
            &["X-Request-Id", "Cache-Control", "Retry-After", "RateLimit", "RateLimit-Policy"][..]
        }
        StatusCode::SERVICE_UNAVAILABLE => &["X-Request-Id", "Cache-Control", "Retry-After"][..],
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
    let field_error = |description: &str, field: &'static str, code: FieldCode, message: &'static str| {
        (description.to_owned(), vec![FieldProblem { field: field.into(), code, message: message.into() }])
    };
    let (description, fields) = if code == ErrorCode::InvalidRequest {
        field_error("email is not an email address", "email", FieldCode::Invalid, "is not an email address")
    } else if code == ErrorCode::WeakPassword {
        let message = "is too easy to guess; use a longer or less common one";
        field_error(&format!("password {message}"), "password", FieldCode::Guessable, message)
    } else {
        ("…".to_owned(), Vec::new())
    };
    let body = ErrorBody {
        error: code,
        error_description: &description,
        fields: &fields,
        user_id: super::examples::USER_ID.parse().ok().filter(|_| code.names_user()),
        request_id: "019a8452-a0b1-7c2d-8e3f-405162738495",
    };
    json!(body)
}
