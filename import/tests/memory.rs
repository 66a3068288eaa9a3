//! The memory of an import does not depend on the size of its input.
//!
//! The inputs are larger than the limit of 64 MiB, so an import that kept an input or its users in memory would exceed
//! the limit. The peak covers the whole process, including the server of the test.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "import/support.rs"]
#[expect(dead_code, reason = "this program uses a part of the module")]
mod support;

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
};

use latchkey_import::Outcome;

use support::{listen, reply_created, run};

const LIMIT_KIB: u64 = 64 * 1024;
const MIB: u64 = 1024 * 1024;
/// Bytes of padding in a row, so that the row is about as large as in a real export.
const PADDING: usize = 600;

/// The largest resident set of this process so far.
fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn an_import_needs_at_most_64_mib_for_any_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let file = |name: &str| BufWriter::new(File::create(path(name)).unwrap());
    let padding = "x".repeat(PADDING);
    // In the import of the format gotrue, checks that each user has the identity from the file of identities.
    let url = listen(|_, request| {
        let is_join = request.target.contains("source=gotrue");
        let is_joined =
            |line: &serde_json::Value| line["identities"][0]["subject"] == line["external_id"].as_str().unwrap()[7..];
        assert!(!is_join || request.lines().iter().all(is_joined));
        reply_created(&request)
    });
    fs::write(path("token"), "token").unwrap();
    let token = path("token");
    let target = ["--app", "shop", "--token-file", &token, "--server", &url];

    let mut realm = file("realm.json");
    write!(realm, r#"{{"realm":"shop","clients":[{{"a":"{padding}"}}],"users":["#).unwrap();
    let users = 85_000;
    for number in 0..users {
        let comma = if number == 0 { "" } else { "," };
        write!(
            realm,
            r#"{comma}{{"id":"{number}","email":"user-{number}@example.com","enabled":true,"attributes":{{"a":["{padding}"]}},
            "credentials":[{{"type":"password","secretData":"{{\"value\":\"AAAAAAAAAAAAAAAAAAAAAA==\",\"salt\":\"AAAA\"}}",
            "credentialData":"{{\"hashIterations\":27500,\"algorithm\":\"pbkdf2-sha256\"}}"}}]}}"#
        )
        .unwrap();
    }
    write!(realm, "]}}").unwrap();
    drop(realm);
    let input = path("realm.json");
    assert!(fs::metadata(&input).unwrap().len() > 70 * MIB);
    let imported = run(&[&["keycloak", &input, "--metadata"][..], &target].concat());
    assert_eq!(imported.outcome, Outcome::Complete, "{}", imported.log);
    assert!(imported.out.contains(&format!("  created: {users}\n")), "{}", imported.out);
    fs::remove_file(&input).unwrap();

    // The order of the ids differs between the two files, so that only a join of the complete files finds the pairs.
    let users = 55_000_u64;
    let mut rows = file("users.ndjson");
    for number in 0..users {
        let id = number * 7_919 % users;
        writeln!(
            rows,
            r#"{{"id":"{id}","email":"user-{id}@example.com","encrypted_password":"","raw_user_meta_data":{{"a":"{padding}"}}}}"#
        )
        .unwrap();
    }
    drop(rows);
    let mut rows = file("identities.ndjson");
    for id in 0..users {
        writeln!(
            rows,
            r#"{{"user_id":"{id}","provider":"google","provider_id":"{id}","identity_data":{{"a":"{padding}"}}}}"#
        )
        .unwrap();
    }
    drop(rows);
    let inputs = [path("users.ndjson"), path("identities.ndjson")];
    assert!(inputs.iter().map(|input| fs::metadata(input).unwrap().len()).sum::<u64>() > 70 * MIB);
    let imported = run(&[&["gotrue", &inputs[1], &inputs[0], "--map", "google=google"][..], &target].concat());
    assert_eq!(imported.outcome, Outcome::Complete, "{}", imported.log);
    assert!(imported.out.contains(&format!("  created: {users}\n")), "{}", imported.out);
    let peak = peak_kib();
    println!("peak memory: {} MiB", peak / 1024);
    assert!(peak <= LIMIT_KIB, "{peak} KiB");
}
