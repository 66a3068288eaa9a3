//! JSON from outside, read into a tree within bounds on its depth and on the number of its values.
//!
//! A tree costs far more memory than its text: `{"":{}}` repeated costs some 100 times as much. So a bound on bytes
//! alone bounds nothing.

use std::{cell::Cell, fmt};

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// What a document may be made of.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// How deep arrays and objects may nest; the outermost one is 1.
    pub depth: usize,
    /// How many values there may be, arrays and objects included. One value costs less than 1 KiB, its text aside.
    pub values: usize,
}

/// Why a document is refused. Never quotes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("is not UTF-8")]
    NotUtf8,
    #[error("is not JSON, at line {line}, column {column}")]
    Syntax { line: usize, column: usize },
    #[error("has a key twice, at line {line}")]
    DuplicateKey { line: usize },
    #[error("nests too deep")]
    TooDeep,
    #[error("has too many values")]
    TooManyValues,
}

/// What serde's errors do not carry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bound {
    Depth,
    Values,
    UniqueKeys,
}

/// Reads a value at a depth.
#[derive(Clone, Copy)]
struct Reader<'a> {
    depth_left: usize,
    values_left: &'a Cell<usize>,
    broken: &'a Cell<Option<Bound>>,
}

/// Reads one document in UTF-8, without duplicate keys at any depth.
pub fn parse(bytes: &[u8], bounds: Bounds) -> Result<Value, Refusal> {
    let text = std::str::from_utf8(bytes).map_err(|_| Refusal::NotUtf8)?;
    let (values_left, broken) = (Cell::new(bounds.values), Cell::new(None));
    let mut deserializer = serde_json::Deserializer::from_str(text);
    Reader { depth_left: bounds.depth, values_left: &values_left, broken: &broken }
        .deserialize(&mut deserializer)
        .and_then(|value| deserializer.end().map(|()| value))
        .map_err(|error| match broken.get() {
            Some(Bound::Depth) => Refusal::TooDeep,
            Some(Bound::Values) => Refusal::TooManyValues,
            Some(Bound::UniqueKeys) => Refusal::DuplicateKey { line: error.line() },
            None => Refusal::Syntax { line: error.line(), column: error.column() },
        })
}

// === impl Reader ===

impl Reader<'_> {
    fn refuse<E: serde::de::Error>(self, bound: Bound) -> E {
        self.broken.set(Some(bound));
        E::custom("out of bounds")
    }

    /// One level further in.
    fn enter<E: serde::de::Error>(self) -> Result<Self, E> {
        match self.depth_left.checked_sub(1) {
            Some(depth_left) => Ok(Self { depth_left, ..self }),
            None => Err(self.refuse(Bound::Depth)),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Reader<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        match self.values_left.get().checked_sub(1) {
            Some(left) => self.values_left.set(left),
            None => return Err(self.refuse(Bound::Values)),
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
        let inner = self.enter()?;
        let mut array = Vec::new();
        while let Some(item) = items.next_element_seed(inner)? {
            array.push(item);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let inner = self.enter()?;
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(self.refuse(Bound::UniqueKeys));
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

    fn small(text: &str) -> Result<Value, Refusal> {
        parse(text.as_bytes(), SMALL)
    }

    #[test]
    fn a_document_within_its_bounds_is_read_whole() {
        let text = r#" {"a": [1, -2.5, null], "b": true} "#;
        assert_eq!(
            parse(text.as_bytes(), Bounds { depth: 2, values: 6 }),
            Ok(json!({ "a": [1, -2.5, null], "b": true }))
        );
        assert_eq!(small("[[[]]]"), Ok(json!([[[]]])));
        assert_eq!(small("[1,2,3,4]"), Ok(json!([1, 2, 3, 4])));
    }

    #[test]
    fn every_value_counts_whatever_it_is() {
        for text in ["[1,2,3,4,5]", "[[],[],[],[],[]]", "[{},{},{},{},{}]", r#"{"a":{},"b":{"c":0},"d":"","e":null}"#] {
            assert_eq!(small(text), Err(Refusal::TooManyValues), "{text}");
        }
    }

    #[test]
    fn a_document_that_is_too_deep_is_refused_before_the_stack_ends() {
        for text in ["[[[[]]]]", r#"{"a":{"a":{"a":{}}}}"#, r#"[{"a":[{}]}]"#] {
            assert_eq!(small(text), Err(Refusal::TooDeep), "{text}");
        }
        let deep = Bounds { depth: 16, values: usize::MAX };
        for open in ["[", "{\"a\":"] {
            assert_eq!(parse(open.repeat(100_000).as_bytes(), deep), Err(Refusal::TooDeep));
        }
    }

    #[test]
    fn what_is_not_one_document_is_refused() {
        assert_eq!(parse(b"\"\xff\"", SMALL), Err(Refusal::NotUtf8));
        assert_eq!(small("{\"a\":1,\n\"a\":2}"), Err(Refusal::DuplicateKey { line: 2 }));
        for text in ["", "{", "[1,]", "1 2", "NaN", "1e999999", "\"\\ud800\"", "nul"] {
            assert!(matches!(small(text), Err(Refusal::Syntax { .. })), "{text}");
        }
    }
}
