//! Budgets for the memory that connections and requests from outside can hold. They are calculated from the memory
//! limit of the process. They are checked before a connection is served, and before a large header block or a body is
//! read. One client address can hold only a part of each budget.
//!
//! A constant `*_DIVISOR` with the value *n* stands for one *n*-th of a whole.

use std::{net::IpAddr, sync::Arc, time::Duration};

use http::request::Parts;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::{
    open_connections::{OpenConnection, OpenConnections},
    quota::{Exhausted, Quota, QuotaPermit},
    refusals::Refusals,
    serve::MAX_HEADER_BYTES,
    timeouts::ConnectionState,
};
use crate::domain::client::ClientAddress;

/// Connections get a quarter of the memory limit and request bytes an eighth. With a limit of 256 MiB, a server with
/// two CPUs needs 80 MiB for itself and 64 MiB for its copies of the Apps' documents. Of the remaining 112 MiB, these
/// budgets use 96, the bodies of imports 8, and refusals that are held without their connection 8.
const CONNECTIONS_DIVISOR: u64 = 4;
const REQUEST_BYTES_DIVISOR: u64 = 8;
/// The bodies of imports have a separate budget: one thirty-second of the memory limit.
const IMPORT_BYTES_DIVISOR: u64 = 32;
/// Minimum of the budget for the bodies of imports, in bytes: two bodies of the maximum size.
const MIN_IMPORT_BYTES: usize = 8 << 20;
/// One client address can hold at most an eighth of each budget: it takes at least eight client addresses to exhaust a
/// budget.
const CLIENT_DIVISOR: usize = 8;
/// The client addresses of one IPv6 /48 can together hold at most half of each budget. The other half stays for other
/// clients.
const SITE_DIVISOR: usize = 2;
/// Half of the request bytes are for additional concurrent requests on HTTP/2 connections. Slow bodies cannot use this
/// half. Otherwise slow bodies could block all logins behind a proxy that sends many requests over one connection.
const FURTHER_REQUESTS_DIVISOR: usize = 2;
/// Large header blocks from trusted proxies can use at most half of the request bytes that are not for additional
/// requests. No limit per client applies to such a block, because the client is not known while the block is read. The
/// block is counted until the connection of the proxy ends.
const PROXY_HEADS_DIVISOR: usize = 2;
/// An eighth of the connections is reserved for the administration listener and its callers in the cluster. Clients
/// from outside the cluster cannot use these connections.
const ADMIN_DIVISOR: usize = 8;
/// Refusals that are held with their connection can use at most half of the public connections, because over HTTP/1
/// a held refusal occupies its connection. The other half stays for requests that are not refused. This is also true if
/// all connections come from trusted proxies, which have no limit per address.
const HELD_REFUSALS_DIVISOR: usize = 2;
/// Refusals that are held without their connection get one thirty-second of the memory limit.
const PARKED_DIVISOR: u64 = 32;
/// Cost of a refusal that is held without its connection, in bytes: its task with a timer, the socket, and the bytes of
/// the response.
const PARKED_COST: usize = 2 * 1024;
/// A smaller memory limit is replaced by this number of bytes. Only tests have a smaller limit.
const MIN_MEMORY: u64 = 64 << 20;
/// A larger memory limit is replaced by this number of bytes, because a server does not need more connections.
const MAX_MEMORY: u64 = 4 << 30;

/// Cost of an HTTP/1 connection with a request, in bytes: hyper's two buffers of 8 KiB each, tasks and state, and
/// [`ALLOWANCE`]. Measured: 27 KB when idle after a request, in a debug build.
const CONNECTION_COST: usize = 40 * 1024;
/// Maximum number of connections of a listener, even with a large memory limit: each connection also needs a file
/// descriptor.
const MAX_CONNECTIONS: usize = 10_000;
/// Cost of an HTTP/2 connection in connection slots (200 KiB in total). It covers a window of 64 KiB of unread bodies,
/// a header block of 32 KiB that is being read, the decoded form of this block, a frame of 16 KiB in each direction,
/// and the header compression table.
const HTTP2_CONNECTION_SLOTS: u32 = 5;

