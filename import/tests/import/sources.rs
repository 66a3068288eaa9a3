//! Converts the fixture of each import format, and compares the result with the expected lines and the expected report.

use std::fs;

use latchkey_import::Outcome;
use serde_json::Value;

use crate::support::{fixture, run};

/// Converts files of a fixture. Returns the outcome, the lines, the report and the log.
fn convert(source: &str, files: &[&str], options: &[&str]) -> (Outcome, Vec<Value>, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("lines");
    let files: Vec<String> = files.iter().map(|file| fixture(file).to_str().unwrap().to_owned()).collect();
    let mut arguments = vec![source, "--output", output.to_str().unwrap()];
    arguments.extend(files.iter().map(String::as_str));
    arguments.extend(options);
    let run = run(&arguments);
    let lines = fs::read_to_string(&output).unwrap_or_default();
    let lines = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (run.outcome, lines, run.out, run.log)
}

/// Converts the files, and compares the result with `expected.ndjson` and `expected-report.txt`. With
/// `UPDATE_FIXTURES=1`, writes both files instead.
fn convert_and_compare(source: &str, files: &[&str], options: &[&str]) -> (Outcome, String) {
    let (outcome, lines, report, log) = convert(source, files, options);
    let lines_file = fixture(&format!("{source}/expected.ndjson"));
    let report_file = fixture(&format!("{source}/expected-report.txt"));
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        fs::write(&lines_file, text).unwrap();
        fs::write(&report_file, &report).unwrap();
    }
    let expected = fs::read_to_string(&lines_file).unwrap();
    let expected: Vec<Value> = expected.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines, expected, "{source}");
    assert_eq!(report, fs::read_to_string(&report_file).unwrap(), "{source}");
    (outcome, log)
}

const GOOGLE: [&str; 2] = ["--map", "google=google"];

#[test]
fn keycloak_users_are_converted_from_separate_files_and_from_one() {
    let files = ["keycloak/shop-users-0.json", "keycloak/shop-users-1.json"];
    let (outcome, log) = convert_and_compare("keycloak", &files, &GOOGLE);
    assert_eq!(outcome, Outcome::SomeRefused);
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(log.ends_with(": has neither an email address nor a mapped identity\n"), "{log}");
    // The file of the whole realm has the same users.
    let (_, whole, report, _) = convert("keycloak", &["keycloak/shop-realm-and-users.json"], &GOOGLE);
    let (_, parts, expected, _) = convert("keycloak", &files, &GOOGLE);
    assert_eq!((whole, report), (parts, expected));
}

#[test]
fn gotrue_users_are_converted_from_files_in_any_order() {
    let options = ["--map", "google=google", "--map", "azure=microsoft"];
    let (outcome, _) = convert_and_compare("gotrue", &["gotrue/users.ndjson", "gotrue/identities.ndjson"], &options);
    assert_eq!(outcome, Outcome::SomeRefused);
    convert_and_compare("gotrue", &["gotrue/identities.ndjson", "gotrue/users.ndjson"], &options);
}

#[test]
fn kratos_users_are_converted() {
    let files = ["kratos/identities.json", "kratos/identities-page-2.json"];
    assert_eq!(convert_and_compare("kratos", &files, &GOOGLE).0, Outcome::SomeRefused);
}

#[test]
fn firebase_users_are_converted() {
    let options = ["--map", "google.com=google", "--map", "github.com=github"];
    assert_eq!(convert_and_compare("firebase", &["firebase/users.json"], &options).0, Outcome::SomeRefused);
}

#[test]
fn auth0_users_are_converted_from_files_in_any_order() {
    let options = ["--map", "google-oauth2=google", "--map", "company=company", "--metadata"];
    let (outcome, log) = convert_and_compare("auth0", &["auth0/users.ndjson", "auth0/hashes.ndjson"], &options);
    assert_eq!((outcome, log.as_str()), (Outcome::Complete, ""));
    convert_and_compare("auth0", &["auth0/hashes.ndjson", "auth0/users.ndjson"], &options);
}

#[test]
fn cognito_users_are_converted_from_json_and_csv() {
    let options = ["--map", "Google=google", "--metadata"];
    assert_eq!(
        convert_and_compare("cognito", &["cognito/users.json", "cognito/users.csv"], &options).0,
        Outcome::SomeRefused
    );
}

#[test]
fn users_of_ndjson_files_are_converted() {
    assert_eq!(
        convert_and_compare("ndjson", &["ndjson/users.ndjson"], &["--map", "google=google-2"]).0,
        Outcome::Complete
    );
}

#[test]
fn all_addresses_are_verified_with_the_flag_addresses_verified() {
    let (_, lines, ..) = convert("kratos", &["kratos/identities.json"], &["--addresses-verified"]);
    assert!(lines.iter().all(|line| line["email_verified"] == true), "{lines:?}");
    let (_, lines, ..) = convert("ndjson", &["ndjson/users.ndjson"], &["--addresses-verified"]);
    assert!(lines.iter().all(|line| line["email_verified"] == true), "{lines:?}");
}

#[test]
fn attributes_become_metadata_on_request() {
    let (_, lines, report, _) = convert("keycloak", &["keycloak/shop-users-0.json"], &["--metadata"]);
    assert_eq!(lines[0]["metadata"], serde_json::json!({ "team": ["engines", "notes"] }));
    assert!(!report.contains("--metadata"), "{report}");
    let (_, lines, ..) = convert("kratos", &["kratos/identities.json"], &["--metadata"]);
    let expected =
        serde_json::json!({ "metadata_public": { "plan": "free" }, "traits": { "email": "edsger@example.com" } });
    assert_eq!(lines[3]["metadata"], expected);
    let (_, lines, ..) = convert("firebase", &["firebase/users.json"], &["--metadata"]);
    assert_eq!(lines[2]["metadata"], serde_json::json!({ "custom_claims": { "role": "editor" } }));
    let (_, lines, ..) = convert("gotrue", &["gotrue/users.ndjson"], &["--metadata"]);
    let margaret = lines.iter().find(|line| line["email"] == "margaret@example.com").unwrap();
    assert_eq!(margaret["metadata"]["user_metadata"], serde_json::json!({ "team": "apollo" }));
}

