//! Whether providers can be reached and know their client: asked from here, on change and now and then.

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
    client::Client,
    permits::Permit,
    preset::Server,
    reports::{Key, Reports},
};
use crate::{
    config::Apps,
    domain::{
        clock::Env,
        identity::{Fault, Place, ProviderError, Unusable},
    },
};

/// How often the clock is looked at, and the Apps where they changed.
const TICK: Duration = Duration::from_secs(1);
/// A Provider is checked again after an hour, a quarter more or less, so that servers do not ask together.
const EVERY: Duration = Duration::from_secs(3600);
/// One that could not be reached is checked again sooner, with the same jitter.
const SOON: Duration = Duration::from_secs(300);
/// The first check of a new or changed Provider comes within this time.
const FIRST: Duration = Duration::from_secs(5);
/// Checks at once: they are nobody's hurry.
const AT_ONCE: usize = 8;
/// A code that no provider ever gave.
const MADE_UP: &str = "latchkey-asks-whether-this-client-is-known";

/// A Provider that is checked.
struct Watched {
    settings: Arc<ProviderSettings>,
    callback: String,
    /// Of what was checked; another one is checked anew.
    print: Vec<u8>,
    due: Instant,
}

impl SocialProviders {
    /// Checks every Provider of every App, and tells what it finds, until dropped.
    pub async fn run_checks(self, apps: Arc<Apps>, reports: Arc<Reports>) {
        let env = Env::system();
        let mut changes = apps.changes();
        let mut clock = interval(TICK);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut watched: HashMap<Key, Watched> = HashMap::new();
        let mut running: JoinSet<(Key, Vec<u8>, Option<Reason>)> = JoinSet::new();
        let mut changed = true;
        loop {
            tokio::select! {
                // Which App it was does not matter, nor how many changes were missed.
                _ = changes.recv() => {
                    changed = true;
                    continue;
                }
                Some(done) = running.join_next() => {
                    let Ok((key, print, found)) = done else { continue };
                    if let Some(one) = watched.get_mut(&key).filter(|one| one.print == print) {
                        let again = if found == Some(Reason::Reachable) { EVERY } else { SOON };
                        one.due = Instant::now() + jittered(again, env.unit());
                        match found {
                            Some(reason) => reports.tell(&key, reason),
                            None => reports.forget(&key),
                        }
                    }
                    continue;
                }
                _ = clock.tick() => {}
            }
            if std::mem::take(&mut changed) {
                follow(&mut watched, &apps, &env, &reports);
            }
            let now = Instant::now();
            for (key, one) in watched.iter_mut().filter(|(_, one)| one.due <= now) {
                if running.len() >= AT_ONCE {
                    break;
                }
                // Without one it stays due: too many are asking this provider, or for this namespace.
                let Ok(permit) = self.0.permits.try_acquire_for_check(&Arc::new(key.clone())) else { continue };
                // Until it is done; a check takes ten seconds at most.
                one.due = now + EVERY;
                let (providers, key, print) = (self.clone(), key.clone(), one.print.clone());
                let (settings, callback) = (Arc::clone(&one.settings), one.callback.clone());
                running.spawn(async move {
                    let found = providers.look(&permit, &settings, &callback).await;
                    (key, print, found)
                });
            }
        }
    }

    /// One check; none: there is nothing to check with.
    async fn look(&self, permit: &Permit, settings: &ProviderSettings, callback: &str) -> Option<Reason> {
        let client = Client::new(settings, permit).ok()?;
        client.secret().ok()?;
        Some(self.0.look(&client, callback).await)
    }

    /// Whether a Provider's provider can be reached and knows the client, asked now. None: it cannot be asked, because
    /// its secret does not resolve, its preset is of a later version, or too many are asking it.
    pub async fn check(&self, namespace: &str, provider: &RenderedProvider, callback: &str) -> Option<Reason> {
        let key = Arc::new((namespace.to_owned(), provider.resource.clone()));
        let permit = self.0.permits.try_acquire_for_check(&key).ok()?;
        self.look(&permit, &provider.settings, callback).await
    }
}

