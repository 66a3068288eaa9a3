//! Events that a program in the cluster fetches and acknowledges.

use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use latchkey_tests::{
    builders::Webhook,
    client::{ApiClient, ApiResponse},
    eventually,
    webhook_receiver::WebhookReceiver,
};
use serde_json::{Value, json};

use super::{CREATED, EMAIL, LIMIT, app, create_user};
use crate::administration::{AdministrationTest, Administrator};

const EVENTS: &str = "webhooks/sync/events";
const ACKNOWLEDGE: &str = "webhooks/sync/acknowledge";

/// Starts a service with a pull webhook `sync`. Also returns the webhook's consumer, the ServiceAccount `fetches`.
async fn start_pull() -> (AdministrationTest, Administrator) {
    let webhook = Webhook::pull("sync", "shop", "fetches", CREATED);
    let test = AdministrationTest::start_with(app().webhook(&webhook), &[]).await;
    let consumer = test.administrator("fetches");
    (test, consumer)
}

/// Fetches events, and returns them.
async fn fetch(consumer: &Administrator, query: &str) -> Vec<Value> {
    let response = consumer.get(&format!("{EVENTS}{query}")).await.expect(StatusCode::OK);
    response.body["events"].as_array().unwrap().clone()
}

async fn acknowledge(consumer: &Administrator, ids: &[&Value]) -> i64 {
    consumer.post(ACKNOWLEDGE, &json!({ "ids": ids })).await.expect(StatusCode::OK).integer("acknowledged")
}

#[tokio::test]
async fn an_event_is_leased_for_a_minute_and_repeated_until_it_is_acknowledged() {
    let (test, consumer) = start_pull().await;
    let (admin, test_app) = (test.admin(), &test.test_app);
    let user = create_user(&admin, EMAIL).await;
    let events = fetch(&consumer, "").await;
    assert_eq!(events.len(), 1);
    let audit = admin.get(&format!("events?user={user}")).await.expect(StatusCode::OK);
    let actor = json!({ "namespace": "shop", "name": "runs" });
    let data = json!({
        "app": test_app.id(), "user_id": user, "session_id": null, "version": 1, "detail": { "actor": actor },
    });
    let expected = json!({
        "id": audit.body["events"][0]["id"], "attempt": 1, "type": "user.created",
        "timestamp": events[0]["timestamp"], "data": data,
    });
    assert_eq!(events[0], expected);
    assert!(events[0]["timestamp"].is_string());

    assert!(fetch(&consumer, "").await.is_empty(), "it is leased");
    test_app.age_webhook_leases(20).await;
    assert!(fetch(&consumer, "").await.is_empty(), "for more than 20 s");
    test_app.age_webhook_leases(41).await;
    let again = fetch(&consumer, "").await;
    assert_eq!((&again[0]["id"], &again[0]["attempt"]), (&events[0]["id"], &json!(2)));
    assert_eq!(again[0]["data"], events[0]["data"]);

    assert_eq!(acknowledge(&consumer, &[&events[0]["id"]]).await, 1);
    assert_eq!(test_app.waiting_webhook_events().await, 0);
    assert_eq!(acknowledge(&consumer, &[&events[0]["id"]]).await, 0, "it is acknowledged once");
    test_app.age_webhook_leases(120).await;
    assert!(fetch(&consumer, "").await.is_empty());
}

#[tokio::test]
async fn unknown_ids_are_ignored() {
    let (test, consumer) = start_pull().await;
    let admin = test.admin();
    for name in ["ada", "grace"] {
        create_user(&admin, &format!("{name}@example.com")).await;
    }
    let events = fetch(&consumer, "").await;
    assert_eq!(events.len(), 2);
    let unknown = json!("00000000-0000-0000-0000-000000000000");
    assert_eq!(acknowledge(&consumer, &[&unknown]).await, 0);
    assert_eq!(acknowledge(&consumer, &[&unknown, &events[0]["id"]]).await, 1);
    test.test_app.age_webhook_leases(61).await;
    let left = fetch(&consumer, "").await;
    assert_eq!(left.len(), 1);
    assert_eq!(left[0]["id"], events[1]["id"]);
}

#[tokio::test]
async fn a_waiting_call_returns_soon_after_an_event() {
    let (test, consumer) = start_pull().await;
    let admin = test.admin();
    let begun = Instant::now();
    assert!(fetch(&consumer, "?wait=2").await.is_empty());
    assert!(begun.elapsed() >= Duration::from_millis(1900), "it waited for {:?}", begun.elapsed());

    let begun = Instant::now();
    let waits = fetch(&consumer, "?wait=20");
    let creates = async {
        let user = create_user(&admin, EMAIL).await;
        (user, Instant::now())
    };
    let (events, (user, created)) = tokio::join!(waits, creates);
    assert_eq!(events.len(), 1, "after {:?}", begun.elapsed());
    assert_eq!(events[0]["data"]["user_id"], user.as_str());
    assert!(created.elapsed() < Duration::from_secs(15), "it waited on for {:?}", created.elapsed());
    // A fetch returns a waiting event immediately.
    create_user(&admin, "grace@example.com").await;
    let begun = Instant::now();
    assert_eq!(fetch(&consumer, "?wait=20").await.len(), 1);
    assert!(begun.elapsed() < Duration::from_secs(15));
}

