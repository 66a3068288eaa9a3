//! Imports of users through the administration API.

use http::{Method, StatusCode};
use latchkey_tests::{builders::Provider, passwords::PASSWORD};
use serde_json::{Value, json};

use super::AdministrationTest;
use crate::support::app;

fn line(number: usize) -> Value {
    json!({
        "external_id": format!("crm:{number}"), "email": format!("user{number}@example.com"), "email_verified": true,
        "name": format!("User {number}"), "created_at": 1_600_000_000 + number, "metadata": { "number": number },
    })
}

#[tokio::test]
async fn an_import_creates_each_user_once_and_can_be_repeated() {
    let test = AdministrationTest::start().await;
    let (importer, admin) = (test.administrator("imports"), test.admin());
    let lines: Vec<_> = (0..1000).map(line).collect();
    let dry = importer.import("source=crm&dry_run=true", &lines).await.expect(StatusCode::OK);
    assert_eq!((dry.integer("created"), dry.integer("refused")), (1000, 0));
    assert_eq!(dry.body["results"][0], json!({ "line": 1, "outcome": "created" }), "a dry run has no ids");
    assert_eq!(admin.get("users").await.expect(StatusCode::OK).body, json!({ "users": [] }));

    let first = importer.import("source=crm", &lines).await.expect(StatusCode::OK);
    assert_eq!((first.integer("created"), first.integer("unchanged")), (1000, 0));
    let id = first.body["results"][7]["id"].as_str().unwrap();
    let user = admin.get(&format!("users/{id}")).await.expect(StatusCode::OK);
    assert_eq!((user.string("created_by"), user.integer("created_at")), ("import", 1_600_000_007));
    assert_eq!((user.string("external_id"), &user.body["metadata"]), ("crm:7", &json!({ "number": 7 })));
    let again = importer.import("source=crm", &lines).await.expect(StatusCode::OK);
    assert_eq!((again.integer("created"), again.integer("unchanged")), (0, 1000));
    assert_eq!(again.body["results"][7], json!({ "line": 8, "outcome": "unchanged", "id": id }));

    let events = admin.get("events?kind=users_imported").await.expect(StatusCode::OK);
    let events = events.body["events"].as_array().unwrap().clone();
    assert_eq!(events.len(), 1, "neither a dry run nor a repetition is an event");
    let actor = json!({ "namespace": "shop", "name": "imports" });
    let detail = json!({ "actor": actor, "source": "crm", "created": 1000, "unchanged": 0, "refused": 0 });
    assert_eq!(events[0]["detail"], detail);
    let metrics = test.test_app.stack.server().get_ops("metrics").await.expect(StatusCode::OK).text;
    for outcome in ["created", "unchanged"] {
        let line = format!("latchkey_imported_users_total{{source=\"other\",outcome=\"{outcome}\"}} 1000\n");
        assert!(metrics.contains(&line), "{line} is not in\n{metrics}");
    }
    // An imported user without a password can set one.
    let (client, app) = (test.test_app.client(), test.test_app.id());
    client.forgot_password(app, "user7@example.com").await.expect(StatusCode::OK);
    let code = test.test_app.code("user7@example.com", 1).await;
    client.confirm_password(app, "user7@example.com", &code, PASSWORD).await.expect(StatusCode::OK);
    client.login(app, "user7@example.com", PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_refused_line_does_not_affect_the_other_lines() {
    let test = AdministrationTest::start().await;
    let admin = test.admin();
    let taken = admin.create(&json!({ "email": "taken@example.com", "external_id": "crm:taken" })).await;
    let text = [
        line(1).to_string(),
        String::new(),
        "not JSON".to_owned(),
        "[]".to_owned(),
        r#"{"external_id":"a","external_id":"b","email":"a@example.com"}"#.to_owned(),
        json!({ "email": "no-id@example.com" }).to_string(),
        json!({ "external_id": "2", "email": "nobody", "created_at": 4_000_000_000_u64 }).to_string(),
        json!({ "external_id": "3", "email": "Taken@example.com", "totp": 1, "groups": [] }).to_string(),
        json!({ "external_id": "crm:taken", "email": "another@example.com", "totp": 2 }).to_string(),
        // The first of these two lines has the canonical email address of line 1, the second has the external id of
        // line 1.
        json!({ "external_id": "4", "email": "USER1@example.com" }).to_string(),
        json!({ "external_id": "crm:1", "email": "user9@example.com" }).to_string(),
        json!({ "external_id": "5", "email": "e@example.com", "identities": vec![json!({}); 100] }).to_string(),
        "  \t".to_owned(),
        line(2).to_string(),
    ]
    .join("\r\n");
    let response = admin.import_text("source=crm", text).await.expect(StatusCode::OK);
    let results = response.body["results"].as_array().unwrap();
    let summary: Vec<_> = results
        .iter()
        .map(|result| {
            let fields = result["fields"].as_array().map(|fields| {
                fields.iter().map(|field| field["field"].as_str().unwrap()).collect::<Vec<_>>().join(",")
            });
            let error = result["error"].as_str().map(|error| format!(" {error}")).unwrap_or_default();
            let fields = fields.map(|fields| format!(" [{fields}]")).unwrap_or_default();
            format!("{} {}{error}{fields}", result["line"], result["outcome"].as_str().unwrap())
        })
        .collect();
    assert_eq!(
        summary,
        [
            "1 created",
            "3 refused invalid_request []",
            "4 refused invalid_request []",
            "5 refused invalid_request []",
            "6 refused invalid_request [external_id]",
            "7 refused invalid_request [email,created_at]",
            "8 refused email_taken",
            "9 unchanged",
            "10 refused email_taken",
            "11 unchanged",
            "12 refused invalid_request [identities]",
            "14 created",
        ]
    );
    assert_eq!(results[6]["user_id"], taken);
    assert_eq!(results[7]["id"], taken);
    assert_eq!(results[8]["user_id"], results[0]["id"]);
    assert_eq!(response.body["ignored_fields"], json!({ "groups": 1, "totp": 2 }));
    assert_eq!((response.integer("created"), response.integer("unchanged"), response.integer("refused")), (2, 2, 8));
}

/// Imports a hash that the service exported, a bcrypt hash from public test vectors, and two hashes that are refused.
#[tokio::test]
async fn imported_users_log_in_with_their_passwords_and_get_native_hashes() {
    let test = AdministrationTest::start().await;
    let (admin, client, app) = (test.admin(), test.test_app.client(), test.test_app.id());
    let ada = admin.create(&json!({ "email": "ada@example.com", "email_verified": true, "password": PASSWORD })).await;
    let export = admin.get("export?hashes=true").await.expect(StatusCode::OK);
    let line: Value = serde_json::from_str(export.text.lines().next().unwrap()).unwrap();
    admin.delete(&format!("users/{ada}")).await.expect(StatusCode::OK);
    // bcrypt of `U*U`, from the test vectors of Openwall's crypt_blowfish.
    let bcrypt = "$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW";
    let lines = [
        line,
        json!({ "external_id": "old:1", "email": "grace@example.com", "email_verified": true, "password_hash": bcrypt }),
        json!({ "external_id": "old:2", "email": "x@example.com", "password_hash": "$2a$14$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW" }),
        json!({ "external_id": "old:3", "email": "y@example.com", "password_hash": "md5:5f4dcc3b5aa765d61d8327deb882cf99" }),
    ];
    let imported = admin.import("source=old", &lines).await.expect(StatusCode::OK);
    let codes: Vec<_> =
        imported.body["results"].as_array().unwrap().iter().map(|result| &result["fields"][0]["code"]).collect();
    assert_eq!(codes, [&Value::Null, &Value::Null, &json!("hash_too_costly"), &json!("hash_not_supported")]);
    assert!(!imported.text.contains("md5") && !imported.text.contains("$2a$"), "the response contains no hash");
    let algorithm = async |email: &str| {
        let found = admin.get(&format!("users?email={email}")).await.expect(StatusCode::OK);
        found.body["users"][0]["password_algorithm"].as_str().unwrap().to_owned()
    };
    assert_eq!(algorithm("grace%40example.com").await, "bcrypt");
    client.login(app, "ada@example.com", PASSWORD).await.expect(StatusCode::OK);
    let wrong = client.login(app, "grace@example.com", PASSWORD).await;
    wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    client.login(app, "grace@example.com", "U*U").await.expect(StatusCode::OK);
    assert_eq!(algorithm("grace%40example.com").await, "argon2id");
    client.login(app, "grace@example.com", "U*U").await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_user_without_an_address_is_imported_without_the_password_hash() {
    let github = Provider::new("github", "github");
    let test = AdministrationTest::start_with(app().set("/allowUsersWithoutEmail", true), &[github]).await;
    let admin = test.admin();
    let hash = "$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW";
    let identities = json!([{ "provider": "github", "subject": "1" }]);
    let user = json!({ "external_id": "old:1", "identities": identities, "password_hash": hash });
    let imported = admin.import("source=old", &[user]).await.expect(StatusCode::OK);
    assert_eq!(imported.integer("created"), 1, "{}", imported.text);
    assert_eq!(imported.body["ignored_fields"], json!({ "password_hash": 1 }));
    let users = admin.get("users").await.expect(StatusCode::OK);
    assert_eq!(users.body["users"][0]["has_password"], false);
    let created = admin.post("users", &json!({ "identities": identities, "password_hash": hash })).await;
    let created = created.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    assert_eq!(created.body["fields"][0]["field"], "password_hash");
}

/// The metadata of the first line needs a hundred times the memory of its text when it is parsed into a tree. The
/// identity in the second line has thousands of unknown fields. The servers of tests have no memory limit, so this test
/// shows only that the responses stay small.
#[tokio::test]
async fn lines_that_parse_into_large_trees_get_short_responses() {
    let test = AdministrationTest::start().await;
    let admin = test.admin();
    let metadata = json!({ "a": vec![json!({ "": 0 }); 1000] });
    let line = json!({ "external_id": "1", "email": "a@example.com", "metadata": metadata });
    let unknown: serde_json::Map<_, _> = (0..4000).map(|number| (format!("{number:x}"), json!(0))).collect();
    let hostile = json!({ "external_id": "2", "email": "b@example.com", "identities": [unknown] });
    let response = admin.import("source=old", &[line, hostile]).await.expect(StatusCode::OK);
    assert_eq!((response.integer("created"), response.integer("refused")), (1, 1), "{}", response.text);
    assert!(response.text.len() < 8 * 1024);
    let user = admin.get("users").await.expect(StatusCode::OK);
    assert_eq!(user.body["users"][0]["metadata"], metadata);
    let number = json!({ "external_id": "3", "email": "c@example.com", "metadata": { "a": 1e300 } });
    let response = admin.import("source=old", &[number]).await.expect(StatusCode::OK);
    assert_eq!(response.body["results"][0]["fields"][0]["field"], "metadata");
}

#[tokio::test]
async fn an_app_has_at_most_four_kinds_of_foreign_hashes() {
    let test = AdministrationTest::start().await;
    let admin = test.admin();
    let hash = |cost: usize| format!("$2a${cost:02}$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW");
    let line = |number: usize, cost: usize| json!({ "external_id": format!("{number}"), "email": format!("u{number}@example.com"), "password_hash": hash(cost) });
    let lines: Vec<_> =
        [4, 5, 4, 6, 7, 8, 7].into_iter().enumerate().map(|(number, cost)| line(number, cost)).collect();
    for dry_run in ["&dry_run=true", ""] {
        let imported = admin.import(&format!("source=old{dry_run}"), &lines).await.expect(StatusCode::OK);
        assert_eq!((imported.integer("created"), imported.integer("refused")), (6, 1), "{}", imported.text);
        assert_eq!(imported.body["results"][5]["fields"][0]["code"], "too_many_hash_kinds");
    }
    // The second address is taken, but an invalid body is reported before a conflict.
    for email in ["z@example.com", "u0@example.com"] {
        let created = admin.post("users", &json!({ "email": email, "password_hash": hash(9) })).await;
        let created = created.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        assert_eq!(created.body["fields"][0]["code"], "too_many_hash_kinds");
    }
    let taken = admin.post("users", &json!({ "email": "u0@example.com", "password_hash": hash(4) })).await;
    taken.expect_error(StatusCode::CONFLICT, "email_taken");
}

#[tokio::test]
async fn an_import_has_size_limits_and_checks_its_query_and_media_type() {
    let test = AdministrationTest::start().await;
    let admin = test.admin();
    let too_large = async |text: String| {
        let response = admin.import_text("source=crm", text).await;
        response.expect_error(StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large");
    };
    too_large("\n".repeat(1001)).await;
    too_large(format!("{{\"a\":\"{}\"}}\n", "x".repeat(64 * 1024))).await;
    too_large(format!("{}\n", "x".repeat(64 * 1024 - 1)).repeat(65)).await;
    admin.import_text("source=crm", "\n".repeat(1000)).await.expect(StatusCode::OK);
    admin.import("", &[]).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    admin.import("source=C", &[]).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    admin.import("source=crm&dry_run=1", &[]).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    let json = admin.request(Method::POST, "imports?source=crm").json(&json!({}));
    admin.send(json).await.expect_error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type");
}
