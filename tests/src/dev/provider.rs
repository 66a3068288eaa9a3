//! The local provider of `make run`: Dex, with the OAuth clients that the rendered documents use at this provider.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::Result;
use latchkey_crds::rendered::{CallbackMode, RenderedApp};

use crate::{
    dex::{self, Client, Dex, User},
    process::Process,
};

/// A user with an email address that the provider reports as verified.
pub(super) const VERIFIED_USER: &str = "ada@example.com";
/// A user with an email address that the provider does not report as verified.
pub(super) const UNVERIFIED_USER: &str = "grace@example.com";
/// Time limit for Dex to exit before a restart. The time is short, so that the user does not wait.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// The running provider. It restarts if changed manifests change its clients.
pub(super) struct LocalProvider {
    /// `None` during a restart, and after a failed restart.
    dex: Option<Dex>,
    rendered: PathBuf,
    seen: FileMarks,
}

/// Length and modification time of each rendered document, to detect changes.
type FileMarks = BTreeMap<PathBuf, (u64, Option<SystemTime>)>;

/// A social login of an App with the local provider.
struct SocialLogin {
    app: RenderedApp,
    /// The provider's name in paths.
    provider: String,
    client: Client,
}

// === impl LocalProvider ===

impl LocalProvider {
    pub(super) async fn start(addr: SocketAddr, data: &Path, log: PathBuf, rendered: &Path) -> Result<Self> {
        let seen = file_marks(rendered);
        let options = dex::Options {
            data: data.to_owned(),
            log,
            addr,
            base_url: None,
            users: vec![
                User::new("Ada Lovelace", VERIFIED_USER),
                User::new("Grace Hopper", UNVERIFIED_USER).unverified(),
            ],
            clients: clients(rendered, addr),
            requires_consent: false,
            automatic_login: false,
        };
        Ok(Self { dex: Some(Dex::start(options).await?), rendered: rendered.to_owned(), seen })
    }

    pub(super) fn process(&self) -> Option<&Process> {
        self.dex.as_ref().map(Dex::process)
    }

    /// Restarts Dex if the rendered documents have changed and contain other clients now.
    pub(super) async fn restart_if_changed(&mut self) -> Result<()> {
        let seen = file_marks(&self.rendered);
        if seen == self.seen {
            return Ok(());
        }
        self.seen = seen;
        let Some(dex) = self.dex.take_if(|dex| dex.options().clients != clients(&self.rendered, dex.addr())) else {
            return Ok(());
        };
        let clients = clients(&self.rendered, dex.addr());
        dex.stop(STOP_LIMIT);
        let options = dex::Options { clients, ..dex.options().clone() };
        self.dex = Some(Dex::start(options).await?);
        Ok(())
    }

    pub(super) fn stop(&self, limit: Duration) {
        if let Some(dex) = &self.dex {
            dex.stop(limit);
        }
    }
}

/// The URL that starts a login with the local provider, at the App `shop` if possible. At its end, the login redirects
/// to `done_url` if the App allows this redirect URL, and otherwise to the App's first redirect URL. `None` if no App
/// has a login with this provider that a browser can complete without an application.
pub(super) fn login_link(rendered: &Path, provider: SocketAddr, done_url: &str) -> Option<String> {
    let mut logins = logins(rendered, provider);
    logins.retain(|login| login.app.callback_mode != CallbackMode::Code && !login.app.redirect_urls.is_empty());
    logins.sort_by_key(|login| login.app.app_id.as_str() != "shop");
    let login = logins.first()?;
    let link = format!("{}/{}/redirect", login.app.issuer, login.provider);
    let allows_done_url =
        login.app.redirect_urls.iter().any(|url| without_port(url.as_str()) == without_port(done_url));
    Some(if allows_done_url { format!("{link}?redirect_url={done_url}") } else { link })
}

/// The URL without its port, because `http` redirect URLs for loopback match with any port (RFC 8252, 7.3).
fn without_port(url: &str) -> Option<url::Url> {
    let mut url: url::Url = url.parse().ok()?;
    url.set_port(None).ok()?;
    Some(url)
}

fn clients(rendered: &Path, provider: SocketAddr) -> Vec<Client> {
    let mut clients: BTreeMap<String, Client> = BTreeMap::new();
    for SocialLogin { client, .. } in logins(rendered, provider) {
        // Several Apps can use the same client. The client gets the callback URLs of all these Apps.
        clients
            .entry(client.id.clone())
            .and_modify(|known| known.callbacks.extend(client.callbacks.iter().cloned()))
            .or_insert(client);
    }
    clients.into_values().collect()
}

/// The social logins with this provider in all rendered documents, in the order of the appIDs.
fn logins(rendered: &Path, provider: SocketAddr) -> Vec<SocialLogin> {
    let issuer = dex::issuer(provider);
    let mut logins = Vec::new();
    for path in file_marks(rendered).into_keys() {
        // Skips a document that the operator is still writing. The next call reads it.
        let Some(app) = fs::read(path).ok().and_then(|text| serde_json::from_slice::<RenderedApp>(&text).ok()) else {
            continue;
        };
        for app_provider in &app.providers {
            let settings = &app_provider.settings;
            let (Some(secret), Some(configured)) = (&settings.secret, settings.options.get("issuer")) else { continue };
            if configured.as_str() == Some(&issuer) {
                let client = Client {
                    id: settings.client_id.clone(),
                    secret: secret.expose().to_owned(),
                    callbacks: vec![format!("{}/{}/callback", app.issuer, app_provider.name)],
                };
                logins.push(SocialLogin { app: app.clone(), provider: app_provider.name.to_string(), client });
            }
        }
    }
    logins
}

fn file_marks(rendered: &Path) -> FileMarks {
    let Ok(entries) = fs::read_dir(rendered) else { return FileMarks::new() };
    entries
        .flatten()
        .filter(|entry| entry.path().extension().is_some_and(|ending| ending == "json"))
        .filter_map(|entry| {
            let metadata = entry.metadata().ok()?;
            Some((entry.path(), (metadata.len(), metadata.modified().ok())))
        })
        .collect()
}
