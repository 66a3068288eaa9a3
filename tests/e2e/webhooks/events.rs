//! What a webhook delivers: the body and the signatures of an event, and which action causes which event.

use std::collections::{BTreeSet, HashSet};

use http::{Method, StatusCode};
use latchkey_crds::webhook::WebhookEvent;
use latchkey_tests::{
    builders::Webhook,
    eventually,
    passwords::{NEW_PASSWORD, PASSWORD},
    webhook_receiver::{ReceivedEvent, Reply, WebhookReceiver},
};
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{CREATED, EMAIL, LIMIT, app, create_user, start_push};
use crate::{
    administration::AdministrationTest,
    social::scripted_provider::{Person, ScriptedProvider},
    support::{NAME, TestApp, WRONG_CODE},
};

const NEW_EMAIL: &str = "ada@new.example";
/// Maximum difference in seconds between the clock reads of the server and of the receiver, on a loaded machine.
const CLOCK_TOLERANCE: u64 = 60;

fn all_events() -> Vec<&'static str> {
    WebhookEvent::ALL.iter().map(|event| event.as_str()).collect()
}

#[tokio::test]
async fn a_registration_is_reported_with_a_signature_and_without_personal_data() {
    let (test, receiver, webhook) = start_push(CREATED).await;
    let client = test.test_app.client();
    let registered = client.register(test.test_app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let user = registered.string("local_id");
    let event = receiver.wait_for(1).await.remove(0);

    assert_eq!((&event.method, event.path.as_str()), (&Method::POST, "/hook"));
    let media_type = event.headers["content-type"].to_str().unwrap();
    assert!(media_type.starts_with("application/json"), "{media_type}");
    assert!(event.is_signed_with(webhook.key()) && event.signature_count() == 1, "{:?}", event.headers);
    assert!(!event.is_signed_with(webhook.clone().rotate_key().key()), "with no other key");
    assert!(event.timestamp().abs_diff(event.unix_time) < CLOCK_TOLERANCE, "the time of the attempt");

    let admin = test.admin();
    let audit = admin.get(&format!("events?user={user}&kind=registered")).await.expect(StatusCode::OK);
    let audit = &audit.body["events"][0];
    assert_eq!(event.id(), audit["id"], "the id of the audit event");
    let timestamp = event.body["timestamp"].as_str().unwrap();
    let timestamp = OffsetDateTime::parse(timestamp, &Rfc3339).unwrap();
    assert_eq!(timestamp.unix_timestamp(), audit["at"].as_i64().unwrap());
    let version = admin.get(&format!("users/{user}")).await.expect(StatusCode::OK).integer("version");
    let data = json!({
        "app": test.test_app.id(), "user_id": user, "session_id": null, "version": version, "detail": null,
    });
    let expected = json!({ "type": "user.created", "timestamp": event.body["timestamp"], "data": data });
    assert_eq!(event.body, expected);
    let text = event.text.to_lowercase();
    for personal in [EMAIL, "example.com", "lovelace", &client.address().to_string()] {
        assert!(!text.contains(personal), "{personal} in {text}");
    }
}

#[tokio::test]
async fn a_login_is_reported_with_its_session() {
    let (test, receiver, webhook) = start_push(&["session.created"]).await;
    let (client, app) = (test.test_app.client(), test.test_app.id());
    let user = test
        .admin()
        .create(&json!({ "email": EMAIL, "email_verified": true, "password": PASSWORD, "name": NAME }))
        .await;
    let login = client.login(app, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let event = receiver.wait_for(1).await.remove(0);
    assert!(event.is_signed_with(webhook.key()));
    let data = json!({
        "app": app, "user_id": user, "session_id": login.string("session_id"), "version": null,
        "detail": { "amr": "pwd" },
    });
    let expected = json!({ "type": "session.created", "timestamp": event.body["timestamp"], "data": data });
    assert_eq!(event.body, expected);
}

#[tokio::test]
async fn each_attempt_sends_the_current_profile_or_null_after_the_users_deletion() {
    let receiver = WebhookReceiver::start().unwrap();
    let webhook = Webhook::push("crm", &receiver.url(), &["user.created", "user.deleted"]).include_profile();
    let test = AdministrationTest::start_with(app().webhook(&webhook), &[]).await;
    let admin = test.admin();
    receiver.script([Reply::status(500), Reply::status(500)]);
    let grace =
        json!({ "email": "Grace@example.com", "email_verified": true, "name": "Grace", "external_id": "crm:7" });
    let grace = admin.create(&grace).await;
    let alan = create_user(&admin, "alan@example.com").await;
    let attempts_of = |user: &str, type_: &str| {
        let of_user = |event: &ReceivedEvent| event.body["data"]["user_id"] == user && event.event_type() == type_;
        receiver.events().into_iter().filter(of_user).collect::<Vec<_>>()
    };
    receiver.wait_for(2).await;
    let first = attempts_of(&grace, "user.created").remove(0);
    let profile = json!({
        "email": "Grace@example.com", "email_verified": true, "name": "Grace", "state": "active",
        "external_id": "crm:7", "version": 1,
    });
    assert_eq!(first.body["data"]["user"], profile);
    assert_eq!(attempts_of(&alan, "user.created")[0].body["data"]["user"]["external_id"], Value::Null);

    admin.patch(&format!("users/{grace}"), &json!({ "name": "Rear Admiral" })).await.expect(StatusCode::OK);
    admin.delete(&format!("users/{alan}")).await.expect(StatusCode::OK);
    // Waits for two retries and for the event of the deletion.
    receiver.wait_for(5).await;
    let second = attempts_of(&grace, "user.created").remove(1);
    assert_eq!(second.id(), first.id());
    assert_eq!(second.body["data"]["version"], 1, "the version of the event");
    assert_eq!(
        (&second.body["data"]["user"]["name"], &second.body["data"]["user"]["version"]),
        (&json!("Rear Admiral"), &json!(2))
    );
    assert!(second.is_signed_with(webhook.key()));
    for of_deleted in [attempts_of(&alan, "user.created").remove(1), attempts_of(&alan, "user.deleted").remove(0)] {
        assert_eq!(of_deleted.body["data"].get("user"), Some(&Value::Null), "{}", of_deleted.text);
        assert!(!of_deleted.text.contains("alan@"), "{}", of_deleted.text);
    }
}

/// The events that the receiver has got, compared with the actions that cause them.
struct ReportedEvents<'a> {
    receiver: &'a WebhookReceiver,
    test_app: &'a TestApp,
    seen: usize,
}

impl ReportedEvents<'_> {
    /// Waits for the events of an action. Asserts that no other events arrive.
    async fn expect(&mut self, action: &str, types: &[&str]) {
        let arrived = || async { (self.receiver.events().len() >= self.seen + types.len()).then_some(()) };
        eventually(&format!("the events of {action}"), LIMIT, arrived).await;
        self.test_app.wait_until_webhooks_settle().await;
        let events = self.receiver.events();
        let mut found: Vec<&str> = events[self.seen..].iter().map(ReceivedEvent::event_type).collect();
        let mut expected = types.to_vec();
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected, "{action}");
        self.seen = events.len();
    }

    /// Returns the newest event.
    fn last(&self) -> ReceivedEvent {
        self.receiver.events().pop().expect("an event has arrived")
    }
}

