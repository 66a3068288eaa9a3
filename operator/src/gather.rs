//! Looks up in the cluster what an App or a Provider references, before validation. Secrets are read from the API
//! server for each reconcile, and not cached.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, ResourceExt, runtime::reflector::ObjectRef};
use latchkey_crds::{app::App, provider::Provider};

use crate::{
    context::Context,
    error::Error,
    facts::{ConfigMapValues, Lookup, ObjectSource, SecretBytes, SecretValues},
};

/// The objects that one App or Provider references. All of them are in its namespace.
#[derive(Default)]
pub(crate) struct GatheredObjects {
    providers: BTreeMap<String, Lookup<Provider>>,
    secrets: BTreeMap<String, Lookup<SecretValues>>,
    config_maps: BTreeMap<String, Lookup<ConfigMapValues>>,
}

/// Looks up what an App references, and what its Providers reference.
pub(crate) async fn for_app(context: &Context, app: &App) -> Result<GatheredObjects, Error> {
    let namespace = app.namespace().unwrap_or_default();
    let mut gathered = GatheredObjects::default();
    let mut secrets = BTreeSet::new();
    for reference in &app.spec.provider_refs {
        let stored = context.objects.providers.get(&ObjectRef::new(&reference.name).within(&namespace));
        let found = match stored.as_deref().map(|provider| &provider.0) {
            None => Lookup::Missing,
            Some(Err(_)) => Lookup::Invalid,
            Some(Ok(provider)) => {
                secrets.insert(provider.spec.client.secret_ref().name.clone());
                Lookup::Found(provider.clone())
            }
        };
        gathered.providers.insert(reference.name.clone(), found);
    }
    secrets.extend(app.spec.secret_refs().map(|reference| reference.name.clone()));
    for name in secrets {
        let found = look_up_secret(context, &namespace, &name).await?;
        gathered.secrets.insert(name, found);
    }
    for name in app.spec.config_maps().collect::<BTreeSet<_>>() {
        let found = look_up_config_map(context, &namespace, name).await?;
        gathered.config_maps.insert(name.to_owned(), found);
    }
    Ok(gathered)
}

/// Looks up the Secret that a Provider references.
pub(crate) async fn for_provider(context: &Context, provider: &Provider) -> Result<GatheredObjects, Error> {
    let namespace = provider.namespace().unwrap_or_default();
    let name = provider.spec.client.secret_ref().name.clone();
    let found = look_up_secret(context, &namespace, &name).await?;
    Ok(GatheredObjects { secrets: BTreeMap::from([(name, found)]), ..GatheredObjects::default() })
}

async fn look_up_secret(context: &Context, namespace: &str, name: &str) -> Result<Lookup<SecretValues>, Error> {
    let api: Api<Secret> = Api::namespaced(context.client.clone(), namespace);
    let found = api.get_opt(name).await.map_err(Error::api("read a Secret"))?;
    Ok(match found {
        None => Lookup::Missing,
        Some(secret) => {
            let values = secret.data.unwrap_or_default();
            Lookup::Found(values.into_iter().map(|(key, value)| (key, SecretBytes(value.0))).collect())
        }
    })
}

async fn look_up_config_map(context: &Context, namespace: &str, name: &str) -> Result<Lookup<ConfigMapValues>, Error> {
    let api: Api<ConfigMap> = Api::namespaced(context.client.clone(), namespace);
    let found = api.get_opt(name).await.map_err(Error::api("read a ConfigMap"))?;
    Ok(match found {
        None => Lookup::Missing,
        Some(map) => Lookup::Found(ConfigMapValues {
            text: map.data.unwrap_or_default(),
            binary: map.binary_data.unwrap_or_default().into_iter().map(|(key, value)| (key, value.0)).collect(),
        }),
    })
}

// === impl GatheredObjects ===

impl ObjectSource for GatheredObjects {
    fn provider(&self, _: &str, name: &str) -> Lookup<Provider> {
        self.providers.get(name).cloned().unwrap_or(Lookup::Missing)
    }

    fn secret(&self, _: &str, name: &str) -> Lookup<SecretValues> {
        self.secrets.get(name).cloned().unwrap_or(Lookup::Missing)
    }

    fn config_map(&self, _: &str, name: &str) -> Lookup<ConfigMapValues> {
        self.config_maps.get(name).cloned().unwrap_or(Lookup::Missing)
    }
}
