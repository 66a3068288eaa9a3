//! An HTTP proxy for CONNECT requests (RFC 9110, 9.3.6). For each host that the test names, the proxy opens tunnels to
//! the socket address that the test gives. The proxy records the requests.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use anyhow::Result;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, copy_bidirectional},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

use crate::process;

/// A running proxy. It accepts no more connections after this value is dropped.
pub struct TunnelProxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

struct Shared {
    hosts: HashMap<String, SocketAddr>,
    requests: Mutex<Vec<ConnectRequest>>,
}

/// A CONNECT request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectRequest {
    /// `CONNECT host:port HTTP/1.1`
    pub request_line: String,
    /// The headers, by their name in lower case.
    pub headers: HashMap<String, String>,
}

// === impl TunnelProxy ===

impl TunnelProxy {
    /// Starts a proxy that opens tunnels for these hosts, each to its socket address. The proxy ignores the port in a
    /// request. For other hosts it responds 502.
    pub async fn start(hosts: HashMap<String, SocketAddr>) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared { hosts, requests: Mutex::default() });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Ok(Self { addr, shared, accepting })
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<ConnectRequest> {
        process::lock(&self.shared.requests).clone()
    }
}

impl Drop for TunnelProxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        tokio::spawn(async move { drop(serve(BufReader::new(stream), &shared).await) });
    }
}

async fn serve(mut client: BufReader<TcpStream>, shared: &Shared) -> io::Result<()> {
    let line = read_line(&mut client).await?;
    let mut headers = HashMap::new();
    loop {
        let header = read_line(&mut client).await?;
        let Some((name, value)) = header.split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    process::lock(&shared.requests).push(ConnectRequest { request_line: line.clone(), headers });
    let authority = line.strip_prefix("CONNECT ").and_then(|rest| rest.split_once(' ')).map(|(authority, _)| authority);
    let host = authority.and_then(|authority| authority.rsplit_once(':')).map(|(host, _)| host);
    let Some(upstream) = host.and_then(|host| shared.hosts.get(host)) else {
        return client.write_all(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n").await;
    };
    let mut upstream = TcpStream::connect(upstream).await?;
    client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
    copy_bidirectional(&mut client, &mut upstream).await.map(drop)
}

async fn read_line(stream: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    Ok(line.trim_end().to_owned())
}
