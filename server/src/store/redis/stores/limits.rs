//! Rate limits that all servers share: a counter per window, and the client addresses that are known to an account.

use latchkey_crds::{rendered::Window, types::AppId};
use redis::{Pipeline, Value};
use tracing::warn;

use super::{
    super::{handle::RedisStore, metrics::Operation},
    windows::{AcquireReply, distinct_windows, hashed_subject},
};
use crate::{
    domain::{
        client::ClientAddress,
        email::AccountKey,
        ports::{AcquireError, RateLimitPermit, RateLimits, StoreError},
        rate_limits::{RateLimitCheck, RateLimited},
    },
    store::stores::Stores,
};

/// How long a client address is known to an account (specification: Limits, Rate limits).
const KNOWN_CLIENT_SECONDS: u32 = 30 * 24 * 60 * 60;

/// Returns the key of each window's counter. All keys are in one slot.
fn counter_keys(app: &AppId, check: &RateLimitCheck, windows: &[Window]) -> Vec<String> {
    let subject = hashed_subject(&check.subject);
    let limit = check.limit.as_str();
    windows.iter().map(|window| format!("lk:{{{app}:{subject}}}:{limit}:{}", window.window_seconds)).collect()
}

fn known_client_key(app: &AppId, account: &AccountKey, client: ClientAddress) -> String {
    format!("lk:{{{app}:{}}}:known", hashed_subject(&format!("{} {client}", account.as_str())))
}

/// Parses the reply for one check: the time at which the use was counted, or the limit that is reached.
fn parse_reply(
    redis: &RedisStore,
    check: &RateLimitCheck,
    value: Value,
) -> Result<Result<i64, RateLimited>, StoreError> {
    Ok(match redis.parse_acquire(value)? {
        AcquireReply::Counted(at) => Ok(at),
        AcquireReply::Limited { window, retry_after } => {
            let window = *distinct_windows(&check.windows).get(window).ok_or_else(|| redis.unexpected_value())?;
            Err(RateLimited { limit: check.limit, window, retry_after })
        }
    })
}

/// Of two limits that are reached, returns the limit with the longer wait.
fn longer_wait(one: Option<RateLimited>, other: RateLimited) -> RateLimited {
    one.filter(|one| one.retry_after >= other.retry_after).unwrap_or(other)
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
            commands.add_command(redis.acquire_command(&counter_keys(app, check, &windows), &windows));
        }
        // Each check is atomic, but not all checks together. If one check reaches its limit, the uses that the other
        // checks counted are released.
        let values = redis.send(Operation::AcquireLimits, &commands).await?;
        let mut permit = RateLimitPermit::default();
        let mut limited: Option<RateLimited> = None;
        for (check, value) in checks.into_iter().zip(values) {
            match parse_reply(redis, &check, value)? {
                Ok(at) => permit.0.push((check, at)),
                Err(reached) => limited = Some(longer_wait(limited, reached)),
            }
        }
        match limited {
            None => Ok(permit),
            Some(limited) => {
                self.release(app, permit).await;
                Err(limited.into())
            }
        }
    }

    async fn check_limits(&self, app: &AppId, checks: Vec<RateLimitCheck>) -> Result<(), AcquireError> {
        if checks.is_empty() {
            return Ok(());
        }
        let redis = &self.redis;
        let mut commands = Pipeline::new();
        for check in &checks {
            let windows = distinct_windows(&check.windows);
            commands.add_command(redis.check_limit_command(&counter_keys(app, check, &windows), &windows));
        }
        let values = redis.send(Operation::CheckLimits, &commands).await?;
        let mut limited: Option<RateLimited> = None;
        for (check, value) in checks.iter().zip(values) {
            if let Err(reached) = parse_reply(redis, check, value)? {
                limited = Some(longer_wait(limited, reached));
            }
        }
        limited.map_or(Ok(()), |limited| Err(limited.into()))
    }

    async fn release(&self, app: &AppId, permit: RateLimitPermit) {
        if permit.0.is_empty() {
            return;
        }
        let mut commands = Pipeline::new();
        for (check, at) in &permit.0 {
            let windows = distinct_windows(&check.windows);
            commands.add_command(self.redis.release_command(&counter_keys(app, check, &windows), &windows, *at));
        }
        if let Err(error) = self.redis.send(Operation::ReleaseLimits, &commands).await {
            warn!(
                %app,
                error = &error as &dyn std::error::Error,
                "a use of a limit was not released; the limit is stricter until its window ends"
            );
        }
    }

    async fn is_known_client(
        &self,
        app: &AppId,
        account: &AccountKey,
        client: ClientAddress,
    ) -> Result<bool, StoreError> {
        let mut command = redis::cmd("EXISTS");
        command.arg(known_client_key(app, account, client));
        match self.redis.send_one(Operation::IsKnownClient, command).await? {
            Value::Int(count) => Ok(count > 0),
            _ => Err(self.redis.unexpected_value()),
        }
    }

    async fn remember_client(&self, app: &AppId, account: &AccountKey, client: ClientAddress) {
        let mut command = redis::cmd("SET");
        command.arg(known_client_key(app, account, client)).arg(1).arg("EX").arg(KNOWN_CLIENT_SECONDS);
        if let Err(error) = self.redis.send_one(Operation::RememberClient, command).await {
            warn!(
                %app,
                error = &error as &dyn std::error::Error,
                "a client address could not be stored as known to an account"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::LimitName;

    use super::*;

    #[test]
    fn keys_of_a_check_share_a_slot_and_do_not_contain_the_subject() {
        let app: AppId = "shop".parse().unwrap();
        let check = RateLimitCheck {
            limit: LimitName::MailsPerRecipient.into(),
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
}
