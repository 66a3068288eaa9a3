//! The rendered Apps that are being served: loaded, swapped one at a time, and told to whoever listens.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use arc_swap::ArcSwap;
use latchkey_crds::{
    rendered::{
        AppState, Change, DeletedApp, Deletion, FORMAT, Head, Hello, LimitName, RefusedDocument, RenderedApp, Revision,
        Window,
    },
    types::AppId,
};
use tokio::sync::broadcast;
use tracing::{error, info};

use crate::domain::{app::App, keys::KeyError};

pub mod cache;
pub mod directory;
pub mod kubernetes;
pub mod metrics;
mod texts;

use cache::Cache;
use metrics::ConfigMetrics;
use texts::SharedTexts;

/// How many changes a slow listener may lag behind before it must start from the whole set again.
const BACKLOG: usize = 1024;

/// A change copies one part and the list of parts: with 10,000 Apps that is forty entries and 256 pointers, not 10,000.
const PARTS: usize = 256;

/// Windows that hold beside an App's own, so that no App is looser than the install allows (contract, 7).
pub type Ceilings = BTreeMap<LimitName, Vec<Window>>;

/// What is served, by appID. Readers never wait.
pub struct Apps {
    ceilings: Ceilings,
    serving: ArcSwap<Serving>,
    /// Held while the set is changed, so that listeners see changes in order.
    aside: Mutex<Aside>,
    changes: broadcast::Sender<Change>,
    cache: Option<Cache>,
    /// The mail templates of all documents.
    texts: SharedTexts,
    metrics: ConfigMetrics,
}

/// The Apps being served, in parts by the hash of their ids.
#[derive(Clone)]
struct Serving {
    parts: Vec<Arc<HashMap<AppId, Arc<App>>>>,
    count: usize,
}

/// What is known beside what is served.
#[derive(Default)]
struct Aside {
    refused: BTreeMap<AppId, Refusal>,
    deleted: BTreeMap<AppId, Deleted>,
}

/// The newest document of an App, which is not served.
struct Refusal {
    document: RefusedDocument,
    /// Where the database refuses it: it may take it later, when the users of an earlier App are deleted.
    withheld: Option<Arc<App>>,
}

/// An App whose users are to be deleted, or whose appID is to be freed if it has none.
#[derive(Clone, Debug)]
pub struct Deleted {
    pub doc: Arc<DeletedApp>,
    pub revision: Revision,
    /// None: nobody has looked yet.
    pub progress: Option<Deletion>,
}

/// A document that can be used.
enum Document {
    App(Arc<App>),
    Deleted(Deleted),
}

/// What came of reading a document; of one that is refused its revision is known too.
type Read = Result<Document, (Refused, Revision)>;

/// A whole set of documents, taken in one by one and put in place of what is served in one step. What it does not have
/// is then no longer served.
pub struct Whole<'a> {
    apps: &'a Apps,
    documents: Vec<(AppId, Read)>,
    kept: HashSet<AppId>,
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
    #[error("the document is larger than a rendered App can be")]
    TooLarge,
    #[error("the document is of another App than its place says")]
    WrongApp,
    #[error("the Secret has no {}", latchkey_crds::names::RENDERED_APP_KEY)]
    NoDocument,
    #[error("the appID belongs to another namespace")]
    OtherNamespace,
    #[error("the App's users belong to other keys than these, which were lost")]
    KeysLost,
    #[error("the users of this App were deleted; a new App needs new keys")]
    Gone,
    #[error("the database knows another App of this appID, whose users are not this one's to delete")]
    OtherApp,
    #[error(transparent)]
    Keys(#[from] KeyError),
}

/// The kind of a refusal, as metrics name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    NotText,
    Malformed,
    Format,
    TooLarge,
    WrongApp,
    NoDocument,
    OtherNamespace,
    KeysLost,
    Gone,
    OtherApp,
    Keys,
}

// === impl Refused ===

impl Refused {
    /// As it is told.
    fn document(&self, revision: Revision) -> RefusedDocument {
        RefusedDocument { revision, reason: self.to_string(), keys_lost: matches!(self, Self::KeysLost) }
    }

