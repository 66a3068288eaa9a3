//! Refreshes compared with the sum of their parts in one run: a read of the JWKS document, a call of a Redis script and
//! an ES256 signature. With another build of the server, refreshes of both builds are also compared in one run.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use latchkey_tests::{builders::App, client::ApiClient, passwords::PASSWORD, stack::Stack};
use redis::Script;
use serde::Deserialize;
use serde_json::json;

use crate::{
    logins::{Connection, connect},
    measurements::{Bound, Throughput, format_millis, histogram, join_clients, micros_of},
};

/// Numbers of concurrent requests.
const IN_FLIGHT: [u32; 3] = [1, 8, 64];
/// Number of rounds for each number of requests in flight. Each round measures all four operations, because the speed
/// of the machine can change between rounds.
const ROUNDS: u32 = 4;
/// Duration of the JWKS reads in one round, and also of the refreshes.
const ROUND_TIME: Duration = Duration::from_secs(3);
/// Duration of the script calls in one round, and also of the signatures.
const BARE_TIME: Duration = Duration::from_secs(1);

/// The maximum cost of a refresh: its time relative to the sum of the times of a JWKS read, a script call and an ES256
/// signature, with the same number of requests in flight.
const MAX_COST: f64 = 1.6;

/// Number of pairs of rounds in which two builds are compared, for each number of requests in flight. In each pair, both
/// builds are measured, in turns the one or the other first.
const PAIRS: u32 = 50;
/// Duration of a round in which two builds are compared. Many short rounds are better than few long ones, because the
/// speed of the machine can change at any time.
const PAIR_ROUND_TIME: Duration = Duration::from_secs(1);
/// The minimum of the median ratio of the two rates.
const MIN_RELATIVE_RATE: f64 = 0.97;

#[derive(clap::Args)]
#[group(id = "refresh")]
pub(crate) struct RefreshArgs {
    /// For `refresh`: compare with this build of latchkey-server. Build both with the same command: another selection
    /// of packages or programs can select other features of dependencies.
    #[arg(long)]
    other_server: Option<PathBuf>,
}

/// The field of a refresh response that the client keeps.
#[derive(Deserialize)]
struct RefreshResponse {
    refresh_token: String,
}

/// A client with its own connection and session.
pub(crate) struct Client {
    server: SocketAddr,
    connection: Connection,
    refresh_token: String,
}

/// Runs the benchmark, prints the measurements, and returns the bounds.
pub(crate) async fn run(options: &RefreshArgs) -> Result<Vec<Bound>> {
    println!("Refreshes, on {} cores shared by server, client and Redis\n", thread::available_parallelism()?);
    let app = unlimited_app("bench");
    let stack = Stack::with(&app).await;
    let server = stack.server().public;
    register(&stack, &app).await;
    let script = Script::new("return redis.call('GET', KEYS[1])");

    println!(
        "in flight   refreshes/s   JWKS reads/s   cost   script calls/s   ES256/s (one core)         p50       p90       p99"
    );
    let cores = u32::try_from(thread::available_parallelism()?.get())?;
    let mut max_cost = 0.0_f64;
    for in_flight in IN_FLIGHT {
        let mut clients = Vec::new();
        for number in 0..in_flight {
            clients.push(log_in(server, app.id(), number).await?);
        }
        let (mut refreshes, mut jwks, mut scripts) = (Throughput::new(), Throughput::new(), Throughput::new());
        let mut signatures = 0.0;
        for _ in 0..ROUNDS {
            let began = Instant::now();
            let end = began + ROUND_TIME;
            let reading =
                clients.drain(..).map(|client| tokio::spawn(read_jwks_until(end, client, app.id().to_owned())));
            let (returned_clients, latencies) = join_clients(reading).await?;
            clients = returned_clients;
            jwks.add(began, latencies)?;

            clients = refresh_for(ROUND_TIME, clients, app.id(), &mut refreshes).await?;

            let connection = stack.redis().connect().await?;
            let began = Instant::now();
            let end = began + BARE_TIME;
            let calling =
                (0..in_flight).map(|_| tokio::spawn(call_script_until(end, connection.clone(), script.clone())));
            let (_, latencies) = join_clients(calling).await?;
            scripts.add(began, latencies)?;
            signatures += tokio::task::spawn_blocking(signature_rate).await??;
        }
        // Requests in flight use all cores. A signature is measured on one core.
        let signatures_per_second = signatures / f64::from(ROUNDS) * f64::from(in_flight.min(cores));
        let parts = 1.0 / jwks.per_second() + 1.0 / scripts.per_second() + 1.0 / signatures_per_second;
        let cost = 1.0 / refreshes.per_second() / parts;
        max_cost = max_cost.max(cost);
        println!(
            "{in_flight:>9}   {:>11.0}   {:>12.0}   {:>4.2}   {:>14.0}   {:>18.0}   {:>9} {:>9} {:>9}",
            refreshes.per_second(),
            jwks.per_second(),
            cost,
            scripts.per_second(),
            signatures / f64::from(ROUNDS),
            format_millis(&refreshes.latency, 0.5),
            format_millis(&refreshes.latency, 0.9),
            format_millis(&refreshes.latency, 0.99),
        );
    }
    println!();
    let mut bounds = vec![Bound::new(
        format!("a refresh costs at most {MAX_COST} times the sum of its parts: {max_cost:.2}"),
        max_cost <= MAX_COST,
    )];
    if let Some(other) = &options.other_server {
        bounds.extend(compare(&stack, &app, other).await?);
    }
    Ok(bounds)
}

