use http::{Method, StatusCode};
use kube::Api;
use latchkey_crds::rendered::SigningAlgorithm;
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::*;
use crate::app::{
    keys::{KeyDocument, secret::KeySecretError},
    mock_api::{MockApi, ReceivedCall, api_error, not_found},
};

const KEYS: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-keys-shop";
const RENDERED: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-app-shop";

fn owner(namespace: &str, name: &str) -> AppIdOwner {
    AppIdOwner { namespace: namespace.into(), name: name.into() }
}

/// Returns a claim of the App `namespace/name`, which was created `second` seconds after the Unix epoch.
fn claim(namespace: &str, name: &str, second: i64, validity: ClaimValidity) -> Claim {
    Claim { owner: owner(namespace, name), created: Some(Timestamp::from_second(second).unwrap()), validity }
}

/// Returns stored keys with the owner `namespace/name`, last written for the namespace `written_for`.
fn stored(namespace: &str, name: &str, written_for: &str) -> KeyLookup {
    let app_id = "shop".parse().unwrap();
    let mut document = KeyDocument::first(&app_id, SigningAlgorithm::ES256, OffsetDateTime::UNIX_EPOCH).unwrap();
    document.namespace = Some(written_for.into());
    KeyLookup::stored(document, owner(namespace, name))
}

/// The facts of the App `shop/store`, created 10 seconds after the Unix epoch, without keys or other Apps.
fn facts() -> OwnershipFacts {
    OwnershipFacts {
        claim: claim("shop", "store", 10, ClaimValidity::Pending),
        keys: KeyLookup::Missing,
        rendered_owner: None,
        owner_state: OwnerState::Exists,
        other_claims: Vec::new(),
    }
}

#[test]
fn the_oldest_valid_app_takes_a_free_app_id() {
    assert_eq!(facts().decide(), OwnershipDecision::Free);
    let with = |other: Claim| OwnershipFacts { other_claims: vec![other], ..facts() }.decide();
    // Older Apps have precedence. Apps that were created in the same second are ordered by namespace and name.
    assert_eq!(with(claim("other", "a", 9, ClaimValidity::Pending)), OwnershipDecision::Wait);
    assert_eq!(with(claim("other", "a", 9, ClaimValidity::Valid)), OwnershipDecision::Wait);
    assert_eq!(with(claim("other", "z", 10, ClaimValidity::Valid)), OwnershipDecision::Wait);
    assert_eq!(with(claim("shop", "stora", 10, ClaimValidity::Valid)), OwnershipDecision::Wait);
    assert_eq!(with(claim("shop", "storf", 10, ClaimValidity::Valid)), OwnershipDecision::Free);
    assert_eq!(with(claim("tiny", "a", 10, ClaimValidity::Valid)), OwnershipDecision::Free);
    assert_eq!(with(claim("other", "a", 11, ClaimValidity::Valid)), OwnershipDecision::Free);
    // An older App that cannot be served or is being deleted does not keep a younger App from taking the appID.
    assert_eq!(with(claim("other", "a", 9, ClaimValidity::Invalid)), OwnershipDecision::Free);
    assert_eq!(with(claim("other", "a", 9, ClaimValidity::Deleting)), OwnershipDecision::Free);
}

#[test]
fn the_owner_keeps_the_app_id_even_if_other_apps_are_older() {
    let older = vec![claim("shop", "older", 1, ClaimValidity::Valid), claim("other", "older", 1, ClaimValidity::Valid)];
    let facts = OwnershipFacts { keys: stored("shop", "store", "shop"), other_claims: older, ..facts() };
    assert_eq!(facts.decide(), OwnershipDecision::Ours);
    // The older App does not get the appID, even if it becomes valid later.
    let of_older_app = OwnershipFacts { claim: claim("other", "older", 1, ClaimValidity::Valid), ..facts };
    assert_eq!(of_older_app.decide(), OwnershipDecision::OwnedByOther);
}

#[test]
fn only_an_app_in_the_namespace_of_a_deleted_owner_can_inherit_the_app_id() {
    let deleted = |keys: KeyLookup| OwnershipFacts { keys, owner_state: OwnerState::Deleted, ..facts() };
    assert_eq!(deleted(stored("shop", "before", "shop")).decide(), OwnershipDecision::Inherit);
    assert_eq!(deleted(stored("other", "before", "other")).decide(), OwnershipDecision::Reserved);
    // If the deleted owner's namespace has several Apps with this appID, the oldest takes the appID.
    let others =
        vec![claim("shop", "older", 1, ClaimValidity::Valid), claim("other", "older", 1, ClaimValidity::Valid)];
    let facts = OwnershipFacts { other_claims: others, ..deleted(stored("shop", "before", "shop")) };
    assert_eq!(facts.decide(), OwnershipDecision::Wait);
    let others = vec![claim("other", "older", 1, ClaimValidity::Valid)];
    let facts = OwnershipFacts { other_claims: others, ..deleted(stored("shop", "before", "shop")) };
    assert_eq!(facts.decide(), OwnershipDecision::Inherit);
    // If nothing proves that the owner is deleted, the appID is not inherited.
    let facts = OwnershipFacts { owner_state: OwnerState::Exists, ..deleted(stored("shop", "before", "shop")) };
    assert_eq!(facts.decide(), OwnershipDecision::OwnedByOther);
}

