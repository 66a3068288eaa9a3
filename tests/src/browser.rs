//! A real browser: Debian's Chromium without a window, driven over WebDriver (W3C) by its ChromeDriver.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use http::Method;
use serde::Deserialize;
use serde_json::{Value, json};
use url::Url;

use crate::{
    eventually_ok,
    process::{self, Process, Program},
};

/// Chromium starts within a few seconds; a loaded machine takes longer.
const START_LIMIT: Duration = Duration::from_secs(120);
/// For a page to become what is waited for.
const LIMIT: Duration = Duration::from_secs(60);
/// For one answer of ChromeDriver, which waits for a page that loads.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// The name by which WebDriver refers to an element (W3C WebDriver, 12.1).
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// What Chromium is started with beside its profile.
const FLAGS: [&str; 14] = [
    "--headless",
    // It is root in a container, where its sandbox cannot be; the pages are our own.
    "--no-sandbox",
    "--disable-gpu",
    // Small in containers.
    "--disable-dev-shm-usage",
    // It says nothing to its maker, and nothing leaves this machine.
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
    // No key ring of the desktop.
    "--password-store=basic",
    "--lang=en-US",
];

/// A running browser with a profile of its own: its cookies are nobody else's. It ends when this value is dropped.
pub struct Browser {
    http: reqwest::Client,
    /// Where this session's commands go.
    session: String,
    driver: Process,
    chromium: Process,
    dir: PathBuf,
}

/// A tab of a browser.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tab(String);

/// A cookie as the browser keeps it.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cookie {
    pub name: String,
    pub value: String,
    pub domain: String,
    pub path: String,
    pub secure: bool,
    pub http_only: bool,
    pub same_site: Option<String>,
}

// === impl Browser ===

impl Browser {
    pub async fn start() -> Result<Self> {
        Self::start_with(&[]).await
    }

    /// One that believes every certificate: nobody's root vouches for those of tests.
    pub async fn start_believing_certificates() -> Result<Self> {
        Self::start_with(&["--ignore-certificate-errors"]).await
    }