/// Compares the refreshes of the App of the stack with those of an App that is served by another build.
async fn compare(stack: &Stack, app: &App, other_server: &Path) -> Result<Vec<Bound>> {
    let other_app = unlimited_app("other");
    let other_stack = Stack::builder().app(&other_app).server_program(other_server).try_start().await?;
    register(&other_stack, &other_app).await;
    let builds = [(stack.server().public, app.id()), (other_stack.server().public, other_app.id())];

    println!("in flight   refreshes/s   of the other build   quartiles of the ratio of each pair");
    let mut bounds = Vec::new();
    for in_flight in IN_FLIGHT {
        let mut clients = [Vec::new(), Vec::new()];
        for (clients, (server, app)) in clients.iter_mut().zip(builds) {
            for number in 0..in_flight {
                clients.push(log_in(server, app, number).await?);
            }
        }
        let mut rates = [Vec::new(), Vec::new()];
        for pair in 0..PAIRS {
            let order = if pair.is_multiple_of(2) { [0, 1] } else { [1, 0] };
            for build in order {
                let mut round = Throughput::new();
                let started = std::mem::take(&mut clients[build]);
                clients[build] = refresh_for(PAIR_ROUND_TIME, started, builds[build].1, &mut round).await?;
                rates[build].push(round.per_second());
            }
        }
        let mean = |rates: &[f64]| rates.iter().sum::<f64>() / f64::from(PAIRS);
        let mut ratios: Vec<f64> = rates[0].iter().zip(&rates[1]).map(|(rate, other)| rate / other).collect();
        ratios.sort_by(f64::total_cmp);
        let quartile = |number: usize| ratios[ratios.len() * number / 4];
        println!(
            "{in_flight:>9}   {:>11.0}   {:>18.0}   {:>8.2}  {:.2}  {:.2}",
            mean(&rates[0]),
            mean(&rates[1]),
            quartile(1),
            quartile(2),
            quartile(3),
        );
        let what = format!("refreshes with {in_flight} in flight, relative to the other build (median of the pairs)");
        bounds.push(Bound::at_least(&what, MIN_RELATIVE_RATE, quartile(2)));
    }
    println!();
    Ok(bounds)
}

fn unlimited_app(name: &str) -> App {
    let high_limit: &[(u32, u32)] = &[(10_000_000, 60)];
    App::new(name).limit("loginsPerClient", high_limit).limit("refreshesPerSession", high_limit)
}

