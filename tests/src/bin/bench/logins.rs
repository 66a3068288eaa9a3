//! Password log-ins against what the bare argon2 loop reaches on the same cores in the same run, the memory they take, and
//! how long a server takes to start.

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
    stack::{Server, Stack},
};
use serde_json::json;
use tokio::net::TcpSocket;

use crate::figures::{Bound, MIB, histogram, micros, millis, resident};

/// A step is rounds of the bare loop and of log-ins by turns, and its figures are those of all rounds together: a
/// machine that changes its pace then changes it for both.
const ROUNDS: u32 = 5;
/// How long the log-ins of one round run.
const MEASURE: Duration = Duration::from_secs(4);
/// How long the bare loop of one round runs; once more after the last round, so that each log-in is between two.
const BARE: Duration = Duration::from_secs(2);
const IN_FLIGHT: [u32; 4] = [1, 8, 64, 256];
const PASSWORD: &str = "a quiet harbour at noon";

/// What is measured of the log-ins at one number in flight.
struct Step {
    in_flight: u32,
    bare: f64,
    per_second: f64,
    latency: Histogram<u64>,
    /// Time to a 503.
    refusal: Histogram<u64>,
    refusals_without_retry_after: u64,
    jwks: Histogram<u64>,
    peak_memory: f64,
}

/// Measures, prints, and gives what was promised.
pub(crate) async fn run() -> Result<Vec<Bound>> {
    let threads = thread::available_parallelism()?.get();
    println!("Password log-ins, on {threads} cores shared by server, client, Postgres and Redis\n");
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
    let before = memory(server)?;

    println!("in flight   log-ins/s   bare argon2/s   share         p50       p90       p99   refused   refused p99");
    let mut steps = Vec::new();
    for in_flight in IN_FLIGHT {
        let step = measure(server, app.id(), in_flight).await?;
        println!(
            "{:>9}   {:>9.1}   {:>13.1}   {:>4.0} %   {:>9} {:>9} {:>9}   {:>7}   {:>11}",
            step.in_flight,
            step.per_second,
            step.bare,
            100.0 * step.per_second / step.bare,
            millis(&step.latency, 0.5),
            millis(&step.latency, 0.9),
            millis(&step.latency, 0.99),
            step.refusal.len(),
            if step.refusal.is_empty() { "-".to_owned() } else { millis(&step.refusal, 0.99) },
        );
        steps.push(step);
    }
    let after = memory(server)?;
    let peak = steps.iter().map(|step| step.peak_memory).fold(before, f64::max);
    println!("\nMemory of the server: {before:.1} MiB before, {peak:.1} MiB at the peak, {after:.1} MiB after");
    let start = start_time(server).await?;
    println!("Start, from the process to ready: {:.0} ms\n", start.as_secs_f64() * 1000.0);

    Ok(bounds(&steps, peak, threads))
}

fn bounds(steps: &[Step], peak: f64, threads: usize) -> Vec<Bound> {
    // With one in flight most cores wait; from eight on the cores are what limits.
    let full = steps.iter().filter(|step| step.in_flight >= 8);
    let least = full.map(|step| step.per_second / step.bare).fold(f64::INFINITY, f64::min);
    let crowd = steps.last().expect("there are steps");
    let room = 40.0 + 20.0 * f64::from(u32::try_from(threads).unwrap_or(u32::MAX));
    let refused_p99 = crowd.refusal.value_at_quantile(0.99);
    let jwks_p99 = crowd.jwks.value_at_quantile(0.99);
    vec![
        Bound {
            what: format!("throughput is at least 85 % of the bare rate from 8 in flight on: {:.0} %", least * 100.0),
            met: least >= 0.85,
        },
        Bound {
            what: format!(
                "memory at 256 in flight is under 40 MiB + 20 MiB a hashing thread ({room:.0} MiB): {peak:.1} MiB"
            ),
            met: peak < room,
        },
        Bound {
            what: format!(
                "what is not admitted gets 503 within the queue's deadline of 2 s: p99 {}, {} of them",
                millis(&crowd.refusal, 0.99),
                crowd.refusal.len()
            ),
            met: refused_p99 < 2_000_000 && !crowd.refusal.is_empty(),
        },
        Bound {
            what: format!("each of them with Retry-After: {} without", crowd.refusals_without_retry_after),
            met: crowd.refusals_without_retry_after == 0,
        },
        Bound {
            what: format!("JWKS, 20 times a second at 256 in flight, p99 under 50 ms: {}", millis(&crowd.jwks, 0.99)),
            met: jwks_p99 < 50_000 && !crowd.jwks.is_empty(),
        },
    ]
}

/// The rounds of one number in flight.
async fn measure(server: &Server, app: &str, in_flight: u32) -> Result<Step> {
    let mut step = Step {
        in_flight,
        bare: 0.0,
        per_second: 0.0,
        latency: histogram(),
        refusal: histogram(),
        refusals_without_retry_after: 0,
        jwks: histogram(),
        peak_memory: 0.0,
    };
    let mut took = Duration::ZERO;
    for _ in 0..ROUNDS {
        step.bare += tokio::task::spawn_blocking(bare_rate).await?;
        took += round(server, app, &mut step).await?;
    }
    step.bare += tokio::task::spawn_blocking(bare_rate).await?;
    step.bare /= f64::from(ROUNDS + 1);
    #[expect(clippy::cast_precision_loss, reason = "a count of a benchmark is far below 2^52")]
    {
        step.per_second = step.latency.len() as f64 / took.as_secs_f64();
    }
    Ok(step)
}

