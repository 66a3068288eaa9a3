//! *Like time* (contract 3): on a quiet server nobody learns from the time of an answer whether an address has an
//! account. A program of its own with one test, since it needs the machine for itself.
//!
//! # What is decided, and how often wrongly
//!
//! Known and unknown addresses are asked for in pairs, each pair in an order that a coin decides, and `d` is what the
//! known one of a pair took longer. If the kinds do not differ, the coin alone decides the sign of `d`; if they differ
//! by a shift, the median of `d` is that shift, and equals the difference of the medians. From the sorted `d` of `n`
//! pairs comes an interval for that median, free of any assumption about how times are distributed: it leaves out the
//! `k` smallest and the `k` greatest values, and misses the median on one side with the chance that of `n` coins at
//! most `k` show heads. The greatest `k` is taken for which that is at most [`ERROR`].
//!
//! The test fails only where the whole interval lies beyond the bound: where the kinds differ by the bound or less,
//! that happens with a chance of at most [`ERROR`] on either side, each time it is looked at. There are at most
//! [`COMPARISONS`] comparisons of at most [`LOOKS`] looks, so a run raises a false alarm with a chance of at most
//! 2 · 10⁻⁷ · 6 · 3 = 3.6 · 10⁻⁶, one in 270,000.
//!
//! An interval as wide as a hash would overlook that one is missing. So it also fails, as *blurred*, where after the
//! last look the interval is still wider than half of a hash; and the test measures what differs by construction (a
//! stored hash that costs less, and one that costs nothing) and demands that this is found.
//!
//! `LATCHKEY_LIKE_TIME_PAIRS=1000` measures sharper, against 2 % of a hash's time.

use std::{
    env,
    io::Write,
    time::{Duration, Instant},
};

use argon2::{Algorithm, Argon2, Params, Version};
use http::StatusCode;
use latchkey_tests::{
    builders::App,
    client::own_address,
    stack::Stack,
    wire::{Reply, Wire},
};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde_json::{Value, json};

/// The chance that one look at one interval misses the median on one given side.
const ERROR: f64 = 1e-7;
/// The contract's.
const PAIRS: usize = 250;
const BOUND_MS: f64 = 1.0;
/// From so many pairs on the bound is this share of a hash's time, where that is less.
const MANY_PAIRS: usize = 1000;
const SHARE_OF_A_HASH: f64 = 0.02;
/// Where a look decides nothing, as many pairs again are measured, up to so many looks.
const LOOKS: usize = 3;
/// A comparison that took longer is looked at again only if it is blurred: on a busy machine that is what can be had.
const LONG: Duration = Duration::from_secs(12);
const COMPARISONS: usize = 6;
/// Pairs that show a difference as great as that of a hash.
const FEW_PAIRS: usize = 60;
/// A mail is made and sent right after the answer that asked for it; that is not to meet the next request.
const MAIL_PAUSE: Duration = Duration::from_millis(12);

const PASSWORD: &str = "violet-Anchor-mills-27";
const WRONG_PASSWORD: &str = "copper-Lantern-drift-58";
const MANY: u32 = 1_000_000;

/// Where the median of the differences lies, in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Interval {
    low: f64,
    middle: f64,
    high: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The whole interval lies within the bound: they are alike, for sure.
    Alike,
    /// The whole interval lies beyond the bound: they differ, for sure.
    Differ,
    /// Neither; more pairs would tell.
    Undecided,
}

/// One comparison: what to post for the known and for the unknown address of each pair.
struct Comparison<'a> {
    what: &'a str,
    /// Below `/v1/{APPID}/`.
    operation: &'a str,
    /// Who asks, where that is somebody signed in.
    token: Option<&'a str>,
    known: Box<dyn FnMut() -> Value + 'a>,
    unknown: Box<dyn FnMut() -> Value + 'a>,
    /// What both are answered.
    status: u16,
    pause: Duration,
}

/// The quiet service, and one caller who asks one thing after another.
struct Ground {
    stack: Stack,
    app: App,
    wire: Wire,
    coin: StdRng,
    hash_ms: f64,
    pairs: usize,
    comparisons: usize,
}

// === impl Interval ===

