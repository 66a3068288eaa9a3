//! `latchkey-server import` with a real server, and programs that are killed during an import.

use std::{fs, path::PathBuf, process::ExitStatus, time::Duration};

use http::StatusCode;
use latchkey_tests::{
    builders::Webhook,
    eventually,
    passwords::WRONG_PASSWORD,
    postgres::write_private,
    process::{self, Process, Program},
};
use serde_json::{Value, json};

use super::AdministrationTest;
use crate::fault_support::unlimited_app;

/// An import of a few thousand users takes seconds; a loaded machine takes longer.
const IMPORT_LIMIT: Duration = Duration::from_secs(120);
/// The beginning of a password hash that the service itself computes.
const NATIVE_PREFIX: &str = "$argon2id$v=19$m=19456,t=2,p=1$";
/// The maximum number of lines that the program sends in one request.
const BATCH: i64 = 1000;

/// A process of the import program, running or ended. Its output is appended to a log.
struct Import {
    process: Process,
    log: PathBuf,
}

/// Starts an import as the ServiceAccount `imports`.
fn start_import(test: &AdministrationTest, format: &str, files: &[PathBuf]) -> Import {
    let dir = process::fresh_dir("import");
    let (token, log) = (dir.join("token"), dir.join("import.log"));
    write_private(&token, &test.token("imports")).unwrap();
    let server = process::find_built_program("latchkey-server").unwrap();
    let program = Program::new("latchkey-server import", server, &log)
        .args(["import", format])
        .args(files.iter().map(|file| file.display().to_string()))
        .args(["--app", test.test_app.id(), "--server", &format!("http://{}", test.address())])
        .path_arg("--token-file", &token);
    Import { process: program.start().unwrap(), log }
}

// === impl Import ===

impl Import {
    async fn wait(&self) -> ExitStatus {
        let ended = tokio::time::timeout(IMPORT_LIMIT, self.process.wait_for_exit()).await;
        ended.unwrap_or_else(|_| panic!("the import has not ended: {}", self.output()))
    }

