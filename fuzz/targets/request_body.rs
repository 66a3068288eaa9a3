//! JSON bodies of requests: for accepted bodies the server's parser agrees with serde_json, and rejected bodies break a
//! rule.

use std::fmt;

use latchkey_server::http::request::{MAX_DEPTH, MAX_VALUES, parse_object};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};
use serde_json::Value;

use crate::{draw::texts, harness};

const FRAGMENTS: [&str; 32] = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\"a\"",
    "\"b\"",
    "\"\\u0061\"",
    "\"email\"",
    "\"\"",
    "\"",
    "\\",
    "\\u",
    "d800",
    "0",
    "-1",
    "1.5",
    "1e400",
    "18446744073709551616",
    "-0.0",
    "true",
    "false",
    "null",
    " ",
    "\n",
    "\"é\"",
    "{\"a\":",
    "{\"a\":1,\"b\":[",
    "[[[[",
    "]]]]",
    "}}}}",
];

/// A JSON document with all members of all objects, in their order and with duplicates.
enum Tree {
    Leaf,
    Array(Vec<Self>),
    Object(Vec<(String, Self)>),
}

#[test]
fn request_body() {
    harness::run("request_body", 8_000, |input| {
        check_input(input);
        for text in texts(input, &FRAGMENTS) {
            check_input(text.as_bytes());
            // Makes the text the value of a member, because random tokens rarely form an object.
            check_input(format!("{{\"a\":{text}}}").as_bytes());
        }
    });
}

fn check_input(body: &[u8]) {
    let max_heap = 64 * 1024 + 256 * body.len() as u64;
    let by_server = harness::assert_bounded(1, max_heap, || parse_object(body));
    let by_serde_json = serde_json::from_slice::<Value>(body);
    match by_server {
        Ok(object) => {
            let tree = serde_json::from_slice::<Tree>(body).expect("an accepted body is JSON");
            assert!(!tree.has_duplicate_key() && tree.depth() <= MAX_DEPTH, "a body is accepted that must be rejected");
            let value = Value::Object(object);
            assert_eq!(by_serde_json.ok().as_ref(), Some(&value), "serde_json reads another value");
            let printed = value.to_string();
            assert_eq!(
                parse_object(printed.as_bytes()).ok().map(Value::Object),
                Some(value),
                "{printed} has another value"
            );
        }
        Err(problem) => {
            assert_eq!(problem.status, 400);
            if let (Ok(Value::Object(_)), Ok(tree)) = (by_serde_json, serde_json::from_slice::<Tree>(body)) {
                let breaks_rule =
                    tree.has_duplicate_key() || tree.depth() > MAX_DEPTH || tree.value_count() > MAX_VALUES;
                assert!(breaks_rule, "an object is rejected: {}", problem.description);
            }
        }
    }
}

// === impl Tree ===

impl Tree {
    fn children(&self) -> Vec<&Self> {
        match self {
            Self::Leaf => Vec::new(),
            Self::Array(items) => items.iter().collect(),
            Self::Object(members) => members.iter().map(|(_, value)| value).collect(),
        }
    }

    /// Whether an object has a duplicate key.
    fn has_duplicate_key(&self) -> bool {
        let has_own_duplicate = match self {
            Self::Object(members) => {
                (0..members.len()).any(|at| members[..at].iter().any(|(key, _)| *key == members[at].0))
            }
            Self::Leaf | Self::Array(_) => false,
        };
        has_own_duplicate || self.children().into_iter().any(Self::has_duplicate_key)
    }

    fn depth(&self) -> usize {
        match self {
            Self::Leaf => 0,
            Self::Array(_) | Self::Object(_) => {
                1 + self.children().into_iter().map(Self::depth).max().unwrap_or_default()
            }
        }
    }

    fn value_count(&self) -> usize {
        1 + self.children().into_iter().map(Self::value_count).sum::<usize>()
    }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl<'de> Visitor<'de> for Reader {
            type Value = Tree;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }

            fn visit_unit<E>(self) -> Result<Tree, E> {
                Ok(Tree::Leaf)
            }

            fn visit_bool<E>(self, _: bool) -> Result<Tree, E> {
                Ok(Tree::Leaf)
            }

            fn visit_i64<E>(self, _: i64) -> Result<Tree, E> {
                Ok(Tree::Leaf)
            }

            fn visit_u64<E>(self, _: u64) -> Result<Tree, E> {
                Ok(Tree::Leaf)
            }

            fn visit_f64<E>(self, _: f64) -> Result<Tree, E> {
                Ok(Tree::Leaf)
            }

            fn visit_str<E>(self, _: &str) -> Result<Tree, E> {
                Ok(Tree::Leaf)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Tree, A::Error> {
                let mut array = Vec::new();
                while let Some(item) = items.next_element()? {
                    array.push(item);
                }
                Ok(Tree::Array(array))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Tree, A::Error> {
                let mut object = Vec::new();
                while let Some(member) = members.next_entry()? {
                    object.push(member);
                }
                Ok(Tree::Object(object))
            }
        }

        deserializer.deserialize_any(Reader)
    }
}