#[test]
fn the_platform_team_can_hand_over_an_app_id() {
    let edited = |name: &str| OwnershipFacts {
        keys: stored("shop", name, "before"),
        owner_state: OwnerState::Deleted,
        ..facts()
    };
    assert_eq!(edited("another-name").decide(), OwnershipDecision::HandedOver);
    // The keys are also handed over if the App has exactly the name of the previous owner.
    assert_eq!(edited("store").decide(), OwnershipDecision::HandedOver);
    // After the handover, the previous owner does not own the appID any more.
    let of_previous_owner =
        OwnershipFacts { claim: claim("before", "store", 1, ClaimValidity::Valid), ..edited("store") };
    assert_eq!(of_previous_owner.decide(), OwnershipDecision::Reserved);
}

#[test]
fn lost_keys_are_rebuilt_by_their_owner() {
    let lost = |namespace: &str, name: &str, owner_state| {
        OwnershipFacts { rendered_owner: Some(owner(namespace, name)), owner_state, ..facts() }.decide()
    };
    assert_eq!(lost("shop", "store", OwnerState::Exists), OwnershipDecision::Rebuild);
    assert_eq!(lost("shop", "before", OwnerState::Deleted), OwnershipDecision::Rebuild);
    assert_eq!(lost("shop", "before", OwnerState::Exists), OwnershipDecision::OwnedByOther);
    assert_eq!(lost("other", "store", OwnerState::Exists), OwnershipDecision::OwnedByOther);
    assert_eq!(lost("other", "store", OwnerState::Deleted), OwnershipDecision::Reserved);
}

#[test]
fn unusable_keys_still_name_their_owner() {
    let broken = |owner: Option<AppIdOwner>, owner_state| {
        OwnershipFacts { keys: KeyLookup::Unusable(UnusableReason::NotKeyDocument, owner), owner_state, ..facts() }
            .decide()
    };
    let unusable = OwnershipDecision::KeysUnusable(UnusableReason::NotKeyDocument);
    assert_eq!(broken(Some(owner("shop", "store")), OwnerState::Exists), unusable);
    assert_eq!(broken(Some(owner("shop", "before")), OwnerState::Deleted), unusable);
    assert_eq!(broken(Some(owner("other", "store")), OwnerState::Exists), OwnershipDecision::OwnedByOther);
    assert_eq!(broken(Some(owner("other", "store")), OwnerState::Deleted), OwnershipDecision::Reserved);
    assert_eq!(broken(None, OwnerState::Exists), unusable);
}

#[test]
fn an_app_that_can_take_the_app_id_is_validated_as_the_owner() {
    for decision in [
        OwnershipDecision::Ours,
        OwnershipDecision::Free,
        OwnershipDecision::Rebuild,
        OwnershipDecision::Inherit,
        OwnershipDecision::HandedOver,
    ] {
        assert_eq!(decision.assumed_ownership(), Some(resolve::Ownership::Ours));
    }
    assert_eq!(OwnershipDecision::OwnedByOther.assumed_ownership(), Some(resolve::Ownership::Taken));
    assert_eq!(OwnershipDecision::Reserved.assumed_ownership(), Some(resolve::Ownership::Reserved));
    assert_eq!(OwnershipDecision::Wait.assumed_ownership(), None);
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
fn the_validity_of_a_claim_follows_from_the_status_of_its_current_generation() {
    let validity_for = |status: &str, reason: &str, generation: i64| {
        let mut app = app("shop", "store", "shop");
        app.status = serde_json::from_value(json!({ "conditions": [{
            "type": "Accepted", "status": status, "reason": reason, "message": "", "observedGeneration": generation,
            "lastTransitionTime": "1970-01-01T00:00:00Z",
        }]}))
        .unwrap();
        Claim::from_app(&app).validity
    };
    assert_eq!(Claim::from_app(&app("shop", "store", "shop")), claim("shop", "store", 10, ClaimValidity::Pending));
    assert_eq!(validity_for("Unknown", "Pending", -1), ClaimValidity::Pending);
    assert_eq!(validity_for("True", "Accepted", 1), ClaimValidity::Pending);
    assert_eq!(validity_for("True", "Accepted", 2), ClaimValidity::Valid);
    assert_eq!(validity_for("False", "InvalidSpec", 1), ClaimValidity::Pending);
    assert_eq!(validity_for("False", "InvalidSpec", 2), ClaimValidity::Invalid);
    assert_eq!(validity_for("False", "TooLarge", 2), ClaimValidity::Invalid);
    assert_eq!(validity_for("False", "QuotaExceeded", 2), ClaimValidity::Invalid);
    assert_eq!(validity_for("False", "AppIDConflict", 2), ClaimValidity::Valid);
    let mut deleting = app("shop", "store", "shop");
    deleting.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    assert_eq!(Claim::from_app(&deleting).validity, ClaimValidity::Deleting);
}

fn secret_of(namespace: &str, name: &str) -> impl FnOnce(&ReceivedCall) -> (StatusCode, Value) + Send + 'static {
    let annotations = json!({ "latchkey.dev/namespace": namespace, "latchkey.dev/name": name });
    // The Secret contains no keys, but it names the owner.
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "latchkey.dev/app-keys",
        "metadata": { "name": "latchkey-keys-shop", "annotations": annotations },
    });
    move |_| (StatusCode::OK, secret)
}

