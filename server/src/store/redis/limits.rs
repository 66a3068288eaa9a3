//! Limits that all servers count together: a counter for each window, and the client addresses that an account knows.

use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_crds::{rendered::Window, types::AppId};
use redis::{Pipeline, Value};
use tracing::warn;

use super::{Redis, call, metrics::Operation};
use crate::{
    domain::{
        client::ClientAddress,
        email::AccountKey,
        limits::{Check, Limited},
        ports::{Limits, StoreError, TakeError, Taken},
    },
    store::Stores,
};

/// Into how many parts a window is cut; windows.lua and marks.lua have the same number.
const PARTS: i64 = 50;
/// How long an account knows a client address (contract, 7).
const KNOWN_SECONDS: u32 = 30 * 24 * 60 * 60;

/// A subject in a key: no client address and no account stands there in clear.
pub(super) fn hashed(subject: &str) -> String {
    URL_SAFE_NO_PAD.encode(&digest(&SHA256, subject.as_bytes()).as_ref()[..18])
}

/// Windows, one for each length: of two of one length the tighter counts.
pub(super) fn distinct(windows: &[Window]) -> Vec<Window> {
    let mut windows = windows.to_vec();
    windows.sort_by_key(|window| (window.window_seconds, window.count));
    windows.dedup_by_key(|window| window.window_seconds);
    windows
}

/// A counter for each window, in one slot.
fn counters(app: &AppId, check: &Check, windows: &[Window]) -> Vec<String> {
    let subject = hashed(&check.subject);
    let limit = check.limit.as_str();
    windows.iter().map(|window| format!("lk:{{{app}:{subject}}}:{limit}:{}", window.window_seconds)).collect()
}

/// A part of a window, in milliseconds; exact, since windows are whole seconds.
pub(super) fn part_millis(window: &Window) -> i64 {
    i64::from(window.window_seconds) * 1000 / PARTS
}

fn known_key(app: &AppId, account: &AccountKey, client: ClientAddress) -> String {
    format!("lk:{{{app}:{}}}:known", hashed(&format!("{} {client}", account.as_str())))
}

/// What the script said of one check.
enum Answer {
    /// At that time by Redis's clock, in milliseconds.
    Taken(i64),
    Refused {
        window: usize,
        wait: Duration,
    },
}

// === impl Redis ===

impl Redis {
    fn read_answer(&self, value: Value) -> Result<Answer, StoreError> {
        let (refused, number): (usize, i64) = redis::from_redis_value(value).map_err(|_| self.unreadable())?;
        Ok(match refused.checked_sub(1) {
            None => Answer::Taken(number),
            Some(window) => Answer::Refused { window, wait: Duration::from_millis(u64::try_from(number).unwrap_or(0)) },
        })
    }
}

impl Limits for Stores {
    async fn take(&self, app: &AppId, checks: Vec<Check>) -> Result<Taken, TakeError> {
        if checks.is_empty() {
            return Ok(Taken::default());
        }
        let redis = &self.redis;
        let mut commands = Pipeline::new();
        for check in &checks {
            let windows = distinct(&check.windows);
            let mut arguments = vec![redis.offset_millis()];
            for window in &windows {
                arguments.push(window.count.to_string());
                arguments.push(part_millis(window).to_string());
            }
            commands.add_command(call(&redis.scripts().take, &counters(app, check, &windows), &arguments));
        }
        // Each check is all or nothing by itself; where one refuses, what the others took is given back.
        let values = redis.send(Operation::TakeLimits, &commands).await?;
        let mut taken = Taken::default();
        let mut limited: Option<Limited> = None;
        for (check, value) in checks.into_iter().zip(values) {
            match redis.read_answer(value)? {
                Answer::Taken(at) => taken.0.push((check, at)),
                Answer::Refused { window, wait } => {
                    let window = *distinct(&check.windows).get(window).ok_or_else(|| redis.unreadable())?;
                    let retry_after = wait.max(Duration::from_secs(1));
                    if limited.is_none_or(|limited| limited.retry_after < retry_after) {
                        limited = Some(Limited { limit: check.limit, window, retry_after });
                    }
                }
            }
        }
        match limited {
            None => Ok(taken),
            Some(limited) => {
                self.give_back(app, taken).await;
                Err(limited.into())
            }
        }
    }

    async fn give_back(&self, app: &AppId, taken: Taken) {
        if taken.0.is_empty() {
            return;
        }
        let mut commands = Pipeline::new();
        for (check, at) in &taken.0 {
            let windows = distinct(&check.windows);
            let parts: Vec<String> = windows.iter().map(|window| (at / part_millis(window)).to_string()).collect();
            commands.add_command(call(&self.redis.scripts().give_back, &counters(app, check, &windows), &parts));
        }
        if let Err(error) = self.redis.send(Operation::GiveBack, &commands).await {
            warn!(%app, error = &error as &dyn std::error::Error, "a limit stays tighter for a while");
        }
    }

    async fn is_known(&self, app: &AppId, account: &AccountKey, client: ClientAddress) -> Result<bool, StoreError> {
        let mut commands = Pipeline::new();
        commands.cmd("EXISTS").arg(known_key(app, account, client));
        let values = self.redis.send(Operation::IsKnown, &commands).await?;
        match values.as_slice() {
            [Value::Int(count)] => Ok(*count > 0),
            _ => Err(self.redis.unreadable()),
        }
    }

    async fn remember(&self, app: &AppId, account: &AccountKey, client: ClientAddress) {
        let mut commands = Pipeline::new();
        commands.cmd("SET").arg(known_key(app, account, client)).arg(1).arg("EX").arg(KNOWN_SECONDS);
        if let Err(error) = self.redis.send(Operation::Remember, &commands).await {
            warn!(%app, error = &error as &dyn std::error::Error, "a client address is not known to its account");
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
        let check = Check {
            limit: LimitName::MailsPerRecipient,
            subject: "192.0.2.1".to_owned(),
            windows: LimitName::MailsPerRecipient.default_windows(),
        };
        let keys = counters(&app, &check, &distinct(&check.windows));
        assert_eq!(keys.len(), 2);
        let slot = |key: &str| key[key.find('{').unwrap()..=key.find('}').unwrap()].to_owned();
        assert_eq!(slot(&keys[0]), slot(&keys[1]));
        assert!(keys.iter().all(|key| !key.contains("192.0.2.1")));
        assert!(keys[0].ends_with(":mailsPerRecipient:60"), "{}", keys[0]);
    }

    #[test]
    fn of_two_windows_of_one_length_the_tighter_counts() {
        let window = |count, window_seconds| Window { count, window_seconds };
        let check = Check {
            limit: LimitName::LoginsPerClient,
            subject: String::new(),
            windows: vec![window(9, 60), window(100, 3600), window(5, 60)],
        };
        assert_eq!(distinct(&check.windows), [window(5, 60), window(100, 3600)]);
    }
}
