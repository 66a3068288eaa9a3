//! Compares the rate of password logins with the rates of two loops that only compute password hashes: one with the
//! server's kernel and one with the crate `argon2`, on the same cores in the same run. Also measures the server's
//! memory, and the time that a server needs to start.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use argon2_simd::Kernel;
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

use crate::{
    hashing::{Implementation, hash_function},
    measurements::{Bound, MIB, format_millis, histogram, micros_of, resident_bytes},
};

/// Number of rounds of each [`Step`]. A round runs the two hash-only loops and then logins, because the speed of the
/// machine can change between rounds. The results of all rounds are added up.
const ROUNDS: u32 = 5;
/// Duration of the logins of one round.
const ROUND_TIME: Duration = Duration::from_secs(4);
/// Duration of each of the two hash-only loops in one round.
const HASH_LOOP_TIME: Duration = Duration::from_secs(2);
/// Numbers of concurrent logins.
const IN_FLIGHT: [u32; 5] = [1, 8, 64, 256, 1024];
/// Up to this number of concurrent logins, the memory of the server also has a limit that depends on the number of
/// cores. With more logins, only [`MAX_MEMORY_MIB`] applies, because more connections need more memory.
const MEMORY_IN_FLIGHT: u32 = 256;
/// Maximum memory of the server with any number of concurrent logins: half of the memory limit in the chart.
const MAX_MEMORY_MIB: f64 = 128.0;
/// Number of users. They log in by turns, so that each user opens fewer sessions than the 100 that a user can have.
pub(crate) const USERS: u32 = 2000;
/// The number of logins so far. Its remainder modulo [`USERS`] is the number of the user who logs in next.
static NEXT_USER: AtomicU32 = AtomicU32::new(0);
/// Numbers of clients that retry immediately. A fast CPU admits nearly all logins of 256 clients, but
/// refuses many of 1,024.
const IMPATIENT_CLIENTS: [u32; 2] = [256, 1024];
/// Number of patient clients, for the comparison with the impatient clients.
const PATIENT_CLIENTS: u32 = 64;
/// Minimum rate of admitted logins with impatient clients, relative to the rate with patient clients.
const MIN_ADMITTED_RATIO: f64 = 0.85;
/// Minimum rate of logins with 8 or more logins in flight, relative to the hash-only loop with the server's kernel.
const MIN_KERNEL_SHARE: f64 = 0.85;
/// Minimum rate of logins with 8 or more logins in flight, relative to the hash-only loop with the crate `argon2`, on a
/// CPU with AVX-512.
const MIN_CRATE_RATIO: f64 = 2.0;

/// What clients do after a refusal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RetryBehavior {
    /// The clients wait as long as `Retry-After` says.
    Patient,
    /// The clients retry immediately.
    Impatient,
}

/// The measurements with one number of concurrent logins. Latencies are in microseconds.
struct Step {
    in_flight: u32,
    behavior: RetryBehavior,
    /// Number of logins that succeeded within [`ROUND_TIME`]. The login rate is based on this time, and not on the time
    /// of the last response, because the server can delay a 503 response.
    logins_in_time: u32,
    /// Hashes per second of the hash-only loop with the server's kernel.
    kernel_rate: f64,
    /// Hashes per second of the hash-only loop with the crate `argon2`.
    crate_rate: f64,
    login_rate: f64,
    latency: Histogram<u64>,
    /// Latency of the 503 responses.
    refusal_latency: Histogram<u64>,
    refusals_without_retry_after: u64,
    jwks_latency: Histogram<u64>,
    peak_memory_mib: f64,
}

