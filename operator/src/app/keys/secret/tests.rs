use http::{Method, StatusCode};
use latchkey_crds::rendered::SigningAlgorithm;
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::*;
use crate::app::mock_api::{MockApi, ReceivedCall, api_error, not_found};

const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;
const SECRETS: &str = "/api/v1/namespaces/latchkey/secrets";
const SECRET: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-keys-shop";

fn shop() -> AppId {
    "shop".parse().unwrap()
}

fn us() -> AppIdOwner {
    AppIdOwner { namespace: "shop".into(), name: "store".into() }
}

fn keys() -> KeyDocument {
    KeyDocument::first(&shop(), SigningAlgorithm::ES256, NOW).unwrap()
}

fn secrets(script: &MockApi) -> Api<Secret> {
    Api::namespaced(script.client(), "latchkey")
}

/// Returns the Secret as the API server returns it.
fn returned(document: &KeyDocument, owner: &AppIdOwner, version: &str) -> Value {
    let mut stored = build_secret(document, owner, None);
    stored.metadata.namespace = Some("latchkey".into());
    stored.metadata.uid = Some("1".into());
    stored.metadata.resource_version = Some(version.into());
    stored.metadata.labels = Some(BTreeMap::from([("backup".into(), "yes".into())]));
    serde_json::to_value(stored).unwrap()
}

/// Returns the response of the API server to a write: the written object, with a new `resourceVersion`.
fn written(version: &'static str) -> impl FnOnce(&ReceivedCall) -> (StatusCode, Value) + Send + 'static {
    move |call| {
        let mut body = call.body.clone();
        body["metadata"]["resourceVersion"] = json!(version);
        (StatusCode::OK, body)
    }
}

/// Returns the response of the API server to a read: this object.
fn respond_with(value: Value) -> impl FnOnce(&ReceivedCall) -> (StatusCode, Value) + Send + 'static {
    move |_| (StatusCode::OK, value)
}

fn stored(found: KeyLookup) -> Stored {
    match found {
        KeyLookup::Stored(stored) => *stored,
        KeyLookup::Missing | KeyLookup::Unusable(..) => panic!("{found:?}"),
    }
}

#[tokio::test]
async fn the_first_keys_are_created_and_read_back_unchanged() {
    let script = MockApi::default().expect(Method::POST, SECRETS, written("1"));
    let document = keys().written_for("shop");
    let created = create(&secrets(&script), &document, &us()).await.unwrap().unwrap();
    assert_eq!((&created.document, &created.owner), (&document, &us()));
    let calls = script.finish();
    let body = &calls[0].body;
    assert_eq!(body["type"], "latchkey.dev/app-keys");
    assert_eq!(body["metadata"]["name"], "latchkey-keys-shop");
    assert_eq!(body["metadata"]["annotations"]["latchkey.dev/namespace"], "shop");
    assert_eq!(body["metadata"]["annotations"]["latchkey.dev/name"], "store");

    let script = MockApi::default().expect(Method::GET, SECRET, respond_with(body.clone()));
    assert_eq!(stored(read(&secrets(&script), &shop()).await.unwrap()).document, document);
}

#[tokio::test]
async fn one_of_two_concurrent_creations_of_the_first_keys_wins() {
    let (their_keys, other_owner) = (keys(), AppIdOwner { namespace: "other".into(), name: "shop".into() });
    let script = MockApi::default()
        .expect(Method::POST, SECRETS, |_| api_error(StatusCode::CONFLICT, "AlreadyExists", "latchkey-keys-shop"))
        .expect(Method::GET, SECRET, respond_with(returned(&their_keys, &other_owner, "7")));
    let api = secrets(&script);
    assert_eq!(create(&api, &keys(), &us()).await.unwrap(), None);
    let stored = stored(read(&api, &shop()).await.unwrap());
    assert_eq!((stored.document, stored.owner), (their_keys, other_owner));
    script.finish();
}

#[tokio::test]
async fn a_change_names_the_version_that_was_read_and_keeps_metadata_of_other_programs() {
    let document = keys().written_for("shop");
    let changed = document.changed_to_algorithm(SigningAlgorithm::EdDSA, NOW).unwrap().unwrap();
    let script = MockApi::default().expect(Method::GET, SECRET, respond_with(returned(&document, &us(), "7"))).expect(
        Method::PUT,
        SECRET,
        written("8"),
    );
    let api = secrets(&script);
    let before = stored(read(&api, &shop()).await.unwrap());
    let after = replace(&api, &before, &changed, &us()).await.unwrap().unwrap();
    assert_eq!(after.document, changed);
    assert_eq!(after.metadata.resource_version.as_deref(), Some("8"));
    let put = &script.finish()[1].body["metadata"];
    assert_eq!((&put["resourceVersion"], &put["uid"]), (&json!("7"), &json!("1")));
    assert_eq!(put["labels"]["backup"], "yes");
}

#[tokio::test]
async fn a_paused_leader_does_not_overwrite_a_newer_key() {
    let change = |stored: &Stored| stored.document.changed_to_algorithm(SigningAlgorithm::EdDSA, NOW).unwrap();
    let old = keys();
    let newer = old.changed_to_algorithm(SigningAlgorithm::EdDSA, NOW).unwrap().unwrap();
    let script = MockApi::default()
        .expect(Method::GET, SECRET, respond_with(returned(&old, &us(), "7")))
        // The leader reads version 7 and is paused. Another leader writes. Then the paused leader continues and writes
        // its outdated decision.
        .expect(Method::PUT, SECRET, |call| {
            assert_eq!(call.body["metadata"]["resourceVersion"], "7");
            api_error(StatusCode::CONFLICT, "Conflict", "latchkey-keys-shop")
        })
        .expect(Method::GET, SECRET, respond_with(returned(&newer, &us(), "9")));
    let api = secrets(&script);
    let before = stored(read(&api, &shop()).await.unwrap());
    let decided = change(&before).unwrap();
    assert_eq!(replace(&api, &before, &decided, &us()).await.unwrap(), None);
    let after = stored(read(&api, &shop()).await.unwrap());
    assert_eq!(after.document, newer);
    assert_eq!(change(&after), None, "there is nothing left to write");
    script.finish();
}

