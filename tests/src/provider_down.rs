//! An App with three providers: one works, one hangs, and one is unreachable. Measures the latency of requests that do
//! not use a failing provider, while other clients use a failing provider.

use std::{
    fmt,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use http::{Method, StatusCode, header};
use serde_json::json;
use tokio::{net::TcpListener, task::JoinSet};

use crate::{
    builders::{App, Provider},
    client::{ApiClient, ApiResponse},
    dex::{self, Dex, User},
    passwords::PASSWORD,
    process,
    stack::Stack,
};

const ADA: &str = "ada@example.com";
const GRACE: &str = "grace@example.com";
const REDIRECT_URL: &str = "http://127.0.0.1/done";
/// Number of clients that use the failing provider. It is above the limit on concurrent provider calls, so that the
/// server rejects some calls (specification: Limits, Provider calls).
const VISITORS: usize = 48;
/// Pause after a rejected login. Without it, the visitors would keep a core busy and distort the measured latency.
const REJECTION_PAUSE: Duration = Duration::from_millis(500);

/// The measured operations. `elsewhere` means at the provider that works.
pub const OPERATIONS: [&str; 4] = ["login", "refresh", "redirect elsewhere", "callback elsewhere"];

/// What is wrong with the failing provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The provider accepts connections and does not respond.
    Hanging,
    /// The provider accepts no connections.
    Unreachable,
}

/// Settings of a run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Number of rounds. Each round measures without a fault and with each fault. The report compares only measurements
    /// of the same round, because the speed of the machine can change between rounds.
    pub rounds: usize,
    /// How often a round measures each operation without a fault, and again with each fault.
    pub samples: usize,
}

/// Measured latencies. Each element has one latency for each operation.
#[derive(Default)]
struct Samples(Vec<[Duration; OPERATIONS.len()]>);

/// The samples of one round. Half of the samples without a fault are from before the faults, half from after them.
struct Round {
    without_fault: Samples,
    hanging: Samples,
    unreachable: Samples,
}

/// The result of a run.
pub struct Report(Vec<Round>);

struct TestService {
    stack: Stack,
    app: App,
    client: ApiClient,
    refresh_token: String,
    /// The provider that works.
    _dex: Dex,
    /// The provider that hangs: nothing accepts the connections of this listener.
    _hanging: TcpListener,
}

/// Runs the measurement.
pub async fn run(options: Options) -> Result<Report> {
    let mut service = TestService::start().await?;
    // Fills the caches before the measurement.
    service.run_operations().await?;
    let mut rounds = Vec::new();
    for _ in 0..options.rounds {
        let mut without_fault = service.measure(options.samples.div_ceil(2)).await?;
        let hanging = service.measure_with(Fault::Hanging, options.samples).await?;
        let unreachable = service.measure_with(Fault::Unreachable, options.samples).await?;
        without_fault.0.extend(service.measure(options.samples.div_ceil(2)).await?.0);
        rounds.push(Round { without_fault, hanging, unreachable });
    }
    Ok(Report(rounds))
}

// === impl Round ===

impl Round {
    fn samples_with(&self, fault: Fault) -> &Samples {
        match fault {
            Fault::Hanging => &self.hanging,
            Fault::Unreachable => &self.unreachable,
        }
    }
}

// === impl Report ===

impl Report {
    /// The latency of an operation with this fault, divided by the latency without a fault. Calculates this ratio from
    /// the quantiles of each round, and returns the median over the rounds.
    pub fn ratio(&self, fault: Fault, operation: usize, quantile: f64) -> f64 {
        let ratio_of = |round: &Round| {
            let during = round.samples_with(fault).quantile(operation, quantile).as_secs_f64();
            during / round.without_fault.quantile(operation, quantile).as_secs_f64()
        };
        let mut ratios: Vec<f64> = self.0.iter().map(ratio_of).collect();
        ratios.sort_unstable_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied().unwrap_or(f64::NAN)
    }

    fn all_samples<'a>(&'a self, select: impl Fn(&'a Round) -> &'a Samples) -> Samples {
        Samples(self.0.iter().flat_map(|round| select(round).0.iter().copied()).collect())
    }

