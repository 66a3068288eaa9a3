//! Groups and their members (specification: Groups, Administration).

use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use latchkey_tests::{client::ApiResponse, eventually, passwords::PASSWORD, stack::Stack};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{AdministrationTest, Administrator};
use crate::{
    fault_support::unlimited_app,
    support::{LIVE_LIMIT, TestApp, app},
};

const EMAIL: &str = "ada@example.com";

impl TestApp {
    /// The names of the user's groups, which Redis stores with the user's profile. `None` if Redis does not have them.
    pub(crate) async fn groups_in_redis(&self, user: &str) -> Option<Vec<String>> {
        let mut redis = self.stack.redis().connect().await.expect("Redis is reachable");
        let key = format!("lk:{{{}:{user}}}:user", self.id());
        let names: Option<String> =
            redis::cmd("HGET").arg(key).arg("groups").query_async(&mut redis).await.expect("a hash");
        names.map(|memberships| {
            let name = |line: &str| line.split('\t').next().unwrap_or_default().to_owned();
            let mut names: Vec<String> = memberships.lines().map(name).collect();
            names.dedup();
            names
        })
    }
}

/// Creates a user and logs in. Returns the user's id.
async fn create_logged_in_user(test: &AdministrationTest, admin: &Administrator, email: &str) -> String {
    let user = admin.create(&json!({ "email": email, "email_verified": true, "password": PASSWORD })).await;
    test.test_app.client().login(test.test_app.id(), email, PASSWORD).await.expect(StatusCode::OK);
    user
}

async fn put_member(admin: &Administrator, group: &str, user: &str) -> ApiResponse {
    admin.send(admin.request(Method::PUT, &format!("groups/{group}/members/{user}"))).await
}

