//! Refreshes sessions while servers restart and the Redis primary is killed. Clients have racing tabs, retry requests
//! and lose responses, and some sessions are stolen. Counts the honest sessions (those that nobody stole) that were
//! lost, and the stolen sessions that the servers ended.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures::future::join_all;
use http::StatusCode;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::{
    builders::App,
    client::unique_client_address,
    passwords::PASSWORD,
    redis::{SentinelOptions, SentinelSetup},
    stack::Stack,
};

/// If the thief and the victim of a session refresh alternately, both wait after each refresh for the grace period plus
/// this time.
const ALTERNATION_MARGIN: Duration = Duration::from_millis(300);
/// Pause between a 503 response and the retry.
const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// If a refresh gets no response except 503 for this long, the run fails.
const REFRESH_LIMIT: Duration = Duration::from_secs(120);
/// Number of sessions of each user. Latchkey allows 100.
const SESSIONS_PER_USER: usize = 90;
/// Maximum number of a thief's refreshes until the session ends: the first five late tokens (previous refresh tokens
/// after their grace period) are accepted, and the sixth late token ends the session (specification: Sessions and
/// tokens, Reuse detection).
pub const MAX_THIEF_REFRESHES: u32 = 6;

/// Settings of a run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub sessions: usize,
    /// Number of stolen sessions. In half of them the thief uses an old token once; in the other half the thief and the
    /// victim refresh alternately.
    pub stolen: usize,
    pub duration: Duration,
    /// The App's grace period, in seconds. It must be much longer than a response takes on this machine, because the
    /// token of a retry after the grace period counts as late.
    pub grace_seconds: u32,
    pub servers: usize,
    /// How often the Redis primary is killed.
    pub kills: u32,
}

/// The result of a run.
#[derive(Debug)]
pub struct Report {
    pub options: Options,
    pub refreshes: u64,
    /// Responses that a client dropped, as if the network had lost them. The client retried immediately.
    pub responses_lost: u64,
    /// Rounds in which several tabs sent the same token.
    pub races: u64,
    /// Requests without a response.
    pub disconnected: u64,
    /// Requests with a 503 response.
    pub unavailable: u64,
    pub restarts: u32,
    pub kills: u32,
    /// For each honest session that got `invalid_grant`, the round in which that happened.
    pub lost: Vec<String>,
    /// Number of sessions in which a thief used an old token.
    pub old_tokens: usize,
    /// Number of the sessions in [`Self::old_tokens`] that ended when the thief used the old token.
    pub old_tokens_ended: usize,
    /// Number of sessions in which the thief and the victim refreshed alternately.
    pub alternating: usize,
    /// For each alternating session that ended: how often the thief had refreshed before the end.
    pub alternating_ended: Vec<u32>,
}

#[derive(Default)]
struct Counts {
    refreshes: AtomicU64,
    responses_lost: AtomicU64,
    races: AtomicU64,
    disconnected: AtomicU64,
    unavailable: AtomicU64,
}

/// State that all clients share.
struct Shared {
    http: reqwest::Client,
    urls: Vec<String>,
    counts: Counts,
    is_over: AtomicBool,
}

/// The result of a client. `Honest` contains the round in which the session was lost; `None` if it was not lost.
enum ClientOutcome {
    Honest(Option<String>),
    OldTokenThief { ended: bool },
    AlternatingThief { ended_after: Option<u32> },
}

/// The outcome of a refresh: the new refresh token, or the error.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RefreshOutcome {
    Token(String),
    InvalidGrant,
}

// === impl Report ===

impl Report {
    /// Whether no honest session was lost and every stolen session ended in time.
    pub fn is_ok(&self) -> bool {
        self.lost.is_empty()
            && self.old_tokens_ended == self.old_tokens
            && self.alternating_ended.len() == self.alternating
            && self.alternating_ended.iter().all(|uses| *uses <= MAX_THIEF_REFRESHES)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { sessions, duration, servers, .. } = self.options;
        writeln!(f, "{sessions} sessions refreshing for {} s at {servers} servers", duration.as_secs())?;
        writeln!(
            f,
            "  {} refreshes; {} races of tabs; {} responses lost; {} requests broken off; {} refused with 503",
            self.refreshes, self.races, self.responses_lost, self.disconnected, self.unavailable
        )?;
        writeln!(f, "  servers restarted {} times; Redis primary killed {} times", self.restarts, self.kills)?;
        writeln!(f, "  sessions lost: {}", self.lost.len())?;
        for lost in self.lost.iter().take(10) {
            writeln!(f, "    {lost}")?;
        }
        let ended = self.old_tokens_ended + self.alternating_ended.len();
        writeln!(f, "  stolen tokens: {}; sessions ended: {ended}", self.old_tokens + self.alternating)?;
        writeln!(f, "    two generations old: {}, ended at the first use: {}", self.old_tokens, self.old_tokens_ended)?;
        let max_uses = self.alternating_ended.iter().max().copied().unwrap_or(0);
        write!(
            f,
            "    used in turn: {}, ended: {}, after at most {max_uses} uses",
            self.alternating,
            self.alternating_ended.len()
        )
    }
}

