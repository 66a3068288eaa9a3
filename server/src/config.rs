//! The rendered Apps that the server serves: its configuration. An App is replaced in one step, and each change is sent
//! to the subscribers.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use arc_swap::ArcSwap;
use latchkey_crds::{
    rendered::{
        AppState, DeletedApp, DeletionProgress, DocumentHeader, FORMAT, Hello, RejectedDocument, RenderedApp, Revision,
        RevisionChange, WebhookReport, Window,
    },
    types::{AppId, HostName, WebhookName},
    webhook::WebhookState,
};
use parking_lot::Mutex;
use tokio::sync::broadcast;
use tracing::{error, info};

use crate::domain::{
    app::{App, LoadError},
    rate_limits::Limit,
};

pub mod cache;
pub mod directory;
pub mod kubernetes;
pub mod metrics;
mod texts;

use cache::Cache;
use metrics::ConfigMetrics;
use texts::SharedTexts;

/// How many changes can wait for a slow subscriber. If more changes wait, the subscriber loses some of them, and must
/// start again from the full set.
const BACKLOG: usize = 1024;

/// The number of parts of [`ServedApps`]. A change to an App copies only one part and the list of parts: with 10,000
/// Apps, about 40 entries and 256 pointers.
const PARTS: usize = 256;

/// The rate limits of the installation, which no App can exceed. They apply in addition to the App's own rate limits
/// (specification: Limits, Rate limits).
pub type Ceilings = BTreeMap<Limit, Vec<Window>>;

/// The Apps being served, by appID. Readers never block.
pub struct Apps {
    ceilings: Ceilings,
    serving: ArcSwap<ServedApps>,
    /// Locked while the set of Apps changes, so that subscribers see changes in order.
    unserved: Mutex<Unserved>,
    changes: broadcast::Sender<RevisionChange>,
    cache: Option<Cache>,
    /// The email templates of all documents.
    texts: SharedTexts,
    metrics: ConfigMetrics,
}

/// The Apps being served, divided into parts by the hash of the appID.
#[derive(Clone)]
struct ServedApps {
    parts: Vec<Arc<HashMap<AppId, Arc<App>>>>,
    count: usize,
    /// How many of the Apps have pages.
    with_pages: usize,
    /// For each own host of pages: the Apps that have this host. The host belongs to the App with the smallest appID.
    pages_hosts: Arc<HashMap<HostName, BTreeSet<AppId>>>,
}

/// What is reported to the operator besides the served revisions: rejected documents, pending deletions, and the states
/// of the webhooks of served Apps.
#[derive(Default)]
struct Unserved {
    rejected: BTreeMap<AppId, Rejection>,
    pending_deletions: BTreeMap<AppId, PendingDeletion>,
    /// The last report on the webhooks of each served App.
    webhooks: BTreeMap<AppId, WebhookReport>,
}

/// The rejection of the newest document of an App.
struct Rejection {
    document: RejectedDocument,
    /// The App in the document, if the document is valid but conflicts with the owner or the keys of the appID. The
    /// database can accept this App later, for example after the users of an earlier App were deleted.
    suspended: Option<Arc<App>>,
}

/// An App in state `Deleted` (its users must be deleted) or `Released` (its appID must be freed if it has no users).
#[derive(Clone, Debug)]
pub struct PendingDeletion {
    pub doc: Arc<DeletedApp>,
    pub revision: Revision,
    /// The progress of the deletion. `None`: the server has not checked the database yet.
    pub progress: Option<DeletionProgress>,
}

/// The content of a valid document.
enum ParsedDocument {
    App(Arc<App>),
    Deleted(PendingDeletion),
}

/// The result of parsing a document. A rejected document has a revision, too.
type ParseResult = Result<ParsedDocument, (RejectError, Revision)>;

/// A full set of documents, collected one by one and put into service in one step ([`FullSync::commit`]). Apps that are
/// not in the set are no longer served after this step.
pub struct FullSync<'a> {
    apps: &'a Apps,
    documents: Vec<(AppId, ParseResult)>,
    unchanged: HashSet<AppId>,
}

/// Why a document is rejected. The messages contain no secret of the document.
#[derive(Debug, thiserror::Error)]
pub enum RejectError {
    #[error("the document is not UTF-8")]
    NotUtf8,
    /// Contains only the position, because the error text of serde could quote a secret.
    #[error("the document does not parse at line {line}, column {column}")]
    Malformed { line: usize, column: usize },
    #[error("the document names format {0}; formats start at 1")]
    Format(u32),
    #[error("the document is larger than a rendered App can be")]
    TooLarge,
    #[error("the document is for another App than the name of its file or Secret")]
    WrongApp,
    #[error("the Secret has no {}", latchkey_crds::names::RENDERED_APP_KEY)]
    NoDocument,
    #[error("the appID belongs to another namespace")]
    OtherNamespace,
    #[error("the App has users with other keys, and these keys were lost")]
    KeysLost,
    #[error("the users of this App were deleted; a new App needs new keys")]
    UsersDeleted,
    #[error("the users in the database belong to another App with this appID and are not deleted")]
    OtherApp,
    #[error(transparent)]
    Load(#[from] LoadError),
}

/// The reason for a rejection, as a label in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RejectReason {
    NotUtf8,
    Malformed,
    Format,
    TooLarge,
    WrongApp,
    NoDocument,
    OtherNamespace,
    KeysLost,
    UsersDeleted,
    OtherApp,
    Keys,
}

// === impl RejectError ===

impl RejectError {
    /// Converts the error to the report that the operator gets.
    fn to_report(&self, revision: Revision) -> RejectedDocument {
        RejectedDocument { revision, reason: self.to_string(), keys_lost: matches!(self, Self::KeysLost) }
    }

    const fn reason(&self) -> RejectReason {
        match self {
            Self::NotUtf8 => RejectReason::NotUtf8,
            Self::Malformed { .. } => RejectReason::Malformed,
            Self::Format(_) => RejectReason::Format,
            Self::TooLarge => RejectReason::TooLarge,
            Self::WrongApp => RejectReason::WrongApp,
            Self::NoDocument => RejectReason::NoDocument,
            Self::OtherNamespace => RejectReason::OtherNamespace,
            Self::KeysLost => RejectReason::KeysLost,
            Self::UsersDeleted => RejectReason::UsersDeleted,
            Self::OtherApp => RejectReason::OtherApp,
            Self::Load(_) => RejectReason::Keys,
        }
    }
}

