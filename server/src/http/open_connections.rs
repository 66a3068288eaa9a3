//! Closes waiting connections when a listener runs out of connection slots.
//!
//! A connection is waiting if the server can only wait for the client: until it sends a complete request, or reads a
//! response. Without this module, a few clients that send nothing could occupy all slots of a listener until the
//! timeouts end, and nobody else could connect (docs/decisions/0025).

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use parking_lot::Mutex;

use super::timeouts::ConnectionState;
use crate::domain::client::ClientAddress;

/// The listener tries to keep one thirty-second of its slots free.
const RESERVE_DIVISOR: usize = 32;

/// The open connections of a listener.
#[derive(Debug)]
pub struct OpenConnections {
    /// Waiting connections are closed when the number of free slots falls to this number, until twice as many slots are
    /// free. The connections are sorted each time, so they are closed in groups.
    reserve: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    connections: BTreeMap<u64, Entry>,
    /// The number of connections that were selected to be closed and are still open.
    closing: usize,
}

#[derive(Debug)]
struct Entry {
    peer: ClientAddress,
    /// Whether the peer is a proxy that has no limit on its connections.
    is_proxy: bool,
    connection: Arc<ConnectionState>,
}

/// An open connection. It counts as closed when this value is dropped.
#[derive(Debug)]
pub struct OpenConnection {
    listener: Arc<OpenConnections>,
    id: u64,
}

// === impl OpenConnections ===

impl OpenConnections {
    /// `slots`: the number of slots of the listener.
    pub fn new(slots: usize) -> Arc<Self> {
        Arc::new(Self { reserve: slots / RESERVE_DIVISOR, state: Mutex::default() })
    }

    /// `is_proxy`: whether the peer is a proxy that has no limit on its connections.
    pub fn add(
        self: &Arc<Self>,
        peer: ClientAddress,
        is_proxy: bool,
        connection: Arc<ConnectionState>,
    ) -> OpenConnection {
        let mut state = self.state.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.connections.insert(id, Entry { peer, is_proxy, connection });
        OpenConnection { listener: Arc::clone(self), id }
    }

    /// Closes waiting connections if `free`, the number of free slots, is at most the reserve. Proxies lose connections
    /// last, because a proxy may be sending the request of a client at this moment. Otherwise, peers with the most
    /// waiting connections lose connections first. Of each peer, the connection that has been waiting longest is closed
    /// first.
    pub fn make_room(&self, free: usize) {
        let mut state = self.state.lock();
        let soon_free = free + state.closing;
        if soon_free > self.reserve {
            return;
        }
        let mut waiting: Vec<_> =
            state.connections.values().filter_map(|entry| Some((entry.connection.waiting_since()?, entry))).collect();
        waiting.sort_unstable_by_key(|(since, _)| Reverse(*since));
        let mut ranks = HashMap::<ClientAddress, usize>::new();
        // The newest waiting connection of each peer has rank 1, the next one rank 2, and so on.
        let mut ranked: Vec<_> = waiting
            .into_iter()
            .map(|(since, entry)| {
                let rank = ranks.entry(entry.peer).or_default();
                *rank += 1;
                (*rank, since, entry)
            })
            .collect();
        ranked.sort_unstable_by_key(|(rank, since, entry)| (entry.is_proxy, Reverse(*rank), *since));
        ranked.truncate(2 * self.reserve + 1 - soon_free);
        for (.., entry) in &ranked {
            entry.connection.close();
        }
        let selected = ranked.len();
        state.closing += selected;
    }
}

// === impl OpenConnection ===

impl OpenConnection {
    /// Cancels the decision to close the connection, because a complete request has arrived in the meantime.
    pub fn keep(&self) {
        let mut state = self.listener.state.lock();
        if state.connections.get(&self.id).is_some_and(|entry| entry.connection.cancel_close()) {
            state.closing -= 1;
        }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let mut state = self.listener.state.lock();
        if state.connections.remove(&self.id).is_some_and(|entry| entry.connection.must_close()) {
            state.closing -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::advance;

    use super::*;

    /// The last byte of a proxy's address.
    const PROXY: u8 = 250;

    fn client(last: u8) -> ClientAddress {
        ClientAddress::from_ip([192, 0, 2, last].into())
    }

    /// Adds a connection of each of the clients, one second apart.
    async fn open(listener: &Arc<OpenConnections>, clients: &[u8]) -> (Vec<Arc<ConnectionState>>, Vec<OpenConnection>) {
        let (mut states, mut open) = (Vec::new(), Vec::new());
        for last in clients {
            advance(Duration::from_secs(1)).await;
            let state = ConnectionState::new();
            open.push(listener.add(client(*last), *last == PROXY, Arc::clone(&state)));
            states.push(state);
        }
        (states, open)
    }

    fn selected(states: &[Arc<ConnectionState>]) -> Vec<bool> {
        states.iter().map(|state| state.must_close()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn clients_with_many_waiting_connections_lose_them_first_and_the_oldest_first() {
        let listener = OpenConnections::new(64);
        let (states, mut open) = open(&listener, &[1, 2, 2, 2, 3]).await;
        listener.make_room(3);
        assert_eq!(selected(&states), [false; 5], "more slots are free than the reserve of two");
        listener.make_room(2);
        assert_eq!(selected(&states), [true, true, true, false, false]);
        listener.make_room(2);
        assert_eq!(selected(&states), [true, true, true, false, false], "three slots will soon be free");
        open.drain(..3);
        listener.make_room(3);
        assert_eq!(selected(&states), [true, true, true, false, false], "three slots are free");
        listener.make_room(0);
        assert_eq!(selected(&states), [true; 5]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_with_a_complete_request_is_not_closed() {
        let listener = OpenConnections::new(8);
        let (states, mut open) = open(&listener, &[1, 2, 3, 4]).await;
        let mut running: Vec<_> = states.iter().map(ConnectionState::begin_request).collect();
        let incomplete = running[1].incomplete();
        listener.make_room(0);
        assert_eq!(selected(&states), [false, true, false, false], "only the second client has not sent its body");
        drop(incomplete);
        open.remove(1);
        listener.make_room(0);
        assert_eq!(selected(&states), [false, true, false, false], "the requests of the others are complete");
        running[2].response_ready();
        listener.make_room(0);
        assert_eq!(selected(&states), [false, true, true, false], "the third client has not read its response");
    }

    #[tokio::test(start_paused = true)]
    async fn proxies_lose_connections_last() {
        let listener = OpenConnections::new(64);
        let (states, _open) = open(&listener, &[PROXY, PROXY, PROXY, PROXY, 1, 2]).await;
        listener.make_room(2);
        assert_eq!(selected(&states), [true, false, false, false, true, true]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_is_kept_does_not_count_as_closing() {
        let listener = OpenConnections::new(8);
        let (states, open) = open(&listener, &[1, 2]).await;
        listener.make_room(0);
        assert_eq!(selected(&states), [true, false]);
        let _running = states[0].begin_request();
        open[0].keep();
        assert_eq!(selected(&states), [false, false]);
        listener.make_room(0);
        assert_eq!(selected(&states), [false, true], "another connection is closed instead");
    }
}