fn names(groups: &Value) -> Vec<&str> {
    groups.as_array().unwrap().iter().map(|group| group["name"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn groups_are_created_listed_changed_and_deleted() {
    let test = AdministrationTest::start().await;
    let admin = test.admin();
    assert_eq!(admin.get("groups").await.expect(StatusCode::OK).body, json!({ "groups": [] }));
    let titled = admin.put("groups/argo:admins", &json!({ "title": " Argo CD " })).await.expect(StatusCode::OK);
    assert_eq!(titled.body, json!({}));
    // The body of a PUT is optional.
    admin.send(admin.request(Method::PUT, "groups/ops@example.com")).await.expect(StatusCode::OK);
    admin.put("groups/staff", &json!({})).await.expect(StatusCode::OK);

    let all = admin.get("groups").await.expect(StatusCode::OK);
    assert_eq!(names(&all.body["groups"]), ["argo:admins", "ops@example.com", "staff"]);
    let created_at = &all.body["groups"][0]["created_at"];
    assert!(created_at.is_i64());
    assert_eq!(all.body["groups"][0], json!({ "name": "argo:admins", "title": "Argo CD", "created_at": created_at }));
    assert_eq!(all.body["groups"][1]["title"], Value::Null);
    assert_eq!(all.body.get("next"), None);

    // Many clients encode `:` and `@` in a path.
    admin.put("groups/argo%3Aadmins", &json!({ "title": "Argo" })).await.expect(StatusCode::OK);
    admin.put("groups/ops%40example.com", &json!({ "title": "Operations" })).await.expect(StatusCode::OK);
    let page = admin.get("groups?limit=2").await.expect(StatusCode::OK);
    assert_eq!(names(&page.body["groups"]), ["argo:admins", "ops@example.com"]);
    assert_eq!(
        (&page.body["groups"][0]["title"], &page.body["groups"][1]["title"]),
        (&json!("Argo"), &json!("Operations"))
    );
    assert_eq!(&page.body["groups"][0]["created_at"], created_at);
    let next = page.string("next");
    let last = admin.get(&format!("groups?limit=2&cursor={next}")).await.expect(StatusCode::OK);
    assert_eq!(names(&last.body["groups"]), ["staff"]);
    assert_eq!(last.body.get("next"), None);
    let wrong_cursor = admin.get(&format!("groups/staff/members?cursor={next}")).await;
    wrong_cursor.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    // A PUT without a title removes the title of the group.
    admin.put("groups/argo:admins", &json!({})).await.expect(StatusCode::OK);
    assert_eq!(admin.get("groups?limit=1").await.body["groups"][0]["title"], Value::Null);

    admin.delete("groups/staff").await.expect(StatusCode::OK);
    admin.delete("groups/staff").await.expect_error(StatusCode::NOT_FOUND, "not_found");
    admin.get("groups/staff/members").await.expect_error(StatusCode::NOT_FOUND, "not_found");
    assert_eq!(names(&admin.get("groups").await.body["groups"]), ["argo:admins", "ops@example.com"]);
}

#[tokio::test]
async fn adding_or_removing_a_member_again_has_no_effect() {
    let test = AdministrationTest::start().await;
    let admin = test.admin();
    admin.put("groups/staff", &json!({})).await.expect(StatusCode::OK);
    let user = admin.create(&json!({ "email": EMAIL })).await;
    for _ in 0..2 {
        assert_eq!(put_member(&admin, "staff", &user).await.expect(StatusCode::OK).body, json!({}));
    }
    let members = admin.get("groups/staff/members").await.expect(StatusCode::OK);
    let created_at = &members.body["members"][0]["created_at"];
    assert!(created_at.is_i64());
    let member = json!({ "user_id": user, "source": "", "created_at": created_at });
    assert_eq!(members.body, json!({ "members": [member] }));
    let groups = admin.get(&format!("users/{user}/groups")).await.expect(StatusCode::OK);
    assert_eq!(groups.body, json!({ "groups": [{ "name": "staff", "source": "" }] }));
    assert_eq!(admin.get(&format!("users/{user}")).await.integer("version"), 1, "groups do not raise the version");

    for _ in 0..2 {
        let removed = admin.delete(&format!("groups/staff/members/{user}")).await.expect(StatusCode::OK);
        assert_eq!(removed.body, json!({}));
    }
    assert_eq!(admin.get("groups/staff/members").await.body, json!({ "members": [] }));
    assert_eq!(admin.get(&format!("users/{user}/groups")).await.body, json!({ "groups": [] }));

    let events = admin.get(&format!("events?user={user}")).await.expect(StatusCode::OK);
    let events = events.body["events"].as_array().unwrap().clone();
    let kinds: Vec<_> = events.iter().map(|event| event["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["group_member_removed", "group_member_added", "user_created"]);
    let detail = json!({ "actor": { "namespace": "shop", "name": "runs" }, "group": "staff" });
    for event in &events[..2] {
        assert_eq!((&event["detail"], &event["ip"]), (&detail, &Value::Null));
    }
    let filtered = admin.get("events?kind=group_member_added").await.expect(StatusCode::OK);
    assert_eq!(filtered.body["events"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn unknown_and_malformed_groups_and_users_get_404_after_the_query_and_the_body_are_checked() {
    let test = AdministrationTest::start().await;
    let admin = test.admin();
    admin.put("groups/staff", &json!({})).await.expect(StatusCode::OK);
    let (user, nobody) = (admin.create(&json!({ "email": EMAIL })).await, Uuid::now_v7());
    let before = test.test_app.administered_checksum(&test.test_app.app).await;
    let too_long = "a".repeat(129);
    for group in ["other", "-a", ".a", "a%20b", "a%2Fb", "%61", "%3Aa", "%C3%A9", "a*", "a,b", too_long.as_str()] {
        for path in [format!("groups/{group}/members/{user}"), format!("groups/{group}")] {
            // A PUT with the well-formed name `other` would create the group, so this request is not sent.
            if group != "other" || path.ends_with(&user) {
                admin.put(&path, &json!({})).await.expect_error(StatusCode::NOT_FOUND, "not_found");
            }
            admin.delete(&path).await.expect_error(StatusCode::NOT_FOUND, "not_found");
        }
        admin.get(&format!("groups/{group}/members")).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    }
    for user in [nobody.to_string(), "not-a-uuid".to_owned(), user.to_uppercase()] {
        put_member(&admin, "staff", &user).await.expect_error(StatusCode::NOT_FOUND, "not_found");
        let removed = admin.delete(&format!("groups/staff/members/{user}")).await;
        removed.expect_error(StatusCode::NOT_FOUND, "not_found");
        admin.get(&format!("users/{user}/groups")).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    }
    // The server checks the query and the body before it looks up the group.
    for path in ["groups/staff", "groups/-a"] {
        let unknown = admin.put(path, &json!({ "name": "x" })).await;
        let unknown = unknown.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        assert_eq!(unknown.body["fields"][0]["field"], "name");
        let request = admin.put(&format!("{path}?x=1"), &json!({})).await;
        request.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    for title in [json!("x".repeat(101)), json!("a\u{0}b"), json!(1), json!(["x"])] {
        let invalid = admin.put("groups/staff", &json!({ "title": title })).await;
        let invalid = invalid.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        assert_eq!(invalid.body["fields"][0]["field"], "title");
    }
    let with_body = admin.put(&format!("groups/staff/members/{user}"), &json!({ "role": "x" })).await;
    with_body.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    let method = admin.post("groups", &json!({})).await;
    method.expect_error(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed");
    assert_eq!(test.test_app.administered_checksum(&test.test_app.app).await, before);
    assert_eq!(admin.get("groups").await.body["groups"].as_array().unwrap().len(), 1);
}

/// Sends six calls at a time, because a caller can have at most eight calls in flight.
#[tokio::test]
async fn concurrent_calls_do_not_exceed_the_limits_on_groups() {
    let test = AdministrationTest::start_with(unlimited_app("shop"), &[]).await;
    let (admin, app) = (test.admin(), test.test_app.id());
    let user = admin.create(&json!({ "email": EMAIL })).await;
    test.test_app
        .sql(&format!(
            "INSERT INTO groups (app_id, name, created_at)
             SELECT '{app}', 'g' || number, now() FROM generate_series(1, 9999) AS number;
             INSERT INTO group_members (app_id, user_id, name, source, created_at)
             SELECT '{app}', '{user}', 'g' || number, '', now() FROM generate_series(1, 499) AS number"
        ))
        .await;
    let paths: Vec<String> = (0..6).map(|number| format!("groups/new-{number}")).collect();
    let empty = json!({});
    let calls = paths.iter().map(|path| admin.put(path, &empty));
    let responses = futures::future::join_all(calls).await;
    let created = responses.iter().filter(|response| response.status == StatusCode::OK).count();
    assert_eq!(created, 1);
    for response in responses.into_iter().filter(|response| response.status != StatusCode::OK) {
        response.expect_error(StatusCode::CONFLICT, "too_many_groups");
    }
    assert_eq!(test.test_app.query_number("SELECT count(*) FROM groups").await, 10_000);
    // The title of a group can still be changed. After a group is deleted, another one can be created.
    admin.put("groups/g1", &json!({ "title": "First" })).await.expect(StatusCode::OK);
    admin.delete("groups/g9999").await.expect(StatusCode::OK);
    admin.put("groups/another", &json!({})).await.expect(StatusCode::OK);

    let names: Vec<String> = (500..506).map(|number| format!("g{number}")).collect();
    let calls = names.iter().map(|name| put_member(&admin, name, &user));
    let responses = futures::future::join_all(calls).await;
    assert_eq!(responses.iter().filter(|response| response.status == StatusCode::OK).count(), 1);
    for response in responses.into_iter().filter(|response| response.status != StatusCode::OK) {
        response.expect_error(StatusCode::CONFLICT, "too_many_groups");
    }
    let groups = admin.get(&format!("users/{user}/groups")).await.expect(StatusCode::OK);
    assert_eq!(groups.body["groups"].as_array().unwrap().len(), 500);
    put_member(&admin, "g1", &user).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_change_is_in_redis_when_the_call_returns() {
    let test = AdministrationTest::start().await;
    let (admin, test_app) = (test.admin(), &test.test_app);
    let user = create_logged_in_user(&test, &admin, EMAIL).await;
    for group in ["staff", "argo:admins"] {
        admin.put(&format!("groups/{group}"), &json!({})).await.expect(StatusCode::OK);
        put_member(&admin, group, &user).await.expect(StatusCode::OK);
    }
    assert_eq!(test_app.groups_in_redis(&user).await.unwrap(), ["argo:admins", "staff"]);
    admin.delete(&format!("groups/staff/members/{user}")).await.expect(StatusCode::OK);
    assert_eq!(test_app.groups_in_redis(&user).await.unwrap(), ["argo:admins"]);
    admin.delete("groups/argo:admins").await.expect(StatusCode::OK);
    assert!(test_app.groups_in_redis(&user).await.unwrap().is_empty());
    assert_eq!(test_app.query_number("SELECT count(*) FROM outbox WHERE kind = 'groups'").await, 0);
    admin.delete(&format!("users/{user}")).await.expect(StatusCode::OK);
    assert_eq!(test_app.groups_in_redis(&user).await, None);
}

#[tokio::test]
async fn the_outbox_propagates_a_change_that_was_made_without_redis() {
    let test = AdministrationTest::start_on(Stack::builder().proxied(), unlimited_app("shop"), &[]).await;
    let (admin, test_app) = (test.admin(), &test.test_app);
    let user = create_logged_in_user(&test, &admin, EMAIL).await;
    admin.put("groups/staff", &json!({})).await.expect(StatusCode::OK);
    put_member(&admin, "staff", &user).await.expect(StatusCode::OK);
    let redis = test_app.stack.redis_proxy.as_ref().expect("the service has proxies");
    redis.refuse().await;
    admin.delete(&format!("groups/staff/members/{user}")).await.expect(StatusCode::OK);
    assert_eq!(test_app.groups_in_redis(&user).await.unwrap(), ["staff"], "Redis cannot be reached");
    redis.restore().expect("the proxy's port is free");
    eventually("Redis has the change", LIVE_LIMIT, || async {
        test_app.make_outbox_due().await;
        test_app.groups_in_redis(&user).await.unwrap().is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_large_group_is_deleted_with_all_its_memberships() {
    let test = AdministrationTest::start().await;
    let (admin, test_app) = (test.admin(), &test.test_app);
    let user = create_logged_in_user(&test, &admin, EMAIL).await;
    admin.put("groups/staff", &json!({})).await.expect(StatusCode::OK);
    put_member(&admin, "staff", &user).await.expect(StatusCode::OK);
    test_app
        .sql(&format!(
            "INSERT INTO users (app_id, id, name, created_at, updated_at)
             SELECT '{0}', gen_random_uuid(), '', now(), now() FROM generate_series(1, 1000);
             INSERT INTO group_members (app_id, user_id, name, source, created_at)
             SELECT '{0}', id, 'staff', '', now() FROM users WHERE name = ''
             ON CONFLICT DO NOTHING",
            test_app.id()
        ))
        .await;
    let members = test_app.query_number("SELECT count(*) FROM group_members").await;
    let started = Instant::now();
    admin.delete("groups/staff").await.expect(StatusCode::OK);
    assert!(started.elapsed() < Duration::from_secs(30));
    assert_eq!(test_app.query_number("SELECT count(*) FROM group_members").await, 0);
    assert!(test_app.groups_in_redis(&user).await.unwrap().is_empty());
    let events = "SELECT count(*) FROM audit_events WHERE kind = 'group_member_removed'";
    assert_eq!(test_app.query_number(events).await, members);
}

#[tokio::test]
async fn groups_of_two_apps_are_separate() {
    let blog = unlimited_app("blog").set(
        "/administrators",
        json!([{ "serviceAccount": { "namespace": "shop", "name": "runs" }, "role": "UserAdmin" }]),
    );
    let test = AdministrationTest::start_on(Stack::builder().app(&blog), app(), &[]).await;
    let (of_shop, of_blog) = (test.admin(), test.administrator_of(&blog, "runs"));
    for admin in [&of_shop, &of_blog] {
        admin.put("groups/staff", &json!({})).await.expect(StatusCode::OK);
    }
    let user = of_blog.create(&json!({ "email": EMAIL })).await;
    put_member(&of_shop, "staff", &user).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    put_member(&of_blog, "staff", &user).await.expect(StatusCode::OK);
    assert_eq!(of_shop.get("groups/staff/members").await.body, json!({ "members": [] }));
    of_shop.delete("groups/staff").await.expect(StatusCode::OK);
    assert_eq!(of_blog.get("groups/staff/members").await.body["members"].as_array().unwrap().len(), 1);
    let page = of_blog.get("groups?limit=1").await.expect(StatusCode::OK);
    assert_eq!(page.body.get("next"), None);
    of_blog.put("groups/team", &json!({})).await.expect(StatusCode::OK);
    let page = of_blog.get("groups?limit=1").await.expect(StatusCode::OK);
    let path = format!("groups?limit=1&cursor={}", page.string("next"));
    of_shop.get(&path).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    of_blog.get(&path).await.expect(StatusCode::OK);
}
