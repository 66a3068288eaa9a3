//! What connections and requests from outside can hold of the process's memory: derived from its limit, checked before
//! anything is read, and shared between client addresses.

use std::{net::IpAddr, sync::Arc};

use http::request::Parts;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    quota::{Exhausted, Quota, QuotaPermit},
    refusals::Refusals,
    serve::MAX_HEAD,
};
use crate::domain::client::ClientAddress;

/// Connections have a quarter of the memory limit and request bytes an eighth. Of 256 MiB, a server with two CPUs needs
/// 80 MiB for itself and its copies of the Apps' documents have 64 MiB, which leaves 112: 96 are given out here.
const CONNECTIONS_SHARE: u64 = 4;
const BYTES_SHARE: u64 = 8;
/// One client address can hold an eighth of either: it takes eight to use them up.
const CLIENT_SHARE: usize = 8;
/// And the /48 of an IPv6 address half: the other half stays for others.
const SITE_SHARE: usize = 2;
/// Of the request bytes, half are for further requests of HTTP/2 connections: slow bodies cannot take these, or nobody
/// could log in behind a proxy that sends many requests over one connection.
const FURTHER_SHARE: usize = 2;
/// Of the other half, large header blocks from trusted proxies have at most half. Whose they are is not known while they
/// are read, and they are counted as long as the proxy's connection lives.
const PROXY_HEADS_SHARE: usize = 2;
/// Callers in the cluster have an eighth of the connections for themselves: outsiders cannot use these up.
const ADMIN_SHARE: usize = 8;
/// Held refusals have half of the public connections: an HTTP/1 refusal keeps its connection while it is held. The other
/// half stays for callers that are not refused, even behind proxies, whose connections are not bounded by address.
const HELD_SHARE: usize = 2;
/// Bounds of the memory limit that is reckoned with: less is a test, more needs no more connections.
const MIN_MEMORY: u64 = 64 << 20;
const MAX_MEMORY: u64 = 4 << 30;

/// What an HTTP/1 connection with a request costs: 8 KiB each for hyper's two buffers, tasks and state, and [`ALLOWANCE`].
/// Measured: 27 KB when idle after a request, in a build that is not optimized.
const CONNECTION_COST: usize = 40 * 1024;
/// Connections of a listener for any memory: each is also a file descriptor.
const MAX_CONNECTIONS: usize = 10_000;
/// What an HTTP/2 connection costs, in connections (200 KiB): its window of 64 KiB of unread bodies, a header block of
/// 32 KiB that is being read and its decoded form, frames of 16 KiB each way, the table of header compression.
const HTTP2_CONNECTIONS: u32 = 5;

/// Memory of a request that its connection pays for: header fields and body together. An ordinary login has less than
/// 2 KiB, so that it needs nothing of the budget, which an attacker can use up.
const ALLOWANCE: usize = 8 * 1024;
/// What each further request at a time costs in an HTTP/2 connection: its tasks and [`ALLOWANCE`].
const FURTHER_REQUEST: usize = 16 * 1024;
/// Bytes of an HTTP/1 header block that its connection pays for: hyper's buffer has 8 KiB from the beginning.
pub(super) const FREE_HEAD: usize = 8 * 1024;
/// What a larger header block costs. The buffer grows to twice the largest block, and stays.
const LARGE_HEAD: usize = 2 * MAX_HEAD - FREE_HEAD;

/// The operations listener: a kubelet, Prometheus and the operators need less than ten. An address needs a few.
const OPS_CONNECTIONS: usize = 64;
const OPS_CONNECTIONS_PER_CLIENT: usize = 16;

/// The budgets of one process.
#[derive(Debug)]
pub struct Budgets {
    request_bytes: Arc<Quota>,
    further_requests: Arc<Quota>,
    /// Part of the request bytes, which counts them too.
    proxy_heads: Arc<Quota>,
    refusals: Refusals,
    /// The places of the two listeners.
    public: usize,
    admin: usize,
    connections_per_client: usize,
}

/// The connections that a listener can have. In units of [`CONNECTION_COST`].
#[derive(Debug)]
pub struct ConnectionPlaces {
    free: Arc<Semaphore>,
    clients: Arc<Quota>,
    /// Whether trusted proxies can have any number: they carry the connections of many clients.
    exempts_proxies: bool,
}

/// The place of one connection.
#[derive(Debug)]
pub struct ConnectionPlace {
    free: Arc<Semaphore>,
    clients: Arc<Quota>,
    client: Option<ClientAddress>,
    place: Arc<Place>,
    /// What HTTP/2 takes beyond it.
    http2: Option<Place>,
    /// Of the request bytes.
    head: QuotaPermit,
    /// Of the proxies' heads, if the peer is one.
    proxy_head: Option<QuotaPermit>,
    has_large_head: bool,
}