    const fn reason(&self) -> Reason {
        match self {
            Self::NotText => Reason::NotText,
            Self::Malformed { .. } => Reason::Malformed,
            Self::Format(_) => Reason::Format,
            Self::TooLarge => Reason::TooLarge,
            Self::WrongApp => Reason::WrongApp,
            Self::NoDocument => Reason::NoDocument,
            Self::OtherNamespace => Reason::OtherNamespace,
            Self::KeysLost => Reason::KeysLost,
            Self::Gone => Reason::Gone,
            Self::OtherApp => Reason::OtherApp,
            Self::Keys(_) => Reason::Keys,
        }
    }
}

// === impl Reason ===

impl Reason {
    pub const ALL: [Self; 11] = [
        Self::NotText,
        Self::Malformed,
        Self::Format,
        Self::TooLarge,
        Self::WrongApp,
        Self::NoDocument,
        Self::OtherNamespace,
        Self::KeysLost,
        Self::Gone,
        Self::OtherApp,
        Self::Keys,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotText => "not_text",
            Self::Malformed => "malformed",
            Self::Format => "format",
            Self::TooLarge => "too_large",
            Self::WrongApp => "wrong_app",
            Self::NoDocument => "no_document",
            Self::OtherNamespace => "other_namespace",
            Self::KeysLost => "keys_lost",
            Self::Gone => "gone",
            Self::OtherApp => "other_app",
            Self::Keys => "keys",
        }
    }
}

// === impl Serving ===

impl Default for Serving {
    fn default() -> Self {
        Self { parts: vec![Arc::default(); PARTS], count: 0 }
    }
}

impl Serving {
    fn part(id: &str) -> usize {
        let mut hasher = DefaultHasher::new();
        id.hash(&mut hasher);
        // The remainder is less than PARTS, which fits.
        usize::try_from(hasher.finish() % PARTS as u64).unwrap_or(0)
    }

    fn get(&self, id: &str) -> Option<&Arc<App>> {
        self.parts[Self::part(id)].get(id)
    }

    fn iter(&self) -> impl Iterator<Item = (&AppId, &Arc<App>)> {
        self.parts.iter().flat_map(|part| part.iter())
    }

    /// Copies the part where others hold it too: once for a whole set of changes.
    fn insert(&mut self, id: &AppId, app: Arc<App>) {
        if Arc::make_mut(&mut self.parts[Self::part(id.as_str())]).insert(id.clone(), app).is_none() {
            self.count += 1;
        }
    }

    fn remove(&mut self, id: &AppId) -> Option<Arc<App>> {
        self.get(id.as_str())?;
        self.count -= 1;
        Arc::make_mut(&mut self.parts[Self::part(id.as_str())]).remove(id)
    }
}

// === impl Apps ===

impl Default for Apps {
    fn default() -> Self {
        Self::new(Ceilings::new())
    }
}

impl Apps {
    pub fn new(ceilings: Ceilings) -> Self {
        Self {
            ceilings,
            serving: ArcSwap::default(),
            aside: Mutex::default(),
            changes: broadcast::channel(BACKLOG).0,
            cache: None,
            texts: SharedTexts::default(),
            metrics: ConfigMetrics::default(),
        }
    }

    /// Keeps the last good documents there.
    pub fn kept_in(self, cache: Cache) -> Self {
        Self { cache: Some(cache), ..self }
    }

    pub fn measured_by(self, metrics: ConfigMetrics) -> Self {
        Self { metrics, ..self }
    }

    pub fn metrics(&self) -> &ConfigMetrics {
        &self.metrics
    }

    /// The App under this id, as of now.
    pub fn get(&self, id: &str) -> Option<Arc<App>> {
        self.serving.load().get(id).cloned()
    }

