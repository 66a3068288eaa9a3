//! A real browser: headless Chromium, driven over WebDriver (W3C) by ChromeDriver.

use std::{
    collections::BTreeMap,
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

/// Time limit for Chromium to start, and for a WebDriver session to start. Each takes a few seconds, longer on a loaded
/// machine.
const START_LIMIT: Duration = Duration::from_secs(120);
/// Time limit for a page to reach an expected state.
const PAGE_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for one response of ChromeDriver, which waits until a page is loaded.
const RESPONSE_LIMIT: Duration = Duration::from_secs(120);
/// The JSON key under which WebDriver returns the id of an element (W3C WebDriver: web element identifier).
const ELEMENT_ID_KEY: &str = "element-6066-11e4-a52e-4f735466cecf";

/// A page that is narrower than this, in CSS pixels, is shown as on a phone.
const PHONE_WIDTH: u32 = 600;

/// Flags of Chromium, in addition to those for its profile and its debugger.
const FLAGS: [&str; 14] = [
    "--headless",
    // In a container Chromium runs as root, and as root its sandbox does not work. The browser needs no sandbox,
    // because it opens only pages of this machine.
    "--no-sandbox",
    "--disable-gpu",
    // /dev/shm is small in containers.
    "--disable-dev-shm-usage",
    // No telemetry, and no connections to other machines.
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
    // Do not use the desktop's keyring.
    "--password-store=basic",
    "--lang=en-US",
];

/// A running browser with its own profile, and so its own cookies. It ends when this value is dropped.
pub struct Browser {
    http: reqwest::Client,
    /// Base URL of the commands of the WebDriver session.
    session_url: String,
    driver: Process,
    chromium: Process,
    dir: PathBuf,
}

/// A tab of a browser.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tab(String);

/// A cookie as WebDriver reports it.
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
        Self::start_with(&[], &[]).await
    }

    /// Starts a browser that accepts every certificate, because no browser trusts the CA of a test.
    pub async fn start_accepting_all_certificates() -> Result<Self> {
        Self::start_with(&["--ignore-certificate-errors"], &[]).await
    }

    /// Starts a browser in which no page can run scripts.
    pub async fn start_without_scripts() -> Result<Self> {
        Self::start_with(&[], &["javascript"]).await
    }

    /// Starts a browser that stores no cookies.
    pub async fn start_without_cookies() -> Result<Self> {
        Self::start_with(&[], &["cookies"]).await
    }

    /// Starts a browser with more flags. `blocked` are the names of content settings that are denied to all sites.
    async fn start_with(flags: &[&str], blocked: &[&str]) -> Result<Self> {
        let missing = "is not installed: run `make tools`, or install Debian's package";
        let chromium = process::find_program(["chromium", "/usr/bin/chromium", "google-chrome"])
            .with_context(|| format!("Chromium {missing} `chromium`"))?;
        let driver = process::find_program(["chromedriver", "/usr/bin/chromedriver"])
            .with_context(|| format!("ChromeDriver {missing} `chromium-driver`"))?;
        let dir = process::fresh_dir("browser");
        let profile = dir.join("profile");
        write_preferences(&profile, blocked)?;
        // Chromium is started here and not by ChromeDriver, so that it always dies with this process.
        let chromium = Program::new("chromium", chromium, dir.join("chromium.log"))
            .env("HOME", &dir.display().to_string())
            .args(FLAGS)
            .args(flags)
            .arg(format!("--user-data-dir={}", profile.display()))
            .args(["--remote-debugging-port=0", "about:blank"])
            .start()?;
        let debugger = debugger_address(&chromium, &profile).await?;
        let addr = process::free_addr();
        let driver = Program::new("chromedriver", driver, dir.join("chromedriver.log"))
            .env("HOME", &dir.display().to_string())
            .arg(format!("--port={}", addr.port()))
            .start()?;
        let http = reqwest::Client::builder().timeout(RESPONSE_LIMIT).no_proxy().build()?;
        let mut this = Self { http, session_url: format!("http://{addr}/session"), driver, chromium, dir };
        let options = json!({ "debuggerAddress": debugger });
        let capabilities = json!({ "capabilities": { "alwaysMatch": { "goog:chromeOptions": options } } });
        let end = Instant::now() + START_LIMIT;
        let session = loop {
            match this.command(Method::POST, "", Some(&capabilities)).await {
                Ok(session) => break session,
                Err(error) if Instant::now() > end => return Err(error.context("ChromeDriver creates no session")),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        let id = session["sessionId"].as_str().context("a session has an id")?;
        this.session_url = format!("{}/{id}", this.session_url);
        Ok(this)
    }

    /// Opens a URL, as if a user typed it, and waits until the page is loaded.
    pub async fn open(&self, url: &str) {
        let opened = self.command(Method::POST, "/url", Some(&json!({ "url": url }))).await;
        opened.unwrap_or_else(|error| panic!("{url} does not open: {error:#}"));
    }

    /// The URL in the address bar.
    pub async fn url(&self) -> Url {
        self.try_url().await.expect("the browser has an address")
    }

    /// Waits until `is_expected` returns true for the URL. Returns this URL.
    pub async fn wait_for_url(&self, what: &str, is_expected: impl Fn(&Url) -> bool) -> Url {
        self.retry(what, async || {
            let url = self.try_url().await?;
            if is_expected(&url) { Ok(url) } else { bail!("it is at {url}") }
        })
        .await
    }

    /// The visible text of the page.
    pub async fn text(&self) -> String {
        self.text_of("body").await
    }

    /// The visible text of the first element that matches a CSS selector. Waits until there is such an element.
    pub async fn text_of(&self, css: &str) -> String {
        self.retry(&format!("the text of {css}"), async || self.element_command(css, Method::GET, "/text", None).await)
            .await
            .as_str()
            .map(str::to_owned)
            .expect("a text is text")
    }

    /// The title of the page.
    pub async fn title(&self) -> String {
        let title = self.command(Method::GET, "/title", None).await.expect("the browser has a page");
        title.as_str().map(str::to_owned).expect("a title is text")
    }

    /// Waits until the page contains this text. Returns all text of the page.
    pub async fn wait_for_text(&self, wanted: &str) -> String {
        self.retry(&format!("the text {wanted:?}"), async || {
            let text = self.element_command("body", Method::GET, "/text", None).await?;
            match text.as_str() {
                Some(text) if text.contains(wanted) => Ok(text.to_owned()),
                _ => bail!("it shows {text}"),
            }
        })
        .await
    }

    /// Replaces the text of the first field that matches a CSS selector. Waits until there is such a field.
    pub async fn fill(&self, css: &str, text: &str) {
        self.retry(&format!("the field {css}"), async || {
            self.element_command(css, Method::POST, "/clear", Some(json!({}))).await?;
            self.element_command(css, Method::POST, "/value", Some(json!({ "text": text }))).await
        })
        .await;
    }

    /// Clicks the first element that matches a CSS selector. Waits until there is such an element.
    pub async fn click(&self, css: &str) {
        self.retry(&format!("the click on {css}"), async || {
            self.element_command(css, Method::POST, "/click", Some(json!({}))).await
        })
        .await;
    }

    /// Goes back one page, like the back button.
    pub async fn back(&self) {
        self.command(Method::POST, "/back", Some(&json!({}))).await.expect("the browser goes back");
    }

    /// The number of elements that match a CSS selector.
    pub async fn count(&self, css: &str) -> usize {
        let locator = json!({ "using": "css selector", "value": css });
        let found = self.command(Method::POST, "/elements", Some(&locator)).await.expect("the browser has a page");
        found.as_array().expect("elements are a list").len()
    }

    /// The number of elements that match a CSS selector in the first frame of the page; 0 if the browser refuses to
    /// show the frame.
    pub async fn count_in_frame(&self, css: &str) -> usize {
        let locator = json!({ "using": "css selector", "value": css });
        let found = async {
            self.command(Method::POST, "/frame", Some(&json!({ "id": 0 }))).await?;
            self.command(Method::POST, "/elements", Some(&locator)).await
        };
        let count = found.await.map_or(0, |found| found.as_array().map_or(0, Vec::len));
        self.command(Method::POST, "/frame", Some(&json!({ "id": null }))).await.expect("the page exists");
        count
    }

    /// An attribute of the first element that matches a CSS selector. `None` if there is no such element, or if it does
    /// not have the attribute.
    pub async fn attribute(&self, css: &str, name: &str) -> Option<String> {
        let value = self.element_command(css, Method::GET, &format!("/attribute/{name}"), None).await.ok()?;
        value.as_str().map(str::to_owned)
    }

    /// The accessible name, which screen readers use, of the first element that matches a CSS selector. `None` if there
    /// is no such element.
    pub async fn accessible_name(&self, css: &str) -> Option<String> {
        let name = self.element_command(css, Method::GET, "/computedlabel", None).await.ok()?;
        name.as_str().map(str::to_owned)
    }

    /// Runs a script in the page, as the body of a function, and returns the function's result. This also works in a
    /// browser that blocks the scripts of pages.
    pub async fn run_script(&self, script: &str) -> Value {
        let body = json!({ "script": script, "args": [] });
        self.command(Method::POST, "/execute/sync", Some(&body)).await.expect("the script runs")
    }

    /// Like [`Browser::run_script`], but the last argument of the script is a function. Returns the value with which
    /// the script calls this function.
    pub async fn run_async_script(&self, script: &str) -> Value {
        let body = json!({ "script": script, "args": [] });
        self.command(Method::POST, "/execute/async", Some(&body)).await.expect("the script calls back")
    }

    /// Sends a command of the Chrome DevTools protocol to the tab.
    pub async fn devtools(&self, command: &str, parameters: Value) -> Value {
        let body = json!({ "cmd": command, "params": parameters });
        let result = self.command(Method::POST, "/goog/cdp/execute", Some(&body)).await;
        result.unwrap_or_else(|error| panic!("{command}: {error:#}"))
    }

    /// Sets the width of the page in CSS pixels. A width below 600 shows the page as on a phone. `None`: the page gets
    /// the width of the window.
    pub async fn set_width(&self, width: Option<u32>) {
        match width {
            None => self.devtools("Emulation.clearDeviceMetricsOverride", json!({})).await,
            Some(width) => {
                let metrics =
                    json!({ "width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < PHONE_WIDTH });
                self.devtools("Emulation.setDeviceMetricsOverride", metrics).await
            }
        };
    }

    /// Sets the color scheme that the user prefers.
    pub async fn set_dark(&self, is_dark: bool) {
        let scheme = if is_dark { "dark" } else { "light" };
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.devtools("Emulation.setEmulatedMedia", json!({ "features": features })).await;
    }

    /// Writes a PNG of the whole page, including the part outside of the window.
    pub async fn full_screenshot(&self, path: &Path) -> Result<()> {
        let size = &self.devtools("Page.getLayoutMetrics", json!({})).await["cssContentSize"];
        let clip = json!({ "x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1 });
        let parameters = json!({ "format": "png", "captureBeyondViewport": true, "clip": clip });
        let picture = self.devtools("Page.captureScreenshot", parameters).await;
        let picture = BASE64_STANDARD.decode(picture["data"].as_str().context("a picture is text")?)?;
        Ok(fs::write(path, picture)?)
    }

    /// The cookies that are sent to the page's URL, including those that scripts cannot read.
    pub async fn cookies(&self) -> Vec<Cookie> {
        let cookies = self.command(Method::GET, "/cookie", None).await.expect("the browser returns its cookies");
        serde_json::from_value(cookies).expect("cookies as WebDriver defines them")
    }

    /// The tab that receives the commands.
    pub async fn tab(&self) -> Tab {
        let handle = self.command(Method::GET, "/window", None).await.expect("the browser has a tab");
        Tab(handle.as_str().expect("a tab has a name").to_owned())
    }

    /// Opens a tab, which receives the commands from now on.
    pub async fn new_tab(&self) -> Tab {
        let opened = self.command(Method::POST, "/window/new", Some(&json!({ "type": "tab" }))).await;
        let opened = opened.expect("the browser opens a tab");
        let tab = Tab(opened["handle"].as_str().expect("a tab has a name").to_owned());
        self.switch_to(&tab).await;
        tab
    }

    /// Switches to a tab, which receives the commands from now on.
    pub async fn switch_to(&self, tab: &Tab) {
        let switched = self.command(Method::POST, "/window", Some(&json!({ "handle": tab.0 }))).await;
        switched.expect("the tab exists");
    }

    /// Writes a PNG screenshot, for debugging.
    pub async fn screenshot(&self, path: &Path) -> Result<()> {
        let picture = self.command(Method::GET, "/screenshot", None).await?;
        let picture = BASE64_STANDARD.decode(picture.as_str().context("a picture is text")?)?;
        Ok(fs::write(path, picture)?)
    }

    async fn try_url(&self) -> Result<Url> {
        let url = self.command(Method::GET, "/url", None).await?;
        Ok(url.as_str().context("an address is text")?.parse()?)
    }

    /// Sends a command to the first element that matches a CSS selector.
    async fn element_command(&self, css: &str, method: Method, path: &str, body: Option<Value>) -> Result<Value> {
        let locator = json!({ "using": "css selector", "value": css });
        let element = self.command(Method::POST, "/element", Some(&locator)).await?;
        let id = element[ELEMENT_ID_KEY].as_str().context("an element has an id")?;
        self.command(method, &format!("/element/{id}{path}"), body.as_ref()).await
    }

    /// Calls `attempt` until it succeeds, because a page can still be loading or replacing its elements.
    async fn retry<T>(&self, what: &str, attempt: impl AsyncFn() -> Result<T>) -> T {
        eventually_ok(what, PAGE_LIMIT, || async {
            let exit_status = self.chromium.exit_status();
            let with_exit_status = |error: anyhow::Error| match exit_status {
                Some(status) => error.context(format!("Chromium ended with {status}")),
                None => error,
            };
            attempt().await.map_err(with_exit_status)
        })
        .await
    }

    async fn command(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        let mut request = self.http.request(method, format!("{}{path}", self.session_url));
        if let Some(body) = body {
            request = request.json(body);
        }
        let mut response: Value = request.send().await?.json().await?;
        let value = response["value"].take();
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
        eprintln!("--- the end of its log:\n{}", process::tail(self.chromium.log_path(), 10));
    }
}

/// Writes the preferences of a new profile, which deny these content settings to all sites.
fn write_preferences(profile: &Path, blocked: &[&str]) -> Result<()> {
    if blocked.is_empty() {
        return Ok(());
    }
    // 2 is `CONTENT_SETTING_BLOCK` of Chromium.
    let settings: BTreeMap<&str, u8> = blocked.iter().map(|setting| (*setting, 2)).collect();
    let preferences = json!({ "profile": { "default_content_setting_values": settings } });
    fs::create_dir_all(profile.join("Default"))?;
    Ok(fs::write(profile.join("Default/Preferences"), preferences.to_string())?)
}

/// The socket address of Chromium's debugger. Chromium chooses the port and writes it into its profile.
async fn debugger_address(chromium: &Process, profile: &Path) -> Result<String> {
    let end = Instant::now() + START_LIMIT;
    loop {
        let content = fs::read_to_string(profile.join("DevToolsActivePort")).unwrap_or_default();
        // The first line is the port. The line is complete when a newline follows.
        if let Some((port, _)) = content.split_once('\n') {
            return Ok(format!("127.0.0.1:{port}"));
        }
        if let Some(status) = chromium.exit_status() {
            bail!("Chromium ended with {status}:\n{}", process::tail(chromium.log_path(), 20));
        }
        if Instant::now() > end {
            bail!("Chromium is not ready:\n{}", process::tail(chromium.log_path(), 20));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
