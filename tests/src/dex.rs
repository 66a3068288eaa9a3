//! A real OpenID provider, Dex, in a process of our own: people log in on its pages by password.

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
    client::Anonymous,
    postgres::write_private,
    process::{self, Process, Program},
    tls::{Front, Tls},
    tools,
};

/// The password of everybody.
pub const PASSWORD: &str = "open-sesame";
/// Of that password, by bcrypt with the least cost that Dex takes.
const PASSWORD_HASH: &str = "$2b$10$EoHY6U86IlFkazC440nOW.o4sgH5Mg/45Pl4siaFa7Bnxt8gk/LX2";
/// It makes an RSA key first.
const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// How to run one.
#[derive(Clone, Debug)]
pub struct Options {
    pub data: PathBuf,
    pub log: PathBuf,
    pub addr: SocketAddr,
    /// What people call, where something stands in front.
    pub base_url: Option<String>,
    pub people: Vec<Person>,
    pub clients: Vec<Client>,
    /// Whether it asks, after the password, if the client may know who this is: a page to grant it or to cancel.
    pub asks: bool,
}

/// Somebody who can log in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Person {
    pub email: String,
    pub name: String,
    /// What Dex says of the address.
    pub verified: bool,
}

/// Who may send people here.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Client {
    pub id: String,
    pub secret: String,
    /// Where they may be sent back to, byte for byte.
    pub callbacks: Vec<String>,
}

/// A running provider. What it knows is in its memory: after a start it has other keys and has forgotten who is on the way.
pub struct Dex {
    process: Process,
    options: Options,
}

/// The issuer of the one at that address.
pub fn issuer(addr: SocketAddr) -> String {
    format!("http://{addr}/dex")
}

// === impl Options ===

impl Options {
    /// On a free port, with nobody yet.
    pub fn for_tests() -> Self {
        let dir = process::fresh_dir("dex");
        Self {
            log: dir.join("dex.log"),
            data: dir,
            addr: process::free_addr(),
            base_url: None,
            people: Vec::new(),
            clients: Vec::new(),
            asks: false,
        }
    }

    pub fn issuer(&self) -> String {
        self.base_url.as_ref().map_or_else(|| issuer(self.addr), |base| format!("{base}/dex"))
    }

    /// TLS in front of it: people and servers call that, at its address.
    pub async fn behind_tls(mut self, tls: &Tls) -> Result<(Self, Front)> {
        let front = Front::start(tls, self.addr).await?;
        self.base_url = Some(front.url("127.0.0.1"));
        Ok((self, front))
    }

    pub fn person(mut self, person: Person) -> Self {
        self.people.push(person);
        self
    }

    pub fn client(mut self, client: Client) -> Self {
        self.clients.push(client);
        self
    }

    /// With a page to grant or to cancel.
    pub fn asking(mut self) -> Self {
        self.asks = true;
        self
    }

    /// Its configuration file, of which YAML is only one spelling.
    fn file(&self) -> Value {
        let people: Vec<Value> = self
            .people
            .iter()
            .map(|person| {
                json!({
                    "userID": person.email,
                    "email": person.email,
                    "username": person.name,
                    "name": person.name,
                    "emailVerified": person.verified,
                    "hash": PASSWORD_HASH,
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
        json!({
            "issuer": self.issuer(),
            "storage": { "type": "memory" },
            "web": { "http": self.addr.to_string() },
            "oauth2": { "skipApprovalScreen": !self.asks },
            "enablePasswordDB": true,
            "staticPasswords": people,
            "staticClients": clients,
        })
    }
}

// === impl Person ===

impl Person {
    /// With an address that Dex calls verified.
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
    /// The one of a Provider's manifest.
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
        let program = tools::built("dex", "github.com/dexidp/dex", "dex", "dex")?;
        fs::create_dir_all(&options.data)?;
        // It holds the secrets of the clients.
        let file = options.data.join("dex.json");
        write_private(&file, &serde_json::to_string_pretty(&options.file())?)?;
        let process =
            Program::new("dex", program, &options.log).arg("serve").arg(file.display().to_string()).start()?;
        let this = Self { process, options };
        this.ready().await?;
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

    /// Lets what runs finish, then ends. True if it ended by itself.
    pub fn stop(&self, limit: Duration) -> bool {
        self.process.stop(Signal::TERM, limit)
    }

    /// The same provider, down and up again.
    pub async fn restart(self) -> Result<Self> {
        self.stop(STOP_LIMIT);
        Self::start(self.options).await
    }

    async fn ready(&self) -> Result<()> {
        let client = Anonymous::from_address(self.addr(), self.addr().ip());
        let end = Instant::now() + START_LIMIT;
        loop {
            if let Some(status) = self.process.ended() {
                bail!("Dex ended with {status}:\n{}", process::tail(self.process.log(), 20));
            }
            let said = match client.try_send(client.request(Method::GET, "dex/.well-known/openid-configuration")).await
            {
                Ok(answer) if answer.status.is_success() => return Ok(()),
                Ok(answer) => answer.text,
                Err(error) => format!("{error:#}"),
            };
            if Instant::now() > end {
                bail!("Dex is not ready ({said}):\n{}", process::tail(self.process.log(), 20));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Types an address and the password on its page, and sends them.
pub async fn log_in(browser: &Browser, email: &str) {
    browser.fill("#login", email).await;
    browser.fill("#password", PASSWORD).await;
    browser.click("#submit-login").await;
}

/// Lets the client know who this is, on the page of one that asks.
pub async fn grant(browser: &Browser) {
    browser.click("form:has(input[value=approve]) button").await;
}

/// The other button of that page. Dex does not lead back then: it says itself what happened.
pub async fn cancel(browser: &Browser) {
    browser.click("form:has(input[value=rejected]) button").await;
}

/// Logs in without a browser, at one that does not ask: the address that a browser at this authorization address would be
/// sent back to. The client must follow nobody.
pub async fn way_back(http: &reqwest::Client, authorization: &str, email: &str) -> Result<Url> {
    // Up to the page with the form, which is sent to its own address.
    let mut form: Url = authorization.parse()?;
    let mut redirects = 0;
    while let Some(location) = http.get(form.clone()).send().await?.error_for_status()?.headers().get("location") {
        redirects += 1;
        ensure!(redirects <= 5, "Dex leads on and on: {location:?}");
        form = form.join(location.to_str()?)?;
    }
    let body: String = form_urlencoded::Serializer::new(String::new())
        .extend_pairs([("login", email), ("password", PASSWORD)])
        .finish();
    let form = http.post(form).header("content-type", "application/x-www-form-urlencoded").body(body);
    let answer = form.send().await?;
    let back = answer.headers().get("location").with_context(|| format!("Dex answered {}", answer.status()))?;
    Ok(back.to_str()?.parse()?)
}
