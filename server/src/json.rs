//! Parses untrusted JSON into a tree, with limits on its depth and on the number of its values.
//!
//! A tree needs far more memory than its text: about 100 times as much for repeated `{"":{}}`. Therefore a limit on the
//! size of the text is not enough.

use std::{cell::Cell, fmt};

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// Limits of a JSON document.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Maximum nesting of arrays and objects; the outermost one has depth 1.
    pub depth: usize,
    /// Maximum number of values, including arrays and objects. A value needs less than 1 KiB in addition to its text.
    pub values: usize,
}

/// Why a document is rejected. The texts never quote the document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    #[error("is not UTF-8")]
    NotUtf8,
    #[error("is not JSON, at line {line}, column {column}")]
    Syntax { line: usize, column: usize },
    #[error("has a duplicate key, at line {line}")]
    DuplicateKey { line: usize },
    #[error("is nested too deeply")]
    TooDeep,
    #[error("has too many values")]
    TooManyValues,
}

/// The rule that a document violates. [`Reader`] records it separately, because an error of serde cannot contain it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Violation {
    Depth,
    Values,
    DuplicateKey,
}

/// Reads a value at a given depth.
#[derive(Clone, Copy)]
struct Reader<'a> {
    depth_left: usize,
    values_left: &'a Cell<usize>,
    violation: &'a Cell<Option<Violation>>,
}

/// Parses one document. It must be UTF-8 and must not have duplicate keys at any depth.
pub fn parse(bytes: &[u8], bounds: Bounds) -> Result<Value, JsonError> {
    let text = std::str::from_utf8(bytes).map_err(|_| JsonError::NotUtf8)?;
    let (values_left, violation) = (Cell::new(bounds.values), Cell::new(None));
    let mut deserializer = serde_json::Deserializer::from_str(text);
    Reader { depth_left: bounds.depth, values_left: &values_left, violation: &violation }
        .deserialize(&mut deserializer)
        .and_then(|value| deserializer.end().map(|()| value))
        .map_err(|error| match violation.get() {
            Some(Violation::Depth) => JsonError::TooDeep,
            Some(Violation::Values) => JsonError::TooManyValues,
            Some(Violation::DuplicateKey) => JsonError::DuplicateKey { line: error.line() },
            None => JsonError::Syntax { line: error.line(), column: error.column() },
        })
}

// === impl Reader ===

impl Reader<'_> {
    fn fail<E: serde::de::Error>(self, violation: Violation) -> E {
        self.violation.set(Some(violation));
        E::custom("out of bounds")
    }

    /// Returns a reader for the next level.
    fn descend<E: serde::de::Error>(self) -> Result<Self, E> {
        match self.depth_left.checked_sub(1) {
            Some(depth_left) => Ok(Self { depth_left, ..self }),
            None => Err(self.fail(Violation::Depth)),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Reader<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        match self.values_left.get().checked_sub(1) {
            Some(values_left) => self.values_left.set(values_left),
            None => return Err(self.fail(Violation::Values)),
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reader<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let inner = self.descend()?;
        let mut array = Vec::new();
        while let Some(item) = items.next_element_seed(inner)? {
            array.push(item);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let inner = self.descend()?;
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(self.fail(Violation::DuplicateKey));
            }
            let value = entries.next_value_seed(inner)?;
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SMALL: Bounds = Bounds { depth: 3, values: 5 };

    fn parse_small(text: &str) -> Result<Value, JsonError> {
        parse(text.as_bytes(), SMALL)
    }

    #[test]
    fn a_document_within_its_limits_is_parsed() {
        let text = r#" {"a": [1, -2.5, null], "b": true} "#;
        assert_eq!(
            parse(text.as_bytes(), Bounds { depth: 2, values: 6 }),
            Ok(json!({ "a": [1, -2.5, null], "b": true }))
        );
        assert_eq!(parse_small("[[[]]]"), Ok(json!([[[]]])));
        assert_eq!(parse_small("[1,2,3,4]"), Ok(json!([1, 2, 3, 4])));
    }

    #[test]
    fn every_value_is_counted() {
        for text in ["[1,2,3,4,5]", "[[],[],[],[],[]]", "[{},{},{},{},{}]", r#"{"a":{},"b":{"c":0},"d":"","e":null}"#] {
            assert_eq!(parse_small(text), Err(JsonError::TooManyValues), "{text}");
        }
    }

    #[test]
    fn a_document_that_is_too_deep_is_rejected_before_the_stack_overflows() {
        for text in ["[[[[]]]]", r#"{"a":{"a":{"a":{}}}}"#, r#"[{"a":[{}]}]"#] {
            assert_eq!(parse_small(text), Err(JsonError::TooDeep), "{text}");
        }
        let deep = Bounds { depth: 16, values: usize::MAX };
        for open in ["[", "{\"a\":"] {
            assert_eq!(parse(open.repeat(100_000).as_bytes(), deep), Err(JsonError::TooDeep));
        }
    }

    #[test]
    fn input_that_is_not_exactly_one_valid_document_is_rejected() {
        assert_eq!(parse(b"\"\xff\"", SMALL), Err(JsonError::NotUtf8));
        assert_eq!(parse_small("{\"a\":1,\n\"a\":2}"), Err(JsonError::DuplicateKey { line: 2 }));
        for text in ["", "{", "[1,]", "1 2", "NaN", "1e999999", "\"\\ud800\"", "nul"] {
            assert!(matches!(parse_small(text), Err(JsonError::Syntax { .. })), "{text}");
        }
    }
}