// === impl RejectReason ===

impl RejectReason {
    pub const ALL: [Self; 11] = [
        Self::NotUtf8,
        Self::Malformed,
        Self::Format,
        Self::TooLarge,
        Self::WrongApp,
        Self::NoDocument,
        Self::OtherNamespace,
        Self::KeysLost,
        Self::UsersDeleted,
        Self::OtherApp,
        Self::Keys,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotUtf8 => "not_text",
            Self::Malformed => "malformed",
            Self::Format => "format",
            Self::TooLarge => "too_large",
            Self::WrongApp => "wrong_app",
            Self::NoDocument => "no_document",
            Self::OtherNamespace => "other_namespace",
            Self::KeysLost => "keys_lost",
            Self::UsersDeleted => "gone",
            Self::OtherApp => "other_app",
            Self::Keys => "keys",
        }
    }
}

// === impl ServedApps ===

impl Default for ServedApps {
    fn default() -> Self {
        Self { parts: vec![Arc::default(); PARTS], count: 0, with_pages: 0, pages_hosts: Arc::default() }
    }
}

impl ServedApps {
    fn part_index(id: &str) -> usize {
        let mut hasher = DefaultHasher::new();
        id.hash(&mut hasher);
        // The remainder is less than `PARTS`, so the conversion never fails.
        usize::try_from(hasher.finish() % PARTS as u64).unwrap_or(0)
    }

    fn get(&self, id: &str) -> Option<&Arc<App>> {
        self.parts[Self::part_index(id)].get(id)
    }

    fn iter(&self) -> impl Iterator<Item = (&AppId, &Arc<App>)> {
        self.parts.iter().flat_map(|part| part.iter())
    }

    fn by_pages_host(&self, host: &str) -> Option<&Arc<App>> {
        self.get(self.pages_hosts.get(host)?.first()?.as_str())
    }

    /// Adds or replaces an App. If readers still share the part that contains the App, first copies this part. This
    /// happens at most once per part in one [`Apps::update`].
    fn insert(&mut self, id: &AppId, app: Arc<App>) {
        let host = app.pages_host().cloned();
        self.with_pages += usize::from(app.pages.is_some());
        let before = Arc::make_mut(&mut self.parts[Self::part_index(id.as_str())]).insert(id.clone(), app);
        self.count += usize::from(before.is_none());
        self.with_pages -= usize::from(before.as_ref().is_some_and(|before| before.pages.is_some()));
        self.replace_pages_host(id, before.and_then(|before| before.pages_host().cloned()), host);
    }

    fn remove(&mut self, id: &AppId) -> Option<Arc<App>> {
        self.get(id.as_str())?;
        self.count -= 1;
        let removed = Arc::make_mut(&mut self.parts[Self::part_index(id.as_str())]).remove(id);
        self.with_pages -= usize::from(removed.as_ref().is_some_and(|removed| removed.pages.is_some()));
        self.replace_pages_host(id, removed.as_ref().and_then(|app| app.pages_host().cloned()), None);
        removed
    }

    /// Updates `pages_hosts` for this App. Copies the map only if the host has changed, which is rare.
    fn replace_pages_host(&mut self, id: &AppId, before: Option<HostName>, now: Option<HostName>) {
        if before == now {
            return;
        }
        let hosts = Arc::make_mut(&mut self.pages_hosts);
        if let Some(host) = before
            && let Some(apps) = hosts.get_mut(&host)
        {
            apps.remove(id);
            if apps.is_empty() {
                hosts.remove(&host);
            }
        }
        if let Some(host) = now {
            hosts.entry(host).or_default().insert(id.clone());
        }
    }
}

// === impl Unserved ===