    pub fn len(&self) -> usize {
        self.serving.load().count
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every App being served.
    pub fn all(&self) -> Vec<Arc<App>> {
        self.serving.load().iter().map(|(_, app)| Arc::clone(app)).collect()
    }

    /// The ids of every App with a document, whether it is served or not.
    pub fn known(&self) -> HashSet<AppId> {
        let aside = self.aside();
        let serving = self.serving.load();
        let served = serving.iter().map(|(id, _)| id);
        served.chain(aside.refused.keys()).chain(aside.deleted.keys()).cloned().collect()
    }

    /// Every App whose users are to be deleted, or whose appID is to be freed.
    pub fn deleted(&self) -> Vec<Deleted> {
        self.aside().deleted.values().cloned().collect()
    }

    /// Whether this very document still says that the App's users are to be deleted, or its appID to be freed.
    pub fn is_deleted(&self, id: &AppId, revision: &Revision) -> bool {
        self.aside().deleted.get(id).is_some_and(|deleted| deleted.revision == *revision)
    }

    /// Every App that the database refused.
    pub fn withheld(&self) -> Vec<Arc<App>> {
        self.aside().refused.values().filter_map(|refusal| refusal.withheld.clone()).collect()
    }

    /// The changes from now on, for who needs no whole set.
    pub fn changes(&self) -> broadcast::Receiver<Change> {
        self.changes.subscribe()
    }

    /// The whole set of revisions and, from that very moment on, the changes.
    pub fn subscribe(&self, pod_uid: String) -> (Hello, broadcast::Receiver<Change>) {
        let aside = self.aside();
        let receiver = self.changes.subscribe();
        let mut revisions: BTreeMap<_, _> =
            self.serving.load().iter().map(|(id, app)| (id.clone(), app.revision.clone())).collect();
        revisions.extend(aside.deleted.iter().map(|(id, deleted)| (id.clone(), deleted.revision.clone())));
        let refused = aside.refused.iter().map(|(id, refusal)| (id.clone(), refusal.document.clone())).collect();
        let deletions =
            aside.deleted.iter().filter_map(|(id, deleted)| Some((id.clone(), deleted.progress?))).collect();
        (Hello { pod_uid, format: FORMAT, revisions, refused, deletions }, receiver)
    }

    /// Puts a document in place of the one before it, or refuses it whole and tells why.
    pub fn put(&self, id: &AppId, document: &[u8]) {
        self.metrics.heard();
        let revision = Revision::of(document);
        if self.settled(id, &revision) {
            return;
        }
        let read = self.read(id, document, revision);
        self.change(|aside, serving, told| self.apply(id, read, aside, serving, told));
    }

    /// Refuses what could not even be read as a document of this App.
    pub fn refuse(&self, id: &AppId, refused: Refused) {
        let revision = Revision::of(refused.to_string().as_bytes());
        if !self.settled(id, &revision) {
            self.change(|aside, serving, told| self.apply(id, Err((refused, revision)), aside, serving, told));
        }
    }

    /// Stops serving an App.
    pub fn remove(&self, id: &AppId) {
        self.metrics.heard();
        self.change(|aside, serving, told| self.take_away(id, aside, serving, told));
    }

    /// Begins a whole set of documents.
    pub fn whole(&self) -> Whole<'_> {
        Whole { apps: self, documents: Vec::new(), kept: HashSet::new() }
    }

    /// Starts from what was kept; whether that was a whole set.
    pub fn restore(&self) -> bool {
        let Some(cache) = self.cache.as_ref().filter(|cache| cache.is_complete()) else { return false };
        self.change(|aside, serving, told| {
            for (id, document) in cache.documents() {
                let revision = Revision::of(&document);
                let read = self.load(&id, &document, revision.clone()).map_err(|error| (error, revision));
                self.apply(&id, read, aside, serving, told);
            }
        });
        info!(apps = self.len(), "started from the documents that were kept");
        true
    }

    /// The database says whose the appID is, and it is not this App's: it is served no longer.
    pub fn withhold(&self, id: &AppId, revision: &Revision, refused: Refused) {
        self.change(|aside, serving, told| {
            if serving.get(id.as_str()).is_none_or(|app| app.revision != *revision) {
                return;
            }
            let withheld = serving.remove(id);
            if let Some(cache) = &self.cache {
                cache.forget(id);
            }
            self.set_aside(id, refused, revision.clone(), withheld, aside, serving, told);
        });
    }

