//! A real OpenID provider, Dex, in its own process. Users log in on its pages with a password.

use std::{
    fs,
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use http::Method;
use rustix::process::Signal;
use serde_json::{Value, json};
use url::{Url, form_urlencoded};

use crate::{
    browser::Browser,
    builders::Provider,
    client::ApiClient,
    postgres::write_private,
    process::{self, Process, Program},
    tls::{ServerTls, TlsProxy},
    tools,
};

/// The password of every user.
pub const DEX_PASSWORD: &str = "open-sesame";
/// The bcrypt hash of [`DEX_PASSWORD`], with the lowest cost that Dex accepts.
pub const DEX_PASSWORD_HASH: &str = "$2b$10$EoHY6U86IlFkazC440nOW.o4sgH5Mg/45Pl4siaFa7Bnxt8gk/LX2";
/// The path of authorization requests that need no page, below the address of Dex.
pub const AUTOMATIC_LOGIN_PATH: &str = "/dex/auth/automatic";
/// Time limit for a start, including the generation of an RSA key.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for Dex to exit before a restart. After this time, Dex is killed.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// Settings of a provider.
#[derive(Clone, Debug)]
pub struct Options {
    pub data: PathBuf,
    pub log: PathBuf,
    pub addr: SocketAddr,
    /// The URL of the TLS proxy in front of Dex, if there is one.
    pub base_url: Option<String>,
    pub users: Vec<User>,
    pub clients: Vec<Client>,
    /// Whether Dex shows a consent page after the login. There, users grant access or cancel the login.
    pub requires_consent: bool,
    /// Whether Dex logs in everybody as one user, without a page. The path of this login is [`AUTOMATIC_LOGIN_PATH`].
    pub automatic_login: bool,
}

/// A user of the provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub email: String,
    pub name: String,
    /// Whether Dex reports the email address as verified.
    pub verified: bool,
}

/// An OAuth client of the provider.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Client {
    pub id: String,
    pub secret: String,
    /// The redirect URIs, which Dex compares byte for byte.
    pub callbacks: Vec<String>,
}

/// A running provider. Its state is in memory, so after a restart it has new keys and no unfinished logins.
pub struct Dex {
    process: Process,
    options: Options,
}

/// The issuer of the provider that listens at `addr`.
pub fn issuer(addr: SocketAddr) -> String {
    format!("http://{addr}/dex")
}

// === impl Options ===

impl Options {
    /// A provider on a free port, without users and clients.
    pub fn for_tests() -> Self {
        let dir = process::fresh_dir("dex");
        Self {
            log: dir.join("dex.log"),
            data: dir,
            addr: process::free_addr(),
            base_url: None,
            users: Vec::new(),
            clients: Vec::new(),
            requires_consent: false,
            automatic_login: false,
        }
    }

    pub fn issuer(&self) -> String {
        self.base_url.as_ref().map_or_else(|| issuer(self.addr), |base| format!("{base}/dex"))
    }

    /// Puts a TLS proxy in front of the provider. Users and servers call the proxy's URL.
    pub async fn behind_tls(mut self, tls: &ServerTls) -> Result<(Self, TlsProxy)> {
        let front = TlsProxy::start(tls, self.addr).await?;
        self.base_url = Some(front.url("127.0.0.1"));
        Ok((self, front))
    }

    pub fn user(mut self, person: User) -> Self {
        self.users.push(person);
        self
    }

    pub fn client(mut self, client: Client) -> Self {
        self.clients.push(client);
        self
    }

    /// Adds a consent page.
    pub fn with_consent_page(mut self) -> Self {
        self.requires_consent = true;
        self
    }

    /// Logs in everybody as one user, without a page.
    pub fn with_automatic_login(mut self) -> Self {
        self.automatic_login = true;
        self
    }

    /// The configuration file, as JSON, which is valid YAML.
    fn config_file(&self) -> Value {
        let people: Vec<Value> = self
            .users
            .iter()
            .map(|person| {
                json!({
                    "userID": person.email,
                    "email": person.email,
                    "username": person.name,
                    "name": person.name,
                    "emailVerified": person.verified,
                    "hash": DEX_PASSWORD_HASH,
                })
            })
            .collect();
        let clients: Vec<Value> = self
            .clients
            .iter()
            .map(|client| {
                json!({
                    "id": client.id,
                    "name": client.id,
                    "secret": client.secret,
                    "redirectURIs": client.callbacks,
                })
            })
            .collect();
        let connectors = if self.automatic_login {
            json!([{ "type": "mockCallback", "id": "automatic", "name": "Automatic" }])
        } else {
            json!([])
        };
        json!({
            "issuer": self.issuer(),
            "connectors": connectors,
            "storage": { "type": "memory" },
            "web": { "http": self.addr.to_string() },
            "oauth2": { "skipApprovalScreen": !self.requires_consent },
            "enablePasswordDB": true,
            "staticPasswords": people,
            "staticClients": clients,
        })
    }
}