/// Places of a listener and of a client address, which are free again when this is dropped.
#[derive(Debug)]
pub struct Place {
    _place: OwnedSemaphorePermit,
    _share: QuotaPermit,
}

/// The memory that one request holds.
#[derive(Debug)]
pub struct RequestMemory {
    /// What its connection still pays for.
    allowance: usize,
    charged: QuotaPermit,
    /// Of the further requests, if it is not alone in its connection.
    _further: QuotaPermit,
}

// === impl Budgets ===

impl Budgets {
    /// For a process that can use so many bytes of memory.
    pub fn new(memory: u64, connections_per_client: usize) -> Arc<Self> {
        let memory = memory.clamp(MIN_MEMORY, MAX_MEMORY);
        let part = |share: u64| usize::try_from(memory / share).unwrap_or(usize::MAX);
        let (bytes, connections) = (part(BYTES_SHARE), part(CONNECTIONS_SHARE) / CONNECTION_COST);
        let public = (connections - connections / ADMIN_SHARE).min(MAX_CONNECTIONS);
        let admin = (connections / ADMIN_SHARE).min(MAX_CONNECTIONS);
        let further = bytes / FURTHER_SHARE;
        let larger = bytes - further;
        Arc::new(Self {
            request_bytes: Quota::new(larger, larger / CLIENT_SHARE, larger / SITE_SHARE),
            further_requests: Quota::new(further, further / CLIENT_SHARE, further / SITE_SHARE),
            proxy_heads: Quota::new(larger / PROXY_HEADS_SHARE, 0, 0),
            refusals: Refusals::new(public / HELD_SHARE),
            public,
            admin,
            connections_per_client,
        })
    }

    /// The connections of the public listener.
    pub fn public_connections(&self) -> Arc<ConnectionPlaces> {
        self.shared_connections(self.public)
    }

    /// The connections of the listener for callers in the cluster.
    pub fn admin_connections(&self) -> Arc<ConnectionPlaces> {
        self.shared_connections(self.admin)
    }

    fn shared_connections(&self, total: usize) -> Arc<ConnectionPlaces> {
        ConnectionPlaces::new(total, self.connections_per_client.min(total / CLIENT_SHARE), true)
    }

    /// The connections of the operations listener. Its callers are not behind proxies.
    pub fn ops_connections(&self) -> Arc<ConnectionPlaces> {
        ConnectionPlaces::new(OPS_CONNECTIONS, OPS_CONNECTIONS_PER_CLIENT, false)
    }

    pub(super) fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// The bytes of requests beyond what connections pay for.
    #[cfg(test)]
    pub(super) fn request_bytes(&self) -> &Arc<Quota> {
        &self.request_bytes
    }

    /// All bytes of requests that are counted.
    pub(super) fn counted_bytes(&self) -> usize {
        self.request_bytes.used() + self.further_requests.used()
    }

    /// Begins a request. `alone`: it is the connection's only one at this time.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if it, or its header fields, do not fit the budget.
    pub(super) fn request(
        &self,
        client: ClientAddress,
        alone: bool,
        parts: &Parts,
    ) -> Result<RequestMemory, Exhausted> {
        let further = if alone { 0 } else { FURTHER_REQUEST };
        let mut memory = RequestMemory {
            allowance: ALLOWANCE,
            charged: self.request_bytes.empty_permit(Some(client)),
            _further: self.further_requests.try_acquire(Some(client), further)?,
        };
        memory.take(head_bytes(parts))?;
        Ok(memory)
    }
}

/// The size of a request's head, as RFC 9113, 10.5.1 counts it: 32 bytes are added to each field.
fn head_bytes(parts: &Parts) -> usize {
    let path = parts.uri.path_and_query().map_or(0, |path| path.as_str().len());
    parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum::<usize>() + path
}

// === impl RequestMemory ===

impl RequestMemory {
    /// Takes more bytes, before they are read.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if they do not fit the budget.
    pub fn take(&mut self, bytes: usize) -> Result<(), Exhausted> {
        let free = bytes.min(self.allowance);
        self.charged.try_grow(bytes - free)?;
        self.allowance -= free;
        Ok(())
    }
}

// === impl ConnectionPlaces ===

impl ConnectionPlaces {
    pub(super) fn new(total: usize, per_client: usize, exempts_proxies: bool) -> Arc<Self> {
        Arc::new(Self {
            free: Arc::new(Semaphore::new(total)),
            clients: Quota::new(usize::MAX, per_client, (total / SITE_SHARE).max(per_client)),
            exempts_proxies,
        })
    }