    /// The database does not refuse it any more.
    pub fn admit(&self, id: &AppId, revision: &Revision) {
        self.change(|aside, serving, told| {
            let waiting = aside.refused.get(id).filter(|refusal| refusal.document.revision == *revision);
            if let Some(app) = waiting.and_then(|refusal| refusal.withheld.clone()) {
                self.serve(id, app, aside, serving, told);
            }
        });
    }

    /// The database refuses to delete the users, or to free the appID.
    pub fn refuse_deletion(&self, id: &AppId, revision: &Revision, refused: &Refused) {
        self.change(|aside, _, told| {
            let known = aside.refused.get(id).is_some_and(|known| known.document.revision == *revision);
            if known || aside.deleted.get(id).is_none_or(|deleted| deleted.revision != *revision) {
                return;
            }
            error!(app = %id, reason = %refused, "the users of an App are not deleted, nor its appID freed");
            self.metrics.refused(refused.reason());
            let document = refused.document(revision.clone());
            aside.refused.insert(id.clone(), Refusal { document: document.clone(), withheld: None });
            told.push(Change {
                app: id.clone(),
                revision: Some(revision.clone()),
                refused: Some(document),
                deletion: None,
            });
        });
    }

    /// How far the deletion of an App's users is, or whether its appID is free.
    pub fn progress(&self, id: &AppId, revision: &Revision, progress: Deletion) {
        self.change(|aside, _, told| {
            let Some(deleted) = aside.deleted.get_mut(id).filter(|deleted| deleted.revision == *revision) else {
                return;
            };
            let refused = aside.refused.remove(id).is_some();
            if deleted.progress != Some(progress) || refused {
                deleted.progress = Some(progress);
                told.push(deleted.change(id));
            }
        });
    }

    fn aside(&self) -> MutexGuard<'_, Aside> {
        self.aside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nothing is to be done about a document, since this very one was the last.
    fn settled(&self, id: &AppId, revision: &Revision) -> bool {
        let aside = self.aside();
        match aside.refused.get(id) {
            Some(refusal) => refusal.document.revision == *revision,
            None => match aside.deleted.get(id) {
                Some(deleted) => deleted.revision == *revision,
                None => self.serving.load().get(id.as_str()).is_some_and(|app| app.revision == *revision),
            },
        }
    }

    /// Reads a document, and keeps it where it is good.
    fn read(&self, id: &AppId, document: &[u8], revision: Revision) -> Read {
        let read = self.load(id, document, revision.clone()).map_err(|refused| (refused, revision.clone()))?;
        if let Some(cache) = &self.cache
            && self.strange(id, &read).is_none()
        {
            cache.keep(id, &revision, document);
        }
        Ok(read)
    }

    fn load(&self, id: &AppId, document: &[u8], revision: Revision) -> Result<Document, Refused> {
        if document.len() > latchkey_crds::rendered::MAX_DOCUMENT {
            return Err(Refused::TooLarge);
        }
        let text = std::str::from_utf8(document).map_err(|_| Refused::NotText)?;
        let malformed = |error: serde_json::Error| Refused::Malformed { line: error.line(), column: error.column() };
        // First, so that a later format is named as what it is.
        let head: Head = serde_json::from_str(text).map_err(malformed)?;
        if head.format == 0 {
            return Err(Refused::Format(head.format));
        }
        let of_this_app = |named: &AppId| if named == id { Ok(()) } else { Err(Refused::WrongApp) };
        match head.state {
            AppState::Deleted | AppState::Released => {
                let doc: DeletedApp = text.parse().map_err(malformed)?;
                of_this_app(&doc.app_id)?;
                Ok(Document::Deleted(Deleted { doc: Arc::new(doc), revision, progress: None }))
            }
            AppState::Serving => {
                let mut doc: RenderedApp = text.parse().map_err(malformed)?;
                of_this_app(&doc.app_id)?;
                for (limit, windows) in &self.ceilings {
                    lower(doc.limits.entry(*limit).or_insert_with(|| limit.default_windows()), windows);
                }
                for text in doc.mail.templates.values_mut() {
                    *text = self.texts.share(Arc::clone(text));
                }
                Ok(Document::App(Arc::new(App::new(doc, revision)?)))
            }
        }
    }