// === impl User ===

impl User {
    /// A user with a verified email address.
    pub fn new(name: &str, email: &str) -> Self {
        Self { email: email.to_owned(), name: name.to_owned(), verified: true }
    }

    pub fn unverified(mut self) -> Self {
        self.verified = false;
        self
    }
}

// === impl Client ===

impl Client {
    /// The client that a Provider's manifest names.
    pub fn of(provider: &Provider, callback: &str) -> Self {
        Self {
            id: provider.client_id().to_owned(),
            secret: provider.secret().to_owned(),
            callbacks: vec![callback.to_owned()],
        }
    }
}

// === impl Dex ===

impl Dex {
    pub async fn start(options: Options) -> Result<Self> {
        let program = tools::built_tool("dex", "github.com/dexidp/dex", "dex", "dex")?;
        fs::create_dir_all(&options.data)?;
        // The file contains the clients' secrets.
        let file = options.data.join("dex.json");
        write_private(&file, &serde_json::to_string_pretty(&options.config_file())?)?;
        let process =
            Program::new("dex", program, &options.log).arg("serve").arg(file.display().to_string()).start()?;
        let this = Self { process, options };
        this.wait_until_ready().await?;
        Ok(this)
    }

    pub fn process(&self) -> &Process {
        &self.process
    }

    pub fn options(&self) -> &Options {
        &self.options
    }

    pub fn addr(&self) -> SocketAddr {
        self.options.addr
    }

    pub fn issuer(&self) -> String {
        self.options.issuer()
    }

    /// Sends SIGTERM, and kills Dex after the limit. Returns whether Dex ended within the limit.
    pub fn stop(&self, limit: Duration) -> bool {
        self.process.stop(Signal::TERM, limit)
    }

    /// Stops the provider and starts it again.
    pub async fn restart(self) -> Result<Self> {
        self.stop(STOP_LIMIT);
        Self::start(self.options).await
    }

    async fn wait_until_ready(&self) -> Result<()> {
        let client = ApiClient::from_address(self.addr(), self.addr().ip());
        let end = Instant::now() + START_LIMIT;
        loop {
            if let Some(status) = self.process.exit_status() {
                bail!("Dex ended with {status}:\n{}", process::tail(self.process.log_path(), 20));
            }
            let reason =
                match client.try_send(client.request(Method::GET, "dex/.well-known/openid-configuration")).await {
                    Ok(response) if response.status.is_success() => return Ok(()),
                    Ok(response) => response.text,
                    Err(error) => format!("{error:#}"),
                };
            if Instant::now() > end {
                bail!("Dex is not ready ({reason}):\n{}", process::tail(self.process.log_path(), 20));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Fills in and submits Dex's login form.
pub async fn log_in(browser: &Browser, email: &str) {
    browser.fill("#login", email).await;
    browser.fill("#password", DEX_PASSWORD).await;
    browser.click("#submit-login").await;
}

/// Grants access on Dex's consent page.
pub async fn grant(browser: &Browser) {
    browser.click("form:has(input[value=approve]) button").await;
}

/// Cancels the login on Dex's consent page. Dex shows an error page and does not redirect back.
pub async fn cancel(browser: &Browser) {
    browser.click("form:has(input[value=rejected]) button").await;
}

/// Logs in without a browser, at a provider without a consent page. Starts at this authorization URL and returns the
/// URL to which the provider redirects after the login. `http` must not follow redirects.
pub async fn callback_url(http: &reqwest::Client, authorization: &str, email: &str) -> Result<Url> {
    // Follows redirects up to the login page. The login form is sent to the URL of this page.
    let mut page: Url = authorization.parse()?;
    let mut redirects = 0;
    while let Some(location) = http.get(page.clone()).send().await?.error_for_status()?.headers().get("location") {
        redirects += 1;
        ensure!(redirects <= 5, "Dex redirects too often: {location:?}");
        page = page.join(location.to_str()?)?;
    }
    let body: String = form_urlencoded::Serializer::new(String::new())
        .extend_pairs([("login", email), ("password", DEX_PASSWORD)])
        .finish();
    let form = http.post(page).header("content-type", "application/x-www-form-urlencoded").body(body);
    let response = form.send().await?;
    let location = response.headers().get("location").with_context(|| format!("Dex returned {}", response.status()))?;
    Ok(location.to_str()?.parse()?)
}
