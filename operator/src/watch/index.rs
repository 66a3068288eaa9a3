//! An index that finds the Apps and Providers that reference an object. Without the index, every change would cost a
//! scan of thousands of Apps.

use std::{collections::BTreeSet, fmt, sync::Arc};

use kube::{
    Resource, ResourceExt,
    core::{DeserializeGuard, ObjectMeta},
    runtime::reflector::ObjectRef,
};
use latchkey_crds::{
    app::App,
    client::Client,
    provider::Provider,
    types::{AppId, HostName},
};
use parking_lot::Mutex;

/// A namespace and a name in it. Clones share the text in memory.
///
/// The text is the namespace, U+0000 and the name. Namespaces and names of objects do not contain U+0000. So the order
/// of the texts is the order of the namespaces and then of the names.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NamespacedName(Arc<str>);

/// What an App references. Its own appID and namespace, and the host of its pages, also count as references.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reference {
    AppId(AppId),
    Namespace(String),
    Provider(NamespacedName),
    Secret(NamespacedName),
    ConfigMap(NamespacedName),
    /// The App's own host for its pages.
    PagesHost(HostName),
}

/// Maps each reference (`K`) to the names of the objects that have it (`V`).
pub(crate) struct ReferenceIndex<K, V>(Mutex<BTreeSet<(K, V)>>);

// === impl NamespacedName ===

impl NamespacedName {
    pub(crate) fn new(namespace: &str, name: &str) -> Self {
        Self([namespace, "\0", name].concat().into())
    }

    pub(crate) fn from_metadata(meta: &ObjectMeta) -> Self {
        Self::new(meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default())
    }

    pub(crate) fn object_ref<K: Resource<DynamicType = ()>>(&self) -> ObjectRef<K> {
        ObjectRef::new(self.name()).within(self.namespace())
    }

    pub(crate) fn namespace(&self) -> &str {
        self.parts().0
    }

    pub(crate) fn name(&self) -> &str {
        self.parts().1
    }

    /// Whether this name is a clone of the other one.
    #[cfg(test)]
    pub(super) fn shares_memory_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    fn parts(&self) -> (&str, &str) {
        self.0.split_once('\0').unwrap_or_default()
    }
}

impl Default for NamespacedName {
    fn default() -> Self {
        Self::new("", "")
    }
}

impl fmt::Display for NamespacedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace(), self.name())
    }
}

impl fmt::Debug for NamespacedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NamespacedName({self})")
    }
}

/// Returns the App that a Client refers to.
pub(crate) fn app_name(client: &Client) -> NamespacedName {
    NamespacedName::new(client.app_namespace(), &client.spec.app_ref.name)
}

/// Returns the references of an App, each with the App's own name. The result is empty for an App that cannot be
/// decoded.
pub(super) fn references_of_app(app: &DeserializeGuard<App>) -> BTreeSet<(Reference, NamespacedName)> {
    let Ok(app) = &app.0 else { return BTreeSet::new() };
    let namespace = app.namespace().unwrap_or_default();
    let local = |name: &str| NamespacedName::new(&namespace, name);
    let references = (app.app_id().ok().map(Reference::AppId).into_iter())
        .chain([Reference::Namespace(namespace.clone())])
        .chain(app.spec.provider_refs.iter().map(|reference| Reference::Provider(local(&reference.name))))
        .chain(app.spec.secret_refs().map(|reference| Reference::Secret(local(&reference.name))))
        .chain(app.spec.config_maps().map(|name| Reference::ConfigMap(local(name))))
        .chain(app.spec.pages.enabled_host().cloned().map(Reference::PagesHost));
    let app = NamespacedName::from_metadata(&app.metadata);
    references.map(|reference| (reference, app.clone())).collect()
}

/// Returns the Secret that a Provider references, with the name of the Provider.
pub(super) fn references_of_provider(
    provider: &DeserializeGuard<Provider>,
) -> BTreeSet<(NamespacedName, NamespacedName)> {
    let Ok(provider) = &provider.0 else { return BTreeSet::new() };
    let name = NamespacedName::from_metadata(&provider.metadata);
    let secret = NamespacedName::new(name.namespace(), &provider.spec.client.secret_ref().name);
    BTreeSet::from([(secret, name)])
}

// === impl ReferenceIndex ===

impl<K, V> Default for ReferenceIndex<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Ord + Clone, V: Ord + Clone + Default> ReferenceIndex<K, V> {
    /// Replaces the references of one object.
    pub(crate) fn reindex(&self, before: &BTreeSet<(K, V)>, now: &BTreeSet<(K, V)>) {
        if before == now {
            return;
        }
        let mut all = self.0.lock();
        for pair in before.difference(now) {
            all.remove(pair);
        }
        all.extend(now.difference(before).cloned());
    }