impl Unserved {
    /// Returns the stored report on the webhooks of an App, after removing webhooks that the App no longer has. The
    /// report of an App that is not served is empty.
    fn webhook_report(&mut self, id: &AppId, app: Option<&App>) -> WebhookReport {
        let Some(report) = self.webhooks.get_mut(id) else { return WebhookReport::new() };
        report.retain(|name, _| app.is_some_and(|app| app.webhook(name.as_str()).is_some()));
        let report = report.clone();
        if report.is_empty() {
            self.webhooks.remove(id);
        }
        report
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
            unserved: Mutex::default(),
            changes: broadcast::channel(BACKLOG).0,
            cache: None,
            texts: SharedTexts::default(),
            metrics: ConfigMetrics::default(),
        }
    }

    /// Returns these Apps with a cache, in which the last valid documents are stored.
    pub fn with_cache(self, cache: Cache) -> Self {
        Self { cache: Some(cache), ..self }
    }

    pub fn with_metrics(self, metrics: ConfigMetrics) -> Self {
        Self { metrics, ..self }
    }

    pub fn metrics(&self) -> &ConfigMetrics {
        &self.metrics
    }

    /// Returns the App with this appID, if it is served.
    pub fn get(&self, id: &str) -> Option<Arc<App>> {
        self.serving.load().get(id).cloned()
    }

    /// Whether any served App has pages.
    pub fn has_pages(&self) -> bool {
        self.serving.load().with_pages > 0
    }

    /// Returns the App that has this own host for its pages. The host must be in lower case and without a port
    /// (specification: Hosted pages, Own host).
    pub fn get_by_pages_host(&self, host: &str) -> Option<Arc<App>> {
        self.serving.load().by_pages_host(host).cloned()
    }

    /// Returns the App's own host for its pages, or `None` if it has none or if an App with a smaller appID has the
    /// same host.
    pub fn held_pages_host<'a>(&self, app: &'a App) -> Option<&'a HostName> {
        let host = app.pages_host()?;
        let holder = self.get_by_pages_host(host.as_str())?;
        (holder.id() == app.id()).then_some(host)
    }

    pub fn len(&self) -> usize {
        self.serving.load().count
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns every App being served.
    pub fn all(&self) -> Vec<Arc<App>> {
        self.serving.load().iter().map(|(_, app)| Arc::clone(app)).collect()
    }

    /// Returns the appIDs of all Apps with a document, served or not.
    pub fn known_ids(&self) -> HashSet<AppId> {
        let unserved = self.unserved.lock();
        let serving = self.serving.load();
        let served = serving.iter().map(|(id, _)| id);
        served.chain(unserved.rejected.keys()).chain(unserved.pending_deletions.keys()).cloned().collect()
    }

    /// Returns all Apps in state `Deleted` or `Released`.
    pub fn pending_deletions(&self) -> Vec<PendingDeletion> {
        self.unserved.lock().pending_deletions.values().cloned().collect()
    }

    /// Whether the current document of the App has this revision and the state `Deleted` or `Released`.
    pub fn is_pending_deletion(&self, id: &AppId, revision: &Revision) -> bool {
        self.unserved.lock().pending_deletions.get(id).is_some_and(|deleted| deleted.revision == *revision)
    }

    /// Returns all Apps with a valid document that conflicts with the owner or the keys of the appID.
    pub fn suspended(&self) -> Vec<Arc<App>> {
        self.unserved.lock().rejected.values().filter_map(|rejection| rejection.suspended.clone()).collect()
    }

    /// Subscribes to all later changes, without getting the full set of revisions first.
    pub fn subscribe_changes(&self) -> broadcast::Receiver<RevisionChange> {
        self.changes.subscribe()
    }

    /// Returns the full set of revisions, and a subscription to all later changes.
    pub fn subscribe(&self, pod_uid: String) -> (Hello, broadcast::Receiver<RevisionChange>) {
        let unserved = self.unserved.lock();
        let receiver = self.changes.subscribe();
        let mut revisions: BTreeMap<_, _> =
            self.serving.load().iter().map(|(id, app)| (id.clone(), app.revision.clone())).collect();
        revisions.extend(unserved.pending_deletions.iter().map(|(id, deleted)| (id.clone(), deleted.revision.clone())));
        let refused =
            unserved.rejected.iter().map(|(id, rejection)| (id.clone(), rejection.document.clone())).collect();
        let deletions = unserved
            .pending_deletions
            .iter()
            .filter_map(|(id, deleted)| Some((id.clone(), deleted.progress?)))
            .collect();
        let webhooks = unserved.webhooks.clone();
        (Hello { pod_uid, format: FORMAT, revisions, refused, deletions, webhooks }, receiver)
    }

    /// Applies a new document of the App. A document that cannot be served is rejected as a whole, and the reason is
    /// reported.
    pub fn put(&self, id: &AppId, document: &[u8]) {
        self.metrics.record_event();
        let revision = Revision::of(document);
        if self.is_current(id, &revision) {
            return;
        }
        let parsed = self.parse_and_cache(id, document, revision);
        self.update(|unserved, serving, changes| self.apply(id, parsed, unserved, serving, changes));
    }

    /// Rejects a document of this App that could not be read.
    pub fn reject_unreadable(&self, id: &AppId, error: RejectError) {
        let revision = Revision::of(error.to_string().as_bytes());
        if !self.is_current(id, &revision) {
            self.update(|unserved, serving, changes| {
                self.apply(id, Err((error, revision)), unserved, serving, changes)
            });
        }
    }

    /// Stops serving an App after its document was removed.
    pub fn remove(&self, id: &AppId) {
        self.metrics.record_event();
        self.update(|unserved, serving, changes| self.stop_serving(id, unserved, serving, changes));
    }

    /// Starts the collection of a full set of documents.
    pub fn start_full_sync(&self) -> FullSync<'_> {
        FullSync { apps: self, documents: Vec::new(), unchanged: HashSet::new() }
    }

    /// Serves the cached documents. Returns false, and serves nothing, if the cache has no complete set.
    pub fn restore_from_cache(&self) -> bool {
        let Some(cache) = self.cache.as_ref().filter(|cache| cache.is_complete()) else { return false };
        self.update(|unserved, serving, changes| {
            for (id, document) in cache.documents() {
                let revision = Revision::of(&document);
                let parsed = self.parse(&id, &document, revision.clone()).map_err(|error| (error, revision));
                self.apply(&id, parsed, unserved, serving, changes);
            }
        });
        info!(apps = self.len(), "serving the cached documents");
        true
    }

    /// Stops serving an App that, according to the database, does not own the appID.
    pub fn suspend(&self, id: &AppId, revision: &Revision, error: RejectError) {
        self.update(|unserved, serving, changes| {
            if serving.get(id.as_str()).is_none_or(|app| app.revision != *revision) {
                return;
            }
            let suspended = serving.remove(id);
            if let Some(cache) = &self.cache {
                cache.remove(id);
            }
            self.reject(id, error, revision.clone(), suspended, unserved, serving, changes);
        });
    }

    /// Serves an App that was suspended (`Rejection::suspended`) and that the database now accepts.
    pub fn resume(&self, id: &AppId, revision: &Revision) {
        self.update(|unserved, serving, changes| {
            let rejection = unserved.rejected.get(id).filter(|rejection| rejection.document.revision == *revision);
            if let Some(app) = rejection.and_then(|rejection| rejection.suspended.clone()) {
                self.serve(id, app, unserved, serving, changes);
            }
        });
    }

    /// Reports that the database rejects the deletion of the users or the release of the appID.
    pub fn reject_deletion(&self, id: &AppId, revision: &Revision, error: &RejectError) {
        self.update(|unserved, _, changes| {
            let is_known = unserved.rejected.get(id).is_some_and(|rejection| rejection.document.revision == *revision);
            if is_known || unserved.pending_deletions.get(id).is_none_or(|deleted| deleted.revision != *revision) {
                return;
            }
            error!(app = %id, reason = %error, "the users of an App are not deleted and its appID is not freed");
            self.metrics.count_rejected(error.reason());
            let document = error.to_report(revision.clone());
            unserved.rejected.insert(id.clone(), Rejection { document: document.clone(), suspended: None });
            changes.push(RevisionChange {
                app: id.clone(),
                revision: Some(revision.clone()),
                refused: Some(document),
                deletion: None,
                webhooks: WebhookReport::new(),
            });
        });
    }

    /// Reports the progress of the deletion of an App's users, or that its appID is free.
    pub fn report_progress(&self, id: &AppId, revision: &Revision, progress: DeletionProgress) {
        self.update(|unserved, _, changes| {
            let Some(deleted) = unserved.pending_deletions.get_mut(id).filter(|deleted| deleted.revision == *revision)
            else {
                return;
            };
            let was_rejected = unserved.rejected.remove(id).is_some();
            if deleted.progress != Some(progress) || was_rejected {
                deleted.progress = Some(progress);
                changes.push(deleted.to_change(id));
            }
        });
    }

    /// Reports the state of the App's webhooks. A webhook that is not in `states` counts as not checked. Does nothing
    /// if the App is not served.
    pub fn report_webhooks(&self, id: &AppId, states: &BTreeMap<WebhookName, WebhookState>) {
        self.update(|unserved, serving, changes| {
            let Some(app) = serving.get(id.as_str()) else { return };
            let before = unserved.webhooks.get(id).cloned().unwrap_or_default();
            let report = states.iter().map(|(name, state)| (name.clone(), state.reason().as_str().to_owned()));
            unserved.webhooks.insert(id.clone(), report.collect());
            if unserved.webhook_report(id, Some(app.as_ref())) != before {
                changes.push(RevisionChange {
                    app: id.clone(),
                    revision: Some(app.revision.clone()),
                    refused: unserved.rejected.get(id).map(|rejection| rejection.document.clone()),
                    deletion: None,
                    webhooks: WebhookReport::new(),
                });
            }
        });
    }

    /// Whether the newest document of the App already has this revision. If so, there is nothing to change.
    fn is_current(&self, id: &AppId, revision: &Revision) -> bool {
        let unserved = self.unserved.lock();
        match unserved.rejected.get(id) {
            Some(rejection) => rejection.document.revision == *revision,
            None => match unserved.pending_deletions.get(id) {
                Some(deleted) => deleted.revision == *revision,
                None => self.serving.load().get(id.as_str()).is_some_and(|app| app.revision == *revision),
            },
        }
    }

    /// Parses a document, and caches it if it is valid and does not conflict with the served App.
    fn parse_and_cache(&self, id: &AppId, document: &[u8], revision: Revision) -> ParseResult {
        let parsed = self.parse(id, document, revision.clone()).map_err(|error| (error, revision.clone()))?;
        if let Some(cache) = &self.cache
            && self.conflict(id, &parsed).is_none()
        {
            cache.store(id, &revision, document);
        }
        Ok(parsed)
    }

    fn parse(&self, id: &AppId, document: &[u8], revision: Revision) -> Result<ParsedDocument, RejectError> {
        if document.len() > latchkey_crds::rendered::MAX_DOCUMENT_SIZE {
            return Err(RejectError::TooLarge);
        }
        let text = std::str::from_utf8(document).map_err(|_| RejectError::NotUtf8)?;
        let malformed =
            |error: serde_json::Error| RejectError::Malformed { line: error.line(), column: error.column() };
        // The header, which contains the number of the format, is parsed first, so that an invalid number is not
        // reported as a malformed document.
        let header: DocumentHeader = serde_json::from_str(text).map_err(malformed)?;
        if header.format == 0 {
            return Err(RejectError::Format(header.format));
        }
        let check_app_id = |named: &AppId| if named == id { Ok(()) } else { Err(RejectError::WrongApp) };
        match header.state {
            AppState::Deleted | AppState::Released => {
                let doc: DeletedApp = text.parse().map_err(malformed)?;
                check_app_id(&doc.app_id)?;
                Ok(ParsedDocument::Deleted(PendingDeletion { doc: Arc::new(doc), revision, progress: None }))
            }
            AppState::Serving => {
                let mut doc: RenderedApp = text.parse().map_err(malformed)?;
                check_app_id(&doc.app_id)?;
                for (limit, windows) in &self.ceilings {
                    let own = match limit {
                        Limit::Account(limit) => doc.limits.entry(*limit).or_insert_with(|| limit.default_windows()),
                        Limit::Client(limit) => {
                            doc.client_limits.entry(*limit).or_insert_with(|| limit.default_windows())
                        }
                    };
                    apply_ceiling(own, windows);
                }
                for text in doc.mail.templates.values_mut() {
                    *text = self.texts.share(Arc::clone(text));
                }
                Ok(ParsedDocument::App(Arc::new(App::new(doc, revision)?)))
            }
        }
    }

    /// Returns why a document conflicts with the served App: it comes from another namespace or has other keys, and its
    /// `handover` is not greater than that of the served App. `None` if there is no conflict.
    fn conflict(&self, id: &AppId, document: &ParsedDocument) -> Option<RejectError> {
        let (namespace, handover, incarnation) = match document {
            ParsedDocument::App(app) => (&app.doc.namespace, app.doc.handover, app.doc.incarnation.as_ref()),
            // The keys are not compared here: the database checks that the users belong to this App.
            ParsedDocument::Deleted(deleted) => (&deleted.doc.namespace, deleted.doc.handover, None),
        };
        let served = self.get(id.as_str()).filter(|app| app.doc.handover >= handover)?;
        if served.doc.namespace != *namespace {
            return Some(RejectError::OtherNamespace);
        }
        let served_incarnation = served.doc.incarnation.as_ref();
        served_incarnation.zip(incarnation).is_some_and(|(served, new)| served != new).then_some(RejectError::KeysLost)
    }

    fn apply(
        &self,
        id: &AppId,
        parsed: ParseResult,
        unserved: &mut Unserved,
        serving: &mut ServedApps,
        changes: &mut Vec<RevisionChange>,
    ) {
        match parsed.map(|document| (self.conflict(id, &document), document)) {
            Ok((Some(error), document)) => {
                let (revision, suspended) = match document {
                    ParsedDocument::App(app) => (app.revision.clone(), Some(app)),
                    ParsedDocument::Deleted(deleted) => (deleted.revision, None),
                };
                self.reject(id, error, revision, suspended, unserved, serving, changes);
            }
            Ok((None, ParsedDocument::App(app))) => self.serve(id, app, unserved, serving, changes),
            Ok((None, ParsedDocument::Deleted(deleted))) => {
                let state = deleted.doc.state;
                info!(app = %id, revision = %deleted.revision, ?state, "no longer serving: deleted or released");
                serving.remove(id);
                unserved.rejected.remove(id);
                changes.push(deleted.to_change(id));
                unserved.pending_deletions.insert(id.clone(), deleted);
            }
            Err((error, revision)) => self.reject(id, error, revision, None, unserved, serving, changes),
        }
    }

    fn serve(
        &self,
        id: &AppId,
        app: Arc<App>,
        unserved: &mut Unserved,
        serving: &mut ServedApps,
        changes: &mut Vec<RevisionChange>,
    ) {
        info!(app = %id, revision = %app.revision, "serving");
        unserved.rejected.remove(id);
        unserved.pending_deletions.remove(id);
        changes.push(RevisionChange {
            app: id.clone(),
            revision: Some(app.revision.clone()),
            refused: None,
            deletion: None,
            webhooks: WebhookReport::new(),
        });
        serving.insert(id, app);
    }

    #[expect(clippy::too_many_arguments, reason = "the last three are the set that is being changed")]
    fn reject(
        &self,
        id: &AppId,
        error: RejectError,
        revision: Revision,
        suspended: Option<Arc<App>>,
        unserved: &mut Unserved,
        serving: &mut ServedApps,
        changes: &mut Vec<RevisionChange>,
    ) {
        let deleted = unserved.pending_deletions.get(id);
        let in_service = serving.get(id.as_str()).map(|app| &app.revision).or(deleted.map(|deleted| &deleted.revision));
        error!(
            app = %id,
            serving = in_service.map(Revision::as_str),
            error = &error as &dyn std::error::Error,
            "a rendered App is rejected; an earlier one, if there is one, stays in service"
        );
        self.metrics.count_rejected(error.reason());
        let document = error.to_report(revision);
        changes.push(RevisionChange {
            app: id.clone(),
            revision: in_service.cloned(),
            refused: Some(document.clone()),
            deletion: deleted.and_then(|deleted| deleted.progress),
            webhooks: WebhookReport::new(),
        });
        unserved.rejected.insert(id.clone(), Rejection { document, suspended });
    }

    fn stop_serving(
        &self,
        id: &AppId,
        unserved: &mut Unserved,
        serving: &mut ServedApps,
        changes: &mut Vec<RevisionChange>,
    ) {
        let was_served = serving.remove(id).is_some();
        let was_deleted = unserved.pending_deletions.remove(id).is_some();
        let was_rejected = unserved.rejected.remove(id).is_some();
        if let Some(cache) = &self.cache {
            cache.remove(id);
        }
        if was_served || was_deleted || was_rejected {
            info!(app = %id, "no longer serving");
            let webhooks = WebhookReport::new();
            changes.push(RevisionChange { app: id.clone(), revision: None, refused: None, deletion: None, webhooks });
        }
    }

    /// Changes the set of Apps in one step, and sends the changes to the subscribers.
    fn update(&self, edit: impl FnOnce(&mut Unserved, &mut ServedApps, &mut Vec<RevisionChange>)) {
        let mut unserved = self.unserved.lock();
        let mut serving = ServedApps::clone(&self.serving.load());
        let mut changes = Vec::new();
        edit(&mut unserved, &mut serving, &mut changes);
        for change in &mut changes {
            let app = serving.get(change.app.as_str());
            change.webhooks = unserved.webhook_report(&change.app, app.map(Arc::as_ref));
        }
        self.metrics.set_apps(serving.count);
        self.serving.store(Arc::new(serving));
        for change in changes {
            // Sending fails if there is no subscriber, which is no error here.
            let _ = self.changes.send(change);
        }
    }
}

