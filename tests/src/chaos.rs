//! Sessions under chaos: clients whose tabs race, retry and lose answers, and thieves among them, while servers restart
//! and the Redis primary is killed. Counts the honest sessions that were lost, and the stolen ones that were ended.

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

use crate::{
    builders::App,
    client::own_address,
    redis::{RedisSentinel, SentinelOptions},
    stack::Stack,
};

/// How long a thief and a victim who take turns wait beyond the grace time.
const BEYOND: Duration = Duration::from_millis(300);
/// How long a client waits before it tries again where the service says that it is away.
const AWAY: Duration = Duration::from_millis(250);
/// A client that gets no answer at all for so long gives up, and the run fails.
const PATIENCE: Duration = Duration::from_secs(120);
const SESSIONS_PER_USER: usize = 90;
const PASSWORD: &str = "a quiet harbour at noon";
/// How often two who take turns may go on (contract, 4): the sixth late token is a stolen one.
pub const TURNS: u32 = 6;

/// How much of it.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub sessions: usize,
    /// Of the sessions; half are stolen by who holds an old token, half by who takes turns.
    pub stolen: usize,
    pub lasts: Duration,
    /// The App's grace time, in seconds. An answer that takes longer to be asked for again counts as late, so it is to be
    /// far longer than an answer takes on this machine.
    pub grace_seconds: u32,
    pub servers: usize,
    /// How often the Redis primary is killed.
    pub kills: u32,
}

/// What came of it.
#[derive(Debug)]
pub struct Report {
    pub options: Options,
    pub refreshes: u64,
    /// Answers that were thrown away, as if lost on the way, and asked for again at once.
    pub answers_lost: u64,
    /// Rounds in which several tabs sent one token.
    pub races: u64,
    /// Calls that a server was too dead to answer, and calls answered that the service is away.
    pub broken: u64,
    pub away: u64,
    pub restarts: u32,
    pub kills: u32,
    /// Honest sessions that were told `invalid_grant`.
    pub lost: Vec<String>,
    /// Stolen ones by an old token: all, and those that ended at the first use.
    pub old: usize,
    pub old_ended: usize,
    /// Stolen ones whose holders took turns, and after how many uses by the thief each ended.
    pub turns: usize,
    pub turns_ended: Vec<u32>,
}

#[derive(Default)]
struct Counts {
    refreshes: AtomicU64,
    answers_lost: AtomicU64,
    races: AtomicU64,
    broken: AtomicU64,
    away: AtomicU64,
}

/// What all clients share.
struct World {
    http: reqwest::Client,
    urls: Vec<String>,
    counts: Counts,
    over: AtomicBool,
}

/// What a client ended as.
enum End {
    Honest(Option<String>),
    Old { ended: bool },
    Turns { ended_after: Option<u32> },
}

/// What a refresh came to, once it was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Answer {
    Token(String),
    InvalidGrant,
}

// === impl Report ===

impl Report {
    /// Whether nobody honest was lost and every stolen session ended in time.
    pub fn holds(&self) -> bool {
        self.lost.is_empty()
            && self.old_ended == self.old
            && self.turns_ended.len() == self.turns
            && self.turns_ended.iter().all(|uses| *uses <= TURNS)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { sessions, lasts, servers, .. } = self.options;
        writeln!(f, "{sessions} sessions refreshing for {} s at {servers} servers", lasts.as_secs())?;
        writeln!(
            f,
            "  {} refreshes; {} races of tabs; {} answers lost; {} calls broken off; {} answered that the service is away",
            self.refreshes, self.races, self.answers_lost, self.broken, self.away
        )?;
        writeln!(f, "  servers restarted {} times; Redis primary killed {} times", self.restarts, self.kills)?;
        writeln!(f, "  sessions lost: {}", self.lost.len())?;
        for lost in self.lost.iter().take(10) {
            writeln!(f, "    {lost}")?;
        }
        let ended = self.old_ended + self.turns_ended.len();
        writeln!(f, "  stolen tokens: {}; sessions ended: {ended}", self.old + self.turns)?;
        writeln!(f, "    two generations old: {}, ended at the first use: {}", self.old, self.old_ended)?;
        let most = self.turns_ended.iter().max().copied().unwrap_or(0);
        write!(f, "    taking turns: {}, ended: {}, after at most {most} uses", self.turns, self.turns_ended.len())
    }
}

