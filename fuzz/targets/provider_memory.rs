//! Memory for responses of providers: parsing a large body of any shape needs a limited heap.

use std::sync::LazyLock;

use latchkey_crds::rendered::ProviderSettings;
use latchkey_server::providers::fuzzing::{KeySet, discovery_urls, has_posted_name, identity_from_profile};
use serde_json::json;

use crate::{
    draw::{Draw, texts},
    harness,
};

/// Maximum size of the bodies in this target, in bytes: 16 times the maximum that a server reads (64 KiB;
/// specification: Limits, Provider calls).
const MAX_BODY: usize = 1024 * 1024;
/// Maximum heap to parse one body, in bytes. A pod with 256 MiB must be able to parse four bodies at the same time, in
/// addition to everything else.
const MAX_HEAP: u64 = 16 * 1024 * 1024;
const FRAGMENTS: [&str; 20] = [
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
        let [_, joined_tokens] = texts(draw.rest(), &FRAGMENTS);
        for unit in [joined_tokens.as_ref(), "{\"\":{}}", "[[]]"] {
            if serde_json::from_str::<serde_json::Value>(unit).is_ok() {
                let start = format!("{{\"{member}\":[");
                let units = (MAX_BODY - start.len() - 2) / (unit.len() + 1);
                let body = format!("{start}{}]}}", vec![unit; units].join(","));
                check_input(body.as_bytes());
            }
        }
    });
}

fn check_input(body: &[u8]) {
    // The limit is the CPU time of 20 hashes, because these bodies are 16 times as large as those that a server reads.
    // The target `provider_documents` has smaller bodies, and its limit is one hash.
    harness::assert_bounded(20, MAX_HEAP, || discovery_urls(body));
    harness::assert_bounded(20, MAX_HEAP, || KeySet::parse(body));
    harness::assert_bounded(20, MAX_HEAP, || identity_from_profile(body, &CLIENT));
    harness::assert_bounded(20, MAX_HEAP, || has_posted_name(std::str::from_utf8(body).unwrap()));
}
