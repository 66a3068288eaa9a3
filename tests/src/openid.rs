//! Third-party programs that sign in users with OpenID Connect at Latchkey. `make test` runs some of these programs,
//! and `make interop` runs all of them (tests/interop/openid/README.md).

pub mod application;
pub mod oidc_client_ts;
pub mod scenario;
mod upstream;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::{
    builders::{App, Client},
    client::ApiClient,
    openid::application::Peer,
    passwords::PASSWORD,
    process,
    service_account::{AUDIENCE, ServiceAccountIssuer},
    stack::Stack,
    tls::{ServerTls, TlsProxy},
    web_browser::WebBrowser,
};

/// The group of the test users. A program that restricts access admits only the members of this group.
pub const GROUP: &str = "ops";
/// The scopes that programs request.
pub const SCOPES: [&str; 5] = ["openid", "profile", "email", "groups", "offline_access"];
/// The number of the first signing key that the test adds to the App. It is higher than all numbers of the App's own
/// keys.
const FIRST_ADDED_KEY: usize = 1001;
const NAMESPACE: &str = "interop";
const SERVICE_ACCOUNT: &str = "administrator";
const ADMINISTRATOR_TOKEN_LIFETIME: Duration = Duration::from_secs(3600);
/// The rate limits that the test raises. Most of them count per client address, and all users of a test have the client
/// address of the TLS proxy. `loginFailuresPerAccount` counts per account.
const RAISED_LIMITS: [&str; 7] = [
    "loginFailuresPerClient",
    "loginFailuresPerAccount",
    "loginFailuresPerClientOverall",
    "loginsPerClient",
    "registrationsPerClient",
    "authorizationsPerClientAddress",
    "clientFailuresPerClientAddress",
];
/// The raised count of these rate limits, which no program reaches.
const UNREACHED_COUNT: u32 = 100_000;

/// A service over TLS with one App that has hosted pages. Programs trust its CA.
pub struct OpenIdProvider {
    stack: Stack,
    app: App,
    ca: PathBuf,
    /// The token of an administrator of the App.
    token: String,
    /// One App for each algorithm. To rotate the keys of `app`, the test adds the signing keys of these Apps, because
    /// `latchkey-operator render` rotates no keys.
    key_apps: [App; 2],
    rotation: Mutex<Rotation>,
    _proxy: TlsProxy,
}

/// How far the rotation of the signing keys is (specification: Keys, States).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rotation {
    NotBegun,
    /// The next keys are Published.
    Published,
    /// The next keys are Active, and the previous keys are Retired.
    Done,
}

/// A user of the App with [`PASSWORD`] and a verified email address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub id: String,
    pub email: String,
}

