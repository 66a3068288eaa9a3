//! Enumeration protection (specification: Accounts, Equal response times): on a quiet server the response time does not
//! show whether an email address has an account. This is a separate program with one test, because the test must run
//! alone.
//!
//! # The decision and its error rate
//!
//! A comparison sends pairs of requests: one for a known and one for an unknown address, in random order. `d` is how
//! much longer the request for the known address took. If both requests take the same time, chance alone decides the
//! sign of `d`. If requests for known addresses take longer by a fixed time, the median of `d` is that time.
//!
//! `n` pairs give an interval for that median, without an assumption about the distribution of times: sort the values
//! of `d`, and leave out the `k` smallest and the `k` greatest. The interval reaches from the smallest to the greatest
//! remaining value. For each end of the interval, the probability that the median is beyond this end is the probability
//! that at most `k` of `n` coin tosses show heads. `k` is the greatest number for which this probability is at most
//! `MAX_ERROR_PROBABILITY`.
//!
//! The test reports a difference only if the whole interval is beyond a bound, by default 1 ms. It evaluates a
//! comparison after every 250 pairs, at most three times, until the result is certain. If the times differ by no more
//! than the bound, a false report has a probability of at most `MAX_ERROR_PROBABILITY` on each of the two sides, in
//! each evaluation. There are at most nineteen comparisons with at most three evaluations each. So the probability of a
//! false alarm in a run is at most 2 · 10⁻⁷ · 19 · 3 = 1.14 · 10⁻⁵, one in 87,000.
//!
//! A comparison can end undecided: after the last evaluation, a part of the interval is still beyond the bound. The
//! test then fails if the median of `d` is beyond 1 ms and beyond 2 % of the response time. On a busy machine, chance
//! alone can cause this failure, which the rate above does not count.
//!
//! If the interval is as wide as the time of a hash, the test cannot notice that a hash is missing. So the test also
//! fails if the interval is too wide after the last evaluation: wider than half of the time of a hash. In addition, the
//! test measures requests that differ on purpose (only one of the two checks a foreign hash, or only one of the two
//! computes a hash), and must find the difference.
//!
//! With `LATCHKEY_RESPONSE_TIME_PAIRS=1000`, the test measures more precisely: the bound is then 2 % of the time of a
//! hash, but at most 1 ms.

use std::{
    env,
    io::Write,
    time::{Duration, Instant},
};

use argon2_simd::{Algorithm, Function, Hasher, Params, Version};
use http::StatusCode;
use latchkey_tests::{
    builders::{App, Webhook},
    client::unique_client_address,
    page_browser::PageBrowser,
    passwords::{PASSWORD, WRONG_PASSWORD},
    raw_connection::{RawConnection, RawResponse},
    stack::Stack,
};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde_json::{Value, json};

/// The maximum probability, in one evaluation and for each end of the interval, that the median is beyond this end.
const MAX_ERROR_PROBABILITY: f64 = 1e-7;
/// The number of pairs of one evaluation (specification: Accounts, Equal response times).
const PAIRS: usize = 250;
/// The bound for the median of the differences, in milliseconds.
const BOUND_MS: f64 = 1.0;
/// From this number of pairs on, the bound is [`HASH_TIME_SHARE`] of the time of a hash, if that is less than
/// [`BOUND_MS`].
const MANY_PAIRS: usize = 1000;
/// The bound as a share of the time of a hash, from [`MANY_PAIRS`] on.
const HASH_TIME_SHARE: f64 = 0.02;
/// The bound for the measured median of a comparison that ends undecided: this share of the response time, but at least
/// [`BOUND_MS`].
const RESPONSE_TIME_SHARE: f64 = 0.02;
/// Maximum number of evaluations of one comparison. Each evaluation adds the same number of pairs.
const MAX_EVALUATIONS: usize = 3;
/// A comparison that has taken longer than this ends undecided, unless its interval is too wide or its median is beyond
/// the bound: on a busy machine, more pairs do not help.
const LONG_COMPARISON: Duration = Duration::from_secs(12);
/// Time limit for a mail. The server first delivers the mails of the earlier comparisons, which are hundreds.
const MAIL_LIMIT: Duration = Duration::from_secs(180);
const MAX_COMPARISONS: usize = 19;
/// Number of pairs that is enough to find a difference as great as the time of a hash.
const DIFFERENCE_PAIRS: usize = 60;
/// Pause between requests that cause mails. The server sends a mail after the response, and the sending must not slow
/// down the next request.
const MAIL_PAUSE: Duration = Duration::from_millis(12);