/// The cost of a connection includes a request of up to this size (header fields and body together), in bytes. An
/// ordinary login is smaller than 2 KiB, so it needs nothing from the budget of request bytes. It works even while an
/// attacker exhausts that budget.
const ALLOWANCE: usize = 8 * 1024;
/// Cost of each additional concurrent request on an HTTP/2 connection, in bytes: its tasks and [`ALLOWANCE`].
const FURTHER_REQUEST_COST: usize = 16 * 1024;
/// The cost of a connection includes an HTTP/1 header block of up to this size, in bytes: hyper's buffer is initially 8
/// KiB.
pub(super) const FREE_HEAD: usize = 8 * 1024;
/// Additional cost of a header block that is larger than [`FREE_HEAD`], in bytes. hyper's buffer can grow to twice
/// [`MAX_HEADER_BYTES`], and does not shrink.
const LARGE_HEAD_COST: usize = 2 * MAX_HEADER_BYTES - FREE_HEAD;

/// Maximum number of connections of the operations listener. Kubelet, Prometheus and the operators need fewer than ten.
const OPS_CONNECTIONS: usize = 64;
/// Maximum number of connections of one client address on the operations listener. Each client needs only a few.
const OPS_CONNECTIONS_PER_CLIENT: usize = 16;
/// While no slot is free, how often the server checks whether it can close a waiting connection.
const SLOT_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// The budgets of one process.
#[derive(Debug)]
pub struct Budgets {
    request_bytes: Arc<Quota>,
    further_requests: Arc<Quota>,
    /// The budget for the bodies of imports.
    import_bytes: Arc<Quota>,
    /// The budget for large header blocks from trusted proxies. Their bytes are also counted in `request_bytes`.
    proxy_heads: Arc<Quota>,
    refusals: Refusals,
    /// Connection slots of the public listener.
    public: usize,
    /// Connection slots of the administration listener.
    admin: usize,
    connections_per_client: usize,
}

/// The connection slots of a listener. One slot stands for [`CONNECTION_COST`] bytes.
#[derive(Debug)]
pub struct ConnectionSlots {
    semaphore: Arc<Semaphore>,
    clients: Arc<Quota>,
    open: Arc<OpenConnections>,
    /// Whether trusted proxies are exempt from the limit per client: their connections carry the requests of many
    /// clients.
    exempts_proxies: bool,
}

/// The slots and the request bytes that one connection holds.
#[derive(Debug)]
pub struct ConnectionPermit {
    semaphore: Arc<Semaphore>,
    clients: Arc<Quota>,
    open: Arc<OpenConnections>,
    peer: ClientAddress,
    /// The peer, unless it is a proxy whose connections carry the requests of many clients.
    client: Option<ClientAddress>,
    slot: Arc<SlotPermit>,
    /// The additional slots of an HTTP/2 connection.
    http2_slots: Option<SlotPermit>,
    /// Request bytes for a large header block.
    head: QuotaPermit,
    /// If the peer is a trusted proxy: the permit of `Budgets::proxy_heads` for the bytes of `head`.
    proxy_head: Option<QuotaPermit>,
    has_large_head: bool,
}

/// Slots of a listener. They also count against the limit of the client address. Dropping the permit releases them.
#[derive(Debug)]
pub struct SlotPermit {
    _slot: OwnedSemaphorePermit,
    _client_share: QuotaPermit,
}

/// The memory that one request holds.
#[derive(Debug)]
pub struct RequestMemory {
    /// The part of [`ALLOWANCE`] that is not used yet.
    allowance: usize,
    permit: QuotaPermit,
    /// A permit of `Budgets::import_bytes`.
    import: QuotaPermit,
    /// A permit of `Budgets::further_requests`, if the request is not alone on its connection.
    _further: QuotaPermit,
}

// === impl Budgets ===

