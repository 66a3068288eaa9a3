//! Connections with requests that do not end.
//!
//! The number of connections is limited, and a request uses memory from its first byte. The limits of an App cannot
//! help, because they apply only to complete requests.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::Result;
use bytes::{BufMut, Bytes, BytesMut};
use latchkey_tests::{builders::App, stack::Stack};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpSocket,
    time::sleep,
};

use super::{
    attack::ServerAttack,
    attackers::{ResponseCounts, address, cap_connections},
};
use crate::measurements::Bound;

/// Number of client addresses. Each has a few connections, as in a botnet.
const ADDRESSES: u32 = 1_000;
/// Number of unfinished bodies. With 60 KiB each, they have 240 MiB in total.
const BODY_CONNECTIONS: u32 = 4_096;
const BODY_BYTES: usize = 60 * 1024;
/// Number of unfinished heads. With 30 KiB each, they have 240 MiB in total.
const HEAD_CONNECTIONS: u32 = 8_192;
const HEAD_BYTES: usize = 30 * 1024;
/// More connections than the server accepts with its memory limit, but few for each of 1,000 client addresses.
const SILENT_CONNECTIONS: u32 = 8_192;
/// More connections than a listener of the server accepts.
const IDLE_CONNECTIONS: u32 = 10_500;
/// Pause before a new connection. Without it, thousands of clients would send 100,000 requests per second.
const PAUSE: Duration = Duration::from_millis(100);

/// Thousands of POST requests that stop after 60 KiB of their bodies, four or five from each of 1,000 client addresses.
///
/// Attacks the server's memory budget for request bodies.
pub(super) async fn slow_bodies(duration: Duration) -> Result<Vec<Bound>> {
    let request = |app: &str| {
        let mut bytes = BytesMut::new();
        let length = BODY_BYTES + 1;
        bytes.put_slice(
            format!(
                "POST /v1/{app}/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
                 Content-Length: {length}\r\n\r\n"
            )
            .as_bytes(),
        );
        bytes.put_bytes(b' ', BODY_BYTES);
        bytes.freeze()
    };
    attack(duration, BODY_CONNECTIONS, |number| address(number % ADDRESSES), request).await
}

/// Thousands of requests that stop after 30 KiB of their headers, eight or nine from each of 1,000 client addresses.
///
/// Attacks the server's memory budget for large request heads.
pub(super) async fn slow_heads(duration: Duration) -> Result<Vec<Bound>> {
    let request = |app: &str| {
        let mut bytes = BytesMut::new();
        bytes.put_slice(format!("POST /v1/{app}/email/login HTTP/1.1\r\nHost: a\r\nX-Long: ").as_bytes());
        bytes.put_bytes(b'x', HEAD_BYTES);
        bytes.freeze()
    };
    attack(duration, HEAD_CONNECTIONS, |number| address(number % ADDRESSES), request).await
}

/// Thousands of connections without a request, eight or nine from each of 1,000 client addresses.
///
/// Attacks the connection slots: clients that send nothing must not keep other clients out.
pub(super) async fn silent(duration: Duration) -> Result<Vec<Bound>> {
    attack(duration, SILENT_CONNECTIONS, |number| address(number % ADDRESSES), |_| Bytes::new()).await
}

/// One client address opens as many connections as it can, and sends the beginning of a request on each.
///
/// Attacks the connection limit: one client must not use all connections.
pub(super) async fn one_address(duration: Duration) -> Result<Vec<Bound>> {
    let request = |_: &str| Bytes::from_static(b"POST /v1/");
    attack(duration, IDLE_CONNECTIONS, |_| address(0), request).await
}

async fn attack(
    duration: Duration,
    connections: u32,
    from: impl Fn(u32) -> IpAddr + Send + 'static,
    request: impl Fn(&str) -> Bytes,
) -> Result<Vec<Bound>> {
    let app = App::new("attacked").namespace("attacker");
    let mut trial = ServerAttack::start(Stack::builder().app(&app), duration).await?;
    trial.measure_baseline().await?;
    let (server, counts) = (trial.server(), trial.counts.clone());
    let (request, count) = (request(app.id()), cap_connections(connections));
    trial
        .run_attack(async move {
            for number in 0..count {
                tokio::spawn(send_partial_requests(server, from(number), request.clone(), counts.clone()));
            }
        })
        .await
}

/// In a loop, sends a part of a request and waits until the server responds or closes the connection.
async fn send_partial_requests(server: SocketAddr, from: IpAddr, part: Bytes, counts: ResponseCounts) {
    loop {
        match send_partial_request(server, from, &part, &counts).await {
            Ok(Some(status)) => counts.count(status),
            Ok(None) => counts.count("closed"),
            Err(_) => counts.count("refused or reset"),
        }
        sleep(PAUSE).await;
    }
}

/// Sends a part of a request. Returns the status of the response; `None` if the server closes the connection without a
/// response.
async fn send_partial_request(
    server: SocketAddr,
    from: IpAddr,
    part: &Bytes,
    counts: &ResponseCounts,
) -> Result<Option<u16>> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::new(from, 0))?;
    let mut stream = socket.connect(server).await?;
    counts.count("connected");
    // Reads and writes concurrently, because the server can respond before everything is sent, and then stop reading.
    let (mut read, mut write) = stream.split();
    let sending = async {
        write.write_all(part).await?;
        std::future::pending::<std::io::Result<()>>().await
    };
    let mut head = [0; 12];
    let reading = async {
        match read.read_exact(&mut head).await {
            Ok(_) => Ok(std::str::from_utf8(&head[9..]).ok().and_then(|status| status.parse().ok())),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error),
        }
    };
    tokio::select! {
        status = reading => Ok(status?),
        Err(error) = sending => Err(error.into()),
    }
}