    /// Waits for a place: until then, connections wait in the kernel's queue.
    pub(super) async fn free_place(&self) -> OwnedSemaphorePermit {
        Arc::clone(&self.free).acquire_owned().await.expect("the places are never closed")
    }

    /// Gives the place to a connection of that peer.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if the peer has its number of connections.
    pub(super) fn admit(
        &self,
        place: OwnedSemaphorePermit,
        peer: IpAddr,
        is_proxy: bool,
        budgets: &Budgets,
    ) -> Result<ConnectionPlace, Exhausted> {
        let address = ClientAddress::of(peer);
        let client = (!is_proxy || !self.exempts_proxies).then_some(address);
        let place = Place { _place: place, _share: self.clients.try_acquire(client, 1)? };
        Ok(ConnectionPlace {
            free: Arc::clone(&self.free),
            clients: Arc::clone(&self.clients),
            client,
            place: Arc::new(place),
            http2: None,
            head: budgets.request_bytes.empty_permit((!is_proxy).then_some(address)),
            proxy_head: is_proxy.then(|| budgets.proxy_heads.empty_permit(None)),
            has_large_head: false,
        })
    }
}

impl ConnectionPlace {
    /// Takes what an HTTP/2 connection needs beyond one of HTTP/1.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if there is no place for it.
    pub(super) fn become_http2(&mut self) -> Result<(), Exhausted> {
        let more = HTTP2_CONNECTIONS - 1;
        let place = Arc::clone(&self.free).try_acquire_many_owned(more).map_err(|_| Exhausted)?;
        let share = self.clients.try_acquire(self.client, more as usize)?;
        self.http2 = Some(Place { _place: place, _share: share });
        Ok(())
    }

    /// The place, for requests that go on after their connection has ended: a client that hangs up has no more of them.
    pub(super) fn place(&self) -> Arc<Place> {
        Arc::clone(&self.place)
    }