/// Runs the scenario with these programs, one after the other, and prints the results. Without names, runs all.
pub async fn run_programs(names: &[String]) -> Result<()> {
    let all: Vec<&str> = Peer::ALL.iter().map(|peer| peer.name()).chain([oidc_client_ts::NAME]).collect();
    for name in names {
        ensure!(all.contains(&name.as_str()), "there is no program {name}; there are {}", all.join(", "));
    }
    let is_wanted = |name: &str| names.is_empty() || names.iter().any(|wanted| wanted == name);
    let mut failed = Vec::new();
    for name in all.into_iter().filter(|name| is_wanted(name)) {
        let provider = OpenIdProvider::start().await?;
        let outcome = match Peer::ALL.iter().find(|peer| peer.name() == name) {
            Some(peer) => scenario::run(&provider, *peer).await,
            None => oidc_client_ts::run(&provider).await,
        };
        match outcome {
            Ok(()) => println!("ok     {name}: sign in, group, refresh, userinfo, rotated key and secret, log out"),
            Err(error) => {
                println!("FAILED {name}: {error:#}");
                failed.push(name);
            }
        }
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

/// The header of a JWT, without verification.
pub fn jwt_header(token: &str) -> Result<Value> {
    let header = token.split('.').next().context("a token is a JWT")?;
    Ok(serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(header)?)?)
}

// === impl OpenIdProvider ===

impl OpenIdProvider {
    pub async fn start() -> Result<Self> {
        let service_accounts = ServiceAccountIssuer::new()?;
        let dir = process::fresh_dir("openid");
        let (keys, ca) = (dir.join("keys.json"), dir.join("ca.pem"));
        fs::write(&keys, service_accounts.jwks()?.to_string())?;
        let account = json!({ "namespace": NAMESPACE, "name": SERVICE_ACCOUNT });
        let mut app = App::new("openid")
            .set("/pages/mode", "Enabled")
            .set("/administrators", json!([{ "serviceAccount": account, "role": "UserAdmin" }]));
        for limit in RAISED_LIMITS {
            app = app.limit(limit, &[(UNREACHED_COUNT, 60)]);
        }
        let tls = ServerTls::new()?;
        fs::write(&ca, &tls.ca)?;
        let (builder, proxy) = Stack::builder().behind_tls(&tls).await?;
        let mut builder = builder.app(&app).args(["--service-account-keys", &keys.display().to_string()]);
        let key_apps = ["ES256", "RS256"].map(|name| App::new("keys").set("/tokens/signingAlgorithm", name));
        for key_app in &key_apps {
            builder = builder.app(key_app);
        }
        let stack = builder.try_start().await?;
        let token = service_accounts.token(NAMESPACE, SERVICE_ACCOUNT, AUDIENCE, ADMINISTRATOR_TOKEN_LIFETIME)?;
        Ok(Self { stack, app, ca, token, key_apps, rotation: Mutex::new(Rotation::NotBegun), _proxy: proxy })
    }

    pub fn app(&self) -> &App {
        &self.app
    }

    pub fn stack(&self) -> &Stack {
        &self.stack
    }

    /// The file of the CA that signed the provider's certificate, PEM.
    pub fn ca(&self) -> &Path {
        &self.ca
    }

    pub fn issuer(&self) -> String {
        self.stack.issuer(&self.app)
    }

    /// A browser without cookies.
    pub fn browser(&self) -> Result<WebBrowser> {
        WebBrowser::new([(self.stack.base_url().to_owned(), self.stack.server().public)])
    }

    /// Creates a user who is a member of these groups.
    pub async fn create_user(&self, email: &str, groups: &[&str]) -> Result<User> {
        let user = json!({ "email": email, "email_verified": true, "name": "Ada Lovelace", "password": PASSWORD });
        let created = self.administer(Method::POST, "users", Some(&user)).await?;
        let id = created["id"].as_str().context("a user has an id")?.to_owned();
        for group in groups {
            self.administer(Method::PUT, &format!("groups/{group}"), Some(&json!({}))).await?;
            self.administer(Method::PUT, &format!("groups/{group}/members/{id}"), None).await?;
        }
        Ok(User { id, email: email.to_owned() })
    }

    /// Creates or changes a Client, and waits until it is served.
    pub async fn apply_client(&self, client: &Client) -> Result<()> {
        self.stack.apply_client(client)?;
        self.write_next_keys()?;
        self.stack.wait_until_served(&self.app).await
    }

    pub fn client_secret(&self, client: &Client) -> Result<String> {
        self.stack.client_secret(client)
    }

    /// Publishes the next signing keys. [`OpenIdProvider::use_next_keys`] makes them sign.
    pub async fn publish_next_keys(&self) -> Result<()> {
        self.set_rotation(Rotation::Published).await
    }

    /// Makes the published keys Active, so that they sign. In a cluster, they become Active some minutes after their
    /// publication.
    pub async fn use_next_keys(&self) -> Result<()> {
        self.set_rotation(Rotation::Done).await
    }

    async fn set_rotation(&self, rotation: Rotation) -> Result<()> {
        *process::lock(&self.rotation) = rotation;
        self.write_next_keys()?;
        self.stack.wait_until_served(&self.app).await
    }

    /// Writes the state of the rotation into the rendered document. Has no effect if the document already has this
    /// state.
    fn write_next_keys(&self) -> Result<()> {
        let rotation = *process::lock(&self.rotation);
        if rotation == Rotation::NotBegun {
            return Ok(());
        }
        let path = self.stack.rendered().join(format!("{}.json", self.app.id()));
        let mut document: Value = serde_json::from_slice(&fs::read(&path)?)?;
        let mut numbers = FIRST_ADDED_KEY..;
        for pointer in ["/keys/signing", "/keys/idTokens"] {
            // A document without Clients has no ID token keys.
            let Some(keys) = document.pointer_mut(pointer).and_then(Value::as_array_mut) else { continue };
            keys.retain(|key| !is_added(key));
            let mut added_keys = Vec::new();
            for key in keys.iter_mut() {
                let mut next = self.added_key(&key["algorithm"])?;
                next["id"] = json!(format!("s{}", numbers.next().context("a number")?));
                next["state"] = json!(if rotation == Rotation::Done { "Active" } else { "Published" });
                added_keys.push(next);
                if rotation == Rotation::Done {
                    key["state"] = json!("Retired");
                }
            }
            keys.append(&mut added_keys);
        }
        Ok(fs::write(&path, document.to_string())?)
    }

    /// A signing key of another App for this algorithm.
    fn added_key(&self, algorithm: &Value) -> Result<Value> {
        for key_app in &self.key_apps {
            let document = fs::read(self.stack.rendered().join(format!("{}.json", key_app.id())))?;
            let document: Value = serde_json::from_slice(&document)?;
            let key = &document["keys"]["signing"][0];
            if key["algorithm"] == *algorithm {
                return Ok(key.clone());
            }
        }
        bail!("no App has a key for {algorithm}")
    }

    async fn administer(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        let api = ApiClient::new(self.stack.server().admin);
        let mut request = api.request(method.clone(), &format!("v1/{}/{path}", self.app.id())).bearer_auth(&self.token);
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = api.try_send(request).await?;
        let is_success = matches!(response.status, StatusCode::OK | StatusCode::CREATED | StatusCode::NO_CONTENT);
        ensure!(is_success, "{method} {path}: {} {}", response.status, response.text);
        Ok(response.body)
    }
}

/// Whether the test has added this signing key.
fn is_added(key: &Value) -> bool {
    let number = key["id"].as_str().and_then(|id| id.strip_prefix('s')?.parse().ok());
    number.is_some_and(|number: usize| number >= FIRST_ADDED_KEY)
}

/// Runs a command until it ends. Returns an error with the output if the command fails.
fn run_command(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
