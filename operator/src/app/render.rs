//! Renders the document that servers read, from a validated App and its keys. Pure: the same input gives the same
//! bytes.

use latchkey_crds::{
    rendered::{AppState, DeletedApp, MAX_DOCUMENT_SIZE, RenderedApp, RenderedKeys, Revision},
    types::HostName,
};

use crate::app::{keys::KeyDocument, validate::ValidatedApp};

/// A rendered document.
pub(crate) struct Rendered {
    pub(crate) bytes: Vec<u8>,
    pub(crate) revision: Revision,
    /// The own host of the pages, which is also in an annotation of the Secret.
    pub(crate) pages_host: Option<HostName>,
}

/// The document is larger than servers accept.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the rendered document is over {} KiB; shorten the templates and lists", MAX_DOCUMENT_SIZE / 1024)]
pub(crate) struct TooLarge;

/// Returns the lowest format that has everything that this App uses, and the field that needs this format.
pub(crate) fn needed_format(app: &ValidatedApp) -> (u32, &'static str) {
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
/// documents of Apps that use nothing new.
pub(crate) fn render(app: &ValidatedApp, keys: &KeyDocument) -> Rendered {
    let (format, _) = needed_format(app);
    let document = RenderedApp {
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
        administrators: app.administrators.clone(),
        importers: app.importers.clone(),
        webhooks: app.webhooks.clone(),
        pages: app.pages.clone().map(Box::new),
        unverified_retention_days: app.unverified_retention_days,
        audit_retention_days: app.audit_retention_days,
        providers: app.providers.clone(),
        keys: RenderedKeys {
            signing: keys.signing.iter().map(|key| key.rendered()).collect(),
            hmac: keys.hmac.iter().map(|key| key.rendered()).collect(),
        },
    };
    let bytes = document.to_bytes();
    let revision = Revision::of(&bytes);
    Rendered { bytes, revision, pages_host: document.pages.and_then(|pages| pages.host) }
}

/// Renders the document of an App that is no longer served.
pub(crate) fn render_unserved(app: &DeletedApp) -> Rendered {
    let bytes = app.to_bytes();
    let revision = Revision::of(&bytes);
    Rendered { bytes, revision, pages_host: None }
}

// === impl Rendered ===

impl Rendered {
    pub(crate) fn within_limit(self) -> Result<Self, TooLarge> {
        if self.bytes.len() > MAX_DOCUMENT_SIZE { Err(TooLarge) } else { Ok(self) }
    }
}
