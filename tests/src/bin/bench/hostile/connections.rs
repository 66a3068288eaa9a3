//! Connections whose requests do not end.
//!
//! A request holds memory from its first byte on, and a connection its place; no limit of an App applies before the
//! request is whole.

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
    outsiders::{Tally, address, connections},
    trial::Trial,
};
use crate::figures::Bound;

/// Client addresses of the crowds: a few connections from each, as a botnet has them.
const ADDRESSES: u32 = 1_000;
/// 60 KiB of each body make 240 MiB.
const BODIES: u32 = 4_096;
const BODY: usize = 60 * 1024;
/// 30 KiB of each head make 240 MiB.
const HEADS: u32 = 8_192;
const HEAD: usize = 30 * 1024;
/// More than a listener of the server has.
const HELD: u32 = 10_500;
/// The pause before a new connection after one that ended: without it thousands of clients ask 100,000 times a second.
const PAUSE: Duration = Duration::from_millis(100);

/// Thousands of POSTs that stop after 60 KiB of their bodies, four or five from each of 1,000 addresses.
///
/// Attacks the memory that bodies may take together.
pub(super) async fn slow_bodies(lasts: Duration) -> Result<Vec<Bound>> {
    let request = |app: &str| {
        let mut bytes = BytesMut::new();
        let length = BODY + 1;
        bytes.put_slice(
            format!(
                "POST /v1/{app}/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
                 Content-Length: {length}\r\n\r\n"
            )
            .as_bytes(),
        );
        bytes.put_bytes(b' ', BODY);
        bytes.freeze()
    };
    attack(lasts, BODIES, |number| address(number % ADDRESSES), request).await
}

/// Thousands of requests that stop after 30 KiB of their heads, eight or nine from each of 1,000 addresses.
///
/// Attacks the memory that heads may take together.
pub(super) async fn slow_heads(lasts: Duration) -> Result<Vec<Bound>> {
    let request = |app: &str| {
        let mut bytes = BytesMut::new();
        bytes.put_slice(format!("POST /v1/{app}/email/login HTTP/1.1\r\nHost: a\r\nX-Long: ").as_bytes());
        bytes.put_bytes(b'x', HEAD);
        bytes.freeze()
    };
    attack(lasts, HEADS, |number| address(number % ADDRESSES), request).await
}

/// One client address holds as many connections as it gets, each with the beginning of a head.
///
/// Attacks the places for connections: one client must not have them all.
pub(super) async fn one_address(lasts: Duration) -> Result<Vec<Bound>> {
    let request = |_: &str| Bytes::from_static(b"POST /v1/");
    attack(lasts, HELD, |_| address(0), request).await
}

async fn attack(
    lasts: Duration,
    crowd: u32,
    from: impl Fn(u32) -> IpAddr + Send + 'static,
    request: impl Fn(&str) -> Bytes,
) -> Result<Vec<Bound>> {
    let app = App::new("attacked").namespace("attacker");
    let mut trial = Trial::start(Stack::builder().app(&app), lasts).await?;
    trial.calm().await?;
    let (server, tally) = (trial.server(), trial.tally.clone());
    let (request, crowd) = (request(app.id()), connections(crowd));
    trial
        .attack(async move {
            for number in 0..crowd {
                tokio::spawn(hold(server, from(number), request.clone(), tally.clone()));
            }
        })
        .await
}

/// Sends a part of a request and waits, again and again.
async fn hold(server: SocketAddr, from: IpAddr, part: Bytes, tally: Tally) {
    loop {
        match hold_once(server, from, &part, &tally).await {
            Ok(Some(status)) => tally.count(status),
            Ok(None) => tally.count("closed"),
            Err(_) => tally.count("refused or reset"),
        }
        sleep(PAUSE).await;
    }
}

/// The status that the server answers, if it answers before it closes the connection.
async fn hold_once(server: SocketAddr, from: IpAddr, part: &Bytes, tally: &Tally) -> Result<Option<u16>> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::new(from, 0))?;
    let mut stream = socket.connect(server).await?;
    tally.count("connected");
    // The server may answer while this is sent, and may read no more: both directions at once.
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
        answered = reading => Ok(answered?),
        Err(error) = sending => Err(error.into()),
    }
}