    async fn start_with(flags: &[&str]) -> Result<Self> {
        let missing = "is not installed: run `make tools`, or install Debian's package";
        let chromium = process::find_program(["chromium", "/usr/bin/chromium", "google-chrome"])
            .with_context(|| format!("Chromium {missing} `chromium`"))?;
        let driver = process::find_program(["chromedriver", "/usr/bin/chromedriver"])
            .with_context(|| format!("ChromeDriver {missing} `chromium-driver`"))?;
        let dir = process::fresh_dir("browser");
        let profile = dir.join("profile");
        // ChromeDriver is only lent it: then it dies with this process, however that ends.
        let chromium = Program::new("chromium", chromium, dir.join("chromium.log"))
            .env("HOME", &dir.display().to_string())
            .args(FLAGS)
            .args(flags)
            .arg(format!("--user-data-dir={}", profile.display()))
            .args(["--remote-debugging-port=0", "about:blank"])
            .start()?;
        let debugger = debugger(&chromium, &profile).await?;
        let addr = process::free_addr();
        let driver = Program::new("chromedriver", driver, dir.join("chromedriver.log"))
            .env("HOME", &dir.display().to_string())
            .arg(format!("--port={}", addr.port()))
            .start()?;
        let http = reqwest::Client::builder().timeout(ANSWER_LIMIT).no_proxy().build()?;
        let mut this = Self { http, session: format!("http://{addr}/session"), driver, chromium, dir };
        let options = json!({ "debuggerAddress": debugger });
        let wanted = json!({ "capabilities": { "alwaysMatch": { "goog:chromeOptions": options } } });
        let end = Instant::now() + START_LIMIT;
        let session = loop {
            match this.command(Method::POST, "", Some(&wanted)).await {
                Ok(session) => break session,
                Err(error) if Instant::now() > end => return Err(error.context("ChromeDriver gives no session")),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        let id = session["sessionId"].as_str().context("a session has an id")?;
        this.session = format!("{}/{id}", this.session);
        Ok(this)
    }

    /// Goes to an address as if it was typed, and waits until what it leads to is loaded.
    pub async fn open(&self, url: &str) {
        let opened = self.command(Method::POST, "/url", Some(&json!({ "url": url }))).await;
        opened.unwrap_or_else(|error| panic!("{url} does not open: {error:#}"));
    }

    /// What the address bar shows.
    pub async fn url(&self) -> Url {
        self.try_url().await.expect("the browser has an address")
    }

    /// Waits until the address is such a one.
    pub async fn until_url(&self, what: &str, is_it: impl Fn(&Url) -> bool) -> Url {
        self.patiently(what, async || {
            let url = self.try_url().await?;
            if is_it(&url) { Ok(url) } else { bail!("it is at {url}") }
        })
        .await
    }

    /// The text that a person sees on the page.
    pub async fn text(&self) -> String {
        self.text_of("body").await
    }

    /// The text that a person sees of the first element that a CSS selector names, once it is there.
    pub async fn text_of(&self, css: &str) -> String {
        self.patiently(&format!("the text of {css}"), async || self.element(css, Method::GET, "/text", None).await)
            .await
            .as_str()
            .map(str::to_owned)
            .expect("a text is text")
    }

    /// What the tab is called.
    pub async fn title(&self) -> String {
        let title = self.command(Method::GET, "/title", None).await.expect("the browser has a page");
        title.as_str().map(str::to_owned).expect("a title is text")
    }

    /// Waits until the page shows this.
    pub async fn until_text(&self, wanted: &str) -> String {
        self.patiently(&format!("the text {wanted:?}"), async || {
            let text = self.element("body", Method::GET, "/text", None).await?;
            match text.as_str() {
                Some(text) if text.contains(wanted) => Ok(text.to_owned()),
                _ => bail!("it shows {text}"),
            }
        })
        .await
    }

    /// Types into the first field that a CSS selector names, once it is there, in place of what it had.
    pub async fn fill(&self, css: &str, text: &str) {
        self.patiently(&format!("the field {css}"), async || {
            self.element(css, Method::POST, "/clear", Some(json!({}))).await?;
            self.element(css, Method::POST, "/value", Some(json!({ "text": text }))).await
        })
        .await;
    }

    /// Clicks the first element that a CSS selector names, once it is there.
    pub async fn click(&self, css: &str) {
        self.patiently(&format!("the click on {css}"), async || {
            self.element(css, Method::POST, "/click", Some(json!({}))).await
        })
        .await;
    }

    /// Back, as by the button.
    pub async fn back(&self) {
        self.command(Method::POST, "/back", Some(&json!({}))).await.expect("the browser goes back");
    }

    /// The cookies that the page's address would get, those that scripts cannot see too.
    pub async fn cookies(&self) -> Vec<Cookie> {
        let cookies = self.command(Method::GET, "/cookie", None).await.expect("the browser tells its cookies");
        serde_json::from_value(cookies).expect("cookies as WebDriver tells them")
    }

    /// The tab that commands go to.
    pub async fn tab(&self) -> Tab {
        let handle = self.command(Method::GET, "/window", None).await.expect("the browser has a tab");
        Tab(handle.as_str().expect("a tab has a name").to_owned())
    }

    /// Opens one more tab, to which commands go from now on.
    pub async fn new_tab(&self) -> Tab {
        let opened = self.command(Method::POST, "/window/new", Some(&json!({ "type": "tab" }))).await;
        let opened = opened.expect("the browser opens a tab");
        let tab = Tab(opened["handle"].as_str().expect("a tab has a name").to_owned());
        self.switch_to(&tab).await;
        tab
    }

    /// Lets commands go to that tab.
    pub async fn switch_to(&self, tab: &Tab) {
        let switched = self.command(Method::POST, "/window", Some(&json!({ "handle": tab.0 }))).await;
        switched.expect("the tab is still there");
    }

    /// A picture of what is seen, as PNG: for a person who looks for a fault.
    pub async fn screenshot(&self, path: &Path) -> Result<()> {
        let picture = self.command(Method::GET, "/screenshot", None).await?;
        let picture = BASE64_STANDARD.decode(picture.as_str().context("a picture is text")?)?;
        Ok(fs::write(path, picture)?)
    }

    async fn try_url(&self) -> Result<Url> {
        let url = self.command(Method::GET, "/url", None).await?;
        Ok(url.as_str().context("an address is text")?.parse()?)
    }

    /// One command to the first element that a CSS selector names.
    async fn element(&self, css: &str, method: Method, path: &str, body: Option<Value>) -> Result<Value> {
        let wanted = json!({ "using": "css selector", "value": css });
        let element = self.command(Method::POST, "/element", Some(&wanted)).await?;
        let id = element[ELEMENT].as_str().context("an element has an id")?;
        self.command(method, &format!("/element/{id}{path}"), body.as_ref()).await
    }

    /// Tries until it succeeds: pages load, and elements are replaced.
    async fn patiently<T>(&self, what: &str, attempt: impl AsyncFn() -> Result<T>) -> T {
        eventually_ok(what, LIMIT, || async {
            let end = self.chromium.ended();
            let failed = |error: anyhow::Error| match end {
                Some(status) => error.context(format!("Chromium ended with {status}")),
                None => error,
            };
            attempt().await.map_err(failed)
        })
        .await
    }

    async fn command(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        let mut request = self.http.request(method, format!("{}{path}", self.session));
        if let Some(body) = body {
            request = request.json(body);
        }
        let mut answer: Value = request.send().await?.json().await?;
        let value = answer["value"].take();
        match value["error"].as_str() {
            None => Ok(value),
            Some(error) => bail!("{error}: {}", value["message"].as_str().unwrap_or_default()),
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.driver.kill();
        self.chromium.kill();
        if !std::thread::panicking() {
            drop(fs::remove_dir_all(&self.dir));
            return;
        }
        eprintln!("--- the browser of this test: {}", self.dir.display());
        eprintln!("--- the end of its log:\n{}", process::tail(self.chromium.log(), 10));
    }
}

/// Where Chromium listens for who drives it: a port of its own choice, which it writes into its profile.
async fn debugger(chromium: &Process, profile: &Path) -> Result<String> {
    let end = Instant::now() + START_LIMIT;
    loop {
        let told = fs::read_to_string(profile.join("DevToolsActivePort")).unwrap_or_default();
        // The second line is written with the first.
        if let Some((port, _)) = told.split_once('\n') {
            return Ok(format!("127.0.0.1:{port}"));
        }
        if let Some(status) = chromium.ended() {
            bail!("Chromium ended with {status}:\n{}", process::tail(chromium.log(), 20));
        }
        if Instant::now() > end {
            bail!("Chromium is not ready:\n{}", process::tail(chromium.log(), 20));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