impl Budgets {
    /// Budgets for a process with a memory limit of `memory` bytes.
    pub fn new(memory: u64, connections_per_client: usize) -> Arc<Self> {
        let memory = memory.clamp(MIN_MEMORY, MAX_MEMORY);
        let part = |divisor: u64| usize::try_from(memory / divisor).unwrap_or(usize::MAX);
        let (bytes, connections) = (part(REQUEST_BYTES_DIVISOR), part(CONNECTIONS_DIVISOR) / CONNECTION_COST);
        let public = (connections - connections / ADMIN_DIVISOR).min(MAX_CONNECTIONS);
        let admin = (connections / ADMIN_DIVISOR).min(MAX_CONNECTIONS);
        let further = bytes / FURTHER_REQUESTS_DIVISOR;
        let remaining = bytes - further;
        Arc::new(Self {
            request_bytes: Quota::new(remaining, remaining / CLIENT_DIVISOR, remaining / SITE_DIVISOR),
            further_requests: Quota::new(further, further / CLIENT_DIVISOR, further / SITE_DIVISOR),
            import_bytes: Quota::new(part(IMPORT_BYTES_DIVISOR).max(MIN_IMPORT_BYTES), 0, 0),
            proxy_heads: Quota::new(remaining / PROXY_HEADS_DIVISOR, 0, 0),
            refusals: Refusals::new(
                public / HELD_REFUSALS_DIVISOR,
                (part(PARKED_DIVISOR) / PARKED_COST).min(MAX_CONNECTIONS),
            ),
            public,
            admin,
            connections_per_client,
        })
    }

    /// The connection slots of the public listener.
    pub fn public_connections(&self) -> Arc<ConnectionSlots> {
        self.proxied_connections(self.public)
    }

    /// The connection slots of the administration listener.
    pub fn admin_connections(&self) -> Arc<ConnectionSlots> {
        self.proxied_connections(self.admin)
    }

    /// The number of connections of the administration listener.
    pub(super) fn admin_connection_count(&self) -> usize {
        self.admin
    }

    /// The connection slots of a listener that can be behind trusted proxies.
    fn proxied_connections(&self, total: usize) -> Arc<ConnectionSlots> {
        ConnectionSlots::new(total, self.connections_per_client.min(total / CLIENT_DIVISOR), true)
    }

    /// The connection slots of the operations listener. Its clients are not behind proxies.
    pub fn ops_connections(&self) -> Arc<ConnectionSlots> {
        ConnectionSlots::new(OPS_CONNECTIONS, OPS_CONNECTIONS_PER_CLIENT, false)
    }

    pub(super) fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// The quota of the request bytes, without those of additional requests.
    #[cfg(test)]
    pub(super) fn request_bytes(&self) -> &Arc<Quota> {
        &self.request_bytes
    }

    /// Returns the number of request bytes in use, including the bytes of additional requests.
    pub(super) fn counted_bytes(&self) -> usize {
        self.request_bytes.used() + self.further_requests.used()
    }

    /// Counts the memory of a request that begins. `is_alone`: no other request is running on its connection.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if the cost of the request does not fit a budget.
    pub(super) fn begin_request(
        &self,
        client: ClientAddress,
        is_alone: bool,
        parts: &Parts,
    ) -> Result<RequestMemory, Exhausted> {
        let further = if is_alone { 0 } else { FURTHER_REQUEST_COST };
        let mut memory = RequestMemory {
            allowance: ALLOWANCE,
            permit: self.request_bytes.empty_permit(Some(client)),
            import: self.import_bytes.empty_permit(None),
            _further: self.further_requests.try_acquire(Some(client), further)?,
        };
        memory.try_acquire(head_bytes(parts))?;
        Ok(memory)
    }
}

/// Size of the path and the header fields of a request. Each field counts 32 additional bytes, as in RFC 9113, 6.5.2.
fn head_bytes(parts: &Parts) -> usize {
    let path = parts.uri.path_and_query().map_or(0, |path| path.as_str().len());
    parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum::<usize>() + path
}

// === impl RequestMemory ===

impl RequestMemory {
    /// Acquires bytes for the body of an import.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if the bytes do not fit the budget of all imports.
    pub fn try_acquire_import(&mut self, bytes: usize) -> Result<(), Exhausted> {
        self.import.try_grow(bytes)
    }

    /// Acquires more bytes for the request. The bytes of a body are acquired before they are read.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if the bytes do not fit the budget.
    pub fn try_acquire(&mut self, bytes: usize) -> Result<(), Exhausted> {
        let free = bytes.min(self.allowance);
        self.permit.try_grow(bytes - free)?;
        self.allowance -= free;
        Ok(())
    }
}

