//! The store of watched Clients. A cluster can have 50,000 Clients, so a Client is stored as JSON, which needs less
//! memory than the decoded Client. Each read decodes the JSON.

use std::{borrow::Cow, collections::HashMap, sync::Arc};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{
    Resource,
    core::{ObjectMeta, error_boundary::InvalidObject},
};
use latchkey_crds::{
    client::{Client, ClientSpec},
    names::ROTATE_SECRET_ANNOTATION,
    refs::AppRef,
};
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

use super::{changes::WatchEvent, index::NamespacedName, objects::WatchedClient};
use crate::client::status::StatusDigest;

/// The Clients that the watch has reported.
#[derive(Default)]
pub(crate) struct ClientStore(RwLock<HashMap<NamespacedName, Box<StoredClient>>>);

struct StoredClient {
    status: StatusDigest,
    /// An [`EncodedClient`] as JSON.
    json: Box<[u8]>,
}

/// What is stored of a Client, except its name and its status. The names of the fields are short to save memory.
#[derive(Deserialize, Serialize)]
struct EncodedClient<'a> {
    #[serde(rename = "u", skip_serializing_if = "Option::is_none")]
    uid: Option<Cow<'a, str>>,
    #[serde(rename = "v", skip_serializing_if = "Option::is_none")]
    resource_version: Option<Cow<'a, str>>,
    #[serde(rename = "g", skip_serializing_if = "Option::is_none")]
    generation: Option<i64>,
    /// In seconds since the Unix epoch, like `deleted`. The times in the metadata of an object are whole seconds.
    #[serde(rename = "c", skip_serializing_if = "Option::is_none")]
    created: Option<i64>,
    #[serde(rename = "d", skip_serializing_if = "Option::is_none")]
    deleted: Option<i64>,
    #[serde(rename = "r", skip_serializing_if = "Option::is_none")]
    rotation_request: Option<Cow<'a, str>>,
    /// `None`: the Client cannot be decoded, and `error` is set.
    #[serde(rename = "s", skip_serializing_if = "Option::is_none")]
    spec: Option<Cow<'a, ClientSpec>>,
    #[serde(rename = "e", skip_serializing_if = "Option::is_none")]
    error: Option<Cow<'a, str>>,
}

/// The fields of an [`EncodedClient`] that a [`ClientSummary`] contains.
#[derive(Deserialize)]
struct EncodedSummary {
    #[serde(rename = "u")]
    uid: Option<String>,
    #[serde(rename = "g")]
    generation: Option<i64>,
    #[serde(rename = "c")]
    created: Option<i64>,
    #[serde(rename = "d")]
    deleted: Option<i64>,
    #[serde(rename = "s")]
    spec: Option<EncodedAppRef>,
}

#[derive(Deserialize)]
struct EncodedAppRef {
    #[serde(rename = "appRef")]
    app_ref: AppRef,
}

/// What must be known of every Client that refers to an App. There can be thousands of them. A summary is read several
/// times faster than the whole Client.
#[derive(Debug, PartialEq)]
pub(crate) struct ClientSummary {
    pub(crate) uid: String,
    /// 0 if the Client has no generation.
    pub(crate) generation: i64,
    /// The creation time in seconds since the Unix epoch. A Client without a creation time counts as the youngest.
    pub(crate) created: i64,
    pub(crate) is_being_deleted: bool,
    /// The App that the Client names, or `None` if the Client cannot be decoded.
    pub(crate) app: Option<NamespacedName>,
}

// === impl ClientStore ===

impl ClientStore {
    /// Applies an event and returns the Client as it was before.
    pub(super) fn apply(&self, event: &WatchEvent<WatchedClient>) -> Option<WatchedClient> {
        match event {
            WatchEvent::Applied(name, client) => self.insert(name.clone(), client),
            WatchEvent::Deleted { name, .. } => self.remove(name),
            WatchEvent::Synced => None,
        }
    }

    /// Stores a Client under its name, and returns the Client as it was before.
    pub(crate) fn insert(&self, name: NamespacedName, client: &WatchedClient) -> Option<WatchedClient> {
        let stored = Box::new(StoredClient::encode(client));
        let before = self.0.write().insert(name.clone(), stored);
        before.map(|before| before.decode(&name))
    }

    pub(crate) fn remove(&self, name: &NamespacedName) -> Option<WatchedClient> {
        let before = self.0.write().remove(name);
        before.map(|before| before.decode(name))
    }

    pub(crate) fn get(&self, name: &NamespacedName) -> Option<WatchedClient> {
        self.0.read().get(name).map(|stored| stored.decode(name))
    }

    pub(crate) fn summary(&self, name: &NamespacedName) -> Option<ClientSummary> {
        self.0.read().get(name).map(|stored| stored.summary(name))
    }

    /// Returns the names of all Clients, in no particular order.
    pub(crate) fn names(&self) -> Vec<NamespacedName> {
        self.0.read().keys().cloned().collect()
    }
}

// === impl StoredClient ===

