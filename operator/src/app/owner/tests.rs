use http::{Method, StatusCode};
use latchkey_crds::rendered::SigningAlgorithm;
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::*;
use crate::app::{
    keys::KeyDocument,
    scripted::{Call, Script, not_found, refusal},
};

const KEYS: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-keys-shop";
const RENDERED: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-app-shop";

fn holder(namespace: &str, name: &str) -> Holder {
    Holder { namespace: namespace.into(), name: name.into() }
}

/// An App that was made so many seconds after the first.
fn claim(namespace: &str, name: &str, second: i64, judged: Judged) -> Claim {
    Claim { holder: holder(namespace, name), created: Some(Timestamp::from_second(second).unwrap()), judged }
}

/// Keys of that App, written for that namespace.
fn kept(namespace: &str, name: &str, written_for: &str) -> Found {
    let app_id = "shop".parse().unwrap();
    let mut document = KeyDocument::first(&app_id, SigningAlgorithm::ES256, OffsetDateTime::UNIX_EPOCH).unwrap();
    document.namespace = Some(written_for.into());
    Found::kept(document, holder(namespace, name))
}

/// `shop/store`, made in second 10, with nothing else anywhere.
fn facts() -> OwnerFacts {
    OwnerFacts {
        us: claim("shop", "store", 10, Judged::NotYet),
        keys: Found::Missing,
        rendered: None,
        holder_app: HolderApp::There,
        others: Vec::new(),
    }
}

#[test]
fn the_first_that_is_valid_may_claim_a_free_app_id() {
    assert_eq!(facts().decide(), Decision::Free);
    let with = |other: Claim| OwnerFacts { others: vec![other], ..facts() }.decide();
    // Older ones first, by namespace and name where they are of one second.
    assert_eq!(with(claim("other", "a", 9, Judged::NotYet)), Decision::Wait);
    assert_eq!(with(claim("other", "a", 9, Judged::Valid)), Decision::Wait);
    assert_eq!(with(claim("other", "z", 10, Judged::Valid)), Decision::Wait);
    assert_eq!(with(claim("shop", "stora", 10, Judged::Valid)), Decision::Wait);
    assert_eq!(with(claim("shop", "storf", 10, Judged::Valid)), Decision::Free);
    assert_eq!(with(claim("tiny", "a", 10, Judged::Valid)), Decision::Free);
    assert_eq!(with(claim("other", "a", 11, Judged::Valid)), Decision::Free);
    // What cannot be served, or goes, holds nobody up.
    assert_eq!(with(claim("other", "a", 9, Judged::Broken)), Decision::Free);
    assert_eq!(with(claim("other", "a", 9, Judged::Going)), Decision::Free);
}

#[test]
fn the_holder_keeps_it_whatever_anyones_age() {
    let older = vec![claim("shop", "older", 1, Judged::Valid), claim("other", "older", 1, Judged::Valid)];
    let facts = OwnerFacts { keys: kept("shop", "store", "shop"), others: older, ..facts() };
    assert_eq!(facts.decide(), Decision::Ours);
    // An older App that was broken and is mended comes too late.
    let late = OwnerFacts { us: claim("other", "older", 1, Judged::Valid), ..facts };
    assert_eq!(late.decide(), Decision::Another);
}

#[test]
fn after_a_holder_that_is_gone_only_its_namespace_may_come() {
    let gone = |keys: Found| OwnerFacts { keys, holder_app: HolderApp::Gone, ..facts() };
    assert_eq!(gone(kept("shop", "before", "shop")).decide(), Decision::Inherit);
    assert_eq!(gone(kept("other", "before", "other")).decide(), Decision::Reserved);
    // Of several there the oldest.
    let others = vec![claim("shop", "older", 1, Judged::Valid), claim("other", "older", 1, Judged::Valid)];
    let facts = OwnerFacts { others, ..gone(kept("shop", "before", "shop")) };
    assert_eq!(facts.decide(), Decision::Wait);
    let others = vec![claim("other", "older", 1, Judged::Valid)];
    let facts = OwnerFacts { others, ..gone(kept("shop", "before", "shop")) };
    assert_eq!(facts.decide(), Decision::Inherit);
    // Nothing proves that it is gone.
    let facts = OwnerFacts { holder_app: HolderApp::There, ..gone(kept("shop", "before", "shop")) };
    assert_eq!(facts.decide(), Decision::Another);
}

