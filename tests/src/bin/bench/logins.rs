//! Compares the rate of password logins with the rate of a bare argon2 loop, on the same cores in the same run. Also
//! measures the server's memory, and the time that a server needs to start.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use argon2::{Algorithm, Argon2, Block, Params, Version};
use bytes::Bytes;
use hdrhistogram::Histogram;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use latchkey_tests::{
    builders::App,
    passwords::PASSWORD,
    stack::{ServerProcess, Stack},
};
use serde_json::json;
use tokio::net::TcpSocket;

use crate::measurements::{Bound, MIB, format_millis, histogram, micros_of, resident_bytes};

/// Rounds of each [`Step`]. A round runs the bare argon2 loop and then logins, because the speed of the machine can
/// change between rounds. The results of all rounds are added up.
const ROUNDS: u32 = 5;
/// Duration of the logins of one round.
const ROUND_TIME: Duration = Duration::from_secs(4);
/// Duration of the bare loop in one round. The loop also runs once after the last round, so that the logins of each
/// round are between two loops.
const BARE_TIME: Duration = Duration::from_secs(2);
/// Numbers of concurrent logins.
const IN_FLIGHT: [u32; 4] = [1, 8, 64, 256];
/// Number of clients that retry immediately.
const IMPATIENT_CLIENTS: u32 = 256;
/// Number of patient clients, for the comparison with the impatient clients.
const PATIENT_CLIENTS: u32 = 64;
/// Minimum rate of admitted logins with impatient clients, relative to the rate with patient clients.
const MIN_ADMITTED_RATIO: f64 = 0.85;

/// What clients do after a refusal.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RetryBehavior {
    /// They wait as long as `Retry-After` says.
    Patient,
    /// They retry immediately.
    Impatient,
}

/// The measurements with one number of concurrent logins.
struct Step {
    in_flight: u32,
    behavior: RetryBehavior,
    /// Number of logins that succeeded within [`ROUND_TIME`]. The login rate is based on this time, and not on the time
    /// of the last response, because the server can delay a 503 response.
    in_time: u32,
    bare_rate: f64,
    login_rate: f64,
    latency: Histogram<u64>,
    /// Time until a 503 response.
    refusal: Histogram<u64>,
    refusals_without_retry_after: u64,
    jwks: Histogram<u64>,
    peak_memory: f64,
}

/// Runs the benchmark, prints the measurements, and returns the bounds.
pub(crate) async fn run() -> Result<Vec<Bound>> {
    let threads = thread::available_parallelism()?.get();
    println!("Password logins, on {threads} cores shared by server, client, Postgres and Redis\n");
    let loose: &[(u32, u32)] = &[(10_000_000, 60)];
    let app = App::new("bench")
        .limit("loginFailuresPerClient", loose)
        .limit("loginFailuresPerAccount", loose)
        .limit("loginFailuresPerClientOverall", loose)
        .limit("loginsPerClient", loose);
    let stack = Stack::with(&app).await;
    let server = stack.server();
    stack.client().register(app.id(), "Ada", "ada@example.com", PASSWORD).await.expect(StatusCode::OK);
    warm_up(server.public, app.id()).await?;
    let before = server_memory(server)?;

    println!("in flight    logins/s   bare argon2/s   share         p50       p90       p99   refused   refused p99");
    let mut steps = Vec::new();
    for in_flight in IN_FLIGHT {
        let [step] = run_steps(server, app.id(), [Step::new(in_flight, RetryBehavior::Patient)]).await?;
        step.print();
        steps.push(step);
    }
    println!("\nalternating with {IMPATIENT_CLIENTS} clients that retry immediately after each 503");
    let compared =
        [Step::new(PATIENT_CLIENTS, RetryBehavior::Patient), Step::new(IMPATIENT_CLIENTS, RetryBehavior::Impatient)];
    let compared = run_steps(server, app.id(), compared).await?;
    compared.iter().for_each(Step::print);
    let after = server_memory(server)?;
    let peak = steps.iter().chain(&compared).map(|step| step.peak_memory).fold(before, f64::max);
    println!("\nMemory of the server: {before:.1} MiB before, {peak:.1} MiB at the peak, {after:.1} MiB after");
    let start = measure_start(server).await?;
    println!("Start, from the process to ready: {:.0} ms\n", start.as_secs_f64() * 1000.0);

    let mut bounds = bounds(&steps, peak, threads);
    bounds.extend(impatient_bounds(&compared));
    Ok(bounds)
}

