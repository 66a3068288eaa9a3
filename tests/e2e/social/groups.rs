//! Groups that a provider reports at a login (specification: Groups, Groups from providers).

use http::StatusCode;
use latchkey_tests::stack::Stack;
use serde_json::{Value, json};

use super::{AppRedirect, Person, SocialTest, app};

const EMAIL: &str = "grace@example.com";

impl SocialTest {
    /// Starts a service that copies the groups of users from the Provider `local`.
    async fn start_with_groups(groups: Value) -> Self {
        let social = Self::start().await;
        social.set_groups(Some(groups)).await;
        social
    }

    /// Sets `groups` of the Provider `local`.
    async fn set_groups(&self, groups: Option<Value>) {
        self.test_app
            .edit_rendered(|document| {
                let providers = document["providers"].as_array_mut().expect("the App has Providers");
                let local = providers.iter_mut().find(|provider| provider["name"] == "local").expect("it is listed");
                let local = local.as_object_mut().expect("an object");
                match groups {
                    Some(groups) => drop(local.insert("groups".to_owned(), groups)),
                    None => drop(local.remove("groups")),
                }
            })
            .await;
    }

    /// The group name and the source of each membership, sorted.
    async fn memberships(&self) -> Vec<(String, String)> {
        let mut connection = self.test_app.stack.database.connect().await.expect("the database is reachable");
        sqlx::query_as("SELECT name, source FROM group_members ORDER BY name, source")
            .fetch_all(&mut connection)
            .await
            .expect("the query is valid")
    }

    /// Logs in, asserts that the user has these groups from the Provider `local`, and returns the id of the user.
    async fn expect_groups(&self, person: &Person, expected: &[&str]) -> String {
        let redirect = AppRedirect::expect_session(&self.log_in(person).await);
        let expected: Vec<_> = expected.iter().map(|name| ((*name).to_owned(), "local".to_owned())).collect();
        assert_eq!(self.memberships().await, expected);
        let user = redirect.parameter("local_id").to_owned();
        let names: Vec<String> = expected.into_iter().map(|(name, _)| name).collect();
        // A user who never had groups has none in Redis.
        assert_eq!(self.test_app.groups_in_redis(&user).await.unwrap_or_default(), names);
        user
    }

    async fn groups_version(&self) -> i64 {
        self.test_app.query_number("SELECT groups_version FROM users").await
    }
}

fn grace() -> Person {
    Person::verified("1", EMAIL)
}

fn settings() -> Value {
    json!({ "claim": "groups", "prefix": "local:" })
}

#[tokio::test]
async fn each_login_replaces_the_groups_of_the_provider() {
    let social = SocialTest::start_with_groups(settings()).await;
    let first = grace().with_groups(json!(["staff", "Platform Team", "staff"]));
    let user = social.expect_groups(&first, &["local:Platform Team", "local:staff"]).await;
    assert_eq!(social.groups_version().await, 1);
    let events = "SELECT count(*) FROM audit_events WHERE kind LIKE 'group_member_%'";
    assert_eq!(social.test_app.query_number(events).await, 2);

    // The same groups in another order cause no write.
    social
        .expect_groups(&grace().with_groups(json!(["Platform Team", "staff"])), &["local:Platform Team", "local:staff"])
        .await;
    assert_eq!((social.groups_version().await, social.test_app.query_number(events).await), (1, 2));

    social.expect_groups(&grace().with_groups(json!(["admins", "staff"])), &["local:admins", "local:staff"]).await;
    assert_eq!((social.groups_version().await, social.test_app.query_number(events).await), (2, 4));
    let detail = format!(
        "SELECT count(*) FROM audit_events WHERE kind = 'group_member_removed' AND user_id = '{user}'
            AND detail = '{{\"group\": \"local:Platform Team\", \"provider\": \"local\"}}' AND ip IS NOT NULL"
    );
    assert_eq!(social.test_app.query_number(&detail).await, 1);

    // A login with a provider's token also replaces the groups. The provider reports no groups for this person, so no
    // membership is left.
    social.log_in_by_token(&grace()).await.expect(StatusCode::OK);
    assert!(social.memberships().await.is_empty());
    assert!(social.test_app.groups_in_redis(&user).await.unwrap().is_empty());
    assert_eq!(social.test_app.query_number("SELECT count(*) FROM outbox WHERE kind = 'groups'").await, 0);
}

