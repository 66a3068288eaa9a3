//! Deletes the users of an App with `deletionPolicy: Delete` before the App is removed. The servers delete the users
//! while the App's document has the state `Deleted`.

use std::time::Duration;

use kube::ResourceExt;
use latchkey_crds::{
    app::{App, AppStatus},
    names::rendered_app_secret,
    rendered::Revision,
    types::AppId,
};

use self::{
    prepare::{DeletionState, prepare_deletion},
    progress::{progress_message, stuck_message},
};
pub(crate) use crate::app::render::render_unserved;
use crate::{
    app::{
        admission, events, finalizer,
        keys::secret::{self as key_secret, AppIdOwner, Stored},
        publish::{self, DocumentOwner, is_published, publish},
        requeue::RETRY_SOON,
        status::{Outcome, is_same_except_times},
    },
    context::Context,
    controller::Action,
    error::Error,
    monitor::RolloutState,
    status::write::write_status,
};

mod prepare;
mod progress;

/// If all servers acknowledge the document within this time, the deletion continues in the same reconcile.
const ACKNOWLEDGEMENT_WAIT: Duration = Duration::from_secs(1);
/// The minimum time between two reports of the progress in the status. Also the time until the next reconcile.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Publishes the document with the state `Deleted`. After the servers have deleted the users, deletes the document, the
/// keys and the finalizer.
pub(crate) async fn delete_users(app: &App, context: &Context) -> Result<Action, Error> {
    admission::stop_waiting(app, context);
    let Ok(app_id) = app.app_id() else { return remove_finalizer(app, context).await };
    let owner = AppIdOwner::of_app(app);
    let (document, keys) = match prepare_deletion(&context.install_secrets(), &app_id, &owner).await? {
        DeletionState::Owned(document, keys) => (document, keys),
        DeletionState::NotOwned => return remove_finalizer(app, context).await,
        DeletionState::KeysChanged => return Ok(Action::requeue(RETRY_SOON)),
        DeletionState::KeysUnusable(why) => {
            return report_progress(app, &app_id, None, stuck_message(&why), context).await;
        }
    };
    let rendered = render_unserved(&document);
    let owner = DocumentOwner { app_id: &app_id, namespace: &owner.namespace, name: &owner.name };
    if !is_published(context, owner, &rendered) {
        context.releases.forget_deletion(&app_id);
        publish(context, owner, &rendered).await?;
        context.monitor.expect_revision(&app_id, &rendered.revision);
        context.monitor.wait_for_rollout(&app_id, ACKNOWLEDGEMENT_WAIT).await;
    }
    let rollout = context.monitor.expect_revision(&app_id, &rendered.revision);
    let deletion = context.monitor.deletion(&app_id);
    if matches!(rollout, RolloutState::Complete { .. }) && deletion.is_some_and(|deletion| deletion.done) {
        return finish(app, &app_id, &rendered.revision, keys.as_deref(), context).await;
    }
    context.releases.forget_deletion(&app_id);
    let progress = progress_message(&rollout, deletion.map(|deletion| deletion.users_left));
    report_progress(app, &app_id, Some(rendered.revision), progress, context).await
}

/// Deletes the document, the keys and the finalizer after the users were deleted. While requests to the App may still
/// be running, deletes nothing and requeues the App.
async fn finish(
    app: &App,
    app_id: &AppId,
    revision: &Revision,
    keys: Option<&Stored>,
    context: &Context,
) -> Result<Action, Error> {
    // Requests that began while the App was served may still be running. The database rejects their writes now, but
    // would accept the writes after another App has become the owner of the appID. So the appID becomes free only after
    // these requests have ended.
    if let Some(remaining) = context.releases.request_drain_left(app_id, revision, context.request_drain) {
        return Ok(Action::requeue(remaining));
    }
    // The key Secret is deleted after the document: while the key Secret exists, no other App can own the appID.
    let secret = rendered_app_secret(app_id);
    if let Some(published) = context.objects.published.get(&secret) {
        publish::delete_document(context, &secret, &published).await?;
    }
    context.monitor.forget(app_id);
    if let Some(keys) = keys
        && !key_secret::delete(&context.install_secrets(), keys).await?
    {
        return Ok(Action::requeue(RETRY_SOON));
    }
    context.releases.forget_deletion(app_id);
    finalizer::remove(&app.metadata, context).await?;
    events::record_users_deleted(context, app).await;
    Ok(Action::await_change())
}

/// Removes the finalizer of an App that owns no users, so that the API server can remove the App.
async fn remove_finalizer(app: &App, context: &Context) -> Result<Action, Error> {
    finalizer::remove(&app.metadata, context).await?;
    Ok(Action::await_change())
}

/// Reports the progress of a deletion in the status, at most once in [`PROGRESS_INTERVAL`], and requeues the App.
async fn report_progress(
    app: &App,
    app_id: &AppId,
    revision: Option<Revision>,
    progress: String,
    context: &Context,
) -> Result<Action, Error> {
    let old: AppStatus = context.written_statuses.latest(&app.metadata, app.status.clone());
    let outcome =
        Outcome { app_id: Some(app_id.clone()), revision, deletion_progress: Some(progress), ..Outcome::default() };
    let new = outcome.status(&old, app.metadata.generation.unwrap_or(0), context.now());
    if !is_same_except_times(&old, &new)
        && context.progress_throttle.try_report(&app.uid().unwrap_or_default(), PROGRESS_INTERVAL)
    {
        write_status(context, app, &new).await?;
    }
    Ok(Action::requeue(PROGRESS_INTERVAL))
}
