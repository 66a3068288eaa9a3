//! Ordinary users, who are not part of the attack.

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
use latchkey_tests::passwords::PASSWORD;
use serde_json::json;
use tokio::time::{sleep, timeout};
use url::Url;

use super::attackers::post_request;
use crate::{
    logins::{Connection, connect},
    measurements::{format_millis, histogram, micros_of},
};

/// The redirect URL of social logins.
pub(super) const REDIRECT_URL: &str = "http://127.0.0.1/done";
/// Timeout of one repetition of an action.
const ACTION_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause before a retry after a failure.
const PAUSE: Duration = Duration::from_millis(100);

/// The action that a user repeats. Each repetition opens a new connection, like a browser that was just started.
#[derive(Clone)]
pub(super) enum UserAction {
    /// A login by password.
    PasswordLogin { app: String, email: String },
    /// A social login: *redirect*, then *callback* with a code that the provider accepts for `person`.
    SocialLogin { app: String, provider: String, person: String },
}

/// A user at a client address.
#[derive(Clone)]
pub(super) struct User {
    pub(super) from: IpAddr,
    pub(super) action: UserAction,
}

/// The result of [`measure_users`].
pub(super) struct UserMeasurements {
    /// Latency of the successful actions, in microseconds.
    pub(super) latency: Histogram<u64>,
    /// Number of failed actions, by the description of the failure.
    pub(super) failures: BTreeMap<String, u64>,
    /// How long the users were measured.
    took: Duration,
}

/// Makes all users repeat their actions, until the time is over or the server has ended. A user pauses only after a
/// failure.
pub(super) async fn measure_users(
    server: SocketAddr,
    users: &[User],
    duration: Duration,
    server_ended: &Arc<AtomicBool>,
) -> Result<UserMeasurements> {
    let started = Instant::now();
    let end = started + duration;
    let running: Vec<_> = users
        .iter()
        .map(|user| tokio::spawn(user.clone().repeat_until(server, end, Arc::clone(server_ended))))
        .collect();
    let mut measurements = UserMeasurements { latency: histogram(), failures: BTreeMap::new(), took: Duration::ZERO };
    for user in running {
        let (latency, failures) = user.await?;
        measurements.latency.add(&latency)?;
        for (what, count) in failures {
            *measurements.failures.entry(what).or_default() += count;
        }
    }
    measurements.took = started.elapsed();
    Ok(measurements)
}

// === impl User ===

impl User {
    async fn repeat_until(
        self,
        server: SocketAddr,
        end: Instant,
        server_ended: Arc<AtomicBool>,
    ) -> (Histogram<u64>, BTreeMap<String, u64>) {
        let (mut latency, mut failures) = (histogram(), BTreeMap::<String, u64>::new());
        while Instant::now() < end && !server_ended.load(Ordering::Relaxed) {
            let started = Instant::now();
            let outcome = timeout(ACTION_TIMEOUT, self.action.run(server, self.from)).await;
            match outcome.unwrap_or_else(|_| Err(format!("no response within {ACTION_TIMEOUT:?}"))) {
                Ok(()) => latency.saturating_record(micros_of(started.elapsed())),
                Err(failure) => {
                    *failures.entry(failure).or_default() += 1;
                    sleep(PAUSE).await;
                }
            }
        }
        (latency, failures)
    }
}

// === impl UserAction ===

impl UserAction {
    async fn run(&self, server: SocketAddr, from: IpAddr) -> Result<(), String> {
        let mut connection = connect(server, from).await.map_err(|_| "no connection".to_owned())?;
        match self {
            Self::PasswordLogin { app, email } => {
                let body = json!({ "email": email, "password": PASSWORD });
                let login = post_request(server, &format!("/v1/{app}/email/login"), &body);
                expect_status(&exchange(&mut connection, login).await?, StatusCode::OK)
            }
            Self::SocialLogin { app, provider, person } => {
                let (cookie, state) = begin_flow(&mut connection, server, app, provider).await?;
                let code = format!("code-{person}");
                let callback = callback_request(server, app, provider, (&cookie, &state), &code);
                let response = exchange(&mut connection, callback).await?;
                expect_status(&response, StatusCode::FOUND)?;
                let location = header(&response, "location");
                if location.contains("access_token=") { Ok(()) } else { Err(redirect_error(location)) }
            }
        }
    }
}

