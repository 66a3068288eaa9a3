//! Password hashes of other services (specification: Accounts, Foreign hashes): users log in with each kind, and the
//! first login replaces the hash.

use std::collections::BTreeSet;

use http::StatusCode;
use latchkey_tests::{
    builders::App,
    passwords::{PASSWORD, WRONG_PASSWORD},
};
use serde::Deserialize;
use serde_json::json;

use crate::support::{TestApp, app};

const EMAIL: &str = "ada@example.com";
/// The beginning of a password hash that the service itself computes.
const NATIVE_PREFIX: &str = "$argon2id$v=19$m=19456,t=2,p=1$";

/// A hash that another implementation computed (tests/foreign-hashes), and its class (algorithm and cost).
#[derive(Deserialize)]
struct Vector {
    source: String,
    password: String,
    hash: String,
    class: String,
}

fn vectors() -> Vec<Vector> {
    serde_json::from_str(include_str!("../foreign-hashes/vectors.json")).unwrap()
}

/// An App without the limits that many logins in a row would reach.
fn unlimited_app() -> App {
    ["loginsPerClient", "loginFailuresPerClient", "loginFailuresPerAccount", "loginFailuresPerClientOverall"]
        .into_iter()
        .fold(app(), |app, limit| app.limit(limit, &[(100_000, 60)]))
}

/// Stores this hash for all users, and this class as the App's only class, as an import does.
async fn import_hash(test_app: &TestApp, hash: &str, class: &str) {
    test_app
        .sql(&format!(
            "UPDATE users SET password_hash = '{hash}', foreign_hash = '{class}', foreign_hash_at = now();
             DELETE FROM hash_classes;
             INSERT INTO hash_classes (app_id, class, weight) VALUES ('{}', '{class}', 1)",
            test_app.id()
        ))
        .await;
}

/// The stored hash, and whether it is marked as foreign.
async fn stored_hash(test_app: &TestApp) -> (String, bool) {
    let mut connection = test_app.stack.database.connect().await.unwrap();
    let row =
        sqlx::query_as("SELECT password_hash, foreign_hash IS NOT NULL OR foreign_hash_at IS NOT NULL FROM users");
    row.fetch_one(&mut connection).await.unwrap()
}

#[tokio::test]
async fn the_first_login_replaces_a_foreign_hash_of_each_kind() {
    let test_app = TestApp::start_with(unlimited_app()).await;
    let client = test_app.register_and_confirm(EMAIL).await;
    let epoch = test_app.epoch_and_verified(EMAIL).await;
    // The App has no parameters of a Firebase project, so it cannot check Firebase hashes.
    let usable = |vector: &Vector| !vector.password.is_empty() && !vector.class.starts_with("firebase");
    let mut kinds = BTreeSet::new();
    for vector in vectors().iter().filter(|vector| usable(vector)) {
        import_hash(&test_app, &vector.hash, &vector.class).await;
        let wrong = client.login(test_app.id(), EMAIL, WRONG_PASSWORD).await;
        wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
        assert_eq!(stored_hash(&test_app).await, (vector.hash.clone(), true), "a wrong password replaces nothing");

        let what = format!("{} {}", vector.source, vector.class);
        let login = client.login(test_app.id(), EMAIL, &vector.password).await;
        assert_eq!(login.status, StatusCode::OK, "{what}");
        let (hash, is_foreign) = stored_hash(&test_app).await;
        assert!(hash.starts_with(NATIVE_PREFIX) && !is_foreign, "{what}");

        client.login(test_app.id(), EMAIL, &vector.password).await.expect(StatusCode::OK);
        assert_eq!(stored_hash(&test_app).await, (hash, false), "{what}: the hash is replaced once");
        kinds.insert(vector.class.split('$').next().unwrap().to_owned());
    }
    let expected =
        ["argon2d", "argon2i", "argon2id", "bcrypt", "pbkdf2-sha1", "pbkdf2-sha256", "pbkdf2-sha512", "scrypt"];
    assert!(kinds.iter().eq(expected.iter()), "{kinds:?}");
    assert_eq!(test_app.epoch_and_verified(EMAIL).await, epoch, "the new hash logs nobody out");
    let log = test_app.stack.server().read_log();
    for vector in vectors() {
        assert!(!log.contains(&vector.hash), "the log contains a hash of {}", vector.source);
    }
}