/// Runs the benchmark, prints the measurements, and returns the bounds.
pub(crate) async fn run() -> Result<Vec<Bound>> {
    let threads = thread::available_parallelism()?.get();
    println!("Password logins, on {threads} cores shared by server, client, Postgres and Redis\n");
    let high_limit: &[(u32, u32)] = &[(10_000_000, 60)];
    let app = App::new("bench")
        .limit("loginFailuresPerClient", high_limit)
        .limit("loginFailuresPerAccount", high_limit)
        .limit("loginFailuresPerClientOverall", high_limit)
        .limit("loginsPerClient", high_limit);
    let stack = Stack::with(&app).await;
    let server = stack.server();
    add_users(&stack, app.id()).await?;
    warm_up(server.public, app.id()).await?;
    let memory_before = server_memory(server)?;

    println!(
        "in flight    logins/s   bare kernel/s   share   bare crate/s   ratio         p50       p90       p99   refused   refused p99"
    );
    let mut steps = Vec::new();
    for in_flight in IN_FLIGHT {
        let [step] = run_steps(server, app.id(), [Step::new(in_flight, RetryBehavior::Patient)]).await?;
        step.print();
        steps.push(step);
    }
    let [some, many] = IMPATIENT_CLIENTS;
    println!(
        "\nalternating: {PATIENT_CLIENTS} patient clients, and {some} and {many} that retry immediately after each 503"
    );
    let compared = [
        Step::new(PATIENT_CLIENTS, RetryBehavior::Patient),
        Step::new(some, RetryBehavior::Impatient),
        Step::new(many, RetryBehavior::Impatient),
    ];
    let compared = run_steps(server, app.id(), compared).await?;
    compared.iter().for_each(Step::print);
    let memory_after = server_memory(server)?;
    // The steps with few logins in flight ran first, because the server keeps the memory that many logins needed.
    let peak_memory_of =
        |steps: &mut dyn Iterator<Item = &Step>| steps.map(|step| step.peak_memory_mib).fold(memory_before, f64::max);
    let peak_memory = peak_memory_of(&mut steps.iter().filter(|step| step.in_flight <= MEMORY_IN_FLIGHT));
    let peak_memory_of_all = peak_memory_of(&mut steps.iter().chain(&compared));
    println!(
        "\nMemory of the server: {memory_before:.1} MiB before, {peak_memory:.1} MiB at the peak with up to \
         {MEMORY_IN_FLIGHT} in flight, {peak_memory_of_all:.1} MiB with more, {memory_after:.1} MiB after"
    );
    let start_duration = measure_start(server).await?;
    println!("Start, from the process to ready: {:.0} ms\n", start_duration.as_secs_f64() * 1000.0);

    let mut bounds = bounds(&steps, peak_memory, threads);
    bounds.push(Bound::new(
        format!("memory with more in flight is under {MAX_MEMORY_MIB} MiB: {peak_memory_of_all:.1} MiB"),
        peak_memory_of_all < MAX_MEMORY_MIB,
    ));
    let [patient, impatient @ ..] = &compared;
    bounds.extend(impatient.iter().flat_map(|step| impatient_bounds(patient, step)));
    Ok(bounds)
}

fn impatient_bounds(patient: &Step, impatient: &Step) -> [Bound; 2] {
    let clients = impatient.in_flight;
    let admitted = impatient.login_rate / patient.login_rate;
    let p99 = impatient.jwks_latency.value_at_quantile(0.99);
    [
        Bound::new(
            format!(
                "{clients} clients that retry immediately: at least {:.0} % of the logins at {PATIENT_CLIENTS} in flight are \
                 admitted: {:.0} %",
                100.0 * MIN_ADMITTED_RATIO,
                100.0 * admitted
            ),
            admitted >= MIN_ADMITTED_RATIO,
        ),
        Bound::new(
            format!(
                "JWKS, 20 times per second during the logins of these {clients}, p99 under 50 ms: {}",
                format_millis(&impatient.jwks_latency, 0.99)
            ),
            p99 < 50_000 && !impatient.jwks_latency.is_empty(),
        ),
    ]
}

// === impl Step ===

impl Step {
    fn new(in_flight: u32, behavior: RetryBehavior) -> Self {
        Self {
            in_flight,
            behavior,
            logins_in_time: 0,
            kernel_rate: 0.0,
            crate_rate: 0.0,
            login_rate: 0.0,
            latency: histogram(),
            refusal_latency: histogram(),
            refusals_without_retry_after: 0,
            jwks_latency: histogram(),
            peak_memory_mib: 0.0,
        }
    }

    fn print(&self) {
        println!(
            "{:>9}   {:>9.1}   {:>13.1}   {:>3.0} %   {:>12.1}   {:>5.2}   {:>9} {:>9} {:>9}   {:>7}   {:>11}",
            self.in_flight,
            self.login_rate,
            self.kernel_rate,
            100.0 * self.login_rate / self.kernel_rate,
            self.crate_rate,
            self.login_rate / self.crate_rate,
            format_millis(&self.latency, 0.5),
            format_millis(&self.latency, 0.9),
            format_millis(&self.latency, 0.99),
            self.refusal_latency.len(),
            if self.refusal_latency.is_empty() { "-".to_owned() } else { format_millis(&self.refusal_latency, 0.99) },
        );
    }
}

