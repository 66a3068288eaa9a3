use http::{Method, StatusCode};
use serde_json::{Value, json};
use time::Duration;

use super::*;
use crate::{
    app::mock_api::{MockApi, ReceivedCall, api_error, context, not_found},
    client::{
        fixtures::client_with,
        secret_state::{parse_secret, sha256},
    },
};

const SECRETS: &str = "/api/v1/namespaces/monitoring/secrets";
const SECRET: &str = "/api/v1/namespaces/monitoring/secrets/grafana-oidc";
const CLIENTS: &str = "/apis/latchkey.dev/v1alpha1/namespaces/monitoring/clients";
const ISSUER: &str = "https://auth.example.com/platform";

/// The Client `monitoring/grafana`, with this rotation request.
fn client(rotate: Option<&str>) -> Client {
    let mut client = client_with("monitoring", "grafana", json!({}));
    if let Some(rotate) = rotate {
        client.annotations_mut().insert(ROTATE_SECRET_ANNOTATION.to_owned(), rotate.to_owned());
    }
    client
}

/// A mock response from the API server: the object in the request, with this resourceVersion.
fn stored_as(version: &str) -> impl FnOnce(&ReceivedCall) -> (StatusCode, Value) + Send + 'static {
    let version = version.to_owned();
    move |call| {
        let mut secret = call.body.clone();
        secret["metadata"]["resourceVersion"] = json!(version);
        (StatusCode::OK, secret)
    }
}

fn respond(object: &impl serde::Serialize) -> impl FnOnce(&ReceivedCall) -> (StatusCode, Value) + Send + 'static {
    let object = json!(object);
    move |_| (StatusCode::OK, object)
}

/// The Secret of the Client as it is after its creation, with this resourceVersion and these annotations.
fn stored(version: &str, annotations: &[(&str, &str)]) -> Secret {
    let client = client(None);
    let values = [("issuer", ISSUER), ("client-id", "monitoring.grafana"), ("client-secret", "a secret from before")];
    let values = values.map(|(key, value)| (key.to_owned(), SecretBytes(value.as_bytes().to_vec())));
    let annotations = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let contents = SecretContents { values: values.into(), annotations: annotations.collect() };
    let mut secret = new_secret(&client, "grafana-oidc", contents);
    secret.metadata.resource_version = Some(version.to_owned());
    secret
}

fn list_of(client: &Client) -> Value {
    json!({ "apiVersion": "latchkey.dev/v1alpha1", "kind": "ClientList", "metadata": {}, "items": [client] })
}

async fn run(script: &MockApi, client: &Client, rounds: usize) -> Vec<SecretOutcome> {
    let context = context(script.client()).0;
    let mut outcomes = Vec::new();
    for _ in 0..rounds {
        let client_id = client.client_id().unwrap();
        outcomes.push(ensure(&context, client, &client_id, ISSUER).await.unwrap());
    }
    outcomes
}

const CHANGED: SecretOutcome = SecretOutcome::Changed { rotated: false };
const ROTATED: SecretOutcome = SecretOutcome::Changed { rotated: true };

#[tokio::test]
async fn a_missing_secret_is_created_once() {
    let script = MockApi::default().expect(Method::GET, SECRET, |_| not_found("grafana-oidc")).expect(
        Method::POST,
        SECRETS,
        stored_as("7"),
    );
    assert_eq!(run(&script, &client(None), 2).await, [CHANGED, SecretOutcome::Unchanged]);
    let calls = script.finish();
    let created: Secret = serde_json::from_value(calls[1].body.clone()).unwrap();
    assert_eq!(created.type_.as_deref(), Some("latchkey.dev/client"));
    let owner = &created.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.kind.as_str(), owner.name.as_str(), owner.controller), ("Client", "grafana", Some(true)));
    assert_eq!(owner.uid, "uid-of-monitoring/grafana");
    let data = created.data.unwrap();
    assert_eq!(data.keys().collect::<Vec<_>>(), ["client-id", "client-secret", "issuer"]);
    assert_eq!(data["issuer"].0, ISSUER.as_bytes());
    assert_eq!(data["client-id"].0, b"monitoring.grafana");
    assert!(data["client-secret"].0.starts_with(b"lks_"));
}

#[tokio::test]
async fn a_secret_of_somebody_else_is_never_written() {
    let mut of_another_client = stored("7", &[]);
    of_another_client.metadata.owner_references.as_mut().unwrap()[0].uid = "another".to_owned();
    let opaque = Secret { type_: Some("Opaque".to_owned()), ..stored("7", &[]) };
    // The watch of Secrets of Clients does not report Secrets of other types, so such a Secret is read each time.
    for (foreign, reads) in [(of_another_client, 1), (opaque, 2)] {
        let script =
            (0..reads).fold(MockApi::default(), |script, _| script.expect(Method::GET, SECRET, respond(&foreign)));
        let expected = [SecretOutcome::Conflict { is_news: true }, SecretOutcome::Conflict { is_news: false }];
        assert_eq!(run(&script, &client(Some("1")), 2).await, expected);
        script.finish();
    }
}

