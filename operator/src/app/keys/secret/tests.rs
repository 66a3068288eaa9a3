use http::{Method, StatusCode};
use latchkey_crds::rendered::SigningAlgorithm;
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::*;
use crate::app::scripted::{Call, Script, not_found, refusal};

const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;
const SECRETS: &str = "/api/v1/namespaces/latchkey/secrets";
const SECRET: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-keys-shop";

fn shop() -> AppId {
    "shop".parse().unwrap()
}

fn us() -> Holder {
    Holder { namespace: "shop".into(), name: "store".into() }
}

fn keys() -> KeyDocument {
    KeyDocument::first(&shop(), SigningAlgorithm::ES256, NOW).unwrap()
}

fn secrets(script: &Script) -> Api<Secret> {
    Api::namespaced(script.client(), "latchkey")
}

/// The Secret as the API server answers it.
fn stored(document: &KeyDocument, holder: &Holder, version: &str) -> Value {
    let mut stored = secret(document, holder, None);
    stored.metadata.namespace = Some("latchkey".into());
    stored.metadata.uid = Some("1".into());
    stored.metadata.resource_version = Some(version.into());
    stored.metadata.labels = Some(BTreeMap::from([("backup".into(), "yes".into())]));
    serde_json::to_value(stored).unwrap()
}

/// What the API server does with what is written: it keeps it, at a new version.
fn written(version: &'static str) -> impl FnOnce(&Call) -> (StatusCode, Value) + Send + 'static {
    move |call| {
        let mut body = call.body.clone();
        body["metadata"]["resourceVersion"] = json!(version);
        (StatusCode::OK, body)
    }
}

fn found(value: Value) -> impl FnOnce(&Call) -> (StatusCode, Value) + Send + 'static {
    move |_| (StatusCode::OK, value)
}

fn kept(found: Found) -> Kept {
    match found {
        Found::Kept(kept) => *kept,
        Found::Missing | Found::Unusable(..) => panic!("{found:?}"),
    }
}

#[tokio::test]
async fn the_first_keys_are_posted_and_read_back_as_they_were() {
    let script = Script::default().expect(Method::POST, SECRETS, written("1"));
    let document = keys().held_by("shop");
    let made = create(&secrets(&script), &document, &us()).await.unwrap().unwrap();
    assert_eq!((&made.document, &made.holder), (&document, &us()));
    let calls = script.calls();
    let body = &calls[0].body;
    assert_eq!(body["type"], "latchkey.dev/app-keys");
    assert_eq!(body["metadata"]["name"], "latchkey-keys-shop");
    assert_eq!(body["metadata"]["annotations"]["latchkey.dev/namespace"], "shop");
    assert_eq!(body["metadata"]["annotations"]["latchkey.dev/name"], "store");

    let script = Script::default().expect(Method::GET, SECRET, found(body.clone()));
    assert_eq!(kept(read(&secrets(&script), &shop()).await.unwrap()).document, document);
}

#[tokio::test]
async fn of_two_that_make_the_first_keys_at_once_the_first_has_them() {
    let (theirs, them) = (keys(), Holder { namespace: "other".into(), name: "shop".into() });
    let script = Script::default()
        .expect(Method::POST, SECRETS, |_| refusal(StatusCode::CONFLICT, "AlreadyExists", "latchkey-keys-shop"))
        .expect(Method::GET, SECRET, found(stored(&theirs, &them, "7")));
    let api = secrets(&script);
    assert_eq!(create(&api, &keys(), &us()).await.unwrap(), None);
    let kept = kept(read(&api, &shop()).await.unwrap());
    assert_eq!((kept.document, kept.holder), (theirs, them));
    script.calls();
}

#[tokio::test]
async fn a_change_carries_the_version_that_was_read_and_what_others_wrote() {
    let document = keys().held_by("shop");
    let changed = document.with_algorithm(SigningAlgorithm::EdDSA, NOW).unwrap().unwrap();
    let script = Script::default().expect(Method::GET, SECRET, found(stored(&document, &us(), "7"))).expect(
        Method::PUT,
        SECRET,
        written("8"),
    );
    let api = secrets(&script);
    let before = kept(read(&api, &shop()).await.unwrap());
    let after = replace(&api, &before, &changed, &us()).await.unwrap().unwrap();
    assert_eq!(after.document, changed);
    assert_eq!(after.metadata.resource_version.as_deref(), Some("8"));
    let put = &script.calls()[1].body["metadata"];
    assert_eq!((&put["resourceVersion"], &put["uid"]), (&json!("7"), &json!("1")));
    assert_eq!(put["labels"]["backup"], "yes");
}

#[tokio::test]
async fn a_leader_that_was_paused_does_not_take_the_newer_key_away() {
    let change = |kept: &Kept| kept.document.with_algorithm(SigningAlgorithm::EdDSA, NOW).unwrap();
    let old = keys();
    let newer = old.with_algorithm(SigningAlgorithm::EdDSA, NOW).unwrap().unwrap();
    let script = Script::default()
        .expect(Method::GET, SECRET, found(stored(&old, &us(), "7")))
        // It read version 7 and sleeps; another one writes; it wakes up with what it decided then.
        .expect(Method::PUT, SECRET, |call| {
            assert_eq!(call.body["metadata"]["resourceVersion"], "7");
            refusal(StatusCode::CONFLICT, "Conflict", "latchkey-keys-shop")
        })
        .expect(Method::GET, SECRET, found(stored(&newer, &us(), "9")));
    let api = secrets(&script);
    let before = kept(read(&api, &shop()).await.unwrap());
    let decided = change(&before).unwrap();
    assert_eq!(replace(&api, &before, &decided, &us()).await.unwrap(), None);
    let after = kept(read(&api, &shop()).await.unwrap());
    assert_eq!(after.document, newer);
    assert_eq!(change(&after), None, "there is nothing left to write");
    script.calls();
}

