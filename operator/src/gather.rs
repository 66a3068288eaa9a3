//! Looks up in the cluster what an App, a Provider or a Client references, before validation. Secrets are read from the
//! API server for each reconcile, and not cached.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, ResourceExt, runtime::reflector::ObjectRef};
use latchkey_crds::{app::App, client::Client, provider::Provider, types::is_subdomain};

use crate::{
    context::Context,
    error::Error,
    facts::{ConfigMapValues, Lookup, ObjectSource, SecretBytes, SecretValues},
};

/// The objects that one App, Provider or Client references. All of them are in its namespace.
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

/// Looks up the Secrets and the ConfigMap that a Client references. Keeps only the values of the keys that the Client
/// names.
pub(crate) async fn for_client(context: &Context, client: &Client) -> Result<GatheredObjects, Error> {
    let namespace = client.namespace().unwrap_or_default();
    let mut gathered = GatheredObjects::default();
    let mut keys_by_secret: BTreeMap<&String, BTreeSet<&String>> = BTreeMap::new();
    for reference in client.spec.secret_refs() {
        keys_by_secret.entry(&reference.name).or_default().insert(&reference.key);
    }
    for (name, keys) in keys_by_secret {
        let mut found = look_up_secret(context, &namespace, name).await?;
        if let Lookup::Found(values) = &mut found {
            values.retain(|key, _| keys.contains(key));
        }
        gathered.secrets.insert(name.clone(), found);
    }
    if let Some(reference) = client.spec.jwks_ref() {
        let mut found = look_up_config_map(context, &namespace, &reference.name).await?;
        if let Lookup::Found(values) = &mut found {
            values.text.retain(|key, _| *key == reference.key);
            values.binary.retain(|key, _| *key == reference.key);
        }
        gathered.config_maps.insert(reference.name.clone(), found);
    }
    Ok(gathered)
}

/// Looks up a Secret. Sends no request for a name that no Secret can have: such a request could have another path, or
/// could fail as if the API server were unavailable.
async fn look_up_secret(context: &Context, namespace: &str, name: &str) -> Result<Lookup<SecretValues>, Error> {
    if !is_subdomain(name) {
        return Ok(Lookup::Missing);
    }
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

/// Looks up a ConfigMap, like [`look_up_secret`].
async fn look_up_config_map(context: &Context, namespace: &str, name: &str) -> Result<Lookup<ConfigMapValues>, Error> {
    if !is_subdomain(name) {
        return Ok(Lookup::Missing);
    }
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

#[cfg(test)]
mod tests {
    use http::{Method, StatusCode};
    use serde_json::json;

    use super::*;
    use crate::{
        app::mock_api::{MockApi, context},
        client::fixtures,
    };

    #[tokio::test]
    async fn only_the_keys_that_a_client_names_are_kept() {
        const SECRET: &str = "/api/v1/namespaces/monitoring/secrets/own";
        const CONFIG_MAP: &str = "/api/v1/namespaces/monitoring/configmaps/keys";
        let secret = json!({ "metadata": { "name": "own" }, "data": { "now": "YQ==", "old": "Yg==", "more": "Yw==" } });
        let config_map = json!({
            "metadata": { "name": "keys" }, "data": { "jwks": "{}", "more": "x" }, "binaryData": { "other": "YQ==" },
        });
        let script = MockApi::default().expect(Method::GET, SECRET, move |_| (StatusCode::OK, secret)).expect(
            Method::GET,
            CONFIG_MAP,
            move |_| (StatusCode::OK, config_map),
        );
        let context = context(script.client()).0;
        let fields = fixtures::web(json!({
            "secretRef": { "name": "own", "key": "now" }, "previousSecretRef": { "name": "own", "key": "old" },
            "jwksRef": { "name": "keys", "key": "jwks" },
        }));
        let client = fixtures::client_with("monitoring", "grafana", fields);
        let gathered = for_client(&context, &client).await.unwrap();
        let Lookup::Found(values) = gathered.secret("monitoring", "own") else { panic!("the Secret exists") };
        assert_eq!(values.keys().collect::<Vec<_>>(), ["now", "old"]);
        let text = BTreeMap::from([("jwks".to_owned(), "{}".to_owned())]);
        let kept = ConfigMapValues { text, binary: BTreeMap::new() };
        assert_eq!(gathered.config_map("monitoring", "keys"), Lookup::Found(kept));
        script.finish();
    }

    #[tokio::test]
    async fn a_name_that_no_object_can_have_causes_no_request() {
        let script = MockApi::default();
        let context = context(script.client()).0;
        for name in ["a b", "../a", "a/b", "a?watch=1", "", "A"] {
            let app = fixtures::app(json!({
                "mail": { "smtpSecretRef": { "name": name }, "templatesRef": { "name": name } },
            }));
            let gathered = for_app(&context, &app).await.unwrap();
            assert_eq!(gathered.secret("identity", name), Lookup::Missing);
            assert_eq!(gathered.config_map("identity", name), Lookup::Missing);
            let client = fixtures::web(json!({ "secretRef": { "name": name, "key": "k" } }));
            let client = fixtures::client_with("monitoring", "grafana", client);
            assert_eq!(for_client(&context, &client).await.unwrap().secret("monitoring", name), Lookup::Missing);
        }
        assert!(script.finish().is_empty());
    }
}
