//! The programs as web applications: how each is started, and how it shows who is signed in.

use std::{
    fs::{self, Permissions},
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};
use tokio::net::TcpStream;
use url::Url;

use crate::{
    builders::Client,
    openid::{GROUP, OpenIdProvider, SCOPES, run_command, upstream::Upstream},
    page_browser::LoadedPage,
    process::{self, Process, Program},
    tools,
    web_browser::WebBrowser,
};

/// Time limit for a program to start. Spring takes seconds, longer on a loaded machine.
const START_LIMIT: Duration = Duration::from_secs(120);
/// The password of the key store for Java. It protects nothing: the store has only a CA certificate.
const STORE_PASSWORD: &str = "changeit";

/// A program that signs in users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    OpenidClient,
    Oauth4webapi,
    AuthCore,
    GoOidc,
    Authlib,
    Oauth2Proxy,
    ModAuthOpenidc,
    SpringSecurity,
}

/// The paths of a program.
struct Paths {
    /// Begins a login.
    sign_in: &'static str,
    /// The redirect URL of the Client.
    callback: &'static str,
    /// Shows who is signed in. Without a user, it begins a login or returns 401.
    home: &'static str,
    /// The path that shows the claims of *userinfo*. `None`: the program does not show them separately.
    userinfo: Option<&'static str>,
}

/// How a program shows who is signed in.
#[derive(Clone, Copy)]
enum Identity {
    /// `{"claims": {…}, "access_token": "…"}`.
    Json,
    /// The headers of a request to an application behind the program. The fields are the names of the headers with the
    /// email address, user ID, groups and access token.
    Headers { email: &'static str, subject: &'static str, groups: &'static str, access_token: &'static str },
}

/// A running program.
pub struct Application {
    pub peer: Peer,
    addr: SocketAddr,
    dir: PathBuf,
    client_id: String,
    issuer: String,
    ca: PathBuf,
    upstream: Option<Upstream>,
    process: Option<Process>,
}

/// The user who is signed in to a program, as the program shows it.
#[derive(Clone, Debug)]
pub struct SignedIn {
    pub claims: Map<String, Value>,
    pub access_token: String,
    /// `None` if the program does not show the ID token.
    pub id_token: Option<String>,
}

// === impl Peer ===

impl Peer {
    pub const ALL: [Self; 8] = [
        Self::OpenidClient,
        Self::GoOidc,
        Self::Oauth2Proxy,
        Self::Oauth4webapi,
        Self::AuthCore,
        Self::Authlib,
        Self::ModAuthOpenidc,
        Self::SpringSecurity,
    ];

    /// The name of the program, and of its folder in `tests/interop/openid`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OpenidClient => "openid-client",
            Self::Oauth4webapi => "oauth4webapi",
            Self::AuthCore => "auth-core",
            Self::GoOidc => "go-oidc",
            Self::Authlib => "authlib",
            Self::Oauth2Proxy => "oauth2-proxy",
            Self::ModAuthOpenidc => "mod-auth-openidc",
            Self::SpringSecurity => "spring-security",
        }
    }

    const fn paths(self) -> Paths {
        let own = Paths { sign_in: "/sign-in", callback: "/callback", home: "/", userinfo: Some("/userinfo") };
        match self {
            Self::OpenidClient | Self::Oauth4webapi | Self::GoOidc | Self::Authlib => own,
            Self::AuthCore => Paths { callback: "/auth/callback/latchkey", userinfo: None, ..own },
            Self::Oauth2Proxy => {
                Paths { sign_in: "/oauth2/start?rd=%2F", callback: "/oauth2/callback", home: "/", userinfo: None }
            }
            Self::ModAuthOpenidc => Paths { sign_in: "/", callback: "/callback", home: "/", userinfo: None },
            Self::SpringSecurity => Paths {
                sign_in: "/oauth2/authorization/latchkey",
                callback: "/login/oauth2/code/latchkey",
                home: "/",
                userinfo: Some("/userinfo"),
            },
        }
    }

    const fn identity(self) -> Identity {
        match self {
            Self::Oauth2Proxy => Identity::Headers {
                email: "x-forwarded-email",
                subject: "x-forwarded-user",
                groups: "x-forwarded-groups",
                access_token: "x-forwarded-access-token",
            },
            Self::ModAuthOpenidc => Identity::Headers {
                email: "oidc_claim_email",
                subject: "oidc_claim_sub",
                groups: "oidc_claim_groups",
                access_token: "oidc_access_token",
            },
            _ => Identity::Json,
        }
    }

    const fn has_upstream(self) -> bool {
        matches!(self.identity(), Identity::Headers { .. })
    }

    /// The Client for the program when it listens at `addr`.
    pub fn client(self, provider: &OpenIdProvider, addr: SocketAddr) -> Client {
        let url = |path: &str| json!(format!("http://{addr}{path}"));
        let callback = format!("http://{addr}{}", self.paths().callback);
        Client::web(self.name(), provider.app(), &callback)
            .set("/scopes", json!(SCOPES))
            .set_own("postLogoutRedirectURLs", json!([url("/signed-out"), url("/")]))
    }
}

