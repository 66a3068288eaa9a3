//! An index that finds the Clients of an App, of a namespace, of a Secret and of a ConfigMap.
//!
//! A cluster can have 50,000 Clients, so the index stores a hash of each reference instead of its text. Two references
//! with the same hash only cause a needless reconcile: a caller that needs exactly the Clients of an App checks each of
//! them.

use std::{
    collections::{BTreeSet, HashMap},
    hash::{BuildHasher, RandomState},
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
    /// The namespace of a Client that refers to an App of another namespace. The labels of the Client's namespace
    /// decide whether the App accepts the Client.
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
    /// Pairs of the hash of a reference and the name of a Client.
    entries: Mutex<BTreeSet<(u64, NamespacedName)>>,
    /// What is known of the Clients that cannot be decoded. They are still served as they were accepted last.
    undecodable: Mutex<HashMap<NamespacedName, Undecodable>>,
}

/// What is known of a Client that cannot be decoded.
#[derive(Clone, Debug, Default)]
struct Undecodable {
    /// The App that the Client named when it could be decoded. `None`: the operator has never decoded the Client since
    /// its start.
    app: Option<NamespacedName>,
    /// The references that the Client had when it could be decoded.
    references: ClientReferences,
}

/// The references of one Client, as hashes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ClientReferences(BTreeSet<u64>);

// === impl ClientIndex ===

impl ClientIndex {
    /// Replaces the references of one Client. `before` and `now` are `None` if it does not exist.
    pub(crate) fn update(&self, name: &NamespacedName, before: Option<&WatchedClient>, now: Option<&WatchedClient>) {
        let mut undecodable = self.undecodable.lock();
        let before = undecodable.remove(name).unwrap_or_else(|| Undecodable {
            app: before.and_then(WatchedClient::app_name),
            references: before.map(|client| self.references_of(client)).unwrap_or_default(),
        });
        let now = match now {
            Some(client) if client.decoded().is_none() => {
                undecodable.insert(name.clone(), before.clone());
                return self.reindex(name, &ClientReferences::default(), &before.references);
            }
            Some(client) => self.references_of(client),
            None => ClientReferences::default(),
        };
        self.reindex(name, &before.references, &now);
    }

    /// Returns the App of a Client, as far as it is known: a Client that cannot be decoded belongs to the App that it
    /// named before. `named` is the App that the Client names, or `None` if the Client cannot be decoded.
    pub(crate) fn app_of(&self, client: &NamespacedName, named: Option<NamespacedName>) -> Option<NamespacedName> {
        named.or_else(|| self.undecodable.lock().get(client)?.app.clone())
    }

    /// Whether there is a Client without a known App: one that the operator has never decoded since its start.
    pub(crate) fn has_clients_without_app(&self) -> bool {
        self.undecodable.lock().values().any(|client| client.app.is_none())
    }

    /// Records the App of a Client that the operator has never decoded since its start. Does nothing if the App of the
    /// Client is known.
    pub(crate) fn record_app(&self, client: &NamespacedName, app: &NamespacedName) {
        let mut undecodable = self.undecodable.lock();
        let Some(known) = undecodable.get_mut(client).filter(|known| known.app.is_none()) else { return };
        let namespace = client.namespace();
        let granted = (namespace != app.namespace()).then_some(ClientReference::GrantedNamespace(namespace));
        let of_app = ClientReference::App { namespace: app.namespace(), name: app.name() };
        let references = std::iter::once(of_app).chain(granted).map(|reference| self.hash(reference)).collect();
        *known = Undecodable { app: Some(app.clone()), references: ClientReferences(references) };
        self.reindex(client, &ClientReferences::default(), &known.references);
    }

    /// Returns the references of a Client. The result is empty for a Client that cannot be decoded.
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
        let mut entries = self.entries.lock();
        for hash in &before.0 {
            entries.remove(&(*hash, client.clone()));
        }
        entries.extend(now.0.iter().map(|hash| (*hash, client.clone())));
    }

    /// Returns the Clients that have this reference, in the order of their names. A Client that has another reference
    /// with the same hash can be among them.
    pub(crate) fn get(&self, reference: ClientReference<'_>) -> Vec<NamespacedName> {
        let hash = self.hash(reference);
        let first = (hash, NamespacedName::default());
        let entries = self.entries.lock();
        entries.range(first..).take_while(|(key, _)| *key == hash).map(|(_, client)| client.clone()).collect()
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

    fn web_client_spec(app_namespace: Option<&str>, fields: &Value) -> Value {
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
        let created = client("grafana", &web_client_spec(Some("identity"), &json!({})));
        let own = json!({
            "secretRef": { "name": "own", "key": "secret" }, "previousSecretRef": { "name": "former", "key": "secret" },
        });
        let own = client("argo", &web_client_spec(None, &own));
        let keys = json!({ "authentication": "PrivateKeyJWT", "jwksRef": { "name": "keys", "key": "jwks.json" } });
        let keys = client("batch", &web_client_spec(None, &keys));
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
        let renamed = client("grafana", &web_client_spec(Some("identity"), &renamed));
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
        let good = client("grafana", &web_client_spec(Some("identity"), &json!({})));
        let broken = client("grafana", &json!({ "appRef": 7 }));
        assert!(broken.decoded().is_none());
        index.update(&name, None, Some(&broken));
        assert_eq!(of_app(), [""; 0], "its App is not known");
        index.update(&name, Some(&broken), Some(&good));
        index.update(&name, Some(&good), Some(&broken));
        index.update(&name, Some(&broken), Some(&broken));
        assert_eq!(of_app(), ["grafana"]);
        assert_eq!(index.app_of(&name, broken.app_name()), Some(NamespacedName::new("identity", "platform")));
        index.update(&name, Some(&broken), None);
        assert_eq!(of_app(), [""; 0]);
        assert_eq!(index.app_of(&name, broken.app_name()), None);
        assert_eq!(index.app_of(&name, good.app_name()), Some(NamespacedName::new("identity", "platform")));
    }

    #[test]
    fn the_app_of_a_client_that_could_never_be_decoded_can_be_recorded() {
        let index = ClientIndex::default();
        let (name, app) = (NamespacedName::new("monitoring", "grafana"), NamespacedName::new("identity", "platform"));
        let of_app = || found(&index, ClientReference::App { namespace: "identity", name: "platform" });
        let broken = client("grafana", &json!({ "appRef": 7 }));
        assert!(!index.has_clients_without_app());
        index.record_app(&name, &app);
        assert_eq!(of_app(), [""; 0], "there is no such Client");
        index.update(&name, None, Some(&broken));
        assert!(index.has_clients_without_app());
        index.record_app(&name, &app);
        index.record_app(&name, &NamespacedName::new("identity", "other"));
        assert_eq!((of_app(), index.app_of(&name, None)), (vec!["grafana".to_owned()], Some(app)));
        assert_eq!(found(&index, ClientReference::GrantedNamespace("monitoring")), ["grafana"]);
        assert!(!index.has_clients_without_app());
        index.update(&name, Some(&broken), Some(&broken));
        assert_eq!(of_app(), ["grafana"]);
        index.update(&name, Some(&broken), None);
        assert_eq!(of_app(), [""; 0]);
    }
}
