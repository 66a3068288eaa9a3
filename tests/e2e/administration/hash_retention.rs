//! `spec.password.foreignHashRetentionDays`, as servers apply it (specification: Accounts, Foreign hashes).

use std::time::Duration;

use http::StatusCode;
use latchkey_tests::{builders::Webhook, eventually, passwords::PASSWORD};
use serde_json::{Value, json};

use super::AdministrationTest;
use crate::fault_support::unlimited_app;

/// Each server checks every 15 to 45 s whether the hourly removal is due; a loaded machine takes longer.
const REMOVAL_WAIT_LIMIT: Duration = Duration::from_secs(180);
/// bcrypt of `U*U`, from the test vectors of Openwall's crypt_blowfish.
const BCRYPT: &str = "$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW";

#[tokio::test]
async fn a_foreign_hash_is_removed_after_its_retention_unless_a_login_has_replaced_it() {
    let app = unlimited_app("shop").set("/password/foreignHashRetentionDays", 30).webhook(&Webhook::pull(
        "sync",
        "shop",
        "fetches",
        &["user.password_changed"],
    ));
    let test = AdministrationTest::start_with(app, &[]).await;
    let (admin, test_app, client) = (test.admin(), &test.test_app, test.test_app.client());
    let id = test_app.id();
    let lines = ["old", "young", "replaced"].map(|name| {
        let email = format!("{name}@example.com");
        json!({ "external_id": name, "email": email, "email_verified": true, "password_hash": BCRYPT })
    });
    let imported = admin.import("source=old", &lines).await.expect(StatusCode::OK);
    assert_eq!(imported.integer("created"), 3, "{}", imported.text);
    let native =
        admin.create(&json!({ "email": "native@example.com", "email_verified": true, "password": PASSWORD })).await;
    client.login(id, "replaced@example.com", "U*U").await.expect(StatusCode::OK);
    let user = async |name: &str| {
        let found = admin.get(&format!("users?email={name}%40example.com")).await.expect(StatusCode::OK);
        found.body["users"][0].clone()
    };
    let before = user("old").await;
    assert_eq!((&before["password_algorithm"], &before["has_password"]), (&json!("bcrypt"), &json!(true)));

    // Moves the imports 31 and 29 days into the past. The age of the accounts has no effect.
    test_app
        .sql(
            "UPDATE users SET foreign_hash_at = now() - interval '31 days' WHERE email LIKE 'old@%';
             UPDATE users SET foreign_hash_at = now() - interval '29 days' WHERE email LIKE 'young@%';
             UPDATE users SET created_at = now() - interval '400 days';
             UPDATE audit_upkeep SET next_at = '-infinity'",
        )
        .await;
    let after = eventually("the hash is removed", REMOVAL_WAIT_LIMIT, || async {
        let user = user("old").await;
        (user["has_password"] == false).then_some(user)
    })
    .await;
    assert_eq!(after["password_algorithm"], Value::Null);
    assert_eq!(after["version"], json!(before["version"].as_i64().unwrap() + 1));
    let refused = client.login(id, "old@example.com", "U*U").await;
    refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    for (name, password) in [("young", "U*U"), ("replaced", "U*U"), ("native", PASSWORD)] {
        let login = client.login(id, &format!("{name}@example.com"), password).await;
        assert_eq!(login.status, StatusCode::OK, "{name}: {}", login.text);
    }
    let native = admin.get(&format!("users/{native}")).await.expect(StatusCode::OK);
    assert_eq!(native.integer("version"), 1);

    let events = admin.get("events?kind=password_removed").await.expect(StatusCode::OK);
    let events = events.body["events"].as_array().unwrap().clone();
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!((&events[0]["user_id"], &events[0]["ip"]), (&after["id"], &Value::Null));
    let pulled = test.administrator("fetches").get("webhooks/sync/events").await.expect(StatusCode::OK);
    let pulled = pulled.body["events"].as_array().unwrap().clone();
    assert_eq!(pulled.len(), 1, "{pulled:?}");
    assert_eq!((&pulled[0]["type"], &pulled[0]["id"]), (&json!("user.password_changed"), &events[0]["id"]));
    assert_eq!(pulled[0]["data"]["user_id"], after["id"]);

    // The user sets a new password with a code from a mail.
    let code = test_app.request_reset_code("old@example.com", 1).await;
    client.confirm_password(id, "old@example.com", &code, PASSWORD).await.expect(StatusCode::OK);
    client.login(id, "old@example.com", PASSWORD).await.expect(StatusCode::OK);
}
