//! Records the requests that a server sends for a webhook before, during and after a rotation of the webhook's key, for
//! `make interop` (tests/interop/README.md).

use std::{fs, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use http::{Method, StatusCode, header::CONTENT_TYPE};
use serde_json::{Map, Value, json};

use crate::{
    builders::{App, Webhook},
    client::ApiClient,
    passwords::PASSWORD,
    process,
    service_account::{AUDIENCE, ServiceAccountIssuer},
    stack::Stack,
    webhook_receiver::{ReceivedEvent, WebhookReceiver},
};

const EVENTS: [&str; 5] = ["session.created", "user.created", "user.deleted", "user.disabled", "users.imported"];
/// The types of the events that [`Recorder::cause_events`] causes, sorted.
const RECORDED: [&str; 6] =
    ["session.created", "user.created", "user.created", "user.deleted", "user.disabled", "users.imported"];
const NAMESPACE: &str = "interop";
const SERVICE_ACCOUNT: &str = "administrator";
/// Maximum number of attempts until the server signs with changed keys. Usually, this takes less than a second.
const ATTEMPTS: usize = 200;
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(100);

struct Recorder {
    stack: Stack,
    receiver: WebhookReceiver,
    app: App,
    /// Client of the administration API.
    admin: ApiClient,
    /// Token of an administrator.
    token: String,
    /// Number of users so far.
    users: usize,
}

/// Prints recorded requests, one JSON object per line: signed with the old key, then with the old and a new key, then
/// with the new key only.
pub async fn print() -> Result<()> {
    let receiver = WebhookReceiver::start()?;
    let old = Webhook::push("interop", &receiver.url(), &EVENTS).include_profile();
    let rotated = old.clone().rotate_key();
    let mut recorder = Recorder::start(receiver, &old).await?;
    let phases = [
        (old.clone(), vec![old.key()]),
        (rotated.clone(), vec![rotated.key(), old.key()]),
        (rotated.clone().without_previous_key(), vec![rotated.key()]),
    ];
    let mut lines = Vec::new();
    for (webhook, keys) in phases {
        recorder.use_keys(&webhook, &keys).await?;
        for event in recorder.cause_events().await? {
            lines.push(line(&event, &keys)?);
        }
    }
    for line in lines {
        println!("{line}");
    }
    Ok(())
}

fn line(event: &ReceivedEvent, keys: &[&str]) -> Result<Value> {
    let mut headers = Map::new();
    for (name, value) in &event.headers {
        headers.insert(name.as_str().to_owned(), json!(value.to_str().context("a header is ASCII text")?));
    }
    Ok(json!({ "headers": headers, "body": event.text, "keys": keys }))
}

// === impl Recorder ===

impl Recorder {
    async fn start(receiver: WebhookReceiver, webhook: &Webhook) -> Result<Self> {
        let account = json!({ "namespace": NAMESPACE, "name": SERVICE_ACCOUNT });
        let administrators = json!([{ "serviceAccount": account, "role": "UserAdmin" }]);
        let app = App::new("interop").set("/administrators", administrators).webhook(webhook);
        let issuer = ServiceAccountIssuer::new()?;
        let keys = process::fresh_dir("keys").join("keys.json");
        fs::write(&keys, issuer.jwks()?.to_string())?;
        let stack = Stack::builder().app(&app).args(["--service-account-keys", &keys.display().to_string()]);
        let token = issuer.token(NAMESPACE, SERVICE_ACCOUNT, AUDIENCE, Duration::from_secs(3600))?;
        let stack = stack.try_start().await?;
        let admin = ApiClient::new(stack.server().admin);
        Ok(Self { stack, receiver, app, admin, token, users: 0 })
    }

    /// Changes the keys of the webhook, and waits until the server signs with them.
    async fn use_keys(&mut self, webhook: &Webhook, keys: &[&str]) -> Result<()> {
        self.app = self.app.clone().webhook(webhook);
        self.stack.apply(&self.app)?;
        for _ in 0..ATTEMPTS {
            let seen = self.receiver.events().len();
            let user = json!({ "email": self.next_email() });
            self.administer(Method::POST, "users", Some(&user)).await?;
            let events = self.receiver.wait_for(seen + 1).await;
            let event = &events[seen];
            if event.signature_count() == keys.len() && keys.iter().all(|key| event.is_signed_with(key)) {
                return Ok(());
            }
            tokio::time::sleep(ATTEMPT_INTERVAL).await;
        }
        bail!("the server does not sign with the {} keys of the webhook", keys.len())
    }

    /// Causes the events of [`RECORDED`], so that requests with and without a user, a session and a profile are
    /// recorded. Returns the requests.
    async fn cause_events(&mut self) -> Result<Vec<ReceivedEvent>> {
        let seen = self.receiver.events().len();
        let (app, client) = (self.app.id().to_owned(), self.stack.client());
        let (registered, created, imported) = (self.next_email(), self.next_email(), self.next_email());
        client.register(&app, "Ada Lovelace", &registered, PASSWORD).await.expect(StatusCode::OK);
        let user = json!({
            "email": created, "email_verified": true, "name": "Ada Löwe 🦁", "password": PASSWORD,
            "external_id": format!("crm:{created}"),
        });
        let user = self.administer(Method::POST, "users", Some(&user)).await?;
        let path = format!("users/{}", user["id"].as_str().context("a user has an id")?);
        client.login(&app, &created, PASSWORD).await.expect(StatusCode::OK);
        self.administer(Method::PATCH, &path, Some(&json!({ "disabled": true }))).await?;
        self.administer(Method::DELETE, &path, None).await?;
        self.import(&json!({ "external_id": imported, "email": imported })).await?;

        let events = self.receiver.wait_for(seen + RECORDED.len()).await.split_off(seen);
        let mut types: Vec<&str> = events.iter().map(ReceivedEvent::event_type).collect();
        types.sort_unstable();
        ensure!(types == RECORDED, "the server sent {types:?}");
        Ok(events)
    }

    fn next_email(&mut self) -> String {
        self.users += 1;
        format!("user-{}@example.com", self.users)
    }

    async fn administer(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        let request = self.request(method, path);
        let request = match body {
            Some(body) => request.json(body),
            None => request,
        };
        self.send(request).await
    }

    async fn import(&self, user: &Value) -> Result<Value> {
        let request = self.request(Method::POST, "imports?source=interop");
        self.send(request.header(CONTENT_TYPE, "application/x-ndjson").body(format!("{user}\n"))).await
    }

    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.admin.request(method, &format!("v1/{}/{path}", self.app.id())).bearer_auth(&self.token)
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<Value> {
        let response = self.admin.try_send(request).await?;
        ensure!(response.status == StatusCode::OK, "the server responds with {}: {}", response.status, response.text);
        Ok(response.body)
    }
}
