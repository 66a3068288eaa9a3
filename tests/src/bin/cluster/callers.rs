//! The pods that call the administration API, each with the token of its ServiceAccount.

pub(crate) mod administrator;
pub(crate) mod imported_users;
pub(crate) mod openid_users;

use std::{collections::BTreeSet, fs, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use reqwest::{Method, StatusCode, header::RETRY_AFTER};
use serde_json::{Value, json};
use tokio::time::Instant;
use url::Url;

use crate::cluster_client::retry_until_ok;

#[derive(clap::Args)]
pub(crate) struct CallerArgs {
    /// URL of the administration API, with the name of its Service.
    #[arg(long)]
    url: Url,
    #[arg(long)]
    app: String,
}

#[derive(clap::Args)]
pub(crate) struct ConsumerArgs {
    #[command(flatten)]
    caller: CallerArgs,
    /// Name of the pull webhook.
    #[arg(long)]
    webhook: String,
    /// The program ends when it has got an event of each of these types.
    #[arg(long, value_delimiter = ',')]
    events: Vec<String>,
}

/// The folder of the token in a pod.
pub(crate) const TOKEN_FOLDER: &str = "/var/run/secrets/latchkey";

/// Time limit for reaching the API. It can take a moment until a NetworkPolicy takes effect for a new pod.
const REACH_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for the consumer to get all its events. The administrator causes these events.
const EVENTS_LIMIT: Duration = Duration::from_secs(150);
/// Timeout of a call. A call to the inbox can wait for a mail for a minute.
const CALL_TIMEOUT: Duration = Duration::from_secs(90);

/// The administration API of the App.
struct Api {
    http: reqwest::Client,
    base: Url,
    token: String,
}

/// The public API of the App.
struct PublicApi {
    http: reqwest::Client,
    base: Url,
}

/// A response of the public API.
struct PublicResponse {
    status: StatusCode,
    /// `Retry-After`, if the response has one.
    retry_after: Option<Duration>,
    /// Null if the body is not JSON.
    body: Value,
}

/// Calls the API with the token of a ServiceAccount that the App does not list, and expects refusals.
pub(crate) async fn call_unlisted(options: &CallerArgs) -> Result<()> {
    let api = Api::connect(options).await?;
    let user = json!({ "email": "mallory@example.com" });
    for (method, body) in [(Method::GET, None), (Method::POST, Some(&user))] {
        let response = api.expect(method, "users", body, StatusCode::UNAUTHORIZED).await?;
        ensure!(response["error"] == "invalid_client", "{response}");
    }
    println!("an account that the App does not list gets 401");
    Ok(())
}

/// Fetches and acknowledges the events of a pull webhook.
pub(crate) async fn consume(options: &ConsumerArgs) -> Result<()> {
    let api = Api::connect(&options.caller).await?;
    // A consumer has no other right.
    api.expect(Method::GET, "users", None, StatusCode::FORBIDDEN).await?;
    let webhook = format!("webhooks/{}", options.webhook);
    let mut missing: BTreeSet<&str> = options.events.iter().map(String::as_str).collect();
    let end = Instant::now() + EVENTS_LIMIT;
    while !missing.is_empty() {
        ensure!(Instant::now() < end, "no event of the types {missing:?}");
        let response = api.expect(Method::GET, &format!("{webhook}/events?wait=5"), None, StatusCode::OK).await?;
        let events = response["events"].as_array().context("a response has events")?;
        if events.is_empty() {
            continue;
        }
        let ids: Vec<&Value> = events.iter().map(|event| &event["id"]).collect();
        let acknowledgement = json!({ "ids": ids });
        let path = format!("{webhook}/acknowledge");
        let response = api.expect(Method::POST, &path, Some(&acknowledgement), StatusCode::OK).await?;
        ensure!(response["acknowledged"] == ids.len(), "{response} for {acknowledgement}");
        for event in events {
            println!("event {event}");
            missing.remove(event["type"].as_str().unwrap_or_default());
        }
    }
    Ok(())
}

// === impl Api ===

impl Api {
    /// Reads the token, and waits until the API responds.
    async fn connect(options: &CallerArgs) -> Result<Self> {
        let token = fs::read_to_string(format!("{TOKEN_FOLDER}/token")).context("reading the token")?;
        let http = reqwest::Client::builder().no_proxy().connect_timeout(Duration::from_secs(3));
        let http = http.timeout(Duration::from_secs(60)).build()?;
        let base = options.url.join(&format!("v1/{}/", options.app))?;
        let api = Self { http, base, token: token.trim().to_owned() };
        let call = || api.call(Method::GET, "users", None);
        retry_until_ok("the administration API responds", REACH_LIMIT, call).await?;
        Ok(api)
    }

    /// Lists all users of the App, in pages of `limit` users. Returns the users and the number of pages.
    async fn list_users(&self, limit: u32) -> Result<(Vec<Value>, usize)> {
        let first_path = format!("users?limit={limit}");
        let (mut users, mut pages, mut path) = (Vec::new(), 0, first_path.clone());
        loop {
            let mut page = self.expect(Method::GET, &path, None, StatusCode::OK).await?;
            let Value::Array(listed) = page["users"].take() else { bail!("{path} returned no users: {page}") };
            users.extend(listed);
            pages += 1;
            // A cursor has only characters that need no encoding in a query.
            let Some(cursor) = page["next"].as_str() else { return Ok((users, pages)) };
            path = format!("{first_path}&cursor={cursor}");
        }
    }

    /// Calls the API. Asserts the status, and returns the body.
    async fn expect(&self, method: Method, path: &str, body: Option<&Value>, expected: StatusCode) -> Result<Value> {
        let (status, response) = self.call(method.clone(), path, body).await?;
        ensure!(status == expected, "{method} {path} returned {status} instead of {expected}: {response}");
        Ok(response)
    }

    async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Result<(StatusCode, Value)> {
        let mut request = self.http.request(method, self.base.join(path)?).bearer_auth(&self.token);
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = request.send().await.with_context(|| path.to_owned())?;
        let status = response.status();
        Ok((status, serde_json::from_str(&response.text().await?).unwrap_or(Value::Null)))
    }
}

// === impl PublicApi ===

impl PublicApi {
    /// The API at this URL, with new connections.
    fn new(url: &Url, app: &str) -> Result<Self> {
        let http = reqwest::Client::builder().no_proxy().timeout(CALL_TIMEOUT).build()?;
        Ok(Self { http, base: url.join(&format!("v1/{app}/"))? })
    }

    async fn get(&self, path: &str, access_token: &str) -> Result<PublicResponse> {
        PublicResponse::read(self.http.get(self.base.join(path)?).bearer_auth(access_token)).await
    }

    async fn post(&self, path: &str, body: &Value) -> Result<PublicResponse> {
        PublicResponse::read(self.http.post(self.base.join(path)?).json(body)).await
    }

    async fn log_in(&self, email: &str, password: &str) -> Result<PublicResponse> {
        self.post("email/login", &json!({ "email": email, "password": password })).await
    }
}

// === impl PublicResponse ===

impl PublicResponse {
    async fn read(request: reqwest::RequestBuilder) -> Result<Self> {
        let response = request.send().await?;
        let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        Ok(Self {
            status: response.status(),
            retry_after: retry_after.map(Duration::from_secs),
            body: serde_json::from_str(&response.text().await?).unwrap_or(Value::Null),
        })
    }

    /// Asserts that the call succeeded, and returns the body.
    fn expect_ok(self) -> Result<Value> {
        ensure!(self.status == StatusCode::OK, "the response is {}: {}", self.status, self.body);
        Ok(self.body)
    }

    /// Asserts the status and the error code.
    fn expect_error(&self, status: StatusCode, error: &str) -> Result<()> {
        let is_expected = self.status == status && self.body["error"] == error;
        ensure!(is_expected, "the response is {} instead of {status} {error}: {}", self.status, self.body);
        Ok(())
    }
}