/// Runs it, with real servers, a real primary with a replica, and sentinels.
pub async fn run(options: Options) -> Result<Report> {
    let redis = RedisSentinel::start(SentinelOptions::for_tests()).await?;
    let loose: &[(u32, u32)] = &[(10_000_000, 60)];
    let app = App::new("chaos")
        .set("/tokens/refreshGraceSeconds", options.grace_seconds)
        .limit("loginsPerClient", loose)
        .limit("registrationsPerClient", loose)
        .limit("refreshesPerSession", loose);
    let stack = Stack::builder().app(&app).servers(options.servers).redis_at(redis.url(), None).try_start().await?;

    let tokens = sign_in(&stack, app.id(), options.sessions).await?;
    let mut connection = redis.connect().await?;
    let acknowledged: i64 = redis::cmd("WAIT").arg(1).arg(10_000).query_async(&mut connection).await?;
    ensure!(acknowledged >= 1, "the replica does not follow");

    let http = reqwest::Client::builder().no_proxy().local_address(own_address()).timeout(Duration::from_secs(20));
    let urls = stack.servers().iter().map(|server| format!("http://{}/v1/{}/token", server.public, app.id()));
    let world = Arc::new(World {
        http: http.build()?,
        urls: urls.collect(),
        counts: Counts::default(),
        over: AtomicBool::new(false),
    });
    let old = options.stolen / 2;
    let began = Instant::now();
    let clients: Vec<_> = tokens
        .into_iter()
        .enumerate()
        .map(|(number, token)| {
            let world = Arc::clone(&world);
            let turn = Duration::from_secs(options.grace_seconds.into()) + BEYOND;
            // Thefts begin all over the time, late enough to be in the middle of it and early enough to be found out.
            let share = f64::from(u32::try_from(number).unwrap_or(0))
                / f64::from(u32::try_from(options.stolen.max(1)).unwrap_or(1));
            tokio::spawn(async move {
                if number < old {
                    old_thief(&world, token, options.lasts.mul_f64(share)).await
                } else if number < options.stolen {
                    turns(&world, token, turn).await
                } else {
                    honest(&world, token).await
                }
            })
        })
        .collect();
    let (restarts, kills) = break_things(&stack, &redis, &options, began).await?;
    world.over.store(true, Ordering::Relaxed);

    let mut report = Report {
        options,
        refreshes: 0,
        answers_lost: 0,
        races: 0,
        broken: 0,
        away: 0,
        restarts,
        kills,
        lost: Vec::new(),
        old,
        old_ended: 0,
        turns: options.stolen - old,
        turns_ended: Vec::new(),
    };
    for ended in join_all(clients).await {
        match ended?? {
            End::Honest(lost) => report.lost.extend(lost),
            End::Old { ended } => report.old_ended += usize::from(ended),
            End::Turns { ended_after } => report.turns_ended.extend(ended_after),
        }
    }
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    report.refreshes = count(&world.counts.refreshes);
    report.answers_lost = count(&world.counts.answers_lost);
    report.races = count(&world.counts.races);
    report.broken = count(&world.counts.broken);
    report.away = count(&world.counts.away);
    Ok(report)
}

