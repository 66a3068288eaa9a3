//! The form of a page.

use serde_json::{Map, Value};

use crate::http::{
    error::Problem,
    request::{RequestBody, parse_fields, parse_form},
};

/// The fields of a form that are not empty. Never printed.
pub(super) struct Form(Map<String, Value>);

// === impl Form ===

impl Form {
    /// Parses the body. A repeated field is an error.
    pub(super) fn parse(body: &str) -> Result<Self, Problem> {
        parse_form(body.as_bytes()).map(Self)
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(Value::as_str)
    }

    /// The text of a field, to show it again. Empty if there is no such field.
    pub(super) fn text(&self, name: &str) -> &str {
        self.get(name).unwrap_or_default()
    }

    /// The fields of a call of the JSON API.
    pub(super) fn read<T: RequestBody>(&self) -> Result<T, Problem> {
        parse_fields(self.0.clone())
    }
}
