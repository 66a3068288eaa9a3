//! The rendered Apps that are being served: loaded, swapped one at a time, and told to whoever listens.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

use arc_swap::ArcSwap;
use latchkey_crds::{
    rendered::{AppState, Change, FORMAT, Hello, LimitName, RenderedApp, Revision, Window},
    types::AppId,
};
use tokio::sync::broadcast;
use tracing::{error, info};

use crate::domain::{app::App, keys::KeyError};

pub mod directory;

/// How many changes a slow listener may lag behind before it must start from the whole set again.
const BACKLOG: usize = 1024;

/// Windows that hold beside an App's own, so that no App is looser than the install allows (contract, 7).
pub type Ceilings = BTreeMap<LimitName, Vec<Window>>;

/// What is served, by appID. Readers never wait.
pub struct Apps {
    ceilings: Ceilings,
    serving: ArcSwap<HashMap<AppId, Arc<App>>>,
    /// Held while the set is changed, so that listeners see changes in order.
    writing: Mutex<()>,
    changes: broadcast::Sender<Change>,
}

/// Why a document is refused; the one before it goes on. No value of the document is quoted.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error("the document is not UTF-8")]
    NotText,
    /// Position and what was expected; serde's text could quote a value, so it is left out.
    #[error("the document does not parse at line {line}, column {column}")]
    Malformed { line: usize, column: usize },
    #[error("the document names format {0}; formats start at 1")]
    Format(u32),
    #[error("the document is of another App than its place says")]
    WrongApp,
    #[error(transparent)]
    Keys(#[from] KeyError),
}

// === impl Apps ===

impl Default for Apps {
    fn default() -> Self {
        Self::new(Ceilings::new())
    }
}

impl Apps {
    pub fn new(ceilings: Ceilings) -> Self {
        Self { ceilings, serving: ArcSwap::default(), writing: Mutex::new(()), changes: broadcast::channel(BACKLOG).0 }
    }

    /// The App under this id, as of now.
    pub fn get(&self, id: &str) -> Option<Arc<App>> {
        self.serving.load().get(id).cloned()
    }

