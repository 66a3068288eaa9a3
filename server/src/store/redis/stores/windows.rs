//! The windows of rate limits: the commands that change and check their counters in Redis.

use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_crds::rendered::Window;
use redis::{Cmd, Value};

use super::super::{handle::RedisStore, scripts::script_command};
use crate::domain::ports::StoreError;

/// The number of buckets in a window. lib/windows.lua and lib/rate_marks.lua contain the same number.
const BUCKETS: i64 = 50;

/// The reply of acquire.lua and check_limit.lua.
pub(super) enum AcquireReply {
    /// No window is full. acquire.lua counted the use at this time by Redis's clock, in milliseconds.
    Counted(i64),
    /// The window with this index is full.
    Limited { window: usize, retry_after: Duration },
}

/// Hashes the subject of a limit, for example a client address or an account, so that keys do not contain it in clear
/// text.
pub(super) fn hashed_subject(subject: &str) -> String {
    URL_SAFE_NO_PAD.encode(&digest(&SHA256, subject.as_bytes()).as_ref()[..18])
}

/// Returns the windows without duplicate lengths. Of two windows with the same length, only the stricter window stays.
pub(super) fn distinct_windows(windows: &[Window]) -> Vec<Window> {
    let mut windows = windows.to_vec();
    windows.sort_by_key(|window| (window.window_seconds, window.count));
    windows.dedup_by_key(|window| window.window_seconds);
    windows
}

/// Returns the windows as scripts expect them: for each window, its maximum count and the length of a bucket in
/// milliseconds.
pub(super) fn window_arguments(windows: &[Window]) -> impl Iterator<Item = String> {
    windows.iter().flat_map(|window| [window.count.to_string(), bucket_millis(window).to_string()])
}

/// Returns the length of a bucket in milliseconds. The result is exact, because windows are whole seconds.
fn bucket_millis(window: &Window) -> i64 {
    i64::from(window.window_seconds) * 1000 / BUCKETS
}

// === impl RedisStore ===

impl RedisStore {
    /// Returns a command that counts one use in each window, or in none if a window is full. `counters` contains the
    /// key of each window's counter.
    pub(super) fn acquire_command(&self, counters: &[String], windows: &[Window]) -> Cmd {
        script_command(&self.scripts().acquire, counters, &self.acquire_arguments(windows))
    }

    /// Returns a command that checks whether one use fits in each window.
    pub(super) fn check_limit_command(&self, counters: &[String], windows: &[Window]) -> Cmd {
        script_command(&self.scripts().check_limit, counters, &self.acquire_arguments(windows))
    }

    fn acquire_arguments(&self, windows: &[Window]) -> Vec<String> {
        [self.offset_millis()].into_iter().chain(window_arguments(windows)).collect()
    }

    pub(super) fn parse_acquire(&self, value: Value) -> Result<AcquireReply, StoreError> {
        let (limited, millis): (usize, i64) = self.parse(value)?;
        Ok(match limited.checked_sub(1) {
            None => AcquireReply::Counted(millis),
            Some(window) => {
                let wait = Duration::from_millis(u64::try_from(millis).unwrap_or(0));
                AcquireReply::Limited { window, retry_after: wait.max(Duration::from_secs(1)) }
            }
        })
    }

    /// Returns a command that subtracts one use from each window. `counted_at` is the time of `AcquireReply::Counted`.
    pub(super) fn release_command(&self, counters: &[String], windows: &[Window], counted_at: i64) -> Cmd {
        let buckets: Vec<String> =
            windows.iter().map(|window| (counted_at / bucket_millis(window)).to_string()).collect();
        script_command(&self.scripts().release, counters, &buckets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stricter_of_two_windows_with_the_same_length_applies() {
        let window = |count, window_seconds| Window { count, window_seconds };
        let windows = [window(9, 60), window(100, 3600), window(5, 60)];
        assert_eq!(distinct_windows(&windows), [window(5, 60), window(100, 3600)]);
    }
}