#[test]
fn other_kratos_traits_can_hold_address_and_name() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    fs::write(&input, r#"[{"id":"1","traits":{"contact":{"mail":"a@example.com"},"display":"A"}}]"#).unwrap();
    let (input, output) = (input.to_str().unwrap(), output.to_str().unwrap());
    let run = run(&["kratos", input, "--output", output, "--email-trait", "/contact/mail", "--name-trait", "/display"]);
    assert_eq!(run.outcome, Outcome::Complete);
    let line = fs::read_to_string(output).unwrap();
    assert_eq!(line, "{\"external_id\":\"kratos:1\",\"email\":\"a@example.com\",\"name\":\"A\"}\n");
}

#[test]
fn a_file_that_is_no_export_ends_the_import_and_leaves_no_output() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    for (source, text, reason) in [
        ("keycloak", r#"{"users":[{"id":"1"}]}"#, "has users before the name of the realm"),
        ("keycloak", "{}", "has no member realm"),
        ("keycloak", r#"[{"realm":"master"},{"realm":"shop"}]"#, "has users of another realm"),
        ("kratos", r#"{"id":"1"}"#, "has neither an array nor a member identities"),
        ("firebase", "{}", "has no member users"),
        ("cognito", "{}", "has neither an array nor a member Users"),
        ("cognito", "a,b\n1,2\n", "has no columns email"),
        ("cognito", "sub,email\n\"1\n", ""),
        ("firebase", "{\"users\":[{\"secret\":}]}", "is not JSON, at line 1"),
    ] {
        fs::write(&input, text).unwrap();
        let run = run(&[source, input.to_str().unwrap(), "--output", output.to_str().unwrap()]);
        if reason.is_empty() {
            assert_eq!(run.outcome, Outcome::SomeRefused, "{text}: {}", run.log);
            fs::remove_file(&output).unwrap();
            continue;
        }
        assert_eq!(run.outcome, Outcome::Aborted, "{source} {text}");
        assert!(run.log.contains(reason) && !run.log.contains("secret"), "{source} {text}: {}", run.log);
        assert!(!output.exists(), "{source} {text}");
    }
}

#[test]
fn a_record_of_an_unexpected_form_is_counted_and_the_others_are_converted() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    for (source, text) in [
        ("keycloak", r#"{"realm":"shop","users":[{"id":7},{"id":"1","email":"a@example.com"}]}"#),
        ("firebase", r#"{"users":[[],{"localId":"1","email":"a@example.com"}]}"#),
        ("kratos", r#"[1,{"id":"1","traits":{"email":"a@example.com"}}]"#),
        ("cognito", r#"{"Users":[{},{"Username":"1","Attributes":[{"Name":"email","Value":"a@example.com"}]}]}"#),
        ("cognito", "sub,email\n1\n1,a@example.com\n"),
        ("gotrue", "{}\n{\"id\":\"1\",\"encrypted_password\":null,\"email\":\"a@example.com\"}\n"),
        ("auth0", "secret\n{\"user_id\":\"auth0|1\",\"email\":\"a@example.com\"}\n"),
        ("ndjson", "[]\n{\"external_id\":\"1\",\"email\":\"a@example.com\"}\n"),
    ] {
        fs::write(&input, text).unwrap();
        let run = run(&[source, input.to_str().unwrap(), "--output", output.to_str().unwrap()]);
        assert_eq!(run.outcome, Outcome::SomeRefused, "{source}: {}", run.log);
        assert!(run.out.contains("  written: 1\n") && run.out.contains("  not readable as a user: 1\n"), "{}", run.out);
        assert!(run.log.contains("is not a user in the expected form") && !run.log.contains("secret"), "{}", run.log);
        assert!(fs::read_to_string(&output).unwrap().contains("a@example.com"));
        fs::remove_file(&output).unwrap();
    }
}

#[test]
fn an_id_that_is_too_long_to_join_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let id = "x".repeat(1025);
    for (source, text) in [
        ("gotrue", format!(r#"{{"id":"{id}","encrypted_password":null,"email":"a@example.com"}}"#)),
        ("auth0", format!(r#"{{"user_id":"{id}","email":"a@example.com"}}"#)),
    ] {
        fs::write(&input, text).unwrap();
        let run = run(&[source, input.to_str().unwrap(), "--output", output.to_str().unwrap()]);
        assert_eq!(run.outcome, Outcome::SomeRefused, "{source}: {}", run.log);
        assert_eq!(fs::read_to_string(&output).unwrap(), "");
        fs::remove_file(&output).unwrap();
    }
}

#[test]
fn a_line_above_the_limit_of_the_server_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let name = "x".repeat(70_000);
    fs::write(&input, format!(r#"{{"users":[{{"localId":"1","email":"a@example.com","displayName":"{name}"}}]}}"#))
        .unwrap();
    let run = run(&["firebase", input.to_str().unwrap(), "--output", output.to_str().unwrap()]);
    assert_eq!(run.outcome, Outcome::SomeRefused);
    assert_eq!(run.log, "firebase:1: too_long (the line for the server is above 64 KiB)\n");
}
