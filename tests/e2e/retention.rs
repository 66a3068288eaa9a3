//! `unverifiedRetentionDays`, as servers apply it (specification: Accounts, Unverified accounts).

use std::time::Duration;

use http::StatusCode;
use latchkey_tests::{eventually, passwords::PASSWORD, stack::Stack};

use crate::support::{TestApp, app};

/// Each server checks every 15 to 45 s whether the hourly deletion is due; a loaded machine takes longer.
const DELETION_WAIT_LIMIT: Duration = Duration::from_secs(180);

#[tokio::test]
async fn unverified_accounts_without_a_session_are_deleted_after_the_retention_days() {
    let test_app = TestApp::from_builder(app().set("/unverifiedRetentionDays", 7), Stack::builder().servers(2)).await;
    for name in ["forgotten", "signed-in", "young"] {
        test_app.register(&format!("{name}@example.com")).await;
        test_app.code(&format!("{name}@example.com"), 1).await;
    }
    test_app.register_and_confirm("confirmed@example.com").await;
    let login = test_app.client().login(test_app.id(), "signed-in@example.com", PASSWORD).await.expect(StatusCode::OK);
    // Makes all accounts but `young` eight days old, removes the events of the registrations, and makes the deletion
    // due.
    test_app
        .sql(
            "UPDATE users SET created_at = now() - interval '8 days' WHERE email NOT LIKE 'young@%';
         DELETE FROM audit_events WHERE kind = 'registered';
         UPDATE audit_upkeep SET next_at = '-infinity'",
        )
        .await;
    let one_is_deleted = async || (test_app.query_number("SELECT count(*) FROM users").await < 4).then_some(());
    eventually("the account is deleted", DELETION_WAIT_LIMIT, one_is_deleted).await;
    assert_eq!(test_app.query_number("SELECT count(*) FROM users WHERE email LIKE 'forgotten@%'").await, 0);
    assert_eq!(test_app.query_number("SELECT count(*) FROM users").await, 3);
    let deletions =
        "SELECT count(*) FROM audit_events WHERE kind = 'user_deleted' AND detail->>'reason' = 'unverified'";
    assert_eq!(test_app.query_number(deletions).await, 1);
    let mut deleted = 0;
    for server in test_app.stack.servers() {
        let text = server.get_ops("metrics").await.expect(StatusCode::OK).text;
        let value = text.lines().find_map(|line| line.strip_prefix("latchkey_unverified_accounts_deleted_total "));
        deleted += value.unwrap_or_else(|| panic!("{text}")).parse::<u64>().unwrap();
    }
    assert_eq!(deleted, 1, "by one of two servers");

    test_app.verify(login.string("token")).await.expect(StatusCode::OK);
    let login = test_app.client().login(test_app.id(), "forgotten@example.com", PASSWORD).await;
    login.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    // The email address can be registered again.
    test_app.register("forgotten@example.com").await;
    let code = test_app.code("forgotten@example.com", 2).await;
    test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
}