#[tokio::test]
async fn each_action_is_reported_once_with_the_type_of_its_event() {
    let receiver = WebhookReceiver::start().unwrap();
    let webhook = Webhook::push("crm", &receiver.url(), &all_events());
    let upstream = ScriptedProvider::start().await;
    let app = app().webhook(&webhook).set("/tokens/refreshGraceSeconds", 0);
    let test = AdministrationTest::start_with(app, &[upstream.provider("local")]).await;
    let (admin, test_app) = (test.admin(), &test.test_app);
    let (id, client) = (test_app.id(), test_app.client());
    let mut reported = ReportedEvents { receiver: &receiver, test_app, seen: 0 };

    // Actions of the public API.
    test_app.register(EMAIL).await;
    reported.expect("a registration", &["user.created"]).await;
    let code = test_app.code(EMAIL, 1).await;
    client.confirm(id, &code).await.expect(StatusCode::OK);
    reported.expect("a confirmation, which logs in", &["user.verified", "session.created"]).await;
    let owner = test_app.log_in_again(EMAIL).await;
    reported.expect("a login", &["session.created"]).await;
    owner.rename_user("Countess of Lovelace").await.expect(StatusCode::OK);
    reported.expect("a new name", &["user.updated"]).await;
    owner.change_password(Some(PASSWORD), NEW_PASSWORD).await.expect(StatusCode::OK);
    reported.expect("a new password", &["user.password_changed"]).await;
    owner.change_address(Some(NEW_PASSWORD), NEW_EMAIL).await.expect(StatusCode::OK);
    let code = test_app.code(NEW_EMAIL, 1).await;
    owner.signed_in.confirm(&code).await.expect(StatusCode::OK);
    reported.expect("a new address", &["user.updated"]).await;
    let code = test_app.request_reset_code(NEW_EMAIL, 2).await;
    client.confirm_password(id, NEW_EMAIL, &code, PASSWORD).await.expect(StatusCode::OK);
    reported.expect("a reset of the password", &["user.password_changed"]).await;
    let owner = test_app.log_in_again(NEW_EMAIL).await;
    reported.expect("a login", &["session.created"]).await;
    let token = json!({ "token": upstream.access_token(&Person::verified("1", "ada@work.example")) });
    owner.signed_in.post("user/identities/local", &token).await.expect(StatusCode::OK);
    reported.expect("a linked identity", &["user.identity_linked"]).await;
    owner.signed_in.delete("user/identities/local").await.expect(StatusCode::OK);
    reported.expect("a removed identity", &["user.identity_unlinked"]).await;
    let other = test_app.log_in_again(NEW_EMAIL).await;
    test_app.log_in_again(NEW_EMAIL).await;
    reported.expect("two logins", &["session.created", "session.created"]).await;
    owner.signed_in.delete(&format!("sessions/{}", other.session)).await.expect(StatusCode::OK);
    reported.expect("the end of a session", &["session.ended"]).await;
    owner.signed_in.delete("sessions").await.expect(StatusCode::OK);
    reported.expect("the end of the other sessions", &["session.ended"]).await;
    owner.signed_in.post("logout", &json!({})).await.expect(StatusCode::OK);
    reported.expect("a logout", &["session.ended"]).await;
    let stolen = test_app.log_in_again(NEW_EMAIL).await;
    reported.expect("a login", &["session.created"]).await;
    let second = client.refresh(id, &stolen.refresh_token).await.expect(StatusCode::OK);
    // The previous refresh token can be sent again. Only an older one counts as stolen.
    test_app.client().refresh(id, &stolen.refresh_token).await.expect(StatusCode::OK);
    client.refresh(id, second.string("refresh_token")).await.expect(StatusCode::OK);
    let refused = test_app.client().refresh(id, &stolen.refresh_token).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    reported.expect("a stolen session", &["session.stolen"]).await;
    assert_eq!(reported.last().body["data"]["session_id"], stolen.session.as_str());
    let owner = test_app.log_in_again(NEW_EMAIL).await;
    reported.expect("a login", &["session.created"]).await;
    owner.delete_user(&json!({ "password": PASSWORD })).await.expect(StatusCode::OK);
    reported.expect("a deletion", &["user.deleted"]).await;

    // Actions of the administration API.
    let actor = json!({ "namespace": "shop", "name": "runs" });
    let grace = json!({
        "email": "grace@example.com", "email_verified": true, "password": PASSWORD,
        "identities": [{ "provider": "local", "subject": "2" }],
    });
    let grace = admin.create(&grace).await;
    reported.expect("a creation", &["user.created"]).await;
    let data = json!({ "app": id, "user_id": grace, "session_id": null, "version": 1, "detail": { "actor": actor } });
    assert_eq!(reported.last().body["data"], data);
    let path = format!("users/{grace}");
    admin.patch(&path, &json!({ "name": "Grace" })).await.expect(StatusCode::OK);
    reported.expect("a change", &["user.updated"]).await;
    let data = reported.last().body["data"].clone();
    assert_eq!((&data["version"], &data["detail"]["fields"]), (&json!(2), &json!(["name"])));
    admin.patch(&path, &json!({ "name": "Grace" })).await.expect(StatusCode::OK);
    admin.patch(&path, &json!({ "disabled": true })).await.expect(StatusCode::OK);
    reported.expect("a change without a difference, and disabling", &["user.disabled"]).await;
    admin.patch(&path, &json!({ "disabled": false })).await.expect(StatusCode::OK);
    reported.expect("enabling", &["user.enabled"]).await;
    admin.delete(&format!("{path}/identities/local")).await.expect(StatusCode::OK);
    reported.expect("a removed identity", &["user.identity_unlinked"]).await;
    let session = test_app.log_in_again("grace@example.com").await;
    test_app.log_in_again("grace@example.com").await;
    reported.expect("two logins", &["session.created", "session.created"]).await;
    admin.delete(&format!("{path}/sessions/{}", session.session)).await.expect(StatusCode::OK);
    reported.expect("the end of a session", &["session.ended"]).await;
    admin.delete(&format!("{path}/sessions")).await.expect(StatusCode::OK);
    reported.expect("the end of all sessions", &["session.ended"]).await;
    admin.post(&format!("{path}/mails"), &json!({ "mail": "reset" })).await.expect(StatusCode::OK);
    admin.get(&format!("{path}/export")).await.expect(StatusCode::OK);
    reported.expect("a mail, which is no event, and an export of a user", &["users.exported"]).await;
    admin.get("export").await.expect(StatusCode::OK);
    reported.expect("an export of all users", &["users.exported"]).await;
    assert_eq!(reported.last().body["data"]["user_id"], Value::Null);
    let lines =
        ["1", "2", "3"].map(|number| json!({ "external_id": number, "email": format!("u{number}@example.com") }));
    admin.import("source=crm", &lines).await.expect(StatusCode::OK);
    admin.import("source=crm", &lines).await.expect(StatusCode::OK);
    reported.expect("an import of three users and its repetition", &["users.imported"]).await;
    let data = reported.last().body["data"].clone();
    assert_eq!((&data["user_id"], &data["version"], &data["session_id"]), (&Value::Null, &Value::Null, &Value::Null));
    let detail = json!({ "actor": actor, "source": "crm", "created": 3, "unchanged": 0, "refused": 0 });
    assert_eq!(data["detail"], detail);
    admin.delete(&path).await.expect(StatusCode::OK);
    reported.expect("a deletion", &["user.deleted"]).await;

    let events = receiver.events();
    let ids: HashSet<_> = events.iter().map(|event| event.id().to_owned()).collect();
    assert_eq!(ids.len(), events.len(), "each event arrived once");
    let types: BTreeSet<_> = events.iter().map(ReceivedEvent::event_type).collect();
    let all: BTreeSet<_> = all_events().into_iter().collect();
    assert_eq!(types, all, "every type");
    assert!(events.iter().all(|event| event.is_signed_with(webhook.key())));
    for event in &events {
        let has_version = event.event_type().starts_with("user.");
        assert_eq!(event.body["data"]["version"].is_i64(), has_version, "{}", event.text);
        assert_eq!(event.body["data"].as_object().unwrap().len(), 5, "{}", event.text);
    }
}

