//! A provider that hangs or is gone, beside one that is up: how long people wait who want nothing of it.

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
    client::{Anonymous, Answer},
    dex::{self, Dex, Person},
    process,
    stack::Stack,
};

const ADA: &str = "ada@example.com";
const GRACE: &str = "grace@example.com";
const PASSWORD: &str = "a quiet harbour at noon";
const DONE: &str = "http://127.0.0.1/done";
/// More than may be in flight for one provider (contract, 5), so that some are refused too.
const VISITORS: usize = 48;
/// Who is refused at once is not to keep a core busy: what is measured is waiting.
const PAUSE: Duration = Duration::from_millis(500);

/// What is measured, in the order of a person's day.
pub const OPERATIONS: [&str; 4] = ["login", "refresh", "redirect elsewhere", "callback elsewhere"];

/// What is wrong with the provider that nobody measured wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It takes connections and says nothing.
    Hangs,
    /// It takes no connection.
    Gone,
}

/// How much of it.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Times without and with each fault take turns, and are compared turn by turn: a machine that changes its pace then
    /// does so for all.
    pub rounds: usize,
    /// How often each operation is done in each of them.
    pub samples: usize,
}

/// The times of each operation.
#[derive(Default)]
struct Samples(Vec<[Duration; OPERATIONS.len()]>);

/// One turn: half of the quiet times were before the others and half after.
struct Turn {
    quiet: Samples,
    hangs: Samples,
    gone: Samples,
}

/// What came of it.
pub struct Report(Vec<Turn>);

struct Service {
    stack: Stack,
    app: App,
    client: Anonymous,
    refresh_token: String,
    /// The provider that is up.
    _dex: Dex,
    /// The one that hangs: nobody accepts here.
    _hanging: TcpListener,
}

/// Measures.
pub async fn run(options: Options) -> Result<Report> {
    let mut service = Service::start().await?;
    // What is fetched once is there before it is measured.
    service.round().await?;
    let mut turns = Vec::new();
    for _ in 0..options.rounds {
        let mut quiet = service.measure(options.samples.div_ceil(2)).await?;
        let hangs = service.measure_with(Fault::Hangs, options.samples).await?;
        let gone = service.measure_with(Fault::Gone, options.samples).await?;
        quiet.0.extend(service.measure(options.samples.div_ceil(2)).await?.0);
        turns.push(Turn { quiet, hangs, gone });
    }
    Ok(Report(turns))
}

// === impl Turn ===

impl Turn {
    fn with(&self, fault: Fault) -> &Samples {
        match fault {
            Fault::Hangs => &self.hangs,
            Fault::Gone => &self.gone,
        }
    }
}

// === impl Report ===

impl Report {
    /// How much longer an operation takes at that fault than without one: of each turn that quantile by that quantile, and
    /// of all turns the one in the middle.
    pub fn ratio(&self, fault: Fault, operation: usize, quantile: f64) -> f64 {
        let of = |turn: &Turn| {
            let during = turn.with(fault).at(operation, quantile).as_secs_f64();
            during / turn.quiet.at(operation, quantile).as_secs_f64()
        };
        let mut ratios: Vec<f64> = self.0.iter().map(of).collect();
        ratios.sort_unstable_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied().unwrap_or(f64::NAN)
    }

    fn all<'a>(&'a self, of: impl Fn(&'a Turn) -> &'a Samples) -> Samples {
        Samples(self.0.iter().flat_map(|turn| of(turn).0.iter().copied()).collect())
    }