async fn gather_facts(script: &MockApi) -> Result<OwnershipFacts, KeySecretError> {
    let client = script.client();
    let secrets = Api::namespaced(client.clone(), "latchkey");
    let us = app("shop", "store", "shop");
    let facts = OwnershipFacts::gather(&client, &secrets, &us, &"shop".parse().unwrap(), Vec::new()).await;
    script.finish();
    facts
}

#[tokio::test]
async fn one_read_of_the_keys_is_enough_if_this_app_owns_the_app_id() {
    let script = MockApi::default().expect(Method::GET, KEYS, secret_of("shop", "store"));
    assert_eq!(gather_facts(&script).await.unwrap().owner_state, OwnerState::Exists);
}

#[tokio::test]
async fn only_the_api_server_proves_that_an_owner_is_deleted() {
    const APP: &str = "/apis/latchkey.dev/v1alpha1/namespaces/other/apps/before";
    let with = async |response: fn(&ReceivedCall) -> (StatusCode, Value)| {
        let script = MockApi::default().expect(Method::GET, KEYS, secret_of("other", "before")).expect(
            Method::GET,
            APP,
            response,
        );
        gather_facts(&script).await.map(|facts| facts.owner_state)
    };
    assert_eq!(with(|_| not_found("before")).await.unwrap(), OwnerState::Deleted);
    // An App with the name of the owner exists, but has another appID.
    let other_app_id =
        |_: &ReceivedCall| (StatusCode::OK, serde_json::to_value(app("other", "before", "another")).unwrap());
    assert_eq!(with(other_app_id).await.unwrap(), OwnerState::Deleted);
    let same_app_id =
        |_: &ReceivedCall| (StatusCode::OK, serde_json::to_value(app("other", "before", "shop")).unwrap());
    assert_eq!(with(same_app_id).await.unwrap(), OwnerState::Exists);
    // If the CRD is missing, the 404 does not prove that the owner is deleted.
    let no_crd = |_: &ReceivedCall| {
        let (status, mut body) = not_found("");
        body["details"] = json!({});
        (status, body)
    };
    with(no_crd).await.unwrap_err();
    let forbidden = |_: &ReceivedCall| api_error(StatusCode::FORBIDDEN, "Forbidden", "before");
    assert_eq!(with(forbidden).await.unwrap(), OwnerState::Exists);
    let undecodable = |_: &ReceivedCall| (StatusCode::OK, json!({ "kind": "App", "spec": 7 }));
    assert_eq!(with(undecodable).await.unwrap(), OwnerState::Exists);
    let unavailable = |_: &ReceivedCall| api_error(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", "before");
    with(unavailable).await.unwrap_err();
}

#[tokio::test]
async fn the_rendered_secret_names_the_owner_of_lost_keys() {
    let script = MockApi::default().expect(Method::GET, KEYS, |_| not_found("latchkey-keys-shop")).expect(
        Method::GET,
        RENDERED,
        |_| {
            let annotations = json!({ "latchkey.dev/namespace": "shop", "latchkey.dev/name": "store" });
            let metadata = json!({ "name": "latchkey-app-shop", "annotations": annotations });
            let body = json!({ "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": metadata });
            (StatusCode::OK, body)
        },
    );
    let facts = gather_facts(&script).await.unwrap();
    assert_eq!((facts.decide(), facts.rendered_owner), (OwnershipDecision::Rebuild, Some(owner("shop", "store"))));

    let script = MockApi::default().expect(Method::GET, KEYS, |_| not_found("latchkey-keys-shop")).expect(
        Method::GET,
        RENDERED,
        |_| not_found("latchkey-app-shop"),
    );
    assert_eq!(gather_facts(&script).await.unwrap().decide(), OwnershipDecision::Free);
}