    /// Why a document is not of the App that is served: that is of another namespace or has other keys, and nothing
    /// says that they changed.
    fn strange(&self, id: &AppId, document: &Document) -> Option<Refused> {
        let (namespace, handover, incarnation) = match document {
            Document::App(app) => (&app.doc.namespace, app.doc.handover, app.doc.incarnation.as_ref()),
            // The database says whether it is of the users that are there.
            Document::Deleted(deleted) => (&deleted.doc.namespace, deleted.doc.handover, None),
        };
        let served = self.get(id.as_str()).filter(|app| app.doc.handover >= handover)?;
        if served.doc.namespace != *namespace {
            return Some(Refused::OtherNamespace);
        }
        let known = served.doc.incarnation.as_ref();
        known.zip(incarnation).is_some_and(|(known, other)| known != other).then_some(Refused::KeysLost)
    }

    fn apply(&self, id: &AppId, read: Read, aside: &mut Aside, serving: &mut Serving, told: &mut Vec<Change>) {
        match read.map(|document| (self.strange(id, &document), document)) {
            Ok((Some(refused), document)) => {
                let (revision, withheld) = match document {
                    Document::App(app) => (app.revision.clone(), Some(app)),
                    Document::Deleted(deleted) => (deleted.revision, None),
                };
                self.set_aside(id, refused, revision, withheld, aside, serving, told);
            }
            Ok((None, Document::App(app))) => self.serve(id, app, aside, serving, told),
            Ok((None, Document::Deleted(deleted))) => {
                let state = deleted.doc.state;
                info!(app = %id, revision = %deleted.revision, ?state, "no longer serving: the document says so");
                serving.remove(id);
                aside.refused.remove(id);
                told.push(deleted.change(id));
                aside.deleted.insert(id.clone(), deleted);
            }
            Err((refused, revision)) => self.set_aside(id, refused, revision, None, aside, serving, told),
        }
    }

    fn serve(&self, id: &AppId, app: Arc<App>, aside: &mut Aside, serving: &mut Serving, told: &mut Vec<Change>) {
        info!(app = %id, revision = %app.revision, "serving");
        aside.refused.remove(id);
        aside.deleted.remove(id);
        told.push(Change { app: id.clone(), revision: Some(app.revision.clone()), refused: None, deletion: None });
        serving.insert(id, app);
    }

    #[expect(clippy::too_many_arguments, reason = "the last three are the set that is being changed")]
    fn set_aside(
        &self,
        id: &AppId,
        refused: Refused,
        revision: Revision,
        withheld: Option<Arc<App>>,
        aside: &mut Aside,
        serving: &mut Serving,
        told: &mut Vec<Change>,
    ) {
        let deleted = aside.deleted.get(id);
        let goes_on = serving.get(id.as_str()).map(|app| &app.revision).or(deleted.map(|deleted| &deleted.revision));
        error!(
            app = %id,
            serving = goes_on.map(Revision::as_str),
            error = &refused as &dyn std::error::Error,
            "a rendered App is refused; what was served before goes on"
        );
        self.metrics.refused(refused.reason());
        let document = refused.document(revision);
        told.push(Change {
            app: id.clone(),
            revision: goes_on.cloned(),
            refused: Some(document.clone()),
            deletion: deleted.and_then(|deleted| deleted.progress),
        });
        aside.refused.insert(id.clone(), Refusal { document, withheld });
    }

    fn take_away(&self, id: &AppId, aside: &mut Aside, serving: &mut Serving, told: &mut Vec<Change>) {
        let served = serving.remove(id).is_some();
        let deleted = aside.deleted.remove(id).is_some();
        let refused = aside.refused.remove(id).is_some();
        if let Some(cache) = &self.cache {
            cache.forget(id);
        }
        if served || deleted || refused {
            info!(app = %id, "no longer serving");
            told.push(Change { app: id.clone(), revision: None, refused: None, deletion: None });
        }
    }

    /// Changes the set in one step, and tells what came of it.
    fn change(&self, edit: impl FnOnce(&mut Aside, &mut Serving, &mut Vec<Change>)) {
        let mut aside = self.aside();
        let mut serving = Serving::clone(&self.serving.load());
        let mut told = Vec::new();
        edit(&mut aside, &mut serving, &mut told);
        self.metrics.apps(serving.count);
        self.serving.store(Arc::new(serving));
        for change in told {
            // No listener is not an error.
            let _ = self.changes.send(change);
        }
    }
}

