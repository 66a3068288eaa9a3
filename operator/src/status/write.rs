//! Writes the status of an App, a Provider or a Client.

use kube::{
    Api, Resource, ResourceExt,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
    core::NamespaceResourceScope,
};
use latchkey_crds::names::FIELD_MANAGER;
use serde::Serialize;
use serde_json::json;

use crate::{context::Context, error::Error};

/// Writes the status of an App or a Provider, and stores it in the context until the watch reports the write.
pub(crate) async fn write_status<K, S>(context: &Context, object: &K, status: &S) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    S: Serialize,
{
    if let Some(version) = send_status(context, object, status).await? {
        let status = serde_json::to_value(status).unwrap_or_default();
        context.written_statuses.record(&object.uid().unwrap_or_default(), version, status);
    }
    Ok(())
}

/// Writes a status, only to the object with the uid that was reconciled: a new object of the same name must not get the
/// status of the old one. Returns the version of the object after the write, or `None` if the object does not exist any
/// more.
pub(crate) async fn send_status<K, S>(context: &Context, object: &K, status: &S) -> Result<Option<u64>, Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    S: Serialize,
{
    let resource = ApiResource::erase::<K>(&());
    let namespace = object.namespace().unwrap_or_default();
    // Uses a dynamic object, because an object that cannot be decoded needs a status, too.
    let api: Api<DynamicObject> = Api::namespaced_with(context.client.clone(), &namespace, &resource);
    let body = json!({
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": { "name": object.name_any(), "uid": object.uid() },
        "status": status,
    });
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    match api.patch_status(&object.name_any(), &parameters, &Patch::Apply(&body)).await {
        Ok(written) => {
            context.metrics.record_status_write();
            Ok(written.resource_version().and_then(|version| version.parse().ok()))
        }
        // The object has been deleted, and its status with it.
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(error) => Err(Error::api("write the status")(error)),
    }
}