/// Log-ins in a closed loop, added to the step; who is refused comes back after `Retry-After`. Tells how long it took.
async fn round(server: &Server, app: &str, step: &mut Step) -> Result<Duration> {
    let started = Instant::now();
    let end = started + MEASURE;
    let clients: Vec<_> = (0..step.in_flight)
        .map(|number| tokio::spawn(log_in_until(end, server.public, address(number), app.to_owned())))
        .collect();
    let jwks = tokio::spawn(jwks_until(end, server.public, app.to_owned()));
    let done = Arc::new(AtomicBool::new(false));
    let peak = Arc::new(AtomicU64::new(0));
    let sampler =
        tokio::spawn(sample_memory(server.pid().context("the server runs")?, Arc::clone(&done), Arc::clone(&peak)));
    for client in clients {
        let seen = client.await??;
        step.latency.add(&seen.latency)?;
        step.refusal.add(&seen.refusal)?;
        step.refusals_without_retry_after += seen.refusals_without_retry_after;
    }
    let took = started.elapsed();
    step.jwks.add(&jwks.await??)?;
    done.store(true, Ordering::Relaxed);
    sampler.await??;
    #[expect(clippy::cast_precision_loss, reason = "a size of a benchmark is far below 2^52")]
    {
        step.peak_memory = step.peak_memory.max(peak.load(Ordering::Relaxed) as f64 / MIB);
    }
    Ok(took)
}

/// What one client saw.
struct Seen {
    latency: Histogram<u64>,
    refusal: Histogram<u64>,
    refusals_without_retry_after: u64,
}

async fn log_in_until(end: Instant, server: SocketAddr, from: IpAddr, app: String) -> Result<Seen> {
    let mut seen = Seen { latency: histogram(), refusal: histogram(), refusals_without_retry_after: 0 };
    let mut connection = connect(server, from).await?;
    while Instant::now() < end {
        let request = log_in_request(server, &app);
        let started = Instant::now();
        let answer = send(&mut connection, request).await?;
        let took = micros(started.elapsed());
        match answer.status {
            StatusCode::OK => seen.latency.record(took)?,
            StatusCode::SERVICE_UNAVAILABLE => {
                seen.refusal.record(took)?;
                match answer.retry_after {
                    Some(after) => tokio::time::sleep(after.min(end.saturating_duration_since(Instant::now()))).await,
                    None => seen.refusals_without_retry_after += 1,
                }
            }
            other => anyhow::bail!("a log-in was answered {other}"),
        }
    }
    Ok(seen)
}

async fn jwks_until(end: Instant, server: SocketAddr, app: String) -> Result<Histogram<u64>> {
    let mut seen = histogram();
    let mut connection = connect(server, Ipv4Addr::new(127, 200, 0, 1).into()).await?;
    let mut ticks = tokio::time::interval(Duration::from_millis(50));
    while Instant::now() < end {
        ticks.tick().await;
        let request = Request::get(format!("/{app}/.well-known/jwks.json")).header("host", server.to_string());
        let started = Instant::now();
        let answer = send(&mut connection, request.body(Full::default())?).await?;
        ensure!(answer.status == StatusCode::OK, "JWKS was answered {}", answer.status);
        seen.record(micros(started.elapsed()))?;
    }
    Ok(seen)
}

async fn warm_up(server: SocketAddr, app: &str) -> Result<()> {
    let mut connection = connect(server, address(0)).await?;
    for _ in 0..20 {
        let answer = send(&mut connection, log_in_request(server, app)).await?;
        ensure!(answer.status == StatusCode::OK, "a log-in was answered {}", answer.status);
    }
    Ok(())
}

struct Answer {
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

async fn send(connection: &mut Connection, request: Request<Full<Bytes>>) -> Result<Answer> {
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
    Ok(Answer { status, retry_after })
}

/// Hashes a second that the bare loop reaches, a thread on each core, with memory that is reused.
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
                while started.elapsed() < BARE {
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

/// A client address of its own for each connection.
fn address(number: u32) -> IpAddr {
    let [_, _, high, low] = (number + 1).to_be_bytes();
    Ipv4Addr::new(127, 100, high, low).into()
}

async fn start_time(server: &Server) -> Result<Duration> {
    server.terminate().await;
    let started = Instant::now();
    server.start_ready().await?;
    Ok(started.elapsed())
}

async fn sample_memory(pid: u32, done: Arc<AtomicBool>, peak: Arc<AtomicU64>) -> Result<()> {
    while !done.load(Ordering::Relaxed) {
        peak.fetch_max(resident(pid)?, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// Resident memory in MiB.
fn memory(server: &Server) -> Result<f64> {
    crate::figures::memory(server.pid().context("the server runs")?)
}
