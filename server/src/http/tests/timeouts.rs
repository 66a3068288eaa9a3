//! Timeouts and limits of bodies, headers and idle connections.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

use super::{FailingStores, TestServer, exchange, get_request};

#[tokio::test]
async fn a_body_that_does_not_arrive_times_out() {
    let mut server = TestServer::new(FailingStores::Panicking);
    server.timeouts.body = Duration::from_millis(30);
    let reply = server
        .send_request(
            "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
             Content-Length: 100\r\n\r\n{\"email\"",
        )
        .await;
    reply.assert_refused(408, "invalid_request");
    assert_eq!(reply.header("connection"), Some("close"));
}

#[tokio::test]
async fn headers_that_do_not_arrive_cause_a_timeout() {
    let mut server = TestServer::new(FailingStores::Panicking);
    server.timeouts.head = Duration::from_millis(30);
    let reply = server.send_request("GET /openapi.json HTTP/1.1\r\nHost: a\r\n").await;
    reply.assert_refused(408, "invalid_request");
    assert_eq!(reply.header("connection"), Some("close"));

    // The same timeout applies to a further request, after the response to the first one.
    let mut client = server.connect(server.public());
    client.write_all(b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let mut first_bytes = [0; 16];
    client.read_exact(&mut first_bytes).await.unwrap();
    client.write_all(b"GET /v1 HTTP/1.1\r\n").await.unwrap();
    let mut remaining_text = String::new();
    timeout(Duration::from_secs(20), client.read_to_string(&mut remaining_text)).await.unwrap().unwrap();
    assert!(first_bytes.starts_with(b"HTTP/1.1 404"));
    assert!(remaining_text.contains("HTTP/1.1 408"), "{remaining_text}");

    // A client that sends nothing, or only a part of the HTTP/2 preface, gets no response.
    for sent in ["", "PRI * HTTP/2.0\r\n"] {
        let mut client = server.connect(server.public());
        client.write_all(sent.as_bytes()).await.unwrap();
        let mut reply = Vec::new();
        timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.unwrap().unwrap();
        assert!(reply.is_empty(), "{sent:?}");
    }
}

#[tokio::test]
async fn an_idle_connection_is_closed_without_a_response() {
    let mut server = TestServer::new(FailingStores::Panicking);
    server.timeouts.idle = Duration::from_millis(50);
    let began = std::time::Instant::now();
    let reply = exchange(server.connect(server.public()), b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert_eq!(reply.status, 404);
    assert_eq!(reply.header("connection"), None);
    assert!(reply.body.ends_with('}'), "one response, then the end");
    assert!(began.elapsed() >= Duration::from_millis(50));
}

#[tokio::test]
async fn headers_are_bounded() {
    let server = TestServer::new(FailingStores::Panicking);
    let request_with_header =
        |size: usize| get_request("/openapi.json", &format!("X-Filler: {}\r\n", "x".repeat(size)));
    assert_eq!(server.send_request(request_with_header(30 * 1024)).await.status, 200);
    assert_eq!(server.send_request(request_with_header(33 * 1024)).await.status, 431);
    let many_headers: String = (0..150).map(|n| format!("X-{n}: y\r\n")).collect();
    assert_eq!(server.send_request(get_request("/openapi.json", &many_headers)).await.status, 431);
    // A client that sends 200 KiB of headers gets a response too, not a reset.
    assert_eq!(server.send_request(request_with_header(200 * 1024)).await.status, 431);
    assert_eq!(server.send_request("nonsense\r\n\r\n").await.status, 400);
}