#[tokio::test]
async fn waiting_calls_count_only_towards_the_limit_of_their_caller() {
    // An App has at most 32 calls in flight, and a caller at most 8.
    let names: Vec<_> = (0..5).map(|number| format!("sync{number}")).collect();
    let app = names.iter().fold(app(), |app, name| app.webhook(&Webhook::pull(name, "shop", name, CREATED)));
    let test = AdministrationTest::start_with(app, &[]).await;
    let mut waiting = Vec::new();
    for name in &names {
        let consumer = test.administrator(name);
        let path = format!("webhooks/{name}/events");
        for _ in 0..8 {
            let request = consumer.request(Method::GET, &format!("{path}?wait=15"));
            waiting.push(tokio::spawn(async move {
                loop {
                    let response = request.try_clone().expect("it has no body").send().await?;
                    // Repeats a refused call: the ninth call (below) can arrive before the last of the eight, which is
                    // then refused.
                    if response.status() != StatusCode::TOO_MANY_REQUESTS {
                        return Ok::<_, reqwest::Error>(response);
                    }
                }
            }));
        }
        eventually("a ninth call is refused", LIMIT, || async {
            (consumer.get(&path).await.status == StatusCode::TOO_MANY_REQUESTS).then_some(())
        })
        .await;
    }
    let admin = test.admin();
    admin.get("users").await.expect(StatusCode::OK);
    create_user(&admin, EMAIL).await;
    let mut events = 0;
    for response in waiting {
        let response = response.await.unwrap().unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        let body: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
        events += body["events"].as_array().unwrap().len();
    }
    assert_eq!(events, 5, "one call of each consumer got the event");
}

#[tokio::test]
async fn a_waiting_call_ends_when_its_webhook_gets_another_consumer() {
    let of = |account: &str| Webhook::pull("sync", "shop", account, CREATED);
    // A second webhook lists the old consumer, so that the App still knows this consumer after the change.
    let app = app().webhook(&of("fetches")).webhook(&Webhook::pull("other", "shop", "fetches", &["user.deleted"]));
    let mut test = AdministrationTest::start_with(app, &[]).await;
    let consumer = test.administrator("fetches");
    let mut waiting = Vec::new();
    for _ in 0..8 {
        let request = consumer.request(Method::GET, &format!("{EVENTS}?wait=20"));
        waiting.push(tokio::spawn(async move {
            loop {
                let response = request.try_clone().expect("it has no body").send().await.unwrap();
                let (status, text) = (response.status(), response.text().await.unwrap());
                let body: Value = serde_json::from_str(&text).unwrap();
                // Repeats a refused call: the ninth call (below) can arrive before the last of the eight, which is then
                // refused. Also repeats a call that ends before the change of the webhook.
                let is_early = status == StatusCode::OK && body["events"] == json!([]);
                if status != StatusCode::TOO_MANY_REQUESTS && !is_early {
                    return (status, text);
                }
            }
        }));
    }
    // A ninth call is refused only when the server has authenticated and counted all eight calls.
    eventually("a ninth call is refused", LIMIT, || async {
        (consumer.get(EVENTS).await.status == StatusCode::TOO_MANY_REQUESTS).then_some(())
    })
    .await;
    test.test_app.apply(test.test_app.app.clone().webhook(&of("other-fetches"))).await;
    let user = create_user(&test.admin(), EMAIL).await;
    for response in waiting {
        let (status, text) = response.await.unwrap();
        assert!([StatusCode::FORBIDDEN, StatusCode::NOT_FOUND].contains(&status), "{status}: {text}");
    }
    let events = fetch(&test.administrator("other-fetches"), "").await;
    assert_eq!(events.len(), 1, "no call of the old consumer has leased the event");
    assert_eq!((&events[0]["data"]["user_id"], &events[0]["attempt"]), (&json!(user), &json!(1)));
}

#[tokio::test]
async fn the_query_parameter_limit_bounds_the_number_of_events() {
    let (test, consumer) = start_pull().await;
    let admin = test.admin();
    let mut users = Vec::new();
    for number in 0..5 {
        users.push(create_user(&admin, &format!("user{number}@example.com")).await);
    }
    let mut fetched = Vec::new();
    for (query, count) in [("?limit=2", 2), ("?limit=1", 1), ("?limit=100", 2), ("", 0)] {
        let events = fetch(&consumer, query).await;
        assert_eq!(events.len(), count, "{query}");
        fetched.extend(events.into_iter().map(|event| event["data"]["user_id"].as_str().unwrap().to_owned()));
    }
    fetched.sort();
    users.sort();
    assert_eq!(fetched, users);
}