    /// The worst of all operations and faults.
    pub fn worst(&self, quantile: f64) -> f64 {
        let each = |fault| (0..OPERATIONS.len()).map(move |operation| self.ratio(fault, operation, quantile));
        [Fault::Hangs, Fault::Gone].into_iter().flat_map(each).fold(0.0, f64::max)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quiet = self.all(|turn| &turn.quiet);
        let faulty = [Fault::Hangs, Fault::Gone].map(|fault| (fault, self.all(|turn| turn.with(fault))));
        let turns = self.0.len();
        writeln!(f, "p50 and p90 with all up, while a provider hangs, while one is gone (ratio, by {turns} turns)")?;
        for (operation, name) in OPERATIONS.into_iter().enumerate() {
            write!(f, "{name:<20}")?;
            for quantile in [0.5, 0.9] {
                write!(f, "   {:>8}", millis(quiet.at(operation, quantile)))?;
                for (fault, samples) in &faulty {
                    let ratio = self.ratio(*fault, operation, quantile);
                    write!(f, " {:>8} ({ratio:.2})", millis(samples.at(operation, quantile)))?;
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
    fn at(&self, operation: usize, quantile: f64) -> Duration {
        let mut times: Vec<Duration> = self.0.iter().map(|round| round[operation]).collect();
        times.sort_unstable();
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a place among some hundred samples"
        )]
        let place = (times.len() as f64 * quantile) as usize;
        times.get(place).copied().unwrap_or_default()
    }
}

// === impl Service ===

impl Service {
    async fn start() -> Result<Self> {
        let loose: &[(u32, u32)] = &[(1_000_000, 60)];
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let options = dex::Options::for_tests();
        let at = |addr| format!("http://{addr}");
        let up = Provider::new("up", "oidc").set("issuer", options.issuer());
        let hanging = Provider::new("hangs", "oidc").set("issuer", at(listener.local_addr()?));
        let gone = Provider::new("gone", "oidc").set("issuer", at(process::free_addr()));
        let app = App::new("down")
            .set("/redirectURLs", json!([DONE]))
            .limit("loginsPerClient", loose)
            .limit("refreshesPerSession", loose)
            .provider(&up)
            .provider(&hanging)
            .provider(&gone);
        let builder = Stack::builder().app(&app).provider(&up).provider(&hanging).provider(&gone);
        let known = dex::Client::of(&up, &builder.callback(&app, &up));
        let dex = Dex::start(options.client(known).person(Person::new("Ada Lovelace", ADA))).await?;
        let stack = builder.try_start().await?;
        let client = stack.client();
        ok(client.register(app.id(), "Grace Hopper", GRACE, PASSWORD).await, StatusCode::OK)?;
        let login = ok(client.login(app.id(), GRACE, PASSWORD).await, StatusCode::OK)?;
        let refresh_token = login.string("refresh_token").to_owned();
        Ok(Self { stack, app, client, refresh_token, _dex: dex, _hanging: listener })
    }

    async fn measure(&mut self, times: usize) -> Result<Samples> {
        let mut samples = Samples::default();
        for _ in 0..times {
            samples.0.push(self.round().await?);
        }
        Ok(samples)
    }

    async fn measure_with(&mut self, fault: Fault, times: usize) -> Result<Samples> {
        let mut visitors = self.visitors(fault);
        let samples = self.measure(times).await?;
        // They go on until they are dropped, and end before that where they are not answered as they should be.
        match visitors.try_join_next() {
            Some(ended) => ended?.map(|()| samples),
            None => Ok(samples),
        }
    }

    /// Each operation once, with its time.
    async fn round(&mut self) -> Result<[Duration; OPERATIONS.len()]> {
        let (app, client) = (self.app.id(), &self.client);
        let begin = Instant::now();
        ok(client.login(app, GRACE, PASSWORD).await, StatusCode::OK)?;
        let login = begin.elapsed();

        let begin = Instant::now();
        let body = json!({ "grant_type": "refresh_token", "refresh_token": self.refresh_token });
        let answer = ok(client.post(&format!("v1/{app}/token"), &body).await, StatusCode::OK)?;
        let refresh = begin.elapsed();
        answer.string("refresh_token").clone_into(&mut self.refresh_token);

        let begin = Instant::now();
        let answer = ok(client.get(&format!("{app}/up/redirect")).await, StatusCode::FOUND)?;
        let redirect = begin.elapsed();
        let cookie = answer.header("set-cookie").and_then(|cookie| cookie.split(';').next()).context("a cookie")?;
        let http = reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none()).build()?;
        let back = dex::way_back(&http, answer.header("location").context("an address")?, ADA).await?;

        let begin = Instant::now();
        let path = format!("{}?{}", back.path(), back.query().context("a code")?);
        let request = client.request(Method::GET, &path).header(header::COOKIE, cookie);
        let answer = ok(client.send(request).await, StatusCode::FOUND)?;
        let callback = begin.elapsed();
        let location = answer.header("location").context("an address")?;
        ensure!(location.starts_with(DONE) && location.contains("access_token="), "{location}");
        Ok([login, refresh, redirect, callback])
    }

    /// People who want to log in at the provider that is down, again and again, until this is dropped.
    fn visitors(&self, fault: Fault) -> JoinSet<Result<()>> {
        let name = match fault {
            Fault::Hangs => "hangs",
            Fault::Gone => "gone",
        };
        let mut visitors = JoinSet::new();
        for _ in 0..VISITORS {
            let (client, path) = (self.stack.client(), format!("{}/{name}/redirect", self.app.id()));
            visitors.spawn(async move {
                loop {
                    ok(client.get(&path).await, StatusCode::SERVICE_UNAVAILABLE)?;
                    tokio::time::sleep(PAUSE).await;
                }
            });
        }
        visitors
    }
}

fn ok(answer: Answer, status: StatusCode) -> Result<Answer> {
    ensure!(answer.status == status, "{} in place of {status}: {}", answer.status, answer.text);
    Ok(answer)
}