impl StoredClient {
    fn encode(client: &WatchedClient) -> Self {
        let metadata = client.meta();
        let seconds = |time: &Option<Time>| time.as_ref().map(|time| time.0.as_second());
        let request = metadata.annotations.as_ref().and_then(|annotations| annotations.get(ROTATE_SECRET_ANNOTATION));
        let encoded = EncodedClient {
            uid: metadata.uid.as_deref().map(Cow::Borrowed),
            resource_version: metadata.resource_version.as_deref().map(Cow::Borrowed),
            generation: metadata.generation,
            created: seconds(&metadata.creation_timestamp),
            deleted: seconds(&metadata.deletion_timestamp),
            rotation_request: request.map(|request| Cow::Borrowed(request.as_str())),
            spec: client.decoded().map(|client| Cow::Borrowed(&client.spec)),
            error: client.client.as_ref().err().map(|invalid| Cow::Borrowed(invalid.error.as_str())),
        };
        let json = serde_json::to_vec(&encoded).expect("a Client has only string keys");
        Self { status: client.status, json: json.into_boxed_slice() }
    }

    fn decode(&self, name: &NamespacedName) -> WatchedClient {
        let client = match serde_json::from_slice::<EncodedClient<'_>>(&self.json) {
            Ok(encoded) => encoded.into_client(name),
            // Not expected. The Client is then reported like one that the watch could not decode.
            Err(error) => Err(Arc::new(InvalidObject { error: error.to_string(), metadata: metadata_of(name) })),
        };
        WatchedClient { client, status: self.status }
    }

    fn summary(&self, name: &NamespacedName) -> ClientSummary {
        let encoded = serde_json::from_slice::<EncodedSummary>(&self.json).ok();
        let Some(EncodedSummary { uid, generation, created, deleted, spec }) = encoded else {
            // Not expected, like an error in `decode`.
            return ClientSummary::without_metadata();
        };
        let app = spec.map(|spec| {
            let namespace = spec.app_ref.namespace.as_deref().unwrap_or(name.namespace());
            NamespacedName::new(namespace, &spec.app_ref.name)
        });
        ClientSummary {
            uid: uid.unwrap_or_default(),
            generation: generation.unwrap_or(0),
            created: created.unwrap_or(i64::MAX),
            is_being_deleted: deleted.is_some(),
            app,
        }
    }
}

// === impl ClientSummary ===

impl ClientSummary {
    fn without_metadata() -> Self {
        Self { uid: String::new(), generation: 0, created: i64::MAX, is_being_deleted: false, app: None }
    }
}

// === impl EncodedClient ===

impl EncodedClient<'_> {
    fn into_client(self, name: &NamespacedName) -> Result<Arc<Client>, Arc<InvalidObject>> {
        let time = |seconds: i64| Timestamp::from_second(seconds).ok().map(Time);
        let request = self.rotation_request.map(Cow::into_owned);
        let metadata = ObjectMeta {
            uid: self.uid.map(Cow::into_owned),
            resource_version: self.resource_version.map(Cow::into_owned),
            generation: self.generation,
            creation_timestamp: self.created.and_then(time),
            deletion_timestamp: self.deleted.and_then(time),
            annotations: request.map(|request| [(ROTATE_SECRET_ANNOTATION.to_owned(), request)].into()),
            ..metadata_of(name)
        };
        match self.spec {
            Some(spec) => Ok(Arc::new(Client { metadata, spec: spec.into_owned(), status: None })),
            None => {
                let error = self.error.map(Cow::into_owned).unwrap_or_default();
                Err(Arc::new(InvalidObject { error, metadata }))
            }
        }
    }
}

fn metadata_of(name: &NamespacedName) -> ObjectMeta {
    ObjectMeta {
        namespace: Some(name.namespace().to_owned()),
        name: Some(name.name().to_owned()),
        ..ObjectMeta::default()
    }
}

#[cfg(test)]
mod tests {
    use kube::core::DeserializeGuard;
    use latchkey_crds::client::ClientStatus;
    use serde_json::{Value, json};

    use super::*;

    fn name() -> NamespacedName {
        NamespacedName::new("monitoring", "grafana")
    }