#[tokio::test]
async fn events_that_a_webhook_does_not_list_are_not_delivered() {
    let receiver = WebhookReceiver::start().unwrap();
    let deletions = Webhook::push("deletions", &receiver.url(), &["user.deleted"]);
    let imports = Webhook::pull("imports", "shop", "sync", &["users.imported"]);
    let test = AdministrationTest::start_with(app().webhook(&deletions).webhook(&imports), &[]).await;
    let admin = test.admin();
    let user = create_user(&admin, EMAIL).await;
    admin.patch(&format!("users/{user}"), &json!({ "name": NAME })).await.expect(StatusCode::OK);
    test.test_app.register("grace@example.com").await;
    assert_eq!(test.test_app.waiting_webhook_events().await, 0, "no row is written");
    admin.delete(&format!("users/{user}")).await.expect(StatusCode::OK);
    let event = receiver.wait_for(1).await.remove(0);
    assert_eq!((event.event_type(), &event.body["data"]["user_id"]), ("user.deleted", &json!(user)));
    test.test_app.wait_until_webhooks_settle().await;
    assert_eq!(receiver.events().len(), 1);
    let pulled = test.administrator("sync").get("webhooks/imports/events").await.expect(StatusCode::OK);
    assert_eq!(pulled.body, json!({ "events": [] }));
}

