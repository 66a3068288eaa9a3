//! The branding of each App, computed once for each document.

use std::{collections::HashMap, sync::Arc};

use latchkey_crds::{rendered::Revision, types::AppId};
use parking_lot::Mutex;

use crate::{
    domain::{app::App, pages::settings::PagesSettings},
    pages::Branding,
};

/// The maximum number of stored brandings, about 3 KiB each. When this number is reached, all brandings are removed,
/// and each is computed again when it is needed.
const MAX_BRANDINGS: usize = 512;

#[derive(Default)]
pub(super) struct Brandings(Mutex<HashMap<AppId, (Revision, Arc<Branding>)>>);

// === impl Brandings ===

impl Brandings {
    pub(super) fn get(&self, app: &App, settings: &PagesSettings) -> Arc<Branding> {
        if let Some((revision, branding)) = self.0.lock().get(app.id())
            && *revision == app.revision
        {
            return Arc::clone(branding);
        }
        // Computed without the lock, because the colors and the hash of the logo take up to a millisecond.
        let branding = Arc::new(Branding::new(app, settings));
        let mut stored = self.0.lock();
        if stored.len() >= MAX_BRANDINGS {
            stored.clear();
        }
        stored.insert(app.id().clone(), (app.revision.clone(), Arc::clone(&branding)));
        branding
    }
}
