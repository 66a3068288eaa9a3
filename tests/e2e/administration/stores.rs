//! Calls while Postgres or Redis is unavailable, and calls that are cut off.

use http::StatusCode;
use latchkey_tests::{
    builders::{App, Provider, Webhook},
    client::ApiResponse,
    eventually,
    proxy::{Proxy, Trap},
    stack::Stack,
};
use serde_json::json;

use super::{
    AdministrationTest,
    access::{ApiCall, CALLS},
    calls::{Target, request},
};
use crate::{
    fault_support::{expect_unavailable, unlimited_app},
    support::LIVE_LIMIT,
};

/// The calls that need Redis (specification: Administration, Rules for all calls).
const REDIS_CALLS: [(&str, &str); 4] = [
    ("GET", "users/{ID}/sessions"),
    ("DELETE", "users/{ID}/sessions/{ID}"),
    ("POST", "users/{ID}/mails"),
    ("GET", "users/{ID}/export"),
];

/// An App with a pull webhook, on a service with proxies in front of the stores.
async fn start_with_proxied_stores(events: &[&str]) -> AdministrationTest {
    let app = unlimited_app("shop").webhook(&Webhook::pull("sync", "shop", "fetches", events));
    AdministrationTest::start_on(Stack::builder().proxied(), app, &[Provider::new("github", "github")]).await
}

fn postgres_proxy(test: &AdministrationTest) -> &Proxy {
    test.test_app.stack.postgres_proxy.as_ref().expect("the service has proxies")
}

/// Waits until calls succeed again.
async fn wait_until_recovered(test: &AdministrationTest) {
    let admin = test.admin();
    eventually("calls succeed again", LIVE_LIMIT, || async {
        (admin.get("users?limit=1").await.status == StatusCode::OK).then_some(())
    })
    .await;
}

/// Makes the two calls of a pull webhook: fetches events, and acknowledges events.
async fn pull_calls(test: &AdministrationTest) -> [ApiResponse; 2] {
    let consumer = test.administrator("fetches");
    let ids = json!({ "ids": ["00000000-0000-0000-0000-000000000000"] });
    [consumer.get("webhooks/sync/events").await, consumer.post("webhooks/sync/acknowledge", &ids).await]
}

#[tokio::test]
async fn every_call_is_unavailable_without_postgres_and_changes_nothing() {
    let test = start_with_proxied_stores(&["user.created"]).await;
    let (admin, test_app) = (test.admin(), &test.test_app);
    let app: &App = &test_app.app;
    let target = Target::create(&test, app, &admin).await;
    assert_eq!(test_app.settled_mail_count(&target.email).await, 0);
    let before = test_app.administered_checksum(app).await;

    postgres_proxy(&test).refuse().await;
    for ApiCall { method, path: template, .. } in CALLS {
        let response = admin.send(request(&admin, (method, template), &target)).await;
        assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE, "{method} {template}: {}", response.text);
        expect_unavailable(response);
    }
    for response in pull_calls(&test).await {
        expect_unavailable(response);
    }
    postgres_proxy(&test).restore().expect("the proxy's port is free");
    wait_until_recovered(&test).await;
    assert_eq!(test_app.administered_checksum(app).await, before);
    assert_eq!(target.session_status(test_app, app).await, StatusCode::OK, "no session has ended");
    assert_eq!(test_app.settled_mail_count(&target.email).await, 0);

    // After the recovery, the same requests succeed.
    for ApiCall { method, path: template, .. } in CALLS {
        let target = Target::create(&test, app, &admin).await;
        let response = admin.send(request(&admin, (method, template), &target)).await;
        assert_eq!(response.status, StatusCode::OK, "{method} {template}: {}", response.text);
    }
    for response in pull_calls(&test).await {
        response.expect(StatusCode::OK);
    }
}

