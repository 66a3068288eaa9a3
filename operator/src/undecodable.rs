//! Handles objects that the API server stores but this operator cannot decode.

use kube::{
    Api, Resource,
    api::{ApiResource, DynamicObject, ListParams},
    core::NamespaceResourceScope,
};
use serde::de::DeserializeOwned;

use crate::{context::Context, error::Error, status::with_field};

/// Reads an App, Provider or Client without decoding its spec. Returns `None` if it no longer exists.
pub(crate) async fn read<K>(context: &Context, guarded: &impl Resource) -> Result<Option<DynamicObject>, Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    let meta = guarded.meta();
    let (namespace, name) = (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default());
    let api: Api<DynamicObject> =
        Api::namespaced_with(context.client.clone(), &namespace, &ApiResource::erase::<K>(&()));
    // The operator has the right to list Providers, but not to get one.
    let params = ListParams::default().fields(&format!("metadata.name={name}"));
    let objects = api.list(&params).await.map_err(Error::api("list an object that it cannot decode"))?;
    Ok(objects.items.into_iter().next())
}

/// Returns the message for the status, which names the field that cannot be decoded. `error` is the error from the
/// watch, which names no field. The message contains `error` only if the object can be decoded now, because somebody
/// has corrected the object.
pub(crate) fn message<K: DeserializeOwned>(object: &DynamicObject, error: &str) -> String {
    let decoded = serde_json::to_value(object).map(serde_path_to_error::deserialize::<_, K>);
    let error = match decoded {
        Ok(Err(error)) => with_field(&error.path().to_string(), &error.inner().to_string()),
        Ok(Ok(_)) | Err(_) => error.to_owned(),
    };
    format!("this operator cannot read the object: {error}; correct the field, or upgrade the operator")
}
