//! Writes that an edit of the App itself did not cause wait for their turn, so that they do not delay edits.

use std::time::Duration;

use kube::ResourceExt;
use latchkey_crds::app::{App, AppStatus};

use crate::context::Context;

/// Returns `Ok` if the App can be written now, and otherwise the wait until its turn.
pub(crate) fn try_acquire(app: &App, old: &AppStatus, context: &Context) -> Result<(), Duration> {
    if has_unreported_edit(app, old) { Ok(()) } else { context.rate_limiter.try_acquire(&object_key(app)) }
}

/// Drops the App's reserved turn, because there is nothing to write.
pub(crate) fn cancel(app: &App, context: &Context) {
    context.rate_limiter.cancel(&object_key(app));
}

/// Whether the App has an edit that no status reports yet, so somebody waits for this reconcile.
fn has_unreported_edit(app: &App, old: &AppStatus) -> bool {
    app.metadata.generation.is_none() || old.observed_generation != app.metadata.generation
}

fn object_key(app: &App) -> String {
    format!("App {}/{}", app.namespace().unwrap_or_default(), app.name_any())
}
