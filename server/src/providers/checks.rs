//! Checks whether providers can be reached and accept our client: after each change to a Provider, and at intervals.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use aws_lc_rs::digest::{SHA256, digest};
use latchkey_crds::{
    conditions::Reason,
    rendered::{ProviderSettings, RenderedProvider},
};
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval},
};

use super::{
    Inner, SocialProviders,
    client::ProviderConfig,
    permits::Permit,
    preset::EndpointSource,
    reports::{ProviderKey, ProviderReports},
};
use crate::{
    config::Apps,
    domain::{
        clock::Env,
        identity::{InvalidResponse, ProviderEndpoint, ProviderError, UnusableReason},
    },
};

/// How often due checks are started and changes to Apps are read.
const TICK: Duration = Duration::from_secs(1);
/// After a check with the result `Reachable`, the next check follows after this time, plus or minus 25 %, so that
/// servers do not check at the same time.
const CHECK_INTERVAL: Duration = Duration::from_secs(3600);
/// After a check with any other result, the next check follows after this time, plus or minus 25 %.
const RETRY_INTERVAL: Duration = Duration::from_secs(300);
/// The first check of a new or changed Provider is due at a random moment within this time.
const FIRST_CHECK_WITHIN: Duration = Duration::from_secs(5);
/// Maximum number of concurrent checks. A few are enough, because no client waits for a check.
const MAX_CONCURRENT_CHECKS: usize = 8;
/// An authorization code that no provider has issued.
const INVALID_CODE: &str = "latchkey-asks-whether-this-client-is-known";

/// A Provider that is checked.
struct WatchedProvider {
    settings: Arc<ProviderSettings>,
    callback: String,
    /// Fingerprint of the settings. If it changes, the Provider is checked again.
    fingerprint: Vec<u8>,
    next_check: Instant,
}

impl SocialProviders {
    /// Checks every Provider of every App and reports the results, until the future is dropped.
    pub async fn run_checks(self, apps: Arc<Apps>, reports: Arc<ProviderReports>) {
        let env = Env::system();
        let mut changes = apps.subscribe_changes();
        let mut clock = interval(TICK);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut watched: HashMap<ProviderKey, WatchedProvider> = HashMap::new();
        let mut running: JoinSet<(ProviderKey, Vec<u8>, Option<Reason>)> = JoinSet::new();
        let mut changed = true;
        loop {
            tokio::select! {
                // At the next tick all Apps are read, so it does not matter which App changed or how many changes were
                // missed.
                _ = changes.recv() => {
                    changed = true;
                    continue;
                }
                Some(done) = running.join_next() => {
                    let Ok((key, fingerprint, result)) = done else { continue };
                    let provider = watched.get_mut(&key).filter(|provider| provider.fingerprint == fingerprint);
                    if let Some(provider) = provider {
                        let pause = if result == Some(Reason::Reachable) { CHECK_INTERVAL } else { RETRY_INTERVAL };
                        provider.next_check = Instant::now() + with_jitter(pause, env.random_unit());
                        match result {
                            Some(reason) => reports.record(&key, reason),
                            None => reports.remove(&key),
                        }
                    }
                    continue;
                }
                _ = clock.tick() => {}
            }
            if std::mem::take(&mut changed) {
                update_watched(&mut watched, &apps, &env, &reports);
            }
            let now = Instant::now();
            for (key, provider) in watched.iter_mut().filter(|(_, provider)| provider.next_check <= now) {
                if running.len() >= MAX_CONCURRENT_CHECKS {
                    break;
                }
                // If no permit is free, the check stays due and is tried again at the next tick.
                let Ok(permit) = self.0.permits.try_acquire_for_check(&Arc::new(key.clone())) else { continue };
                // Prevents a second start of this check while it runs. A check takes at most ten seconds.
                provider.next_check = now + CHECK_INTERVAL;
                let (providers, key, fingerprint) = (self.clone(), key.clone(), provider.fingerprint.clone());
                let (settings, callback) = (Arc::clone(&provider.settings), provider.callback.clone());
                running.spawn(async move {
                    let result = providers.run_check(&permit, &settings, &callback).await;
                    (key, fingerprint, result)
                });
            }
        }
    }

    /// Runs one check. `None` if the Provider's preset is unknown, its option `claims` is invalid, or its secret is
    /// missing.
    async fn run_check(&self, permit: &Permit, settings: &ProviderSettings, callback: &str) -> Option<Reason> {
        let client = ProviderConfig::new(settings, permit).ok()?;
        client.secret().ok()?;
        Some(self.0.run_check(&client, callback).await)
    }

