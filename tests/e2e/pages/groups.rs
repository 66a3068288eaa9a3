//! Groups of users who log in on the pages (specification: Groups, Propagation).

use latchkey_tests::{builders::Client, passwords::PASSWORD};
use uuid::Uuid;

use super::{EMAIL, PagesTest};
use crate::support::TestApp;

/// Adds the user, who must be the only one, to the group `staff` without writing the group to Redis. Returns the id of
/// the user.
async fn add_to_staff(test_app: &TestApp) -> String {
    let mut connection = test_app.stack.database.connect().await.expect("the database is reachable");
    let user: Uuid = sqlx::query_scalar("SELECT id FROM users").fetch_one(&mut connection).await.expect("one user");
    test_app
        .sql(&format!(
            "INSERT INTO group_members (app_id, user_id, name, source, created_at)
             VALUES ('{}', '{user}', 'staff', '', now())",
            test_app.id()
        ))
        .await;
    user.to_string()
}

#[tokio::test]
async fn a_login_loads_the_groups_if_the_app_has_clients_so_that_later_calls_need_no_postgres() {
    let pages = PagesTest::start().await;
    let test_app = &pages.test_app;
    test_app.register_and_confirm(EMAIL).await;
    let user = add_to_staff(test_app).await;
    assert_eq!(test_app.groups_in_redis(&user).await, None, "the session of the API needs no groups");
    pages.log_in(&mut pages.new_browser(), EMAIL, PASSWORD).await.expect_at(&pages.path("account"));
    assert_eq!(test_app.groups_in_redis(&user).await, None, "the App has no Client that could get groups");

    let client = Client::web("grafana", &test_app.app, "https://grafana.example.com/callback");
    test_app.stack.apply_client(&client).expect("the Client is rendered");
    test_app.stack.wait_until_served(&test_app.app).await.expect("the Client is served");
    pages.log_in(&mut pages.new_browser(), EMAIL, PASSWORD).await.expect_at(&pages.path("account"));
    assert_eq!(test_app.groups_in_redis(&user).await.expect("Redis has them"), ["staff"]);
}