    fn output(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until the import has ended, and asserts the exit code. Returns the output.
    async fn expect(&self, code: i32) -> String {
        let status = self.wait().await;
        assert_eq!(status.code(), Some(code), "{}", self.output());
        self.output()
    }
}

fn line(prefix: &str, number: i64) -> Value {
    json!({ "external_id": format!("{prefix}:{number}"), "email": format!("{prefix}-{number}@example.com") })
}

#[tokio::test]
async fn users_from_keycloak_log_in_with_their_passwords() {
    let test = AdministrationTest::start_with(unlimited_app("shop"), &[]).await;
    let (admin, test_app) = (test.admin(), &test.test_app);
    let fixtures = process::root().join("import/tests/fixtures/keycloak");
    let files = ["shop-users-0.json", "shop-users-1.json"].map(|name| fixtures.join(name));
    // One user has neither an email address nor an identity, so it is not imported.
    let output = start_import(&test, "keycloak", &files).expect(1).await;
    assert!(output.contains("created: 6") && output.contains("refused: 0"), "{output}");
    assert!(!output.contains("$argon2") && !output.contains(&test.token("imports")), "{output}");
    assert_eq!(test_app.query_number("SELECT count(*) FROM users").await, 6);
    assert_eq!(test_app.query_number("SELECT count(*) FROM outbox").await, 0, "an import sends no mail");

    // The README of the fixtures documents these passwords.
    for (name, password, algorithm, status) in [
        ("ada", "a quiet harbour at noon", "argon2id", StatusCode::OK),
        ("grace", "a moth in the relay", "pbkdf2-sha256", StatusCode::OK),
        ("alan", "seven miles before breakfast", "pbkdf2-sha512", StatusCode::OK),
        ("margaret", "a stack of printed code", "argon2id", StatusCode::OK),
        ("edsger", "the shortest path home", "pbkdf2-sha1", StatusCode::FORBIDDEN),
    ] {
        let email = format!("{name}@example.com");
        let user = || async {
            let found = admin.get(&format!("users?email={name}%40example.com")).await.expect(StatusCode::OK);
            found.body["users"][0].clone()
        };
        let imported = user().await;
        assert_eq!(imported["password_algorithm"], algorithm, "{imported}");
        assert!(imported["external_id"].as_str().unwrap().starts_with("keycloak:shop:"), "{imported}");
        let native = format!(
            "SELECT count(*) FROM users WHERE email = '{email}' AND password_hash LIKE '{NATIVE_PREFIX}%'
             AND foreign_hash IS NULL AND foreign_hash_at IS NULL"
        );
        assert_eq!(test_app.query_number(&native).await, 0, "{name}: the hash is foreign");
        let client = test_app.client();
        let wrong = client.login(test_app.id(), &email, WRONG_PASSWORD).await;
        wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
        for attempt in ["first", "second"] {
            let login = client.login(test_app.id(), &email, password).await;
            assert_eq!(login.status, status, "{name}, {attempt} login: {}", login.text);
        }
        if status == StatusCode::OK {
            assert_eq!(test_app.query_number(&native).await, 1, "{name}: the first login replaces the hash");
            assert_eq!(user().await["version"], imported["version"], "a new hash is no change of the user");
        }
    }
    let linus = admin.get("users?email=linus%40example.com").await.expect(StatusCode::OK);
    assert_eq!(linus.body["users"][0]["has_password"], false);

    let again = start_import(&test, "keycloak", &files).expect(1).await;
    assert!(again.contains("created: 0") && again.contains("unchanged: 6"), "{again}");
    assert_eq!(test_app.query_number("SELECT count(*) FROM users").await, 6);
}

#[tokio::test]
async fn repeating_a_killed_import_completes_it_without_duplicates() {
    let test = AdministrationTest::start_with(unlimited_app("shop"), &[]).await;
    let test_app = &test.test_app;
    let users = 12 * BATCH;
    let file = process::fresh_dir("users").join("users.ndjson");
    let lines: String = (0..users).map(|number| format!("{}\n", line("crm", number))).collect();
    fs::write(&file, lines).unwrap();
    let files = [file];
    let count_users = "SELECT count(*) FROM users";

    let import = start_import(&test, "ndjson", &files);
    eventually("a batch is imported", IMPORT_LIMIT, || async {
        assert!(import.process.exit_status().is_none(), "the import has ended: {}", import.output());
        (test_app.query_number(count_users).await >= BATCH).then_some(())
    })
    .await;
    import.process.kill();
    let imported = test_app.query_number(count_users).await;
    assert!(imported < users, "the import was killed too late");
    assert_eq!(imported % BATCH, 0, "a batch is imported completely or not at all");

    let output = start_import(&test, "ndjson", &files).expect(0).await;
    assert!(output.contains(&format!("Users in the input: {users}")) && output.contains("refused: 0"), "{output}");
    assert_eq!(test_app.query_number(count_users).await, users);
    assert_eq!(test_app.query_number("SELECT count(DISTINCT external_id) FROM users").await, users);
    let created = "SELECT sum((detail ->> 'created')::int)::bigint FROM audit_events WHERE kind = 'users_imported'";
    assert_eq!(test_app.query_number(created).await, users, "the events count each user once");
}

#[tokio::test]
async fn a_batch_is_imported_completely_or_not_at_all_if_the_server_is_killed() {
    let webhook = Webhook::pull("sync", "shop", "fetches", &["users.imported"]);
    let test = AdministrationTest::start_with(unlimited_app("shop").webhook(&webhook), &[]).await;
    let (importer, test_app) = (test.administrator("imports"), &test.test_app);
    let server = test_app.stack.server();
    // The server is killed while it reads the lines, while it writes them, or afterwards.
    let mut lost = 0;
    for (round, kill_after_ms) in [20_u64, 60, 120, 250, 500, 1000].into_iter().enumerate() {
        let prefix = format!("round-{round}");
        let lines: String = (0..BATCH).map(|number| format!("{}\n", line(&prefix, number))).collect();
        let batch = importer.try_send(importer.import_request("source=crm", lines.clone()));
        let killed = async {
            tokio::time::sleep(Duration::from_millis(kill_after_ms)).await;
            server.kill();
        };
        let (response, ()) = tokio::join!(batch, killed);
        match response {
            Ok(response) => assert_eq!(response.expect(StatusCode::OK).integer("created"), BATCH),
            Err(_) => lost += 1,
        }
        server.start_ready().await.unwrap();
        // If the transaction of the killed server still runs, the repeated batch waits for it.
        let again = test.administrator("imports").import_text("source=crm", lines).await.expect(StatusCode::OK);
        let (created, unchanged) = (again.integer("created"), again.integer("unchanged"));
        assert!(created == 0 || created == BATCH, "round {round}: {created} of {BATCH} users were missing");
        assert_eq!(created + unchanged, BATCH, "round {round}");
        let batches = i64::try_from(round + 1).unwrap();
        assert_eq!(test_app.query_number("SELECT count(*) FROM users").await, batches * BATCH);
        let events = "SELECT count(*) FROM audit_events WHERE kind = 'users_imported'";
        assert_eq!(test_app.query_number(events).await, batches, "round {round}: one event per batch");
        assert_eq!(test_app.query_number("SELECT count(*) FROM webhook_events").await, batches, "round {round}");
    }
    assert!(lost > 0, "no import was cut off");
}