fn bounds(steps: &[Step], peak: f64, threads: usize) -> Vec<Bound> {
    // One login at a time leaves most cores idle. With eight or more at a time, the cores limit the rate.
    let saturated_steps = steps.iter().filter(|step| step.in_flight >= 8);
    let min_share =
        saturated_steps.clone().map(|step| step.login_rate / step.kernel_rate).fold(f64::INFINITY, f64::min);
    let min_ratio = saturated_steps.map(|step| step.login_rate / step.crate_rate).fold(f64::INFINITY, f64::min);
    let last_step = steps.last().expect("there are steps");
    let max_memory = 40.0 + 20.0 * f64::from(u32::try_from(threads).unwrap_or(u32::MAX));
    let refused_p99 = last_step.refusal_latency.value_at_quantile(0.99);
    let jwks_p99 = last_step.jwks_latency.value_at_quantile(0.99);
    let mut bounds = Vec::new();
    if Kernel::fastest().name() == "avx512" {
        bounds.push(Bound::new(
            format!(
                "from 8 in flight on, logins have at least {MIN_CRATE_RATIO} times the bare rate of the crate argon2: \
                 {min_ratio:.2}"
            ),
            min_ratio >= MIN_CRATE_RATIO,
        ));
    }
    bounds.extend([
        Bound {
            what: format!(
                "from 8 in flight on, logins have at least {:.0} % of the bare rate of the server's kernel: {:.0} %",
                100.0 * MIN_KERNEL_SHARE,
                100.0 * min_share
            ),
            met: min_share >= MIN_KERNEL_SHARE,
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
                format_millis(&last_step.refusal_latency, 0.99),
                last_step.refusal_latency.len()
            ),
            met: refused_p99 < 2_000_000 && !last_step.refusal_latency.is_empty(),
        },
        Bound {
            what: format!("each 503 has Retry-After: {} without", last_step.refusals_without_retry_after),
            met: last_step.refusals_without_retry_after == 0,
        },
        Bound {
            what: format!(
                "JWKS, 20 times per second at {} in flight, p99 under 50 ms: {}",
                last_step.in_flight,
                format_millis(&last_step.jwks_latency, 0.99)
            ),
            met: jwks_p99 < 50_000 && !last_step.jwks_latency.is_empty(),
        },
    ]);
    bounds
}

/// Runs the rounds of the steps. Each round runs all steps, so that the results of the steps can be compared.
async fn run_steps<const N: usize>(server: &ServerProcess, app: &str, mut steps: [Step; N]) -> Result<[Step; N]> {
    let (mut kernel_rate, mut crate_rate) = (0.0, 0.0);
    for _ in 0..ROUNDS {
        kernel_rate += blocking_hash_loop_rate(Implementation::Kernel(Kernel::fastest())).await?;
        crate_rate += blocking_hash_loop_rate(Implementation::Crate).await?;
        for step in &mut steps {
            run_round(server, app, step).await?;
        }
    }
    for step in &mut steps {
        step.kernel_rate = kernel_rate / f64::from(ROUNDS);
        step.crate_rate = crate_rate / f64::from(ROUNDS);
        step.login_rate = f64::from(step.logins_in_time) / (ROUND_TIME * ROUNDS).as_secs_f64();
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
        let measurements = client.await??;
        step.logins_in_time += measurements.logins_in_time;
        step.latency.add(&measurements.latency)?;
        step.refusal_latency.add(&measurements.refusal_latency)?;
        step.refusals_without_retry_after += measurements.refusals_without_retry_after;
    }
    step.jwks_latency.add(&jwks.await??)?;
    done.store(true, Ordering::Relaxed);
    sampler.await??;
    #[expect(clippy::cast_precision_loss, reason = "a size of a benchmark is far below 2^52")]
    {
        step.peak_memory_mib = step.peak_memory_mib.max(peak.load(Ordering::Relaxed) as f64 / MIB);
    }
    Ok(())
}

/// Measurements of one client.
pub(crate) struct ClientMeasurements {
    pub(crate) logins_in_time: u32,
    latency: Histogram<u64>,
    refusal_latency: Histogram<u64>,
    refusals_without_retry_after: u64,
}

