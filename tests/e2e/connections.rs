//! What one client, or many, can hold of a server by connections and requests that they do not finish.

use std::{fs, net::IpAddr, time::Duration};

use http::StatusCode;
use latchkey_tests::{
    client::Anonymous,
    eventually,
    stack::{Server, Stack},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};

use crate::support::{NAME, PASSWORD, app};

const EMAIL: &str = "ada@example.com";
const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
/// As in the chart (docs/decisions/0011): memory that is free is given back.
const MALLOC: &str = "glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=131072";

/// 127.9.`group`.`number`: addresses of this test's clients.
fn address(group: u8, number: u8) -> IpAddr {
    IpAddr::from([127, 9, group, number + 1])
}

async fn connect(server: std::net::SocketAddr, from: IpAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    socket.connect(server).await.expect("the kernel takes the connection")
}

/// Whether a request over this connection is answered. It stays open.
async fn is_served(stream: &mut TcpStream) -> bool {
    // A connection that is refused may be closed before or after this is sent.
    drop(stream.write_all(b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n").await);
    let mut reply = [0; 1024];
    let read = tokio::time::timeout(LIMIT, stream.read(&mut reply)).await.expect("an answer or an end in time");
    read.is_ok_and(|read| reply[..read].starts_with(b"HTTP/1.1 404"))
}

fn resident(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid().expect("it runs"))).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a resident size");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() * 1024
}

/// The value of a metric of the public listener.
async fn metric(server: &Server, name: &str, labels: &str) -> u64 {
    let page = server.ops("metrics").await.text;
    let line = page.lines().find_map(|line| line.strip_prefix(&format!("latchkey_{name}{labels} ")));
    line.unwrap_or_else(|| panic!("{name}{labels} in {page}")).parse().unwrap()
}

#[tokio::test]
async fn stalled_bodies_stay_within_the_budget_and_others_are_served() {
    const STALLED: u64 = 640;
    let app = app();
    let stack = Stack::builder()
        .app(&app)
        // Bodies have a sixteenth of it.
        .args(["--memory-limit", "128Mi"])
        .env("GLIBC_TUNABLES", MALLOC)
        .start()
        .await;
    let server = stack.server();
    let client = stack.client();
    client.register(app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    client.login(app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let before = resident(server);

    let head = format!(
        "POST /v1/{}/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 61440\r\n\r\n",
        app.id()
    );
    let request = [head.as_bytes(), &[b' '; 61_439]].concat();
    let mut clients = Vec::new();
    for number in 0..STALLED {
        let mut stream = connect(server.public, address(1, (number % 20) as u8)).await;
        // Who is refused is not read to the end.
        drop(stream.write_all(&request).await);
        clients.push(stream);
    }
    let refused = r#"{listener="public",reason="request"}"#;
    let counted = eventually("each is held or refused", LIMIT, || async {
        let held = metric(server, "http_requests_in_flight", r#"{listener="public"}"#).await;
        let refused = metric(server, "http_over_budget_total", refused).await;
        (held + refused >= STALLED).then_some((held, refused))
    })
    .await;
    let (held, refused) = counted;
    let budget = metric(server, "http_request_memory", "").await;
    assert!(budget <= 16 * MIB && refused > 250, "{held} held, {refused} refused, {budget} bytes");

    // Others are served, and no more memory is used than is given out.
    let mut most = 0;
    for _ in 0..5 {
        stack.client().login(app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
        let path = format!("{}/.well-known/jwks.json", app.id());
        stack.client().get(&path).await.expect(StatusCode::OK);
        most = most.max(resident(server));
    }
    let grown = most.saturating_sub(before);
    println!("{held} bodies of 60 KiB held, {refused} refused: {} MiB more", grown / MIB);
    // Requests have an eighth and connections a quarter of 128 MiB.
    assert!(grown < 48 * MIB, "{} MiB more with {held} bodies held", grown / MIB);

    // One large body of an address that holds none is refused while the budget is used up, and taken afterwards.
    let large = serde_json::json!({ "email": EMAIL, "password": PASSWORD, "more": " ".repeat(60_000) });
    drop(clients);
    eventually("what was held is free again", LIMIT, || async {
        let path = format!("v1/{}/email/login", app.id());
        (stack.client().post(&path, &large).await.status == StatusCode::OK).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_idle_connection_costs_less_than_it_is_counted_for() {
    const IDLE: u64 = 600;
    let app = app();
    let stack = Stack::builder().app(&app).env("GLIBC_TUNABLES", MALLOC).start().await;
    let server = stack.server();
    let mut clients = Vec::new();
    let mut before = 0;
    for number in 0..2 * IDLE {
        // What is allocated once is there before the first is counted.
        if number == IDLE {
            before = resident(server);
        }
        let mut stream = connect(server.public, address(4, (number % 20) as u8)).await;
        assert!(is_served(&mut stream).await);
        clients.push(stream);
    }
    let cost = resident(server).saturating_sub(before) / IDLE;
    println!("an idle connection costs {cost} bytes");
    // It is counted for 40 KiB, of which 8 are for a request.
    assert!(cost < 32 * 1024, "{cost} bytes");
}

#[tokio::test]
async fn a_client_address_has_its_number_of_connections_and_a_listed_proxy_any() {
    let app = app();
    let stack = Stack::builder().app(&app).args(["--connections-per-client", "5"]).start().await;
    let server = stack.server();
    let mut held = Vec::new();
    for _ in 0..5 {
        let mut stream = connect(server.public, address(2, 1)).await;
        assert!(is_served(&mut stream).await);
        held.push(stream);
    }
    assert!(!is_served(&mut connect(server.public, address(2, 1)).await).await, "the sixth");
    assert!(is_served(&mut connect(server.public, address(2, 2)).await).await, "another address");
    let refused = metric(server, "http_connections_refused_total", r#"{listener="public",reason="client"}"#).await;
    assert_eq!(refused, 1);

    let flags = ["--connections-per-client", "5", "--trusted-proxies", "127.9.2.0/24"];
    let stack = Stack::builder().app(&app).args(flags).start().await;
    let mut held = Vec::new();
    for _ in 0..12 {
        let mut stream = connect(stack.server().public, address(2, 1)).await;
        assert!(is_served(&mut stream).await);
        held.push(stream);
    }
}

#[tokio::test]
async fn connections_to_the_operations_listener_are_few_and_shared() {
    let stack = Stack::with(&app()).await;
    let ops = stack.server().ops;
    let mut held = Vec::new();
    for _ in 0..16 {
        let mut stream = connect(ops, address(3, 1)).await;
        assert!(is_served(&mut stream).await);
        held.push(stream);
    }
    assert!(!is_served(&mut connect(ops, address(3, 1)).await).await, "the seventeenth");
    // The probe of the node comes from elsewhere.
    Anonymous::from_address(ops, address(3, 2)).get("livez").await.expect(StatusCode::OK);
}

#[tokio::test]
async fn refusals_of_a_client_that_ignores_retry_after_are_held() {
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
    // Others wait for nothing of it: their own first refusal comes sooner than a held one can.
    let other = stack.client();
    other.login(app.id(), EMAIL, PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    let held = metric(stack.server(), "http_refusals_held", "").await;
    assert_eq!(held, 0);
}
