//! Kubernetes objects of any kind, as in manifests.

use anyhow::{Context, Result};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams},
};
use serde::Deserialize;
use serde_json::Value;

/// Field manager of the objects that tests apply.
const FIELD_MANAGER: &str = "tests";

/// Parses a YAML stream of objects.
pub(super) fn parse(stream: &str) -> Result<Vec<Value>> {
    let mut objects = Vec::new();
    for document in serde_yaml::Deserializer::from_str(stream) {
        let object = Value::deserialize(document).context("a manifest")?;
        if !object.is_null() {
            objects.push(object);
        }
    }
    Ok(objects)
}

/// Works like `kubectl apply --server-side --force-conflicts` with one object.
pub async fn apply(client: &Client, object: &Value) -> Result<DynamicObject> {
    let object: DynamicObject = serde_json::from_value(object.clone()).context("an object")?;
    let types = object.types.clone().context("an object has a kind")?;
    let kind = GroupVersionKind::try_from(&types)?;
    let name = object.metadata.name.clone().context("an object has a name")?;
    // `from_gvk` guesses the plural of the kind. The guess is right for all kinds that tests use.
    let resource = ApiResource::from_gvk(&kind);
    let api: Api<DynamicObject> = match &object.metadata.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    let params = PatchParams::apply(FIELD_MANAGER).force();
    let applied = api.patch(&name, &params, &Patch::Apply(&object)).await;
    applied.with_context(|| format!("applying {} {name}", types.kind))
}