// === impl FullSync ===

impl FullSync<'_> {
    /// Adds a document. The document is parsed immediately, so that only the result stays in memory.
    pub fn put(&mut self, id: &AppId, document: &[u8]) {
        let revision = Revision::of(document);
        if self.apps.is_current(id, &revision) {
            self.unchanged.insert(id.clone());
        } else {
            self.documents.push((id.clone(), self.apps.parse_and_cache(id, document, revision)));
        }
    }

    /// Adds an App with a document that cannot be read. The previous document of the App stays in service.
    pub fn reject_unreadable(&mut self, id: &AppId, error: RejectError) {
        let revision = Revision::of(error.to_string().as_bytes());
        if self.apps.is_current(id, &revision) {
            self.unchanged.insert(id.clone());
        } else {
            self.documents.push((id.clone(), Err((error, revision))));
        }
    }

    /// Puts this set into service, and removes all other Apps.
    pub fn commit(self) {
        let Self { apps, documents, unchanged: mut present } = self;
        present.extend(documents.iter().map(|(id, _)| id.clone()));
        let gone: Vec<_> = apps.known_ids().into_iter().filter(|id| !present.contains(id)).collect();
        apps.update(|unserved, serving, changes| {
            for id in &gone {
                apps.stop_serving(id, unserved, serving, changes);
            }
            for (id, parsed) in documents {
                apps.apply(&id, parsed, unserved, serving, changes);
            }
        });
        if let Some(cache) = &apps.cache {
            cache.mark_complete(|id| present.contains(id));
        }
        apps.metrics.record_list();
        info!(apps = apps.len(), gone = gone.len(), "the full set of documents was read");
    }
}