/// Runs the scenario with real servers, a real primary with a replica, and sentinels.
pub async fn run(options: Options) -> Result<Report> {
    let redis = SentinelSetup::start(SentinelOptions::for_tests()).await?;
    let high_limit: &[(u32, u32)] = &[(10_000_000, 60)];
    let app = App::new("chaos")
        .set("/tokens/refreshGraceSeconds", options.grace_seconds)
        .limit("loginsPerClient", high_limit)
        .limit("registrationsPerClient", high_limit)
        .limit("refreshesPerSession", high_limit);
    let stack =
        Stack::builder().app(&app).servers(options.servers).external_redis(redis.url(), None).try_start().await?;

    let tokens = log_in_all(&stack, app.id(), options.sessions).await?;
    let mut connection = redis.connect().await?;
    let acknowledged: i64 = redis::cmd("WAIT").arg(1).arg(10_000).query_async(&mut connection).await?;
    ensure!(acknowledged >= 1, "the replica does not replicate");

    let http =
        reqwest::Client::builder().no_proxy().local_address(unique_client_address()).timeout(Duration::from_secs(20));
    let urls = stack.servers().iter().map(|server| format!("http://{}/v1/{}/token", server.public, app.id()));
    let shared = Arc::new(Shared {
        http: http.build()?,
        urls: urls.collect(),
        counts: Counts::default(),
        is_over: AtomicBool::new(false),
    });
    let old_tokens = options.stolen / 2;
    let began = Instant::now();
    let clients = spawn_clients(&shared, tokens, options);
    let (restarts, kills) = inject_faults(&stack, &redis, &options, began).await?;
    shared.is_over.store(true, Ordering::Relaxed);

    let mut report = Report {
        options,
        refreshes: 0,
        responses_lost: 0,
        races: 0,
        disconnected: 0,
        unavailable: 0,
        restarts,
        kills,
        lost: Vec::new(),
        old_tokens,
        old_tokens_ended: 0,
        alternating: options.stolen - old_tokens,
        alternating_ended: Vec::new(),
    };
    for outcome in join_all(clients).await {
        match outcome?? {
            ClientOutcome::Honest(lost) => report.lost.extend(lost),
            ClientOutcome::OldTokenThief { ended } => report.old_tokens_ended += usize::from(ended),
            ClientOutcome::AlternatingThief { ended_after } => report.alternating_ended.extend(ended_after),
        }
    }
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    report.refreshes = count(&shared.counts.refreshes);
    report.responses_lost = count(&shared.counts.responses_lost);
    report.races = count(&shared.counts.races);
    report.disconnected = count(&shared.counts.disconnected);
    report.unavailable = count(&shared.counts.unavailable);
    Ok(report)
}

/// Starts one client for each token. The first sessions have a thief who uses an old token, the next sessions a thief
/// who alternates with the victim, and the remaining sessions are honest.
fn spawn_clients(
    shared: &Arc<Shared>,
    tokens: Vec<String>,
    options: Options,
) -> Vec<JoinHandle<Result<ClientOutcome>>> {
    let pause = Duration::from_secs(options.grace_seconds.into()) + ALTERNATION_MARGIN;
    let spawn = |(number, token): (usize, String)| {
        let shared = Arc::clone(shared);
        // The thieves use their old tokens at different times in the first half of the run.
        let share = f64::from(u32::try_from(number).unwrap_or(0))
            / f64::from(u32::try_from(options.stolen.max(1)).unwrap_or(1));
        tokio::spawn(async move {
            if number < options.stolen / 2 {
                run_old_token_thief(&shared, token, options.duration.mul_f64(share)).await
            } else if number < options.stolen {
                run_alternating_thief(&shared, token, pause).await
            } else {
                run_honest_client(&shared, token).await
            }
        })
    };
    tokens.into_iter().enumerate().map(spawn).collect()
}

