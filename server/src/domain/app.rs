//! A loaded App: its rendered document and its parsed keys.

use latchkey_crds::{
    rendered::{LimitName, RenderedApp, Revision, Window},
    types::AppId,
};

use super::{
    email::Email,
    keys::{AppKeys, KeyError},
};

/// A loaded App. It never changes: for a new document, the server loads a new `App`.
#[derive(Debug)]
pub struct App {
    pub doc: RenderedApp,
    pub revision: Revision,
    pub keys: AppKeys,
}

// === impl App ===

impl App {
    pub fn new(doc: RenderedApp, revision: Revision) -> Result<Self, KeyError> {
        let keys = AppKeys::new(&doc)?;
        Ok(Self { doc, revision, keys })
    }

    pub fn id(&self) -> &AppId {
        &self.doc.app_id
    }

    /// The windows of a rate limit: the default windows if an older operator wrote the document without this limit.
    pub fn windows(&self, limit: LimitName) -> Vec<Window> {
        match self.doc.limits.get(&limit) {
            Some(windows) => windows.clone(),
            None => limit.default_windows(),
        }
    }

    /// Whether the App accepts the domain of the email address.
    pub fn allows_email_domain(&self, email: &Email) -> bool {
        let allowed = &self.doc.allowed_email_domains;
        allowed.is_empty() || allowed.iter().any(|domain| domain.as_str() == email.domain())
    }
}