// === impl PendingDeletion ===

impl PendingDeletion {
    fn to_change(&self, id: &AppId) -> RevisionChange {
        RevisionChange {
            app: id.clone(),
            revision: Some(self.revision.clone()),
            refused: None,
            deletion: self.progress,
            webhooks: WebhookReport::new(),
        }
    }
}

/// Adds the windows of the installation's limit to the windows of the App's limit. If two windows have the same length,
/// the lower count applies.
fn apply_ceiling(windows: &mut Vec<Window>, ceiling: &[Window]) {
    for ceiling_window in ceiling {
        match windows.iter_mut().find(|window| window.window_seconds == ceiling_window.window_seconds) {
            Some(window) => window.count = window.count.min(ceiling_window.count),
            None => windows.push(*ceiling_window),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use latchkey_crds::{
        pages::{PageLinks, ThemeMode},
        refs::ServiceAccountRef,
        rendered::{
            ClientLimitName, DELETED_APP_FORMAT, LimitName, RenderedColors, RenderedDelivery, RenderedFirebaseScrypt,
            RenderedPages, RenderedPagesSession, RenderedTheme, RenderedWebhook, SecretString,
        },
    };

    use super::*;
    use crate::fixtures;

    fn id() -> AppId {
        "shop".parse().unwrap()
    }

    #[test]
    fn an_invalid_document_is_rejected_and_the_previous_one_stays_in_service() {
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
            let change = changes.try_recv().unwrap();
            assert_eq!(change.revision.as_ref(), Some(&serving));
            let refused = change.refused.unwrap();
            assert_eq!(refused.revision, Revision::of(bad), "the revision is that of the rejected document");
            assert!(!refused.reason.contains("PRIVATE"));
            assert_eq!(apps.get("shop").unwrap().revision, serving);
        }
    }

    #[test]
    fn no_app_exceeds_the_ceiling() {
        let window = |count, window_seconds| Window { count, window_seconds };
        let ceilings = Ceilings::from([
            (LimitName::LoginsPerClient.into(), vec![window(30, 60), window(500, 3600)]),
            (ClientLimitName::TokenRequestsPerClientId.into(), vec![window(100, 60)]),
        ]);
        let apps = Apps::new(ceilings);
        let mut doc = fixtures::rendered("shop");
        doc.limits.insert(LimitName::LoginsPerClient, vec![window(1000, 60), window(10, 1)]);
        apps.put(&id(), &doc.to_bytes());
        let app = apps.get("shop").unwrap();
        assert_eq!(app.windows(LimitName::LoginsPerClient), [window(30, 60), window(10, 1), window(500, 3600)]);
        assert_eq!(app.windows(LimitName::CodesPerClient), LimitName::CodesPerClient.default_windows());
        assert_eq!(app.client_windows(ClientLimitName::TokenRequestsPerClientId), [window(100, 60)]);
        let file = r#"{"loginsPerClient": [], "tokenRequestsPerClientID": [{"count": 1, "windowSeconds": 2}]}"#;
        let read: Ceilings = serde_json::from_str(file).unwrap();
        assert_eq!(read[&Limit::from(ClientLimitName::TokenRequestsPerClientId)], [window(1, 2)]);
        assert!(serde_json::from_str::<Ceilings>(r#"{"unknown": []}"#).is_err());
    }

    #[test]
    fn a_text_that_700_apps_share_is_stored_once_and_freed_with_the_last_app() {
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
        let mut sync = apps.start_full_sync();
        for number in 0..APPS {
            sync.put(&format!("app{number}").parse().unwrap(), &document(number));
        }
        sync.commit();
        let text_of = |app: &Arc<App>| Arc::clone(&app.doc.mail.templates["confirm.txt"]);
        let first = text_of(&apps.get("app0").unwrap());
        assert_eq!(*first, text);
        assert_eq!(apps.len(), APPS);
        assert!(apps.all().iter().all(|app| Arc::ptr_eq(&text_of(app), &first)), "each App has its own copy");
        let text = Arc::downgrade(&first);
        drop(first);
        for number in 1..APPS {
            apps.remove(&format!("app{number}").parse().unwrap());
        }
        assert_eq!(text.strong_count(), 1);
        apps.put(&"app0".parse().unwrap(), &fixtures::rendered("app0").to_bytes());
        assert_eq!(text.strong_count(), 0);
    }

    fn with_pages_host(id: &str, host: Option<&str>) -> Vec<u8> {
        let mut doc = fixtures::rendered(id);
        let colors = || RenderedColors { accent: "#1a56db".parse().unwrap(), background: "#ffffff".parse().unwrap() };
        doc.pages = Some(Box::new(RenderedPages {
            host: host.map(|host| host.parse().unwrap()),
            languages: vec!["en".to_owned()],
            theme: RenderedTheme { mode: ThemeMode::Auto, light: colors(), dark: colors(), logo: None },
            texts: BTreeMap::new(),
            links: PageLinks::default(),
            session: RenderedPagesSession { idle_seconds: 43_200, lifetime_seconds: 1_209_600 },
        }));
        doc.to_bytes()
    }

    #[test]
    fn an_app_is_found_by_the_own_host_of_its_pages() {
        let apps = Apps::default();
        let found = |host: &str| apps.get_by_pages_host(host).map(|app| app.id().to_string());
        let put = |id: &str, host: Option<&str>| apps.put(&id.parse().unwrap(), &with_pages_host(id, host));
        apps.put(&id(), &fixtures::rendered("shop").to_bytes());
        assert!(apps.get("shop").unwrap().pages.is_none() && !apps.has_pages());
        put("shop", None);
        assert!(apps.has_pages());
        assert_eq!((found("login.example.com"), found("")), (None, None));
        put("shop", Some("login.example.com"));
        assert_eq!(found("login.example.com").as_deref(), Some("shop"));
        assert_eq!((found("Login.example.com"), found("login.example")), (None, None));
        // Another document of the App replaces its host.
        put("shop", Some("id.example.com"));
        assert_eq!((found("login.example.com"), found("id.example.com").as_deref()), (None, Some("shop")));
        // A document that is rejected changes nothing.
        apps.put(&id(), b"{");
        assert_eq!(found("id.example.com").as_deref(), Some("shop"));
        apps.remove(&id());
        assert_eq!((found("id.example.com"), apps.has_pages()), (None, false));
        put("shop", None);
        apps.put(&id(), &fixtures::rendered("shop").to_bytes());
        assert!(!apps.has_pages());
        assert!(apps.serving.load().pages_hosts.is_empty());
    }

    #[test]
    fn a_host_of_two_apps_belongs_to_the_app_with_the_smaller_id() {
        for order in [["alpha", "beta"], ["beta", "alpha"]] {
            let apps = Apps::default();
            let found = || apps.get_by_pages_host("login.example.com").unwrap().id().to_string();
            for id in order {
                apps.put(&id.parse().unwrap(), &with_pages_host(id, Some("login.example.com")));
            }
            assert_eq!(found(), "alpha");
            apps.put(&"alpha".parse().unwrap(), &with_pages_host("alpha", None));
            assert_eq!(found(), "beta");
            apps.put(&"alpha".parse().unwrap(), &with_pages_host("alpha", Some("login.example.com")));
            assert_eq!(found(), "alpha");
            apps.remove(&"alpha".parse().unwrap());
            assert_eq!(found(), "beta");
        }
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
    fn a_document_with_unusable_firebase_keys_is_rejected_without_quoting_them() {
        let mut doc = fixtures::rendered("shop");
        let unusable = SecretString::new("hush");
        doc.password.firebase_scrypt =
            Some(RenderedFirebaseScrypt { signer_key: unusable.clone(), salt_separator: unusable });
        let apps = Apps::default();
        apps.put(&id(), &doc.to_bytes());
        assert!(apps.get("shop").is_none());
        let reason = apps.subscribe(String::new()).0.refused[&id()].reason.clone();
        assert_eq!(reason, "the Firebase signer key or salt separator is not base64 of a valid length");
    }

    fn deleted(id: &str) -> DeletedApp {
        DeletedApp {
            format: DELETED_APP_FORMAT,
            app_id: id.parse().unwrap(),
            namespace: "shop".to_owned(),
            name: id.to_owned(),
            state: AppState::Deleted,
            incarnation: Some("i1".to_owned()),
            handover: None,
        }
    }

    #[test]
    fn a_deleted_app_is_not_served_and_its_document_is_acknowledged() {
        let apps = Apps::default();
        apps.put(&id(), &fixtures::rendered("shop").to_bytes());
        let (_, mut changes) = apps.subscribe(String::new());
        let bytes = deleted("shop").to_bytes();
        let revision = Revision::of(&bytes);
        apps.put(&id(), &bytes);
        assert!(apps.get("shop").is_none());
        let change = changes.try_recv().unwrap();
        assert_eq!((change.revision.as_ref(), change.deletion, change.refused), (Some(&revision), None, None));

        let progress = DeletionProgress { users_left: 3, done: false };
        apps.report_progress(&id(), &revision, progress);
        apps.report_progress(&id(), &revision, progress);
        assert_eq!(changes.try_recv().unwrap().deletion, Some(progress));
        assert!(changes.try_recv().is_err(), "the same progress is not reported again");
        apps.report_progress(&id(), &Revision::of(b"another"), DeletionProgress { users_left: 0, done: true });
        assert!(changes.try_recv().is_err(), "progress of an old document is not reported");

        let (hello, _) = apps.subscribe(String::new());
        assert_eq!(hello.revisions.get(&id()), Some(&revision));
        assert_eq!(hello.deletions.get(&id()), Some(&progress));
        apps.put(&id(), &fixtures::rendered("shop").to_bytes());
        assert!(apps.get("shop").is_some() && apps.pending_deletions().is_empty(), "the deletion is undone");
        assert!(changes.try_recv().unwrap().deletion.is_none());
    }

    fn with_pull_webhooks(names: &[&str]) -> RenderedApp {
        let mut doc = fixtures::rendered("shop");
        for name in names {
            let consumer = ServiceAccountRef { namespace: "shop".to_owned(), name: "sync".to_owned() };
            doc.webhooks.push(RenderedWebhook {
                name: name.parse().unwrap(),
                events: vec!["user.created".to_owned()],
                include_profile: false,
                delivery: RenderedDelivery::Pull(consumer),
            });
        }
        doc
    }

    #[test]
    fn the_states_of_webhooks_are_reported_with_the_revision() {
        let apps = Apps::default();
        let doc = with_pull_webhooks(&["one", "two"]);
        apps.put(&id(), &doc.to_bytes());
        let revision = Revision::of(&doc.to_bytes());
        let mut changes = apps.subscribe_changes();
        let (one, two): (WebhookName, WebhookName) = ("one".parse().unwrap(), "two".parse().unwrap());
        let gone: WebhookName = "gone".parse().unwrap();
        let states = BTreeMap::from([
            (one.clone(), WebhookState::Delivering),
            (two.clone(), WebhookState::ConsumerBehind),
            (gone, WebhookState::ReceiverGone),
        ]);
        apps.report_webhooks(&id(), &states);
        let change = changes.try_recv().unwrap();
        let expected =
            WebhookReport::from([(one.clone(), "Delivering".to_owned()), (two.clone(), "ConsumerBehind".to_owned())]);
        assert_eq!((change.revision, &change.webhooks), (Some(revision), &expected), "no webhook named gone");
        assert_eq!(apps.subscribe(String::new()).0.webhooks, BTreeMap::from([(id(), expected)]));
        apps.report_webhooks(&id(), &states);
        assert!(changes.try_recv().is_err(), "the same states are not reported again");

        // A rejected document changes nothing about the webhooks of the served document.
        apps.put(&id(), b"{");
        assert_eq!(changes.try_recv().unwrap().webhooks.len(), 2);
        // The next document has only one of the webhooks.
        apps.put(&id(), &with_pull_webhooks(&["two"]).to_bytes());
        assert_eq!(changes.try_recv().unwrap().webhooks.into_keys().collect::<Vec<_>>(), [two]);
        apps.remove(&id());
        assert!(changes.try_recv().unwrap().webhooks.is_empty());
        assert!(apps.subscribe(String::new()).0.webhooks.is_empty());
        apps.report_webhooks(&id(), &states);
        assert!(changes.try_recv().is_err(), "the App is not served");
    }

    #[test]
    fn a_rejection_is_reported_to_new_subscribers_until_the_document_is_valid_again() {
        let apps = Apps::default();
        let good = fixtures::rendered("shop").to_bytes();
        apps.put(&id(), &good);
        apps.put(&id(), b"{");
        let (hello, mut changes) = apps.subscribe(String::new());
        assert_eq!(hello.revisions.get(&id()), Some(&Revision::of(&good)));
        assert!(hello.refused.contains_key(&id()));
        apps.put(&id(), b"{");
        assert!(changes.try_recv().is_err(), "the same document is rejected once");
        apps.put(&id(), &good);
        let change = changes.try_recv().unwrap();
        assert_eq!((change.revision, change.refused), (Some(Revision::of(&good)), None));
        assert!(apps.subscribe(String::new()).0.refused.is_empty());
    }

    #[test]
    fn a_document_of_another_namespace_replaces_the_document_of_the_owner_only_after_a_handover() {
        let apps = Apps::default();
        apps.put(&id(), &fixtures::rendered("shop").to_bytes());
        let mut foreign = fixtures::rendered("shop");
        foreign.namespace = "thief".to_owned();
        apps.put(&id(), &foreign.to_bytes());
        assert_eq!(apps.get("shop").unwrap().doc.namespace, "shop");
        assert!(apps.subscribe(String::new()).0.refused.contains_key(&id()));
        foreign.handover = Some(1);
        apps.put(&id(), &foreign.to_bytes());
        assert_eq!(apps.get("shop").unwrap().doc.namespace, "thief");
    }

    #[test]
    fn a_document_with_other_keys_is_served_only_if_the_database_accepts_it_or_after_a_handover() {
        let apps = Apps::default();
        let mut doc = fixtures::rendered("shop");
        doc.incarnation = Some("i1".to_owned());
        apps.put(&id(), &doc.to_bytes());
        let first = Revision::of(&doc.to_bytes());
        doc.incarnation = Some("i2".to_owned());
        let mut changes = apps.subscribe_changes();
        apps.put(&id(), &doc.to_bytes());
        let change = changes.try_recv().unwrap();
        assert!(change.refused.is_some_and(|refused| refused.keys_lost) && change.revision == Some(first));
        assert!(apps.subscribe(String::new()).0.refused[&id()].keys_lost);
        // The database accepts the other keys, because the App has no users.
        apps.resume(&id(), &Revision::of(&doc.to_bytes()));
        assert_eq!(changes.try_recv().unwrap().refused, None);
        doc.incarnation = Some("i3".to_owned());
        doc.handover = Some(1);
        apps.put(&id(), &doc.to_bytes());
        assert_eq!(changes.try_recv().unwrap().revision, Some(Revision::of(&doc.to_bytes())), "the handover is later");
    }

    #[test]
    fn a_suspended_app_is_served_when_the_database_accepts_it() {
        let apps = Apps::default();
        apps.put(&id(), &fixtures::rendered("shop").to_bytes());
        let revision = apps.get("shop").unwrap().revision.clone();
        let (_, mut changes) = apps.subscribe(String::new());
        apps.suspend(&id(), &Revision::of(b"another"), RejectError::OtherNamespace);
        assert!(changes.try_recv().is_err() && apps.get("shop").is_some());
        apps.suspend(&id(), &revision, RejectError::OtherNamespace);
        let change = changes.try_recv().unwrap();
        assert!(change.revision.is_none() && change.refused.is_some() && apps.get("shop").is_none());
        assert_eq!(apps.suspended().len(), 1);
        apps.resume(&id(), &revision);
        assert_eq!(changes.try_recv().unwrap().revision, Some(revision));
        assert!(apps.get("shop").is_some() && apps.suspended().is_empty());
    }

    #[test]
    fn a_full_sync_replaces_the_served_apps() {
        let apps = Apps::default();
        let document = |id: &str| fixtures::rendered(id).to_bytes();
        for id in ["stays", "goes"] {
            apps.put(&id.parse().unwrap(), &document(id));
        }
        let mut sync = apps.start_full_sync();
        sync.put(&"stays".parse().unwrap(), &document("stays"));
        sync.put(&"comes".parse().unwrap(), &document("comes"));
        assert!(apps.get("comes").is_none() && apps.get("goes").is_some(), "nothing changes before the end");
        sync.commit();
        let mut ids: Vec<_> = apps.all().iter().map(|app| app.id().to_string()).collect();
        ids.sort();
        assert_eq!(ids, ["comes", "stays"]);
        assert_eq!(apps.len(), 2);
    }

    #[test]
    fn cached_documents_are_served_again_and_removed_ones_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let open_cache = || Apps::default().with_cache(Cache::open(folder.path().to_owned()).unwrap());
        let document = |id: &str| fixtures::rendered(id).to_bytes();
        let apps = open_cache();
        assert!(!apps.restore_from_cache());
        apps.put(&"early".parse().unwrap(), &document("early"));
        assert!(!open_cache().restore_from_cache(), "an incomplete set is not used");
        let mut sync = apps.start_full_sync();
        for id in ["shop", "other", "third"] {
            sync.put(&id.parse().unwrap(), &document(id));
        }
        sync.commit();
        apps.put(&"shop".parse().unwrap(), b"{");
        apps.remove(&"other".parse().unwrap());
        let reopened = open_cache();
        assert!(reopened.restore_from_cache());
        assert!(reopened.get("shop").is_some(), "the last valid document");
        assert!(reopened.get("other").is_none() && reopened.get("early").is_none() && reopened.len() == 2);
    }

    #[test]
    fn a_change_to_one_app_does_not_copy_all_apps() {
        let served = fixtures::app(fixtures::rendered("shop"));
        let served = Arc::new(served);
        let filled = |count: usize| {
            let apps = Apps::default();
            apps.update(|_, serving, _| {
                for number in 0..count {
                    serving.insert(&format!("app{number}").parse().unwrap(), Arc::clone(&served));
                }
            });
            apps
        };
        let (few, many) = (filled(100), filled(10_000));
        // The two sets of Apps are measured alternately, several times, and the shortest times are compared, because
        // other load on the machine disturbs only some of the measurements.
        let round = |apps: &Apps| {
            let started = std::time::Instant::now();
            for number in 0..200 {
                let id: AppId = format!("app{number}").parse().unwrap();
                apps.update(|_, serving, _| serving.insert(&id, Arc::clone(&served)));
            }
            started.elapsed()
        };
        let (mut of_few, mut of_many) = (Duration::MAX, Duration::MAX);
        for _ in 0..10 {
            of_few = of_few.min(round(&few));
            of_many = of_many.min(round(&many));
        }
        // Among 10,000 Apps, a copy of the full set would cost about a hundred times as much as among 100.
        assert!(of_many < of_few * 20, "{of_many:?} among 10,000, {of_few:?} among 100");
        assert_eq!(many.len(), 10_000);
    }

    #[test]
    fn subscribers_get_the_full_set_and_then_each_change() {
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
        let change = wait_for_change(&mut changes, |change| change.refused.is_none());
        assert_ne!(change.revision, Some(first));

        std::fs::remove_file(&path).unwrap();
        assert_eq!(wait_for_change(&mut changes, |change| change.revision.is_none()).refused, None);
        assert!(apps.get("shop").is_none());
    }

    /// Waits for a matching change. Skips other changes, because a file can be read and rejected while it is only half
    /// written.
    fn wait_for_change(
        changes: &mut broadcast::Receiver<RevisionChange>,
        fits: impl Fn(&RevisionChange) -> bool,
    ) -> RevisionChange {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let fitting = async {
                loop {
                    let change = changes.recv().await.unwrap();
                    if fits(&change) {
                        return change;
                    }
                }
            };
            tokio::time::timeout(Duration::from_secs(20), fitting).await.expect("the change was not seen in 20 s")
        })
    }
}