/// Registers users and opens this number of sessions. Returns the sessions' refresh tokens.
async fn log_in_all(stack: &Stack, app: &str, sessions: usize) -> Result<Vec<String>> {
    let mut tokens = Vec::with_capacity(sessions);
    for user in 0..sessions.div_ceil(SESSIONS_PER_USER) {
        let email = format!("user-{user}@example.com");
        let client = stack.client();
        client.register(app, "Ada", &email, PASSWORD).await.expect(StatusCode::OK);
        for _ in 0..SESSIONS_PER_USER.min(sessions - tokens.len()) {
            let login = client.login(app, &email, PASSWORD).await.expect(StatusCode::OK);
            tokens.push(login.string("refresh_token").to_owned());
        }
    }
    Ok(tokens)
}

/// Restarts servers one after the other, alternately with SIGTERM and SIGKILL, and kills the primary at even intervals.
/// On a slow machine, restarts can take longer than `options.duration`. In this case the run continues until the
/// primary has been killed `options.kills` times. Returns the number of restarts and the number of kills.
async fn inject_faults(stack: &Stack, redis: &SentinelSetup, options: &Options, began: Instant) -> Result<(u32, u32)> {
    let mut restarts = 0;
    let mut kills = 0;
    while began.elapsed() < options.duration || kills < options.kills {
        if kills < options.kills && began.elapsed() > options.duration * (kills + 1) / (options.kills + 1) {
            let primary = redis.kill_primary().await?;
            redis.wait_for_failover(primary).await?;
            redis.restart(primary).await?;
            kills += 1;
        }
        tokio::time::sleep((options.duration / 15).min(Duration::from_secs(10))).await;
        let servers = stack.servers();
        let server = &servers[restarts as usize % servers.len()];
        if restarts % 2 == 0 {
            server.terminate().await;
        } else {
            server.kill();
        }
        server.start_ready().await?;
        restarts += 1;
    }
    Ok((restarts, kills))
}

// === clients ===

/// A client with several tabs that share a token. The tabs race, they retry, and sometimes a response is lost.
async fn run_honest_client(shared: &Shared, mut token: String) -> Result<ClientOutcome> {
    let mut rng = StdRng::from_rng(&mut rand::rng());
    let mut round = 0_u64;
    while !shared.is_over.load(Ordering::Relaxed) {
        match run_round(shared, &token, &mut rng).await? {
            RefreshOutcome::Token(next) => token = next,
            RefreshOutcome::InvalidGrant => return Ok(ClientOutcome::Honest(Some(format!("in its round {round}")))),
        }
        round += 1;
    }
    Ok(ClientOutcome::Honest(None))
}

/// One round: each tab of a client refreshes with the same token. Returns the outcome with which the client continues.
async fn run_round(shared: &Shared, token: &str, rng: &mut StdRng) -> Result<RefreshOutcome> {
    let tabs = if rng.random_bool(0.3) { rng.random_range(2..=4) } else { 1 };
    if tabs > 1 {
        shared.counts.races.fetch_add(1, Ordering::Relaxed);
    }
    let plans: Vec<(bool, usize)> = (0..tabs).map(|_| (rng.random_bool(0.1), rng.random_range(0..1000))).collect();
    let outcomes = join_all(plans.into_iter().map(|(loses_response, first_server)| async move {
        let outcome = refresh(shared, token, first_server).await?;
        if !loses_response {
            return Ok(outcome);
        }
        // The client drops the response, as if the network had lost it, and retries immediately.
        shared.counts.responses_lost.fetch_add(1, Ordering::Relaxed);
        refresh(shared, token, first_server + 1).await
    }))
    .await;
    let outcomes = outcomes.into_iter().collect::<Result<Vec<RefreshOutcome>>>()?;
    let (first, others) = outcomes.split_first().context("a round has at least one tab")?;
    if let Some(other) = others.iter().find(|other| *other != first) {
        // If a failover happened between two responses, the tabs can get different tokens, and all are valid. The
        // client continues with one of them, as tabs with a common local storage do.
        if outcomes.contains(&RefreshOutcome::InvalidGrant) {
            return Ok(RefreshOutcome::InvalidGrant);
        }
        return Ok(other.clone());
    }
    Ok(first.clone())
}

