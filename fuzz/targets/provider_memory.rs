//! Memory for what a provider answers: a large body of any shape costs a bounded heap.

use std::sync::LazyLock;

use latchkey_crds::rendered::ProviderSettings;
use latchkey_server::providers::fuzzing::{KeySet, discovery, has_posted_name, profile};
use serde_json::json;

use crate::{
    draw::{Draw, texts},
    harness,
};

/// The largest body of a provider that is read at all.
const BODY: usize = 1024 * 1024;
/// What one body may cost while it is parsed, in bytes: four at once must fit in a pod of 256 MiB beside everything else.
const HEAP: u64 = 16 * 1024 * 1024;
const TOKENS: [&str; 20] = [
    "[",
    "]",
    "[]",
    "{",
    "}",
    "{}",
    ",",
    ":",
    "0",
    "\"\"",
    "\"\":",
    "null",
    "\"a\"",
    "\"a\":",
    "{\"\":",
    "{\"\":{}}",
    "[[]]",
    "\"\\u0000\"",
    "[0,0]",
    "{\"kty\":\"EC\"}",
];

static CLIENT: LazyLock<ProviderSettings> = LazyLock::new(|| {
    serde_json::from_value(json!({
        "preset": "oauth2", "clientID": "ours", "secret": "hush",
        "options": { "userInfoURL": "https://id.example/u", "claims": { "subject": "sub" } },
    }))
    .unwrap()
});

#[test]
fn provider_memory() {
    harness::run("provider_memory", 8, |input| {
        let mut draw = Draw::new(input);
        let member = draw.pick(&["keys", "sub", "issuer", "scopes_supported", "name"]);
        let [_, row] = texts(draw.rest(), &TOKENS);
        for unit in [row.as_ref(), "{\"\":{}}", "[[]]"] {
            if serde_json::from_str::<serde_json::Value>(unit).is_ok() {
                let start = format!("{{\"{member}\":[");
                let units = (BODY - start.len() - 2) / (unit.len() + 1);
                let body = format!("{start}{}]}}", vec![unit; units].join(","));
                judge(body.as_bytes());
            }
        }
    });
}

fn judge(body: &[u8]) {
    // As many hashes as a callback of a slow client may cost, since a body of 1 MiB is refused elsewhere.
    harness::bounded(20, HEAP, || discovery(body));
    harness::bounded(20, HEAP, || KeySet::parse(body));
    harness::bounded(20, HEAP, || profile(body, &CLIENT));
    harness::bounded(20, HEAP, || has_posted_name(std::str::from_utf8(body).unwrap()));
}
