//! Stores each written status until the watch reports the write. Until then, the store of watched objects has an older
//! copy of the object.

use std::{collections::HashMap, time::Duration};

use kube::core::ObjectMeta;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

/// How long a written status is stored. This is longer than the time for which an interruption of a watch can stay
/// unnoticed.
const WRITTEN_STATUS_TTL: Duration = Duration::from_secs(60);

/// The written statuses that the watch has not reported yet, by the uid of the object.
#[derive(Default)]
pub(crate) struct WrittenStatuses(Mutex<HashMap<String, WrittenStatus>>);

struct WrittenStatus {
    /// The resourceVersion of the object after the write.
    version: u64,
    status: serde_json::Value,
    at: Instant,
}

// === impl WrittenStatuses ===

impl WrittenStatuses {
    /// Returns the latest status: the status that the watch reported, unless the operator has written a newer one.
    pub(crate) fn latest<S: DeserializeOwned + Default>(&self, meta: &ObjectMeta, watched: Option<S>) -> S {
        let mut written = self.0.lock();
        let uid = meta.uid.as_deref().unwrap_or_default();
        let version: u64 = meta.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0);
        match written.get(uid) {
            Some(newer) if newer.version > version => serde_json::from_value(newer.status.clone()).unwrap_or_default(),
            Some(_) => {
                written.remove(uid);
                watched.unwrap_or_default()
            }
            None => watched.unwrap_or_default(),
        }
    }

    pub(crate) fn record(&self, uid: &str, version: u64, status: serde_json::Value) {
        let mut written = self.0.lock();
        let at = Instant::now();
        written.retain(|_, written| at - written.at < WRITTEN_STATUS_TTL);
        written.insert(uid.to_owned(), WrittenStatus { version, status, at });
    }
}

#[cfg(test)]
mod tests {
    use latchkey_crds::app::AppStatus;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_written_status_is_used_until_the_watch_reports_it() {
        let written = WrittenStatuses::default();
        let meta = |version: &str| ObjectMeta {
            uid: Some("u".into()),
            resource_version: Some(version.into()),
            ..Default::default()
        };
        let status = |generation| AppStatus { observed_generation: Some(generation), ..AppStatus::default() };
        written.record("u", 7, serde_json::to_value(status(2)).unwrap());
        let latest = |version| written.latest(&meta(version), Some(status(1))).observed_generation;
        assert_eq!(latest("6"), Some(2), "the copy is older");
        assert_eq!(latest("7"), Some(1), "the watch has reported it, or something newer");
        assert_eq!(latest("6"), Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn written_statuses_are_not_remembered_forever() {
        let written = WrittenStatuses::default();
        for uid in ["a", "b"] {
            written.record(uid, 7, json!({}));
            tokio::time::advance(WRITTEN_STATUS_TTL).await;
        }
        written.record("c", 7, json!({}));
        assert_eq!(written.0.lock().len(), 1);
    }
}