#[test]
fn the_platform_team_can_hand_it_over() {
    let edited = |name: &str| OwnerFacts { keys: kept("shop", name, "before"), holder_app: HolderApp::Gone, ..facts() };
    assert_eq!(edited("another-name").decide(), Decision::HandedOver);
    // Also where the App has the very name of the one before.
    assert_eq!(edited("store").decide(), Decision::HandedOver);
    // The App that had it has it no more.
    let before = OwnerFacts { us: claim("before", "store", 1, Judged::Valid), ..edited("store") };
    assert_eq!(before.decide(), Decision::Reserved);
}

#[test]
fn lost_keys_are_rebuilt_by_the_app_whose_they_were() {
    let lost = |namespace: &str, name: &str, holder_app| {
        OwnerFacts { rendered: Some(holder(namespace, name)), holder_app, ..facts() }.decide()
    };
    assert_eq!(lost("shop", "store", HolderApp::There), Decision::Rebuild);
    assert_eq!(lost("shop", "before", HolderApp::Gone), Decision::Rebuild);
    assert_eq!(lost("shop", "before", HolderApp::There), Decision::Another);
    assert_eq!(lost("other", "store", HolderApp::There), Decision::Another);
    assert_eq!(lost("other", "store", HolderApp::Gone), Decision::Reserved);
}

#[test]
fn keys_that_cannot_be_used_still_say_whose_they_are() {
    let broken = |holder: Option<Holder>, holder_app| {
        OwnerFacts { keys: Found::Unusable(Unusable::NotKeys, holder), holder_app, ..facts() }.decide()
    };
    let unusable = Decision::Unusable(Unusable::NotKeys);
    assert_eq!(broken(Some(holder("shop", "store")), HolderApp::There), unusable);
    assert_eq!(broken(Some(holder("shop", "before")), HolderApp::Gone), unusable);
    assert_eq!(broken(Some(holder("other", "store")), HolderApp::There), Decision::Another);
    assert_eq!(broken(Some(holder("other", "store")), HolderApp::Gone), Decision::Reserved);
    assert_eq!(broken(None, HolderApp::There), unusable);
}

#[test]
fn an_app_is_judged_as_the_holder_where_it_may_become_it() {
    for may in [Decision::Ours, Decision::Free, Decision::Rebuild, Decision::Inherit, Decision::HandedOver] {
        assert_eq!(may.holder(), Some(resolve::Holder::Us));
    }
    assert_eq!(Decision::Another.holder(), Some(resolve::Holder::Another));
    assert_eq!(Decision::Reserved.holder(), Some(resolve::Holder::Reserved));
    assert_eq!(Decision::Wait.holder(), None);
}

fn app(namespace: &str, name: &str, app_id: &str) -> App {
    serde_json::from_value(json!({
        "apiVersion": "latchkey.dev/v1alpha1", "kind": "App",
        "metadata": {
            "namespace": namespace, "name": name, "generation": 2, "creationTimestamp": "1970-01-01T00:00:10Z",
        },
        "spec": { "appID": app_id },
    }))
    .unwrap()
}

#[test]
fn an_app_is_judged_by_what_is_said_of_its_present_generation() {
    let judged = |status: &str, reason: &str, generation: i64| {
        let mut app = app("shop", "store", "shop");
        app.status = serde_json::from_value(json!({ "conditions": [{
            "type": "Accepted", "status": status, "reason": reason, "message": "", "observedGeneration": generation,
            "lastTransitionTime": "1970-01-01T00:00:00Z",
        }]}))
        .unwrap();
        Claim::of(&app).judged
    };
    assert_eq!(Claim::of(&app("shop", "store", "shop")), claim("shop", "store", 10, Judged::NotYet));
    assert_eq!(judged("Unknown", "Pending", -1), Judged::NotYet);
    assert_eq!(judged("True", "Accepted", 1), Judged::NotYet);
    assert_eq!(judged("True", "Accepted", 2), Judged::Valid);
    assert_eq!(judged("False", "InvalidSpec", 1), Judged::NotYet);
    assert_eq!(judged("False", "InvalidSpec", 2), Judged::Broken);
    assert_eq!(judged("False", "TooLarge", 2), Judged::Broken);
    assert_eq!(judged("False", "QuotaExceeded", 2), Judged::Broken);
    assert_eq!(judged("False", "AppIDConflict", 2), Judged::Valid);
    let mut going = app("shop", "store", "shop");
    going.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    assert_eq!(Claim::of(&going).judged, Judged::Going);
}