/// A count that the test does not reach.
const UNREACHED_COUNT: u32 = 1_000_000;
/// The maximum number of webhooks of an App.
const MAX_WEBHOOKS: usize = 8;

/// The response times of a pair of requests, in milliseconds.
#[derive(Clone, Copy)]
struct Pair {
    known: f64,
    unknown: f64,
}

/// An interval for the median of the differences, in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Interval {
    low: f64,
    median: f64,
    high: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The whole interval is within the bound: the times do not differ by more than the bound.
    Alike,
    /// The whole interval is beyond the bound: the times differ.
    Differ,
    /// One part of the interval is within the bound, another part beyond it. So more pairs are needed.
    Undecided,
}

/// One comparison. `known` and `unknown` make the request bodies for the known and for the unknown address of a pair.
struct Comparison<'a> {
    what: &'a str,
    /// The path below `/v1/{APPID}/`. For a hosted page: a slash, and then the path below `/{APPID}/`.
    operation: &'a str,
    /// The access token, if the request needs one.
    token: Option<&'a str>,
    known: Box<dyn FnMut() -> Value + 'a>,
    unknown: Box<dyn FnMut() -> Value + 'a>,
    /// The expected status of both responses.
    status: u16,
    pause: Duration,
}

/// The quiet service, and one client that sends one request after another.
struct TimingTest {
    stack: Stack,
    /// The App to which the requests are sent.
    app: App,
    /// An App with webhooks that report new users.
    app_with_webhooks: App,
    connection: RawConnection,
    /// The browser that sends the forms of pages: its cookies, and the field `csrf`.
    browser: (String, String),
    rng: StdRng,
    hash_ms: f64,
    pairs: usize,
    comparisons: usize,
}

// === impl Interval ===

impl Interval {
    /// The interval for the median of the distribution that these differences come from.
    #[expect(clippy::float_cmp, reason = "compares stored values, none of which is computed here")]
    fn from_differences(differences: &[f64], error: f64) -> Self {
        let mut sorted = differences.to_vec();
        sorted.sort_by(f64::total_cmp);
        let trimmed = values_to_trim(sorted.len(), error);
        let interval =
            Self { low: sorted[trimmed], median: sorted[sorted.len() / 2], high: sorted[sorted.len() - 1 - trimmed] };
        assert!(interval.low != interval.high || sorted[0] == sorted[sorted.len() - 1], "enough values");
        interval
    }

    fn verdict(self, bound: f64) -> Verdict {
        if -bound < self.low && self.high < bound {
            Verdict::Alike
        } else if self.low > bound || self.high < -bound {
            Verdict::Differ
        } else {
            Verdict::Undecided
        }
    }

    fn width(self) -> f64 {
        self.high - self.low
    }
}

/// The number of values to leave out at each end: the greatest `k` for which the probability that at most `k` of `n`
/// coin tosses show heads is at most `error`. With fewer than `log2(1 / error)` values there is no such `k`.
fn values_to_trim(n: usize, error: f64) -> usize {
    #[expect(clippy::cast_precision_loss, reason = "a few thousand coin tosses")]
    let as_float = |n: usize| n as f64;
    // The logarithm of the probability of exactly `k` heads: ln C(n, k) − n ln 2. The loop computes it for one `k`
    // after another.
    let mut log_term = -as_float(n) * std::f64::consts::LN_2;
    let mut chance = log_term.exp();
    assert!(chance <= error, "{n} pairs are too few to be sure of anything");
    let mut k = 0;
    loop {
        log_term += (as_float(n - k) / as_float(k + 1)).ln();
        chance += log_term.exp();
        if chance > error {
            return k;
        }
        k += 1;
    }
}

/// The differences of the pairs: how much longer the request for the known address took.
fn differences(pairs: &[Pair]) -> Vec<f64> {
    pairs.iter().map(|pair| pair.known - pair.unknown).collect()
}

