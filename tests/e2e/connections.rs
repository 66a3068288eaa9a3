//! Clients with idle connections or unfinished requests use only a limited part of a server's connections and memory
//! (specification: Limits, Connections and memory).

use std::{fs, net::IpAddr, time::Duration};

use http::StatusCode;
use latchkey_tests::{
    client::ApiClient,
    eventually,
    passwords::PASSWORD,
    stack::{ServerProcess, Stack},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};

use crate::support::{NAME, app};

const EMAIL: &str = "ada@example.com";
/// Maximum time that a test waits for a response or a condition.
const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
/// The chart's settings for the memory allocator (docs/decisions/0011). With them, the allocator returns free memory to
/// the system.
const MALLOC_TUNABLES: &str = "glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=131072";

/// A client address of these tests: 127.9.`group`.(`number` + 1).
fn client_address(group: u8, number: u8) -> IpAddr {
    IpAddr::from([127, 9, group, number + 1])
}

async fn connect(server: std::net::SocketAddr, from: IpAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    socket.connect(server).await.expect("the kernel accepts the connection")
}

/// Whether a request over this connection gets a response. The connection stays open.
async fn is_served(stream: &mut TcpStream) -> bool {
    // The server can close a rejected connection before or after the client has sent the request.
    drop(stream.write_all(b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n").await);
    let mut reply = [0; 1024];
    let read = tokio::time::timeout(LIMIT, stream.read(&mut reply)).await.expect("a response or a close in time");
    read.is_ok_and(|read| reply[..read].starts_with(b"HTTP/1.1 404"))
}

fn resident_bytes(server: &ServerProcess) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid().expect("it runs"))).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a resident size");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() * 1024
}

/// The value of the metric `latchkey_{name}` with these labels.
async fn metric(server: &ServerProcess, name: &str, labels: &str) -> u64 {
    let page = server.get_ops("metrics").await.text;
    let line = page.lines().find_map(|line| line.strip_prefix(&format!("latchkey_{name}{labels} ")));
    line.unwrap_or_else(|| panic!("{name}{labels} in {page}")).parse().unwrap()
}

