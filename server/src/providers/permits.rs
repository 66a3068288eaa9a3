//! How many ask providers at once: counted for the whole server, and for each namespace, Provider and client address.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use crate::domain::{
    client::{ClientAddress, Site},
    identity::{Away, Operation},
};

/// All permits of a server. Each reads one answer at a time, of at most 64 KiB ([`super::http::MAX_ANSWER`]) after a head
/// of at most 32 KiB ([`super::http::MAX_HEAD`]). Buffers that grow have up to twice that, so all take at most 24 MiB.
const MAX_IN_SERVER: usize = 128;
/// One namespace takes at most half of them: its Providers may all hang. And it takes no more than are free, so that
/// namespaces which hang one after the other always leave some.
const MAX_OF_NAMESPACE: usize = 64;
/// One Provider (contract, 5). It takes no more than are free in its namespace, likewise (Choudhury and Hahne, Dynamic
/// Queue Length Thresholds, 1998): after five Providers that hang a sixth still gets one.
const MAX_OF_PROVIDER: usize = 32;
/// One client address at one Provider. At 300 ms a login that is 13 logins a second from behind one address.
const MAX_OF_CLIENT_AT_PROVIDER: usize = 4;
/// The /48 of an IPv6 address at one Provider: half of its places stay for others.
const MAX_OF_SITE_AT_PROVIDER: usize = 16;
/// One client address at all Providers of all Apps: an eighth. Four would be fair as well, but then four users behind
/// one address who wait for a provider that hangs would keep their neighbours from every other provider.
const MAX_OF_CLIENT: usize = 16;
/// The /48 of an IPv6 address at all Providers.
const MAX_OF_SITE: usize = 32;

/// Checks of our own for one namespace: others are still checked while all its Providers hang. The whole server makes
/// eight at once.
const MAX_CHECKS_OF_NAMESPACE: usize = 2;

/// Namespace and name of a Provider.
pub(super) type Key = Arc<(String, String)>;

/// Counts the permits that are held. Keeps nothing of what holds none.
#[derive(Default)]
pub(super) struct Permits(Arc<Mutex<HashMap<Holder, usize>>>);

/// The right to ask a provider, one question after the other. Clones share it; it ends with the last one.
#[derive(Clone)]
pub struct Permit(Arc<Held>);

struct Held {
    counts: Arc<Mutex<HashMap<Holder, usize>>>,
    holders: Vec<Holder>,
    operation: Option<Operation>,
}

/// What permits are counted for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Holder {
    Server,
    Namespace(String),
    Provider(Key),
    Client(ClientAddress),
    Site(Site),
    ClientAtProvider(Key, ClientAddress),
    SiteAtProvider(Key, Site),
    ChecksOfNamespace(String),
}

// === impl Holder ===

impl Holder {
    const fn limit(&self) -> usize {
        match self {
            Self::Server => MAX_IN_SERVER,
            Self::Namespace(_) => MAX_OF_NAMESPACE,
            Self::Provider(_) => MAX_OF_PROVIDER,
            Self::Client(_) => MAX_OF_CLIENT,
            Self::Site(_) => MAX_OF_SITE,
            Self::ClientAtProvider(..) => MAX_OF_CLIENT_AT_PROVIDER,
            Self::SiteAtProvider(..) => MAX_OF_SITE_AT_PROVIDER,
            Self::ChecksOfNamespace(_) => MAX_CHECKS_OF_NAMESPACE,
        }
    }
}

// === impl Permits ===

impl Permits {
    /// A permit for an operation of a client.
    pub(super) fn try_acquire(
        &self,
        provider: &Key,
        client: ClientAddress,
        operation: Operation,
    ) -> Result<Permit, Away> {
        let mut holders = Self::holders(provider);
        holders.extend([Holder::Client(client), Holder::ClientAtProvider(Arc::clone(provider), client)]);
        if let Some(site) = client.site() {
            holders.extend([Holder::Site(site), Holder::SiteAtProvider(Arc::clone(provider), site)]);
        }
        self.acquire(holders, Some(operation))
    }

    /// A permit for a check of our own.
    pub(super) fn try_acquire_for_check(&self, provider: &Key) -> Result<Permit, Away> {
        let mut holders = Self::holders(provider);
        holders.push(Holder::ChecksOfNamespace(provider.0.clone()));
        self.acquire(holders, None)
    }

    fn holders(provider: &Key) -> Vec<Holder> {
        vec![Holder::Server, Holder::Namespace(provider.0.clone()), Holder::Provider(Arc::clone(provider))]
    }

    /// One for each holder, or none at all.
    fn acquire(&self, holders: Vec<Holder>, operation: Option<Operation>) -> Result<Permit, Away> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = |holder| counts.get(holder).copied().unwrap_or(0);
        let mut free_outside = usize::MAX;
        for holder in &holders {
            if count(holder) >= holder.limit().min(free_outside) {
                return Err(Away::TooMany);
            }
            // From the server to the namespace, and from there to the Provider. What follows is inside of none.
            free_outside = match holder {
                Holder::Server | Holder::Namespace(_) => holder.limit() - count(holder),
                _ => usize::MAX,
            };
        }
        for holder in &holders {
            *counts.entry(holder.clone()).or_default() += 1;
        }
        drop(counts);
        Ok(Permit(Arc::new(Held { counts: Arc::clone(&self.0), holders, operation })))
    }
}

