//! A TCP proxy that injects faults, for Postgres, Redis or the API server. It refuses, stalls, delays and cuts
//! connections, even in the middle of a request.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Notify, watch},
    task::JoinHandle,
};

use crate::{process, smtp::listen};

/// What the proxy does with bytes, in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forwarding {
    Pass,
    /// Delays each chunk.
    Delay(Duration),
    /// No bytes are forwarded. Connections stay open, and new ones are accepted.
    Stall,
}

/// A trigger that cuts one connection, and has no effect after that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trap {
    /// Cuts when a client sends these bytes, before the server receives them.
    Before(Vec<u8>),
    /// Cuts when the server has received these bytes from a client. The response is lost.
    After(Vec<u8>),
    /// Cuts when clients have sent this number of bytes since the trap was set.
    AfterBytes(usize),
}

/// A running proxy. It ends, with all its connections, when this value is dropped.
pub struct Proxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    upstream: SocketAddr,
    flow: watch::Sender<Forwarding>,
    /// How often the connections were cut. All open connections are closed when this number changes.
    cuts: watch::Sender<u64>,
    /// How often [`Proxy::lose`] was called. If this number has changed since a connection was opened, the proxy
    /// silently drops the traffic of this connection.
    lost: AtomicUsize,
    trap: Mutex<Option<Trap>>,
    triggered: Notify,
    connections: AtomicUsize,
}

// === impl Proxy ===

impl Proxy {
    /// Starts a proxy in front of `upstream`, on a free port.
    pub fn start(upstream: SocketAddr) -> Result<Self> {
        let shared = Arc::new(Shared {
            upstream,
            flow: watch::Sender::new(Forwarding::Pass),
            cuts: watch::Sender::new(0),
            lost: AtomicUsize::new(0),
            trap: Mutex::new(None),
            triggered: Notify::new(),
            connections: AtomicUsize::new(0),
        });
        let this = Self { addr: process::free_addr(), shared, accepting: Mutex::new(None) };
        this.accept()?;
        Ok(this)
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Number of connections accepted so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Closes the open connections. New connections work.
    pub fn cut(&self) {
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Like [`Proxy::cut`]. Then waits until no connection is open. Connections that clients open in the meantime
    /// prolong the wait.
    pub async fn cut_and_wait(&self) {
        self.cut();
        self.shared.cuts.closed().await;
    }

    /// Drops all further data of the open connections without closing them, like a router that has lost its state. New
    /// connections work.
    pub fn lose(&self) {
        self.shared.lost.fetch_add(1, Ordering::Relaxed);
    }

    /// Closes the port and the open connections, as if the server was down.
    pub async fn refuse(&self) {
        let accepting = process::lock(&self.accepting).take();
        if let Some(accepting) = accepting {
            accepting.abort();
            drop(accepting.await);
        }
        self.cut();
    }

    pub fn delay(&self, by: Duration) {
        self.shared.flow.send_replace(Forwarding::Delay(by));
    }

    pub fn stall(&self) {
        self.shared.flow.send_replace(Forwarding::Stall);
    }

    pub fn set_trap(&self, trap: Trap) {
        *process::lock(&self.shared.trap) = Some(trap);
    }

    /// Waits until the trap has cut a connection.
    pub async fn trap_triggered(&self) {
        self.shared.triggered.notified().await;
    }

    /// Ends all faults. Stalled connections continue, but the connections of [`Proxy::lose`] stay silent.
    pub fn restore(&self) -> io::Result<()> {
        *process::lock(&self.shared.trap) = None;
        self.shared.flow.send_replace(Forwarding::Pass);
        if process::lock(&self.accepting).is_none() {
            self.accept()?;
        }
        Ok(())
    }

    fn accept(&self) -> io::Result<()> {
        let listener = listen(self.addr)?;
        let shared = Arc::clone(&self.shared);
        *process::lock(&self.accepting) = Some(tokio::spawn(accept_all(listener, shared)));
        Ok(())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(accepting) = process::lock(&self.accepting).take() {
            accepting.abort();
        }
        self.cut();
    }
}

async fn accept_all(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        shared.connections.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::clone(&shared);
        let mut cuts = shared.cuts.subscribe();
        tokio::spawn(async move {
            tokio::select! {
                // Whichever branch ends first, both sides of the connection are dropped and therefore closed.
                _ = shared.forward(client) => {}
                _ = cuts.changed() => {}
            }
        });
    }
}

// === impl Shared ===

impl Shared {
    async fn forward(&self, client: TcpStream) -> io::Result<()> {
        let server = TcpStream::connect(self.upstream).await?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_server, mut to_server) = server.into_split();
        // Set when the trap has triggered; from then on nothing is forwarded to the client.
        let cut = AtomicBool::new(false);
        let lost_at_start = self.lost.load(Ordering::Relaxed);
        tokio::select! {
            ended = self.pump(&mut from_client, &mut to_server, true, &cut, lost_at_start) => ended,
            ended = self.pump(&mut from_server, &mut to_client, false, &cut, lost_at_start) => ended,
        }
    }

