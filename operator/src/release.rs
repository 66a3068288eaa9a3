//! Frees the appIDs of deleted Apps that left no users. Under `deletionPolicy: Retain`, the key Secret of a deleted App
//! stays, and reserves the appID for the App's namespace. The operator asks the servers whether the App has users, by
//! publishing a document with the state `Released`. If the App has none, the servers mark the App's row in Postgres as
//! free, in the transaction that checks for users, and the operator deletes the key Secret.
//!
//! The App can be created again at any time during a release. The operator increases `handover` in the keys before it
//! asks the servers. So a server that still has the document of the release does not free the appID of an App that was
//! published later.

mod procedure;
mod state;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use futures::StreamExt;
use latchkey_crds::{names::rendered_app_secret, types::AppId};
use tokio::{
    sync::{Semaphore, mpsc},
    time::{Instant, MissedTickBehavior, interval_at, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

pub(crate) use self::state::Releases;
use self::{
    procedure::{ReleaseOutcome, release},
    state::Retry,
};
use crate::{
    context::Context,
    error::{ErrorChain, ErrorKind},
};

/// The maximum number of concurrent releases. Each of them waits for the servers, which look for documents with the
/// state `Released` every two seconds. Releases that only wait for running requests to end do not count.
const MAX_CONCURRENT: usize = 16;
/// How long the operator waits for running requests after the last server has stopped serving the App's document. A
/// request can run for at most 106 s: 30 s for the body, 6 s in the queue for passwords (twice 3 s), 30 s for three
/// calls to a provider, and 40 s for ten calls to a store. A terminating pod, which is not serving, ends within 55 s
/// (the grace period in the chart's defaults).
pub(crate) const REQUEST_DRAIN_SECONDS: u64 = 120;
/// The wait before the servers are asked again if they did not respond.
const UNANSWERED_RETRY: Duration = Duration::from_secs(10 * 60);
/// How often every reserved appID is checked. Users of an App that is not served disappear only if somebody edits the
/// database, so a rare check is enough.
const RECHECK_INTERVAL: Duration = Duration::from_secs(10 * 60 * 60);

/// Checks each queued appID, and every reserved appID at intervals, until asked to stop.
pub(crate) async fn run(context: Arc<Context>, mut queue: mpsc::UnboundedReceiver<AppId>, stop: &CancellationToken) {
    let mut recheck = interval_at(Instant::now() + RECHECK_INTERVAL, RECHECK_INTERVAL);
    recheck.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let recheck_all = async {
        loop {
            recheck.tick().await;
            context.reconcile_queue.enqueue_all_releases(&context.objects);
        }
    };
    let slots = Semaphore::new(MAX_CONCURRENT);
    // The number of tasks has no limit here. There is at most one release per appID, and a release that waits for
    // requests to end must not delay others.
    let check_queued = futures::stream::poll_fn(move |cx| queue.poll_recv(cx)).for_each_concurrent(None, |id| {
        let (context, slots) = (&context, &slots);
        async move { check_app_id(context, id, slots).await }
    });
    stop.run_until_cancelled(async { tokio::join!(recheck_all, check_queued) }).await;
}

async fn check_app_id(context: &Arc<Context>, id: AppId, slots: &Semaphore) {
    let Some(guard) = context.releases.try_begin(&id) else { return };
    let failure_key = format!("release {id}");
    let result = release(context, &id, &guard, slots).await;
    let progress = guard.end();
    if progress.asking {
        // `orphans.rs` skips the Secret of an appID during its release. The Secret may contain the document of an App
        // that was created and deleted again during the release, so it is checked now.
        context.reconcile_queue.enqueue_orphan(rendered_app_secret(&id));
    }
    if progress.requeued {
        context.reconcile_queue.enqueue_release(id.clone());
    }
    let (retry, wait) = match result {
        Ok(ReleaseOutcome::Done) => return context.failures.reset(&failure_key),
        Ok(ReleaseOutcome::StillPublished) => {
            (Retry::Soon, context.failures.retry_after(&failure_key, ErrorKind::Unavailable))
        }
        Ok(ReleaseOutcome::Unanswered) => (Retry::Late, UNANSWERED_RETRY),
        // This operator has no right to read the App's namespace, so it cannot find out whether the App exists.
        Err(error) if error.kind() == ErrorKind::Forbidden => return,
        Err(error) => {
            warn!(app = %id, error = %ErrorChain(&error), "an appID could not be released yet");
            (Retry::Soon, context.failures.retry_after(&failure_key, error.kind()))
        }
    };
    if !context.releases.try_schedule(&id, retry) {
        return;
    }
    let context = Arc::clone(context);
    tokio::spawn(async move {
        sleep(wait).await;
        context.releases.unschedule(&id, retry);
        context.reconcile_queue.enqueue_release(id);
    });
}
