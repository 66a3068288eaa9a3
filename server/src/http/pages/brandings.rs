//! The branding and the shared pages of each App, computed once for each revision of its document.

use std::{collections::HashMap, sync::Arc};

use latchkey_crds::{rendered::Revision, types::AppId};
use parking_lot::Mutex;

use super::shared_pages::SharedPages;
use crate::{
    domain::{app::App, pages::settings::PagesSettings},
    pages::Branding,
};

/// The maximum number of Apps for which values are stored. Each App needs about 3 KiB, and about 4 KiB (at most 8 KiB)
/// for its login page in each language. When the maximum is reached, all values are removed, and each is computed again
/// when it is needed.
const MAX_APPS: usize = 512;

#[derive(Default)]
pub(super) struct Brandings(Mutex<HashMap<AppId, (Revision, AppBranding)>>);

/// What is stored for one revision of an App.
#[derive(Clone)]
pub(super) struct AppBranding {
    pub(super) branding: Arc<Branding>,
    pub(super) shared_pages: Arc<SharedPages>,
}

// === impl Brandings ===

impl Brandings {
    pub(super) fn get(&self, app: &App, settings: &PagesSettings) -> AppBranding {
        if let Some((revision, branding)) = self.0.lock().get(app.id())
            && *revision == app.revision
        {
            return branding.clone();
        }
        // Computed without the lock, because the colors and the hash of the logo take up to a millisecond.
        let branding = Arc::new(Branding::new(app, settings));
        let stored_branding = AppBranding { branding, shared_pages: Arc::default() };
        let mut stored = self.0.lock();
        if stored.len() >= MAX_APPS {
            stored.clear();
        }
        stored.insert(app.id().clone(), (app.revision.clone(), stored_branding.clone()));
        stored_branding
    }
}
