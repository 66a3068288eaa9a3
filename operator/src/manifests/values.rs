//! The values of Secrets and ConfigMaps.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::Value;

use super::schemas::WrongField;
use crate::facts::{ConfigMapValues, SecretBytes, SecretValues};

/// Returns the decoded values of a Secret, from `data` (in base64) and from `stringData`, which takes precedence.
pub(super) fn secret_values(object: &Value) -> Result<SecretValues, Vec<WrongField>> {
    let mut wrong = Vec::new();
    let data = base64_entries(object, "data", "must be base64; plain text goes under stringData", &mut wrong);
    let mut values: SecretValues = data.into_iter().map(|(key, bytes)| (key, SecretBytes(bytes))).collect();
    for (key, text) in string_entries(object, "stringData", &mut wrong) {
        values.insert(key, SecretBytes(text.into_bytes()));
    }
    if wrong.is_empty() { Ok(values) } else { Err(wrong) }
}

pub(super) fn config_map_values(object: &Value) -> Result<ConfigMapValues, Vec<WrongField>> {
    let mut wrong = Vec::new();
    let text = string_entries(object, "data", &mut wrong).into_iter().collect();
    let binary = base64_entries(object, "binaryData", "must be base64; plain text goes under data", &mut wrong);
    let binary = binary.into_iter().collect();
    if wrong.is_empty() { Ok(ConfigMapValues { text, binary }) } else { Err(wrong) }
}

/// Returns the decoded values of a map with base64 values, by key.
fn base64_entries(object: &Value, field: &str, advice: &str, wrong: &mut Vec<WrongField>) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for (key, text) in string_entries(object, field, wrong) {
        // kubectl accepts base64 with line breaks.
        match STANDARD.decode(text.split_ascii_whitespace().collect::<String>()) {
            Ok(bytes) => found.push((key, bytes)),
            Err(_) => wrong.push(WrongField::new(format!("{field}.{key}"), advice)),
        }
    }
    found
}

/// Returns the strings of a map, by key. Errors never quote a value, because it may be secret.
fn string_entries(object: &Value, field: &str, wrong: &mut Vec<WrongField>) -> Vec<(String, String)> {
    let mut found = Vec::new();
    match object.get(field) {
        None | Some(Value::Null) => {}
        Some(Value::Object(members)) => {
            for (key, value) in members {
                match value {
                    Value::String(text) => found.push((key.clone(), text.clone())),
                    Value::Null => found.push((key.clone(), String::new())),
                    Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                        wrong.push(WrongField::new(format!("{field}.{key}"), "must be a string; put it in quotes"));
                    }
                }
            }
        }
        Some(Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_)) => {
            wrong.push(WrongField::new(field, "must be a map of strings"));
        }
    }
    found
}
