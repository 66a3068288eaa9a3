//! Connections that end while requests run, and the connection slots of clients.

use std::{net::IpAddr, sync::Arc, time::Duration};

use futures::FutureExt;
use prometheus_client::encoding::text;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream},
    time::timeout,
};

use super::{
    FailingStores, Reply, TestServer, exchange, get_request,
    http2::{PREFACE, openapi_request_frame},
    slow_endpoint::{SlowEndpoint, wait_for},
    wait_until,
};
use crate::http::{Budgets, Drain, Service};

#[tokio::test]
async fn a_drain_finishes_running_requests_and_closes_connections() {
    let server = TestServer::new(FailingStores::Panicking);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let drain = Drain::new(Duration::from_millis(300), Duration::from_secs(10));
    let serving = tokio::spawn(crate::http::serve(listener, server.public(), drain.clone()));
    let mut old_connection = tokio::net::TcpStream::connect(address).await.unwrap();
    let mut buffer = vec![0; 4096];
    old_connection.write_all(b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let read = old_connection.read(&mut buffer).await.unwrap();
    assert_eq!(Reply::parse(&buffer[..read]).header("connection"), None);

    drain.begin();
    // The connection from before the drain and a new connection both get a response that closes them.
    let new_connection = tokio::net::TcpStream::connect(address).await.unwrap();
    for mut stream in [old_connection, new_connection] {
        stream.write_all(b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut reply = Vec::new();
        timeout(Duration::from_secs(20), stream.read_to_end(&mut reply)).await.expect("closed in time").unwrap();
        let reply = Reply::parse(&reply);
        assert_eq!((reply.status, reply.header("connection")), (404, Some("close")));
    }
    timeout(Duration::from_secs(20), serving).await.expect("the drain ends in time").unwrap();
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_request_finishes_even_if_its_client_disconnects() {
    let server = TestServer::new(FailingStores::Panicking);
    let slow = SlowEndpoint::default();
    let mut client = server.connect(server.service_for(slow.clone()));
    client.write_all(get_request("/", "").as_bytes()).await.unwrap();
    wait_for(&slow.began).await;
    drop(client);
    slow.may_end.notify_one();
    wait_for(&slow.ended).await;
}

#[tokio::test]
async fn a_client_that_disconnects_keeps_its_slot_while_its_requests_run() {
    let mut server = TestServer::new(FailingStores::Panicking);
    server.budgets = Budgets::new(256 << 20, 5);
    let slow = SlowEndpoint::default();
    let service = server.service_for(slow.clone());
    let mut client = server.connect(service.clone());
    client.write_all(&[PREFACE, &openapi_request_frame(1)].concat()).await.unwrap();
    wait_for(&slow.began).await;
    // Returns how many more connections the client address can open.
    let free_slots = || {
        let admit = || service.admit(service.acquire_slot().now_or_never()?, [192, 0, 2, 1].into()).ok();
        std::iter::from_fn(admit).collect::<Vec<_>>().len()
    };
    assert_eq!(free_slots(), 0, "HTTP/2 costs five slots");
    drop(client);
    wait_until("the connection has ended", || free_slots() > 0).await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
        assert_eq!(free_slots(), 4, "its request still runs");
    }
    slow.may_end.notify_one();
    wait_until("its slot is free", || free_slots() == 5).await;
}

#[tokio::test]
async fn a_client_that_half_closed_its_connection_gets_its_response() {
    let server = TestServer::new(FailingStores::Panicking);
    let slow = SlowEndpoint::default();
    let mut client = server.connect(server.service_for(slow.clone()));
    client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    client.shutdown().await.unwrap();
    wait_for(&slow.began).await;
    slow.may_end.notify_one();
    let mut reply = Vec::new();
    timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.expect("closed in time").unwrap();
    assert_eq!(Reply::parse(&reply).status, 200);
}

#[tokio::test]
async fn a_drain_waits_for_running_requests_up_to_its_timeout() {
    let server = TestServer::new(FailingStores::Panicking);
    for ends_in_time in [true, false] {
        let slow = SlowEndpoint::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let drain_timeout = if ends_in_time { Duration::from_secs(20) } else { Duration::from_millis(50) };
        let drain = Drain::new(Duration::ZERO, drain_timeout);
        let service = server.service_for(slow.clone());
        let serving = tokio::spawn(crate::http::serve(listener, service, drain.clone()));
        let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        wait_for(&slow.began).await;
        drain.begin();
        drain.closing().cancelled().await;
        assert!(!serving.is_finished());
        if ends_in_time {
            slow.may_end.notify_one();
        }
        let mut reply = Vec::new();
        timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.expect("closed in time").unwrap();
        assert_eq!(!reply.is_empty(), ends_in_time);
        if ends_in_time {
            assert_eq!(Reply::parse(&reply).header("connection"), Some("close"));
        }
        timeout(Duration::from_secs(20), serving).await.expect("the drain ends in time").unwrap();
    }
}

#[tokio::test]
async fn one_client_has_a_maximum_number_of_connections_and_other_clients_are_served() {
    let mut server = TestServer::new(FailingStores::Panicking);
    server.budgets = Budgets::new(256 << 20, 3);
    let listener = tokio::net::TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(crate::http::serve(listener, server.public(), server.drain.clone()));
    let connect = async |last: u8| {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind((IpAddr::from([127, 0, 0, last]), 0).into()).unwrap();
        socket.connect(([127, 0, 0, 1], port).into()).await.unwrap()
    };
    let is_served = async |stream: &mut tokio::net::TcpStream| {
        drop(stream.write_all(b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n").await);
        let mut reply = [0; 1024];
        let read = timeout(Duration::from_secs(20), stream.read(&mut reply)).await.expect("a response in time");
        read.is_ok_and(|read| reply[..read].starts_with(b"HTTP/1.1 404"))
    };
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut stream = connect(2).await;
        assert!(is_served(&mut stream).await);
        held.push(stream);
    }
    assert!(!is_served(&mut connect(2).await).await, "the fourth connection is closed");
    assert!(is_served(&mut connect(3).await).await, "another client is served");
    let mut page = String::new();
    text::encode(&mut page, &server.registry).unwrap();
    assert!(page.contains(r#"http_connections_refused_total{listener="public",reason="client"} 1"#), "{page}");
    // A connection that ends frees its slot.
    held.clear();
    timeout(Duration::from_secs(20), async { while !is_served(&mut connect(2).await).await {} }).await.unwrap();
}

/// Opens the given number of connections from each of the clients 192.0.2.1, 192.0.2.2, …, and sends `bytes` on each.
async fn open_many(
    server: &TestServer,
    service: &Service,
    clients: u8,
    each: usize,
    bytes: &[u8],
) -> Vec<DuplexStream> {
    let mut opened = Vec::new();
    for client in 1..=clients {
        for _ in 0..each {
            let mut stream = server.connect_from(service.clone(), client);
            stream.write_all(bytes).await.unwrap();
            opened.push(stream);
            tokio::task::yield_now().await;
        }
    }
    opened
}

#[tokio::test]
async fn waiting_connections_do_not_keep_other_clients_out() {
    let part_of_a_body: &[u8] = b"POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
        Content-Length: 100\r\n\r\n{";
    // 358 slots, of which one client can have 44. An HTTP/2 connection needs five.
    for (sent, each) in [
        (&b""[..], 44),
        (b"GET /v1 HTTP/1.1\r\nHo", 44),
        (part_of_a_body, 44),
        (b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n", 44),
        (PREFACE, 8),
    ] {
        let mut server = TestServer::new(FailingStores::Panicking);
        server.budgets = Budgets::new(64 << 20, 256);
        let service = server.public();
        let mut held = open_many(&server, &service, 9, each, sent).await;
        // The timeouts that close such connections are at least 10 s.
        let request = get_request("/v1", "");
        let served = exchange(server.connect_from(service.clone(), 200), request.as_bytes());
        let reply = timeout(Duration::from_secs(5), served).await.expect("another client is served");
        assert_eq!(reply.status, 404);
        // The newest connection is still open.
        let newest = held.last_mut().unwrap();
        let closed = timeout(Duration::from_millis(100), async { while newest.read_u8().await.is_ok() {} }).await;
        assert!(closed.is_err());
        let mut page = String::new();
        text::encode(&mut page, &server.registry).unwrap();
        assert!(!page.contains(r#"http_connections_refused_total{listener="public",reason="waiting"} 0"#), "{page}");
    }
}

/// Makes 192.0.2.250 a trusted proxy, which has no limit on its connections.
fn trust_proxy(server: &mut TestServer) {
    let state = Arc::get_mut(&mut server.state).unwrap();
    state.settings.trusted_proxies = vec!["192.0.2.250/32".parse().unwrap()];
}

#[tokio::test]
async fn waiting_connections_of_one_trusted_proxy_do_not_keep_other_clients_out() {
    for sent in [&b""[..], b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n"] {
        let mut server = TestServer::new(FailingStores::Panicking);
        server.budgets = Budgets::new(64 << 20, 256);
        trust_proxy(&mut server);
        let service = server.public();
        let mut held = Vec::new();
        for _ in 0..400 {
            let mut stream = server.connect_from(service.clone(), 250);
            stream.write_all(sent).await.unwrap();
            held.push(stream);
            tokio::task::yield_now().await;
        }
        let request = get_request("/v1", "");
        let served = exchange(server.connect_from(service.clone(), 200), request.as_bytes());
        let reply = timeout(Duration::from_secs(5), served).await.expect("another client is served");
        assert_eq!(reply.status, 404);
    }
}

#[tokio::test]
async fn running_requests_are_not_closed_and_connections_of_trusted_proxies_are_closed_last() {
    let mut server = TestServer::new(FailingStores::Panicking);
    server.budgets = Budgets::new(64 << 20, 256);
    trust_proxy(&mut server);
    let slow = SlowEndpoint::default();
    let service = server.service_for(slow.clone());
    let request = get_request("/", "");
    let mut running = server.connect_from(service.clone(), 1);
    running.write_all(request.as_bytes()).await.unwrap();
    wait_for(&slow.began).await;
    let mut of_proxy = server.connect_from(service.clone(), 250);
    tokio::task::yield_now().await;
    let _held = open_many(&server, &service, 9, 43, b"").await;
    let mut newest = server.connect_from(service.clone(), 200);
    newest.write_all(request.as_bytes()).await.unwrap();
    wait_for(&slow.began).await;
    of_proxy.write_all(request.as_bytes()).await.unwrap();
    wait_for(&slow.began).await;
    for mut stream in [running, newest, of_proxy] {
        slow.may_end.notify_one();
        let mut reply = Vec::new();
        timeout(Duration::from_secs(20), stream.read_to_end(&mut reply)).await.expect("closed in time").unwrap();
        assert_eq!(Reply::parse(&reply).status, 200);
    }
}