/// Takes in what the Apps name now.
fn follow(watched: &mut HashMap<Key, Watched>, apps: &Apps, env: &Env, reports: &Reports) {
    let mut named: BTreeMap<Key, (ProviderSettings, String)> = BTreeMap::new();
    for app in apps.all() {
        for provider in &app.doc.providers {
            let key = (app.doc.namespace.clone(), provider.resource.clone());
            let callback = format!("{}/{}/callback", app.doc.issuer, provider.name);
            named.entry(key).or_insert_with(|| (provider.settings.clone(), callback));
        }
    }
    watched.retain(|key, _| {
        let stays = named.contains_key(key);
        if !stays {
            reports.forget(key);
        }
        stays
    });
    for (key, (settings, callback)) in named {
        let print = print(&settings);
        if watched.get(&key).is_some_and(|one| one.print == print) {
            continue;
        }
        let due = Instant::now() + FIRST.mul_f64(env.unit());
        watched.insert(key, Watched { settings: Arc::new(settings), callback, print, due });
    }
}

/// Tells settings apart without keeping them.
fn print(settings: &ProviderSettings) -> Vec<u8> {
    let settings = serde_json::to_vec(settings).expect("settings are maps with string keys, and strings");
    digest(&SHA256, &settings).as_ref().to_vec()
}

/// Three to five quarters of it.
fn jittered(duration: Duration, unit: f64) -> Duration {
    duration.mul_f64(0.75 + unit / 2.0)
}

impl Inner {
    async fn look(&self, client: &Client<'_>, callback: &str) -> Reason {
        let work = async { Ok(self.found(client, callback).await) };
        // Too slow: it cannot be asked.
        self.asking(client, work).await.unwrap_or(Reason::TokenEndpointFailed)
    }

    async fn found(&self, client: &Client<'_>, callback: &str) -> Reason {
        // What is kept says nothing of what can be read now.
        if let Server::Discovered { issuer, .. } = &client.preset.server {
            match client.discovery(*issuer) {
                Ok((_, address)) if self.read_metadata(client, &address).await.is_ok() => {}
                Ok(_) | Err(_) => return Reason::DiscoveryFailed,
            }
        }
        let endpoints = match self.endpoints(client).await {
            Ok(endpoints) => endpoints,
            Err(_) => return Reason::DiscoveryFailed,
        };
        if let Some(keys) = &endpoints.keys {
            match self.read_keys(client, &keys.url).await {
                Ok(keys) if !keys.is_empty() => {}
                Ok(_) | Err(_) => return Reason::KeysUnreadable,
            }
        }
        match self.redeem(client, &endpoints, MADE_UP, callback, None).await {
            Ok(_) => Reason::Reachable,
            Err(ProviderError::Answer { place: Place::Token, fault: Fault::ClientRefused }) => Reason::ClientRefused,
            // A key that makes no secret.
            Err(ProviderError::Unusable(Unusable::BadKey)) => Reason::ClientRefused,
            Err(ProviderError::Away(_)) => Reason::TokenEndpointFailed,
            Err(ProviderError::Answer { fault: Fault::NotHttps, .. } | ProviderError::Unusable(_)) => {
                Reason::TokenEndpointFailed
            }
            // It refused the code, which is what was to be expected.
            Err(
                ProviderError::Answer { .. }
                | ProviderError::Callback(_)
                | ProviderError::Token(_)
                | ProviderError::NoTokenCheck,
            ) => Reason::Reachable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_do_not_ask_together() {
        let hour = Duration::from_secs(3600);
        assert_eq!(jittered(hour, 0.0), Duration::from_secs(2700));
        assert_eq!(jittered(hour, 1.0), Duration::from_secs(4500));
    }
}
