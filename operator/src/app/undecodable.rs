//! An App that the API server stores but this operator cannot decode. The servers continue to serve the last published
//! document of the App, without the Clients that no longer exist.

use kube::{core::DeserializeGuard, runtime::controller::Action};
use latchkey_crds::{
    app::{App, AppStatus},
    conditions::Reason,
};

use crate::{
    app::{
        admission, finalizer,
        requeue::RESYNC,
        status::{Outcome, is_same_except_times},
        validate::Rejection,
    },
    client::prune::remove_deleted_clients,
    context::Context,
    error::Error,
    status::write::write_status,
    undecodable,
    watch::NamespacedName,
};

/// Reports the error in the conditions, and keeps the other fields of the status. If the App is being deleted and its
/// policy is not `Delete`, only removes the finalizer.
pub(crate) async fn reconcile(
    guarded: &DeserializeGuard<App>,
    error: &str,
    context: &Context,
) -> Result<Action, Error> {
    admission::stop_waiting(guarded, context);
    let Some(object) = undecodable::read::<App>(context, guarded).await? else {
        return Ok(Action::await_change());
    };
    if finalizer::is_removable(&object) {
        finalizer::remove(&object.metadata, context).await?;
        return Ok(Action::await_change());
    }
    let wait = remove_deleted_clients(&NamespacedName::from_metadata(&object.metadata), context).await?;
    let old: AppStatus =
        object.data.get("status").and_then(|status| serde_json::from_value(status.clone()).ok()).unwrap_or_default();
    let rejection = Rejection::new(Reason::InvalidSpec, "", undecodable::message::<App>(&object, error));
    let outcome = Outcome { rejection: Some(rejection), ..Outcome::default() };
    let reported = outcome.status(&old, object.metadata.generation.unwrap_or(0), context.now());
    let new =
        AppStatus { conditions: reported.conditions, observed_generation: reported.observed_generation, ..old.clone() };
    if !is_same_except_times(&old, &new) {
        write_status(context, guarded, &new).await?;
    }
    Ok(Action::requeue(wait.unwrap_or(RESYNC)))
}