    fn watched(metadata: &Value, spec: &Value) -> WatchedClient {
        let mut client = json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "Client",
            "metadata": { "namespace": "monitoring", "name": "grafana" }, "spec": spec,
        });
        let members = client["metadata"].as_object_mut().unwrap();
        members.extend(metadata.as_object().unwrap().clone());
        serde_json::from_value::<DeserializeGuard<Client>>(client).unwrap().into()
    }

    /// All metadata that the operator reads.
    fn metadata() -> Value {
        json!({
            "uid": "u-1", "resourceVersion": "7", "generation": 3, "creationTimestamp": "2026-01-02T03:04:05Z",
            "deletionTimestamp": "2026-01-02T03:04:06Z", "annotations": { "latchkey.dev/rotate-secret": "second" },
        })
    }

    fn specs() -> [Value; 3] {
        let web = json!({
            "appRef": { "name": "platform", "namespace": "identity" }, "displayName": "Grafana \u{1}\"é",
            "web": {
                "redirectURLs": ["https://grafana.example.com/login"],
                "postLogoutRedirectURLs": ["https://grafana.example.com/"],
                "secret": { "name": "login", "rotationOverlapSeconds": 60 }, "pkce": "Required",
            },
            "pushedAuthorization": "Required", "scopes": ["openid"], "consent": "Once",
            "allow": { "groups": ["ops"] }, "groups": { "only": ["team-*"], "max": 7 },
            "tokens": { "idTokenAlgorithm": "ES256", "idTokenLifetimeSeconds": 60, "audiences": ["ops"] },
        });
        let keys = json!({
            "appRef": { "name": "platform" }, "clientID": "grafana",
            "web": {
                "redirectURLs": ["https://grafana.example.com/login"], "authentication": "PrivateKeyJWT",
                "jwksRef": { "name": "keys", "key": "jwks" }, "secretRef": { "name": "a", "key": "b" },
                "previousSecretRef": { "name": "c", "key": "d" },
            },
        });
        [web, keys, json!({ "appRef": { "name": "app" }, "public": { "redirectURLs": ["com.example.app:/done"] } })]
    }

    #[test]
    fn a_read_client_is_equal_to_the_stored_one() {
        let store = ClientStore::default();
        for spec in specs() {
            let mut client = watched(&metadata(), &spec);
            let status = ClientStatus { observed_generation: Some(3), ..ClientStatus::default() };
            client.status = StatusDigest::of(&status);
            store.insert(name(), &client);
            let read = store.get(&name()).unwrap();
            assert!(client.decoded().is_some(), "{spec}");
            assert_eq!((read.decoded(), read.status), (client.decoded(), client.status));
            let bare = watched(&json!({}), &spec);
            store.insert(name(), &bare);
            assert_eq!(store.get(&name()).unwrap().decoded(), bare.decoded());
        }
    }

    #[test]
    fn of_a_client_that_cannot_be_decoded_the_metadata_and_the_error_are_stored() {
        let store = ClientStore::default();
        let broken = watched(&metadata(), &json!({ "appRef": 7 }));
        store.insert(name(), &broken);
        let (read, broken) = (store.get(&name()).unwrap().client.unwrap_err(), broken.client.unwrap_err());
        assert_eq!((&read.metadata, &read.error), (&broken.metadata, &broken.error));
        assert!(!read.error.is_empty());
    }

    #[test]
    fn a_summary_has_what_the_client_has() {
        let store = ClientStore::default();
        let summary = |metadata: &Value, spec: &Value| {
            store.insert(name(), &watched(metadata, spec));
            store.summary(&name()).unwrap()
        };
        let [web, keys, _] = specs();
        let full = ClientSummary {
            uid: "u-1".to_owned(),
            generation: 3,
            created: 1_767_323_045,
            is_being_deleted: true,
            app: Some(NamespacedName::new("identity", "platform")),
        };
        assert_eq!(summary(&metadata(), &web), full);
        let in_own_namespace = ClientSummary { app: Some(NamespacedName::new("monitoring", "platform")), ..full };
        assert_eq!(summary(&metadata(), &keys), in_own_namespace);
        let undecodable = ClientSummary { app: None, ..in_own_namespace };
        assert_eq!(summary(&metadata(), &json!({ "appRef": 7 })), undecodable);
        assert_eq!(summary(&json!({}), &json!({})), ClientSummary::without_metadata());
    }

    #[test]
    fn each_write_returns_the_client_as_it_was_before() {
        let store = ClientStore::default();
        let [web, keys, _] = specs();
        let version = |client: Option<WatchedClient>| client.and_then(|client| client.meta().generation);
        assert_eq!(version(store.insert(name(), &watched(&json!({ "generation": 1 }), &web))), None);
        assert_eq!(version(store.insert(name(), &watched(&json!({ "generation": 2 }), &keys))), Some(1));
        assert_eq!(store.names(), [name()]);
        assert_eq!(version(store.remove(&name())), Some(2));
        assert!(store.get(&name()).is_none() && store.summary(&name()).is_none() && store.names().is_empty());
        assert!(store.remove(&name()).is_none());
    }

    #[test]
    fn a_usual_client_needs_little_memory() {
        let spec = json!({
            "appRef": { "name": "platform", "namespace": "identity" },
            "web": { "redirectURLs": ["https://grafana.example.com/login"] },
        });
        let metadata = json!({
            "uid": "11a8ce4d-3d0b-4ff5-9a4e-7f1c1b3f2b0e", "resourceVersion": "1234567", "generation": 1,
            "creationTimestamp": "2026-01-02T03:04:05Z",
        });
        let stored = StoredClient::encode(&watched(&metadata, &spec));
        let size = stored.json.len() + size_of::<StoredClient>();
        assert!(size < 512, "{size} bytes: {}", String::from_utf8_lossy(&stored.json));
    }
}