/// Calls *redirect*. Returns the cookie and the `state` of the new flow.
pub(super) async fn begin_flow(
    connection: &mut Connection,
    server: SocketAddr,
    app: &str,
    provider: &str,
) -> Result<(String, String), String> {
    let request = get_request(server, &format!("/{app}/{provider}/redirect"));
    let response = exchange(connection, request.body(Full::default()).expect("a request of fixed parts")).await?;
    expect_status(&response, StatusCode::FOUND)?;
    let cookie = header(&response, "set-cookie").split(';').next().unwrap_or_default().to_owned();
    let location: Url = header(&response, "location").parse().map_err(|_| "redirect without an address".to_owned())?;
    let state = location.query_pairs().find(|(name, _)| name == "state");
    Ok((cookie, state.map(|(_, state)| state.into_owned()).unwrap_or_default()))
}

/// A *callback* request of a flow.
pub(super) fn callback_request(
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
    get_request(server, &format!("/{app}/{provider}/callback?{query}"))
        .header("cookie", cookie)
        .body(Full::default())
        .expect("a request of fixed parts")
}

fn get_request(server: SocketAddr, path: &str) -> http::request::Builder {
    Request::get(path).header("host", server.to_string())
}

async fn exchange(connection: &mut Connection, request: Request<Full<Bytes>>) -> Result<Response<()>, String> {
    let broken = |_| "the connection broke".to_owned();
    connection.ready().await.map_err(broken)?;
    let (head, body) = connection.send_request(request).await.map_err(broken)?.into_parts();
    body.collect().await.map_err(broken)?;
    Ok(Response::from_parts(head, ()))
}

fn expect_status(response: &Response<()>, status: StatusCode) -> Result<(), String> {
    if response.status() == status { Ok(()) } else { Err(response.status().as_u16().to_string()) }
}

fn header<'a>(response: &'a Response<()>, name: &str) -> &'a str {
    response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// The `error` parameter of a redirect to the application.
fn redirect_error(location: &str) -> String {
    let error = Url::parse(location)
        .ok()
        .and_then(|url| url.query_pairs().find(|(name, _)| name == "error").map(|(_, error)| error.into_owned()));
    error.unwrap_or_else(|| "a redirect without a session".to_owned())
}

// === impl UserMeasurements ===

impl UserMeasurements {
    pub(super) fn failed_count(&self) -> u64 {
        self.failures.values().sum()
    }

    /// p99 of the latency in microseconds. `None` if 1 % of the actions or more failed.
    pub(super) fn p99(&self) -> Option<u64> {
        let all = self.failed_count() + self.latency.len();
        (self.failed_count() * 100 < all).then(|| self.latency.value_at_quantile(0.99))
    }

    /// One line of the printed report.
    pub(super) fn report_line(&self) -> String {
        #[expect(clippy::cast_precision_loss, reason = "a count of a benchmark is far below 2^52")]
        let rate = self.latency.len() as f64 / self.took.as_secs_f64();
        let at =
            |quantile| if self.latency.is_empty() { "-".to_owned() } else { format_millis(&self.latency, quantile) };
        let failures: Vec<_> = self.failures.iter().map(|(what, count)| format!("{count} × {what}")).collect();
        format!(
            "{rate:>7.1}/s   p50 {:>9}   p99 {:>9}   max {:>9}   failed {}",
            at(0.5),
            at(0.99),
            at(1.0),
            if failures.is_empty() { "none".to_owned() } else { failures.join(", ") }
        )
    }
}