/// The bound for the median of the differences if the comparison ends undecided, in milliseconds.
fn undecided_bound(pairs: &[Pair]) -> f64 {
    let mut times: Vec<f64> = pairs.iter().map(|pair| pair.unknown).collect();
    times.sort_by(f64::total_cmp);
    BOUND_MS.max(times[times.len() / 2] * RESPONSE_TIME_SHARE)
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// An App with limits that the test does not reach.
fn unlimited_app(prefix: &str) -> App {
    [
        "loginFailuresPerClient",
        "loginFailuresPerAccount",
        "loginFailuresPerClientOverall",
        "loginsPerClient",
        "registrationsPerClient",
        "mailsPerRecipient",
        "mailsPerClient",
        "codesPerClient",
    ]
    .into_iter()
    .fold(App::new(prefix).set("/requireVerifiedEmail", true), |app, limit| app.limit(limit, &[(UNREACHED_COUNT, 60)]))
}

/// Adds as many webhooks as an App can have. Each reports new users.
fn with_webhooks(app: App) -> App {
    (0..MAX_WEBHOOKS).fold(app, |app, number| {
        app.webhook(&Webhook::pull(&format!("sync{number}"), "shop", "fetches", &["user.created"]))
    })
}

// === impl TimingTest ===

impl TimingTest {
    async fn new() -> Self {
        let (app, app_with_webhooks) =
            (unlimited_app("like").set("/pages/mode", "Enabled"), with_webhooks(unlimited_app("hook")));
        let stack = Stack::builder().app(&app).app(&app_with_webhooks).start().await;
        let connection =
            RawConnection::connect(stack.server().public, unique_client_address()).await.expect("the server accepts");
        let mut browser = PageBrowser::new(stack.client());
        let page = format!("/{}/forgot", app.id());
        let csrf = browser.open(&page).await.form(&page).value("csrf").to_owned();
        let cookies: Vec<String> = browser.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let pairs = env::var("LATCHKEY_RESPONSE_TIME_PAIRS").ok();
        let pairs = pairs.map_or(PAIRS, |pairs| pairs.parse().expect("LATCHKEY_RESPONSE_TIME_PAIRS is a number"));
        Self {
            stack,
            app,
            app_with_webhooks,
            connection,
            browser: (cookies.join("; "), csrf),
            rng: StdRng::from_rng(&mut rand::rng()),
            hash_ms: measure_hash_ms(),
            pairs,
            comparisons: 0,
        }
    }

    /// A new email address without an account. All addresses have the same length.
    fn new_address() -> String {
        format!("user-{:016x}@example.com", rand::random::<u64>())
    }

    /// Registers a new email address and returns it. If `verified` is set, confirms it.
    async fn create_account(&mut self, verified: bool) -> String {
        let address = Self::new_address();
        let client = self.stack.client();
        let app = self.app.id();
        client.register(app, "Ada Lovelace", &address, PASSWORD).await.expect(StatusCode::OK);
        let mail = self.stack.mails().wait_for(|mail| mail.is_to(&address), MAIL_LIMIT).await;
        if verified {
            client.confirm(app, &mail.code()).await.expect(StatusCode::OK);
        }
        address
    }

    async fn sql(&self, sql: &str) {
        let mut connection = self.stack.database.connect().await.expect("the database is reachable");
        let sql = sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned()));
        sql.execute(&mut connection).await.expect("the SQL is valid");
    }

    fn bound(&self) -> f64 {
        if self.pairs >= MANY_PAIRS { BOUND_MS.min(self.hash_ms * HASH_TIME_SHARE) } else { BOUND_MS }
    }

    fn send(&mut self, comparison: &Comparison<'_>, body: &Value) -> RawResponse {
        let path = format!("v1/{}/{}", self.app.id(), comparison.operation);
        let (text, form) = (body.to_string(), self.form(body));
        std::thread::sleep(comparison.pause);
        let reply = match (comparison.operation.strip_prefix('/'), comparison.token) {
            (Some(page), _) => {
                let path = format!("{}/{page}", self.app.id());
                self.connection.post_form(&path, &self.browser.0, &form)
            }
            (None, None) => self.connection.post(&path, &text),
            (None, Some(token)) => self.connection.post_as(token, &path, &text),
        };
        let reply = reply.expect("the server responds");
        assert_eq!(reply.status, comparison.status, "{}: {}", comparison.what, reply.body);
        reply
    }

    /// The fields and the browser's CSRF token, as the body of a form.
    fn form(&self, fields: &Value) -> String {
        let fields = fields.as_object().into_iter().flatten();
        let pairs = fields.map(|(name, value)| (name.as_str(), value.as_str().unwrap_or_default()));
        let mut form = url::form_urlencoded::Serializer::new(String::new());
        form.extend_pairs(pairs).append_pair("csrf", &self.browser.1).finish()
    }

    fn measure_pairs(&mut self, comparison: &mut Comparison<'_>, count: usize) -> Vec<Pair> {
        let mut pairs = Vec::with_capacity(count);
        for _ in 0..count {
            let mut requests = [(true, (comparison.known)()), (false, (comparison.unknown)())];
            requests.shuffle(&mut self.rng);
            let replies = requests.map(|(is_known, body)| (is_known, self.send(comparison, &body)));
            let [one, other] = &replies;
            assert_eq!(shape(&one.1), shape(&other.1), "{}: the responses differ", comparison.what);
            let took = |known: bool| {
                replies.iter().filter(|(is_known, _)| *is_known == known).map(|(_, reply)| reply.took).sum()
            };
            pairs.push(Pair { known: millis(took(true)), unknown: millis(took(false)) });
        }
        pairs
    }

    /// Evaluates a comparison until the result is certain, or the comparison ends undecided (see [`MAX_EVALUATIONS`]
    /// and [`LONG_COMPARISON`]). Panics if the times differ, or if the interval is too wide or the median is beyond the
    /// bound after the last evaluation.
    fn expect_alike(&mut self, mut comparison: Comparison<'_>) {
        self.comparisons += 1;
        assert!(self.comparisons <= MAX_COMPARISONS, "the stated rate of false alarms counts all comparisons");
        // The first requests are not counted: they fill caches, and they prepare the SQL statements.
        self.measure_pairs(&mut comparison, 10);
        let (bound, count, started) = (self.bound(), self.pairs, Instant::now());
        let mut pairs = Vec::new();
        for evaluation in 1..=MAX_EVALUATIONS {
            pairs.extend(self.measure_pairs(&mut comparison, count));
            let interval = Interval::from_differences(&differences(&pairs), MAX_ERROR_PROBABILITY);
            let verdict = interval.verdict(bound);
            print_line(&format!(
                "{}: {} pairs, median difference {:+.3} ms, interval {:+.3} … {:+.3} ms; bound {bound:.3} ms, a hash takes {:.1} ms: {verdict:?}",
                comparison.what,
                pairs.len(),
                interval.median,
                interval.low,
                interval.high,
                self.hash_ms
            ));
            match verdict {
                Verdict::Alike => return,
                Verdict::Differ => panic!("{}: known and unknown addresses differ in time", comparison.what),
                Verdict::Undecided => {
                    let is_too_wide = interval.width() > self.hash_ms.max(measure_hash_ms()) / 2.0;
                    let median_bound = undecided_bound(&pairs);
                    let is_beyond_bound = interval.median.abs() > median_bound;
                    if !is_too_wide && !is_beyond_bound && started.elapsed() > LONG_COMPARISON {
                        return;
                    }
                    let is_last = evaluation == MAX_EVALUATIONS;
                    assert!(
                        !(is_too_wide && is_last),
                        "{}: the machine is too busy to detect even a hash",
                        comparison.what
                    );
                    assert!(
                        !(is_beyond_bound && is_last),
                        "{}: the median difference is beyond {median_bound:.3} ms, but the machine is too busy to be sure",
                        comparison.what
                    );
                }
            }
        }
    }

    /// Measures requests that differ on purpose. Panics if the difference is not found.
    fn expect_difference(&mut self, mut comparison: Comparison<'_>) {
        self.measure_pairs(&mut comparison, 5);
        let bound = self.bound();
        let pairs = self.measure_pairs(&mut comparison, DIFFERENCE_PAIRS);
        let interval = Interval::from_differences(&differences(&pairs), MAX_ERROR_PROBABILITY);
        print_line(&format!(
            "{}: median difference {:+.3} ms, interval {:+.3} … {:+.3} ms",
            comparison.what, interval.median, interval.low, interval.high
        ));
        assert_eq!(interval.verdict(bound), Verdict::Differ, "{}: the difference was not found", comparison.what);
    }
}