// === impl ConnectionSlots ===

impl ConnectionSlots {
    pub(super) fn new(total: usize, per_client: usize, exempts_proxies: bool) -> Arc<Self> {
        Arc::new(Self {
            semaphore: Arc::new(Semaphore::new(total)),
            clients: Quota::new(usize::MAX, per_client, (total / SITE_DIVISOR).max(per_client)),
            open: OpenConnections::new(total),
            exempts_proxies,
        })
    }

    /// Waits until a connection slot is free. If few slots are free, closes waiting connections. While this function
    /// waits, new connections stay in the kernel's queue.
    pub(super) async fn acquire_slot(&self) -> OwnedSemaphorePermit {
        loop {
            self.open.make_room(self.semaphore.available_permits());
            let acquired = timeout(SLOT_CHECK_INTERVAL, Arc::clone(&self.semaphore).acquire_owned()).await;
            if let Ok(slot) = acquired {
                return slot.expect("the semaphore is never closed");
            }
        }
    }

    /// Assigns the slot to a connection of the peer.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if the peer, or its IPv6 /48, has its maximum number of connections.
    pub(super) fn admit(
        &self,
        slot: OwnedSemaphorePermit,
        peer: IpAddr,
        is_proxy: bool,
        budgets: &Budgets,
    ) -> Result<ConnectionPermit, Exhausted> {
        let address = ClientAddress::from_ip(peer);
        let client = (!is_proxy || !self.exempts_proxies).then_some(address);
        let slot = SlotPermit { _slot: slot, _client_share: self.clients.try_acquire(client, 1)? };
        Ok(ConnectionPermit {
            semaphore: Arc::clone(&self.semaphore),
            clients: Arc::clone(&self.clients),
            open: Arc::clone(&self.open),
            peer: address,
            client,
            slot: Arc::new(slot),
            http2_slots: None,
            head: budgets.request_bytes.empty_permit((!is_proxy).then_some(address)),
            proxy_head: is_proxy.then(|| budgets.proxy_heads.empty_permit(None)),
            has_large_head: false,
        })
    }
}

impl ConnectionPermit {
    /// Acquires the additional slots of an HTTP/2 connection.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if the slots are not available.
    pub(super) fn become_http2(&mut self) -> Result<(), Exhausted> {
        let more = HTTP2_CONNECTION_SLOTS - 1;
        let slots = Arc::clone(&self.semaphore).try_acquire_many_owned(more).map_err(|_| Exhausted)?;
        let share = self.clients.try_acquire(self.client, more as usize)?;
        self.http2_slots = Some(SlotPermit { _slot: slots, _client_share: share });
        Ok(())
    }

    /// The client address, unless the peer is a proxy whose connections carry the requests of many clients.
    pub(super) fn client(&self) -> Option<ClientAddress> {
        self.client
    }

    /// Allows the listener to close the connection when it is waiting and other connections need its slots.
    pub(super) fn add_to_open(&self, connection: &Arc<ConnectionState>) -> OpenConnection {
        self.open.add(self.peer, self.client.is_none(), Arc::clone(connection))
    }

    /// A shared handle to the slot of the connection. Each request holds one. Requests that continue after their
    /// connection has ended keep the slot occupied, so that a client cannot get more concurrent requests by
    /// disconnecting.
    pub(super) fn slot_permit(&self) -> Arc<SlotPermit> {
        Arc::clone(&self.slot)
    }