// === impl Permit ===

impl Permit {
    /// What it was acquired for; `None` for a check of our own.
    pub(super) fn operation(&self) -> Option<Operation> {
        self.0.operation
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Permit").field(&self.0.holders).finish()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        for holder in &self.holders {
            if let Some(count) = counts.get_mut(holder) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(holder);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provider(namespace: &str, name: &str) -> Key {
        Arc::new((namespace.to_owned(), name.to_owned()))
    }

    fn client(text: &str) -> ClientAddress {
        ClientAddress::of(text.parse().unwrap())
    }

    /// As many permits as can be had, each of another client of that list.
    fn fill(permits: &Permits, provider: &Key, clients: impl IntoIterator<Item = String>) -> Vec<Permit> {
        let acquire = |text: String| permits.try_acquire(provider, client(&text), Operation::Login).ok();
        clients.into_iter().filter_map(acquire).collect()
    }

    fn addresses(third: usize, count: usize) -> impl Iterator<Item = String> {
        (0..count).map(move |last| format!("192.0.{third}.{last}"))
    }

    #[test]
    fn a_provider_has_thirty_two_permits_and_no_more() {
        let (permits, github) = (Permits::default(), provider("shop", "github"));
        let mut held = fill(&permits, &github, addresses(2, 100));
        assert_eq!(held.len(), 32);
        assert_eq!(permits.try_acquire_for_check(&github).err(), Some(Away::TooMany));
        assert!(permits.try_acquire_for_check(&provider("shop", "google")).is_ok(), "another's are not counted");
        let shared = held[0].clone();
        held.remove(0);
        assert!(permits.try_acquire_for_check(&github).is_err(), "somebody still has it");
        drop(shared);
        assert!(permits.try_acquire_for_check(&github).is_ok());
    }

    #[test]
    fn one_client_leaves_permits_for_others() {
        let (permits, github) = (Permits::default(), provider("shop", "github"));
        let same = |count| (0..count).map(|_| "192.0.2.7".to_owned());
        let held = fill(&permits, &github, same(32));
        assert_eq!(held.len(), 4);
        assert!(permits.try_acquire(&github, client("192.0.2.8"), Operation::Callback).is_ok());
        // At all Providers of all Apps.
        let more: Vec<_> =
            (0..10).flat_map(|name| fill(&permits, &provider("mail", &name.to_string()), same(32))).collect();
        assert_eq!(held.len() + more.len(), 16);
    }

    #[test]
    fn an_ipv6_client_counts_by_its_64_and_its_48() {
        let (permits, github) = (Permits::default(), provider("shop", "github"));
        let subnet = |net: usize| (0..32).map(move |host| format!("2001:db8:7:{net:x}::{host:x}"));
        let first = fill(&permits, &github, subnet(1));
        assert_eq!(first.len(), 4);
        let site = fill(&permits, &github, (2..32).flat_map(subnet));
        assert_eq!(first.len() + site.len(), 16);
        let elsewhere: Vec<_> = (0..10)
            .flat_map(|name| fill(&permits, &provider("mail", &name.to_string()), (1..32).flat_map(subnet)))
            .collect();
        assert_eq!(first.len() + site.len() + elsewhere.len(), 32);
        assert!(permits.try_acquire(&github, client("2001:db8:8::1"), Operation::Login).is_ok());
    }

    #[test]
    fn providers_that_hang_leave_permits_for_others_of_their_namespace() {
        let permits = Permits::default();
        let hanging = |at| fill(&permits, &provider("shop", &format!("hangs-{at}")), addresses(at, 100));
        let held: Vec<_> = (0..5).map(hanging).collect();
        assert_eq!(held.iter().map(Vec::len).collect::<Vec<_>>(), [32, 16, 8, 4, 2]);
        assert!(permits.try_acquire(&provider("shop", "up"), client("198.51.100.1"), Operation::Callback).is_ok());
    }

    #[test]
    fn one_namespace_leaves_permits_for_others_and_all_have_an_end() {
        let permits = Permits::default();
        let of = |namespace: &str, third| -> Vec<Permit> {
            let names = (0..8).map(|name| provider(namespace, &name.to_string()));
            names.enumerate().flat_map(|(at, key)| fill(&permits, &key, addresses(third + at, 40))).collect()
        };
        let held: Vec<_> = (0..9).map(|at| of(&at.to_string(), at * 20)).collect();
        assert_eq!(held.iter().map(Vec::len).collect::<Vec<_>>(), [64, 32, 16, 8, 4, 2, 1, 1, 0]);
        drop(held);
        let check = |namespace: &str| permits.try_acquire_for_check(&provider(namespace, "0"));
        let checks = [check("one"), check("one"), check("two")].map(Result::unwrap);
        assert!(check("one").is_err() && check("two").is_ok());
        drop(checks);
        assert!(permits.0.lock().unwrap().is_empty(), "nothing is kept of what holds no permit");
    }
}
