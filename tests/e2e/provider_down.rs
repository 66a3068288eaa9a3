//! A provider that hangs holds up nobody but those who want to log in there.

use std::time::{Duration, Instant};

use http::{Method, StatusCode, header};
use latchkey_tests::{
    builders::{App, Provider},
    client::Anonymous,
    dex::{self, Dex, Person},
    stack::Stack,
};
use serde_json::json;
use tokio::task::JoinSet;

use crate::support::{NAME, PASSWORD};

const ADA: &str = "ada@example.com";
const DONE: &str = "http://127.0.0.1/done";
/// Quiet and loaded phases take turns, so that a machine that changes its pace does so for both.
const ROUNDS: usize = 6;
const SAMPLES: usize = 8;
/// More than may be in flight for one provider (contract, 5), so that some are refused too.
const WAITING: usize = 48;
/// Between the medians of both phases, on a machine that does much else. Whoever waited for the provider's ten seconds
/// would be slower by a hundred times and more.
const RATIO: f64 = 8.0;

/// What is measured, in the order of a person's day.
const OPERATIONS: [&str; 4] = ["login", "refresh", "redirect elsewhere", "callback elsewhere"];

struct Service {
    stack: Stack,
    app: App,
    /// The one that is up.
    _dex: Dex,
    /// Takes connections and says nothing.
    _hanging: tokio::net::TcpListener,
}

#[tokio::test]
async fn email_login_refresh_and_other_providers_are_as_fast_while_a_provider_hangs() {
    let service = Service::start().await;
    let client = service.stack.client();
    let register = client.register(service.app.id(), NAME, "grace@example.com", PASSWORD).await;
    register.expect(StatusCode::OK);
    let login = client.login(service.app.id(), "grace@example.com", PASSWORD).await.expect(StatusCode::OK);
    let mut refresh_token = login.string("refresh_token").to_owned();
    // What is fetched once is there before it is measured.
    service.round(&client, &mut refresh_token).await;

    let (mut quiet, mut hanging) = (Samples::default(), Samples::default());
    for _ in 0..ROUNDS {
        for _ in 0..SAMPLES {
            quiet.add(service.round(&client, &mut refresh_token).await);
        }
        let mut waiting = service.wait_at_the_hanging_one();
        for _ in 0..SAMPLES {
            hanging.add(service.round(&client, &mut refresh_token).await);
        }
        assert!(waiting.try_join_next().is_none(), "all wait on, or were refused as they should be");
    }
    for (operation, name) in OPERATIONS.into_iter().enumerate() {
        let (before, during) = (quiet.median(operation), hanging.median(operation));
        let ratio = during.as_secs_f64() / before.as_secs_f64();
        println!("{name:<20} {before:>10.2?} quiet {during:>10.2?} while a provider hangs, ratio {ratio:.2}");
        assert!(ratio < RATIO, "{name}: {before:?} quiet, {during:?} while a provider hangs");
    }
}

#[derive(Default)]
struct Samples(Vec<[Duration; OPERATIONS.len()]>);

// === impl Service ===

impl Service {
    async fn start() -> Self {
        let loose: &[(u32, u32)] = &[(1_000_000, 60)];
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let options = dex::Options::for_tests();
        let up = Provider::new("up", "oidc").set("issuer", options.issuer());
        let hanging =
            Provider::new("hanging", "oidc").set("issuer", format!("http://{}", listener.local_addr().unwrap()));
        let app = App::new("down")
            .set("/redirectURLs", json!([DONE]))
            .limit("loginsPerClient", loose)
            .limit("refreshesPerSession", loose)
            .provider(&up)
            .provider(&hanging);
        let builder = Stack::builder().app(&app).provider(&up).provider(&hanging);
        let known = dex::Client::of(&up, &builder.callback(&app, &up));
        let dex = Dex::start(options.client(known).person(Person::new(NAME, ADA))).await.unwrap();
        Self { stack: builder.start().await, app, _dex: dex, _hanging: listener }
    }

    /// Each operation once, with its time.
    async fn round(&self, client: &Anonymous, refresh_token: &mut String) -> [Duration; OPERATIONS.len()] {
        let app = self.app.id();
        let begin = Instant::now();
        client.login(app, "grace@example.com", PASSWORD).await.expect(StatusCode::OK);
        let login = begin.elapsed();

        let begin = Instant::now();
        let body = json!({ "grant_type": "refresh_token", "refresh_token": refresh_token });
        let answer = client.post(&format!("v1/{app}/token"), &body).await.expect(StatusCode::OK);
        let refresh = begin.elapsed();
        answer.string("refresh_token").clone_into(refresh_token);

        let begin = Instant::now();
        let answer = client.get(&format!("{app}/up/redirect")).await.expect(StatusCode::FOUND);
        let redirect = begin.elapsed();
        let cookie = answer.header("set-cookie").unwrap().split(';').next().unwrap().to_owned();
        let browser =
            reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none()).build().unwrap();
        let back = dex::way_back(&browser, answer.header("location").unwrap(), ADA).await.unwrap();

        let begin = Instant::now();
        let request = client.request(Method::GET, &format!("{}?{}", back.path(), back.query().unwrap()));
        let answer = client.send(request.header(header::COOKIE, cookie)).await.expect(StatusCode::FOUND);
        let callback = begin.elapsed();
        let location = answer.header("location").unwrap();
        assert!(location.starts_with(DONE) && location.contains("access_token="), "{location}");
        [login, refresh, redirect, callback]
    }

    /// People who want to log in at the provider that hangs, one after the other in each place, until this is dropped.
    fn wait_at_the_hanging_one(&self) -> JoinSet<()> {
        let mut waiting = JoinSet::new();
        for _ in 0..WAITING {
            let (client, path) = (self.stack.client(), format!("{}/hanging/redirect", self.app.id()));
            waiting.spawn(async move {
                loop {
                    let answer = client.get(&path).await;
                    assert!(answer.status.is_server_error(), "{}", answer.text);
                    // Who is refused at once is not to keep a core busy: what is measured is waiting.
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
            });
        }
        waiting
    }
}

// === impl Samples ===

impl Samples {
    fn add(&mut self, round: [Duration; OPERATIONS.len()]) {
        self.0.push(round);
    }

    fn median(&self, operation: usize) -> Duration {
        let mut times: Vec<Duration> = self.0.iter().map(|round| round[operation]).collect();
        times.sort_unstable();
        times[times.len() / 2]
    }
}
