//! What the statuses of Apps and Providers have in common: messages, times, and the write.

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{
    Api, Resource, ResourceExt,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
    core::NamespaceResourceScope,
};
use latchkey_crds::{
    conditions::{ConditionStatus, ConditionType, DesiredCondition, Reason},
    names::FIELD_MANAGER,
};
use serde::Serialize;
use serde_json::json;
use time::OffsetDateTime;

use crate::{context::Context, error::Error, facts::FieldError};

/// The condition `ResolvedRefs` if references cannot be used: the reason of the first, the messages of all.
pub(crate) fn unresolved_condition(errors: &[FieldError]) -> DesiredCondition {
    let messages: Vec<_> = errors.iter().map(|error| with_field(&error.field, &error.message)).collect();
    let reason = errors.first().map_or(Reason::Resolved, |error| error.reason);
    DesiredCondition::new(ConditionType::ResolvedRefs, ConditionStatus::False, reason, messages.join("; "))
}

/// A message, preceded by its field.
pub(crate) fn with_field(field: &str, message: &str) -> String {
    if field.is_empty() { message.to_owned() } else { format!("{field}: {message}") }
}

/// The message for an object that the API server stores and this operator cannot decode.
pub(crate) fn undecodable_message(error: &str) -> String {
    format!("this operator cannot read the object: {error}; correct the field, or upgrade the operator")
}

/// Kubernetes stores times in whole seconds.
pub(crate) fn to_k8s_time(at: OffsetDateTime) -> Time {
    Time(Timestamp::from_second(at.unix_timestamp()).unwrap_or(Timestamp::UNIX_EPOCH))
}

/// Writes a status, only to the object with the uid that was reconciled: a new object of the same name must not get the
/// status of the old one.
pub(crate) async fn write_status<K, S>(context: &Context, object: &K, status: &S) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    S: Serialize,
{
    let resource = ApiResource::erase::<K>(&());
    let namespace = object.namespace().unwrap_or_default();
    // Dynamic, because an object that does not decode needs a status as well.
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
            context.written_statuses.record(
                &object.uid().unwrap_or_default(),
                written.resource_version(),
                body["status"].clone(),
            );
            context.metrics.record_status_write();
            Ok(())
        }
        // The object was deleted meanwhile, and its status with it.
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(Error::api("write the status")(error)),
    }
}