#[tokio::test]
async fn a_firebase_hash_matches_no_password_without_the_parameters_of_its_project() {
    let test_app = TestApp::start_with(unlimited_app()).await;
    let client = test_app.register_and_confirm(EMAIL).await;
    let vector = vectors().into_iter().find(|vector| vector.class.starts_with("firebase")).unwrap();
    import_hash(&test_app, &vector.hash, &vector.class).await;
    let login = client.login(test_app.id(), EMAIL, &vector.password).await;
    login.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    assert_eq!(stored_hash(&test_app).await, (vector.hash, true));
}

#[tokio::test]
async fn a_user_without_a_foreign_hash_can_log_in_to_an_app_with_foreign_hashes() {
    let test_app = TestApp::start_with(unlimited_app()).await;
    let client = test_app.register_and_confirm(EMAIL).await;
    let hash = stored_hash(&test_app).await;
    for vector in vectors().iter().take(4) {
        let class = format!(
            "INSERT INTO hash_classes (app_id, class, weight) VALUES ('{}', '{}', 1) ON CONFLICT DO NOTHING",
            test_app.id(),
            vector.class
        );
        test_app.sql(&class).await;
    }
    client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let wrong = client.login(test_app.id(), EMAIL, WRONG_PASSWORD).await;
    wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    let unknown = client.login(test_app.id(), "nobody@example.com", PASSWORD).await;
    unknown.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    assert_eq!(stored_hash(&test_app).await, hash);
}

#[tokio::test]
async fn a_user_with_a_foreign_hash_who_is_logged_in_can_change_the_password() {
    let test_app = TestApp::start_with(unlimited_app()).await;
    let client = test_app.register_and_confirm(EMAIL).await;
    let login = client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let vector = vectors().into_iter().find(|vector| vector.class.starts_with("scrypt")).unwrap();
    import_hash(&test_app, &vector.hash, &vector.class).await;
    let signed_in = client.with_token(test_app.id(), login.string("token"));
    let change = async |current: &str| {
        let body = json!({ "current_password": current, "password": "harbour quilt 7 lantern" });
        signed_in.post("user/password", &body).await
    };
    let wrong = change(WRONG_PASSWORD).await;
    wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    change(&vector.password).await.expect(StatusCode::OK);
    let (hash, is_foreign) = stored_hash(&test_app).await;
    assert!(hash.starts_with(NATIVE_PREFIX) && !is_foreign);
    client.login(test_app.id(), EMAIL, "harbour quilt 7 lantern").await.expect(StatusCode::OK);
}

#[tokio::test]
async fn an_unverified_account_with_a_foreign_hash_becomes_contested_when_it_is_registered_again() {
    let test_app = TestApp::start_with(unlimited_app()).await;
    test_app.register(EMAIL).await;
    let vector = vectors().into_iter().find(|vector| vector.password.len() > 20).unwrap();
    import_hash(&test_app, &vector.hash, &vector.class).await;
    let contested = "SELECT count(*) FROM users WHERE contested";
    assert_eq!(test_app.query_number(contested).await, 0);
    let again = test_app.client().register(test_app.id(), "Ada Lovelace", EMAIL, &vector.password).await;
    again.expect(StatusCode::OK);
    assert_eq!(test_app.query_number(contested).await, 1, "the right password is not checked");
    // Confirming the address with the mailed code removes the foreign hash.
    let code = test_app.code(EMAIL, 1).await;
    let confirmed = test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    assert_eq!(confirmed.body["password_required"], true);
    let left = "SELECT count(*) FROM users
                WHERE password_hash IS NOT NULL OR foreign_hash IS NOT NULL OR foreign_hash_at IS NOT NULL";
    assert_eq!(test_app.query_number(left).await, 0);
}
