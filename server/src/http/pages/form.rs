//! The form of a page.

use serde_json::{Map, Value};

use crate::{
    domain::openid::authorization_request::RequestParameters,
    http::{
        error::Problem,
        parameters::Parameters,
        request::{RequestBody, parse_fields, parse_form},
    },
};

/// The fields of a form. They can be passwords, so the type has no `Debug`, and logs never contain them.
pub(super) struct Form {
    /// The fields that are not empty, each once.
    fields: Map<String, Value>,
    /// The parameters of an authorization request, which has its own rules for repeated parameters.
    parameters: RequestParameters,
}

// === impl Form ===

impl Form {
    /// Parses the body. A repeated field is an error.
    pub(super) fn parse(body: &str) -> Result<Self, Problem> {
        let fields = parse_form(body.as_bytes())?;
        let pairs = fields.iter().filter_map(|(name, value)| Some((name.as_str(), value.as_str()?)));
        let parameters = RequestParameters::new(pairs);
        Ok(Self { fields, parameters })
    }

    /// Parses the body of an authorization request.
    pub(super) fn parse_authorization_request(body: &str) -> Result<Self, Problem> {
        let parameters = RequestParameters::new(Parameters::parse(body)?.pairs());
        Ok(Self { fields: Map::new(), parameters })
    }

    pub(super) fn parameters(&self) -> &RequestParameters {
        &self.parameters
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.fields.get(name).and_then(Value::as_str)
    }

    /// The text of a field, to show it again. Empty if there is no such field.
    pub(super) fn text(&self, name: &str) -> &str {
        self.get(name).unwrap_or_default()
    }

    /// Parses the fields as the body of a call of the JSON API.
    pub(super) fn read<T: RequestBody>(&self) -> Result<T, Problem> {
        parse_fields(self.fields.clone())
    }
}