// === impl Application ===

impl Application {
    /// A program at this address, which is not started yet.
    pub async fn new(provider: &OpenIdProvider, peer: Peer, addr: SocketAddr, client: &Client) -> Result<Self> {
        let upstream = if peer.has_upstream() { Some(Upstream::start().await?) } else { None };
        Ok(Self {
            peer,
            addr,
            dir: process::fresh_dir(peer.name()),
            client_id: client.client_id(),
            issuer: provider.issuer(),
            ca: provider.ca().to_owned(),
            upstream,
            process: None,
        })
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    /// Starts the program with a secret, or starts it again with another one. Waits until it listens.
    pub async fn start(&mut self, secret: &str) -> Result<()> {
        self.process = None;
        let process = self.program(secret)?.start()?;
        let end = Instant::now() + START_LIMIT;
        while TcpStream::connect(self.addr).await.is_err() {
            if let Some(status) = process.exit_status() {
                bail!("it ended with {status}:\n{}", process::tail(process.log_path(), 30));
            }
            ensure!(Instant::now() < end, "it does not listen:\n{}", process::tail(process.log_path(), 30));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.process = Some(process);
        Ok(())
    }

    /// Signs in a user. Returns who is signed in then.
    pub async fn sign_in(&self, browser: &mut WebBrowser, email: &str, password: &str) -> Result<SignedIn> {
        let page = browser.sign_in(&self.url(self.peer.paths().sign_in), email, password).await?;
        self.read(&page).with_context(|| format!("after the login at {}", page.address))
    }

    /// Begins a login, but enters nothing. Returns the page after all redirects.
    pub async fn begin(&self, browser: &mut WebBrowser) -> Result<LoadedPage> {
        browser.open(&self.url(self.peer.paths().sign_in)).await
    }

    /// Who is signed in.
    pub async fn signed_in(&self, browser: &mut WebBrowser) -> Result<SignedIn> {
        let page = browser.open(&self.url(self.peer.paths().home)).await?;
        self.read(&page)
    }

    /// Refreshes the tokens. Returns who is signed in then.
    pub async fn refresh(&self, browser: &mut WebBrowser, before: &SignedIn) -> Result<SignedIn> {
        match self.peer {
            // oauth2-proxy refreshes at the first request after the time in `--cookie-refresh`.
            Peer::Oauth2Proxy => loop {
                tokio::time::sleep(Duration::from_millis(500)).await;
                let now = self.signed_in(browser).await?;
                if now.access_token != before.access_token {
                    return Ok(now);
                }
                let failed =
                    self.process.as_ref().is_some_and(|process| process.has_logged("Unable to refresh session"));
                ensure!(!failed, "it cannot refresh");
            },
            Peer::ModAuthOpenidc => {
                let parameters = [("refresh", self.url("/")), ("access_token", before.access_token.clone())];
                let url = Url::parse_with_params(&self.url("/callback"), parameters)?;
                let page = browser.open(url.as_str()).await?;
                ensure!(!page.address.contains("error"), "the refresh returns to {}", page.address);
                self.read(&page)
            }
            _ => {
                let page = browser.open(&self.url("/refresh")).await?;
                self.read(&page)
            }
        }
    }

    /// The claims of *userinfo*. `None` if the program does not show them.
    pub async fn userinfo(&self, browser: &mut WebBrowser) -> Result<Option<Value>> {
        let Some(path) = self.peer.paths().userinfo else { return Ok(None) };
        let page = browser.open(&self.url(path)).await?;
        let body: Value = serde_json::from_str(&page.html).with_context(|| format!("userinfo: {}", page.html))?;
        Ok(Some(body["claims"].clone()))
    }

    /// Logs out at the program and at the provider.
    pub async fn sign_out(&self, browser: &mut WebBrowser) -> Result<()> {
        let url = match self.peer {
            Peer::Oauth2Proxy => {
                // oauth2-proxy cannot send an `id_token_hint`, so the provider asks the user before the logout.
                let target = self.url("/signed-out");
                let logout = [("client_id", &self.client_id), ("post_logout_redirect_uri", &target)];
                let logout = Url::parse_with_params(&format!("{}/logout", self.issuer), logout)?;
                Url::parse_with_params(&self.url("/oauth2/sign_out"), [("rd", logout.as_str())])?.into()
            }
            Peer::ModAuthOpenidc => {
                Url::parse_with_params(&self.url("/callback"), [("logout", self.url("/signed-out"))])?.into()
            }
            _ => self.url("/sign-out"),
        };
        let mut page = browser.open(&url).await?;
        if let Some(question) = page.forms().into_iter().find(|form| form.action.ends_with("/logout")) {
            ensure!(self.peer == Peer::Oauth2Proxy, "the provider asks although it got an id_token_hint");
            page = browser.submit(&page, &question, &[]).await?;
        }
        ensure!(page.address.starts_with(&self.url("/signed-out")), "the logout ends at {}", page.address);
        Ok(())
    }

    fn read(&self, page: &LoadedPage) -> Result<SignedIn> {
        ensure!(page.status.is_success(), "{} at {}: {}", page.status, page.address, page.text());
        let body: Value =
            serde_json::from_str(&page.html).with_context(|| format!("{} shows {}", page.address, page.text()))?;
        match self.peer.identity() {
            Identity::Json => Ok(SignedIn {
                claims: body["claims"].as_object().context("claims")?.clone(),
                access_token: body["access_token"].as_str().context("an access token")?.to_owned(),
                id_token: body["id_token"].as_str().map(str::to_owned),
            }),
            Identity::Headers { email, subject, groups, access_token } => {
                let headers = &body["headers"];
                let header = |name: &str| headers[name].as_str().with_context(|| format!("no {name} in {headers}"));
                let groups: Vec<&str> = header(groups)?.split(',').filter(|group| !group.is_empty()).collect();
                let claims = json!({ "email": header(email)?, "sub": header(subject)?, "groups": groups });
                let Value::Object(claims) = claims else { unreachable!("an object is written above") };
                Ok(SignedIn { claims, access_token: header(access_token)?.to_owned(), id_token: None })
            }
        }
    }

    // --- Starting the programs

    fn program(&self, secret: &str) -> Result<Program> {
        let source = process::root().join("tests/interop/openid").join(self.peer.name());
        let log = self.dir.join("program.log");
        let program = match self.peer {
            Peer::OpenidClient | Peer::Oauth4webapi | Peer::AuthCore => {
                let node = process::find_program(["node", "/usr/bin/node"]).context("Node is not installed")?;
                ensure!(source.join("node_modules").is_dir(), "run tests/interop/openid/build {}", self.peer.name());
                Program::new(self.peer.name(), node, log)
                    .arg(source.join("main.js").display().to_string())
                    .env("NODE_EXTRA_CA_CERTS", &self.ca.display().to_string())
            }
            Peer::GoOidc => Program::new(self.peer.name(), interop_program("go-oidc")?, log),
            Peer::Authlib => Program::new(self.peer.name(), interop_program("authlib/bin/python")?, log)
                .arg(source.join("main.py").display().to_string())
                .env("REQUESTS_CA_BUNDLE", &self.ca.display().to_string()),
            Peer::Oauth2Proxy => self.oauth2_proxy(secret, log)?,
            Peer::ModAuthOpenidc => self.apache(&source, log)?,
            Peer::SpringSecurity => self.spring(log)?,
        };
        Ok(program
            .env("LISTEN_HOST", &self.addr.ip().to_string())
            .env("LISTEN_PORT", &self.addr.port().to_string())
            .env("BASE_URL", &self.url(""))
            .env("ISSUER", &self.issuer)
            .env("CLIENT_ID", &self.client_id)
            .env("CLIENT_SECRET", secret)
            .env("SCOPES", &SCOPES.join(" "))
            .env("SSL_CERT_FILE", &self.ca.display().to_string()))
    }

    fn oauth2_proxy(&self, secret: &str, log: PathBuf) -> Result<Program> {
        let upstream = self.upstream.as_ref().context("an application behind the proxy")?;
        let issuer: Url = self.issuer.parse()?;
        let provider = format!("{}:{}", issuer.host_str().context("a host")?, issuer.port().context("a port")?);
        // Only members of the group reach the application. Cookies are without `Secure`, because oauth2-proxy listens
        // without TLS.
        Ok(Program::new("oauth2-proxy", tools::oauth2_proxy()?, log)
            .args(["--provider", "oidc", "--oidc-issuer-url", &self.issuer])
            .path_arg("--provider-ca-file", &self.ca)
            .args(["--client-id", &self.client_id, "--redirect-url", &self.url("/oauth2/callback")])
            .args(["--http-address", &self.addr.to_string(), "--upstream", &upstream.url()])
            .args(["--scope", &SCOPES.join(" "), "--code-challenge-method", "S256"])
            .args(["--email-domain", "*", "--allowed-group", GROUP])
            .args(["--pass-access-token=true", "--insecure-oidc-skip-nonce=false", "--skip-provider-button=true"])
            .args(["--cookie-secure=false", "--cookie-secret", "0123456789abcdef0123456789abcdef"])
            .args(["--cookie-refresh", "1s", "--whitelist-domain", &provider])
            .args(["--skip-auth-route", "^/signed-out$"])
            .env("OAUTH2_PROXY_CLIENT_SECRET", secret))
    }

    /// Apache runs as one process with the files in `dir`.
    fn apache(&self, source: &Path, log: PathBuf) -> Result<Program> {
        let program = process::find_program(["/usr/sbin/apache2", "apache2"])
            .context("Apache is not installed: run tests/interop/openid/build mod-auth-openidc")?;
        let upstream = self.upstream.as_ref().context("an application behind the proxy")?;
        // Apache runs as another user, who must be able to write the sessions.
        let sessions = self.dir.join("sessions");
        fs::create_dir_all(&sessions)?;
        fs::set_permissions(&sessions, Permissions::from_mode(0o777))?;
        Ok(Program::new("apache2", program, log)
            .path_arg("-f", &source.join("apache.conf"))
            .args(["-X", "-e", "warn"])
            .env("DIR", &self.dir.display().to_string())
            .env("LISTEN", &self.addr.to_string())
            .env("UPSTREAM", &upstream.url())
            .env("CA", &self.ca.display().to_string()))
    }

    /// Writes the CA into a key store first, because Java reads certificates only from a key store.
    fn spring(&self, log: PathBuf) -> Result<Program> {
        let java = process::find_program(["java", "/usr/bin/java"]).context("Java is not installed")?;
        let store = self.dir.join("ca.p12");
        if !store.exists() {
            let keytool = process::find_program(["keytool", "/usr/bin/keytool"]).context("keytool is not installed")?;
            let (file, store) = (self.ca.display().to_string(), store.display().to_string());
            run_command(
                Command::new(keytool).args(["-importcert", "-noprompt", "-alias", "ca", "-file", &file]).args([
                    "-keystore",
                    &store,
                    "-storetype",
                    "PKCS12",
                    "-storepass",
                    STORE_PASSWORD,
                ]),
            )?;
        }
        Ok(Program::new("java", java, log)
            .arg(format!("-Djavax.net.ssl.trustStore={}", store.display()))
            .arg(format!("-Djavax.net.ssl.trustStorePassword={STORE_PASSWORD}"))
            .args(["-XX:TieredStopAtLevel=1", "-Xmx256m"])
            .path_arg("-jar", &interop_program("spring-security.jar")?))
    }
}

/// The path of a program that `tests/interop/openid/build` has built.
fn interop_program(name: &str) -> Result<PathBuf> {
    let target = std::env::var_os("CARGO_TARGET_DIR").filter(|folder| !folder.is_empty());
    let target = target.map_or_else(|| process::root().join("target"), |folder| process::root().join(folder));
    let path = target.join("interop/openid").join(name);
    ensure!(fs::exists(&path)?, "{} is not built: run tests/interop/openid/build", path.display());
    Ok(path)
}