    /// Forwards the bytes of one direction, until the connection ends or the trap triggers.
    async fn pump<R, W>(
        &self,
        from: &mut R,
        to: &mut W,
        is_from_client: bool,
        cut: &AtomicBool,
        lost_at_start: usize,
    ) -> io::Result<()>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let mut flow = self.flow.subscribe();
        let mut buffer = vec![0; 64 * 1024];
        // The end of the previous chunks, because the bytes of a trap can span several chunks.
        let mut recent_bytes = Vec::new();
        loop {
            let read = from.read(&mut buffer).await?;
            let lost = self.lost.load(Ordering::Relaxed) > lost_at_start;
            if lost && !is_from_client && read == 0 {
                // While data is lost, the client must not notice that the server closes the connection.
                std::future::pending::<()>().await;
            }
            if read == 0 {
                return Ok(());
            }
            if lost {
                continue;
            }
            let chunk = &buffer[..read];
            let forwarding = *flow.borrow_and_update();
            match forwarding {
                Forwarding::Pass => {}
                Forwarding::Delay(by) => tokio::time::sleep(by).await,
                Forwarding::Stall => drop(flow.wait_for(|flow| *flow != Forwarding::Stall).await),
            }
            if is_from_client {
                if let Some(forwarded) = self.check_trap(&mut recent_bytes, chunk) {
                    cut.store(true, Ordering::Relaxed);
                    to.write_all(&chunk[..forwarded]).await?;
                    to.flush().await?;
                    if forwarded == read {
                        // Gives the server time to read the bytes before it sees the end of the connection.
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    self.triggered.notify_one();
                    return Ok(());
                }
            } else if cut.load(Ordering::Relaxed) {
                // The other direction has set `cut` and is about to end the connection. Nothing more is forwarded to
                // the client.
                continue;
            }
            to.write_all(chunk).await?;
        }
    }

    /// If this chunk triggers the trap, returns the number of the chunk's bytes that are still forwarded.
    fn check_trap(&self, recent_bytes: &mut Vec<u8>, chunk: &[u8]) -> Option<usize> {
        let mut trap = process::lock(&self.trap);
        match trap.as_mut()? {
            Trap::AfterBytes(remaining) if *remaining > chunk.len() => {
                *remaining -= chunk.len();
                None
            }
            Trap::AfterBytes(remaining) => {
                let forwarded = *remaining;
                *trap = None;
                Some(forwarded)
            }
            Trap::Before(pattern) | Trap::After(pattern) => {
                let pattern = pattern.clone();
                let recent_length = recent_bytes.len();
                recent_bytes.extend_from_slice(chunk);
                let found = recent_bytes.windows(pattern.len()).position(|window| window == pattern);
                let Some(position) = found else {
                    let discarded = recent_bytes.len().saturating_sub(pattern.len().saturating_sub(1));
                    recent_bytes.drain(..discarded);
                    return None;
                };
                let forwarded = match trap.take() {
                    Some(Trap::After(_)) => chunk.len(),
                    _ => position.saturating_sub(recent_length),
                };
                recent_bytes.clear();
                Some(forwarded)
            }
        }
    }
}
