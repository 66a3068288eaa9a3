//! Checks objects against the definitions of their kinds, and parses them.

use std::sync::Arc;

use latchkey_crds::{
    app,
    app::App,
    client,
    client::Client,
    provider,
    provider::Provider,
    validation::{InvalidDefinition, Validator},
};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A field of a manifest that is wrong, and what to do about it.
#[derive(Clone, Debug)]
pub(super) struct WrongField {
    pub(super) field: String,
    pub(super) reason: String,
}

/// Validates objects against the definitions of their kinds.
pub(crate) struct Schemas {
    app: Validator,
    provider: Validator,
    client: Validator,
    allow_insecure: bool,
}

// === impl WrongField ===

impl WrongField {
    pub(super) fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field.into(), reason: reason.into() }
    }
}

// === impl Schemas ===

impl Schemas {
    pub(crate) fn new(allow_insecure: bool) -> Result<Self, InvalidDefinition> {
        Ok(Self {
            app: Validator::new(&app::definition())?,
            provider: Validator::new(&provider::definition())?,
            client: Validator::new(&client::definition())?,
            allow_insecure,
        })
    }

    pub(super) fn parse_app(&self, object: &Value) -> Result<App, Vec<WrongField>> {
        self.parse(&self.app, object)
    }

    pub(super) fn parse_provider(&self, object: &Value) -> Result<Provider, Vec<WrongField>> {
        self.parse(&self.provider, object)
    }

    pub(super) fn parse_client(&self, object: &Value) -> Result<Arc<Client>, Vec<WrongField>> {
        self.parse(&self.client, object).map(Arc::new)
    }

    fn parse<T: DeserializeOwned>(&self, validator: &Validator, object: &Value) -> Result<T, Vec<WrongField>> {
        let violations = validator.validate(object, None);
        let wrong: Vec<_> = violations
            .into_iter()
            .filter(|violation| !(violation.is_policy && self.allow_insecure))
            .map(|violation| WrongField::new(violation.field, violation.reason))
            .collect();
        if !wrong.is_empty() {
            return Err(wrong);
        }
        // The types check what the schema cannot express.
        serde_path_to_error::deserialize(validator.normalize(object)).map_err(|error| {
            let field = error.path().to_string();
            vec![WrongField::new(if field == "." { String::new() } else { field }, error.inner().to_string())]
        })
    }
}
