//! Limits the rate of writes that are not caused by an edit of the App itself, so that these writes do not delay edits.

use std::time::Duration;

use kube::ResourceExt;
use latchkey_crds::app::{App, AppStatus};

use crate::context::Context;

/// Returns `Ok` if the operator can write for the App now. Otherwise returns the wait until the rate limiter allows it.
pub(crate) fn try_acquire(app: &App, old: &AppStatus, context: &Context) -> Result<(), Duration> {
    if has_unreported_edit(app, old) { Ok(()) } else { context.rate_limiter.try_acquire(&object_key(app)) }
}

/// Drops the App's reservation in the rate limiter. Called if there is nothing to write for the App.
pub(crate) fn cancel(app: &App, context: &Context) {
    context.rate_limiter.cancel(&object_key(app));
}

/// Whether the App was edited, and no status about the edit has been written yet. Somebody may be waiting for this
/// status.
fn has_unreported_edit(app: &App, old: &AppStatus) -> bool {
    app.metadata.generation.is_none() || old.observed_generation != app.metadata.generation
}

fn object_key(app: &App) -> String {
    format!("App {}/{}", app.namespace().unwrap_or_default(), app.name_any())
}
