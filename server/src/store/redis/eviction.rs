//! Watches Redis's eviction policy. If Redis evicts keys when its memory is full, sessions and the counters of limits
//! are lost.

use std::{sync::Arc, time::Duration};

use redis::{Pipeline, Value};
use tokio::time::{Instant, sleep};
use tracing::{error, info};

use super::{
    client::{
        RedisClient,
        reply::{info_field, text},
        timeouts::CALL_TIMEOUT,
    },
    metrics::Metrics,
};

/// The pause after a check of the policy.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// The pause after a check that failed.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The name of the policy with which Redis never evicts keys.
const NO_EVICTION: &str = "noeviction";

/// Checks at intervals whether Redis evicts keys when its memory is full. Sets a metric at each check, and logs when
/// the result changes. Runs until the task is aborted.
pub(super) async fn watch_eviction_policy(client: Arc<RedisClient>, metrics: Metrics) {
    let mut was_evicting = false;
    loop {
        let Some(policy) = eviction_policy(&client).await else {
            sleep(RETRY_INTERVAL).await;
            continue;
        };
        let evicts = policy != NO_EVICTION;
        metrics.set_evicts(evicts);
        match (was_evicting, evicts) {
            (false, true) => error!(
                policy,
                "Redis evicts keys when full: sessions and limits can be lost; set maxmemory-policy to noeviction"
            ),
            (true, false) => info!(policy, "Redis no longer evicts keys"),
            (false, false) | (true, true) => {}
        }
        was_evicting = evicts;
        sleep(CHECK_INTERVAL).await;
    }
}

/// Returns the eviction policy of Redis. If the primaries of a cluster have different policies, returns a policy that
/// evicts. Returns `None` if a call fails or no server reports a policy.
async fn eviction_policy(client: &RedisClient) -> Option<String> {
    let mut commands = Pipeline::new();
    commands.cmd("INFO").arg("memory");
    let replies = client.send_to_all(&commands, Instant::now() + CALL_TIMEOUT).await.unwrap_or_default();
    let mut policies: Vec<String> = replies.into_iter().filter_map(parse_policy).collect();
    let evicting = policies.iter().position(|policy| policy != NO_EVICTION).unwrap_or(0);
    (evicting < policies.len()).then(|| policies.swap_remove(evicting))
}

/// Returns the eviction policy from the reply to INFO.
fn parse_policy(values: Vec<Value>) -> Option<String> {
    let info = values.into_iter().next().and_then(text)?;
    info_field(&info, "maxmemory_policy").map(str::to_owned)
}
