//! Ordinary users, who have nothing to do with the attacker.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Result;
use bytes::Bytes;
use hdrhistogram::Histogram;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use serde_json::json;
use tokio::time::{sleep, timeout};
use url::Url;

use super::outsiders::post;
use crate::{
    figures::{histogram, micros, millis},
    logins::{Connection, connect},
};

pub(super) const PASSWORD: &str = "a quiet harbour at noon";
/// Where an App's users come back to after a social login.
pub(super) const DONE: &str = "http://127.0.0.1/done";
/// Nobody waits longer.
const LIMIT: Duration = Duration::from_secs(10);
/// Before somebody tries again for whom it did not work.
const PAUSE: Duration = Duration::from_millis(100);

/// What a user wants. Each time is a new connection, as browsers make them.
#[derive(Clone)]
pub(super) enum Errand {
    /// A login by password.
    LogIn { app: String, email: String },
    /// *redirect* and *callback* with the code that a provider gave this person.
    SignIn { app: String, provider: String, person: String },
}

/// A user at a client address.
#[derive(Clone)]
pub(super) struct User {
    pub(super) from: IpAddr,
    pub(super) errand: Errand,
}

/// What users saw.
pub(super) struct Seen {
    /// Of what worked.
    pub(super) latency: Histogram<u64>,
    pub(super) failures: BTreeMap<String, u64>,
    took: Duration,
}

/// Lets all of them do their errand again and again, one after the other without a pause, until the time is over or the
/// server is gone.
pub(super) async fn observe(
    server: SocketAddr,
    users: &[User],
    lasts: Duration,
    gone: &Arc<AtomicBool>,
) -> Result<Seen> {
    let started = Instant::now();
    let end = started + lasts;
    let running: Vec<_> =
        users.iter().map(|user| tokio::spawn(user.clone().go_on(server, end, Arc::clone(gone)))).collect();
    let mut seen = Seen { latency: histogram(), failures: BTreeMap::new(), took: Duration::ZERO };
    for user in running {
        let (latency, failures) = user.await?;
        seen.latency.add(&latency)?;
        for (what, count) in failures {
            *seen.failures.entry(what).or_default() += count;
        }
    }
    seen.took = started.elapsed();
    Ok(seen)
}

// === impl User ===

impl User {
    async fn go_on(
        self,
        server: SocketAddr,
        end: Instant,
        gone: Arc<AtomicBool>,
    ) -> (Histogram<u64>, BTreeMap<String, u64>) {
        let (mut latency, mut failures) = (histogram(), BTreeMap::<String, u64>::new());
        while Instant::now() < end && !gone.load(Ordering::Relaxed) {
            let started = Instant::now();
            let outcome = timeout(LIMIT, self.errand.run(server, self.from)).await;
            match outcome.unwrap_or_else(|_| Err(format!("no answer within {LIMIT:?}"))) {
                Ok(()) => latency.saturating_record(micros(started.elapsed())),
                Err(failure) => {
                    *failures.entry(failure).or_default() += 1;
                    sleep(PAUSE).await;
                }
            }
        }
        (latency, failures)
    }
}

// === impl Errand ===

impl Errand {
    async fn run(&self, server: SocketAddr, from: IpAddr) -> Result<(), String> {
        let mut connection = connect(server, from).await.map_err(|_| "no connection".to_owned())?;
        match self {
            Self::LogIn { app, email } => {
                let body = json!({ "email": email, "password": PASSWORD });
                let login = post(server, &format!("/v1/{app}/email/login"), &body);
                expect(&exchange(&mut connection, login).await?, StatusCode::OK)
            }
            Self::SignIn { app, provider, person } => {
                let (cookie, state) = begin(&mut connection, server, app, provider).await?;
                let code = format!("code-{person}");
                let callback = callback(server, app, provider, (&cookie, &state), &code);
                let response = exchange(&mut connection, callback).await?;
                expect(&response, StatusCode::FOUND)?;
                let location = header(&response, "location");
                if location.contains("access_token=") { Ok(()) } else { Err(error_of(location)) }
            }
        }
    }
}

/// *redirect*: the cookie and the `state` of a new flow.
pub(super) async fn begin(
    connection: &mut Connection,
    server: SocketAddr,
    app: &str,
    provider: &str,
) -> Result<(String, String), String> {
    let request = get(server, &format!("/{app}/{provider}/redirect"));
    let response = exchange(connection, request.body(Full::default()).expect("a request of fixed parts")).await?;
    expect(&response, StatusCode::FOUND)?;
    let cookie = header(&response, "set-cookie").split(';').next().unwrap_or_default().to_owned();
    let location: Url = header(&response, "location").parse().map_err(|_| "redirect without an address".to_owned())?;
    let state = location.query_pairs().find(|(name, _)| name == "state");
    Ok((cookie, state.map(|(_, state)| state.into_owned()).unwrap_or_default()))
}

/// *callback* of a flow.
pub(super) fn callback(
    server: SocketAddr,
    app: &str,
    provider: &str,
    (cookie, state): (&str, &str),
    code: &str,
) -> Request<Full<Bytes>> {
    let query = url::form_urlencoded::Serializer::new(String::new())
        .append_pair("code", code)
        .append_pair("state", state)
        .finish();
    get(server, &format!("/{app}/{provider}/callback?{query}"))
        .header("cookie", cookie)
        .body(Full::default())
        .expect("a request of fixed parts")
}

fn get(server: SocketAddr, path: &str) -> http::request::Builder {
    Request::get(path).header("host", server.to_string())
}

async fn exchange(connection: &mut Connection, request: Request<Full<Bytes>>) -> Result<Response<()>, String> {
    let broken = |_| "the connection broke".to_owned();
    connection.ready().await.map_err(broken)?;
    let (head, body) = connection.send_request(request).await.map_err(broken)?.into_parts();
    body.collect().await.map_err(broken)?;
    Ok(Response::from_parts(head, ()))
}

fn expect(response: &Response<()>, status: StatusCode) -> Result<(), String> {
    if response.status() == status { Ok(()) } else { Err(response.status().as_u16().to_string()) }
}

fn header<'a>(response: &'a Response<()>, name: &str) -> &'a str {
    response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// The `error` that an App is sent.
fn error_of(location: &str) -> String {
    let error = Url::parse(location)
        .ok()
        .and_then(|url| url.query_pairs().find(|(name, _)| name == "error").map(|(_, error)| error.into_owned()));
    error.unwrap_or_else(|| "a redirect without a session".to_owned())
}

// === impl Seen ===

impl Seen {
    pub(super) fn failed(&self) -> u64 {
        self.failures.values().sum()
    }

    /// Microseconds; none where it is more than one in a hundred that failed.
    pub(super) fn p99(&self) -> Option<u64> {
        let all = self.failed() + self.latency.len();
        (self.failed() * 100 < all).then(|| self.latency.value_at_quantile(0.99))
    }

    /// For people.
    pub(super) fn line(&self) -> String {
        #[expect(clippy::cast_precision_loss, reason = "a count of a benchmark is far below 2^52")]
        let rate = self.latency.len() as f64 / self.took.as_secs_f64();
        let at = |quantile| if self.latency.is_empty() { "-".to_owned() } else { millis(&self.latency, quantile) };
        let failures: Vec<_> = self.failures.iter().map(|(what, count)| format!("{count} × {what}")).collect();
        format!(
            "{rate:>7.1}/s   p50 {:>9}   p99 {:>9}   most {:>9}   failed {}",
            at(0.5),
            at(0.99),
            at(1.0),
            if failures.is_empty() { "none".to_owned() } else { failures.join(", ") }
        )
    }
}