#[tokio::test]
async fn only_the_consumer_fetches_and_acknowledges_the_events_of_a_webhook() {
    let receiver = WebhookReceiver::start().unwrap();
    let app = app()
        .webhook(&Webhook::pull("sync", "shop", "fetches", CREATED))
        .webhook(&Webhook::pull("other", "shop", "other-fetches", CREATED))
        .webhook(&Webhook::pull("elsewhere", "elsewhere", "stranger", CREATED))
        .webhook(&Webhook::push("crm", &receiver.url(), CREATED));
    let test = AdministrationTest::start_with(app, &[]).await;
    let consumer = test.administrator("fetches");
    create_user(&test.admin(), EMAIL).await;
    let event = fetch(&consumer, "").await.remove(0);
    let ids = json!({ "ids": [event["id"]] });
    let both = async |caller: &Administrator, webhook: &str| -> [ApiResponse; 2] {
        [
            caller.get(&format!("webhooks/{webhook}/events")).await,
            caller.post(&format!("webhooks/{webhook}/acknowledge"), &ids).await,
        ]
    };
    for account in ["runs", "reads", "imports", "asks", "other-fetches"] {
        for response in both(&test.administrator(account), "sync").await {
            response.expect_error(StatusCode::FORBIDDEN, "access_denied");
        }
    }
    // The consumer `stranger` is in another namespace than this caller with the same name.
    for response in both(&test.administrator("stranger"), "sync").await {
        response.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
    }
    for account in ["fetches", "runs"] {
        for webhook in ["unknown", "crm", "SYNC"] {
            for response in both(&test.administrator(account), webhook).await {
                response.expect_error(StatusCode::NOT_FOUND, "not_found");
            }
        }
    }
    // A consumer has no other right.
    for path in ["users", "events", "export", "dead-letters"] {
        consumer.get(path).await.expect_error(StatusCode::FORBIDDEN, "access_denied");
    }
    let user = test.test_app.log_in_new_user("grace@example.com").await;
    let client = ApiClient::new(test.test_app.stack.server().public);
    let introspect = client.request(Method::POST, &format!("v1/{}/introspect", test.test_app.id()));
    let introspect = introspect.bearer_auth(test.token("fetches")).json(&json!({ "token": user.signed_in.token() }));
    client.send(introspect).await.expect_error(StatusCode::FORBIDDEN, "access_denied");

    // No refused call has acknowledged the event.
    test.test_app.age_webhook_leases(61).await;
    let left = fetch(&consumer, "").await;
    assert!(left.iter().any(|left| left["id"] == event["id"]), "{left:?}");
}

#[tokio::test]
async fn invalid_queries_and_bodies_are_refused() {
    let (test, consumer) = start_pull().await;
    create_user(&test.admin(), EMAIL).await;
    for query in [
        "limit=0",
        "limit=101",
        "limit=x",
        "limit=",
        "limit=1&limit=2",
        "wait=21",
        "wait=-1",
        "wait=x",
        "cursor=x",
        "timeout=1",
    ] {
        let response = consumer.get(&format!("{EVENTS}?{query}")).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST, "{query}: {}", response.text);
        response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    let ids: Vec<_> = (0..101).map(|number| format!("00000000-0000-0000-0000-{number:012}")).collect();
    for body in [
        json!({}),
        json!({ "ids": [] }),
        json!({ "ids": ids }),
        json!({ "ids": "x" }),
        json!({ "ids": [7] }),
        json!({ "ids": [ids[0]], "webhook": "sync" }),
    ] {
        let response = consumer.post(ACKNOWLEDGE, &body).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST, "{body}: {}", response.text);
    }
    let most = &ids[..100];
    let response = consumer.post(ACKNOWLEDGE, &json!({ "ids": most })).await.expect(StatusCode::OK);
    assert_eq!(response.integer("acknowledged"), 0);
    let put = consumer.send(consumer.request(Method::PUT, EVENTS)).await;
    put.expect(StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(fetch(&consumer, "?limit=1&wait=0").await.len(), 1, "no refused call has leased the event");
}

#[tokio::test]
async fn a_profile_is_read_when_an_event_is_fetched() {
    let webhook = Webhook::pull("sync", "shop", "fetches", CREATED).include_profile();
    let test = AdministrationTest::start_with(app().webhook(&webhook), &[]).await;
    let (admin, consumer) = (test.admin(), test.administrator("fetches"));
    let user = create_user(&admin, EMAIL).await;
    let first = fetch(&consumer, "").await.remove(0);
    let profile = json!({
        "email": EMAIL, "email_verified": false, "name": "", "state": "unverified", "external_id": null, "version": 1,
    });
    assert_eq!(first["data"]["user"], profile);
    admin.delete(&format!("users/{user}")).await.expect(StatusCode::OK);
    test.test_app.age_webhook_leases(61).await;
    let second = fetch(&consumer, "").await.remove(0);
    assert_eq!(second["id"], first["id"]);
    assert_eq!(second["data"].get("user"), Some(&Value::Null));
}