// === impl Whole ===

impl Whole<'_> {
    /// Takes a document in. It is read at once, and only what came of it is held.
    pub fn put(&mut self, id: &AppId, document: &[u8]) {
        let revision = Revision::of(document);
        if self.apps.settled(id, &revision) {
            self.kept.insert(id.clone());
        } else {
            self.documents.push((id.clone(), self.apps.read(id, document, revision)));
        }
    }

    /// Takes note of an App whose document cannot be had: what was served goes on.
    pub fn refuse(&mut self, id: &AppId, refused: Refused) {
        let revision = Revision::of(refused.to_string().as_bytes());
        if self.apps.settled(id, &revision) {
            self.kept.insert(id.clone());
        } else {
            self.documents.push((id.clone(), Err((refused, revision))));
        }
    }

    /// Leaves an App as it is.
    pub fn keep(&mut self, id: &AppId) {
        self.kept.insert(id.clone());
    }

    /// Serves this set and nothing else.
    pub fn commit(self) {
        let Self { apps, documents, mut kept } = self;
        kept.extend(documents.iter().map(|(id, _)| id.clone()));
        let gone: Vec<_> = apps.known().into_iter().filter(|id| !kept.contains(id)).collect();
        apps.change(|aside, serving, told| {
            for id in &gone {
                apps.take_away(id, aside, serving, told);
            }
            for (id, read) in documents {
                apps.apply(&id, read, aside, serving, told);
            }
        });
        if let Some(cache) = &apps.cache {
            cache.complete(|id| kept.contains(id));
        }
        apps.metrics.listed();
        info!(apps = apps.len(), gone = gone.len(), "the whole set of documents was read");
    }
}

// === impl Deleted ===

