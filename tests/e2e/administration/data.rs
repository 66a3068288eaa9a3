//! Exports, events and dead letters.

use http::StatusCode;
use latchkey_tests::passwords::PASSWORD;
use serde_json::{Value, json};

use super::AdministrationTest;

const EMAIL: &str = "ada@example.com";

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test]
async fn all_users_are_exported_in_lines_that_can_be_imported() {
    let test = AdministrationTest::start().await;
    let admin = test.admin();
    let imported: Vec<_> = (0..1000)
        .map(
            |number| json!({ "external_id": format!("crm:{number:04}"), "email": format!("user{number}@example.com") }),
        )
        .collect();
    admin.import("source=crm", &imported).await.expect(StatusCode::OK);
    let ada = admin
        .create(&json!({ "email": EMAIL, "email_verified": true, "name": "Ada", "password": PASSWORD, "metadata": { "a": 1 } }))
        .await;
    let export = admin.get("export?hashes=true").await.expect(StatusCode::OK);
    assert_eq!(export.header("content-type"), Some("application/x-ndjson"));
    let lines = lines(&export.text);
    assert_eq!(lines.len(), 1002);
    assert_eq!(lines[1001], json!({ "end": true, "users": 1001 }));
    let last = &lines[1000];
    let created_at = last["created_at"].as_i64().unwrap();
    let hash = last["password_hash"].as_str().unwrap();
    assert!(hash.starts_with("$argon2id$"), "{hash}");
    let expected = json!({
        "id": ada, "state": "active", "external_id": format!("latchkey:{ada}"), "email": EMAIL, "email_verified": true,
        "name": "Ada", "created_at": created_at, "password_hash": hash, "metadata": { "a": 1 },
    });
    assert_eq!(last, &expected);
    let ids: Vec<_> = lines[..1001].iter().map(|line| line["id"].as_str().unwrap()).collect();
    assert!(ids.is_sorted());
    let rest = admin.get(&format!("export?after={}", ids[999])).await.expect(StatusCode::OK);
    assert_eq!(rest.text.lines().count(), 2);
    assert!(!rest.text.contains("password_hash"));

    let again = admin.import("source=export", &lines[..1000]).await.expect(StatusCode::OK);
    assert_eq!(again.integer("unchanged"), 1000, "{}", again.text);
    assert_eq!(again.body["ignored_fields"], json!({}));
    let events = admin.get("events?kind=exported").await.expect(StatusCode::OK);
    assert_eq!(events.body["events"][0]["detail"]["hashes"], false);
    assert_eq!(events.body["events"][0]["detail"]["after"], ids[999]);
    assert_eq!(events.body["events"][1]["detail"]["hashes"], true);
}

#[tokio::test]
async fn the_data_of_a_user_is_exported_and_the_events_of_the_user_are_listed_in_pages() {
    let test = AdministrationTest::start().await;
    let (admin, client, app) = (test.admin(), test.test_app.client(), test.test_app.id());
    let id = admin.create(&json!({ "email": EMAIL, "email_verified": true, "password": PASSWORD })).await;
    client.login(app, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let export = test.administrator("reads").get(&format!("users/{id}/export")).await.expect(StatusCode::OK);
    assert_eq!(export.body["user"]["id"], id);
    assert_eq!(export.body["sessions"].as_array().unwrap().len(), 1);
    let kinds: Vec<_> = export.body["events"].as_array().unwrap().iter().map(|event| &event["kind"]).collect();
    assert_eq!(kinds, ["logged_in", "user_created"]);
    assert_eq!(export.body["events_truncated"], false);
    assert!(!export.text.contains("$argon2"));
    let events = admin.get(&format!("events?user={id}&limit=1")).await.expect(StatusCode::OK);
    assert_eq!(events.body["events"][0]["kind"], "exported");
    let cursor = events.string("next");
    let next = admin.get(&format!("events?user={id}&limit=1&cursor={cursor}")).await.expect(StatusCode::OK);
    assert_eq!(next.body["events"][0]["kind"], "logged_in");
    for query in ["kind=unheard_of", "before=-300000000000", "after=99999999999999", "user=x", "cursor=x"] {
        admin.get(&format!("events?{query}")).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    admin.get("events?after=0&before=253402300799").await.expect(StatusCode::OK);
}

#[tokio::test]
async fn dead_letters_are_listed_and_retried() {
    let test = AdministrationTest::start().await;
    let admin = test.admin();
    let id = admin.create(&json!({ "email": EMAIL, "mail": "confirm" })).await;
    test.test_app.code(EMAIL, 1).await;
    let row = format!(
        "INSERT INTO outbox (app_id, kind, user_id, requested_at, attempts, dead_at, error)
         VALUES ('{}', 'confirm', '{id}', now(), 12, now(), 'the relay refused the recipient')",
        test.test_app.id()
    );
    test.test_app.sql(&row).await;
    let listed = admin.get("dead-letters?kind=confirm").await.expect(StatusCode::OK);
    let letters = listed.body["dead_letters"].as_array().unwrap();
    assert_eq!(letters.len(), 1);
    assert_eq!((&letters[0]["user_id"], &letters[0]["attempts"]), (&json!(id), &json!(12)));
    assert_eq!(letters[0]["error"], "the relay refused the recipient");
    let ids = json!({ "ids": [letters[0]["id"], "00000000-0000-0000-0000-000000000000"] });
    let retried = admin.post("dead-letters/retry", &ids).await.expect(StatusCode::OK);
    assert_eq!(retried.integer("retried"), 1);
    test.test_app.code(EMAIL, 2).await;
    assert_eq!(admin.get("dead-letters").await.expect(StatusCode::OK).body, json!({ "dead_letters": [] }));
}
