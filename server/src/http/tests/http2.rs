//! HTTP/2 without TLS, frame by frame.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream},
    time::timeout,
};

use super::{
    FailingStores, TestServer,
    slow_endpoint::{SlowEndpoint, wait_for},
};
use crate::http::Budgets;

/// Types of HTTP/2 frames, and the flag `ACK` (RFC 9113, 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;

/// The preface and empty SETTINGS (RFC 9113, 3.4 and 6.5).
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// The HEADERS frame of a complete request: GET, http, /openapi.json, authority `a` (RFC 7541, 6.1 and 6.2.2).
pub(super) fn openapi_request_frame(stream: u8) -> Vec<u8> {
    let mut block = vec![0x82, 0x86, 0x04, 13];
    block.extend_from_slice(b"/openapi.json");
    block.extend_from_slice(&[0x01, 1, b'a']);
    // END_STREAM and END_HEADERS.
    [&[0, 0, block.len() as u8, HEADERS, 0x05, 0, 0, 0, stream][..], &block].concat()
}

/// Reads the next frame; `None` at the end of the connection. Has no timeout.
async fn frame_or_end(client: &mut DuplexStream) -> Option<(u8, u8, Vec<u8>)> {
    let mut head = [0; 9];
    client.read_exact(&mut head).await.ok()?;
    let mut payload = vec![0; usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2])];
    client.read_exact(&mut payload).await.ok()?;
    Some((head[3], head[4], payload))
}

/// Reads a frame of HTTP/2 (RFC 9113, 4.1): type, flags and payload.
async fn frame(client: &mut DuplexStream) -> (u8, u8, Vec<u8>) {
    let mut head = [0; 9];
    timeout(Duration::from_secs(20), client.read_exact(&mut head)).await.expect("a frame in time").unwrap();
    let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
    client.read_exact(&mut payload).await.unwrap();
    (head[3], head[4], payload)
}

#[tokio::test]
async fn http_2_gets_a_response_and_a_goaway_on_drain() {
    let server = TestServer::new(FailingStores::Panicking);
    let mut client = server.connect(server.public());
    client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    // GET, http, /openapi.json, authority `a` (RFC 7541, 6.1 and 6.2.2); END_STREAM and END_HEADERS on stream 1.
    let mut block = vec![0x82, 0x86, 0x04, 13];
    block.extend_from_slice(b"/openapi.json");
    block.extend_from_slice(&[0x01, 1, b'a']);
    client.write_all(&[0, 0, block.len() as u8, HEADERS, 0x05, 0, 0, 0, 1]).await.unwrap();
    client.write_all(&block).await.unwrap();
    let header_block = loop {
        let (kind, _, payload) = frame(&mut client).await;
        if kind == HEADERS {
            break payload;
        }
    };
    // 0x88 is the entry 8 of the static table: `:status: 200` (RFC 7541, 6.1 and appendix A).
    assert!(header_block.contains(&0x88), "{header_block:?}");
    server.drain.begin();
    while frame(&mut client).await.0 != GOAWAY {}
}

/// Shortens the idle and GOAWAY timeouts.
fn shorten_timeouts(server: &mut TestServer) {
    server.timeouts.idle = Duration::from_millis(500);
    server.timeouts.goaway = Duration::from_millis(200);
}

/// Answers pings until the connection ends. Returns the types of the received frames.
async fn answer_pings(client: &mut DuplexStream) -> Vec<u8> {
    let mut kinds = Vec::new();
    let answering = async {
        while let Some((kind, flags, payload)) = frame_or_end(client).await {
            kinds.push(kind);
            if kind == PING && flags & ACK == 0 {
                drop(client.write_all(&[&[0, 0, 8, PING, ACK, 0, 0, 0, 0][..], &payload].concat()).await);
            }
        }
    };
    timeout(Duration::from_secs(20), answering).await.expect("closed in time");
    kinds
}