    /// Returns how many objects have this reference.
    pub(crate) fn count(&self, reference: &K) -> usize {
        let all = self.0.lock();
        // `V::default()` is the empty name, which sorts first.
        all.range((reference.clone(), V::default())..).take_while(|(key, _)| key == reference).count()
    }

    /// Returns the objects that have this reference, in order.
    pub(crate) fn get(&self, reference: &K) -> Vec<V> {
        let all = self.0.lock();
        let from = all.range((reference.clone(), V::default())..);
        from.take_while(|(key, _)| key == reference).map(|(_, object)| object.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn app(name: &str, spec: &serde_json::Value) -> DeserializeGuard<App> {
        let app = json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "App",
            "metadata": { "namespace": "shop", "name": name }, "spec": spec,
        });
        serde_json::from_value(app).unwrap()
    }

    #[test]
    fn names_are_ordered_by_namespace_and_then_by_name() {
        let names = [("", ""), ("", "a"), ("shop", ""), ("shop", "a"), ("shop", "b"), ("shop-2", "a"), ("shop.a", "")];
        let names = names.map(|(namespace, name)| NamespacedName::new(namespace, name));
        assert!(names.is_sorted_by(|one, other| one < other), "{names:?}");
        assert_eq!(names[0], NamespacedName::default());
        assert_eq!((names[5].namespace(), names[5].name()), ("shop-2", "a"));
        assert_eq!(names[5].to_string(), "shop-2/a");
    }

    #[test]
    fn an_object_is_found_by_each_of_its_current_references() {
        let index = ReferenceIndex::default();
        let spec = |secret: &str| {
            json!({
                "displayName": "Shop", "appID": "shop", "providerRefs": [{ "name": "github" }],
                "mail": { "from": "a@example.com", "smtpSecretRef": { "name": secret }, "templatesRef": { "name": "mail" } },
                "password": { "firebaseScryptRef": { "name": "firebase" } },
                "webhooks": [{
                    "name": "crm", "events": ["user.created"],
                    "push": { "url": "https://crm.example.com", "secretRef": { "name": "crm-hook" } },
                }],
                "pages": {
                    "mode": "Enabled", "host": "login.shop.example.com", "textsRef": { "name": "texts" },
                    "theme": { "logoRef": { "name": "brand", "key": "logo.svg" } },
                },
            })
        };
        let (one, other) = (app("one", &spec("smtp")), app("other", &spec("smtp")));
        for app in [&other, &one] {
            index.reindex(&BTreeSet::new(), &references_of_app(app));
        }
        let both = [NamespacedName::new("shop", "one"), NamespacedName::new("shop", "other")];
        let in_shop = |name: &str| NamespacedName::new("shop", name);
        assert_eq!(index.get(&Reference::AppId("shop".parse().unwrap())), both);
        assert_eq!(index.get(&Reference::Provider(in_shop("github"))), both);
        for config_map in ["mail", "texts", "brand"] {
            assert_eq!(index.get(&Reference::ConfigMap(in_shop(config_map))), both);
        }
        assert_eq!(index.get(&Reference::PagesHost("login.shop.example.com".parse().unwrap())), both);
        assert_eq!(index.get(&Reference::Secret(in_shop("smtp"))), both);
        for secret in ["firebase", "crm-hook"] {
            assert_eq!(index.get(&Reference::Secret(in_shop(secret))), both);
        }
        assert!(index.get(&Reference::Secret(NamespacedName::new("other", "smtp"))).is_empty());

        index.reindex(&references_of_app(&one), &references_of_app(&app("one", &spec("smtp-2"))));
        assert_eq!(index.get(&Reference::Secret(in_shop("smtp"))), both[1..]);
        assert_eq!(index.get(&Reference::Secret(in_shop("smtp-2"))), both[..1]);
        index.reindex(&references_of_app(&other), &BTreeSet::new());
        assert_eq!(index.get(&Reference::AppId("shop".parse().unwrap())), both[..1]);
    }

    #[test]
    fn an_app_without_spec_app_id_is_found_by_its_name() {
        let index = ReferenceIndex::default();
        index.reindex(&BTreeSet::new(), &references_of_app(&app("store", &json!({ "displayName": "Shop" }))));
        assert_eq!(index.get(&Reference::AppId("store".parse().unwrap())), [NamespacedName::new("shop", "store")]);
    }
}