#[tokio::test]
async fn keys_that_went_while_they_were_changed_are_not_made_anew_by_the_change() {
    let document = keys();
    let script = Script::default().expect(Method::GET, SECRET, found(stored(&document, &us(), "7"))).expect(
        Method::PUT,
        SECRET,
        |_| not_found("latchkey-keys-shop"),
    );
    let api = secrets(&script);
    let before = kept(read(&api, &shop()).await.unwrap());
    assert_eq!(replace(&api, &before, &document, &us()).await.unwrap(), None);
    script.calls();
}

#[tokio::test]
async fn keys_that_change_hands_say_so_once() {
    let document = keys().held_by("shop");
    let mut edited = stored(&document, &us(), "7");
    edited["metadata"]["annotations"]["latchkey.dev/namespace"] = json!("new");
    let script = Script::default()
        .expect(Method::GET, SECRET, found(edited))
        .expect(Method::PUT, SECRET, written("8"))
        .expect(Method::PUT, SECRET, written("9"));
    let api = secrets(&script);
    let before = kept(read(&api, &shop()).await.unwrap());
    assert!(before.are_handed_over());
    let new = Holder { namespace: "new".into(), name: "theirs".into() };
    let after = replace(&api, &before, &before.document, &new).await.unwrap().unwrap();
    assert!(!after.are_handed_over());
    assert_eq!((after.document.handover, after.document.namespace.as_deref()), (1, Some("new")));
    let again = replace(&api, &after, &after.document, &new).await.unwrap().unwrap();
    assert_eq!(again.document, after.document);
    script.calls();
}

#[tokio::test]
async fn a_secret_that_cannot_be_used_is_never_written_over() {
    type Break = fn(&mut Secret);
    let cases: [(Break, Unusable); 6] = [
        (|secret| secret.type_ = Some("Opaque".into()), Unusable::Type),
        (|secret| secret.data = None, Unusable::NoKey),
        (
            |secret| secret.data = Some([(APP_KEYS_KEY.into(), ByteString(b"{\"s1\":".to_vec()))].into()),
            Unusable::NotKeys,
        ),
        (
            |secret| {
                let other = KeyDocument { app_id: "other".parse().unwrap(), ..keys() };
                let octets = ByteString(serde_json::to_vec(&other).unwrap());
                secret.data = Some([(APP_KEYS_KEY.into(), octets)].into());
            },
            Unusable::Invalid(InvalidKeys::OtherApp),
        ),
        (
            |secret| {
                let none = KeyDocument { hmac: Vec::new(), ..keys() };
                let octets = ByteString(serde_json::to_vec(&none).unwrap());
                secret.data = Some([(APP_KEYS_KEY.into(), octets)].into());
            },
            Unusable::Invalid(InvalidKeys::Active),
        ),
        (|secret| secret.metadata.annotations = None, Unusable::Holder),
    ];
    for (change, why) in cases {
        let mut broken: Secret = serde_json::from_value(stored(&keys(), &us(), "7")).unwrap();
        change(&mut broken);
        let value = serde_json::to_value(&broken).unwrap();
        let script = Script::default().expect(Method::GET, SECRET, found(value));
        let api = secrets(&script);
        let first = read(&api, &shop()).await.unwrap();
        let holder = (why != Unusable::Holder).then(us);
        // There is nothing in it that could be replaced.
        assert_eq!(first, Found::Unusable(why, holder));
        script.calls();
    }
}

#[tokio::test]
async fn what_the_api_server_refuses_is_told_by_verb_and_name() {
    let script =
        Script::default().expect(Method::GET, SECRET, |_| refusal(StatusCode::FORBIDDEN, "Forbidden", "secrets"));
    let error = read(&secrets(&script), &shop()).await.unwrap_err();
    assert_eq!(error.to_string(), "cannot get the Secret latchkey-keys-shop of the App's keys");
}

#[tokio::test]
async fn only_the_keys_that_were_read_are_taken_away() {
    let document = keys();
    let script = Script::default()
        .expect(Method::GET, SECRET, found(stored(&document, &us(), "7")))
        .expect(Method::DELETE, SECRET, |call| {
            assert_eq!(call.body["preconditions"], json!({ "uid": "1", "resourceVersion": "7" }));
            refusal(StatusCode::CONFLICT, "Conflict", "latchkey-keys-shop")
        })
        .expect(Method::DELETE, SECRET, |_| not_found("latchkey-keys-shop"));
    let api = secrets(&script);
    let before = kept(read(&api, &shop()).await.unwrap());
    assert!(!remove(&api, &before).await.unwrap());
    assert!(remove(&api, &before).await.unwrap());
    script.calls();
}

#[test]
fn neither_keys_nor_what_is_wrong_with_them_is_printed() {
    let document = keys();
    let printed = format!("{:?}", Found::of(serde_json::from_value(stored(&document, &us(), "7")).unwrap(), &shop()));
    assert!(!printed.contains("PRIVATE KEY") && !printed.contains(document.hmac[0].key.secret.expose()), "{printed}");
}