/// The victim refreshes normally for `wait`, and at least three times. Then a thief once sends a token that is two
/// generations old.
async fn run_old_token_thief(shared: &Shared, mut token: String, wait: Duration) -> Result<ClientOutcome> {
    let began = Instant::now();
    let mut rng = StdRng::from_rng(&mut rand::rng());
    let mut previous = [token.clone(), token.clone()];
    let mut rounds = 0;
    while rounds < 3 || (began.elapsed() < wait && !shared.is_over.load(Ordering::Relaxed)) {
        match run_round(shared, &token, &mut rng).await? {
            RefreshOutcome::Token(next) => {
                previous = [previous[1].clone(), token];
                token = next;
            }
            RefreshOutcome::InvalidGrant => bail!("a session was lost before it was stolen"),
        }
        rounds += 1;
    }
    let thief = refresh(shared, &previous[0], rng.random_range(0..1000)).await?;
    let victim = refresh(shared, &token, rng.random_range(0..1000)).await?;
    Ok(ClientOutcome::OldTokenThief {
        ended: thief == RefreshOutcome::InvalidGrant && victim == RefreshOutcome::InvalidGrant,
    })
}

/// The thief and the victim refresh alternately. After each refresh, both wait until the grace period has ended.
async fn run_alternating_thief(shared: &Shared, token: String, pause: Duration) -> Result<ClientOutcome> {
    let mut rng = StdRng::from_rng(&mut rand::rng());
    let (mut victim, mut thief) = (token.clone(), token);
    let mut uses = 0;
    // If the session still works after four times the maximum number of refreshes, the theft was not detected.
    for _ in 0..4 * MAX_THIEF_REFRESHES {
        match refresh(shared, &victim, rng.random_range(0..1000)).await? {
            RefreshOutcome::Token(next) => victim = next,
            RefreshOutcome::InvalidGrant => return Ok(ClientOutcome::AlternatingThief { ended_after: Some(uses) }),
        }
        tokio::time::sleep(pause).await;
        uses += 1;
        match refresh(shared, &thief, rng.random_range(0..1000)).await? {
            RefreshOutcome::Token(next) => thief = next,
            RefreshOutcome::InvalidGrant => {
                let ended = refresh(shared, &victim, rng.random_range(0..1000)).await? == RefreshOutcome::InvalidGrant;
                return Ok(ClientOutcome::AlternatingThief { ended_after: ended.then_some(uses) });
            }
        }
        tokio::time::sleep(pause).await;
    }
    Ok(ClientOutcome::AlternatingThief { ended_after: None })
}

/// Refreshes at one server after the other, until one responds with a status other than 503. Starts at the server with
/// the index `first_server`.
async fn refresh(shared: &Shared, token: &str, first_server: usize) -> Result<RefreshOutcome> {
    let began = Instant::now();
    let body = json!({ "refresh_token": token }).to_string();
    let mut server = first_server;
    loop {
        ensure!(began.elapsed() < REFRESH_LIMIT, "no server responds");
        let request = shared.http.post(&shared.urls[server % shared.urls.len()]).body(body.clone());
        let call = async {
            let response = request.header("content-type", "application/json").send().await?;
            Ok::<_, reqwest::Error>((response.status(), response.bytes().await?))
        };
        match call.await {
            Ok((StatusCode::OK, body)) => {
                shared.counts.refreshes.fetch_add(1, Ordering::Relaxed);
                let body: Value = serde_json::from_slice(&body)?;
                return Ok(RefreshOutcome::Token(body["refresh_token"].as_str().context("a token")?.to_owned()));
            }
            Ok((StatusCode::BAD_REQUEST, body)) => {
                let body: Value = serde_json::from_slice(&body)?;
                ensure!(body["error"] == "invalid_grant", "a refresh returned {body}");
                return Ok(RefreshOutcome::InvalidGrant);
            }
            Ok((StatusCode::SERVICE_UNAVAILABLE, _)) => {
                shared.counts.unavailable.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            Ok((status, body)) => bail!("a refresh returned {status}: {}", String::from_utf8_lossy(&body)),
            Err(_) => {
                shared.counts.disconnected.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        server += 1;
    }
}