fn impatient_bounds([patient, impatient]: &[Step; 2]) -> [Bound; 2] {
    let admitted = impatient.login_rate / patient.login_rate;
    let p99 = impatient.jwks.value_at_quantile(0.99);
    [
        Bound::new(
            format!(
                "{IMPATIENT_CLIENTS} clients that retry immediately: at least {:.0} % of the logins at {PATIENT_CLIENTS} in flight \
                 are admitted: {:.0} %",
                100.0 * MIN_ADMITTED_RATIO,
                100.0 * admitted
            ),
            admitted >= MIN_ADMITTED_RATIO,
        ),
        Bound::new(
            format!(
                "JWKS, 20 times per second next to them, p99 under 50 ms: {}",
                format_millis(&impatient.jwks, 0.99)
            ),
            p99 < 50_000 && !impatient.jwks.is_empty(),
        ),
    ]
}

// === impl Step ===

impl Step {
    fn new(in_flight: u32, behavior: RetryBehavior) -> Self {
        Self {
            in_flight,
            behavior,
            in_time: 0,
            bare_rate: 0.0,
            login_rate: 0.0,
            latency: histogram(),
            refusal: histogram(),
            refusals_without_retry_after: 0,
            jwks: histogram(),
            peak_memory: 0.0,
        }
    }

    fn print(&self) {
        println!(
            "{:>9}   {:>9.1}   {:>13.1}   {:>4.0} %   {:>9} {:>9} {:>9}   {:>7}   {:>11}",
            self.in_flight,
            self.login_rate,
            self.bare_rate,
            100.0 * self.login_rate / self.bare_rate,
            format_millis(&self.latency, 0.5),
            format_millis(&self.latency, 0.9),
            format_millis(&self.latency, 0.99),
            self.refusal.len(),
            if self.refusal.is_empty() { "-".to_owned() } else { format_millis(&self.refusal, 0.99) },
        );
    }
}

fn bounds(steps: &[Step], peak: f64, threads: usize) -> Vec<Bound> {
    // One login at a time leaves most cores idle. With eight or more at a time, the cores limit the rate.
    let full = steps.iter().filter(|step| step.in_flight >= 8);
    let min_share = full.map(|step| step.login_rate / step.bare_rate).fold(f64::INFINITY, f64::min);
    let last_step = steps.last().expect("there are steps");
    let max_memory = 40.0 + 20.0 * f64::from(u32::try_from(threads).unwrap_or(u32::MAX));
    let refused_p99 = last_step.refusal.value_at_quantile(0.99);
    let jwks_p99 = last_step.jwks.value_at_quantile(0.99);
    vec![
        Bound {
            what: format!(
                "throughput is at least 85 % of the bare rate from 8 in flight on: {:.0} %",
                min_share * 100.0
            ),
            met: min_share >= 0.85,
        },
        Bound {
            what: format!(
                "memory at 256 in flight is under 40 MiB + 20 MiB per hashing thread ({max_memory:.0} MiB): {peak:.1} MiB"
            ),
            met: peak < max_memory,
        },
        Bound {
            what: format!(
                "logins that are not admitted get 503 within the queue's deadline of 2 s: p99 {}, {} of them",
                format_millis(&last_step.refusal, 0.99),
                last_step.refusal.len()
            ),
            met: refused_p99 < 2_000_000 && !last_step.refusal.is_empty(),
        },
        Bound {
            what: format!("each 503 has Retry-After: {} without", last_step.refusals_without_retry_after),
            met: last_step.refusals_without_retry_after == 0,
        },
        Bound {
            what: format!(
                "JWKS, 20 times per second at 256 in flight, p99 under 50 ms: {}",
                format_millis(&last_step.jwks, 0.99)
            ),
            met: jwks_p99 < 50_000 && !last_step.jwks.is_empty(),
        },
    ]
}