/// Registers the user that [`log_in`] logs in.
async fn register(stack: &Stack, app: &App) {
    stack.client().register(app.id(), "Ada", "ada@example.com", PASSWORD).await.expect(StatusCode::OK);
}

/// Lets the clients refresh for this time, and adds the measurements to `refreshes`.
async fn refresh_for(
    time: Duration,
    clients: Vec<Client>,
    app: &str,
    refreshes: &mut Throughput,
) -> Result<Vec<Client>> {
    let began = Instant::now();
    let end = began + time;
    let refreshing = clients.into_iter().map(|client| tokio::spawn(refresh_until(end, client, app.to_owned())));
    let (clients, latencies) = join_clients(refreshing).await?;
    refreshes.add(began, latencies)?;
    Ok(clients)
}

/// Logs in the user `ada@example.com` of an App. Each `number` has its own client address.
pub(crate) async fn log_in(server: SocketAddr, app: &str, number: u32) -> Result<Client> {
    let [.., high, low] = number.to_be_bytes();
    let from: IpAddr = Ipv4Addr::new(127, 101, high, low + 1).into();
    let login = ApiClient::from_address(server, from).login(app, "ada@example.com", PASSWORD).await;
    let login = login.expect(StatusCode::OK);
    let refresh_token = login.string("refresh_token").to_owned();
    Ok(Client { server, connection: connect(server, from).await?, refresh_token })
}

async fn read_jwks_until(end: Instant, mut client: Client, app: String) -> Result<(Client, Histogram<u64>)> {
    let mut latencies = histogram();
    while Instant::now() < end {
        let request = Request::get(format!("/{app}/.well-known/jwks.json")).header("host", client.server.to_string());
        let started = Instant::now();
        client.connection.ready().await?;
        let response = client.connection.send_request(request.body(Full::default())?).await?;
        ensure!(response.status() == StatusCode::OK, "JWKS returned {}", response.status());
        response.into_body().collect().await?;
        latencies.record(micros_of(started.elapsed()))?;
    }
    Ok((client, latencies))
}

/// Refreshes until `end`, each time with the token of the previous response.
pub(crate) async fn refresh_until(end: Instant, mut client: Client, app: String) -> Result<(Client, Histogram<u64>)> {
    let mut latencies = histogram();
    while Instant::now() < end {
        let body = json!({ "refresh_token": client.refresh_token }).to_string();
        let request = Request::post(format!("/v1/{app}/token"))
            .header("host", client.server.to_string())
            .header("content-type", "application/json")
            .body(Full::from(body))?;
        let started = Instant::now();
        client.connection.ready().await?;
        let response = client.connection.send_request(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        latencies.record(micros_of(started.elapsed()))?;
        ensure!(status == StatusCode::OK, "a refresh returned {status}");
        client.refresh_token = serde_json::from_slice::<RefreshResponse>(&body)?.refresh_token;
    }
    Ok((client, latencies))
}

async fn call_script_until(
    end: Instant,
    mut connection: redis::aio::MultiplexedConnection,
    script: Script,
) -> Result<((), Histogram<u64>)> {
    let mut latencies = histogram();
    while Instant::now() < end {
        let started = Instant::now();
        let _: Option<String> = script.key("lk:{bench}:nothing").invoke_async(&mut connection).await?;
        latencies.record(micros_of(started.elapsed()))?;
    }
    Ok(((), latencies))
}

/// ES256 signatures per second on one core.
fn signature_rate() -> Result<f64> {
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
    let key = EncodingKey::from_ec_pem(key.serialize_pem().as_bytes())?;
    let claims = json!({ "sub": "019a8452-7c3e-7d5a-9b51-0c2f6a1d4e88", "exp": 1 });
    let started = Instant::now();
    let mut signed = 0_u32;
    while started.elapsed() < BARE_TIME {
        jsonwebtoken::encode(&Header::new(Algorithm::ES256), &claims, &key)?;
        signed += 1;
    }
    Ok(f64::from(signed) / started.elapsed().as_secs_f64())
}