    /// Takes what an HTTP/1 header block over [`FREE_HEAD`] costs; once for a connection.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if it does not fit the budget.
    pub(super) fn allow_large_head(&mut self) -> Result<(), Exhausted> {
        if !self.has_large_head {
            if let Some(head) = &mut self.proxy_head {
                head.try_grow(LARGE_HEAD)?;
            }
            self.head.try_grow(LARGE_HEAD)?;
            self.has_large_head = true;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn client(last: u8) -> ClientAddress {
        ClientAddress::of([192, 0, 2, last].into())
    }

    fn parts() -> Parts {
        http::Request::post("/v1/shop/email/login").header("host", "a").body(()).unwrap().into_parts().0
    }

    #[test]
    fn connections_and_requests_hold_three_eighths_of_the_memory_at_most() {
        for mib in [64, 256, 1024, 4096] {
            let budgets = Budgets::new(mib << 20, 256);
            let connections = (budgets.public + budgets.admin) * CONNECTION_COST;
            assert_eq!(budgets.counted_bytes(), 0);
            let limit = (mib as usize) * MIB * 3 / 8;
            let mut held = Vec::new();
            for last in 0..=u8::MAX {
                for quota in [&budgets.request_bytes, &budgets.further_requests] {
                    while let Ok(permit) = quota.try_acquire(Some(client(last)), FURTHER_REQUEST) {
                        held.push(permit);
                    }
                }
            }
            let bytes = budgets.counted_bytes();
            assert!(bytes >= limit / 3 && connections + bytes <= limit, "{mib} MiB: {connections} + {bytes}");
        }
    }

    #[test]
    fn held_refusals_leave_half_of_the_public_connections() {
        let now = tokio::time::Instant::now();
        for (mib, connections) in [(64, 358), (256, 1434), (1024, 5734), (4096, 10_000)] {
            let budgets = Budgets::new(mib << 20, 256);
            let places = budgets.public_connections();
            assert_eq!(places.free.available_permits(), connections);
            let hold = |client| budgets.refusals().hold(client, now, now, std::time::Duration::from_secs(5));
            let mut held = Vec::new();
            let mut most_of_client = 0;
            for last in 0..=u8::MAX {
                // Early returns that are not held yet.
                for _ in 0..4 {
                    assert!(hold(client(last)).is_none());
                }
                let of_client: Vec<_> = std::iter::from_fn(|| hold(client(last))).collect();
                most_of_client = most_of_client.max(of_client.len());
                held.extend(of_client);
            }
            assert_eq!(held.len(), connections / 2, "{mib} MiB");
            assert_eq!(most_of_client, connections / 2 / 8, "{mib} MiB");
        }
    }

    #[test]
    fn impatient_clients_at_256_addresses_are_all_held() {
        let now = tokio::time::Instant::now();
        let budgets = Budgets::new(256 << 20, 256);
        let hold = |last| budgets.refusals().hold(client(last), now, now, std::time::Duration::from_secs(5));
        let held: Vec<_> = (0..=u8::MAX).filter_map(|last| (0..5).find_map(|_| hold(last))).collect();
        assert_eq!(held.len(), 256);
    }

    #[test]
    fn an_ordinary_request_needs_nothing_of_a_budget_that_is_used_up() {
        let budgets = Budgets::new(256 << 20, 256);
        let _all = budgets.request_bytes.try_acquire(None, 16 * MIB).unwrap();
        // The second is a further one of an HTTP/2 connection.
        for alone in [true, false] {
            let mut login = budgets.request(client(1), alone, &parts()).unwrap();
            login.take(4096).unwrap();
            assert_eq!(login.take(8192), Err(Exhausted), "a larger one does");
        }
    }

    #[test]
    fn slow_bodies_in_shared_connections_stop_no_ordinary_request() {
        let budgets = Budgets::new(256 << 20, 256);
        let mut slow = Vec::new();
        for last in 0..8 {
            let begin = || {
                let mut memory = budgets.request(client(last), false, &parts()).ok()?;
                memory.take(64 * 1024).ok().map(|()| memory)
            };
            slow.extend(std::iter::from_fn(begin));
        }
        assert!(slow.len() > 280, "the budget of bodies is used up");
        for last in 0..16 {
            let mut login = budgets.request(client(last), false, &parts()).unwrap();
            login.take(4096).unwrap();
        }
    }

    #[test]
    fn one_client_can_have_an_eighth_of_the_further_requests() {
        let budgets = Budgets::new(256 << 20, 256);
        let more =
            |last| std::iter::from_fn(|| budgets.request(client(last), false, &parts()).ok()).collect::<Vec<_>>();
        let first = more(1);
        assert_eq!((first.len(), more(2).len()), (128, 128));
        drop(first);
        assert!(budgets.request(client(1), false, &parts()).is_ok());
    }

    #[test]
    fn eight_clients_are_needed_to_use_the_request_bytes_up() {
        let budgets = Budgets::new(256 << 20, 256);
        let mut held = Vec::new();
        for last in 0..7 {
            loop {
                let mut memory = budgets.request(client(last), true, &parts()).unwrap();
                if memory.take(64 * 1024).is_err() {
                    break;
                }
                held.push(memory);
            }
        }
        let mut other = budgets.request(client(9), true, &parts()).unwrap();
        other.take(64 * 1024).unwrap();
        assert!(held.len() < 300);
    }

    #[tokio::test]
    async fn large_heads_from_proxies_leave_room_for_bodies() {
        let budgets = Budgets::new(256 << 20, 256);
        let places = budgets.public_connections();
        let mut connections = Vec::new();
        loop {
            let place = places.free_place().await;
            let mut connection = places.admit(place, [10, 0, 0, 1].into(), true, &budgets).unwrap();
            if connection.allow_large_head().is_err() {
                break;
            }
            connections.push(connection);
        }
        // Of 8 MiB, 56 KiB each.
        assert_eq!(connections.len(), 146);
        for last in 0..4 {
            let mut other = places.admit(places.free_place().await, [192, 0, 2, last].into(), false, &budgets).unwrap();
            other.allow_large_head().unwrap();
            let mut body = budgets.request(client(last), true, &parts()).unwrap();
            body.take(64 * 1024).unwrap();
        }
        // A connection that ends gives back what it has.
        connections.pop();
        let mut next = places.admit(places.free_place().await, [10, 0, 0, 1].into(), true, &budgets).unwrap();
        next.allow_large_head().unwrap();
        assert!(connections[0].allow_large_head().is_ok(), "one that has a large head already");
    }

    #[tokio::test]
    async fn a_proxy_can_have_any_number_of_connections_but_no_other_client() {
        let budgets = Budgets::new(256 << 20, 3);
        let peer = IpAddr::from([10, 0, 0, 1]);
        for (places, is_proxy, most) in
            [(budgets.public_connections(), false, 3), (budgets.public_connections(), true, 5)]
        {
            let mut held = Vec::new();
            while held.len() < 5 {
                match places.admit(places.free_place().await, peer, is_proxy, &budgets) {
                    Ok(place) => held.push(place),
                    Err(Exhausted) => break,
                }
            }
            assert_eq!(held.len(), most);
        }
        let places = ConnectionPlaces::new(8, 8, true);
        let mut first = places.admit(places.free_place().await, peer, false, &budgets).unwrap();
        let mut second = places.admit(places.free_place().await, peer, false, &budgets).unwrap();
        first.become_http2().unwrap();
        assert!(second.become_http2().is_err(), "HTTP/2 costs five places");
        drop(first);
        second.become_http2().unwrap();
    }
}
