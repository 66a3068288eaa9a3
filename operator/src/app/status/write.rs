//! Writes the status of an App if anything in it except times has changed, and records Events about the change.

use latchkey_crds::{
    app::{App, AppStatus},
    conditions::Reason,
    names::rendered_app_secret,
    rendered::Revision,
    types::AppId,
};

use crate::{
    app::{
        admission, events, rate_limit,
        requeue::RESYNC,
        status::{Outcome, Reconciled, is_same_except_times},
        validate::Rejection,
    },
    context::Context,
    controller::Action,
    error::Error,
    facts::FieldError,
    status::write::write_status,
};

/// Reports the outcome of a finished reconcile.
pub(crate) async fn write_outcome(
    app: &App,
    old: &AppStatus,
    reconciled: Reconciled,
    context: &Context,
) -> Result<Action, Error> {
    let Reconciled { outcome, requeue, published, differs_only_in_clients } = reconciled;
    if outcome.rejection.as_ref().is_none_or(|rejection| rejection.reason != Reason::QuotaExceeded) {
        admission::stop_waiting(app, context);
    }
    let new = new_status(app, old, &outcome, context);
    if is_same_except_times(old, &new) {
        rate_limit::cancel(app, context);
        return Ok(Action::requeue(requeue));
    }
    // A reconcile that has published a document has already waited for the rate limit.
    if !published && let Err(wait) = rate_limit::try_acquire(app, old, context) {
        return Ok(Action::requeue(wait));
    }
    write_status(context, app, &new).await?;
    events::record_status_change(context, app, old, &new, differs_only_in_clients).await;
    Ok(Action::requeue(requeue))
}

/// Reports that the App is not accepted. The revision that was published before is still served.
pub(crate) async fn write_rejection(
    app: &App,
    old: &AppStatus,
    rejection: Rejection,
    field_errors: Vec<FieldError>,
    context: &Context,
) -> Result<Action, Error> {
    let app_id = app.app_id().ok();
    let revision = app_id.as_ref().and_then(|app_id| published_revision(app, app_id, context));
    if let (Some(app_id), Some(revision)) = (&app_id, &revision) {
        context.monitor.expect_revision(app_id, revision);
    }
    let outcome = Outcome { app_id, revision, rejection: Some(rejection), field_errors, ..Outcome::default() };
    let reconciled = Reconciled { outcome, requeue: RESYNC, published: false, differs_only_in_clients: false };
    write_outcome(app, old, reconciled, context).await
}

/// Returns the published revision of the appID, if it belongs to this App.
fn published_revision(app: &App, app_id: &AppId, context: &Context) -> Option<Revision> {
    let published = context.objects.published.get(&rendered_app_secret(app_id))?;
    let is_ours = Some(&published.namespace) == app.metadata.namespace.as_ref()
        && Some(&published.name) == app.metadata.name.as_ref();
    if is_ours { published.revision } else { None }
}

fn new_status(app: &App, old: &AppStatus, outcome: &Outcome, context: &Context) -> AppStatus {
    let mut new = outcome.status(old, app.metadata.generation.unwrap_or(0), context.now());
    if outcome.rejection.is_some() && new.revision.is_some() {
        // The status still lists the keys and callbacks of the revision that is still served.
        new.issuer = new.issuer.or_else(|| old.issuer.clone());
        new.providers.clone_from(&old.providers);
        new.signing_keys.clone_from(&old.signing_keys);
        new.hmac_keys.clone_from(&old.hmac_keys);
    }
    new
}
