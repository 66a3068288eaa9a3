//! An index that finds the Clients of an App, of a namespace, of a Secret and of a ConfigMap.
//!
//! A cluster can have 50,000 Clients, so the index stores a hash of each reference instead of its text. Two references
//! with the same hash only cause a needless reconcile: whoever needs exactly the Clients of an App checks each of them.

use std::{
    collections::{BTreeSet, HashMap},
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use kube::ResourceExt;
use parking_lot::Mutex;

use super::{index::NamespacedName, objects::WatchedClient};

/// What a Client references.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ClientReference<'a> {
    App {
        namespace: &'a str,
        name: &'a str,
    },
    /// The namespace of a Client that refers to an App of another namespace. The labels of this namespace decide
    /// whether the App accepts the Client.
    GrantedNamespace(&'a str),
    /// A Secret that the Client names, or that the operator creates for it.
    Secret {
        namespace: &'a str,
        name: &'a str,
    },
    ConfigMap {
        namespace: &'a str,
        name: &'a str,
    },
}

/// Maps hashes of references to the names of the Clients that have them.
#[derive(Default)]
pub(crate) struct ClientIndex {
    hasher: RandomState,
    /// The entries of one Client share its name.
    entries: Mutex<BTreeSet<(u64, Arc<NamespacedName>)>>,
    /// The last known references of Clients that cannot be decoded any more. Their Apps still serve them as they were
    /// accepted last.
    undecodable: Mutex<HashMap<NamespacedName, ClientReferences>>,
}

/// The references of one Client, as hashes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ClientReferences(BTreeSet<u64>);

// === impl ClientIndex ===

impl ClientIndex {
    /// Replaces the references of one Client. `before` and `now` are `None` if it does not exist.
    pub(super) fn update(&self, name: &NamespacedName, before: Option<&WatchedClient>, now: Option<&WatchedClient>) {
        let kept = self.undecodable.lock().remove(name);
        let before = kept.or_else(|| Some(self.references_of(before?))).unwrap_or_default();
        let now = match now {
            Some(client) if client.decoded().is_none() => {
                self.undecodable.lock().insert(name.clone(), before.clone());
                before.clone()
            }
            Some(client) => self.references_of(client),
            None => ClientReferences::default(),
        };
        self.reindex(name, &before, &now);
    }

    /// Returns the references of a Client. Returns none for a Client that cannot be decoded.
    fn references_of(&self, client: &WatchedClient) -> ClientReferences {
        let Some(client) = client.decoded() else { return ClientReferences::default() };
        let namespace = client.namespace().unwrap_or_default();
        let created = client.created_secret();
        let secrets = client.spec.secret_refs().map(|reference| reference.name.as_str()).chain(created.as_deref());
        let secrets = secrets.map(|name| ClientReference::Secret { namespace: &namespace, name });
        let config_map = client.spec.jwks_ref().map(|reference| reference.name.as_str());
        let config_map = config_map.map(|name| ClientReference::ConfigMap { namespace: &namespace, name });
        let granted = (!client.is_in_app_namespace()).then_some(ClientReference::GrantedNamespace(namespace.as_str()));
        let app = ClientReference::App { namespace: client.app_namespace(), name: &client.spec.app_ref.name };
        let references = std::iter::once(app).chain(granted).chain(secrets).chain(config_map);
        ClientReferences(references.map(|reference| self.hash(reference)).collect())
    }

    fn reindex(&self, client: &NamespacedName, before: &ClientReferences, now: &ClientReferences) {
        if before == now {
            return;
        }
        let name = Arc::new(client.clone());
        let mut entries = self.entries.lock();
        for hash in &before.0 {
            entries.remove(&(*hash, Arc::clone(&name)));
        }
        entries.extend(now.0.iter().map(|hash| (*hash, Arc::clone(&name))));
    }

    /// Returns the Clients that have this reference, in the order of their names. A Client that has another reference
    /// with the same hash can be among them.
    pub(crate) fn get(&self, reference: ClientReference<'_>) -> Vec<Arc<NamespacedName>> {
        let hash = self.hash(reference);
        let first = (hash, Arc::new(NamespacedName::default()));
        let entries = self.entries.lock();
        entries.range(first..).take_while(|(key, _)| *key == hash).map(|(_, client)| Arc::clone(client)).collect()
    }

    fn hash(&self, reference: ClientReference<'_>) -> u64 {
        self.hasher.hash_one(reference)
    }
}

#[cfg(test)]
mod tests {
    use kube::core::DeserializeGuard;
    use latchkey_crds::client::Client;
    use serde_json::{Value, json};

    use super::*;

    fn client(name: &str, spec: &Value) -> WatchedClient {
        let client = json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "Client",
            "metadata": { "namespace": "monitoring", "name": name }, "spec": spec,
        });
        serde_json::from_value::<DeserializeGuard<Client>>(client).unwrap().into()
    }

    fn web(app_namespace: Option<&str>, fields: &Value) -> Value {
        let mut web = json!({ "redirectURLs": ["https://grafana.example.com/login"] });
        web.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({ "appRef": { "name": "platform", "namespace": app_namespace }, "web": web })
    }

    fn found(index: &ClientIndex, reference: ClientReference<'_>) -> Vec<String> {
        index.get(reference).iter().map(|client| client.name().to_owned()).collect()
    }

    #[test]
    fn a_client_is_found_by_each_of_its_current_references() {
        let index = ClientIndex::default();
        let created = client("grafana", &web(Some("identity"), &json!({})));
        let own = json!({
            "secretRef": { "name": "own", "key": "secret" }, "previousSecretRef": { "name": "former", "key": "secret" },
        });
        let own = client("argo", &web(None, &own));
        let keys = json!({ "authentication": "PrivateKeyJWT", "jwksRef": { "name": "keys", "key": "jwks.json" } });
        let keys = client("batch", &web(None, &keys));
        for (name, client) in [("grafana", &created), ("argo", &own), ("batch", &keys)] {
            index.update(&NamespacedName::new("monitoring", name), None, Some(client));
        }
        let secret = |name| ClientReference::Secret { namespace: "monitoring", name };
        assert_eq!(found(&index, ClientReference::App { namespace: "identity", name: "platform" }), ["grafana"]);
        assert_eq!(
            found(&index, ClientReference::App { namespace: "monitoring", name: "platform" }),
            ["argo", "batch"]
        );
        assert_eq!(found(&index, ClientReference::GrantedNamespace("monitoring")), ["grafana"], "of another namespace");
        assert_eq!(found(&index, secret("grafana-oidc")), ["grafana"]);
        assert_eq!(found(&index, secret("own")), ["argo"]);
        assert_eq!(found(&index, secret("former")), ["argo"]);
        assert_eq!(found(&index, secret("argo-oidc")), [""; 0], "the operator creates no Secret for it");
        assert_eq!(found(&index, ClientReference::ConfigMap { namespace: "monitoring", name: "keys" }), ["batch"]);
        assert_eq!(found(&index, secret("keys")), [""; 0], "a ConfigMap is not a Secret");

        let renamed = json!({ "secret": { "name": "login" } });
        let renamed = client("grafana", &web(Some("identity"), &renamed));
        let grafana = NamespacedName::new("monitoring", "grafana");
        index.update(&grafana, Some(&created), Some(&renamed));
        assert_eq!(found(&index, secret("grafana-oidc")), [""; 0]);
        assert_eq!(found(&index, secret("login")), ["grafana"]);
        index.update(&grafana, Some(&renamed), None);
        assert_eq!(found(&index, ClientReference::App { namespace: "identity", name: "platform" }), [""; 0]);
    }

    #[test]
    fn a_client_that_cannot_be_decoded_any_more_stays_at_its_app() {
        let index = ClientIndex::default();
        let name = NamespacedName::new("monitoring", "grafana");
        let of_app = || found(&index, ClientReference::App { namespace: "identity", name: "platform" });
        let good = client("grafana", &web(Some("identity"), &json!({})));
        let broken = client("grafana", &json!({ "appRef": 7 }));
        assert!(broken.decoded().is_none());
        index.update(&name, None, Some(&broken));
        assert_eq!(of_app(), [""; 0], "its App is not known");
        index.update(&name, Some(&broken), Some(&good));
        index.update(&name, Some(&good), Some(&broken));
        index.update(&name, Some(&broken), Some(&broken));
        assert_eq!(of_app(), ["grafana"]);
        index.update(&name, Some(&broken), None);
        assert_eq!(of_app(), [""; 0]);
    }
}
