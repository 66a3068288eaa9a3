//! The line that the import endpoint of the administration API accepts for one user.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::hash::PasswordHash;

/// Maximum number of identities of a user (docs/import.md).
pub(crate) const MAX_IDENTITIES: usize = 10;
/// Maximum size of the metadata of a user as compact JSON, in bytes.
pub(crate) const MAX_METADATA: usize = 8 * 1024;

/// A user that is imported, as one line. Members with default values are left out of the line.
#[derive(Debug, Default, Serialize)]
pub(crate) struct NewUser {
    pub external_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub email: Option<String>,
    #[serde(skip_serializing_if = "is_false")]
    pub email_verified: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Unix seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created_at: Option<i64>,
    #[serde(skip_serializing_if = "is_false")]
    pub disabled: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password_hash: Option<PasswordHash>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub identities: Vec<Identity>,
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Identity {
    pub provider: String,
    pub subject: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub authority: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde requires")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// Whether metadata can be stored: it is not larger than [`MAX_METADATA`], and Postgres can store its texts.
pub(crate) fn metadata_fits(metadata: &Map<String, Value>) -> bool {
    let fits = serde_json::to_vec(metadata).is_ok_and(|text| text.len() <= MAX_METADATA);
    fits && metadata.iter().all(|(member, value)| !member.contains('\0') && has_no_nul(value))
}

fn has_no_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => !text.contains('\0'),
        Value::Array(items) => items.iter().all(has_no_nul),
        Value::Object(members) => members.iter().all(|(member, value)| !member.contains('\0') && has_no_nul(value)),
        Value::Null | Value::Bool(_) | Value::Number(_) => true,
    }
}
