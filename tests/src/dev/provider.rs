//! The local provider of `make run`: Dex, which knows the clients that the rendered documents name.

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
    dex::{self, Client, Dex, Person},
    process::Process,
};

/// Who can log in there.
pub(super) const PERSON: &str = "ada@example.com";
/// Somebody whose address it does not call verified.
pub(super) const UNVERIFIED: &str = "grace@example.com";
/// Nobody is to wait for it.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// The running provider. It is started anew when the manifests name other clients.
pub(super) struct Local {
    // Always there but while it is started anew.
    dex: Option<Dex>,
    rendered: PathBuf,
    seen: Marks,
}

/// What of a document tells that it changed: length and time of the last write.
type Marks = BTreeMap<PathBuf, (u64, Option<SystemTime>)>;

/// A social login that leads there.
struct Login {
    app: RenderedApp,
    /// The provider's name in paths.
    provider: String,
    client: Client,
}

// === impl Local ===

impl Local {
    pub(super) async fn start(addr: SocketAddr, data: &Path, log: PathBuf, rendered: &Path) -> Result<Self> {
        let seen = marks(rendered);
        let options = dex::Options {
            data: data.to_owned(),
            log,
            addr,
            base_url: None,
            people: vec![Person::new("Ada Lovelace", PERSON), Person::new("Grace Hopper", UNVERIFIED).unverified()],
            clients: clients(rendered, addr),
            asks: false,
        };
        Ok(Self { dex: Some(Dex::start(options).await?), rendered: rendered.to_owned(), seen })
    }

    pub(super) fn process(&self) -> Option<&Process> {
        self.dex.as_ref().map(Dex::process)
    }

    /// Takes over what the documents name now.
    pub(super) async fn follow(&mut self) -> Result<()> {
        let seen = marks(&self.rendered);
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

/// The address that leads through the provider back to `done`; App `shop` is preferred. None where no App has a login
/// there which a browser alone can go.
pub(super) fn link(rendered: &Path, provider: SocketAddr, done: &str) -> Option<String> {
    let mut logins = logins(rendered, provider);
    logins.retain(|login| login.app.callback_mode != CallbackMode::Code && !login.app.redirect_urls.is_empty());
    logins.sort_by_key(|login| login.app.app_id.as_str() != "shop");
    let login = logins.first()?;
    let link = format!("{}/{}/redirect", login.app.issuer, login.provider);
    let knows_done = login.app.redirect_urls.iter().any(|url| without_port(url.as_str()) == without_port(done));
    Some(if knows_done { format!("{link}?redirect_url={done}") } else { link })
}

/// As `http` loopback addresses are compared (RFC 8252, section 7.3).
fn without_port(url: &str) -> Option<url::Url> {
    let mut url: url::Url = url.parse().ok()?;
    url.set_port(None).ok()?;
    Some(url)
}

fn clients(rendered: &Path, provider: SocketAddr) -> Vec<Client> {
    let mut clients: BTreeMap<String, Client> = BTreeMap::new();
    for Login { client, .. } in logins(rendered, provider) {
        // One client of several Apps has the callbacks of all.
        clients
            .entry(client.id.clone())
            .and_modify(|known| known.callbacks.extend(client.callbacks.iter().cloned()))
            .or_insert(client);
    }
    clients.into_values().collect()
}

/// What the documents name, in the order of the Apps' ids.
fn logins(rendered: &Path, provider: SocketAddr) -> Vec<Login> {
    let issuer = dex::issuer(provider);
    let mut logins = Vec::new();
    for path in marks(rendered).into_keys() {
        // A document that is being written is seen at the next look.
        let Some(app) = fs::read(path).ok().and_then(|text| serde_json::from_slice::<RenderedApp>(&text).ok()) else {
            continue;
        };
        for of_app in &app.providers {
            let settings = &of_app.settings;
            let (Some(secret), Some(its)) = (&settings.secret, settings.options.get("issuer")) else { continue };
            if its.as_str() == Some(&issuer) {
                let client = Client {
                    id: settings.client_id.clone(),
                    secret: secret.expose().to_owned(),
                    callbacks: vec![format!("{}/{}/callback", app.issuer, of_app.name)],
                };
                logins.push(Login { app: app.clone(), provider: of_app.name.to_string(), client });
            }
        }
    }
    logins
}

fn marks(rendered: &Path) -> Marks {
    let Ok(entries) = fs::read_dir(rendered) else { return Marks::new() };
    entries
        .flatten()
        .filter(|entry| entry.path().extension().is_some_and(|ending| ending == "json"))
        .filter_map(|entry| {
            let metadata = entry.metadata().ok()?;
            Some((entry.path(), (metadata.len(), metadata.modified().ok())))
        })
        .collect()
}