impl Interval {
    /// Of the median that these values were drawn around.
    #[expect(clippy::float_cmp, reason = "an order of values, none of which is computed here")]
    fn of(differences: &[f64], error: f64) -> Self {
        let mut sorted = differences.to_vec();
        sorted.sort_by(f64::total_cmp);
        let left_out = left_out(sorted.len(), error);
        let interval =
            Self { low: sorted[left_out], middle: sorted[sorted.len() / 2], high: sorted[sorted.len() - 1 - left_out] };
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

/// The greatest `k` such that of `n` coins at most `k` show heads with a chance of at most `error`: that many values may
/// be left out at each end. With fewer than `log2(1 / error)` values there is none.
fn left_out(n: usize, error: f64) -> usize {
    #[expect(clippy::cast_precision_loss, reason = "a few thousand coins")]
    let as_float = |n: usize| n as f64;
    // ln C(n, k) − n ln 2, term by term.
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

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

// === impl Ground ===

impl Ground {
    async fn new() -> Self {
        let app = [
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
        .fold(App::new("like"), |app, limit| app.limit(limit, &[(MANY, 60)]));
        let stack = Stack::with(&app).await;
        let wire = Wire::connect(stack.server().public, own_address()).await.expect("the server accepts");
        let pairs = env::var("LATCHKEY_LIKE_TIME_PAIRS").ok();
        let pairs = pairs.map_or(PAIRS, |pairs| pairs.parse().expect("LATCHKEY_LIKE_TIME_PAIRS is a number"));
        Self { stack, app, wire, coin: StdRng::from_rng(&mut rand::rng()), hash_ms: hash_time(), pairs, comparisons: 0 }
    }

    /// An address that nobody has, as long as every other.
    fn fresh_address() -> String {
        format!("user-{:016x}@example.com", rand::random::<u64>())
    }

    /// An address with an account; its code, where the address is to be verified, is used.
    async fn account(&mut self, verified: bool) -> String {
        let address = Self::fresh_address();
        let client = self.stack.client();
        let app = self.app.id();
        client.register(app, "Ada Lovelace", &address, PASSWORD).await.expect(StatusCode::OK);
        let limit = Duration::from_secs(30);
        let mail = self.stack.mails().wait_for(|mail| mail.is_to(&address), limit).await;
        if verified {
            client.confirm(app, &mail.code()).await.expect(StatusCode::OK);
        }
        address
    }

    async fn sql(&self, sql: &str) {
        let mut connection = self.stack.database.connect().await.expect("the database is there");
        let sql = sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned()));
        sql.execute(&mut connection).await.expect("the SQL is right");
    }

    fn bound(&self) -> f64 {
        if self.pairs >= MANY_PAIRS { BOUND_MS.min(self.hash_ms * SHARE_OF_A_HASH) } else { BOUND_MS }
    }

    fn ask(&mut self, comparison: &Comparison<'_>, body: &Value) -> Reply {
        let path = format!("v1/{}/{}", self.app.id(), comparison.operation);
        let body = body.to_string();
        std::thread::sleep(comparison.pause);
        let reply = match comparison.token {
            None => self.wire.post(&path, &body),
            Some(token) => self.wire.post_as(token, &path, &body),
        };
        let reply = reply.expect("the server answers");
        assert_eq!(reply.status, comparison.status, "{}: {}", comparison.what, reply.body);
        reply
    }

    /// So many pairs: what the known one of each took longer, in milliseconds.
    fn differences(&mut self, comparison: &mut Comparison<'_>, pairs: usize) -> Vec<f64> {
        let mut differences = Vec::with_capacity(pairs);
        for _ in 0..pairs {
            let mut asked = [(true, (comparison.known)()), (false, (comparison.unknown)())];
            asked.shuffle(&mut self.coin);
            let replies = asked.map(|(is_known, body)| (is_known, self.ask(comparison, &body)));
            let [one, other] = &replies;
            assert_eq!(shape(&one.1), shape(&other.1), "{}: the answers differ", comparison.what);
            let took = |known: bool| replies.iter().filter(|(is, _)| *is == known).map(|(_, reply)| reply.took).sum();
            differences.push(millis(took(true)) - millis(took(false)));
        }
        differences
    }

    /// Measures until it is sure, at most for all looks; panics where the two differ.
    fn expect_alike(&mut self, mut comparison: Comparison<'_>) {
        self.comparisons += 1;
        assert!(self.comparisons <= COMPARISONS, "the stated rate of false alarms counts all comparisons");
        // What the first requests fill stays filled: caches, prepared statements.
        self.differences(&mut comparison, 10);
        let (bound, pairs, started) = (self.bound(), self.pairs, Instant::now());
        let mut differences = Vec::new();
        for look in 1..=LOOKS {
            differences.extend(self.differences(&mut comparison, pairs));
            let interval = Interval::of(&differences, ERROR);
            let verdict = interval.verdict(bound);
            say(&format!(
                "{}: {} pairs, median difference {:+.3} ms, surely within {:+.3} … {:+.3} ms; bound {bound:.3} ms, a hash takes {:.1} ms: {verdict:?}",
                comparison.what,
                differences.len(),
                interval.middle,
                interval.low,
                interval.high,
                self.hash_ms
            ));
            match verdict {
                Verdict::Alike => return,
                Verdict::Differ => panic!("{}: known and unknown addresses differ in time", comparison.what),
                Verdict::Undecided => {
                    let blurred = interval.width() > self.hash_ms.max(hash_time()) / 2.0;
                    if !blurred && started.elapsed() > LONG {
                        return;
                    }
                    let last = look == LOOKS;
                    assert!(!(blurred && last), "{}: the machine is too busy to see even a hash", comparison.what);
                }
            }
        }
    }

    /// The same measurement of what differs by construction: it must be seen.
    fn expect_found(&mut self, mut comparison: Comparison<'_>) {
        self.differences(&mut comparison, 5);
        let bound = self.bound();
        let differences = self.differences(&mut comparison, FEW_PAIRS);
        let interval = Interval::of(&differences, ERROR);
        say(&format!(
            "{}: median difference {:+.3} ms, surely within {:+.3} … {:+.3} ms",
            comparison.what, interval.middle, interval.low, interval.high
        ));
        assert_eq!(interval.verdict(bound), Verdict::Differ, "{}: the difference was not seen", comparison.what);
    }
}

/// Past the test harness, which keeps what a passing test prints.
fn say(line: &str) {
    // Nobody may be listening; the verdict does not depend on it.
    drop(writeln!(std::io::stderr(), "like time: {line}"));
}

/// The median time of the service's own hash on this machine now, in milliseconds.
fn hash_time() -> f64 {
    let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, Params::DEFAULT);
    let mut times: Vec<f64> = (0..41)
        .map(|_| {
            let started = Instant::now();
            let mut output = [0; 32];
            argon2
                .hash_password_into(PASSWORD.as_bytes(), b"0123456789abcdef", &mut output)
                .expect("the default parameters are valid");
            millis(started.elapsed())
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// What of an answer must be the same for both: all but ids, times and the address itself, which are equally long.
fn shape(reply: &Reply) -> (u16, Vec<String>, Vec<String>, usize) {
    let mut headers: Vec<String> =
        reply.head.lines().skip(1).filter_map(|line| Some(line.split_once(':')?.0.to_ascii_lowercase())).collect();
    headers.sort_unstable();
    let body: Value = serde_json::from_str(&reply.body).expect("an answer is JSON");
    let fields = body.as_object().expect("an answer is an object").keys().cloned().collect();
    (reply.status, headers, fields, reply.body.len())
}

/// Somebody's hash of [`PASSWORD`], for less memory than the service's own.
fn cheap_hash() -> String {
    use argon2::password_hash::phc::{Ident, Output, PasswordHash, Salt};
    let params = Params::new(8 * 1024, 1, 1, None).expect("valid parameters");
    let salt = b"0123456789abcdef";
    let mut output = [0; 32];
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params.clone())
        .hash_password_into(PASSWORD.as_bytes(), salt, &mut output)
        .expect("valid parameters");
    PasswordHash {
        algorithm: Ident::new("argon2id").expect("a name"),
        version: Some(Version::V0x13.into()),
        params: (&params).try_into().expect("valid parameters"),
        salt: Some(Salt::new(salt).expect("a salt")),
        hash: Some(Output::new(&output).expect("an output")),
    }
    .to_string()
}

#[tokio::test]
async fn known_and_unknown_addresses_are_answered_in_like_time() {
    the_detector_sees_what_it_must_and_nothing_else();
    let mut ground = Ground::new().await;
    let verified = ground.account(true).await;
    let unverified = ground.account(false).await;

    let login = |email: &str| json!({ "email": email, "password": WRONG_PASSWORD });
    let unknown = || Box::new(move || login(&Ground::fresh_address())) as Box<dyn FnMut() -> Value>;
    ground.expect_alike(Comparison {
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
    let new = || Box::new(move || register(&Ground::fresh_address(), WRONG_PASSWORD)) as Box<dyn FnMut() -> Value>;
    // Another password than the account's, which is what somebody who asks has.
    for (what, address) in [("register, verified", &verified), ("register, unverified", &unverified)] {
        ground.expect_alike(Comparison {
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
    ground.expect_alike(Comparison {
        what: "forgot-password",
        operation: "email/forgot-password",
        token: None,
        known: Box::new(|| forgot(&verified)),
        unknown: Box::new(|| forgot(&Ground::fresh_address())),
        status: 200,
        pause: MAIL_PAUSE,
    });

    let reset = |email: &str| json!({ "email": email, "code": "00000-00000", "password": WRONG_PASSWORD });
    ground.expect_alike(Comparison {
        what: "confirm-password",
        operation: "email/confirm-password",
        token: None,
        known: Box::new(|| reset(&verified)),
        unknown: Box::new(|| reset(&Ground::fresh_address())),
        status: 400,
        pause: Duration::ZERO,
    });

    // Whose the new address of a signed-in user is. Another account's is as long as nobody's.
    let client = ground.stack.client();
    let caller = ground.account(true).await;
    let owner = client.login(ground.app.id(), &caller, PASSWORD).await.expect(StatusCode::OK);
    let change = |email: &str| json!({ "email": email, "password": PASSWORD });
    ground.expect_alike(Comparison {
        what: "user/email",
        operation: "user/email",
        token: Some(owner.string("token")),
        known: Box::new(|| change(&verified)),
        unknown: Box::new(|| change(&Ground::fresh_address())),
        status: 200,
        pause: MAIL_PAUSE,
    });

    // The same measurement finds what is there to be found: a hash that costs a part, and none at all. To an unknown
    // address the latter is what a server without its dummy hash is to a known one.
    for (what, hash) in [("a cheaper hash", cheap_hash()), ("no hash", "$none$".to_owned())] {
        ground.sql(&format!("UPDATE users SET password_hash = '{hash}' WHERE email = '{verified}'")).await;
        ground.expect_found(Comparison {
            what,
            operation: "email/login",
            token: None,
            known: Box::new(|| login(&verified)),
            unknown: unknown(),
            status: 401,
            pause: Duration::ZERO,
        });
    }
}

/// On made-up times: a hash's, with the small and the rare great delays of a real machine.
fn the_detector_sees_what_it_must_and_nothing_else() {
    let mut random = StdRng::seed_from_u64(7);
    let mut time = |shift: f64| -> f64 {
        // Twelve uniform numbers are as good as normal: mean 0, deviation 1.
        let noise: f64 = (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0;
        let spike = if random.random_bool(0.03) { 12.0 * random.random::<f64>() } else { 0.0 };
        noise.mul_add(0.5, 15.0 + shift) + spike
    };
    let mut sample = |pairs: usize, shift: f64| -> Vec<f64> { (0..pairs).map(|_| time(shift) - time(0.0)).collect() };
    for sign in [1.0, -1.0] {
        for shift in [2.0 * BOUND_MS, 15.0] {
            let found = Interval::of(&sample(PAIRS, sign * shift), ERROR).verdict(BOUND_MS);
            assert_eq!(found, Verdict::Differ, "a shift of {shift} ms");
        }
        assert_eq!(Interval::of(&sample(FEW_PAIRS, sign * 7.0), ERROR).verdict(BOUND_MS), Verdict::Differ);
    }
    assert_eq!(Interval::of(&sample(PAIRS, 0.0), ERROR).verdict(BOUND_MS), Verdict::Alike);
    assert_eq!(Interval::of(&sample(MANY_PAIRS, 0.0), ERROR).verdict(0.3), Verdict::Alike);

    // The stated error, where it is great enough to be seen: at the bound itself, 5 % on one side are at most 5 % of
    // alarms. 2,000 trials with that chance exceed 140 with a chance below 10⁻⁴.
    let alarms = (0..2000).filter(|_| Interval::of(&sample(100, BOUND_MS), 0.05).verdict(BOUND_MS) == Verdict::Differ);
    let alarms = alarms.count();
    assert!((20..=140).contains(&alarms), "{alarms} false alarms in 2000 at 5 %");
    // By the tables of the sign test: n = 20 at 2.5 % on each side leaves out five values.
    assert_eq!((left_out(20, 0.025), left_out(100, 0.025)), (5, 39));
}