    /// Checks immediately whether the provider can be reached and accepts the client. Returns `None` if the Provider
    /// cannot be checked: its preset is unknown, its option `claims` is invalid, its secret is missing, or no permit is
    /// free.
    pub async fn check(&self, namespace: &str, provider: &RenderedProvider, callback: &str) -> Option<Reason> {
        let key = Arc::new((namespace.to_owned(), provider.resource.clone()));
        let permit = self.0.permits.try_acquire_for_check(&key).ok()?;
        self.run_check(&permit, &provider.settings, callback).await
    }
}

/// Updates `watched`, so that it contains exactly the Providers that the Apps reference now.
fn update_watched(
    watched: &mut HashMap<ProviderKey, WatchedProvider>,
    apps: &Apps,
    env: &Env,
    reports: &ProviderReports,
) {
    let mut referenced: BTreeMap<ProviderKey, (ProviderSettings, String)> = BTreeMap::new();
    for app in apps.all() {
        for provider in &app.doc.providers {
            let key = (app.doc.namespace.clone(), provider.resource.clone());
            let callback = format!("{}/{}/callback", app.doc.issuer, provider.name);
            referenced.entry(key).or_insert_with(|| (provider.settings.clone(), callback));
        }
    }
    watched.retain(|key, _| {
        let is_referenced = referenced.contains_key(key);
        if !is_referenced {
            reports.remove(key);
        }
        is_referenced
    });
    for (key, (settings, callback)) in referenced {
        let fingerprint = fingerprint(&settings);
        if watched.get(&key).is_some_and(|provider| provider.fingerprint == fingerprint) {
            continue;
        }
        let next_check = Instant::now() + FIRST_CHECK_WITHIN.mul_f64(env.random_unit());
        watched.insert(key, WatchedProvider { settings: Arc::new(settings), callback, fingerprint, next_check });
    }
}

/// A fingerprint that detects changes without a copy of the settings, which contain a secret.
fn fingerprint(settings: &ProviderSettings) -> Vec<u8> {
    let settings = serde_json::to_vec(settings).expect("provider settings have only string keys");
    digest(&SHA256, &settings).as_ref().to_vec()
}

/// 75 % to 125 % of `duration`, for `random_unit` from 0 to 1.
fn with_jitter(duration: Duration, random_unit: f64) -> Duration {
    duration.mul_f64(0.75 + random_unit / 2.0)
}

impl Inner {
    async fn run_check(&self, client: &ProviderConfig<'_>, callback: &str) -> Reason {
        let check = async { Ok(self.check_provider(client, callback).await) };
        // `run_operation` fails only if the whole check times out.
        self.run_operation(client, check).await.unwrap_or(Reason::TokenEndpointFailed)
    }

    async fn check_provider(&self, client: &ProviderConfig<'_>, callback: &str) -> Reason {
        // Fetches the discovery document, because a cached copy does not show that the provider is available now.
        if let EndpointSource::Discovered { issuer, .. } = &client.preset.endpoints {
            match client.discovery_url(*issuer) {
                Ok((_, url)) if self.fetch_metadata(client, &url).await.is_ok() => {}
                Ok(_) | Err(_) => return Reason::DiscoveryFailed,
            }
        }
        let endpoints = match self.endpoints(client).await {
            Ok(endpoints) => endpoints,
            Err(_) => return Reason::DiscoveryFailed,
        };
        if let Some(keys) = &endpoints.keys {
            match self.fetch_keys(client, &keys.url).await {
                Ok(keys) if !keys.is_empty() => {}
                Ok(_) | Err(_) => return Reason::KeysUnreadable,
            }
        }
        match self.redeem_code(client, &endpoints, INVALID_CODE, callback, None).await {
            Ok(_) => Reason::Reachable,
            Err(ProviderError::InvalidResponse {
                endpoint: ProviderEndpoint::Token,
                reason: InvalidResponse::ClientRejected,
            }) => Reason::ClientRefused,
            // Apple: the key cannot sign a client secret.
            Err(ProviderError::Unusable(UnusableReason::InvalidKey)) => Reason::ClientRefused,
            Err(ProviderError::Unavailable(_)) => Reason::TokenEndpointFailed,
            Err(
                ProviderError::InvalidResponse { reason: InvalidResponse::NotHttps, .. } | ProviderError::Unusable(_),
            ) => Reason::TokenEndpointFailed,
            // The provider rejected the code, as expected.
            Err(
                ProviderError::InvalidResponse { .. }
                | ProviderError::InvalidCallback(_)
                | ProviderError::InvalidToken(_)
                | ProviderError::NoTokenCheck,
            ) => Reason::Reachable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_varies_by_a_quarter_in_both_directions() {
        let hour = Duration::from_secs(3600);
        assert_eq!(with_jitter(hour, 0.0), Duration::from_secs(2700));
        assert_eq!(with_jitter(hour, 1.0), Duration::from_secs(4500));
    }
}