/// Runs the rounds of the steps. Each round runs all steps, so that the results of the steps can be compared.
async fn run_steps<const N: usize>(server: &ServerProcess, app: &str, mut steps: [Step; N]) -> Result<[Step; N]> {
    let mut bare = 0.0;
    for _ in 0..ROUNDS {
        bare += tokio::task::spawn_blocking(bare_rate).await?;
        for step in &mut steps {
            run_round(server, app, step).await?;
        }
    }
    bare += tokio::task::spawn_blocking(bare_rate).await?;
    for step in &mut steps {
        step.bare_rate = bare / f64::from(ROUNDS + 1);
        step.login_rate = f64::from(step.in_time) / (ROUND_TIME * ROUNDS).as_secs_f64();
    }
    Ok(steps)
}

/// Runs the logins of one round and adds the measurements to the step. Each client sends its next request after the
/// response to the previous one.
async fn run_round(server: &ServerProcess, app: &str, step: &mut Step) -> Result<()> {
    let end = Instant::now() + ROUND_TIME;
    let clients: Vec<_> = (0..step.in_flight)
        .map(|number| {
            tokio::spawn(log_in_until(end, server.public, client_address(number), app.to_owned(), step.behavior))
        })
        .collect();
    let jwks = tokio::spawn(read_jwks_until(end, server.public, app.to_owned()));
    let done = Arc::new(AtomicBool::new(false));
    let peak = Arc::new(AtomicU64::new(0));
    let sampler =
        tokio::spawn(sample_memory(server.pid().context("the server runs")?, Arc::clone(&done), Arc::clone(&peak)));
    for client in clients {
        let seen = client.await??;
        step.in_time += seen.in_time;
        step.latency.add(&seen.latency)?;
        step.refusal.add(&seen.refusal)?;
        step.refusals_without_retry_after += seen.refusals_without_retry_after;
    }
    step.jwks.add(&jwks.await??)?;
    done.store(true, Ordering::Relaxed);
    sampler.await??;
    #[expect(clippy::cast_precision_loss, reason = "a size of a benchmark is far below 2^52")]
    {
        step.peak_memory = step.peak_memory.max(peak.load(Ordering::Relaxed) as f64 / MIB);
    }
    Ok(())
}

/// Measurements of one client.
struct ClientMeasurements {
    in_time: u32,
    latency: Histogram<u64>,
    refusal: Histogram<u64>,
    refusals_without_retry_after: u64,
}

async fn log_in_until(
    end: Instant,
    server: SocketAddr,
    from: IpAddr,
    app: String,
    behavior: RetryBehavior,
) -> Result<ClientMeasurements> {
    let mut seen =
        ClientMeasurements { in_time: 0, latency: histogram(), refusal: histogram(), refusals_without_retry_after: 0 };
    let mut connection = connect(server, from).await?;
    while Instant::now() < end {
        let request = log_in_request(server, &app);
        let started = Instant::now();
        let response = match send(&mut connection, request).await {
            // The server can delay the 503 responses to a client that ignores `Retry-After`, and then close the
            // connection.
            Err(_) if behavior == RetryBehavior::Impatient => {
                connection = connect(server, from).await?;
                continue;
            }
            response => response?,
        };
        let took = micros_of(started.elapsed());
        match response.status {
            StatusCode::OK => {
                seen.latency.record(took)?;
                seen.in_time += u32::from(Instant::now() < end);
            }
            StatusCode::SERVICE_UNAVAILABLE => {
                seen.refusal.record(took)?;
                match response.retry_after {
                    Some(_) if behavior == RetryBehavior::Impatient => {}
                    Some(after) => tokio::time::sleep(after.min(end.saturating_duration_since(Instant::now()))).await,
                    None => seen.refusals_without_retry_after += 1,
                }
            }
            other => anyhow::bail!("a login returned {other}"),
        }
    }
    Ok(seen)
}