#[tokio::test]
async fn another_provider_and_administrators_keep_their_groups() {
    let social = SocialTest::start_with_groups(settings()).await;
    let user = social.expect_groups(&grace().with_groups(json!(["staff"])), &["local:staff"]).await;
    let insert = |source: &str| {
        format!(
            "INSERT INTO group_members (app_id, user_id, name, source, created_at)
             VALUES ('{}', '{user}', 'local:staff', '{source}', now())",
            social.test_app.id()
        )
    };
    social.test_app.sql(&insert("")).await;
    social.test_app.sql(&insert("other")).await;
    AppRedirect::expect_session(&social.log_in(&grace()).await);
    let left = [("local:staff".to_owned(), String::new()), ("local:staff".to_owned(), "other".to_owned())];
    assert_eq!(social.memberships().await, left);
    assert_eq!(social.test_app.groups_in_redis(&user).await.unwrap(), ["local:staff"]);
}

#[tokio::test]
async fn only_the_listed_groups_are_taken_over() {
    let groups = json!({ "claim": "/groups/names", "prefix": "", "only": ["argo:*", "staff"] });
    let social = SocialTest::start_with_groups(groups).await;
    let person = grace().with_groups(json!({ "names": ["argo:admins", "argo", "staff", "staff2", "Argo:x"] }));
    social.expect_groups(&person, &["argo:admins", "staff"]).await;
}

#[tokio::test]
async fn malformed_claims_and_too_many_groups_give_no_groups() {
    let social = SocialTest::start_with_groups(settings()).await;
    let names = |count: usize| json!((0..count).map(|number| format!("{number:04}")).collect::<Vec<_>>());
    let staff = grace().with_groups(json!(["staff"]));
    for invalid in [json!("staff"), json!({ "staff": true }), json!(null), json!([]), names(501)] {
        social.expect_groups(&staff, &["local:staff"]).await;
        social.expect_groups(&grace().with_groups(invalid), &[]).await;
    }
    let mixed = json!(["staff", 1, "", "caf\u{e9}", "a\nb", ["x"], null, "x".repeat(123)]);
    social.expect_groups(&grace().with_groups(mixed), &["local:staff"]).await;
    AppRedirect::expect_session(&social.log_in(&grace().with_groups(names(500))).await);
    assert_eq!(social.memberships().await.len(), 500);
}

#[tokio::test]
async fn memberships_end_if_the_app_no_longer_takes_the_groups_over() {
    let social = SocialTest::start_with_groups(settings()).await;
    let person = grace().with_groups(json!(["staff"]));
    social.expect_groups(&person, &["local:staff"]).await;
    social.set_groups(None).await;
    social.expect_groups(&person, &[]).await;
    social.expect_groups(&person, &[]).await;
    assert_eq!(social.groups_version().await, 2);
}

#[tokio::test]
async fn no_groups_are_taken_over_without_a_setting() {
    let social = SocialTest::of(app(), Stack::builder()).await;
    let user = social.expect_groups(&grace().with_groups(json!(["staff"])), &[]).await;
    assert_eq!(social.groups_version().await, 0);
    assert_eq!(social.test_app.groups_in_redis(&user).await, None);
}

#[tokio::test]
async fn a_refused_login_changes_no_groups() {
    let social = SocialTest::start_with_groups(settings()).await;
    let person = grace().with_groups(json!(["staff"]));
    social.expect_groups(&person, &["local:staff"]).await;
    social.test_app.sql("UPDATE users SET disabled_at = now()").await;
    let refused = social.log_in(&grace().with_groups(json!(["admins"]))).await;
    AppRedirect::expect_error(&refused, "user_disabled");
    assert_eq!(social.memberships().await, [("local:staff".to_owned(), "local".to_owned())]);
    assert_eq!(social.groups_version().await, 1);
}