#[tokio::test]
async fn an_idle_http_2_connection_ends_even_if_its_client_answers_pings() {
    let mut server = TestServer::new(FailingStores::Panicking);
    shorten_timeouts(&mut server);
    for sends_request in [false, true] {
        let mut client = server.connect(server.public());
        let began = std::time::Instant::now();
        client.write_all(PREFACE).await.unwrap();
        if sends_request {
            client.write_all(&openapi_request_frame(1)).await.unwrap();
        }
        let kinds = answer_pings(&mut client).await;
        assert_eq!(kinds.contains(&HEADERS), sends_request, "{kinds:?}");
        assert!(kinds.contains(&PING) && kinds.contains(&GOAWAY), "{kinds:?}");
        assert!(began.elapsed() >= Duration::from_millis(500));
    }
}

#[tokio::test]
async fn an_idle_http_2_connection_ends_even_if_its_client_ignores_the_goaway() {
    let mut server = TestServer::new(FailingStores::Panicking);
    shorten_timeouts(&mut server);
    let mut client = server.connect(server.public());
    client.write_all(PREFACE).await.unwrap();
    // The client answers nothing, not even pings.
    let mut all = Vec::new();
    timeout(Duration::from_secs(20), client.read_to_end(&mut all)).await.expect("closed in time").unwrap();
}

#[tokio::test]
async fn an_http_2_client_that_reads_no_response_is_disconnected() {
    let mut server = TestServer::new(FailingStores::Panicking);
    shorten_timeouts(&mut server);
    let mut client = server.connect(server.public());
    client.write_all(PREFACE).await.unwrap();
    // SETTINGS_INITIAL_WINDOW_SIZE is 0: no byte of a body can be sent.
    client.write_all(&[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0]).await.unwrap();
    client.write_all(&openapi_request_frame(1)).await.unwrap();
    let kinds = answer_pings(&mut client).await;
    assert!(kinds.contains(&HEADERS) && !kinds.contains(&DATA), "{kinds:?}");
}

#[tokio::test(start_paused = true)]
async fn an_http_2_connection_stays_open_while_a_request_runs() {
    let mut server = TestServer::new(FailingStores::Panicking);
    shorten_timeouts(&mut server);
    let slow = SlowEndpoint::default();
    let mut client = server.connect(server.service_for(slow.clone()));
    client.write_all(PREFACE).await.unwrap();
    client.write_all(&openapi_request_frame(1)).await.unwrap();
    wait_for(&slow.began).await;
    // Longer than the idle timeout.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    slow.may_end.notify_one();
    let kinds = answer_pings(&mut client).await;
    let answered = kinds.iter().position(|kind| *kind == HEADERS).expect("a response");
    let goaway = kinds.iter().position(|kind| *kind == GOAWAY).expect("a GOAWAY");
    assert!(answered < goaway, "{kinds:?}");
}

#[tokio::test]
async fn http_2_works_without_tls() {
    let server = TestServer::new(FailingStores::Panicking);
    let mut client = server.connect(server.public());
    // The preface and empty SETTINGS (RFC 9113, 3.4 and 6.5).
    client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let mut frame = [0; 9];
    timeout(Duration::from_secs(20), client.read_exact(&mut frame)).await.unwrap().unwrap();
    assert_eq!(frame[3], 4, "SETTINGS");
}

#[tokio::test]
async fn http_2_needs_additional_slots() {
    let mut server = TestServer::new(FailingStores::Panicking);
    // An HTTP/2 connection costs five slots. With nine slots, a client can have only one such connection.
    server.budgets = Budgets::new(256 << 20, 9);
    let service = server.public();
    let mut first = server.connect(service.clone());
    let mut second = server.connect(service);
    first.write_all(PREFACE).await.unwrap();
    assert_eq!(frame(&mut first).await.0, 4, "SETTINGS");
    second.write_all(PREFACE).await.unwrap();
    let end = timeout(Duration::from_secs(20), frame_or_end(&mut second));
    assert_eq!(end.await.expect("closed in time"), None);
}
