//! The OpenAPI 3.1 document, made from the code's own types.

use latchkey_crds::types::IssuerUrl;
use serde_json::{Value, json};

/// The document for a service that is reached at `base_url`.
pub fn document(base_url: &IssuerUrl) -> Value {
    json!({ "openapi": "3.1.0", "servers": [{ "url": base_url.as_str() }] })
}
