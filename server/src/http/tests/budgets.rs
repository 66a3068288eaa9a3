//! Memory of requests: a request that does not fit the budget is refused before it is read.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream},
    time::{sleep, timeout},
};

use super::{FailingStores, Reply, TestServer, exchange, get_request, login_request, wait_until};

/// Sends an incomplete request, and waits until the server acquires memory for it or refuses it. Returns whether it was
/// refused.
async fn is_refused(server: &TestServer, client: &mut DuplexStream, bytes: &[u8]) -> bool {
    let before = server.budgets.request_bytes().used();
    client.write_all(bytes).await.unwrap();
    let mut reply = vec![0; 4096];
    // Sleeps, so that the paused time of the tests passes: most of these refusals are held.
    let acquired = async {
        while server.budgets.request_bytes().used() == before {
            sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        biased;
        read = client.read(&mut reply) => {
            let reply = Reply::parse(&reply[..read.unwrap()]);
            reply.assert_refused(503, "temporarily_unavailable");
            assert_eq!((reply.header("connection"), reply.header("retry-after")), (Some("close"), Some("5")));
            true
        }
        () = acquired => false,
    }
}

const STALLED_BODY: &[u8] = b"POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
                              Content-Length: 65536\r\n\r\n{";

#[tokio::test(start_paused = true)]
async fn bodies_that_do_not_fit_the_budget_are_refused_before_they_are_read() {
    let mut server = TestServer::new(FailingStores::Overloaded);
    server.timeouts.body = Duration::from_secs(86_400);
    let service = server.public();
    let mut refused = 0;
    let mut stalled = Vec::new();
    // The requests come from twelve client addresses. The bodies of all requests do not fit the budget of 16 MiB.
    for number in 0..700_u32 {
        let mut client = server.connect_from(service.clone(), (number % 12) as u8 + 10);
        refused += usize::from(is_refused(&server, &mut client, STALLED_BODY).await);
        stalled.push(client);
    }
    // Each request needs 64 KiB for its body, and the bytes of its head. The memory of the connection covers 8 KiB of
    // the sum.
    let held = server.budgets.request_bytes().used();
    assert!((15 << 20..=16 << 20).contains(&held), "{held} bytes");
    assert_eq!(refused, 700 - 291);

    // An ordinary login still works, from a new client address and from one with incomplete requests.
    for last in [1, 10] {
        let reply = exchange(server.connect_from(server.public(), last), login_request().as_bytes()).await;
        assert_eq!(reply.header("retry-after"), Some("3"), "the login reaches the hashing queue: {}", reply.body);
        let document =
            exchange(server.connect_from(server.public(), last), get_request("/openapi.json", "").as_bytes()).await;
        assert_eq!(document.status, 200);
    }
    // A client that disconnects releases its memory.
    drop(stalled);
    wait_until("the memory is released", || server.budgets.request_bytes().used() == 0).await;
}

#[tokio::test(start_paused = true)]
async fn one_client_cannot_exhaust_the_budget() {
    let mut server = TestServer::new(FailingStores::Broken);
    server.timeouts.body = Duration::from_secs(86_400);
    let service = server.public();
    let mut stalled = Vec::new();
    let mut refused = 0;
    for _ in 0..100 {
        let mut client = server.connect(service.clone());
        refused += usize::from(is_refused(&server, &mut client, STALLED_BODY).await);
        stalled.push(client);
    }
    let held = server.budgets.request_bytes().used();
    assert!(held <= 2 << 20, "an eighth of 16 MiB: {held}");
    assert_eq!(refused, 100 - 36);
    let large = " ".repeat(65_536);
    let request = format!(
        "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: 65536\r\n\r\n{large}"
    );
    exchange(server.connect_from(server.public(), 2), request.as_bytes()).await.assert_refused(400, "invalid_request");
}

#[tokio::test]
async fn a_body_of_unknown_length_is_counted_as_it_arrives() {
    let server = TestServer::new(FailingStores::Broken);
    let head = "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
                Transfer-Encoding: chunked\r\n\r\n";
    let chunk = format!("2000\r\n{}\r\n", " ".repeat(0x2000));
    let mut client = server.connect(server.public());
    client.write_all(head.as_bytes()).await.unwrap();
    let used = || server.budgets.request_bytes().used();
    for minimum in [0, 4 << 10, 20 << 10, 20 << 10, 52 << 10, 52 << 10, 52 << 10] {
        client.write_all(chunk.as_bytes()).await.unwrap();
        wait_until("the body counts against the budget", || used() > minimum).await;
        assert!(used() <= 64 << 10);
    }
    // The rest of the budget is used up, so another body does not fit.
    let _all = server.budgets.request_bytes().try_acquire(None, (16 << 20) - used()).unwrap();
    let mut other = server.connect_from(server.public(), 2);
    other.write_all(format!("{head}{chunk}{chunk}").as_bytes()).await.unwrap();
    let mut reply = Vec::new();
    timeout(Duration::from_secs(20), other.read_to_end(&mut reply)).await.expect("closed in time").unwrap();
    Reply::parse(&reply).assert_refused(503, "temporarily_unavailable");
}

#[tokio::test(start_paused = true)]
async fn large_heads_that_do_not_fit_the_budget_are_refused_while_they_arrive() {
    let mut server = TestServer::new(FailingStores::Panicking);
    server.timeouts.head = Duration::from_secs(86_400);
    let incomplete_head = format!("GET /openapi.json HTTP/1.1\r\nX-Filler: {}", "x".repeat(20_000));
    let service = server.public();
    let mut clients = Vec::new();
    let mut refused = 0;
    for number in 0..700_u32 {
        let mut client = server.connect_from(service.clone(), (number % 250) as u8 + 1);
        refused += usize::from(is_refused(&server, &mut client, incomplete_head.as_bytes()).await);
        clients.push(client);
    }
    // Each head costs 56 KiB: a buffer of twice the maximum head, minus the 8 KiB that every connection has.
    assert_eq!(refused, 700 - 292);
    assert!(server.budgets.request_bytes().used() <= 16 << 20);
    // Although the budget is exhausted, a request with a small head is served.
    assert_eq!(server.send_request(get_request("/openapi.json", "")).await.status, 200);
    drop(clients);
    wait_until("the memory is released", || server.budgets.request_bytes().used() == 0).await;
}