#[tokio::test]
async fn refused_calls_are_not_reported() {
    let (test, receiver, _) = start_push(&all_events()).await;
    let (admin, client) = (test.admin(), test.test_app.client());
    let user = create_user(&admin, EMAIL).await;
    receiver.wait_for(1).await;
    client.login(test.test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    client.confirm(test.test_app.id(), WRONG_CODE).await.expect(StatusCode::BAD_REQUEST);
    admin.post("users", &json!({ "email": EMAIL })).await.expect_error(StatusCode::CONFLICT, "email_taken");
    let stale = admin.request(Method::DELETE, &format!("users/{user}")).header("If-Match", "\"7\"");
    admin.send(stale).await.expect_error(StatusCode::PRECONDITION_FAILED, "version_conflict");
    let dry = admin.import("source=crm&dry_run=true", &[json!({ "external_id": "1", "email": "x@example.com" })]).await;
    dry.expect(StatusCode::OK);
    admin.delete(&format!("users/{user}")).await.expect(StatusCode::OK);
    test.test_app.wait_until_webhooks_settle().await;
    let events = receiver.events();
    let types: Vec<_> = events.iter().map(ReceivedEvent::event_type).collect();
    assert_eq!(types, ["user.created", "user.deleted"]);
}

#[tokio::test]
async fn an_event_is_signed_with_both_keys_during_a_rotation() {
    let (mut test, receiver, old) = start_push(CREATED).await;
    let rotated = old.clone().rotate_key();
    test.test_app.apply(test.test_app.app.clone().webhook(&rotated)).await;
    create_user(&test.admin(), EMAIL).await;
    let event = receiver.wait_for(1).await.remove(0);
    assert_eq!(event.signature_count(), 2, "{:?}", event.headers);
    assert!(event.is_signed_with(old.key()) && event.is_signed_with(rotated.key()), "{:?}", event.headers);

    let rotated = rotated.without_previous_key();
    test.test_app.apply(test.test_app.app.clone().webhook(&rotated)).await;
    create_user(&test.admin(), "grace@example.com").await;
    let event = receiver.wait_for(2).await.remove(1);
    assert_eq!(event.signature_count(), 1, "{:?}", event.headers);
    assert!(event.is_signed_with(rotated.key()) && !event.is_signed_with(old.key()), "{:?}", event.headers);
}

#[tokio::test]
async fn events_wait_for_a_usable_secret() {
    let (receiver, other_receiver) = (WebhookReceiver::start().unwrap(), WebhookReceiver::start().unwrap());
    let webhook = Webhook::push("crm", &receiver.url(), CREATED);
    let app = app().webhook(&webhook).webhook(&Webhook::push("other", &other_receiver.url(), CREATED));
    let test = AdministrationTest::start_with(app, &[]).await;
    let mut keys = Value::Null;
    let path = "/webhooks/0/delivery/push/keys";
    test.test_app.edit_rendered(|document| keys = document.pointer_mut(path).expect("a push webhook").take()).await;
    let admin = test.admin();
    create_user(&admin, EMAIL).await;
    other_receiver.wait_for_distinct(1).await;
    // The first event is due again for `receiver`. A server that sent events without a signature would have sent it to
    // `receiver` before `other_receiver` gets the second event.
    test.test_app.make_webhook_events_due().await;
    create_user(&admin, "grace@example.com").await;
    other_receiver.wait_for_distinct(2).await;
    assert!(receiver.events().is_empty(), "nothing is sent without a signature");

    test.test_app.edit_rendered(|document| *document.pointer_mut(path).expect("a push webhook") = keys).await;
    eventually("both events arrive", LIMIT, || async {
        test.test_app.make_webhook_events_due().await;
        (receiver.distinct_count() == 2).then_some(())
    })
    .await;
    assert!(receiver.events().iter().all(|event| event.is_signed_with(webhook.key())));
    assert_eq!(admin.get("dead-letters").await.expect(StatusCode::OK).body, json!({ "dead_letters": [] }));
}