/// Writes directly to standard error, because the test harness hides other output of a test that passes.
fn print_line(line: &str) {
    // Standard error can be closed. The test then continues without the line.
    drop(writeln!(std::io::stderr(), "response times: {line}"));
}

/// The median time of a hash with the service's parameters, on this machine at this moment, in milliseconds.
fn measure_hash_ms() -> f64 {
    let function =
        Function { algorithm: Algorithm::Argon2id, version: Version::V0x13, params: &Params::DEFAULT, secret: b"" };
    let mut hasher = Hasher::new();
    let mut times: Vec<f64> = (0..41)
        .map(|_| {
            let started = Instant::now();
            hasher
                .hash(&function, PASSWORD.as_bytes(), b"0123456789abcdef", &mut [0; 32])
                .expect("the default parameters are valid");
            millis(started.elapsed())
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns what must be equal in the responses for known and unknown addresses: the status, the names of the headers
/// and of the fields, and the length of the body. Ids, times and addresses differ, but all values of one kind have the
/// same length.
fn shape(reply: &RawResponse) -> (u16, Vec<String>, Vec<String>, usize) {
    let mut headers: Vec<String> =
        reply.head.lines().skip(1).filter_map(|line| Some(line.split_once(':')?.0.to_ascii_lowercase())).collect();
    headers.sort_unstable();
    // The body of a page is not JSON.
    let body: Value = serde_json::from_str(&reply.body).unwrap_or_default();
    let fields = body.as_object().into_iter().flatten().map(|(name, _)| name.clone()).collect();
    (reply.status, headers, fields, reply.body.len())
}

#[tokio::test]
async fn response_times_of_known_and_unknown_addresses_do_not_differ() {
    assert_decision_error_rate();
    let mut timing = TimingTest::new().await;
    let verified = timing.create_account(true).await;
    let unverified = timing.create_account(false).await;

    let login = |email: &str| json!({ "email": email, "password": WRONG_PASSWORD });
    let unknown = || Box::new(move || login(&TimingTest::new_address())) as Box<dyn FnMut() -> Value>;
    timing.expect_alike(Comparison {
        what: "login",
        operation: "email/login",
        token: None,
        known: Box::new(|| login(&verified)),
        unknown: unknown(),
        status: 401,
        pause: Duration::ZERO,
    });

    let register =
        |email: &str, password: &str| json!({ "name": "Ada Lovelace", "email": email, "password": password });
    let new = || Box::new(move || register(&TimingTest::new_address(), WRONG_PASSWORD)) as Box<dyn FnMut() -> Value>;
    // Registers with another password, because an attacker does not know the account's password.
    for (what, address) in [("register, verified", &verified), ("register, unverified", &unverified)] {
        timing.expect_alike(Comparison {
            what,
            operation: "email/register",
            token: None,
            known: Box::new(move || register(address, WRONG_PASSWORD)),
            unknown: new(),
            status: 200,
            pause: MAIL_PAUSE,
        });
    }

    let forgot = |email: &str| json!({ "email": email });
    timing.expect_alike(Comparison {
        what: "forgot-password",
        operation: "email/forgot-password",
        token: None,
        known: Box::new(|| forgot(&verified)),
        unknown: Box::new(|| forgot(&TimingTest::new_address())),
        status: 200,
        pause: MAIL_PAUSE,
    });

    let reset = |email: &str| json!({ "email": email, "code": "00000-00000", "password": WRONG_PASSWORD });
    timing.expect_alike(Comparison {
        what: "confirm-password",
        operation: "email/confirm-password",
        token: None,
        known: Box::new(|| reset(&verified)),
        unknown: Box::new(|| reset(&TimingTest::new_address())),
        status: 400,
        pause: Duration::ZERO,
    });

    let register = |email: &str| json!({ "name": "Ada Lovelace", "email": email, "password": WRONG_PASSWORD });
    type Fields = fn(&str) -> Value;
    let pages: [(&str, &str, Fields, u16, Duration); 5] = [
        ("page login", "/login", login, 401, Duration::ZERO),
        ("page register, verified", "/register", register, 303, MAIL_PAUSE),
        ("page register, unverified", "/register", register, 303, MAIL_PAUSE),
        ("page forgot", "/forgot", forgot, 303, MAIL_PAUSE),
        ("page reset", "/reset", reset, 400, Duration::ZERO),
    ];
    for (what, operation, fields, status, pause) in pages {
        let known = if what.ends_with("unverified") { &unverified } else { &verified };
        timing.expect_alike(Comparison {
            what,
            operation,
            token: None,
            known: Box::new(move || fields(known)),
            unknown: Box::new(move || fields(&TimingTest::new_address())),
            status,
            pause,
        });
    }

    // A request to change to the address of another account takes the same time as a request to change to a new
    // address.
    let client = timing.stack.client();
    let own_address = timing.create_account(true).await;
    let owner = client.login(timing.app.id(), &own_address, PASSWORD).await.expect(StatusCode::OK);
    let change = |email: &str| json!({ "email": email, "password": PASSWORD });
    timing.expect_alike(Comparison {
        what: "user/email",
        operation: "user/email",
        token: Some(owner.string("token")),
        known: Box::new(|| change(&verified)),
        unknown: Box::new(|| change(&TimingTest::new_address())),
        status: 200,
        pause: MAIL_PAUSE,
    });

    compare_logins_with_foreign_hashes(&mut timing, &verified, &unverified).await;
    compare_registrations_with_webhooks(&mut timing).await;

    // The same measurement finds a missing hash. A server that hashed nothing for unknown addresses would show the same
    // difference.
    timing.sql(&format!("UPDATE users SET password_hash = '$none$' WHERE email = '{verified}'")).await;
    timing.expect_difference(Comparison {
        what: "no hash",
        operation: "email/login",
        token: None,
        known: Box::new(|| login(&verified)),
        unknown: unknown(),
        status: 401,
        pause: Duration::ZERO,
    });
}

/// Compares logins in an App with two classes (algorithm and cost) of foreign hashes, and with a hash that a server
/// with other parameters made. Leaves the App without such hashes.
async fn compare_logins_with_foreign_hashes(timing: &mut TimingTest, native: &str, unverified: &str) {
    const HASHES: [(&str, &str); 2] = [
        ("bcrypt$7", "$2b$07$......................AesgC8c2NCv6R248WVftVw.gqvWdlCq"),
        ("pbkdf2-sha256$i=40000,b=1", "$pbkdf2-sha256$i=40000,l=16$AAECAwQFBgcICQoLDA0ODw$AAECAwQFBgcICQoLDA0ODw"),
    ];
    let mut foreign = Vec::new();
    for (class, hash) in HASHES {
        let address = timing.create_account(true).await;
        timing
            .sql(&format!(
                "INSERT INTO hash_classes (app_id, class, weight) VALUES ('{}', '{class}', 1);
                 UPDATE users SET password_hash = '{hash}', foreign_hash = '{class}', foreign_hash_at = now()
                 WHERE email = '{address}'",
                timing.app.id()
            ))
            .await;
        foreign.push(address);
    }
    let without_password = timing.create_account(true).await;
    timing.sql(&format!("UPDATE users SET password_hash = NULL WHERE email = '{without_password}'")).await;
    let other_parameters = timing.create_account(true).await;
    let hash = "$argon2id$v=19$m=19456,t=3,p=1$AAECAwQFBgcICQoLDA0ODw$AAECAwQFBgcICQoLDA0ODw";
    timing.sql(&format!("UPDATE users SET password_hash = '{hash}' WHERE email = '{other_parameters}'")).await;

    let login = |email: &str, password: &str| json!({ "email": email, "password": password });
    let unknown = || Box::new(move || login(&TimingTest::new_address(), WRONG_PASSWORD)) as Box<dyn FnMut() -> Value>;
    for (what, address, password) in [
        ("foreign classes, native", native, WRONG_PASSWORD),
        ("foreign classes, bcrypt", foreign[0].as_str(), WRONG_PASSWORD),
        ("foreign classes, pbkdf2", foreign[1].as_str(), WRONG_PASSWORD),
        ("foreign classes, no password", without_password.as_str(), WRONG_PASSWORD),
        ("foreign classes, other parameters", other_parameters.as_str(), WRONG_PASSWORD),
        ("foreign classes, unverified with the right password", unverified, PASSWORD),
    ] {
        timing.expect_alike(Comparison {
            what,
            operation: "email/login",
            token: None,
            known: Box::new(move || login(address, password)),
            unknown: unknown(),
            status: 401,
            pause: Duration::ZERO,
        });
    }

    // *register* checks no foreign hash.
    timing.sql(&format!("UPDATE users SET email_verified_at = NULL WHERE email = '{}'", foreign[0])).await;
    let register = |email: &str| json!({ "name": "Ada Lovelace", "email": email, "password": WRONG_PASSWORD });
    timing.expect_alike(Comparison {
        what: "foreign classes, register, bcrypt",
        operation: "email/register",
        token: None,
        known: Box::new(|| register(&foreign[0])),
        unknown: Box::new(|| register(&TimingTest::new_address())),
        status: 200,
        pause: MAIL_PAUSE,
    });

    timing.sql(&format!("UPDATE users SET password_hash = NULL WHERE email = '{other_parameters}'")).await;
    // If the App has no classes, only the logins of users with a foreign hash check a foreign hash.
    timing.sql("DELETE FROM hash_classes").await;
    for (what, address) in [("bcrypt without equal work", &foreign[0]), ("pbkdf2 without equal work", &foreign[1])] {
        timing.expect_difference(Comparison {
            what,
            operation: "email/login",
            token: None,
            known: Box::new(move || login(address, WRONG_PASSWORD)),
            unknown: unknown(),
            status: 401,
            pause: Duration::ZERO,
        });
    }
}

/// Compares registrations in an App with webhooks that report only registrations of unknown addresses.
async fn compare_registrations_with_webhooks(timing: &mut TimingTest) {
    std::mem::swap(&mut timing.app, &mut timing.app_with_webhooks);
    let verified = timing.create_account(true).await;
    let register = |email: &str| json!({ "name": "Ada Lovelace", "email": email, "password": WRONG_PASSWORD });
    timing.expect_alike(Comparison {
        what: "webhooks, register",
        operation: "email/register",
        token: None,
        known: Box::new(|| register(&verified)),
        unknown: Box::new(|| register(&TimingTest::new_address())),
        status: 200,
        pause: MAIL_PAUSE,
    });
    std::mem::swap(&mut timing.app, &mut timing.app_with_webhooks);
}

/// Tests the decision with invented times: the time of a hash, plus small delays and rare great delays as on a real
/// machine.
fn assert_decision_error_rate() {
    let mut random = StdRng::seed_from_u64(7);
    let mut time = |shift: f64| -> f64 {
        // The sum of twelve uniform numbers, minus 6, is nearly normal, with mean 0 and standard deviation 1.
        let noise: f64 = (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0;
        let spike = if random.random_bool(0.03) { 12.0 * random.random::<f64>() } else { 0.0 };
        noise.mul_add(0.5, 15.0 + shift) + spike
    };
    let mut sample = |pairs: usize, shift: f64| -> Vec<f64> { (0..pairs).map(|_| time(shift) - time(0.0)).collect() };
    for sign in [1.0, -1.0] {
        for shift in [2.0 * BOUND_MS, 15.0] {
            let found =
                Interval::from_differences(&sample(PAIRS, sign * shift), MAX_ERROR_PROBABILITY).verdict(BOUND_MS);
            assert_eq!(found, Verdict::Differ, "a shift of {shift} ms");
        }
        assert_eq!(
            Interval::from_differences(&sample(DIFFERENCE_PAIRS, sign * 7.0), MAX_ERROR_PROBABILITY).verdict(BOUND_MS),
            Verdict::Differ
        );
    }
    assert_eq!(
        Interval::from_differences(&sample(PAIRS, 0.0), MAX_ERROR_PROBABILITY).verdict(BOUND_MS),
        Verdict::Alike
    );
    assert_eq!(
        Interval::from_differences(&sample(MANY_PAIRS, 0.0), MAX_ERROR_PROBABILITY).verdict(0.3),
        Verdict::Alike
    );

    // The bound for an undecided comparison is 1 ms, or 2 % of the response time if that is more.
    let slow = |unknown: f64| vec![Pair { known: 0.0, unknown }; 3];
    let bounds = [10.0, 49.0, 100.0, 400.0].map(|unknown| (undecided_bound(&slow(unknown)) * 1000.0).round());
    assert_eq!(bounds.map(|bound| format!("{bound}")), ["1000", "1000", "2000", "8000"]);

    // Checks the rate of false alarms, with an error that is great enough to observe. If the times differ by exactly
    // the bound, an error of 5 % on one side gives at most 5 % false alarms. The probability of more than 140 false
    // alarms in 2,000 trials is then below 10⁻⁴.
    let alarms = (0..2000)
        .filter(|_| Interval::from_differences(&sample(100, BOUND_MS), 0.05).verdict(BOUND_MS) == Verdict::Differ);
    let alarms = alarms.count();
    assert!((20..=140).contains(&alarms), "{alarms} false alarms in 2000 at 5 %");
    // From the tables of the sign test: with `n` = 20 and 2.5 % on each side, five values are left out at each end.
    assert_eq!((values_to_trim(20, 0.025), values_to_trim(100, 0.025)), (5, 39));
}
