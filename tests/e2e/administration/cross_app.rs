//! Two Apps of one service: what an administrator of one App can do with the other App.

use http::StatusCode;
use latchkey_tests::{
    builders::{App, Provider},
    stack::Stack,
};
use serde_json::json;

use super::{
    AdministrationTest,
    access::{ApiCall, CALLS},
    calls::{Target, request},
};
use crate::fault_support::unlimited_app;

/// Sets the administrators of an App: these ServiceAccounts in the namespace `shop`, each with its role.
fn with_roles(app: App, accounts: &[(&str, &str)]) -> App {
    let administrators: Vec<_> = accounts
        .iter()
        .map(|(name, role)| json!({ "serviceAccount": { "namespace": "shop", "name": name }, "role": role }))
        .collect();
    app.set("/administrators", administrators)
}

/// A service with an App `shop` that has the administrators of [`AdministrationTest`], and with the App `blog`.
async fn start_with_blog(accounts: &[(&str, &str)]) -> (AdministrationTest, App) {
    let github = Provider::new("github", "github");
    let blog = with_roles(unlimited_app("blog"), accounts).provider(&github);
    let test = AdministrationTest::start_on(Stack::builder().app(&blog), unlimited_app("shop"), &[github]).await;
    (test, blog)
}

#[tokio::test]
async fn a_role_in_one_app_gives_no_rights_in_another() {
    let (test, blog) = start_with_blog(&[("runs-blog", "UserAdmin"), ("reads", "Introspector")]).await;
    let blog_admin = test.administrator_of(&blog, "runs-blog");
    let target = Target::create(&test, &blog, &blog_admin).await;
    let before = test.test_app.administered_checksum(&blog).await;
    let unlisted = test.administrator_of(&blog, "runs");
    let introspector = test.administrator_of(&blog, "reads");
    for ApiCall { method, path: template, .. } in CALLS {
        let response = unlisted.send(request(&unlisted, (method, template), &target)).await;
        assert_eq!(response.status, StatusCode::UNAUTHORIZED, "{method} {template}: {}", response.text);
        response.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
        // In `blog`, this account is only an Introspector. Its role Reader in `shop` does not count.
        let response = introspector.send(request(&introspector, (method, template), &target)).await;
        assert_eq!(response.status, StatusCode::FORBIDDEN, "{method} {template}: {}", response.text);
        response.expect_error(StatusCode::FORBIDDEN, "access_denied");
    }
    assert_eq!(test.test_app.administered_checksum(&blog).await, before);
    assert_eq!(target.session_status(&test.test_app, &blog).await, StatusCode::OK);
    let in_shop = test.administrator("runs-blog").get("users").await;
    in_shop.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
    blog_admin.get("users").await.expect(StatusCode::OK);
}

#[tokio::test]
async fn ids_and_cursors_of_another_app_are_unknown() {
    let (test, blog) = start_with_blog(&[("runs", "UserAdmin")]).await;
    let shop = test.test_app.app.clone();
    let (shop_admin, blog_admin) = (test.admin(), test.administrator_of(&blog, "runs"));
    let target = Target::create(&test, &blog, &blog_admin).await;
    let own = Target::create(&test, &shop, &shop_admin).await;
    let external = json!({ "email": "grace@example.com", "external_id": "crm:1" });
    blog_admin.create(&external).await;
    let before = test.test_app.administered_checksum(&blog).await;

    for ApiCall { method, path: template, .. } in CALLS.into_iter().filter(|call| call.path.contains("{ID}")) {
        let response = shop_admin.send(request(&shop_admin, (method, template), &target)).await;
        assert_eq!(response.status, StatusCode::NOT_FOUND, "{method} {template}: {}", response.text);
        response.expect_error(StatusCode::NOT_FOUND, "not_found");
    }
    let session = shop_admin.delete(&format!("users/{}/sessions/{}", own.user, target.session)).await;
    session.expect_error(StatusCode::NOT_FOUND, "not_found");
    let session = shop_admin.delete(&format!("users/{}/sessions/{}", target.user, own.session)).await;
    session.expect_error(StatusCode::NOT_FOUND, "not_found");
    let retried = shop_admin.post("dead-letters/retry", &json!({ "ids": [target.dead_letter] })).await;
    assert_eq!(retried.expect(StatusCode::OK).integer("retried"), 0);
    let letters = shop_admin.get("dead-letters").await.expect(StatusCode::OK);
    assert_eq!(letters.body["dead_letters"].as_array().unwrap().len(), 1);
    assert_eq!(letters.body["dead_letters"][0]["id"], own.dead_letter.as_str());

    for list in ["users", "events"] {
        let page = blog_admin.get(&format!("{list}?limit=1")).await.expect(StatusCode::OK);
        let path = format!("{list}?limit=1&cursor={}", page.string("next"));
        shop_admin.get(&path).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        blog_admin.get(&path).await.expect(StatusCode::OK);
    }
    for filter in [format!("email={}", target.email.replace('@', "%40")), "external_id=crm%3A1".to_owned()] {
        let found = shop_admin.get(&format!("users?{filter}")).await.expect(StatusCode::OK);
        assert_eq!(found.body, json!({ "users": [] }), "{filter}");
        let found = blog_admin.get(&format!("users?{filter}")).await.expect(StatusCode::OK);
        assert_eq!(found.body["users"].as_array().unwrap().len(), 1, "{filter}");
    }
    let events = shop_admin.get(&format!("events?user={}", target.user)).await.expect(StatusCode::OK);
    assert_eq!(events.body, json!({ "events": [] }));
    let export = shop_admin.get(&format!("export?hashes=true&after={}", target.user)).await.expect(StatusCode::OK);
    assert!(!export.text.contains(&target.email) && !export.text.contains("grace@"), "{}", export.text);
    assert!(!shop_admin.get("export").await.expect(StatusCode::OK).text.contains("grace@"));

    assert_eq!(test.test_app.administered_checksum(&blog).await, before, "nothing has changed in the other App");
    assert_eq!(target.session_status(&test.test_app, &blog).await, StatusCode::OK);
    assert_eq!(own.session_status(&test.test_app, &shop).await, StatusCode::OK);
    // The call succeeds, because the same email address and external id can exist in both Apps.
    shop_admin.create(&external).await;
}
