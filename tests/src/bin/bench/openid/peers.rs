//! The providers that are compared, each with its users.

use std::{
    future::Future,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use http::StatusCode;
use latchkey_tests::{
    builders::{App, Client},
    client::ApiClient,
    dex::{self, Dex},
    keycloak::{self, Keycloak},
    openid::jwt_header,
    page_browser::{PageBrowser, PageForm},
    passwords::PASSWORD,
    stack::Stack,
};

use super::{
    Operation, REDIRECT_URL,
    user::{Provider, ProviderUser},
};
use crate::{
    logins::client_address,
    measurements::{Bound, Throughput, join_clients},
};

/// The name of Keycloak's realm, and the client ID at Dex and Keycloak.
const NAME: &str = "bench";
/// The scopes that an exchange requests.
const SCOPE: &str = "openid profile email";
/// The scopes that are requested from Latchkey for a session that is refreshed later. Without `offline_access`, a `web`
/// Client gets no refresh token. Keycloak returns a refresh token for every session.
const REFRESH_SCOPE: &str = "openid profile email offline_access";

/// A provider with logged-in users, and its measurements.
pub(super) struct Contestant {
    pub(super) name: &'static str,
    users: Vec<ProviderUser>,
    pub(super) exchanges: Throughput,
    pub(super) refreshes: Throughput,
    /// The process of a peer. It ends when this value is dropped.
    _process: Option<Box<dyn Send>>,
}

/// A provider that is compared with Latchkey, or the reason why this provider is missing.
pub(super) enum Peer {
    Ready(Box<Contestant>),
    Missing(String),
}

/// Logs in users at Latchkey's pages, and opens a session of the client for each user.
pub(super) async fn sign_in_users(
    name: &'static str,
    stack: &Stack,
    app: &App,
    client: &Client,
    count: u32,
) -> Result<Contestant> {
    let server = stack.server().public;
    let provider = Arc::new(Provider {
        server,
        authorize: format!("/{}/authorize", app.id()),
        token: format!("/v1/{}/token", app.id()),
        client_id: client.client_id(),
        secret: stack.client_secret(client)?,
    });
    let login = format!("/{}/login", app.id());
    let mut users = Vec::new();
    for number in 0..count {
        let from = client_address(number);
        let mut browser = PageBrowser::new(ApiClient::from_address(server, from));
        let page = browser.open(&login).await;
        let email = format!("{number}@example.com");
        let page = browser.submit(&page, &login, &[("email", &email), ("password", PASSWORD)]).await;
        ensure!(page.status == StatusCode::OK && page.error().is_none(), "a login leads to {}", page.address);
        users.push(ProviderUser::new(&provider, from, &browser.cookies, SCOPE));
    }
    Contestant::new(name, users, Some(REFRESH_SCOPE), None).await
}

/// Starts Dex with its storage in memory.
pub(super) async fn start_dex(count: u32) -> Result<Contestant> {
    let secret = new_secret();
    let client = dex::Client { id: NAME.to_owned(), secret: secret.clone(), callbacks: vec![REDIRECT_URL.to_owned()] };
    let dex = Dex::start(dex::Options::for_tests().client(client).with_automatic_login()).await?;
    let provider = Arc::new(Provider {
        server: dex.addr(),
        authorize: dex::AUTOMATIC_LOGIN_PATH.to_owned(),
        token: "/dex/token".to_owned(),
        client_id: NAME.to_owned(),
        secret,
    });
    let no_cookies = std::collections::BTreeMap::new();
    let users = (0..count).map(|number| ProviderUser::new(&provider, client_address(number), &no_cookies, SCOPE));
    Contestant::new("Dex", users.collect(), None, Some(Box::new(dex))).await
}

/// Starts Keycloak in production mode, and logs in users at its pages.
pub(super) async fn start_keycloak(count: u32) -> Result<Contestant> {
    let keycloak = Keycloak::start().await?;
    let (server, secret) = (keycloak.addr(), new_secret());
    let client =
        keycloak::Client { id: NAME.to_owned(), secret: secret.clone(), redirect_url: REDIRECT_URL.to_owned() };
    let emails: Vec<String> = (0..count).map(|number| format!("{number}@example.com")).collect();
    keycloak.create_realm(NAME, &client, &emails, PASSWORD).await?;
    let provider = Arc::new(Provider {
        server,
        authorize: Keycloak::endpoint(NAME, "auth"),
        token: Keycloak::endpoint(NAME, "token"),
        client_id: NAME.to_owned(),
        secret,
    });
    let mut users = Vec::new();
    for (number, email) in (0..count).zip(&emails) {
        let from = client_address(number);
        let mut browser = PageBrowser::new(ApiClient::from_address(server, from));
        log_in_at_keycloak(&mut browser, server, &provider, email).await?;
        users.push(ProviderUser::new(&provider, from, &browser.cookies, SCOPE));
    }
    Contestant::new("Keycloak", users, Some(SCOPE), Some(Box::new(keycloak))).await
}

async fn log_in_at_keycloak(
    browser: &mut PageBrowser,
    server: SocketAddr,
    provider: &Provider,
    email: &str,
) -> Result<()> {
    let page = browser.open(&provider.authorization_path(SCOPE)).await;
    let form = page.forms().into_iter().find(|form| form.action.contains("/login-actions/authenticate"));
    let form = form.with_context(|| format!("no login form: {} {}", page.status, page.text()))?;
    let action = form.action.strip_prefix(&format!("http://{server}")).unwrap_or(&form.action).to_owned();
    let fields = [("username", email), ("password", PASSWORD), ("credentialId", "")];
    let fields = fields.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let done = browser.press(&PageForm { action, fields }).await;
    let is_logged_in = done.external.as_deref().is_some_and(|url| url.starts_with(REDIRECT_URL));
    ensure!(is_logged_in, "the login of Keycloak leads to {}: {} {}", done.address, done.status, done.text());
    Ok(())
}

fn new_secret() -> String {
    format!("{:032x}", rand::random::<u128>())
}

// === impl Contestant ===

impl Contestant {
    /// Exchanges a code for each user. If the benchmark compares the provider's refreshes, also opens the session that
    /// each user refreshes.
    async fn new(
        name: &'static str,
        mut users: Vec<ProviderUser>,
        refresh_scope: Option<&str>,
        process: Option<Box<dyn Send>>,
    ) -> Result<Self> {
        for user in &mut users {
            let tokens = user.exchange(SCOPE).await?;
            let algorithm = jwt_header(&tokens.id_token)?["alg"].clone();
            let expected = if name.ends_with("ES256") { "ES256" } else { "RS256" };
            ensure!(algorithm == expected, "the ID token of {name} has the algorithm {algorithm}");
            if let Some(scope) = refresh_scope {
                user.open_session(scope).await?;
            }
        }
        let (exchanges, refreshes) = (Throughput::new(), Throughput::new());
        Ok(Self { name, users, exchanges, refreshes, _process: process })
    }

    pub(super) fn can_refresh(&self) -> bool {
        self.users.iter().all(ProviderUser::has_session)
    }

    /// Runs all operations, and discards their measurements.
    pub(super) async fn warm_up(&mut self, duration: Duration) -> Result<()> {
        self.run(Operation::Exchange, duration).await?;
        if self.can_refresh() {
            self.run(Operation::Refresh, duration).await?;
        }
        (self.exchanges, self.refreshes) = (Throughput::new(), Throughput::new());
        Ok(())
    }

    /// Lets all users repeat an operation, and adds the measurements.
    pub(super) async fn run(&mut self, operation: Operation, duration: Duration) -> Result<()> {
        let began = Instant::now();
        let end = began + duration;
        let running = self.users.drain(..).map(|user| tokio::spawn(user.repeat_until(end, operation)));
        let (users, latencies) = join_clients(running).await.with_context(|| self.name)?;
        self.users = users;
        match operation {
            Operation::Exchange => self.exchanges.add(began, latencies),
            Operation::Refresh => self.refreshes.add(began, latencies),
        }
    }

    /// The only user.
    pub(super) fn into_user(self) -> Option<ProviderUser> {
        self.users.into_iter().next()
    }
}

// === impl Peer ===

impl Peer {
    /// Waits until a peer has started and is warm. If that fails, prints why.
    pub(super) async fn prepare(
        name: &str,
        warm_up: Duration,
        starting: impl Future<Output = Result<Contestant>> + Send + 'static,
    ) -> Self {
        println!("starting {name} …");
        // The harness panics if a page is not as expected. The separate task catches the panic.
        let prepared = tokio::spawn(async move {
            let mut contestant = starting.await?;
            contestant.warm_up(warm_up).await?;
            anyhow::Ok(contestant)
        });
        let error = match prepared.await {
            Ok(Ok(contestant)) => return Self::Ready(Box::new(contestant)),
            Ok(Err(error)) => format!("{error:#}"),
            Err(error) => error.to_string(),
        };
        println!("{name} is missing: {error}\n");
        Self::Missing(format!("{name} is missing: {}", error.lines().next().unwrap_or_default()))
    }

    pub(super) fn contestant(&mut self) -> Option<&mut Contestant> {
        match self {
            Self::Ready(contestant) => Some(contestant),
            Self::Missing(_) => None,
        }
    }

    /// A bound on a ratio to this peer. If the peer is missing, the bound is not met.
    pub(super) fn bound(&self, what: &str, min: f64, ratio: impl FnOnce(&Contestant) -> f64) -> Bound {
        match self {
            Self::Ready(contestant) => Bound::at_least(what, min, ratio(contestant)),
            Self::Missing(reason) => Bound::not_measured(&format!("{what}, at least {min}"), reason),
        }
    }
}