fn secret_of(namespace: &str, name: &str) -> impl FnOnce(&Call) -> (StatusCode, Value) + Send + 'static {
    let annotations = json!({ "latchkey.dev/namespace": namespace, "latchkey.dev/name": name });
    // Keys that cannot be used tell their holder as others do.
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "latchkey.dev/app-keys",
        "metadata": { "name": "latchkey-keys-shop", "annotations": annotations },
    });
    move |_| (StatusCode::OK, secret)
}

async fn gathered(script: &Script) -> Result<OwnerFacts, KeysError> {
    let client = script.client();
    let secrets = Api::namespaced(client.clone(), "latchkey");
    let us = app("shop", "store", "shop");
    let facts = OwnerFacts::gather(&client, &secrets, &us, &"shop".parse().unwrap(), Vec::new()).await;
    script.calls();
    facts
}

#[tokio::test]
async fn at_rest_one_look_at_the_keys_tells_whose_they_are() {
    let script = Script::default().expect(Method::GET, KEYS, secret_of("shop", "store"));
    assert_eq!(gathered(&script).await.unwrap().holder_app, HolderApp::There);
}

#[tokio::test]
async fn only_the_api_servers_own_word_proves_that_a_holder_is_gone() {
    const APP: &str = "/apis/latchkey.dev/v1alpha1/namespaces/other/apps/before";
    let with = async |answer: fn(&Call) -> (StatusCode, Value)| {
        let script =
            Script::default().expect(Method::GET, KEYS, secret_of("other", "before")).expect(Method::GET, APP, answer);
        gathered(&script).await.map(|facts| facts.holder_app)
    };
    assert_eq!(with(|_| not_found("before")).await.unwrap(), HolderApp::Gone);
    // It was made anew, as another.
    let another = |_: &Call| (StatusCode::OK, serde_json::to_value(app("other", "before", "another")).unwrap());
    assert_eq!(with(another).await.unwrap(), HolderApp::Gone);
    let there = |_: &Call| (StatusCode::OK, serde_json::to_value(app("other", "before", "shop")).unwrap());
    assert_eq!(with(there).await.unwrap(), HolderApp::There);
    // The CRD is away: no App can be found, but none is gone.
    let no_crd = |_: &Call| {
        let (status, mut body) = not_found("");
        body["details"] = json!({});
        (status, body)
    };
    with(no_crd).await.unwrap_err();
    let forbidden = |_: &Call| refusal(StatusCode::FORBIDDEN, "Forbidden", "before");
    assert_eq!(with(forbidden).await.unwrap(), HolderApp::There);
    let broken = |_: &Call| (StatusCode::OK, json!({ "kind": "App", "spec": 7 }));
    assert_eq!(with(broken).await.unwrap(), HolderApp::There);
    let away = |_: &Call| refusal(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", "before");
    with(away).await.unwrap_err();
}

#[tokio::test]
async fn where_the_keys_are_lost_the_rendered_secret_tells_whose_they_were() {
    let script = Script::default().expect(Method::GET, KEYS, |_| not_found("latchkey-keys-shop")).expect(
        Method::GET,
        RENDERED,
        |_| {
            let annotations = json!({ "latchkey.dev/namespace": "shop", "latchkey.dev/name": "store" });
            let metadata = json!({ "name": "latchkey-app-shop", "annotations": annotations });
            let body = json!({ "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": metadata });
            (StatusCode::OK, body)
        },
    );
    let facts = gathered(&script).await.unwrap();
    assert_eq!((facts.decide(), facts.rendered), (Decision::Rebuild, Some(holder("shop", "store"))));

    let script = Script::default().expect(Method::GET, KEYS, |_| not_found("latchkey-keys-shop")).expect(
        Method::GET,
        RENDERED,
        |_| not_found("latchkey-app-shop"),
    );
    assert_eq!(gathered(&script).await.unwrap().decide(), Decision::Free);
}
