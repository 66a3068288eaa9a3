//! The password hash parameters that an installation chooses (specification: Limits, Password hashing).

use http::StatusCode;
use latchkey_tests::{
    client::ApiClient,
    passwords::{PASSWORD, WRONG_PASSWORD},
    stack::Stack,
};

use crate::support::{TestApp, app};

const EMAIL: &str = "ada@example.com";
const DEFAULT_PREFIX: &str = "$argon2id$v=19$m=19456,t=2,p=1$";
const STRONGER_PREFIX: &str = "$argon2id$v=19$m=19456,t=3,p=1$";

async fn stored_hash(test_app: &TestApp) -> String {
    let mut connection = test_app.stack.database.connect().await.unwrap();
    sqlx::query_scalar("SELECT password_hash FROM users").fetch_one(&mut connection).await.unwrap()
}

#[tokio::test]
async fn a_server_with_other_parameters_replaces_the_hash_at_the_next_login() {
    let test_app = TestApp::start().await;
    let first = test_app.register_and_confirm(EMAIL).await;
    let epoch = test_app.epoch_and_verified(EMAIL).await;
    let old = stored_hash(&test_app).await;
    assert!(old.starts_with(DEFAULT_PREFIX));

    let second = test_app.stack.start_server_with_args(&["--hashing-iterations", "3"]).await.unwrap();
    let second = ApiClient::new(second.public);
    let wrong = second.login(test_app.id(), EMAIL, WRONG_PASSWORD).await;
    wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    let unknown = second.login(test_app.id(), "nobody@example.com", PASSWORD).await;
    unknown.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    assert_eq!(stored_hash(&test_app).await, old, "a wrong password replaces nothing");
    second.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let stronger = stored_hash(&test_app).await;
    assert!(stronger.starts_with(STRONGER_PREFIX));
    second.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    assert_eq!(stored_hash(&test_app).await, stronger, "the hash is replaced once");

    // The first server replaces the hash again, as during a rolling update, or after the installation has gone back to
    // the default.
    let wrong = first.login(test_app.id(), EMAIL, WRONG_PASSWORD).await;
    wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    assert_eq!(stored_hash(&test_app).await, stronger);
    first.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    assert!(stored_hash(&test_app).await.starts_with(DEFAULT_PREFIX));
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, epoch, "the new hashes log nobody out");
}

#[tokio::test]
async fn a_server_does_not_start_if_its_hashing_threads_need_more_than_its_memory_limit() {
    let args = ["--memory-limit", "128Mi", "--hashing-memory-mib", "128"];
    let started = Stack::builder().app(&app()).args(args).try_start().await;
    let error = format!("{:#}", started.err().expect("it does not start"));
    assert!(error.contains("of the memory limit of 128 MiB only 40 MiB are for hashing"), "{error}");
}
