//! Finds who names something, without a look at everybody: with thousands of Apps each change would be one.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use kube::{Resource, ResourceExt, core::ObjectMeta, runtime::reflector::ObjectRef};
use latchkey_crds::{app::App, provider::Provider, types::AppId};

use super::Guarded;

/// A namespace and a name in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    namespace: String,
    name: String,
}

/// What an App names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Named {
    AppId(AppId),
    Namespace(String),
    Provider(Place),
    Secret(Place),
    ConfigMap(Place),
}

/// Who (`V`) names what (`K`).
pub(crate) struct Index<K, V>(Mutex<BTreeSet<(K, V)>>);

// === impl Place ===

impl Place {
    pub(crate) fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    fn of(meta: &ObjectMeta) -> Self {
        let text = |field: &Option<String>| field.clone().unwrap_or_default();
        Self { namespace: text(&meta.namespace), name: text(&meta.name) }
    }

    pub(crate) fn object<K: Resource<DynamicType = ()>>(&self) -> ObjectRef<K> {
        ObjectRef::new(&self.name).within(&self.namespace)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

/// Of one that does not decode nothing is known.
pub(super) fn named_by_app(app: &Guarded<App>) -> BTreeSet<(Named, Place)> {
    let Ok(app) = &app.0 else { return BTreeSet::new() };
    let namespace = app.namespace().unwrap_or_default();
    let at = |name: &str| Place::new(&namespace, name);
    let mail = &app.spec.mail;
    let named = (app.app_id().ok().map(Named::AppId).into_iter())
        .chain([Named::Namespace(namespace.clone())])
        .chain(app.spec.provider_refs.iter().map(|reference| Named::Provider(at(&reference.name))))
        .chain(mail.smtp_secret_ref.iter().map(|reference| Named::Secret(at(&reference.name))))
        .chain(mail.templates_ref.iter().map(|reference| Named::ConfigMap(at(&reference.name))));
    let place = Place::of(&app.metadata);
    named.map(|named| (named, place.clone())).collect()
}

/// The Secret that a Provider names.
pub(super) fn named_by_provider(provider: &Guarded<Provider>) -> BTreeSet<(Place, Place)> {
    let Ok(provider) = &provider.0 else { return BTreeSet::new() };
    let place = Place::of(&provider.metadata);
    let secret = Place::new(&place.namespace, &provider.spec.client.secret_ref().name);
    BTreeSet::from([(secret, place)])
}

// === impl Index ===

impl<K, V> Default for Index<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Ord + Clone, V: Ord + Clone + Default> Index<K, V> {
    /// What was named before, and what is named now.
    pub(crate) fn turn(&self, before: &BTreeSet<(K, V)>, now: &BTreeSet<(K, V)>) {
        if before == now {
            return;
        }
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for pair in before.difference(now) {
            all.remove(pair);
        }
        all.extend(now.difference(before).cloned());
    }

    /// How many name it.
    pub(crate) fn count(&self, named: &K) -> usize {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.range((named.clone(), V::default())..).take_while(|(what, _)| what == named).count()
    }

    /// Who names it, in order.
    pub(crate) fn of(&self, named: &K) -> Vec<V> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The default of a name is the empty one, and the first.
        let from = all.range((named.clone(), V::default())..);
        from.take_while(|(what, _)| what == named).map(|(_, who)| who.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn app(name: &str, spec: &serde_json::Value) -> Guarded<App> {
        let app = json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "App",
            "metadata": { "namespace": "shop", "name": name }, "spec": spec,
        });
        serde_json::from_value(app).unwrap()
    }

    #[test]
    fn who_names_something_is_found_until_it_does_not_any_more() {
        let index = Index::default();
        let spec = |secret: &str| {
            json!({
                "displayName": "Shop", "appID": "shop", "providerRefs": [{ "name": "github" }],
                "mail": { "from": "a@example.com", "smtpSecretRef": { "name": secret }, "templatesRef": { "name": "mail" } },
            })
        };
        let (one, other) = (app("one", &spec("smtp")), app("other", &spec("smtp")));
        for app in [&other, &one] {
            index.turn(&BTreeSet::new(), &named_by_app(app));
        }
        let both = [Place::new("shop", "one"), Place::new("shop", "other")];
        let at = |name: &str| Place::new("shop", name);
        assert_eq!(index.of(&Named::AppId("shop".parse().unwrap())), both);
        assert_eq!(index.of(&Named::Provider(at("github"))), both);
        assert_eq!(index.of(&Named::ConfigMap(at("mail"))), both);
        assert_eq!(index.of(&Named::Secret(at("smtp"))), both);
        assert!(index.of(&Named::Secret(Place::new("other", "smtp"))).is_empty());

        index.turn(&named_by_app(&one), &named_by_app(&app("one", &spec("smtp-2"))));
        assert_eq!(index.of(&Named::Secret(at("smtp"))), both[1..]);
        assert_eq!(index.of(&Named::Secret(at("smtp-2"))), both[..1]);
        index.turn(&named_by_app(&other), &BTreeSet::new());
        assert_eq!(index.of(&Named::AppId("shop".parse().unwrap())), both[..1]);
    }

    #[test]
    fn an_app_without_an_app_id_is_found_by_its_name() {
        let index = Index::default();
        index.turn(&BTreeSet::new(), &named_by_app(&app("store", &json!({ "displayName": "Shop" }))));
        assert_eq!(index.of(&Named::AppId("store".parse().unwrap())), [Place::new("shop", "store")]);
    }
}
