//! Bounds concurrent provider operations: per server, namespace, Provider and client address.

use std::{collections::HashMap, fmt, sync::Arc};

use parking_lot::Mutex;

use crate::domain::{
    client::{ClientAddress, Ipv6Site},
    identity::{ProviderOperation, UnavailableReason},
};

/// Maximum number of permits in use on a server. An operation reads one response at a time, which consists of a body of
/// at most 64 KiB ([`super::http::MAX_RESPONSE_BODY`]) after a head of at most 32 KiB
/// ([`crate::outbound::client::MAX_RESPONSE_HEAD`]). A growing buffer takes up to twice the size of its content, so the
/// responses of all operations take at most 24 MiB in total.
const MAX_PER_SERVER: usize = 128;
/// Maximum number of permits of one namespace: half of all permits, in case all its Providers hang. A namespace gets a
/// further permit only if the server has more free permits than the namespace holds. So even while the Providers of
/// seven namespaces hang, an eighth namespace gets a permit.
const MAX_PER_NAMESPACE: usize = 64;
/// Maximum number of permits of one Provider (specification: Limits, Provider calls). A Provider gets a further permit
/// only if its namespace has more free permits than the Provider holds. So even while five Providers of a namespace
/// hang, its sixth Provider gets a permit. The method is from Choudhury and Hahne, Dynamic Queue Length Thresholds,
/// 1998.
const MAX_PER_PROVIDER: usize = 32;
/// Maximum number of permits of one client address at one Provider. At 300 ms per login, one client address can make 13
/// logins per second.
const MAX_PER_CLIENT_AND_PROVIDER: usize = 4;
/// Maximum number of permits of one IPv6 /48 at one Provider: half of the Provider's permits remain for others.
const MAX_PER_SITE_AND_PROVIDER: usize = 16;
/// Maximum number of permits of one client address at all Providers of all Apps: an eighth of all permits. If the
/// maximum were four, four users who share a client address and wait for a hanging provider would use up the permits of
/// this address. Then nobody else at this address could log in with any other provider.
const MAX_PER_CLIENT: usize = 16;
/// Maximum number of permits of one IPv6 /48 at all Providers.
const MAX_PER_SITE: usize = 32;

/// Maximum number of concurrent checks of one namespace. A server runs at most eight checks at a time, so other
/// namespaces are still checked while all Providers of one namespace hang.
const MAX_CHECKS_PER_NAMESPACE: usize = 2;

/// Namespace and name of a Provider.
pub(super) type SharedProviderKey = Arc<(String, String)>;

/// The number of permits in use at each level, for example of one namespace or of one client address. A level without
/// permits in use has no entry.
#[derive(Default)]
pub(super) struct Permits(Arc<Mutex<HashMap<LimitLevel, usize>>>);

/// The right to call a provider, one call at a time. Clones share the permit; dropping the last clone releases it.
#[derive(Clone)]
pub struct Permit(Arc<PermitInner>);

struct PermitInner {
    counts: Arc<Mutex<HashMap<LimitLevel, usize>>>,
    levels: Vec<LimitLevel>,
    operation: Option<ProviderOperation>,
}

/// What a limit applies to; see [`LimitLevel::limit`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum LimitLevel {
    Server,
    Namespace(String),
    Provider(SharedProviderKey),
    Client(ClientAddress),
    Site(Ipv6Site),
    ClientAndProvider(SharedProviderKey, ClientAddress),
    SiteAndProvider(SharedProviderKey, Ipv6Site),
    NamespaceChecks(String),
}

// === impl LimitLevel ===

impl LimitLevel {
    const fn limit(&self) -> usize {
        match self {
            Self::Server => MAX_PER_SERVER,
            Self::Namespace(_) => MAX_PER_NAMESPACE,
            Self::Provider(_) => MAX_PER_PROVIDER,
            Self::Client(_) => MAX_PER_CLIENT,
            Self::Site(_) => MAX_PER_SITE,
            Self::ClientAndProvider(..) => MAX_PER_CLIENT_AND_PROVIDER,
            Self::SiteAndProvider(..) => MAX_PER_SITE_AND_PROVIDER,
            Self::NamespaceChecks(_) => MAX_CHECKS_PER_NAMESPACE,
        }
    }
}