impl Deleted {
    fn change(&self, id: &AppId) -> Change {
        Change { app: id.clone(), revision: Some(self.revision.clone()), refused: None, deletion: self.progress }
    }
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
            let refused = told.refused.unwrap();
            assert_eq!(refused.revision, Revision::of(bad), "the document that is refused is named");
            assert!(!refused.reason.contains("PRIVATE"));
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
    fn a_text_that_700_apps_have_is_held_once_and_freed_with_the_last_of_them() {
        const APPS: usize = 700;
        let apps = Apps::default();
        let text = "x".repeat(250 * 1024);
        let document = |number: usize| {
            let mut doc = fixtures::rendered(&format!("app{number}"));
            doc.mail.templates = BTreeMap::from([("confirm.txt".to_owned(), Arc::new(text.clone()))]);
            doc.to_bytes()
        };
        let put = |number: usize| apps.put(&format!("app{number}").parse().unwrap(), &document(number));
        (0..APPS / 2).for_each(put);
        let mut whole = apps.whole();
        for number in 0..APPS {
            whole.put(&format!("app{number}").parse().unwrap(), &document(number));
        }
        whole.commit();
        let held = |app: &Arc<App>| Arc::clone(&app.doc.mail.templates["confirm.txt"]);
        let first = held(&apps.get("app0").unwrap());
        assert_eq!(*first, text);
        assert_eq!(apps.len(), APPS);
        assert!(apps.all().iter().all(|app| Arc::ptr_eq(&held(app), &first)), "a copy for each App");
        let text = Arc::downgrade(&first);
        drop(first);
        for number in 1..APPS {
            apps.remove(&format!("app{number}").parse().unwrap());
        }
        assert_eq!(text.strong_count(), 1);
        apps.put(&"app0".parse().unwrap(), &fixtures::rendered("app0").to_bytes());
        assert_eq!(text.strong_count(), 0);
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

    fn deleted(id: &str) -> DeletedApp {
        DeletedApp {
            format: FORMAT,
            app_id: id.parse().unwrap(),
            namespace: "shop".to_owned(),
            name: id.to_owned(),
            state: AppState::Deleted,
            incarnation: Some("i1".to_owned()),
            handover: None,
        }
    }

    #[test]
    fn a_deleted_app_is_not_served_and_told_with_the_revision_of_its_document() {
        let apps = Apps::default();
        apps.put(&id(), &fixtures::rendered("shop").to_bytes());
        let (_, mut changes) = apps.subscribe(String::new());
        let bytes = deleted("shop").to_bytes();
        let revision = Revision::of(&bytes);
        apps.put(&id(), &bytes);
        assert!(apps.get("shop").is_none());
        let told = changes.try_recv().unwrap();
        assert_eq!((told.revision.as_ref(), told.deletion, told.refused), (Some(&revision), None, None));

        let progress = Deletion { users_left: 3, done: false };
        apps.progress(&id(), &revision, progress);
        apps.progress(&id(), &revision, progress);
        assert_eq!(changes.try_recv().unwrap().deletion, Some(progress));
        assert!(changes.try_recv().is_err(), "the same progress is no news");
        apps.progress(&id(), &Revision::of(b"another"), Deletion { users_left: 0, done: true });
        assert!(changes.try_recv().is_err(), "of a document that is not there any more nothing is told");

        let (hello, _) = apps.subscribe(String::new());
        assert_eq!(hello.revisions.get(&id()), Some(&revision));
        assert_eq!(hello.deletions.get(&id()), Some(&progress));
        apps.put(&id(), &fixtures::rendered("shop").to_bytes());
        assert!(apps.get("shop").is_some() && apps.deleted().is_empty(), "taken back");
        assert!(changes.try_recv().unwrap().deletion.is_none());
    }

    #[test]
    fn a_refusal_is_told_to_who_comes_later_until_it_is_mended() {
        let apps = Apps::default();
        let good = fixtures::rendered("shop").to_bytes();
        apps.put(&id(), &good);
        apps.put(&id(), b"{");
        let (hello, mut changes) = apps.subscribe(String::new());
        assert_eq!(hello.revisions.get(&id()), Some(&Revision::of(&good)));
        assert!(hello.refused.contains_key(&id()));
        apps.put(&id(), b"{");
        assert!(changes.try_recv().is_err(), "the same document is refused once");
        apps.put(&id(), &good);
        let told = changes.try_recv().unwrap();
        assert_eq!((told.revision, told.refused), (Some(Revision::of(&good)), None));
        assert!(apps.subscribe(String::new()).0.refused.is_empty());
    }

    #[test]
    fn a_stray_document_of_another_namespace_does_not_replace_the_holders() {
        let apps = Apps::default();
        apps.put(&id(), &fixtures::rendered("shop").to_bytes());
        let mut stray = fixtures::rendered("shop");
        stray.namespace = "thief".to_owned();
        apps.put(&id(), &stray.to_bytes());
        assert_eq!(apps.get("shop").unwrap().doc.namespace, "shop");
        assert!(apps.subscribe(String::new()).0.refused.contains_key(&id()));
        stray.handover = Some(1);
        apps.put(&id(), &stray.to_bytes());
        assert_eq!(apps.get("shop").unwrap().doc.namespace, "thief");
    }

    #[test]
    fn other_keys_do_not_replace_those_of_the_app_that_is_served() {
        let apps = Apps::default();
        let mut doc = fixtures::rendered("shop");
        doc.incarnation = Some("i1".to_owned());
        apps.put(&id(), &doc.to_bytes());
        let first = Revision::of(&doc.to_bytes());
        doc.incarnation = Some("i2".to_owned());
        let mut changes = apps.changes();
        apps.put(&id(), &doc.to_bytes());
        let told = changes.try_recv().unwrap();
        assert!(told.refused.is_some_and(|refused| refused.keys_lost) && told.revision == Some(first));
        assert!(apps.subscribe(String::new()).0.refused[&id()].keys_lost);
        // The database may know better: no user is there.
        apps.admit(&id(), &Revision::of(&doc.to_bytes()));
        assert_eq!(changes.try_recv().unwrap().refused, None);
        doc.incarnation = Some("i3".to_owned());
        doc.handover = Some(1);
        apps.put(&id(), &doc.to_bytes());
        assert_eq!(changes.try_recv().unwrap().revision, Some(Revision::of(&doc.to_bytes())), "they are to be new");
    }

    #[test]
    fn what_the_database_refuses_is_served_when_it_does_not_any_more() {
        let apps = Apps::default();
        apps.put(&id(), &fixtures::rendered("shop").to_bytes());
        let revision = apps.get("shop").unwrap().revision.clone();
        let (_, mut changes) = apps.subscribe(String::new());
        apps.withhold(&id(), &Revision::of(b"another"), Refused::OtherNamespace);
        assert!(changes.try_recv().is_err() && apps.get("shop").is_some());
        apps.withhold(&id(), &revision, Refused::OtherNamespace);
        let told = changes.try_recv().unwrap();
        assert!(told.revision.is_none() && told.refused.is_some() && apps.get("shop").is_none());
        assert_eq!(apps.withheld().len(), 1);
        apps.admit(&id(), &revision);
        assert_eq!(changes.try_recv().unwrap().revision, Some(revision));
        assert!(apps.get("shop").is_some() && apps.withheld().is_empty());
    }

    #[test]
    fn a_whole_set_takes_the_place_of_what_was_served() {
        let apps = Apps::default();
        let document = |id: &str| fixtures::rendered(id).to_bytes();
        for id in ["stays", "goes", "kept"] {
            apps.put(&id.parse().unwrap(), &document(id));
        }
        let mut whole = apps.whole();
        whole.put(&"stays".parse().unwrap(), &document("stays"));
        whole.put(&"comes".parse().unwrap(), &document("comes"));
        whole.keep(&"kept".parse().unwrap());
        assert!(apps.get("comes").is_none() && apps.get("goes").is_some(), "nothing changes before the end");
        whole.commit();
        let mut ids: Vec<_> = apps.all().iter().map(|app| app.id().to_string()).collect();
        ids.sort();
        assert_eq!(ids, ["comes", "kept", "stays"]);
        assert_eq!(apps.len(), 3);
    }

    #[test]
    fn what_was_kept_is_served_again_and_what_was_taken_away_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let cached = || Apps::default().kept_in(Cache::open(folder.path().to_owned()).unwrap());
        let document = |id: &str| fixtures::rendered(id).to_bytes();
        let apps = cached();
        assert!(!apps.restore());
        apps.put(&"early".parse().unwrap(), &document("early"));
        assert!(!cached().restore(), "a set that is not whole is none");
        let mut whole = apps.whole();
        for id in ["shop", "other", "third"] {
            whole.put(&id.parse().unwrap(), &document(id));
        }
        whole.commit();
        apps.put(&"shop".parse().unwrap(), b"{");
        apps.remove(&"other".parse().unwrap());
        let again = cached();
        assert!(again.restore());
        assert!(again.get("shop").is_some(), "the last good one");
        assert!(again.get("other").is_none() && again.get("early").is_none() && again.len() == 2);
    }

