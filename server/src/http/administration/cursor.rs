//! Cursors: where the next page begins. A cursor is valid only for the App, the call and the filters of the page that
//! returned it.

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_crds::types::AppId;
use schemars::json_schema;
use serde::{Serialize, de::DeserializeOwned};

use super::query::{Query, invalid_parameter};
use crate::http::{
    error::Problem,
    openapi::{operation::Parameter, patterns},
};

/// Length of the hash of the filters, in bytes. The hash detects mistakes of callers; it does not protect anything.
const FILTER_HASH_BYTES: usize = 9;

/// Encodes and decodes the cursors of one call.
pub struct Cursor {
    filter_hash: [u8; FILTER_HASH_BYTES],
}

// === impl Cursor ===

impl Cursor {
    /// Creates the encoder for the cursors of a call with these filters. `call` is a name such as `users`.
    pub fn new(app: &AppId, call: &'static str, filters: &impl std::fmt::Debug) -> Self {
        let hash = digest(&SHA256, format!("{app}\n{call}\n{filters:?}").as_bytes());
        let mut filter_hash = [0; FILTER_HASH_BYTES];
        filter_hash.copy_from_slice(&hash.as_ref()[..FILTER_HASH_BYTES]);
        Self { filter_hash }
    }

    pub fn encode(&self, position: &impl Serialize) -> String {
        let mut bytes = self.filter_hash.to_vec();
        serde_json::to_writer(&mut bytes, position).expect("a position consists of text and numbers");
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// Returns the position in the parameter `cursor`, if the query has this parameter.
    ///
    /// # Errors
    ///
    /// 400 if the cursor is malformed, or belongs to another App, another call or other filters.
    pub fn position<T: DeserializeOwned>(&self, query: &Query<'_>) -> Result<Option<T>, Problem> {
        let Some(text) = query.get("cursor") else { return Ok(None) };
        self.decode(text)
            .map(Some)
            .ok_or_else(|| invalid_parameter("cursor", "is not a cursor of this call with these filters"))
    }

    /// Describes the parameter `cursor` for the OpenAPI document.
    pub fn parameter() -> Parameter {
        let schema = json_schema!({ "type": "string", "pattern": patterns::BASE64URL });
        Parameter::new("cursor", "`next` of the page before, with the same filters.", schema)
    }

    fn decode<T: DeserializeOwned>(&self, text: &str) -> Option<T> {
        let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
        let (hash, position) = bytes.split_at_checked(FILTER_HASH_BYTES)?;
        if hash != self.filter_hash {
            return None;
        }
        serde_json::from_slice(position).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_bound_to_its_app_its_call_and_its_filters() {
        let shop: AppId = "shop".parse().unwrap();
        let cursor = Cursor::new(&shop, "users", &("email_prefix", "a"));
        let text = cursor.encode(&("ada@example.com", 7));
        assert_eq!(cursor.decode::<(String, u8)>(&text), Some(("ada@example.com".to_owned(), 7)));
        let others = [
            Cursor::new(&"blog".parse().unwrap(), "users", &("email_prefix", "a")),
            Cursor::new(&shop, "events", &("email_prefix", "a")),
            Cursor::new(&shop, "users", &("email_prefix", "b")),
        ];
        for other in others {
            assert_eq!(other.decode::<(String, u8)>(&text), None);
        }
        for bad in ["", "x", "!!", &text[1..], &text[..10]] {
            assert_eq!(cursor.decode::<(String, u8)>(bad), None, "{bad}");
        }
    }
}