/// Logs in until `end`. The client sends its next request after the response to the previous one.
pub(crate) async fn log_in_until(
    end: Instant,
    server: SocketAddr,
    from: IpAddr,
    app: String,
    behavior: RetryBehavior,
) -> Result<ClientMeasurements> {
    let mut measurements = ClientMeasurements {
        logins_in_time: 0,
        latency: histogram(),
        refusal_latency: histogram(),
        refusals_without_retry_after: 0,
    };
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
                measurements.latency.record(took)?;
                measurements.logins_in_time += u32::from(Instant::now() < end);
            }
            StatusCode::SERVICE_UNAVAILABLE => {
                measurements.refusal_latency.record(took)?;
                match response.retry_after {
                    Some(_) if behavior == RetryBehavior::Impatient => {}
                    Some(after) => tokio::time::sleep(after.min(end.saturating_duration_since(Instant::now()))).await,
                    None => measurements.refusals_without_retry_after += 1,
                }
            }
            other => anyhow::bail!("a login returned {other}"),
        }
    }
    Ok(measurements)
}

async fn read_jwks_until(end: Instant, server: SocketAddr, app: String) -> Result<Histogram<u64>> {
    let mut latency = histogram();
    let mut connection = connect(server, Ipv4Addr::new(127, 200, 0, 1).into()).await?;
    let mut ticks = tokio::time::interval(Duration::from_millis(50));
    while Instant::now() < end {
        ticks.tick().await;
        let request = Request::get(format!("/{app}/.well-known/jwks.json")).header("host", server.to_string());
        let started = Instant::now();
        let response = send(&mut connection, request.body(Full::default())?).await?;
        ensure!(response.status == StatusCode::OK, "JWKS returned {}", response.status);
        latency.record(micros_of(started.elapsed()))?;
    }
    Ok(latency)
}

async fn warm_up(server: SocketAddr, app: &str) -> Result<()> {
    let mut connection = connect(server, client_address(0)).await?;
    for _ in 0..20 {
        let response = send(&mut connection, log_in_request(server, app)).await?;
        ensure!(response.status == StatusCode::OK, "a login returned {}", response.status);
    }
    Ok(())
}

pub(crate) struct LoginResponse {
    pub(crate) status: StatusCode,
    pub(crate) retry_after: Option<Duration>,
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

/// Adds [`USERS`] users to an App: registers one user, and copies this user's row for the others.
pub(crate) async fn add_users(stack: &Stack, app: &str) -> Result<()> {
    stack.client().register(app, "Ada", "ada@example.com", PASSWORD).await.expect(StatusCode::OK);
    let copy = "INSERT INTO users (app_id, id, email, email_canonical, name, password_hash, created_at, updated_at)
                SELECT app_id, gen_random_uuid(), number || '@example.com', number || '@example.com', name,
                    password_hash, created_at, updated_at
                FROM users, generate_series(0, $1 - 1) AS number
                WHERE app_id = $2 AND email = 'ada@example.com'";
    let mut connection = stack.database.connect().await?;
    sqlx::query(copy).bind(i32::try_from(USERS)?).bind(app).execute(&mut connection).await?;
    Ok(())
}

/// The email address of the next user.
pub(crate) fn next_email() -> String {
    format!("{}@example.com", NEXT_USER.fetch_add(1, Ordering::Relaxed) % USERS)
}

/// A login of the next user.
pub(crate) fn log_in_request(server: SocketAddr, app: &str) -> Request<Full<Bytes>> {
    log_in_request_of(server, app, &next_email(), PASSWORD)
}

pub(crate) fn log_in_request_of(server: SocketAddr, app: &str, email: &str, password: &str) -> Request<Full<Bytes>> {
    let body = json!({ "email": email, "password": password }).to_string();
    Request::post(format!("/v1/{app}/email/login"))
        .header("host", server.to_string())
        .header("content-type", "application/json")
        .body(Full::from(body))
        .expect("a request of fixed parts")
}

pub(crate) async fn send(connection: &mut Connection, request: Request<Full<Bytes>>) -> Result<LoginResponse> {
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

/// Hashes per second of a hash-only loop: one thread on each core, with reused memory.
fn hash_loop_rate(implementation: Implementation) -> f64 {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let started = Instant::now();
    let workers: Vec<_> = (0..threads)
        .map(|_| {
            thread::spawn(move || {
                let mut hash = hash_function(implementation);
                let mut hashes = 0_u32;
                while started.elapsed() < HASH_LOOP_TIME {
                    hash();
                    hashes += 1;
                }
                hashes
            })
        })
        .collect();
    let hashes: u32 = workers.into_iter().map(|worker| worker.join().expect("the hash-only loop does not panic")).sum();
    f64::from(hashes) / started.elapsed().as_secs_f64()
}

/// Runs [`hash_loop_rate`] on a thread that can block.
async fn blocking_hash_loop_rate(implementation: Implementation) -> Result<f64> {
    Ok(tokio::task::spawn_blocking(move || hash_loop_rate(implementation)).await?)
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
