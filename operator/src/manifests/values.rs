//! The values of Secrets and ConfigMaps.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::Value;

use super::schemas::Violations;
use crate::facts::{ConfigMapValues, SecretBytes, SecretValues};

/// The values of a Secret: `data` in base64, and `stringData`, which takes precedence.
pub(super) fn secret_values(object: &Value) -> Result<SecretValues, Violations> {
    let mut values = SecretValues::new();
    let mut violations = Violations::new();
    for (key, text) in string_entries(object, "data", &mut violations) {
        // kubectl accepts base64 with line breaks.
        match STANDARD.decode(text.split_ascii_whitespace().collect::<String>()) {
            Ok(bytes) => drop(values.insert(key, SecretBytes(bytes))),
            Err(_) => {
                violations.push((format!("data.{key}"), "must be base64; plain text goes under stringData".into()))
            }
        }
    }
    for (key, text) in string_entries(object, "stringData", &mut violations) {
        values.insert(key, SecretBytes(text.into_bytes()));
    }
    if violations.is_empty() { Ok(values) } else { Err(violations) }
}

pub(super) fn config_map_values(object: &Value) -> Result<ConfigMapValues, Violations> {
    let mut violations = Violations::new();
    let text = string_entries(object, "data", &mut violations).into_iter().collect();
    let binary = string_entries(object, "binaryData", &mut violations).into_iter().map(|(key, _)| key).collect();
    if violations.is_empty() { Ok(ConfigMapValues { text, binary }) } else { Err(violations) }
}

/// The strings of a map, by key. Values are never quoted, because they may be secret.
fn string_entries(object: &Value, field: &str, violations: &mut Violations) -> Vec<(String, String)> {
    let mut found = Vec::new();
    match object.get(field) {
        None | Some(Value::Null) => {}
        Some(Value::Object(members)) => {
            for (key, value) in members {
                match value {
                    Value::String(text) => found.push((key.clone(), text.clone())),
                    Value::Null => found.push((key.clone(), String::new())),
                    Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                        violations.push((format!("{field}.{key}"), "must be a string; put it in quotes".into()));
                    }
                }
            }
        }
        Some(Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_)) => {
            violations.push((field.into(), "must be a map of strings".into()));
        }
    }
    found
}
