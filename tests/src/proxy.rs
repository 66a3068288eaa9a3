//! A TCP proxy in front of Postgres or Redis that fails on request: refuses, stalls, delays, and cuts connections, also
//! in the middle of what a client says.

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

/// What happens to bytes, in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Pass,
    /// Each piece is held for so long.
    Delay(Duration),
    /// Nothing moves; connections stay, new ones are taken.
    Stall,
}

/// A trap that cuts one connection, and is then gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trap {
    /// When a client sends this, before the server gets it.
    Before(Vec<u8>),
    /// When a client has sent this and the server has got it; the answer is lost.
    After(Vec<u8>),
    /// After so many more bytes from clients.
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
    flow: watch::Sender<Flow>,
    /// Raised to cut what is open.
    epoch: watch::Sender<u64>,
    /// Raised to lose in silence what is open.
    lost: AtomicUsize,
    trap: Mutex<Option<Trap>>,
    sprung: Notify,
    connections: AtomicUsize,
}

// === impl Proxy ===

impl Proxy {
    /// In front of that address, on a free port.
    pub fn start(upstream: SocketAddr) -> Result<Self> {
        let shared = Arc::new(Shared {
            upstream,
            flow: watch::Sender::new(Flow::Pass),
            epoch: watch::Sender::new(0),
            lost: AtomicUsize::new(0),
            trap: Mutex::new(None),
            sprung: Notify::new(),
            connections: AtomicUsize::new(0),
        });
        let this = Self { addr: process::free_addr(), shared, accepting: Mutex::new(None) };
        this.accept()?;
        Ok(this)
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Connections taken so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Cuts what is open; new connections are served.
    pub fn cut(&self) {
        self.shared.epoch.send_modify(|epoch| *epoch += 1);
    }

    /// As `cut`, and waits until all that was open is closed. What is new meanwhile is waited for too.
    pub async fn cut_off(&self) {
        self.cut();
        self.shared.epoch.closed().await;
    }

    /// What is open stays open and carries nothing any more, as where a router forgets it; new connections are served.
    pub fn lose(&self) {
        self.shared.lost.fetch_add(1, Ordering::Relaxed);
    }

    /// Closes the port and cuts what is open: the server is gone.
    pub async fn refuse(&self) {
        let accepting = process::lock(&self.accepting).take();
        if let Some(accepting) = accepting {
            accepting.abort();
            drop(accepting.await);
        }
        self.cut();
    }

    pub fn delay(&self, by: Duration) {
        self.shared.flow.send_replace(Flow::Delay(by));
    }

    pub fn stall(&self) {
        self.shared.flow.send_replace(Flow::Stall);
    }

    pub fn set_trap(&self, trap: Trap) {
        *process::lock(&self.shared.trap) = Some(trap);
    }

    /// Until the trap has cut a connection.
    pub async fn sprung(&self) {
        self.shared.sprung.notified().await;
    }

    /// Everything as it should be. Connections that were stalled go on.
    pub fn restore(&self) -> io::Result<()> {
        *process::lock(&self.shared.trap) = None;
        self.shared.flow.send_replace(Flow::Pass);
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
        let mut epoch = shared.epoch.subscribe();
        tokio::spawn(async move {
            tokio::select! {
                // However it ends, both sides are closed.
                _ = shared.carry(client) => {}
                _ = epoch.changed() => {}
            }
        });
    }
}

// === impl Shared ===

impl Shared {
    async fn carry(&self, client: TcpStream) -> io::Result<()> {
        let server = TcpStream::connect(self.upstream).await?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_server, mut to_server) = server.into_split();
        // Raised when the trap has sprung: from then on the client hears nothing.
        let cut = AtomicBool::new(false);
        let born = self.lost.load(Ordering::Relaxed);
        tokio::select! {
            ended = self.pump(&mut from_client, &mut to_server, true, &cut, born) => ended,
            ended = self.pump(&mut from_server, &mut to_client, false, &cut, born) => ended,
        }
    }

    async fn pump<R, W>(
        &self,
        from: &mut R,
        to: &mut W,
        of_client: bool,
        cut: &AtomicBool,
        born: usize,
    ) -> io::Result<()>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let mut flow = self.flow.subscribe();
        let mut buffer = vec![0; 64 * 1024];
        // The end of the piece before, in case a pattern lies across two.
        let mut before = Vec::new();
        loop {
            let read = from.read(&mut buffer).await?;
            let lost = self.lost.load(Ordering::Relaxed) > born;
            if lost && !of_client && read == 0 {
                // The client does not hear of the end either.
                std::future::pending::<()>().await;
            }
            if read == 0 {
                return Ok(());
            }
            if lost {
                continue;
            }
            let piece = &buffer[..read];
            let now = *flow.borrow_and_update();
            match now {
                Flow::Pass => {}
                Flow::Delay(by) => tokio::time::sleep(by).await,
                Flow::Stall => drop(flow.wait_for(|flow| *flow != Flow::Stall).await),
            }
            if of_client {
                if let Some(passes) = self.spring(&mut before, piece) {
                    cut.store(true, Ordering::Relaxed);
                    to.write_all(&piece[..passes]).await?;
                    to.flush().await?;
                    if passes == read {
                        // The server is to have read it before it sees the end of the connection.
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    self.sprung.notify_one();
                    return Ok(());
                }
            } else if cut.load(Ordering::Relaxed) {
                // The other direction ends this connection.
                continue;
            }
            to.write_all(piece).await?;
        }
    }

    /// Whether the trap cuts here, and how many bytes of the piece still pass.
    fn spring(&self, before: &mut Vec<u8>, piece: &[u8]) -> Option<usize> {
        let mut trap = process::lock(&self.trap);
        match trap.as_mut()? {
            Trap::AfterBytes(left) if *left > piece.len() => {
                *left -= piece.len();
                None
            }
            Trap::AfterBytes(left) => {
                let passes = *left;
                *trap = None;
                Some(passes)
            }
            Trap::Before(pattern) | Trap::After(pattern) => {
                let pattern = pattern.clone();
                let seen_before = before.len();
                before.extend_from_slice(piece);
                let found = before.windows(pattern.len()).position(|window| window == pattern);
                let Some(at) = found else {
                    let keep = before.len().saturating_sub(pattern.len().saturating_sub(1));
                    before.drain(..keep);
                    return None;
                };
                let passes = match trap.take() {
                    Some(Trap::After(_)) => piece.len(),
                    _ => at.saturating_sub(seen_before),
                };
                before.clear();
                Some(passes)
            }
        }
    }
}
