//! Rate limits that all servers share: a counter per window, and the client addresses that an account knows.

use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_crds::{rendered::Window, types::AppId};
use redis::{Pipeline, Value};
use tracing::warn;

use super::super::{RedisStore, metrics::Operation, script_command};
use crate::{
    domain::{
        client::ClientAddress,
        email::AccountKey,
        ports::{AcquireError, RateLimitPermit, RateLimits, StoreError},
        rate_limits::{RateLimitCheck, RateLimited},
    },
    store::Stores,
};

/// The number of buckets in a window. windows.lua and rate_marks.lua contain the same number.
const BUCKETS: i64 = 50;
/// How long an account knows a client address (specification: Limits, Rate limits).
const KNOWN_CLIENT_SECONDS: u32 = 30 * 24 * 60 * 60;

/// Hashes a subject for use in a key, so that keys contain no client address or account in clear text.
pub(super) fn hashed_subject(subject: &str) -> String {
    URL_SAFE_NO_PAD.encode(&digest(&SHA256, subject.as_bytes()).as_ref()[..18])
}

/// Windows, one per length. Of two with the same length, the stricter one counts.
pub(super) fn distinct_windows(windows: &[Window]) -> Vec<Window> {
    let mut windows = windows.to_vec();
    windows.sort_by_key(|window| (window.window_seconds, window.count));
    windows.dedup_by_key(|window| window.window_seconds);
    windows
}

/// The key of each window's counter, all in one slot.
fn counter_keys(app: &AppId, check: &RateLimitCheck, windows: &[Window]) -> Vec<String> {
    let subject = hashed_subject(&check.subject);
    let limit = check.limit.as_str();
    windows.iter().map(|window| format!("lk:{{{app}:{subject}}}:{limit}:{}", window.window_seconds)).collect()
}

/// The length of a bucket in milliseconds. Exact, since windows are whole seconds.
pub(super) fn bucket_millis(window: &Window) -> i64 {
    i64::from(window.window_seconds) * 1000 / BUCKETS
}

fn known_client_key(app: &AppId, account: &AccountKey, client: ClientAddress) -> String {
    format!("lk:{{{app}:{}}}:known", hashed_subject(&format!("{} {client}", account.as_str())))
}

/// The script's reply to one check.
enum CheckReply {
    /// When, by Redis's clock, in milliseconds.
    Counted(i64),
    Limited {
        window: usize,
        wait: Duration,
    },
}

// === impl RedisStore ===

impl RedisStore {
    fn parse_reply(&self, value: Value) -> Result<CheckReply, StoreError> {
        let (refused, number): (usize, i64) = redis::from_redis_value(value).map_err(|_| self.unexpected_value())?;
        Ok(match refused.checked_sub(1) {
            None => CheckReply::Counted(number),
            Some(window) => {
                CheckReply::Limited { window, wait: Duration::from_millis(u64::try_from(number).unwrap_or(0)) }
            }
        })
    }
}

impl RateLimits for Stores {
    async fn acquire(&self, app: &AppId, checks: Vec<RateLimitCheck>) -> Result<RateLimitPermit, AcquireError> {
        if checks.is_empty() {
            return Ok(RateLimitPermit::default());
        }
        let redis = &self.redis;
        let mut commands = Pipeline::new();
        for check in &checks {
            let windows = distinct_windows(&check.windows);
            let mut arguments = vec![redis.offset_millis()];
            for window in &windows {
                arguments.push(window.count.to_string());
                arguments.push(bucket_millis(window).to_string());
            }
            commands.add_command(script_command(
                &redis.scripts().acquire,
                &counter_keys(app, check, &windows),
                &arguments,
            ));
        }
        // Each check is atomic by itself. If one is limited, the uses that the others counted are cancelled.
        let values = redis.send(Operation::AcquireLimits, &commands).await?;
        let mut taken = RateLimitPermit::default();
        let mut limited: Option<RateLimited> = None;
        for (check, value) in checks.into_iter().zip(values) {
            match redis.parse_reply(value)? {
                CheckReply::Counted(at) => taken.0.push((check, at)),
                CheckReply::Limited { window, wait } => {
                    let window =
                        *distinct_windows(&check.windows).get(window).ok_or_else(|| redis.unexpected_value())?;
                    let retry_after = wait.max(Duration::from_secs(1));
                    if limited.is_none_or(|limited| limited.retry_after < retry_after) {
                        limited = Some(RateLimited { limit: check.limit, window, retry_after });
                    }
                }
            }
        }
        match limited {
            None => Ok(taken),
            Some(limited) => {
                self.release(app, taken).await;
                Err(limited.into())
            }
        }
    }

    async fn release(&self, app: &AppId, taken: RateLimitPermit) {
        if taken.0.is_empty() {
            return;
        }
        let mut commands = Pipeline::new();
        for (check, at) in &taken.0 {
            let windows = distinct_windows(&check.windows);
            let parts: Vec<String> = windows.iter().map(|window| (at / bucket_millis(window)).to_string()).collect();
            commands.add_command(script_command(
                &self.redis.scripts().release,
                &counter_keys(app, check, &windows),
                &parts,
            ));
        }
        if let Err(error) = self.redis.send(Operation::ReleaseLimits, &commands).await {
            warn!(%app, error = &error as &dyn std::error::Error, "a limit stays stricter for a while");
        }
    }

    async fn is_known_client(
        &self,
        app: &AppId,
        account: &AccountKey,
        client: ClientAddress,
    ) -> Result<bool, StoreError> {
        let mut commands = Pipeline::new();
        commands.cmd("EXISTS").arg(known_client_key(app, account, client));
        let values = self.redis.send(Operation::IsKnown, &commands).await?;
        match values.as_slice() {
            [Value::Int(count)] => Ok(*count > 0),
            _ => Err(self.redis.unexpected_value()),
        }
    }

    async fn remember_client(&self, app: &AppId, account: &AccountKey, client: ClientAddress) {
        let mut commands = Pipeline::new();
        commands.cmd("SET").arg(known_client_key(app, account, client)).arg(1).arg("EX").arg(KNOWN_CLIENT_SECONDS);
        if let Err(error) = self.redis.send(Operation::Remember, &commands).await {
            warn!(%app, error = &error as &dyn std::error::Error, "a client address is not stored as known");
        }
    }
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::LimitName;

    use super::*;

    #[test]
    fn keys_of_a_check_share_a_slot_and_hold_no_subject() {
        let app: AppId = "shop".parse().unwrap();
        let check = RateLimitCheck {
            limit: LimitName::MailsPerRecipient,
            subject: "192.0.2.1".to_owned(),
            windows: LimitName::MailsPerRecipient.default_windows(),
        };
        let keys = counter_keys(&app, &check, &distinct_windows(&check.windows));
        assert_eq!(keys.len(), 2);
        let slot = |key: &str| key[key.find('{').unwrap()..=key.find('}').unwrap()].to_owned();
        assert_eq!(slot(&keys[0]), slot(&keys[1]));
        assert!(keys.iter().all(|key| !key.contains("192.0.2.1")));
        assert!(keys[0].ends_with(":mailsPerRecipient:60"), "{}", keys[0]);
    }

    #[test]
    fn of_two_windows_of_one_length_the_stricter_counts() {
        let window = |count, window_seconds| Window { count, window_seconds };
        let check = RateLimitCheck {
            limit: LimitName::LoginsPerClient,
            subject: String::new(),
            windows: vec![window(9, 60), window(100, 3600), window(5, 60)],
        };
        assert_eq!(distinct_windows(&check.windows), [window(5, 60), window(100, 3600)]);
    }
}