// === impl Permits ===

impl Permits {
    /// Acquires a permit for an operation of a client. Does not wait.
    pub(super) fn try_acquire(
        &self,
        provider: &SharedProviderKey,
        client: ClientAddress,
        operation: ProviderOperation,
    ) -> Result<Permit, UnavailableReason> {
        let mut levels = Self::provider_levels(provider);
        levels.extend([LimitLevel::Client(client), LimitLevel::ClientAndProvider(Arc::clone(provider), client)]);
        if let Some(site) = client.ipv6_site() {
            levels.extend([LimitLevel::Site(site), LimitLevel::SiteAndProvider(Arc::clone(provider), site)]);
        }
        self.acquire_in(levels, Some(operation))
    }

    /// Acquires a permit for a check ([`super::checks`]).
    pub(super) fn try_acquire_for_check(&self, provider: &SharedProviderKey) -> Result<Permit, UnavailableReason> {
        let mut levels = Self::provider_levels(provider);
        levels.push(LimitLevel::NamespaceChecks(provider.0.clone()));
        self.acquire_in(levels, None)
    }

    fn provider_levels(provider: &SharedProviderKey) -> Vec<LimitLevel> {
        vec![LimitLevel::Server, LimitLevel::Namespace(provider.0.clone()), LimitLevel::Provider(Arc::clone(provider))]
    }

    /// Acquires a permit that counts at each of these levels. Fails if the limit of one level is reached.
    fn acquire_in(
        &self,
        levels: Vec<LimitLevel>,
        operation: Option<ProviderOperation>,
    ) -> Result<Permit, UnavailableReason> {
        let mut counts = self.0.lock();
        let count = |level| counts.get(level).copied().unwrap_or(0);
        let mut free_in_parent = usize::MAX;
        for level in &levels {
            if count(level) >= level.limit().min(free_in_parent) {
                return Err(UnavailableReason::TooManyCalls);
            }
            // The namespace is bounded by the free permits of the server, the Provider by the free permits of the
            // namespace. The levels after the Provider have only their own limits.
            free_in_parent = match level {
                LimitLevel::Server | LimitLevel::Namespace(_) => level.limit() - count(level),
                _ => usize::MAX,
            };
        }
        for level in &levels {
            *counts.entry(level.clone()).or_default() += 1;
        }
        drop(counts);
        Ok(Permit(Arc::new(PermitInner { counts: Arc::clone(&self.0), levels, operation })))
    }
}

// === impl Permit ===

impl Permit {
    /// The operation of the client. `None` for a check ([`super::checks`]).
    pub(super) fn operation(&self) -> Option<ProviderOperation> {
        self.0.operation
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Permit").field(&self.0.levels).finish()
    }
}

