//! An App that the API server stores but this operator cannot decode. The servers continue to serve the last published
//! document of the App.

use kube::{
    Api, Resource,
    api::{ApiResource, DynamicObject},
    runtime::controller::Action,
};
use latchkey_crds::{
    app::{App, AppStatus},
    conditions::Reason,
};

use crate::{
    app::{
        admission, finalizer,
        requeue::RESYNC,
        status::{Outcome, is_same_but_for_times},
        validate::Rejection,
    },
    context::Context,
    error::Error,
    status::{undecodable_message, write::write_status},
    watch::Guarded,
};

/// Reports the error in the conditions, and keeps the other fields of the status. If the App is being deleted and its
/// policy is not `Delete`, only removes the finalizer.
pub(crate) async fn reconcile(guarded: &Guarded<App>, error: &str, context: &Context) -> Result<Action, Error> {
    let meta = guarded.meta();
    let namespace = meta.namespace.clone().unwrap_or_default();
    let name = meta.name.clone().unwrap_or_default();
    admission::stop_waiting(guarded, context);
    let resource = ApiResource::erase::<App>(&());
    let api: Api<DynamicObject> = Api::namespaced_with(context.client.clone(), &namespace, &resource);
    let Some(object) = api.get_opt(&name).await.map_err(Error::api("read an App"))? else {
        return Ok(Action::await_change());
    };
    if finalizer::is_removable(&object) {
        finalizer::remove(&object.metadata, context).await?;
        return Ok(Action::await_change());
    }
    let old: AppStatus =
        object.data.get("status").and_then(|status| serde_json::from_value(status.clone()).ok()).unwrap_or_default();
    let rejection = Rejection::new(Reason::InvalidSpec, "", undecodable_message(error));
    let outcome = Outcome { rejection: Some(rejection), ..Outcome::default() };
    let reported = outcome.status(&old, object.metadata.generation.unwrap_or(0), context.now());
    let new =
        AppStatus { conditions: reported.conditions, observed_generation: reported.observed_generation, ..old.clone() };
    if !is_same_but_for_times(&old, &new) {
        write_status(context, guarded, &new).await?;
    }
    Ok(Action::requeue(RESYNC))
}