#[tokio::test]
async fn only_calls_about_sessions_and_limits_are_unavailable_without_redis() {
    let test = start_with_proxied_stores(&["user.created"]).await;
    let (admin, test_app) = (test.admin(), &test.test_app);
    let app: &App = &test_app.app;
    let mut targets = Vec::new();
    for _ in CALLS {
        targets.push(Target::create(&test, app, &admin).await);
    }
    let target_of = |call: (&str, &str)| {
        let index = CALLS.iter().position(|other| (other.method, other.path) == call);
        &targets[index.expect("it is a call")]
    };
    let redis = test_app.stack.redis_proxy.as_ref().expect("the service has proxies");
    redis.refuse().await;
    for ApiCall { method, path: template, .. } in CALLS {
        let call = (method, template);
        let response = admin.send(request(&admin, call, target_of(call))).await;
        let expected = if REDIS_CALLS.contains(&call) { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
        assert_eq!(response.status, expected, "{method} {template}: {}", response.text);
        if REDIS_CALLS.contains(&call) {
            expect_unavailable(response);
        }
    }
    for response in pull_calls(&test).await {
        response.expect(StatusCode::OK);
    }
    redis.restore().expect("the proxy's port is free");

    // The calls that were refused have changed nothing.
    let is_live = async |call: (&str, &str)| {
        let status = eventually("Redis is available again", LIVE_LIMIT, || async {
            let status = target_of(call).session_status(test_app, app).await;
            (status != StatusCode::SERVICE_UNAVAILABLE).then_some(status)
        })
        .await;
        status == StatusCode::OK
    };
    for call in REDIS_CALLS {
        assert!(is_live(call).await, "{call:?} has ended no session");
        let path = format!("events?user={}", target_of(call).user);
        let events = admin.get(&path).await.expect(StatusCode::OK);
        let kinds: Vec<_> = events.body["events"].as_array().unwrap().iter().map(|event| &event["kind"]).collect();
        assert_eq!(kinds, ["logged_in", "user_created"], "{call:?} is not recorded");
    }
    let mail_target = target_of(("POST", "users/{ID}/mails"));
    assert_eq!(test_app.settled_mail_count(&mail_target.email).await, 0);
    // The calls that were accepted take effect in Redis, too.
    for call in [("DELETE", "users/{ID}"), ("DELETE", "users/{ID}/sessions")] {
        eventually(&format!("{call:?} has ended the session"), LIVE_LIMIT, || async {
            test_app.make_outbox_due().await;
            (target_of(call).session_status(test_app, app).await == StatusCode::UNAUTHORIZED).then_some(())
        })
        .await;
    }
}

/// The server writes the user, the audit event and the webhook row together or not at all, wherever the connection to
/// Postgres is cut.
#[tokio::test]
async fn a_change_that_is_cut_off_is_complete_or_absent() {
    let test = start_with_proxied_stores(&["user.updated"]).await;
    let (admin, test_app) = (test.admin(), &test.test_app);
    let user = admin.create(&json!({ "email": "ada@example.com" })).await;
    let path = format!("users/{user}");
    let proxy = postgres_proxy(&test);
    let (mut refused, mut changes) = (0, 0);
    // Each step cuts a connection 250 bytes later than the step before. The bytes of all connections count, including
    // those of polling workers.
    for step in 0..60 {
        let name = format!("Name {step}");
        proxy.set_trap(Trap::AfterBytes(1 + step * 250));
        let response = admin.patch(&path, &json!({ "name": name })).await;
        proxy.restore().expect("the proxy's port is free");
        let is_refused = response.status == StatusCode::SERVICE_UNAVAILABLE;
        if is_refused {
            expect_unavailable(response);
            refused += 1;
        } else {
            response.expect(StatusCode::OK);
        }
        let found = eventually("the user is read", LIVE_LIMIT, || async {
            let response = admin.get(&path).await;
            (response.status == StatusCode::OK).then_some(response)
        })
        .await;
        let is_changed = found.string("name") == name;
        assert!(is_changed || is_refused, "step {step}: {}", found.text);
        changes += i64::from(is_changed);
        assert_eq!(found.integer("version"), 1 + changes, "step {step}");
        let events = "SELECT count(*) FROM audit_events WHERE kind = 'user_changed'";
        assert_eq!(test_app.query_number(events).await, changes, "step {step}");
        assert_eq!(test_app.query_number("SELECT count(*) FROM webhook_events").await, changes, "step {step}");
        if changes == 3 {
            break;
        }
    }
    assert!(refused > 0 && changes > 0, "{refused} refused calls, {changes} changes");
}
