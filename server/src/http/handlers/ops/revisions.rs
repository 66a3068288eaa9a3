//! The stream of revisions that this process serves, one JSON object per line.

use std::{collections::VecDeque, convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::stream;
use http::{
    HeaderValue,
    header::{CACHE_CONTROL, CONTENT_TYPE},
};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use latchkey_crds::rendered::{ProviderReport, RevisionChange, RevisionsMessage};
use tokio::{
    sync::broadcast,
    time::{Instant, Interval, MissedTickBehavior, interval_at},
};
use tokio_util::sync::CancellationToken;

use crate::{config::Apps, http::response::Response, providers::ProviderReports};

/// The time between two heartbeats. Heartbeats let an operator distinguish a stream without changes from a broken
/// stream (specification: Delivery of configuration, Revisions and acknowledgement).
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);

/// The state of a revision stream between two lines.
struct RevisionStream {
    apps: Arc<Apps>,
    pod_uid: String,
    /// Lines to send before anything else.
    pending: VecDeque<RevisionsMessage>,
    changes: broadcast::Receiver<RevisionChange>,
    reports: Arc<ProviderReports>,
    provider_updates: broadcast::Receiver<ProviderReport>,
    heartbeat: Interval,
    heartbeat_count: u64,
    closing: CancellationToken,
}

/// A response with the stream of revisions as its body. The stream ends when `closing` is cancelled.
pub(super) fn stream_response(
    apps: Arc<Apps>,
    reports: Arc<ProviderReports>,
    pod_uid: String,
    closing: CancellationToken,
) -> Response {
    let revisions = RevisionStream::start(apps, reports, pod_uid, closing);
    let lines = stream::unfold(revisions, |mut revisions| async move {
        let line = revisions.next_line().await?;
        let mut bytes = serde_json::to_vec(&line).ok()?;
        bytes.push(b'\n');
        Some((Ok::<_, Infallible>(Frame::data(Bytes::from(bytes))), revisions))
    });
    let mut response = http::Response::new(StreamBody::new(lines).boxed_unsync());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

// === impl RevisionStream ===

impl RevisionStream {
    /// Starts a stream. The first line is the hello message with all revisions, and the next lines are the known states
    /// of the providers.
    fn start(apps: Arc<Apps>, reports: Arc<ProviderReports>, pod_uid: String, closing: CancellationToken) -> Self {
        let (hello, changes) = apps.subscribe(pod_uid.clone());
        let (known_reports, provider_updates) = reports.subscribe();
        let mut heartbeat = interval_at(Instant::now() + HEARTBEAT_INTERVAL, HEARTBEAT_INTERVAL);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pending = VecDeque::from([RevisionsMessage::Hello { hello }]);
        pending.extend(known_reports.into_iter().map(|provider| RevisionsMessage::Provider { provider }));
        Self { apps, pod_uid, pending, changes, reports, provider_updates, heartbeat, heartbeat_count: 0, closing }
    }

    async fn next_line(&mut self) -> Option<RevisionsMessage> {
        loop {
            if let Some(line) = self.pending.pop_front() {
                return Some(line);
            }
            tokio::select! {
                biased;
                () = self.closing.cancelled() => return None,
                change = self.changes.recv() => match change {
                    Ok(change) => return Some(RevisionsMessage::Change(change)),
                    // This stream was too slow to receive every change: send all revisions again, then the later
                    // changes.
                    Err(broadcast::error::RecvError::Lagged(_)) => {
                        let (hello, changes) = self.apps.subscribe(self.pod_uid.clone());
                        self.changes = changes;
                        return Some(RevisionsMessage::Hello { hello });
                    }
                    Err(broadcast::error::RecvError::Closed) => return None,
                },
                update = self.provider_updates.recv() => match update {
                    Ok(provider) => return Some(RevisionsMessage::Provider { provider }),
                    Err(broadcast::error::RecvError::Lagged(_)) => {
                        let (known_reports, provider_updates) = self.reports.subscribe();
                        self.provider_updates = provider_updates;
                        self.pending
                            .extend(known_reports.into_iter().map(|provider| RevisionsMessage::Provider { provider }));
                    }
                    Err(broadcast::error::RecvError::Closed) => return None,
                },
                _ = self.heartbeat.tick() => {
                    self.heartbeat_count += 1;
                    return Some(RevisionsMessage::Heartbeat { heartbeat: self.heartbeat_count });
                }
            }
        }
    }
}
