//! Checks objects against the definitions of their kinds, and parses them.

use latchkey_crds::{
    app,
    app::App,
    provider,
    provider::Provider,
    validation::{InvalidDefinition, Validator},
};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The wrong fields of an object, each with what to do.
pub(super) type Violations = Vec<(String, String)>;

/// Validates objects against the definitions of their kinds.
pub(crate) struct Schemas {
    app: Validator,
    provider: Validator,
    allow_insecure: bool,
}

// === impl Schemas ===

impl Schemas {
    pub(crate) fn new(allow_insecure: bool) -> Result<Self, InvalidDefinition> {
        Ok(Self {
            app: Validator::new(&app::definition())?,
            provider: Validator::new(&provider::definition())?,
            allow_insecure,
        })
    }

    pub(super) fn parse_app(&self, object: &Value) -> Result<App, Violations> {
        self.parse(&self.app, object)
    }

    pub(super) fn parse_provider(&self, object: &Value) -> Result<Provider, Violations> {
        self.parse(&self.provider, object)
    }

    fn parse<T: DeserializeOwned>(&self, validator: &Validator, object: &Value) -> Result<T, Violations> {
        let violations = validator.validate(object, None);
        let violations: Vec<_> = violations
            .into_iter()
            .filter(|violation| !(violation.is_policy && self.allow_insecure))
            .map(|violation| (violation.field, violation.reason))
            .collect();
        if !violations.is_empty() {
            return Err(violations);
        }
        // The types check what the schema cannot express.
        serde_path_to_error::deserialize(validator.normalize(object)).map_err(|error| {
            let field = error.path().to_string();
            vec![(if field == "." { String::new() } else { field }, error.inner().to_string())]
        })
    }
}
