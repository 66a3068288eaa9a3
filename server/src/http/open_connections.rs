//! Ends connections whose clients keep the server waiting, if the slots of a listener run out.
//!
//! A client can open a connection and send nothing, or only a part of a request. A few such clients could occupy all
//! slots of a listener until the timeouts end, and nobody else could connect (docs/decisions/0025).

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use parking_lot::Mutex;

use super::timeouts::ConnectionState;
use crate::domain::client::ClientAddress;

/// One thirty-second of the slots is kept free.
const RESERVE_DIVISOR: usize = 32;

/// The open connections of a listener, without those of listed proxies.
#[derive(Debug)]
pub struct OpenConnections {
    /// If at most this number of slots is free, connections are ended until twice this number is free. So the
    /// connections are sorted once for many new connections.
    reserve: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    connections: BTreeMap<u64, (ClientAddress, Arc<ConnectionState>)>,
    /// The number of connections that must end, but have not ended yet.
    ending: usize,
}

/// An open connection. When this is dropped, the connection has ended.
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

    pub fn add(self: &Arc<Self>, client: ClientAddress, connection: Arc<ConnectionState>) -> OpenConnection {
        let mut state = self.state.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.connections.insert(id, (client, connection));
        OpenConnection { listener: Arc::clone(self), id }
    }

    /// If at most the reserve is free, ends connections whose clients keep the server waiting: first those of the
    /// clients with the most such connections, and of each client first the one that has been waiting longest. `free`:
    /// the number of free slots.
    pub fn make_room(&self, free: usize) {
        let mut state = self.state.lock();
        let soon_free = free + state.ending;
        if soon_free > self.reserve {
            return;
        }
        let waiting = state.connections.values();
        let mut waiting: Vec<_> = waiting
            .filter_map(|(client, connection)| Some((connection.waiting_since()?, *client, connection)))
            .collect();
        waiting.sort_unstable_by_key(|(since, ..)| Reverse(*since));
        let mut connections_of_client = HashMap::<ClientAddress, usize>::new();
        let mut ranked: Vec<_> = waiting
            .into_iter()
            .map(|(since, client, connection)| {
                let newer = connections_of_client.entry(client).or_default();
                *newer += 1;
                (Reverse(*newer), since, connection)
            })
            .collect();
        ranked.sort_unstable_by_key(|(newer, since, _)| (*newer, *since));
        ranked.truncate(2 * self.reserve + 1 - soon_free);
        for (.., connection) in &ranked {
            connection.end();
        }
        let ended = ranked.len();
        state.ending += ended;
    }
}

// === impl OpenConnection ===

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let mut state = self.listener.state.lock();
        if state.connections.remove(&self.id).is_some_and(|(_, connection)| connection.must_end()) {
            state.ending -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::advance;

    use super::*;

    fn client(last: u8) -> ClientAddress {
        ClientAddress::from_ip([192, 0, 2, last].into())
    }

    /// Adds a connection of each of the clients, one second apart.
    async fn open(listener: &Arc<OpenConnections>, clients: &[u8]) -> (Vec<Arc<ConnectionState>>, Vec<OpenConnection>) {
        let (mut states, mut open) = (Vec::new(), Vec::new());
        for last in clients {
            advance(Duration::from_secs(1)).await;
            let state = ConnectionState::new();
            open.push(listener.add(client(*last), Arc::clone(&state)));
            states.push(state);
        }
        (states, open)
    }

    fn ended(states: &[Arc<ConnectionState>]) -> Vec<bool> {
        states.iter().map(|state| state.must_end()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn clients_with_many_waiting_connections_lose_them_first_and_the_oldest_first() {
        let listener = OpenConnections::new(64);
        let (states, mut open) = open(&listener, &[1, 2, 2, 2, 3]).await;
        listener.make_room(3);
        assert_eq!(ended(&states), [false; 5], "more slots are free than the reserve of two");
        listener.make_room(2);
        assert_eq!(ended(&states), [true, true, true, false, false]);
        listener.make_room(2);
        assert_eq!(ended(&states), [true, true, true, false, false], "three slots will soon be free");
        open.drain(..3);
        listener.make_room(3);
        assert_eq!(ended(&states), [true, true, true, false, false], "three slots are free");
        listener.make_room(0);
        assert_eq!(ended(&states), [true; 5]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_with_a_complete_request_is_not_ended() {
        let listener = OpenConnections::new(8);
        let (states, mut open) = open(&listener, &[1, 2, 3, 4]).await;
        let mut running: Vec<_> = states.iter().map(ConnectionState::begin_request).collect();
        let incomplete = running[1].incomplete();
        listener.make_room(0);
        assert_eq!(ended(&states), [false, true, false, false], "only the second client has not sent its body");
        drop(incomplete);
        open.remove(1);
        listener.make_room(0);
        assert_eq!(ended(&states), [false, true, false, false], "the requests of the others are complete");
        running[2].response_ready();
        listener.make_room(0);
        assert_eq!(ended(&states), [false, true, true, false], "the third client has not read its response");
    }
}