    #[test]
    fn a_change_among_many_apps_costs_little_more_than_among_few() {
        let served = fixtures::app(fixtures::rendered("shop"));
        let served = Arc::new(served);
        let filled = |count: usize| {
            let apps = Apps::default();
            apps.change(|_, serving, _| {
                for number in 0..count {
                    serving.insert(&format!("app{number}").parse().unwrap(), Arc::clone(&served));
                }
            });
            apps
        };
        let (few, many) = (filled(100), filled(10_000));
        // The least of several rounds, by turns: what else the machine does disturbs some of them only.
        let round = |apps: &Apps| {
            let begun = std::time::Instant::now();
            for number in 0..200 {
                let id: AppId = format!("app{number}").parse().unwrap();
                apps.change(|_, serving, _| serving.insert(&id, Arc::clone(&served)));
            }
            begun.elapsed()
        };
        let (mut of_few, mut of_many) = (Duration::MAX, Duration::MAX);
        for _ in 0..10 {
            of_few = of_few.min(round(&few));
            of_many = of_many.min(round(&many));
        }
        // A hundred times as many Apps; a copy of the whole set costs about as many times.
        assert!(of_many < of_few * 20, "{of_many:?} among 10,000, {of_few:?} among 100");
        assert_eq!(many.len(), 10_000);
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
