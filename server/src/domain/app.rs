//! An App as requests see it: its document, and its keys ready for use.

use latchkey_crds::{
    rendered::{LimitName, RenderedApp, Revision, Window},
    types::AppId,
};

use super::{
    email::Email,
    keys::{KeyError, Keys},
};

/// A loaded App; immutable, replaced whole when its document changes.
#[derive(Debug)]
pub struct App {
    pub doc: RenderedApp,
    pub revision: Revision,
    pub keys: Keys,
}

// === impl App ===

impl App {
    pub fn new(doc: RenderedApp, revision: Revision) -> Result<Self, KeyError> {
        let keys = Keys::new(&doc)?;
        Ok(Self { doc, revision, keys })
    }

    pub fn id(&self) -> &AppId {
        &self.doc.app_id
    }

    /// Windows of a limit; an older document may lack a newer limit, which then has its default.
    pub fn windows(&self, limit: LimitName) -> Vec<Window> {
        match self.doc.limits.get(&limit) {
            Some(windows) => windows.clone(),
            None => limit.default_windows(),
        }
    }

    /// Whether addresses of this domain may come in.
    pub fn allows(&self, email: &Email) -> bool {
        let allowed = &self.doc.allowed_email_domains;
        allowed.is_empty() || allowed.iter().any(|domain| domain.as_str() == email.domain())
    }
}