impl Drop for PermitInner {
    fn drop(&mut self) {
        let mut counts = self.counts.lock();
        for level in &self.levels {
            if let Some(count) = counts.get_mut(level) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(level);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provider(namespace: &str, name: &str) -> SharedProviderKey {
        Arc::new((namespace.to_owned(), name.to_owned()))
    }

    fn client(text: &str) -> ClientAddress {
        ClientAddress::from_ip(text.parse().unwrap())
    }

    /// Tries to acquire one permit for each client in the list. Returns the acquired permits.
    fn acquire_all(
        permits: &Permits,
        provider: &SharedProviderKey,
        clients: impl IntoIterator<Item = String>,
    ) -> Vec<Permit> {
        let acquire = |text: String| permits.try_acquire(provider, client(&text), ProviderOperation::Login).ok();
        clients.into_iter().filter_map(acquire).collect()
    }

    fn addresses(third_byte: usize, count: usize) -> impl Iterator<Item = String> {
        (0..count).map(move |last_byte| format!("192.0.{third_byte}.{last_byte}"))
    }

    #[test]
    fn a_provider_has_at_most_thirty_two_permits() {
        let (permits, github) = (Permits::default(), provider("shop", "github"));
        let mut acquired = acquire_all(&permits, &github, addresses(2, 100));
        assert_eq!(acquired.len(), 32);
        assert_eq!(permits.try_acquire_for_check(&github).err(), Some(UnavailableReason::TooManyCalls));
        assert!(permits.try_acquire_for_check(&provider("shop", "google")).is_ok(), "other Providers are not affected");
        let shared = acquired[0].clone();
        acquired.remove(0);
        assert!(permits.try_acquire_for_check(&github).is_err(), "a clone keeps the permit");
        drop(shared);
        assert!(permits.try_acquire_for_check(&github).is_ok());
    }

    #[test]
    fn one_client_leaves_permits_for_others() {
        let (permits, github) = (Permits::default(), provider("shop", "github"));
        let same_client = |count| (0..count).map(|_| "192.0.2.7".to_owned());
        let acquired = acquire_all(&permits, &github, same_client(32));
        assert_eq!(acquired.len(), 4);
        assert!(permits.try_acquire(&github, client("192.0.2.8"), ProviderOperation::Callback).is_ok());
        // The permits of a client at all Providers of all Apps are limited, too.
        let at_other_providers: Vec<_> = (0..10)
            .flat_map(|name| acquire_all(&permits, &provider("mail", &name.to_string()), same_client(32)))
            .collect();
        assert_eq!(acquired.len() + at_other_providers.len(), 16);
    }

    #[test]
    fn an_ipv6_client_is_limited_by_its_slash_64_and_slash_48() {
        let (permits, github) = (Permits::default(), provider("shop", "github"));
        let subnet = |net: usize| (0..32).map(move |host| format!("2001:db8:7:{net:x}::{host:x}"));
        let of_subnet = acquire_all(&permits, &github, subnet(1));
        assert_eq!(of_subnet.len(), 4);
        let of_site = acquire_all(&permits, &github, (2..32).flat_map(subnet));
        assert_eq!(of_subnet.len() + of_site.len(), 16);
        let at_other_providers: Vec<_> = (0..10)
            .flat_map(|name| acquire_all(&permits, &provider("mail", &name.to_string()), (1..32).flat_map(subnet)))
            .collect();
        assert_eq!(of_subnet.len() + of_site.len() + at_other_providers.len(), 32);
        assert!(permits.try_acquire(&github, client("2001:db8:8::1"), ProviderOperation::Login).is_ok());
    }

    #[test]
    fn providers_that_hang_leave_permits_for_others_of_their_namespace() {
        let permits = Permits::default();
        let hanging = |at| acquire_all(&permits, &provider("shop", &format!("hangs-{at}")), addresses(at, 100));
        let acquired: Vec<_> = (0..5).map(hanging).collect();
        assert_eq!(acquired.iter().map(Vec::len).collect::<Vec<_>>(), [32, 16, 8, 4, 2]);
        assert!(
            permits.try_acquire(&provider("shop", "up"), client("198.51.100.1"), ProviderOperation::Callback).is_ok()
        );
    }

    #[test]
    fn one_namespace_leaves_permits_for_others_and_the_total_is_bounded() {
        let permits = Permits::default();
        let acquire_in_namespace = |namespace: &str, third_byte| -> Vec<Permit> {
            let names = (0..8).map(|name| provider(namespace, &name.to_string()));
            names
                .enumerate()
                .flat_map(|(at, key)| acquire_all(&permits, &key, addresses(third_byte + at, 40)))
                .collect()
        };
        let acquired: Vec<_> = (0..9).map(|at| acquire_in_namespace(&at.to_string(), at * 20)).collect();
        assert_eq!(acquired.iter().map(Vec::len).collect::<Vec<_>>(), [64, 32, 16, 8, 4, 2, 1, 1, 0]);
        drop(acquired);
        let check = |namespace: &str| permits.try_acquire_for_check(&provider(namespace, "0"));
        let checks = [check("one"), check("one"), check("two")].map(Result::unwrap);
        assert!(check("one").is_err() && check("two").is_ok());
        drop(checks);
        assert!(permits.0.lock().is_empty(), "no entry remains without a permit");
    }
}