async fn read_jwks_until(end: Instant, server: SocketAddr, app: String) -> Result<Histogram<u64>> {
    let mut seen = histogram();
    let mut connection = connect(server, Ipv4Addr::new(127, 200, 0, 1).into()).await?;
    let mut ticks = tokio::time::interval(Duration::from_millis(50));
    while Instant::now() < end {
        ticks.tick().await;
        let request = Request::get(format!("/{app}/.well-known/jwks.json")).header("host", server.to_string());
        let started = Instant::now();
        let response = send(&mut connection, request.body(Full::default())?).await?;
        ensure!(response.status == StatusCode::OK, "JWKS returned {}", response.status);
        seen.record(micros_of(started.elapsed()))?;
    }
    Ok(seen)
}

async fn warm_up(server: SocketAddr, app: &str) -> Result<()> {
    let mut connection = connect(server, client_address(0)).await?;
    for _ in 0..20 {
        let response = send(&mut connection, log_in_request(server, app)).await?;
        ensure!(response.status == StatusCode::OK, "a login returned {}", response.status);
    }
    Ok(())
}

struct LoginResponse {
    status: StatusCode,
    retry_after: Option<Duration>,
}

pub(crate) type Connection = http1::SendRequest<Full<Bytes>>;

pub(crate) async fn connect(server: SocketAddr, from: IpAddr) -> Result<Connection> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::new(from, 0))?;
    let stream = socket.connect(server).await?;
    stream.set_nodelay(true)?;
    let (connection, driver) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(driver);
    Ok(connection)
}

fn log_in_request(server: SocketAddr, app: &str) -> Request<Full<Bytes>> {
    let body = json!({ "email": "ada@example.com", "password": PASSWORD }).to_string();
    Request::post(format!("/v1/{app}/email/login"))
        .header("host", server.to_string())
        .header("content-type", "application/json")
        .body(Full::from(body))
        .expect("a request of fixed parts")
}

async fn send(connection: &mut Connection, request: Request<Full<Bytes>>) -> Result<LoginResponse> {
    connection.ready().await?;
    let response = connection.send_request(request).await?;
    let status = response.status();
    let retry_after = response
        .headers()
        .get("retry-after")
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.parse().ok())
        .map(Duration::from_secs);
    response.into_body().collect().await?;
    Ok(LoginResponse { status, retry_after })
}

/// Hashes per second of the bare loop: one thread on each core, with reused memory.
fn bare_rate() -> f64 {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let started = Instant::now();
    let workers: Vec<_> = (0..threads)
        .map(|_| {
            thread::spawn(move || {
                let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, Params::DEFAULT);
                let mut memory = vec![Block::new(); Params::DEFAULT.block_count()];
                let mut output = [0; 32];
                let mut hashes = 0_u32;
                while started.elapsed() < BARE_TIME {
                    argon2
                        .hash_password_into_with_memory(
                            PASSWORD.as_bytes(),
                            b"0123456789abcdef",
                            &mut output,
                            &mut memory,
                        )
                        .expect("the default parameters are valid");
                    hashes += 1;
                }
                hashes
            })
        })
        .collect();
    let hashes: u32 = workers.into_iter().map(|worker| worker.join().expect("the bare loop does not panic")).sum();
    f64::from(hashes) / started.elapsed().as_secs_f64()
}

/// A different client address for each number.
pub(crate) fn client_address(number: u32) -> IpAddr {
    let [_, _, high, low] = (number + 1).to_be_bytes();
    Ipv4Addr::new(127, 100, high, low).into()
}

async fn measure_start(server: &ServerProcess) -> Result<Duration> {
    server.terminate().await;
    let started = Instant::now();
    server.start_ready().await?;
    Ok(started.elapsed())
}

async fn sample_memory(pid: u32, done: Arc<AtomicBool>, peak: Arc<AtomicU64>) -> Result<()> {
    while !done.load(Ordering::Relaxed) {
        peak.fetch_max(resident_bytes(pid)?, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// Resident memory of the server in MiB.
fn server_memory(server: &ServerProcess) -> Result<f64> {
    crate::measurements::resident_mib(server.pid().context("the server runs")?)
}