/// Refresh tokens of so many sessions.
async fn sign_in(stack: &Stack, app: &str, sessions: usize) -> Result<Vec<String>> {
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

/// Restarts one server after the other, by turns gracefully and not, and kills the primary at even times.
async fn break_things(stack: &Stack, redis: &RedisSentinel, options: &Options, began: Instant) -> Result<(u32, u32)> {
    let mut restarts = 0;
    let mut kills = 0;
    while began.elapsed() < options.lasts {
        if kills < options.kills && began.elapsed() > options.lasts * (kills + 1) / (options.kills + 1) {
            let primary = redis.kill_primary().await?;
            redis.failed_over(primary).await?;
            redis.restart(primary).await?;
            kills += 1;
        }
        tokio::time::sleep((options.lasts / 15).min(Duration::from_secs(10))).await;
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

// === the clients ===

/// A client whose tabs share a token: they race, they retry, and now and then an answer is lost.
async fn honest(world: &World, mut token: String) -> Result<End> {
    let mut rng = StdRng::from_rng(&mut rand::rng());
    let mut round = 0_u64;
    while !world.over.load(Ordering::Relaxed) {
        match round_of(world, &token, &mut rng).await? {
            Answer::Token(next) => token = next,
            Answer::InvalidGrant => return Ok(End::Honest(Some(format!("in its round {round}")))),
        }
        round += 1;
    }
    Ok(End::Honest(None))
}

/// One round of an honest client.
async fn round_of(world: &World, token: &str, rng: &mut StdRng) -> Result<Answer> {
    let tabs = if rng.random_bool(0.3) { rng.random_range(2..=4) } else { 1 };
    if tabs > 1 {
        world.counts.races.fetch_add(1, Ordering::Relaxed);
    }
    let loses: Vec<(bool, usize)> = (0..tabs).map(|_| (rng.random_bool(0.1), rng.random_range(0..1000))).collect();
    let answers = join_all(loses.into_iter().map(|(loses, first)| async move {
        let answer = refresh(world, token, first).await?;
        if !loses {
            return Ok(answer);
        }
        // The answer is lost on the way; the client asks again at once.
        world.counts.answers_lost.fetch_add(1, Ordering::Relaxed);
        refresh(world, token, first + 1).await
    }))
    .await;
    let answers = answers.into_iter().collect::<Result<Vec<Answer>>>()?;
    let (first, others) = answers.split_first().context("there is a tab")?;
    if let Some(other) = others.iter().find(|other| *other != first) {
        // Both are good where a fail-over came between them: the newer one is taken, as tabs do that share a store.
        if answers.contains(&Answer::InvalidGrant) {
            return Ok(Answer::InvalidGrant);
        }
        return Ok(other.clone());
    }
    Ok(first.clone())
}

/// Waits, then uses a token that is two generations old, once.
async fn old_thief(world: &World, mut token: String, wait: Duration) -> Result<End> {
    let began = Instant::now();
    let mut rng = StdRng::from_rng(&mut rand::rng());
    let mut last = [token.clone(), token.clone()];
    let mut rounds = 0;
    while rounds < 3 || (began.elapsed() < wait && !world.over.load(Ordering::Relaxed)) {
        match round_of(world, &token, &mut rng).await? {
            Answer::Token(next) => {
                last = [last[1].clone(), token];
                token = next;
            }
            Answer::InvalidGrant => bail!("a session that nobody has stolen yet was lost"),
        }
        rounds += 1;
    }
    let thief = refresh(world, &last[0], rng.random_range(0..1000)).await?;
    let victim = refresh(world, &token, rng.random_range(0..1000)).await?;
    Ok(End::Old { ended: thief == Answer::InvalidGrant && victim == Answer::InvalidGrant })
}

/// Two holders of one token take turns, and each waits out the grace time.
async fn turns(world: &World, token: String, turn: Duration) -> Result<End> {
    let mut rng = StdRng::from_rng(&mut rand::rng());
    let (mut victim, mut thief) = (token.clone(), token);
    let mut uses = 0;
    // More than enough: whatever goes beyond is not ended in time.
    for _ in 0..4 * TURNS {
        match refresh(world, &victim, rng.random_range(0..1000)).await? {
            Answer::Token(next) => victim = next,
            Answer::InvalidGrant => return Ok(End::Turns { ended_after: Some(uses) }),
        }
        tokio::time::sleep(turn).await;
        uses += 1;
        match refresh(world, &thief, rng.random_range(0..1000)).await? {
            Answer::Token(next) => thief = next,
            Answer::InvalidGrant => {
                let ended = refresh(world, &victim, rng.random_range(0..1000)).await? == Answer::InvalidGrant;
                return Ok(End::Turns { ended_after: ended.then_some(uses) });
            }
        }
        tokio::time::sleep(turn).await;
    }
    Ok(End::Turns { ended_after: None })
}

/// Asks one server after the other until one has answered.
async fn refresh(world: &World, token: &str, first: usize) -> Result<Answer> {
    let began = Instant::now();
    let body = json!({ "refresh_token": token }).to_string();
    let mut at = first;
    loop {
        ensure!(began.elapsed() < PATIENCE, "nobody answers");
        let request = world.http.post(&world.urls[at % world.urls.len()]).body(body.clone());
        let answered = async {
            let response = request.header("content-type", "application/json").send().await?;
            Ok::<_, reqwest::Error>((response.status(), response.bytes().await?))
        };
        match answered.await {
            Ok((StatusCode::OK, body)) => {
                world.counts.refreshes.fetch_add(1, Ordering::Relaxed);
                let answer: Value = serde_json::from_slice(&body)?;
                return Ok(Answer::Token(answer["refresh_token"].as_str().context("a token")?.to_owned()));
            }
            Ok((StatusCode::BAD_REQUEST, body)) => {
                let answer: Value = serde_json::from_slice(&body)?;
                ensure!(answer["error"] == "invalid_grant", "a refresh was answered {answer}");
                return Ok(Answer::InvalidGrant);
            }
            Ok((StatusCode::SERVICE_UNAVAILABLE, _)) => {
                world.counts.away.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(AWAY).await;
            }
            Ok((status, body)) => bail!("a refresh was answered {status}: {}", String::from_utf8_lossy(&body)),
            Err(_) => {
                world.counts.broken.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        at += 1;
    }
}
