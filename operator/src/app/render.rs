//! Renders the document that servers read, from a validated App and its keys. Pure: the same input gives the same
//! bytes.

use latchkey_crds::{
    rendered::{
        AppState, CLIENTS_FORMAT, DeletedApp, MAX_APP_SIZE, MAX_DOCUMENT_SIZE, RenderedApp, RenderedClient,
        RenderedKeys, Revision,
    },
    types::HostName,
};

use crate::{
    app::{keys::KeyDocument, validate::ValidatedApp},
    client::render::size,
};

#[cfg(test)]
mod tests;

/// The size of `,"clients":[]` in bytes, minus 1: [`fitting_clients`] counts a comma after each client, but the last
/// client has none.
const CLIENTS_FRAME: usize = 12;

/// A rendered document.
pub(crate) struct Rendered {
    pub(crate) bytes: Vec<u8>,
    pub(crate) revision: Revision,
    /// The App's own host for its pages, which is also written to an annotation of the Secret.
    pub(crate) pages_host: Option<HostName>,
    /// How many of the App's clients are in the document. If not all clients fit, the newest are left out.
    pub(crate) client_count: usize,
    /// The revision that the document would have without the clients and without the keys for their ID tokens.
    pub(crate) app_part: Revision,
}

/// How large a document, and the clients in it, can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// The maximum size of the document, in bytes.
    pub(crate) document: usize,
    /// The maximum size of the clients in the document, in bytes.
    pub(crate) clients: usize,
}

/// The error if the document is larger than servers accept, even without the App's clients.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the rendered document is over {} KiB; shorten the templates and lists", MAX_APP_SIZE / 1024)]
pub(crate) struct TooLarge;

/// Returns the lowest format of the document that supports everything that this App uses, and the field of the App that
/// needs this format. Clients and the keys for their ID tokens do not count: if a server cannot read them, the status
/// of each Client reports this, not the status of the App.
pub(crate) fn needed_format(app: &ValidatedApp) -> (u32, &'static str) {
    if app.providers.iter().any(|provider| provider.groups.is_some()) {
        return (CLIENTS_FORMAT, "groups in spec.providerRefs");
    }
    if app.pages.is_some() {
        return (3, "spec.pages");
    }
    if !app.webhooks.is_empty() {
        return (2, "spec.webhooks");
    }
    if !app.importers.is_empty() {
        return (2, "the role Importer in spec.administrators");
    }
    if app.password.firebase_scrypt.is_some() {
        return (2, "spec.password.firebaseScryptRef");
    }
    (1, "a rendered App")
}

/// Renders the document in the lowest format that the App needs. So a new version of the operator does not change the
/// documents of Apps that use nothing new. If not all clients fit, the newest are left out.
pub(crate) fn render(app: &ValidatedApp, keys: &KeyDocument, room: Room) -> Result<Rendered, TooLarge> {
    let app_only = without_clients(app, keys);
    let bytes = app_only.to_bytes();
    if bytes.len() > MAX_APP_SIZE {
        return Err(TooLarge);
    }
    let app_part = Revision::of(&bytes);
    let (document, bytes) = with_clients(&app_only, app, keys, room).unwrap_or((app_only, bytes));
    let revision = Revision::of(&bytes);
    let client_count = document.clients.len();
    let pages_host = document.pages.and_then(|pages| pages.host);
    Ok(Rendered { bytes, revision, pages_host, client_count, app_part })
}

/// Adds the clients and the keys for their ID tokens. Returns `None` if there is nothing to add, or no room for it.
fn with_clients(
    app_only: &RenderedApp,
    app: &ValidatedApp,
    keys: &KeyDocument,
    room: Room,
) -> Option<(RenderedApp, Vec<u8>)> {
    if app.clients.is_empty() && keys.id_tokens.is_empty() {
        return None;
    }
    let format = app_only.format.max(CLIENTS_FORMAT);
    let mut document = RenderedApp { format, keys: keys.rendered(), ..app_only.clone() };
    let bytes = document.to_bytes();
    if bytes.len() > room.document {
        return None;
    }
    document.clients = fitting_clients(&app.clients, bytes.len(), room).to_vec();
    match (document.clients.is_empty(), document.keys.id_tokens.is_empty()) {
        (true, true) => None,
        (true, false) => Some((document, bytes)),
        (false, _) => {
            let bytes = document.to_bytes();
            Some((document, bytes))
        }
    }
}

/// Returns the first clients, as many as fit in a document that has this size without them.
fn fitting_clients(clients: &[RenderedClient], size_without: usize, room: Room) -> &[RenderedClient] {
    let mut document = size_without + CLIENTS_FRAME;
    let mut used = 0;
    let fits = |client: &&RenderedClient| {
        let bytes = size(client);
        document += bytes + 1;
        used += bytes + 1;
        document <= room.document && used <= room.clients
    };
    let count = clients.iter().take_while(fits).count();
    &clients[..count]
}

fn without_clients(app: &ValidatedApp, keys: &KeyDocument) -> RenderedApp {
    let (format, _) = needed_format(app);
    RenderedApp {
        format,
        app_id: app.app_id.clone(),
        namespace: app.namespace.clone(),
        name: app.name.clone(),
        state: AppState::Serving,
        incarnation: keys.incarnation.clone(),
        handover: (keys.handover > 0).then_some(keys.handover),
        issuer: app.issuer.clone(),
        display_name: app.display_name.clone(),
        redirect_urls: app.redirect_urls.clone(),
        allowed_origins: app.allowed_origins.clone(),
        sign_up: app.sign_up,
        allowed_email_domains: app.allowed_email_domains.clone(),
        require_verified_email: app.require_verified_email,
        enumeration_protection: app.enumeration_protection,
        allow_users_without_email: app.allow_users_without_email,
        browser_binding: app.browser_binding,
        callback_mode: app.callback_mode,
        password: app.password.clone(),
        mail: app.mail.clone(),
        tokens: app.tokens.clone(),
        limits: app.limits.clone(),
        client_limits: app.client_limits.clone(),
        administrators: app.administrators.clone(),
        importers: app.importers.clone(),
        webhooks: app.webhooks.clone(),
        pages: app.pages.clone().map(Box::new),
        clients: Vec::new(),
        unverified_retention_days: app.unverified_retention_days,
        audit_retention_days: app.audit_retention_days,
        providers: app.providers.clone(),
        keys: RenderedKeys { id_tokens: Vec::new(), ..keys.rendered() },
    }
}

/// Renders the document of an App that is no longer served.
pub(crate) fn render_unserved(app: &DeletedApp) -> Rendered {
    let bytes = app.to_bytes();
    let revision = Revision::of(&bytes);
    Rendered { bytes, app_part: revision.clone(), revision, pages_host: None, client_count: 0 }
}

// === impl Room ===

impl Room {
    /// The room for a document without clients.
    pub(crate) const APP_ONLY: Self = Self { document: MAX_APP_SIZE, clients: 0 };

    /// Returns the room of a document, if `supported_format` is the highest format that all serving pods support.
    /// `clients` is the room that the quota leaves for clients, in bytes.
    pub(crate) fn new(supported_format: u32, clients: u64) -> Self {
        // Servers that know only earlier formats refuse a larger document.
        let document = if supported_format < CLIENTS_FORMAT { MAX_APP_SIZE } else { MAX_DOCUMENT_SIZE };
        Self { document, clients: usize::try_from(clients).unwrap_or(usize::MAX) }
    }
}
