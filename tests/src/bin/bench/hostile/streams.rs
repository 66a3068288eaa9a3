//! HTTP/2 connections with many unfinished requests each.
//!
//! 200 client addresses have one connection each, with a hundred requests that stop after 60 KiB of their bodies: more
//! than 1 GiB in total. The clients respond to pings, so that the server does not close the connections.
//!
//! Attacks the server's memory budget for request bodies, and the time that a connection with many unfinished bodies
//! can stay open.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::Result;
use bytes::Bytes;
use h2::client::SendRequest;
use http::Request;
use latchkey_tests::{builders::App, stack::Stack};
use tokio::{net::TcpSocket, task::JoinSet, time::sleep};

use super::{
    attack::ServerAttack,
    attackers::{ResponseCounts, address},
};
use crate::measurements::Bound;

const CONNECTIONS: u32 = 200;
/// The number of streams that the server allows per connection.
const STREAMS: usize = 100;
const BODY_BYTES: usize = 60 * 1024;
const PAUSE: Duration = Duration::from_millis(100);

pub(super) async fn run(duration: Duration) -> Result<Vec<Bound>> {
    let app = App::new("attacked").namespace("attacker");
    let mut trial = ServerAttack::start(Stack::builder().app(&app), duration).await?;
    trial.measure_baseline().await?;
    let (server, counts) = (trial.server(), trial.counts.clone());
    let url = format!("http://{server}/v1/{}/email/login", app.id());
    trial
        .run_attack(async move {
            for number in 0..CONNECTIONS {
                let (url, counts) = (url.clone(), counts.clone());
                tokio::spawn(async move {
                    loop {
                        if run_unfinished_streams(server, address(number), &url, &counts).await.is_err() {
                            counts.count("connection ended");
                        }
                        sleep(PAUSE).await;
                    }
                });
            }
        })
        .await
}

/// Sends unfinished requests in all streams of one connection, until the connection ends.
async fn run_unfinished_streams(server: SocketAddr, from: IpAddr, url: &str, counts: &ResponseCounts) -> Result<()> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::new(from, 0))?;
    let (requests, connection) = h2::client::handshake(socket.connect(server).await?).await?;
    counts.count("connected");
    let mut streams = JoinSet::new();
    for _ in 0..STREAMS {
        streams.spawn(send_unfinished(requests.clone(), url.to_owned(), counts.clone()));
    }
    // Reads from the connection and responds to pings. The streams end with the connection.
    Ok(connection.await?)
}

/// Sends one unfinished request after the other, each in a new stream.
async fn send_unfinished(requests: SendRequest<Bytes>, url: String, counts: ResponseCounts) -> Result<()> {
    static PART: [u8; BODY_BYTES] = [b' '; BODY_BYTES];
    loop {
        let mut ready = requests.clone().ready().await?;
        let request = Request::post(&url).header("content-type", "application/json").body(())?;
        let (response, mut body) = ready.send_request(request, false)?;
        let call = async {
            body.send_data(Bytes::from_static(&PART), false)?;
            response.await
        };
        match call.await {
            Ok(response) => counts.count(response.status().as_u16()),
            Err(_) => counts.count("stream ended"),
        }
        sleep(PAUSE).await;
    }
}
