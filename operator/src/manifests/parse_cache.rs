//! Stores what the previous run over the manifests parsed, so that `latchkey-operator render --watch` does not parse
//! unchanged documents again.

use std::sync::Arc;

use latchkey_crds::{app::App, client::Client, provider::Provider};
use serde_json::Value;

use super::schemas::WrongField;
use crate::run_cache::RunCache;

/// The parsed documents and objects of the previous run.
#[derive(Debug, Default)]
pub(crate) struct ParseCache {
    pub(super) documents: RunCache<String, Result<Value, String>>,
    pub(super) apps: RunCache<Value, Result<App, Vec<WrongField>>>,
    pub(super) providers: RunCache<Value, Result<Provider, Vec<WrongField>>>,
    pub(super) clients: RunCache<Value, Result<Arc<Client>, Vec<WrongField>>>,
}

// === impl ParseCache ===

impl ParseCache {
    /// Begins a run over the manifests.
    pub(crate) fn begin(&self) {
        self.documents.begin_run();
        self.apps.begin_run();
        self.providers.begin_run();
        self.clients.begin_run();
    }

    /// Returns how many Apps, Providers and Clients this run parsed.
    #[cfg(test)]
    pub(crate) fn parsed_count(&self) -> usize {
        self.apps.computed() + self.providers.computed() + self.clients.computed()
    }
}