    /// The highest ratio over all operations and faults.
    pub fn worst_ratio(&self, quantile: f64) -> f64 {
        let each = |fault| (0..OPERATIONS.len()).map(move |operation| self.ratio(fault, operation, quantile));
        [Fault::Hanging, Fault::Unreachable].into_iter().flat_map(each).fold(0.0, f64::max)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let without_fault = self.all_samples(|round| &round.without_fault);
        let faulty = [Fault::Hanging, Fault::Unreachable]
            .map(|fault| (fault, self.all_samples(|round| round.samples_with(fault))));
        let rounds = self.0.len();
        writeln!(
            f,
            "p50 and p90: all available; one provider hangs; one is unreachable (ratio, from {rounds} rounds)"
        )?;
        for (operation, name) in OPERATIONS.into_iter().enumerate() {
            write!(f, "{name:<20}")?;
            for quantile in [0.5, 0.9] {
                write!(f, "   {:>8}", millis(without_fault.quantile(operation, quantile)))?;
                for (fault, samples) in &faulty {
                    let ratio = self.ratio(*fault, operation, quantile);
                    write!(f, " {:>8} ({ratio:.2})", millis(samples.quantile(operation, quantile)))?;
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

fn millis(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}

// === impl Samples ===

impl Samples {
    fn quantile(&self, operation: usize, quantile: f64) -> Duration {
        let mut times: Vec<Duration> = self.0.iter().map(|sample| sample[operation]).collect();
        times.sort_unstable();
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an index into some hundred samples"
        )]
        let index = (times.len() as f64 * quantile) as usize;
        times.get(index).copied().unwrap_or_default()
    }
}

// === impl TestService ===

impl TestService {
    async fn start() -> Result<Self> {
        let high_limit: &[(u32, u32)] = &[(1_000_000, 60)];
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let options = dex::Options::for_tests();
        let http_url = |addr| format!("http://{addr}");
        let working = Provider::new("up", "oidc").set("issuer", options.issuer());
        let hanging = Provider::new("hangs", "oidc").set("issuer", http_url(listener.local_addr()?));
        let unreachable = Provider::new("gone", "oidc").set("issuer", http_url(process::free_addr()));
        let app = App::new("down")
            .set("/redirectURLs", json!([REDIRECT_URL]))
            .limit("loginsPerClient", high_limit)
            .limit("refreshesPerSession", high_limit)
            .provider(&working)
            .provider(&hanging)
            .provider(&unreachable);
        let builder = Stack::builder().app(&app).provider(&working).provider(&hanging).provider(&unreachable);
        let registered_client = dex::Client::of(&working, &builder.callback(&app, &working));
        let dex = Dex::start(options.client(registered_client).user(User::new("Ada Lovelace", ADA))).await?;
        let stack = builder.try_start().await?;
        let client = stack.client();
        expect_status(client.register(app.id(), "Grace Hopper", GRACE, PASSWORD).await, StatusCode::OK)?;
        let login = expect_status(client.login(app.id(), GRACE, PASSWORD).await, StatusCode::OK)?;
        let refresh_token = login.string("refresh_token").to_owned();
        Ok(Self { stack, app, client, refresh_token, _dex: dex, _hanging: listener })
    }

    async fn measure(&mut self, times: usize) -> Result<Samples> {
        let mut samples = Samples::default();
        for _ in 0..times {
            samples.0.push(self.run_operations().await?);
        }
        Ok(samples)
    }

    async fn measure_with(&mut self, fault: Fault, times: usize) -> Result<Samples> {
        let mut visitors = self.visitors(fault);
        let samples = self.measure(times).await?;
        // Visitors run until they are dropped. A visitor that has ended got an unexpected response.
        match visitors.try_join_next() {
            Some(ended) => ended?.map(|()| samples),
            None => Ok(samples),
        }
    }

    /// Runs each operation once and returns the latencies.
    async fn run_operations(&mut self) -> Result<[Duration; OPERATIONS.len()]> {
        let (app, client) = (self.app.id(), &self.client);
        let begin = Instant::now();
        expect_status(client.login(app, GRACE, PASSWORD).await, StatusCode::OK)?;
        let login = begin.elapsed();

        let begin = Instant::now();
        let body = json!({ "grant_type": "refresh_token", "refresh_token": self.refresh_token });
        let response = expect_status(client.post(&format!("v1/{app}/token"), &body).await, StatusCode::OK)?;
        let refresh = begin.elapsed();
        response.string("refresh_token").clone_into(&mut self.refresh_token);

        let begin = Instant::now();
        let response = expect_status(client.get(&format!("{app}/up/redirect")).await, StatusCode::FOUND)?;
        let redirect = begin.elapsed();
        let cookie = response.header("set-cookie").and_then(|cookie| cookie.split(';').next()).context("a cookie")?;
        let http = reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none()).build()?;
        let callback_url = dex::callback_url(&http, response.header("location").context("an address")?, ADA).await?;

        let begin = Instant::now();
        let path = format!("{}?{}", callback_url.path(), callback_url.query().context("a code")?);
        let request = client.request(Method::GET, &path).header(header::COOKIE, cookie);
        let response = expect_status(client.send(request).await, StatusCode::FOUND)?;
        let callback = begin.elapsed();
        let location = response.header("location").context("an address")?;
        ensure!(location.starts_with(REDIRECT_URL) && location.contains("access_token="), "{location}");
        Ok([login, refresh, redirect, callback])
    }

    /// Clients that try to log in at the failing provider, in a loop, until the returned set is dropped.
    fn visitors(&self, fault: Fault) -> JoinSet<Result<()>> {
        let name = match fault {
            Fault::Hanging => "hangs",
            Fault::Unreachable => "gone",
        };
        let mut visitors = JoinSet::new();
        for _ in 0..VISITORS {
            let (client, path) = (self.stack.client(), format!("{}/{name}/redirect", self.app.id()));
            visitors.spawn(async move {
                loop {
                    expect_status(client.get(&path).await, StatusCode::SERVICE_UNAVAILABLE)?;
                    tokio::time::sleep(REJECTION_PAUSE).await;
                }
            });
        }
        visitors
    }
}

fn expect_status(response: ApiResponse, status: StatusCode) -> Result<ApiResponse> {
    ensure!(response.status == status, "{} instead of {status}: {}", response.status, response.text);
    Ok(response)
}
