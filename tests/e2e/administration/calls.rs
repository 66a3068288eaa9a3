//! For every call of the administration API, a request that succeeds.

use http::StatusCode;
use latchkey_tests::{builders::App, passwords::PASSWORD};
use serde_json::json;
use uuid::Uuid;

use super::{AdministrationTest, Administrator};
use crate::support::TestApp;

/// The objects to which the calls of a test apply: a user with a session, an identity at the Provider `github`, and a
/// dead letter.
pub(super) struct Target {
    pub(super) email: String,
    pub(super) user: String,
    pub(super) session: String,
    /// An access token of the session.
    pub(super) token: String,
    pub(super) dead_letter: String,
}

/// Builds a request for a call of [`super::access::CALLS`]. The call applies to this target.
pub(super) fn request(
    admin: &Administrator,
    (method, template): (&str, &str),
    target: &Target,
) -> reqwest::RequestBuilder {
    let path = match template {
        "users/{ID}/sessions/{ID}" => format!("users/{}/sessions/{}", target.user, target.session),
        _ => template.replace("{ID}", &target.user),
    };
    let request = admin.request(method.parse().unwrap(), &path);
    let new_email = || format!("new-{:016x}@example.com", rand::random::<u64>());
    match (method, template) {
        ("GET" | "DELETE", _) | ("PUT", "groups/staff/members/{ID}") => request,
        ("PUT", "groups/staff") => request.json(&json!({ "title": new_email() })),
        ("POST", "users") => request.json(&json!({ "email": new_email() })),
        ("PATCH", "users/{ID}") => request.json(&json!({ "name": "Changed" })),
        ("POST", "users/{ID}/mails") => request.json(&json!({ "mail": "reset" })),
        ("POST", "imports?source=test") => {
            let email = new_email();
            let line = json!({ "external_id": email, "email": email });
            request.header("Content-Type", "application/x-ndjson").body(line.to_string())
        }
        ("POST", "dead-letters/retry") => request.json(&json!({ "ids": [target.dead_letter] })),
        other => panic!("add a request for {other:?}"),
    }
}

// === impl Target ===

impl Target {
    /// Creates a target in an App with the Provider `github`.
    pub(super) async fn create(test: &AdministrationTest, app: &App, admin: &Administrator) -> Self {
        let subject = format!("{:016x}", rand::random::<u64>());
        let email = format!("target-{subject}@example.com");
        let body = json!({
            "email": email, "email_verified": true, "password": PASSWORD,
            "identities": [{ "provider": "github", "subject": subject }],
        });
        let user = admin.create(&body).await;
        let login = test.test_app.client().login(app.id(), &email, PASSWORD).await.expect(StatusCode::OK);
        let dead_letter = Uuid::now_v7().to_string();
        // The address is already verified, so a retry of this mail has nothing to send.
        let row = format!(
            "INSERT INTO outbox (app_id, id, kind, user_id, requested_at, attempts, dead_at, error)
             VALUES ('{}', '{dead_letter}', 'confirm', '{user}', now(), 54, now(), 'the relay refused the recipient')",
            app.id()
        );
        test.test_app.sql(&row).await;
        let (session, token) = (login.string("session_id").to_owned(), login.string("token").to_owned());
        Self { email, user, session, token, dead_letter }
    }

    /// Calls the API with the access token of the session, and returns the status.
    pub(super) async fn session_status(&self, test_app: &TestApp, app: &App) -> StatusCode {
        test_app.client().with_token(app.id(), &self.token).get("user").await.status
    }
}

// === impl TestApp ===

impl TestApp {
    /// A checksum of everything that administrators of an App can change in Postgres.
    pub(super) async fn administered_checksum(&self, app: &App) -> i64 {
        let tables = [
            "users",
            "identities",
            "groups",
            "group_members",
            "outbox",
            "audit_events",
            "hash_classes",
            "webhook_events",
        ];
        let sums = tables.map(|table| {
            format!("(SELECT coalesce(sum(hashtext({table}::text)), 0) FROM {table} WHERE app_id = '{}')", app.id())
        });
        self.query_number(&format!("SELECT {}", sums.join(" + "))).await
    }
}