#[tokio::test]
async fn a_change_does_not_recreate_deleted_keys() {
    let document = keys();
    let script = MockApi::default().expect(Method::GET, SECRET, respond_with(returned(&document, &us(), "7"))).expect(
        Method::PUT,
        SECRET,
        |_| not_found("latchkey-keys-shop"),
    );
    let api = secrets(&script);
    let before = stored(read(&api, &shop()).await.unwrap());
    assert_eq!(replace(&api, &before, &document, &us()).await.unwrap(), None);
    script.finish();
}

#[tokio::test]
async fn a_handover_is_counted_once() {
    let document = keys().written_for("shop");
    let mut edited = returned(&document, &us(), "7");
    edited["metadata"]["annotations"]["latchkey.dev/namespace"] = json!("new");
    let script = MockApi::default()
        .expect(Method::GET, SECRET, respond_with(edited))
        .expect(Method::PUT, SECRET, written("8"))
        .expect(Method::PUT, SECRET, written("9"));
    let api = secrets(&script);
    let before = stored(read(&api, &shop()).await.unwrap());
    assert!(before.is_handed_over());
    let new_owner = AppIdOwner { namespace: "new".into(), name: "theirs".into() };
    let after = replace(&api, &before, &before.document, &new_owner).await.unwrap().unwrap();
    assert!(!after.is_handed_over());
    assert_eq!((after.document.handover, after.document.namespace.as_deref()), (1, Some("new")));
    let again = replace(&api, &after, &after.document, &new_owner).await.unwrap().unwrap();
    assert_eq!(again.document, after.document);
    script.finish();
}

#[tokio::test]
async fn an_unusable_secret_is_never_overwritten() {
    type Break = fn(&mut Secret);
    let cases: [(Break, UnusableReason); 6] = [
        (|secret| secret.type_ = Some("Opaque".into()), UnusableReason::WrongType),
        (|secret| secret.data = None, UnusableReason::MissingEntry),
        (
            |secret| secret.data = Some([(APP_KEYS_KEY.into(), ByteString(b"{\"s1\":".to_vec()))].into()),
            UnusableReason::NotKeyDocument,
        ),
        (
            |secret| {
                let of_other_app = KeyDocument { app_id: "other".parse().unwrap(), ..keys() };
                let bytes = ByteString(serde_json::to_vec(&of_other_app).unwrap());
                secret.data = Some([(APP_KEYS_KEY.into(), bytes)].into());
            },
            UnusableReason::Invalid(InvalidKeys::OtherApp),
        ),
        (
            |secret| {
                let without_hmac_keys = KeyDocument { hmac: Vec::new(), ..keys() };
                let bytes = ByteString(serde_json::to_vec(&without_hmac_keys).unwrap());
                secret.data = Some([(APP_KEYS_KEY.into(), bytes)].into());
            },
            UnusableReason::Invalid(InvalidKeys::NotOneActive),
        ),
        (|secret| secret.metadata.annotations = None, UnusableReason::NoOwner),
    ];
    for (change, why) in cases {
        let mut broken: Secret = serde_json::from_value(returned(&keys(), &us(), "7")).unwrap();
        change(&mut broken);
        let value = serde_json::to_value(&broken).unwrap();
        let script = MockApi::default().expect(Method::GET, SECRET, respond_with(value));
        let api = secrets(&script);
        let lookup = read(&api, &shop()).await.unwrap();
        let owner = (why != UnusableReason::NoOwner).then(us);
        // The Secret cannot be overwritten: `replace` needs keys that were read, and there are none.
        assert_eq!(lookup, KeyLookup::Unusable(why, owner));
        script.finish();
    }
}

#[tokio::test]
async fn an_api_error_is_reported_with_verb_and_name() {
    let script =
        MockApi::default().expect(Method::GET, SECRET, |_| api_error(StatusCode::FORBIDDEN, "Forbidden", "secrets"));
    let error = read(&secrets(&script), &shop()).await.unwrap_err();
    assert_eq!(error.to_string(), "cannot get the Secret latchkey-keys-shop of the App's keys");
}

#[tokio::test]
async fn only_the_keys_that_were_read_are_deleted() {
    let document = keys();
    let script = MockApi::default()
        .expect(Method::GET, SECRET, respond_with(returned(&document, &us(), "7")))
        .expect(Method::DELETE, SECRET, |call| {
            assert_eq!(call.body["preconditions"], json!({ "uid": "1", "resourceVersion": "7" }));
            api_error(StatusCode::CONFLICT, "Conflict", "latchkey-keys-shop")
        })
        .expect(Method::DELETE, SECRET, |_| not_found("latchkey-keys-shop"));
    let api = secrets(&script);
    let before = stored(read(&api, &shop()).await.unwrap());
    assert!(!delete(&api, &before).await.unwrap());
    assert!(delete(&api, &before).await.unwrap());
    script.finish();
}

#[test]
fn stored_keys_are_not_printed() {
    let document = keys();
    let printed = format!(
        "{:?}",
        KeyLookup::from_secret(serde_json::from_value(returned(&document, &us(), "7")).unwrap(), &shop())
    );
    assert!(!printed.contains("PRIVATE KEY") && !printed.contains(document.hmac[0].key.secret.expose()), "{printed}");
}