#[tokio::test]
async fn stalled_bodies_stay_within_the_budget_and_other_clients_are_served() {
    const STALLED_REQUESTS: u64 = 640;
    let app = app();
    let stack = Stack::builder()
        .app(&app)
        // Slow bodies can use a sixteenth of the memory limit, here 8 MiB.
        .args(["--memory-limit", "128Mi"])
        .env("GLIBC_TUNABLES", MALLOC_TUNABLES)
        .start()
        .await;
    let server = stack.server();
    let client = stack.client();
    client.register(app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    client.login(app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let before = resident_bytes(server);

    let head = format!(
        "POST /v1/{}/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 61440\r\n\r\n",
        app.id()
    );
    let request = [head.as_bytes(), &[b' '; 61_439]].concat();
    let mut clients = Vec::new();
    for number in 0..STALLED_REQUESTS {
        let mut stream = connect(server.public, client_address(1, (number % 20) as u8)).await;
        // An error is fine: the server does not read a rejected request to the end.
        drop(stream.write_all(&request).await);
        clients.push(stream);
    }
    let labels = r#"{listener="public",reason="request"}"#;
    let counted = eventually("each request is in flight or rejected", LIMIT, || async {
        let held = metric(server, "http_requests_in_flight", r#"{listener="public"}"#).await;
        let refused = metric(server, "http_over_budget_total", labels).await;
        (held + refused >= STALLED_REQUESTS).then_some((held, refused))
    })
    .await;
    let (held, refused) = counted;
    let budget = metric(server, "http_request_memory", "").await;
    assert!(budget <= 16 * MIB && refused > 250, "{held} held, {refused} refused, {budget} bytes");

    // Other clients are served, and memory use stays within the budget.
    let mut max_memory = 0;
    for _ in 0..5 {
        stack.client().login(app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
        let path = format!("{}/.well-known/jwks.json", app.id());
        stack.client().get(&path).await.expect(StatusCode::OK);
        max_memory = max_memory.max(resident_bytes(server));
    }
    let growth = max_memory.saturating_sub(before);
    println!("{held} bodies of 60 KiB held, {refused} refused: {} MiB more", growth / MIB);
    // Of the 128 MiB, an eighth is for requests (half of it for slow bodies) and a quarter for connections: together
    // 48 MiB.
    assert!(growth < 48 * MIB, "{} MiB more with {held} bodies held", growth / MIB);

    // When the stalled clients have disconnected, the server accepts large bodies again.
    let large = serde_json::json!({ "email": EMAIL, "password": PASSWORD, "more": " ".repeat(60_000) });
    drop(clients);
    eventually("the budget is free again", LIMIT, || async {
        let path = format!("v1/{}/email/login", app.id());
        (stack.client().post(&path, &large).await.status == StatusCode::OK).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_idle_connection_costs_less_than_its_share_of_the_budget() {
    const IDLE_CONNECTIONS: u64 = 600;
    let app = app();
    let stack = Stack::builder().app(&app).env("GLIBC_TUNABLES", MALLOC_TUNABLES).start().await;
    let server = stack.server();
    let mut clients = Vec::new();
    let mut before = 0;
    for number in 0..2 * IDLE_CONNECTIONS {
        // The first half of the connections is not measured: it causes one-time allocations.
        if number == IDLE_CONNECTIONS {
            before = resident_bytes(server);
        }
        let mut stream = connect(server.public, client_address(4, (number % 20) as u8)).await;
        assert!(is_served(&mut stream).await);
        clients.push(stream);
    }
    let cost = resident_bytes(server).saturating_sub(before) / IDLE_CONNECTIONS;
    println!("an idle connection costs {cost} bytes");
    // The budget reserves 40 KiB for a connection, 8 KiB of which are for a request.
    assert!(cost < 32 * 1024, "{cost} bytes");
}

#[tokio::test]
async fn a_client_address_has_a_connection_limit_and_a_trusted_proxy_has_none() {
    let app = app();
    let stack = Stack::builder().app(&app).args(["--connections-per-client", "5"]).start().await;
    let server = stack.server();
    let mut held = Vec::new();
    for _ in 0..5 {
        let mut stream = connect(server.public, client_address(2, 1)).await;
        assert!(is_served(&mut stream).await);
        held.push(stream);
    }
    assert!(!is_served(&mut connect(server.public, client_address(2, 1)).await).await, "the sixth connection");
    assert!(is_served(&mut connect(server.public, client_address(2, 2)).await).await, "another address");
    let refused = metric(server, "http_connections_refused_total", r#"{listener="public",reason="client"}"#).await;
    assert_eq!(refused, 1);

    let flags = ["--connections-per-client", "5", "--trusted-proxies", "127.9.2.0/24"];
    let stack = Stack::builder().app(&app).args(flags).start().await;
    let mut held = Vec::new();
    for _ in 0..12 {
        let mut stream = connect(stack.server().public, client_address(2, 1)).await;
        assert!(is_served(&mut stream).await);
        held.push(stream);
    }
}

#[tokio::test]
async fn the_operations_listener_accepts_sixteen_connections_from_one_client_address() {
    let stack = Stack::with(&app()).await;
    let ops = stack.server().ops;
    let mut held = Vec::new();
    for _ in 0..16 {
        let mut stream = connect(ops, client_address(3, 1)).await;
        assert!(is_served(&mut stream).await);
        held.push(stream);
    }
    assert!(!is_served(&mut connect(ops, client_address(3, 1)).await).await, "the seventeenth connection");
    // The kubelet's probe comes from another client address, and is accepted.
    ApiClient::from_address(ops, client_address(3, 2)).get("livez").await.expect(StatusCode::OK);
}

#[tokio::test]
async fn refusals_for_a_client_that_ignores_retry_after_are_delayed() {
    let app = app().limit("loginsPerClient", &[(1, 3600)]);
    let stack = Stack::with(&app).await;
    let client = stack.client();
    client.login(app.id(), EMAIL, PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    let mut waits = Vec::new();
    for _ in 0..6 {
        let began = std::time::Instant::now();
        client.login(app.id(), EMAIL, PASSWORD).await.expect(StatusCode::TOO_MANY_REQUESTS);
        waits.push(began.elapsed());
    }
    assert!(waits[4] >= Duration::from_millis(500) && waits[5] >= Duration::from_secs(1), "{waits:?}");
    // A login from another client address is not delayed. Afterwards, the server holds back no refusal.
    let other = stack.client();
    other.login(app.id(), EMAIL, PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    let held = metric(stack.server(), "http_refusals_held", "").await;
    assert_eq!(held, 0);
}