#[tokio::test]
async fn a_damaged_secret_is_repaired_and_other_keys_stay() {
    let mut damaged = stored("7", &[]);
    let data = damaged.data.as_mut().unwrap();
    data.remove("issuer");
    data.insert("more".to_owned(), ByteString(b"kept".to_vec()));
    let script =
        MockApi::default().expect(Method::GET, SECRET, respond(&damaged)).expect(Method::PUT, SECRET, stored_as("8"));
    assert_eq!(run(&script, &client(None), 2).await, [CHANGED, SecretOutcome::Unchanged]);
    let written: Secret = serde_json::from_value(script.finish()[1].body.clone()).unwrap();
    assert_eq!(written.metadata.resource_version.as_deref(), Some("7"), "the write fails if the Secret has changed");
    let data = written.data.unwrap();
    assert_eq!(data["issuer"].0, ISSUER.as_bytes());
    assert_eq!((&data["client-secret"].0[..], &data["more"].0[..]), (&b"a secret from before"[..], &b"kept"[..]));
}

#[tokio::test]
async fn each_request_rotates_once() {
    let requested = client(Some("1"));
    let script = MockApi::default()
        .expect(Method::GET, SECRET, respond(&stored("7", &[])))
        .expect(Method::GET, CLIENTS, respond(&list_of(&requested)))
        .expect(Method::PUT, SECRET, stored_as("8"));
    assert_eq!(run(&script, &requested, 3).await, [ROTATED, SecretOutcome::Unchanged, SecretOutcome::Unchanged]);
    let calls = script.finish();
    let written: Secret = serde_json::from_value(calls[2].body.clone()).unwrap();
    let value = SecretBytes(written.data.as_ref().unwrap()["client-secret"].0.clone());
    let state = ClientSecretState::of(&written);
    let now = time::OffsetDateTime::UNIX_EPOCH;
    let hashes = state.hashes_at(now).unwrap();
    assert_eq!(hashes.current, sha256(&parse_secret(&value).unwrap()));
    let before = SecretBytes(b"a secret from before".to_vec());
    assert_eq!(hashes.previous.unwrap().sha256, sha256(&parse_secret(&before).unwrap()));
    assert_eq!(state.next_due(now), Some(now + Duration::days(1)));
}

/// The leader was killed after its write, and the next leader has an older copy of the Secret.
#[tokio::test]
async fn a_rotation_that_another_operator_has_written_is_not_repeated() {
    let fulfilled = stored("8", &[("latchkey.dev/handled-rotation", "1")]);
    let script = MockApi::default().expect(Method::GET, SECRET, respond(&fulfilled));
    assert_eq!(run(&script, &client(Some("1")), 2).await, [CHANGED, SecretOutcome::Unchanged]);
    script.finish();

    // The other operator writes between the read and the write.
    let requested = client(Some("1"));
    let script = MockApi::default()
        .expect(Method::GET, SECRET, respond(&stored("7", &[])))
        .expect(Method::GET, CLIENTS, respond(&list_of(&requested)))
        .expect(Method::PUT, SECRET, |_| api_error(StatusCode::CONFLICT, "Conflict", "grafana-oidc"))
        .expect(Method::GET, SECRET, respond(&fulfilled));
    assert_eq!(run(&script, &requested, 2).await, [CHANGED, SecretOutcome::Unchanged]);
    script.finish();
}

/// The watch of a new leader is late: it reports an earlier request than the one that was fulfilled last.
#[tokio::test]
async fn an_outdated_rotation_request_causes_no_rotation() {
    let (outdated, current) = (client(Some("1")), client(Some("2")));
    let script = MockApi::default()
        .expect(Method::GET, SECRET, respond(&stored("8", &[("latchkey.dev/handled-rotation", "2")])))
        .expect(Method::GET, CLIENTS, respond(&list_of(&current)));
    assert_eq!(run(&script, &outdated, 1).await, [SecretOutcome::Unchanged]);
    script.finish();
}

#[tokio::test]
async fn an_operator_that_must_not_write_secrets_of_clients_writes_none() {
    let script = MockApi::default();
    let mut context = context(script.client()).0;
    context.creates_client_secrets = false;
    let client = client(Some("1"));
    let client_id = client.client_id().unwrap();
    assert_eq!(ensure(&context, &client, &client_id, ISSUER).await.unwrap(), SecretOutcome::Unchanged);
    // If the Secret exists already, the operator uses it without changing it.
    let name = NamespacedName::new("monitoring", "grafana-oidc");
    context.objects.client_secrets.record_read(&name, ClientSecretState::of(&stored("7", &[])));
    assert_eq!(
        ensure(&context, &client, &client_id, "https://other.example.com").await.unwrap(),
        SecretOutcome::Unchanged
    );
    script.finish();
}