    pub fn len(&self) -> usize {
        self.serving.load().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every App being served.
    pub fn all(&self) -> Vec<Arc<App>> {
        self.serving.load().values().cloned().collect()
    }

    /// The whole set of revisions and, from that very moment on, the changes.
    pub fn subscribe(&self, pod_uid: String) -> (Hello, broadcast::Receiver<Change>) {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let receiver = self.changes.subscribe();
        let revisions: BTreeMap<_, _> =
            self.serving.load().iter().map(|(id, app)| (id.clone(), app.revision.clone())).collect();
        (Hello { pod_uid, format: FORMAT, revisions, refused: BTreeMap::new(), deletions: BTreeMap::new() }, receiver)
    }

    /// Puts a document in place of the one before it, or refuses it whole and tells why.
    pub fn put(&self, id: &AppId, document: &[u8]) {
        let revision = Revision::of(document);
        if self.get(id.as_str()).is_some_and(|app| app.revision == revision) {
            return;
        }
        match load(id, document, revision, &self.ceilings) {
            Ok(app) if app.doc.state == AppState::Deleted => self.remove(id),
            Ok(app) => {
                info!(app = %id, revision = %app.revision, "serving");
                let revision = Some(app.revision.clone());
                self.change(Change { app: id.clone(), revision, refused: None, deletion: None }, |serving| {
                    serving.insert(id.clone(), Arc::new(app));
                });
            }
            Err(refused) => self.refuse(id, &refused),
        }
    }

    /// Stops serving an App.
    pub fn remove(&self, id: &AppId) {
        if self.get(id.as_str()).is_some() {
            info!(app = %id, "no longer serving");
            self.change(Change { app: id.clone(), revision: None, refused: None, deletion: None }, |serving| {
                serving.remove(id);
            });
        }
    }

    fn refuse(&self, id: &AppId, refused: &Refused) {
        let serving = self.get(id.as_str()).map(|app| app.revision.clone());
        error!(
            app = %id,
            serving = serving.as_ref().map(Revision::as_str),
            error = refused as &dyn std::error::Error,
            "a rendered App is refused; what was served before goes on"
        );
        let change = Change { app: id.clone(), revision: serving, refused: Some(refused.to_string()), deletion: None };
        self.change(change, |_| {});
    }

    fn change(&self, change: Change, edit: impl FnOnce(&mut HashMap<AppId, Arc<App>>)) {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut serving = HashMap::clone(&self.serving.load());
        edit(&mut serving);
        self.serving.store(Arc::new(serving));
        // No listener is not an error.
        let _ = self.changes.send(change);
    }
}

fn load(id: &AppId, document: &[u8], revision: Revision, ceilings: &Ceilings) -> Result<App, Refused> {
    let text = std::str::from_utf8(document).map_err(|_| Refused::NotText)?;
    let malformed = |error: serde_json::Error| Refused::Malformed { line: error.line(), column: error.column() };
    /// Only the format, so that a later one is named as what it is.
    #[derive(serde::Deserialize)]
    struct Format {
        format: u32,
    }
    let format = serde_json::from_str::<Format>(text).map_err(malformed)?.format;
    if format == 0 {
        return Err(Refused::Format(format));
    }
    let mut doc: RenderedApp = text.parse().map_err(malformed)?;
    if doc.app_id != *id {
        return Err(Refused::WrongApp);
    }
    for (limit, windows) in ceilings {
        lower(doc.limits.entry(*limit).or_insert_with(|| limit.default_windows()), windows);
    }
    Ok(App::new(doc, revision)?)
}

/// Adds the ceiling's windows to those that must hold; of two of one length the lower count stays.
fn lower(windows: &mut Vec<Window>, ceiling: &[Window]) {
    for most in ceiling {
        match windows.iter_mut().find(|window| window.window_seconds == most.window_seconds) {
            Some(window) => window.count = window.count.min(most.count),
            None => windows.push(*most),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fixtures;

    fn id() -> AppId {
        "shop".parse().unwrap()
    }

    #[test]
    fn a_document_that_does_not_parse_is_refused_whole_and_the_old_one_serves() {
        let apps = Apps::default();
        apps.put(&id(), &fixtures::rendered("shop").to_bytes());
        let serving = apps.get("shop").unwrap().revision.clone();
        let (_, mut changes) = apps.subscribe(String::new());
        let mut keyless = fixtures::rendered("shop");
        keyless.keys.signing.clear();
        let mut halved = fixtures::rendered("shop").to_bytes();
        halved.truncate(halved.len() / 2);
        for bad in [
            &b"{"[..],
            b"\xff",
            b"{\"format\": 0}",
            &fixtures::rendered("other").to_bytes(),
            &keyless.to_bytes(),
            &halved,
        ] {
            apps.put(&id(), bad);
            let told = changes.try_recv().unwrap();
            assert_eq!(told.revision.as_ref(), Some(&serving));
            assert!(told.refused.is_some_and(|reason| !reason.contains("PRIVATE")));
            assert_eq!(apps.get("shop").unwrap().revision, serving);
        }
    }

    #[test]
    fn no_app_is_looser_than_the_ceiling() {
        let window = |count, window_seconds| Window { count, window_seconds };
        let ceilings = Ceilings::from([(LimitName::LoginsPerClient, vec![window(30, 60), window(500, 3600)])]);
        let apps = Apps::new(ceilings);
        let mut loose = fixtures::rendered("shop");
        loose.limits.insert(LimitName::LoginsPerClient, vec![window(1000, 60), window(10, 1)]);
        apps.put(&id(), &loose.to_bytes());
        let app = apps.get("shop").unwrap();
        assert_eq!(app.windows(LimitName::LoginsPerClient), [window(30, 60), window(10, 1), window(500, 3600)]);
        assert_eq!(app.windows(LimitName::CodesPerClient), LimitName::CodesPerClient.default_windows());
    }

    #[test]
    fn a_later_format_with_more_fields_is_read() {
        let mut later = serde_json::to_value(fixtures::rendered("shop")).unwrap();
        later["format"] = 99.into();
        later["somethingNew"] = true.into();
        let apps = Apps::default();
        apps.put(&id(), later.to_string().as_bytes());
        assert!(apps.get("shop").is_some());
    }

    #[test]
    fn listeners_hear_the_whole_set_and_then_each_change() {
        let apps = Apps::default();
        apps.put(&id(), &fixtures::rendered("shop").to_bytes());
        let (hello, mut changes) = apps.subscribe("pod".to_owned());
        assert_eq!(hello.revisions.keys().map(AppId::as_str).collect::<Vec<_>>(), ["shop"]);
        let same = fixtures::rendered("shop");
        apps.put(&id(), &same.to_bytes());
        let first = changes.try_recv().unwrap().revision;
        assert!(first.is_some());
        apps.put(&id(), &same.to_bytes());
        assert!(changes.try_recv().is_err(), "the same document is no change");
        apps.remove(&id());
        assert_eq!(changes.try_recv().unwrap().revision, None);
        assert!(apps.get("shop").is_none());
    }

    #[test]
    fn a_directory_is_watched() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shop.json");
        std::fs::write(&path, fixtures::rendered("shop").to_bytes()).unwrap();
        std::fs::write(folder.path().join("README.txt"), "not an App").unwrap();
        let apps = Arc::new(Apps::default());
        let _watching = directory::watch(folder.path().to_owned(), Arc::clone(&apps)).unwrap();
        let first = apps.get("shop").unwrap().revision.clone();

        let (_, mut changes) = apps.subscribe(String::new());
        let mut edited = fixtures::rendered("shop");
        edited.display_name = "Another".to_owned();
        std::fs::write(&path, edited.to_bytes()).unwrap();
        let told = next(&mut changes, |told| told.refused.is_none());
        assert_ne!(told.revision, Some(first));

        std::fs::remove_file(&path).unwrap();
        assert_eq!(next(&mut changes, |told| told.revision.is_none()).refused, None);
        assert!(apps.get("shop").is_none());
    }

    /// Waits for a change that fits; a file may be seen half-written first, which is refused.
    fn next(changes: &mut broadcast::Receiver<Change>, fits: impl Fn(&Change) -> bool) -> Change {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let fitting = async {
                loop {
                    let told = changes.recv().await.unwrap();
                    if fits(&told) {
                        return told;
                    }
                }
            };
            tokio::time::timeout(Duration::from_secs(20), fitting).await.expect("the change was not seen in 20 s")
        })
    }
}