    /// Acquires the additional cost of an HTTP/1 header block that is larger than [`FREE_HEAD`], once per connection.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if the cost does not fit the budget.
    pub(super) fn allow_large_head(&mut self) -> Result<(), Exhausted> {
        if !self.has_large_head {
            if let Some(head) = &mut self.proxy_head {
                head.try_grow(LARGE_HEAD_COST)?;
            }
            self.head.try_grow(LARGE_HEAD_COST)?;
            self.has_large_head = true;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::refusals::HoldPlace;

    const MIB: usize = 1 << 20;

    fn client(last: u8) -> ClientAddress {
        ClientAddress::from_ip([192, 0, 2, last].into())
    }

    fn parts() -> Parts {
        http::Request::post("/v1/shop/email/login").header("host", "a").body(()).unwrap().into_parts().0
    }

    #[test]
    fn connections_and_requests_hold_at_most_three_eighths_of_the_memory() {
        for mib in [64, 256, 1024, 4096] {
            let budgets = Budgets::new(mib << 20, 256);
            let connections = (budgets.public + budgets.admin) * CONNECTION_COST;
            assert_eq!(budgets.counted_bytes(), 0);
            let limit = (mib as usize) * MIB * 3 / 8;
            let mut held = Vec::new();
            for last in 0..=u8::MAX {
                for quota in [&budgets.request_bytes, &budgets.further_requests] {
                    while let Ok(permit) = quota.try_acquire(Some(client(last)), FURTHER_REQUEST_COST) {
                        held.push(permit);
                    }
                }
            }
            let bytes = budgets.counted_bytes();
            assert!(bytes >= limit / 3 && connections + bytes <= limit, "{mib} MiB: {connections} + {bytes}");
        }
    }

    #[test]
    fn held_refusals_leave_half_of_the_public_connections_free() {
        let now = tokio::time::Instant::now();
        for (mib, connections) in [(64, 358), (256, 1434), (1024, 5734), (4096, 10_000)] {
            let budgets = Budgets::new(mib << 20, 256);
            let slots = budgets.public_connections();
            assert_eq!(slots.semaphore.available_permits(), connections);
            let hold = |client| {
                budgets.refusals().hold(client, now, now, std::time::Duration::from_secs(5), HoldPlace::Connection)
            };
            let mut held = Vec::new();
            let mut max_held_of_client = 0;
            for last in 0..=u8::MAX {
                // Four refusals are not held: the first one, and three more although the client ignores `Retry-After`.
                for _ in 0..4 {
                    assert!(hold(client(last)).is_none());
                }
                let of_client: Vec<_> = std::iter::from_fn(|| hold(client(last))).collect();
                max_held_of_client = max_held_of_client.max(of_client.len());
                held.extend(of_client);
            }
            assert_eq!(held.len(), connections / 2, "{mib} MiB");
            assert_eq!(max_held_of_client, connections / 2 / 8, "{mib} MiB");
        }
    }

    #[test]
    fn refusals_of_256_clients_that_ignore_retry_after_are_all_held() {
        let now = tokio::time::Instant::now();
        let budgets = Budgets::new(256 << 20, 256);
        let hold = |last| {
            budgets.refusals().hold(client(last), now, now, std::time::Duration::from_secs(5), HoldPlace::Connection)
        };
        let held: Vec<_> = (0..=u8::MAX).filter_map(|last| (0..5).find_map(|_| hold(last))).collect();
        assert_eq!(held.len(), 256);
    }

    #[test]
    fn refusals_that_close_their_connections_are_held_in_a_quota_of_their_own() {
        let now = tokio::time::Instant::now();
        for (mib, most) in [(64, 1024), (256, 4096), (4096, 10_000)] {
            let budgets = Budgets::new(mib << 20, 256);
            let hold =
                |last, place| budgets.refusals().hold(client(last), now, now, std::time::Duration::from_secs(5), place);
            let mut held = Vec::new();
            for last in 0..=u8::MAX {
                held.extend((0..most).filter_map(|_| hold(last, HoldPlace::Socket)));
            }
            assert_eq!(held.len(), most, "{mib} MiB");
            assert!(hold(0, HoldPlace::Connection).is_some(), "{mib} MiB");
        }
    }

    #[test]
    fn an_ordinary_request_works_with_an_exhausted_budget() {
        let budgets = Budgets::new(256 << 20, 256);
        let _all = budgets.request_bytes.try_acquire(None, 16 * MIB).unwrap();
        // The second iteration is an additional request on an HTTP/2 connection.
        for is_alone in [true, false] {
            let mut login = budgets.begin_request(client(1), is_alone, &parts()).unwrap();
            login.try_acquire(4096).unwrap();
            assert_eq!(login.try_acquire(8192), Err(Exhausted), "a larger request needs the budget");
        }
    }

    #[test]
    fn slow_bodies_on_shared_connections_do_not_block_ordinary_requests() {
        let budgets = Budgets::new(256 << 20, 256);
        let mut slow = Vec::new();
        for last in 0..8 {
            let begin = || {
                let mut memory = budgets.begin_request(client(last), false, &parts()).ok()?;
                memory.try_acquire(64 * 1024).ok().map(|()| memory)
            };
            slow.extend(std::iter::from_fn(begin));
        }
        assert!(slow.len() > 280, "the budget for bodies is exhausted");
        for last in 0..16 {
            let mut login = budgets.begin_request(client(last), false, &parts()).unwrap();
            login.try_acquire(4096).unwrap();
        }
    }

    #[test]
    fn one_client_can_use_at_most_an_eighth_of_the_further_requests() {
        let budgets = Budgets::new(256 << 20, 256);
        let more =
            |last| std::iter::from_fn(|| budgets.begin_request(client(last), false, &parts()).ok()).collect::<Vec<_>>();
        let first = more(1);
        assert_eq!((first.len(), more(2).len()), (128, 128));
        drop(first);
        assert!(budgets.begin_request(client(1), false, &parts()).is_ok());
    }

    #[test]
    fn eight_clients_are_needed_to_exhaust_the_request_bytes() {
        let budgets = Budgets::new(256 << 20, 256);
        let mut held = Vec::new();
        for last in 0..7 {
            loop {
                let mut memory = budgets.begin_request(client(last), true, &parts()).unwrap();
                if memory.try_acquire(64 * 1024).is_err() {
                    break;
                }
                held.push(memory);
            }
        }
        let mut other = budgets.begin_request(client(9), true, &parts()).unwrap();
        other.try_acquire(64 * 1024).unwrap();
        assert!(held.len() < 300);
    }

    #[tokio::test]
    async fn large_heads_from_proxies_leave_room_for_bodies() {
        let budgets = Budgets::new(256 << 20, 256);
        let slots = budgets.public_connections();
        let mut connections = Vec::new();
        loop {
            let slot = slots.acquire_slot().await;
            let mut connection = slots.admit(slot, [10, 0, 0, 1].into(), true, &budgets).unwrap();
            if connection.allow_large_head().is_err() {
                break;
            }
            connections.push(connection);
        }
        // Each large head costs 56 KiB. The large heads of all proxies together can cost 8 MiB.
        assert_eq!(connections.len(), 146);
        for last in 0..4 {
            let mut other = slots.admit(slots.acquire_slot().await, [192, 0, 2, last].into(), false, &budgets).unwrap();
            other.allow_large_head().unwrap();
            let mut body = budgets.begin_request(client(last), true, &parts()).unwrap();
            body.try_acquire(64 * 1024).unwrap();
        }
        // A connection that ends releases the bytes of its large head.
        connections.pop();
        let mut next = slots.admit(slots.acquire_slot().await, [10, 0, 0, 1].into(), true, &budgets).unwrap();
        next.allow_large_head().unwrap();
        assert!(connections[0].allow_large_head().is_ok(), "this connection already has a large head");
    }

    #[tokio::test]
    async fn slots_are_limited_per_client_but_not_per_proxy_and_http_2_costs_five_slots() {
        let budgets = Budgets::new(256 << 20, 3);
        let peer = IpAddr::from([10, 0, 0, 1]);
        for (slots, is_proxy, most) in
            [(budgets.public_connections(), false, 3), (budgets.public_connections(), true, 5)]
        {
            let mut held = Vec::new();
            while held.len() < 5 {
                match slots.admit(slots.acquire_slot().await, peer, is_proxy, &budgets) {
                    Ok(permit) => held.push(permit),
                    Err(Exhausted) => break,
                }
            }
            assert_eq!(held.len(), most);
        }
        let slots = ConnectionSlots::new(8, 8, true);
        let mut first = slots.admit(slots.acquire_slot().await, peer, false, &budgets).unwrap();
        let mut second = slots.admit(slots.acquire_slot().await, peer, false, &budgets).unwrap();
        first.become_http2().unwrap();
        assert!(second.become_http2().is_err(), "HTTP/2 costs five slots");
        drop(first);
        second.become_http2().unwrap();
    }
}
