//! The pods that call the administration API, each with the token of its ServiceAccount.

use std::{collections::BTreeSet, fs, time::Duration};

use anyhow::{Context, Result, ensure};
use latchkey_tests::{dex::DEX_PASSWORD, passwords::PASSWORD};
use reqwest::{Method, StatusCode};
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
pub(crate) struct AdministratorArgs {
    #[command(flatten)]
    caller: CallerArgs,
    /// URL of the public API.
    #[arg(long)]
    public_url: Url,
    /// `external_id` of a user who was imported with the hash of [`DEX_PASSWORD`].
    #[arg(long)]
    imported: String,
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

/// Limit until the API can be reached: a network can take a moment to know that a NetworkPolicy allows a new pod.
const REACH_LIMIT: Duration = Duration::from_secs(30);
/// Limit for all events of the consumer. They wait for the import and for the administrator.
const EVENTS_LIMIT: Duration = Duration::from_secs(150);

/// The administration API of the App.
struct Api {
    http: reqwest::Client,
    base: Url,
    token: String,
}

/// Finds an imported user; creates, disables and deletes another one.
pub(crate) async fn administer(options: &AdministratorArgs) -> Result<()> {
    let api = Api::connect(&options.caller).await?;
    let found = format!("users?external_id={}", options.imported);
    let found = api.expect(Method::GET, &found, None, StatusCode::OK).await?;
    let email = found["users"][0]["email"].as_str().with_context(|| format!("no imported user: {found}"))?;
    log_in(options, &api, email, DEX_PASSWORD, StatusCode::OK).await?;
    println!("an imported user logs in with the password of the other service");

    let email = format!("grace-{:08x}@example.com", rand::random::<u32>());
    let user = json!({ "email": email, "email_verified": true, "name": "Grace", "password": PASSWORD });
    let user = api.expect(Method::POST, "users", Some(&user), StatusCode::OK).await?;
    let path = format!("users/{}", user["id"].as_str().context("a user has an id")?);
    log_in(options, &api, &email, PASSWORD, StatusCode::OK).await?;
    let disabled = json!({ "disabled": true });
    let disabled = api.expect(Method::PATCH, &path, Some(&disabled), StatusCode::OK).await?;
    ensure!(disabled["state"] == "disabled", "{disabled}");
    log_in(options, &api, &email, PASSWORD, StatusCode::FORBIDDEN).await?;
    api.expect(Method::DELETE, &path, None, StatusCode::OK).await?;
    api.expect(Method::GET, &path, None, StatusCode::NOT_FOUND).await?;
    println!("a user was created, disabled and deleted");
    Ok(())
}

async fn log_in(
    options: &AdministratorArgs,
    api: &Api,
    email: &str,
    password: &str,
    expected: StatusCode,
) -> Result<()> {
    let url = options.public_url.join(&format!("v1/{}/email/login", options.caller.app))?;
    let response = api.http.post(url).json(&json!({ "email": email, "password": password })).send().await?;
    let (status, text) = (response.status(), response.text().await?);
    ensure!(status == expected, "a login returned {status}: {text}");
    Ok(())
}

/// Calls with the token of a ServiceAccount that the App does not list.
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
