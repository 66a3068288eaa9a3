//! Watches the cluster: a store for each kind that the operator needs in full, and a reconcile queue for what changes
//! affect.

mod index;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    convert::Infallible,
    fmt::Debug,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex, PoisonError},
};

use futures::{
    StreamExt,
    stream::{BoxStream, select_all},
};
use k8s_openapi::{
    api::core::v1::{ConfigMap, Secret},
    serde::de::DeserializeOwned,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    core::{DeserializeGuard, NamespaceResourceScope, PartialObjectMeta},
    runtime::{
        WatchStreamExt,
        reflector::{ObjectRef, Store, store, store::Writer},
        watcher,
        watcher::Event,
    },
};
use latchkey_crds::{
    app::App,
    names::{APP_KEYS_TYPE, NAME_ANNOTATION, NAMESPACE_ANNOTATION, RENDERED_APP_KEY, RENDERED_APP_TYPE},
    provider::Provider,
    rendered::Revision,
    types::AppId,
};
use tokio::sync::mpsc;
use tracing::warn;

pub(crate) use self::index::{NamespacedName, Reference, ReferenceIndex};
use self::index::{references_of_app, references_of_provider};
use crate::{
    admin::{Health, error_message},
    app::{
        keys::secret as key_secret,
        ownership::{Claim, ClaimValidity},
    },
    backoff::ShortBackoff,
    quota::{DocumentSize, QuotaLimits, Quotas},
};

/// An App or a Provider, or why it does not decode: one bad object does not stop the others.
pub(crate) type Guarded<K> = DeserializeGuard<K>;

/// A watch that is dropped silently would otherwise stay unnoticed for five minutes.
pub(crate) const WATCH_SECONDS: u32 = 30;
/// Objects per page of a list. Rendered Apps can have half a MiB each.
const PAGE_SIZE: u32 = 500;
const DOCUMENT_PAGE_SIZE: u32 = 100;

/// Everything that the operator keeps a copy of.
#[derive(Clone)]
pub(crate) struct ClusterState {
    pub(crate) apps: Store<Guarded<App>>,
    pub(crate) providers: Store<Guarded<Provider>>,
    pub(crate) published: Arc<PublishedDocuments>,
    pub(crate) key_versions: Arc<ReconciledKeyVersions>,
    pub(crate) quotas: Arc<Quotas>,
    /// The Apps by what they reference.
    apps_by_reference: Arc<ReferenceIndex<Reference, NamespacedName>>,
    /// The Providers by their Secret.
    providers_by_secret: Arc<ReferenceIndex<NamespacedName, NamespacedName>>,
}

/// The published documents by the name of their Secret. The documents themselves are not stored.
pub(crate) struct PublishedDocuments {
    apps: Mutex<PublishedIndex>,
    quotas: Arc<Quotas>,
}

#[derive(Default)]
struct PublishedIndex {
    apps: HashMap<String, PublishedApp>,
    /// The Secrets by the App that they belong to.
    secrets: ReferenceIndex<NamespacedName, String>,
    /// The newest version that the watch has reported for any of them.
    newest_version: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PublishedApp {
    /// Of the bytes that the Secret has now, whoever wrote them.
    pub(crate) revision: Option<Revision>,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) resource_version: String,
    pub(crate) uid: String,
    pub(crate) size: DocumentSize,
}

/// The version of each App's keys that its last reconcile used. A watch event for this version changes nothing.
#[derive(Default)]
pub(crate) struct ReconciledKeyVersions(Mutex<HashMap<AppId, String>>);

/// The versions of one resource increase. A version that is no number counts as older than all others.
fn parse_version(resource_version: &str) -> u64 {
    resource_version.parse().unwrap_or(0)
}

/// The receiving ends of the reconcile queue.
pub(crate) struct QueueReceivers {
    pub(crate) apps: mpsc::UnboundedReceiver<ObjectRef<Guarded<App>>>,
    pub(crate) providers: mpsc::UnboundedReceiver<ObjectRef<Guarded<Provider>>>,
    pub(crate) orphans: mpsc::UnboundedReceiver<String>,
    pub(crate) releases: mpsc::UnboundedReceiver<AppId>,
}

/// Queues what must be reconciled.
#[derive(Clone)]
pub(crate) struct ReconcileQueue {
    pub(crate) apps: mpsc::UnboundedSender<ObjectRef<Guarded<App>>>,
    pub(crate) providers: mpsc::UnboundedSender<ObjectRef<Guarded<Provider>>>,
    /// Names of rendered Secrets whose App may be deleted.
    pub(crate) orphans: mpsc::UnboundedSender<String>,
    /// The appIDs with keys whose App may be deleted.
    pub(crate) releases: mpsc::UnboundedSender<AppId>,
}

/// A change that a watch reports, or that a new list reveals.
enum WatchEvent<K> {
    Applied(K),
    Deleted {
        namespace: String,
        name: String,
        /// `None`: a new list revealed it.
        version: Option<u64>,
    },
    /// Every watch has reported its first complete list.
    Synced,
}

/// Starts every watch. Each runs until the process ends.
pub(crate) fn start(
    client: &Client,
    namespace: &str,
    watched: &[String],
    limits: QuotaLimits,
    health: &Health,
    queue: &ReconcileQueue,
) -> (ClusterState, Vec<tokio::task::JoinHandle<()>>) {
    let (apps, apps_writer) = store();
    let (providers, providers_writer) = store();
    let objects = ClusterState::new(apps, providers, limits);

    let config = || watcher::Config::default().timeout(WATCH_SECONDS).page_size(PAGE_SIZE);
    // Secrets of Helm releases and ServiceAccounts are never client secrets, and there are many of them.
    let secrets = || config().fields("type!=helm.sh/release.v1,type!=kubernetes.io/service-account-token");
    let tasks = vec![
        tokio::spawn(follow_apps(
            watches(client, watched, config()),
            apps_writer,
            objects.clone(),
            queue.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_providers(
            watches(client, watched, config()),
            providers_writer,
            objects.clone(),
            queue.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_keys(
            watches(client, &[namespace.to_owned()], config().fields(&format!("type={APP_KEYS_TYPE}"))),
            objects.clone(),
            queue.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_published(
            watch_namespace(
                client,
                namespace,
                config().page_size(DOCUMENT_PAGE_SIZE).fields(&format!("type={RENDERED_APP_TYPE}")),
            ),
            objects.clone(),
            queue.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_secrets(
            watches::<Metadata<Secret>>(client, watched, secrets()),
            objects.clone(),
            queue.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_config_maps(
            watches::<Metadata<ConfigMap>>(client, watched, config()),
            objects.clone(),
            queue.clone(),
            health.clone(),
        )),
    ];
    (objects, tasks)
}

/// The prefix of our annotations (`latchkey_crds::names`).
const ANNOTATION_PREFIX: &str = "latchkey.dev/";
/// The prefixes of the install's Secret names, before the appID (`latchkey_crds::names`).
const KEYS_PREFIX: &str = "latchkey-keys-";
const RENDERED_PREFIX: &str = "latchkey-app-";

/// The names under which `/readyz` lists watches that have not finished their first list.
pub(crate) const WATCHES: [&str; 6] = ["apps", "providers", "keys", "rendered apps", "secrets", "configmaps"];

type Watch<K> = BoxStream<'static, watcher::Result<Event<K>>>;

/// One API handle per watched namespace, or one for all namespaces if none is named.
fn apis<K>(client: &Client, watched: &[String]) -> Vec<Api<K>>
where
    K: Resource<Scope = NamespaceResourceScope>,
    K::DynamicType: Default,
{
    match watched {
        [] => vec![Api::all(client.clone())],
        listed => listed.iter().map(|namespace| Api::namespaced(client.clone(), namespace)).collect(),
    }
}

fn watches<K>(client: &Client, watched: &[String], config: watcher::Config) -> Vec<Watch<K>>
where
    K: Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Default,
{
    let watch = |api| watcher(api, config.clone()).backoff(ShortBackoff::for_watch()).map(strip_metadata).boxed();
    apis(client, watched).into_iter().map(watch).collect()
}

/// An object's metadata only: values are read when they are needed.
type Metadata<K> = PartialObjectMeta<K>;

fn watch_namespace(client: &Client, namespace: &str, config: watcher::Config) -> Vec<Watch<Secret>> {
    watches(client, &[namespace.to_owned()], config)
}

/// Removes metadata that nothing here reads. Annotations and labels of others can have 256 KiB and more per object, and
/// changing them is no reason to reconcile.
fn strip_metadata<K: Resource>(event: watcher::Result<Event<K>>) -> watcher::Result<Event<K>> {
    event.map(|event| {
        event.modify(|object| {
            object.meta_mut().managed_fields = None;
            object.meta_mut().labels = None;
            object.annotations_mut().retain(|name, _| name.starts_with(ANNOTATION_PREFIX));
        })
    })
}

/// Passes every change that the watches report to the callback. Objects that a new list shows unchanged are skipped.
async fn follow_watches<K>(
    what: &'static str,
    watches: Vec<Watch<K>>,
    health: Health,
    mut handle: impl FnMut(WatchEvent<K>),
) where
    K: Resource + Send + 'static,
{
    /// By namespace and name, a hash that identifies the version of an object.
    type Versions = HashMap<(String, String), u64>;
    #[derive(Default)]
    struct Scope {
        known: Versions,
        listing: Option<HashSet<(String, String)>>,
        synced: bool,
    }
    let hasher = RandomState::new();
    let version =
        |object: &K| hasher.hash_one((object.meta().uid.as_deref(), object.meta().resource_version.as_deref()));
    let key = |object: &K| (object.namespace().unwrap_or_default(), object.name_any());

    let mut scopes: Vec<Scope> = watches.iter().map(|_| Scope::default()).collect();
    let numbered =
        watches.into_iter().enumerate().map(|(number, watch)| watch.map(move |event| (number, event)).boxed());
    let mut events = select_all(numbered);
    while let Some((number, event)) = events.next().await {
        let scope = &mut scopes[number];
        match event {
            Ok(Event::Init) => scope.listing = Some(HashSet::new()),
            Ok(Event::InitApply(object)) => {
                let key = key(&object);
                if let Some(listing) = &mut scope.listing {
                    listing.insert(key.clone());
                }
                let version = version(&object);
                if scope.known.insert(key, version) != Some(version) {
                    handle(WatchEvent::Applied(object));
                }
            }
            Ok(Event::InitDone) => {
                let listed = scope.listing.take().unwrap_or_default();
                let gone: Vec<_> = scope.known.keys().filter(|key| !listed.contains(*key)).cloned().collect();
                for (namespace, name) in gone {
                    scope.known.remove(&(namespace.clone(), name.clone()));
                    handle(WatchEvent::Deleted { namespace, name, version: None });
                }
                if !std::mem::replace(&mut scope.synced, true) && scopes.iter().all(|scope| scope.synced) {
                    handle(WatchEvent::Synced);
                    health.set_synced(what);
                }
            }
            Ok(Event::Apply(object)) => {
                scope.known.insert(key(&object), version(&object));
                handle(WatchEvent::Applied(object));
            }
            Ok(Event::Delete(object)) => {
                let (namespace, name) = key(&object);
                scope.known.remove(&(namespace.clone(), name.clone()));
                let version = object.resource_version().as_deref().map(parse_version);
                handle(WatchEvent::Deleted { namespace, name, version });
            }
            Err(error) => {
                warn!(watch = what, error = error_message(&error), "a watch failed; retrying");
                health.record_watch_failure(what, &error);
            }
        }
    }
}

/// Writes the watch events into a store.
struct StoreWriter<K: Resource<DynamicType = ()> + Clone + 'static> {
    writer: Writer<K>,
    store: Store<K>,
    /// The objects before all watches are synced, then `None`. An object that is deleted before that must not enter the
    /// store.
    before_sync: Option<HashMap<ObjectRef<K>, Arc<K>>>,
}

impl<K: Resource<DynamicType = ()> + Clone + 'static> StoreWriter<K> {
    fn new(writer: Writer<K>) -> Self {
        let store = writer.as_reader();
        Self { writer, store, before_sync: Some(HashMap::new()) }
    }

    /// Applies an event and returns the object as it was before.
    fn apply(&mut self, seen: &WatchEvent<K>) -> Option<Arc<K>> {
        match (seen, &mut self.before_sync) {
            (WatchEvent::Applied(object), Some(early)) => {
                early.insert(ObjectRef::from_obj(object), Arc::new(object.clone()))
            }
            (WatchEvent::Applied(object), None) => {
                let before = self.store.get(&ObjectRef::from_obj(object));
                self.writer.apply_watcher_event(&Event::Apply(object.clone()));
                before
            }
            (WatchEvent::Deleted { namespace, name, .. }, Some(early)) => {
                early.remove(&ObjectRef::new(name).within(namespace))
            }
            (WatchEvent::Deleted { namespace, name, .. }, None) => {
                let before = self.store.get(&ObjectRef::new(name).within(namespace))?;
                self.writer.apply_watcher_event(&Event::Delete(K::clone(&before)));
                Some(before)
            }
            (WatchEvent::Synced, early) => {
                self.writer.apply_watcher_event(&Event::Init);
                for (_, object) in early.take().unwrap_or_default() {
                    self.writer.apply_watcher_event(&Event::InitApply(Arc::unwrap_or_clone(object)));
                }
                self.writer.apply_watcher_event(&Event::InitDone);
                None
            }
        }
    }
}

/// What the present object references.
fn references_now<K, N, V>(seen: &WatchEvent<K>, named: fn(&K) -> BTreeSet<(N, V)>) -> BTreeSet<(N, V)> {
    match seen {
        WatchEvent::Applied(object) => named(object),
        WatchEvent::Deleted { .. } | WatchEvent::Synced => BTreeSet::new(),
    }
}

async fn follow_apps(
    watches: Vec<Watch<Guarded<App>>>,
    writer: Writer<Guarded<App>>,
    objects: ClusterState,
    queue: ReconcileQueue,
    health: Health,
) {
    let mut keeper = StoreWriter::new(writer);
    follow_watches("apps", watches, health, |seen| {
        let before = keeper.apply(&seen);
        objects.apps_by_reference.reindex(
            &before.as_deref().map(references_of_app).unwrap_or_default(),
            &references_now(&seen, references_of_app),
        );
        let id_before = before.as_ref().and_then(|app| claimed_app_id(app));
        let left = |namespace: &str, name: &str| {
            for secret in objects.published.of_app(namespace, name) {
                queue.enqueue_orphan(secret);
            }
            // The appID may be free for another App now.
            if let Some(id) = &id_before {
                queue.enqueue_apps_with_id(&objects, id);
                queue.enqueue_release(id.clone());
            }
            objects.quotas.remove_waiting(namespace, name);
            queue.enqueue_waiting(&objects, namespace);
        };
        match &seen {
            WatchEvent::Applied(app) => {
                // A status that the operator wrote itself is no reason to reconcile.
                if before.is_none_or(|before| !is_same_but_for_status(&before, app)) {
                    queue.enqueue_app(ObjectRef::from_obj(app));
                }
                // Created again under its name, with another appID.
                if id_before != claimed_app_id(app) {
                    left(&app.namespace().unwrap_or_default(), &app.name_any());
                }
            }
            WatchEvent::Deleted { namespace, name, .. } => left(namespace, name),
            WatchEvent::Synced => {}
        }
    })
    .await;
}

async fn follow_providers(
    watches: Vec<Watch<Guarded<Provider>>>,
    writer: Writer<Guarded<Provider>>,
    objects: ClusterState,
    queue: ReconcileQueue,
    health: Health,
) {
    let mut keeper = StoreWriter::new(writer);
    follow_watches("providers", watches, health, |seen| {
        let before = keeper.apply(&seen);
        let named_before = before.as_deref().map(references_of_provider).unwrap_or_default();
        objects.providers_by_secret.reindex(&named_before, &references_now(&seen, references_of_provider));
        match &seen {
            WatchEvent::Applied(provider) => {
                if before.is_none_or(|before| !is_same_but_for_status(&before, provider)) {
                    queue.enqueue_provider(ObjectRef::from_obj(provider));
                    let namespace = provider.namespace().unwrap_or_default();
                    queue.enqueue_apps_with_provider(&objects, &namespace, &provider.name_any());
                }
            }
            WatchEvent::Deleted { namespace, name, .. } => queue.enqueue_apps_with_provider(&objects, namespace, name),
            WatchEvent::Synced => {}
        }
    })
    .await;
}

async fn follow_keys(
    watches: Vec<Watch<Metadata<Secret>>>,
    objects: ClusterState,
    queue: ReconcileQueue,
    health: Health,
) {
    let id = |name: &str| name.strip_prefix(KEYS_PREFIX).and_then(|id| id.parse().ok());
    let mut synced = false;
    follow_watches("keys", watches, health, |seen| match seen {
        WatchEvent::Applied(secret) => {
            let Some(id) = id(&secret.name_any()) else { return };
            let before = objects.quotas.owner(&id);
            let holder = key_secret::owner_of(&secret.metadata);
            objects.quotas.record_keys(&id, holder.clone());
            // At the start everything is reconciled anyway.
            if !synced {
                return;
            }
            if !objects.is_reconciled(&id, &secret.resource_version().unwrap_or_default()) {
                queue.enqueue_apps_with_id(&objects, &id);
            }
            // The platform team assigned the appID to another namespace.
            if let Some(before) =
                before.filter(|before| holder.is_none_or(|holder| holder.namespace != before.namespace))
            {
                queue.enqueue_waiting(&objects, &before.namespace);
            }
        }
        WatchEvent::Deleted { name, .. } => {
            if let Some(id) = id(&name) {
                objects.key_versions.forget(&id);
                let before = objects.quotas.owner(&id);
                objects.quotas.record_keys(&id, None);
                queue.enqueue_apps_with_id(&objects, &id);
                if let Some(before) = before {
                    queue.enqueue_waiting(&objects, &before.namespace);
                }
            }
        }
        WatchEvent::Synced => synced = true,
    })
    .await;
}

async fn follow_published(watches: Vec<Watch<Secret>>, objects: ClusterState, queue: ReconcileQueue, health: Health) {
    let mut synced = false;
    follow_watches("rendered apps", watches, health, |seen| {
        let before = |name: &str| objects.published.get(name).map(|app| app.namespace);
        let name = match seen {
            WatchEvent::Applied(secret) => {
                let name = secret.name_any();
                if !PublishedApp::from_secret(&secret).is_some_and(|app| objects.published.record_watched(&name, app)) {
                    return;
                }
                name
            }
            // This includes deletions by this operator: the App may have been created again meanwhile.
            WatchEvent::Deleted { name, version, .. } => {
                let namespace = before(&name);
                objects.published.record_deletion(&name, version);
                if let Some(namespace) = namespace {
                    queue.enqueue_waiting(&objects, &namespace);
                }
                name
            }
            WatchEvent::Synced => {
                synced = true;
                return;
            }
        };
        if synced && let Some(id) = app_id_of_secret(&name) {
            queue.enqueue_apps_with_id(&objects, &id);
        }
        queue.enqueue_orphan(name);
    })
    .await;
}

async fn follow_secrets(
    watches: Vec<Watch<Metadata<Secret>>>,
    objects: ClusterState,
    queue: ReconcileQueue,
    health: Health,
) {
    let mut synced = false;
    follow_watches("secrets", watches, health, |seen| {
        // At the start everything is reconciled anyway.
        match &seen {
            WatchEvent::Applied(secret) if synced => {
                queue.enqueue_for_secret(&objects, &secret.namespace().unwrap_or_default(), &secret.name_any());
            }
            WatchEvent::Applied(_) => {}
            WatchEvent::Deleted { namespace, name, .. } => queue.enqueue_for_secret(&objects, namespace, name),
            WatchEvent::Synced => synced = true,
        }
    })
    .await;
}

async fn follow_config_maps(
    watches: Vec<Watch<Metadata<ConfigMap>>>,
    objects: ClusterState,
    queue: ReconcileQueue,
    health: Health,
) {
    let mut synced = false;
    follow_watches("configmaps", watches, health, |seen| match &seen {
        WatchEvent::Applied(map) if synced => {
            queue.enqueue_apps_with_config_map(&objects, &map.namespace().unwrap_or_default(), &map.name_any());
        }
        WatchEvent::Applied(_) => {}
        WatchEvent::Deleted { namespace, name, .. } => queue.enqueue_apps_with_config_map(&objects, namespace, name),
        WatchEvent::Synced => synced = true,
    })
    .await;
}

/// Whether two versions of an object are equal in everything that a reconcile reads.
fn is_same_but_for_status<K: Resource>(one: &Guarded<K>, other: &Guarded<K>) -> bool {
    let read = |object: &Guarded<K>| {
        let meta = object.meta();
        (
            meta.uid.clone(),
            meta.generation,
            meta.deletion_timestamp.clone(),
            meta.annotations.clone(),
            meta.finalizers.clone(),
            object.0.is_ok(),
        )
    };
    read(one) == read(other)
}

/// The appID of the document in a Secret with this name.
pub(crate) fn app_id_of_secret(secret: &str) -> Option<AppId> {
    secret.strip_prefix(RENDERED_PREFIX)?.parse().ok()
}

/// The appID that an App claims, if it is valid.
pub(crate) fn claimed_app_id(app: &Guarded<App>) -> Option<AppId> {
    app.0.as_ref().ok()?.app_id().ok()
}

// === impl ClusterState ===

impl ClusterState {
    pub(crate) fn new(apps: Store<Guarded<App>>, providers: Store<Guarded<Provider>>, limits: QuotaLimits) -> Self {
        let (apps_by, providers_by) = (Arc::default(), Arc::default());
        let quotas = Arc::new(Quotas::new(limits));
        let published = PublishedDocuments { apps: Mutex::default(), quotas: Arc::clone(&quotas) };
        Self {
            apps,
            providers,
            published: Arc::new(published),
            key_versions: Arc::default(),
            quotas,
            apps_by_reference: apps_by,
            providers_by_secret: providers_by,
        }
    }

    /// How many Apps of the namespace have precedence over this one for an appID: older ones that wait for room or are
    /// not validated yet. Counted only if there is not enough room for all.
    pub(crate) fn count_ahead_of(&self, claim: &Claim) -> u32 {
        let namespace = claim.owner.namespace.as_str();
        let named = Reference::Namespace(namespace.to_owned());
        if self.quotas.has_room(namespace, self.apps_by_reference.count(&named)) {
            return 0;
        }
        let places = self.apps_by_reference.get(&named);
        let apps = places.iter().filter_map(|place| self.apps.get(&place.object_ref()));
        let ahead = apps.filter(|app| {
            let Ok(app) = &app.0 else { return false };
            let other = Claim::from_app(app);
            let holds = app.app_id().is_ok_and(|id| self.quotas.owns_app_id(&id, namespace));
            let comes = match other.validity {
                ClaimValidity::Pending => true,
                ClaimValidity::Valid | ClaimValidity::Invalid => {
                    self.quotas.is_waiting_for_app_id(namespace, &other.owner.name)
                }
                ClaimValidity::Deleting => false,
            };
            comes && !holds && other.has_precedence_over(claim)
        });
        u32::try_from(ahead.count()).unwrap_or(u32::MAX)
    }

    /// The Apps that claim an appID.
    pub(crate) fn apps_with_id(&self, id: &AppId) -> Vec<Arc<Guarded<App>>> {
        let named = self.apps_by_reference.get(&Reference::AppId(id.clone()));
        named.iter().filter_map(|place| self.apps.get(&place.object_ref())).collect()
    }

    /// Whether a watch event for these keys changes nothing: their App has used this version, and no other App claims
    /// the appID.
    fn is_reconciled(&self, id: &AppId, version: &str) -> bool {
        self.key_versions.lock().get(id).is_some_and(|judged| judged == version)
            && self.apps_by_reference.get(&Reference::AppId(id.clone())).len() == 1
    }
}

// === impl ReconciledKeyVersions ===

impl ReconciledKeyVersions {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<AppId, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn record(&self, id: &AppId, version: &str) {
        self.lock().insert(id.clone(), version.to_owned());
    }

    fn forget(&self, id: &AppId) {
        self.lock().remove(id);
    }
}

// === impl QueueReceivers ===

impl QueueReceivers {
    /// Receives and discards everything while another replica leads. Otherwise the queues would grow forever.
    pub(crate) async fn discard_all(&mut self) -> Infallible {
        loop {
            tokio::select! {
                Some(_) = self.apps.recv() => {}
                Some(_) = self.providers.recv() => {}
                Some(_) = self.orphans.recv() => {}
                Some(_) = self.releases.recv() => {}
                // All senders are gone.
                else => std::future::pending().await,
            }
        }
    }
}

// === impl ReconcileQueue ===

impl ReconcileQueue {
    pub(crate) fn new() -> (Self, QueueReceivers) {
        let (apps, app_queue) = mpsc::unbounded_channel();
        let (providers, provider_queue) = mpsc::unbounded_channel();
        let (orphans, orphan_queue) = mpsc::unbounded_channel();
        let (releases, release_queue) = mpsc::unbounded_channel();
        let queues = QueueReceivers {
            apps: app_queue,
            providers: provider_queue,
            orphans: orphan_queue,
            releases: release_queue,
        };
        (Self { apps, providers, orphans, releases }, queues)
    }

    /// A closed receiver means that the process is ending.
    fn enqueue_app(&self, app: ObjectRef<Guarded<App>>) {
        let _ = self.apps.send(app);
    }

    fn enqueue_provider(&self, provider: ObjectRef<Guarded<Provider>>) {
        let _ = self.providers.send(provider);
    }

    pub(crate) fn enqueue_provider_named(&self, namespace: &str, name: &str) {
        self.enqueue_provider(ObjectRef::new(name).within(namespace));
    }

    pub(crate) fn enqueue_orphan(&self, secret: String) {
        let _ = self.orphans.send(secret);
    }

    pub(crate) fn enqueue_release(&self, id: AppId) {
        let _ = self.releases.send(id);
    }

    /// Queues every appID with stored keys: its App may be deleted.
    pub(crate) fn enqueue_all_releases(&self, objects: &ClusterState) {
        objects.quotas.app_ids().into_iter().for_each(|id| self.enqueue_release(id));
    }

    /// Queues the Apps that wait for room in their namespace and fit now.
    pub(crate) fn enqueue_waiting(&self, objects: &ClusterState, namespace: &str) {
        objects.quotas.admissible(namespace).iter().for_each(|place| self.enqueue_app(place.object_ref()));
    }

    pub(crate) fn enqueue_all_apps(&self, objects: &ClusterState) {
        for app in objects.apps.state() {
            self.enqueue_app(ObjectRef::from_obj(&*app));
        }
    }

    /// Queues everything, for the start of leadership.
    pub(crate) fn enqueue_everything(&self, objects: &ClusterState) {
        objects.published.secrets().into_iter().for_each(|secret| self.enqueue_orphan(secret));
        for provider in objects.providers.state() {
            self.enqueue_provider(ObjectRef::from_obj(&*provider));
        }
        self.enqueue_all_releases(objects);
        self.enqueue_all_apps(objects);
    }

    pub(crate) fn enqueue_apps_with_id(&self, objects: &ClusterState, id: &AppId) {
        self.enqueue_referencing_apps(objects, &Reference::AppId(id.clone()));
    }

    fn enqueue_apps_with_provider(&self, objects: &ClusterState, namespace: &str, provider: &str) {
        self.enqueue_referencing_apps(objects, &Reference::Provider(NamespacedName::new(namespace, provider)));
    }

    fn enqueue_apps_with_config_map(&self, objects: &ClusterState, namespace: &str, name: &str) {
        self.enqueue_referencing_apps(objects, &Reference::ConfigMap(NamespacedName::new(namespace, name)));
    }

    fn enqueue_for_secret(&self, objects: &ClusterState, namespace: &str, name: &str) {
        let secret = NamespacedName::new(namespace, name);
        for provider in objects.providers_by_secret.get(&secret) {
            self.enqueue_apps_with_provider(objects, namespace, provider.name());
            self.enqueue_provider(provider.object_ref());
        }
        self.enqueue_referencing_apps(objects, &Reference::Secret(secret));
    }

    fn enqueue_referencing_apps(&self, objects: &ClusterState, named: &Reference) {
        for app in objects.apps_by_reference.get(named) {
            self.enqueue_app(app.object_ref());
        }
    }
}

// === impl PublishedDocuments, PublishedIndex ===

impl PublishedDocuments {
    fn lock(&self) -> std::sync::MutexGuard<'_, PublishedIndex> {
        self.apps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, secret: &str) -> Option<PublishedApp> {
        self.lock().apps.get(secret).cloned()
    }

    /// Records what this operator wrote, unless the watch has already reported something newer.
    pub(crate) fn record_write(&self, secret: &str, app: PublishedApp) {
        let mut held = self.lock();
        if parse_version(&app.resource_version) > held.newest_version {
            self.put(&mut held, secret, Some(app));
        }
    }

    /// Records what the watch reports, unless this operator wrote something newer. Returns whether it changed anything.
    fn record_watched(&self, secret: &str, app: PublishedApp) -> bool {
        let version = parse_version(&app.resource_version);
        let mut held = self.lock();
        held.newest_version = held.newest_version.max(version);
        if held.apps.get(secret).is_some_and(|known| parse_version(&known.resource_version) > version) {
            return false;
        }
        self.put(&mut held, secret, Some(app.clone())) != Some(app)
    }

    /// Records that the watch reports the Secret as deleted, as of this version.
    fn record_deletion(&self, secret: &str, version: Option<u64>) {
        let mut held = self.lock();
        held.newest_version = held.newest_version.max(version.unwrap_or(0));
        let is_newer = |known: &PublishedApp| version.is_some_and(|gone| parse_version(&known.resource_version) > gone);
        if !held.apps.get(secret).is_some_and(is_newer) {
            self.put(&mut held, secret, None);
        }
    }

    fn put(&self, held: &mut PublishedIndex, secret: &str, app: Option<PublishedApp>) -> Option<PublishedApp> {
        self.quotas.record_document(secret, app.as_ref().map(|app| (app.namespace.as_str(), app.size)));
        held.put(secret, app)
    }

    /// The names of all known Secrets.
    fn secrets(&self) -> Vec<String> {
        self.lock().apps.keys().cloned().collect()
    }

    /// The names of the Secrets that are published for an App.
    fn of_app(&self, namespace: &str, name: &str) -> Vec<String> {
        self.lock().secrets.get(&NamespacedName::new(namespace, name))
    }
}

impl PublishedIndex {
    /// Returns the previous entry.
    fn put(&mut self, secret: &str, app: Option<PublishedApp>) -> Option<PublishedApp> {
        let place = |app: &PublishedApp| (NamespacedName::new(&app.namespace, &app.name), secret.to_owned());
        let now = app.iter().map(place).collect();
        let before = match app {
            Some(app) => self.apps.insert(secret.to_owned(), app),
            None => self.apps.remove(secret),
        };
        self.secrets.reindex(&before.iter().map(place).collect(), &now);
        before
    }
}

// === impl PublishedApp ===

impl PublishedApp {
    /// The published App in a Secret.
    pub(crate) fn from_secret(secret: &Secret) -> Option<Self> {
        let annotation = |name: &str| secret.annotations().get(name).cloned().unwrap_or_default();
        let document = secret.data.as_ref().and_then(|data| data.get(RENDERED_APP_KEY));
        Some(Self {
            revision: document.map(|document| Revision::of(&document.0)),
            size: document.map(|document| DocumentSize::of(&document.0)).unwrap_or_default(),
            namespace: annotation(NAMESPACE_ANNOTATION),
            name: annotation(NAME_ANNOTATION),
            resource_version: secret.resource_version()?,
            uid: secret.uid()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;
    use serde_json::json;

    use super::*;
    use crate::app::ownership::AppIdOwner;

    fn app(namespace: &str, app_id: &str, version: &str) -> Guarded<App> {
        let app = json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "App",
            "metadata": { "namespace": namespace, "name": "store", "uid": app_id, "resourceVersion": version },
            "spec": { "appID": app_id, "displayName": "Shop" },
        });
        serde_json::from_value(app).unwrap()
    }

    fn objects() -> (ClusterState, Writer<Guarded<App>>) {
        let (apps, writer) = store();
        let (providers, _) = store();
        (ClusterState::new(apps, providers, QuotaLimits::default()), writer)
    }

    fn published(version: &str, document: &[u8]) -> PublishedApp {
        PublishedApp {
            revision: Some(Revision::of(document)),
            namespace: "shop".into(),
            name: "store".into(),
            resource_version: version.into(),
            uid: "1".into(),
            size: DocumentSize::of(document),
        }
    }

    /// Runs the handler of Apps over these events, one watch per namespace.
    async fn seen(watches: Vec<Vec<Event<Guarded<App>>>>) -> (ClusterState, QueueReceivers) {
        let (objects, writer) = objects();
        objects.published.record_write("latchkey-app-shop", published("1", b"1"));
        let (wakes, queues) = ReconcileQueue::new();
        let watches = watches.into_iter().map(|events| stream::iter(events).map(Ok).boxed()).collect();
        follow_apps(watches, writer, objects.clone(), wakes, Health::new(&["apps"])).await;
        (objects, queues)
    }

    #[tokio::test]
    async fn an_app_deleted_before_the_first_sync_does_not_come_back() {
        let first = vec![
            Event::Init,
            Event::InitApply(app("shop", "shop", "3")),
            Event::InitDone,
            Event::Delete(app("shop", "shop", "4")),
        ];
        let second = vec![Event::Init, Event::InitApply(app("other", "other", "3")), Event::InitDone];
        // The second watch reports last, after every event of the first.
        let (objects, writer) = objects();
        let (wakes, _queues) = ReconcileQueue::new();
        let (more, late) = mpsc::unbounded_channel();
        let late = stream::unfold(late, |mut late| async { Some((late.recv().await?, late)) });
        let follower = tokio::spawn(follow_apps(
            vec![stream::iter(first).map(Ok).boxed(), late.boxed()],
            writer,
            objects.clone(),
            wakes,
            Health::new(&["apps"]),
        ));
        tokio::task::yield_now().await;
        second.into_iter().for_each(|event| more.send(Ok(event)).unwrap());
        drop(more);
        follower.await.unwrap();
        let there: Vec<_> = objects.apps.state().iter().map(|app| app.namespace().unwrap()).collect();
        assert_eq!(there, ["other"]);
    }

    #[tokio::test]
    async fn an_app_recreated_with_another_app_id_leaves_its_document() {
        let events = vec![
            Event::Init,
            Event::InitApply(app("shop", "shop", "3")),
            Event::InitApply(app("waiting", "shop", "3")),
            Event::InitDone,
            Event::Apply(app("shop", "other", "5")),
        ];
        let (_, mut queues) = seen(vec![events]).await;
        assert_eq!(queues.orphans.try_recv().unwrap(), "latchkey-app-shop");
        let mut woken = Vec::new();
        while let Ok(app) = queues.apps.try_recv() {
            woken.push(app.namespace.unwrap());
        }
        assert_eq!(woken, ["shop", "waiting", "shop", "waiting"], "its appID may be free for another App");
    }

    fn created(name: &str, second: u32) -> Guarded<App> {
        let app = json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "App",
            "metadata": {
                "namespace": "shop", "name": name, "resourceVersion": "3",
                "creationTimestamp": format!("2026-01-02T03:04:{second:02}Z"),
            },
            "spec": { "displayName": "Shop" },
        });
        serde_json::from_value(app).unwrap()
    }

    #[tokio::test]
    async fn if_not_all_apps_of_a_namespace_fit_older_ones_have_precedence() {
        let apps = [created("young", 3), created("held", 0), created("old", 1), created("middle", 2)];
        let claims = apps.clone().map(|app| Claim::from_app(app.0.as_ref().unwrap()));
        let ahead = async |limit| {
            let (apps_store, writer) = store();
            let (providers, _) = store();
            let objects =
                ClusterState::new(apps_store, providers, QuotaLimits { apps: limit, ..QuotaLimits::default() });
            let holder = AppIdOwner { namespace: "shop".into(), name: "held".into() };
            objects.quotas.record_keys(&"held".parse().unwrap(), Some(holder));
            let there = apps.clone().into_iter().map(Event::InitApply);
            let events: Vec<_> = std::iter::once(Event::Init).chain(there).chain([Event::InitDone]).collect();
            let (wakes, _queues) = ReconcileQueue::new();
            let watches = vec![stream::iter(events).map(Ok).boxed()];
            follow_apps(watches, writer, objects.clone(), wakes, Health::new(&["apps"])).await;
            claims.clone().map(|claim| objects.count_ahead_of(&claim))
        };
        assert_eq!(ahead(3).await, [2, 0, 0, 1], "an App that already owns its appID does not count");
        assert_eq!(ahead(100).await, [0; 4], "there is room for all");
    }

    #[test]
    fn metadata_of_others_is_neither_stored_nor_a_change() {
        let edited = |note: &str| {
            let mut app = app("shop", "shop", "3");
            let annotations = [("example.com/note", note), ("latchkey.dev/rotate-keys", "1")];
            let annotations = annotations.map(|(name, value)| (name.to_owned(), value.to_owned()));
            app.meta_mut().annotations = Some(annotations.into());
            app.meta_mut().labels = Some([("note".to_owned(), note.to_owned())].into());
            let Event::Apply(app) = strip_metadata(Ok(Event::Apply(app))).unwrap() else {
                unreachable!("an Apply event")
            };
            app
        };
        let (one, other) = (edited("1"), edited("2"));
        assert!(is_same_but_for_status(&one, &other));
        assert_eq!(one.annotations().keys().collect::<Vec<_>>(), ["latchkey.dev/rotate-keys"]);
        assert!(one.labels().is_empty());
    }

    #[test]
    fn the_newer_of_written_and_watched_documents_counts() {
        let there = objects().0.published;
        let revision = |there: &PublishedDocuments| there.get("shop").and_then(|app| app.revision);
        there.record_write("shop", published("10", b"ours"));
        assert!(!there.record_watched("shop", published("10", b"ours")), "unchanged");
        // Somebody edits it at once, and the watch is faster than the response to our own write.
        assert!(there.record_watched("shop", published("12", b"theirs")));
        there.record_write("shop", published("11", b"ours"));
        assert_eq!(revision(&there), Some(Revision::of(b"theirs")));
        there.record_deletion("shop", Some(14));
        there.record_write("shop", published("13", b"ours"));
        assert_eq!(revision(&there), None);
        // The watch is behind what we wrote.
        there.record_write("shop", published("20", b"ours"));
        assert!(!there.record_watched("shop", published("17", b"theirs")));
        there.record_deletion("shop", Some(18));
        assert_eq!(revision(&there), Some(Revision::of(b"ours")));
        // A list does not say when an object was deleted.
        there.record_deletion("shop", None);
        assert_eq!(revision(&there), None);
    }

    #[tokio::test]
    async fn the_app_of_a_deleted_document_is_enqueued_even_if_the_operator_deleted_it() {
        let there = vec![Event::Init, Event::InitApply(app("shop", "shop", "3")), Event::InitDone];
        let (objects, _) = seen(vec![there]).await;
        let secret = json!({
            "metadata": { "name": "latchkey-app-shop", "namespace": "latchkey", "uid": "1", "resourceVersion": "7" },
        });
        let secret: Secret = serde_json::from_value(secret).unwrap();
        let events = vec![Event::Init, Event::InitApply(secret.clone()), Event::InitDone, Event::Delete(secret)];
        let (wakes, mut queues) = ReconcileQueue::new();
        let watches = vec![stream::iter(events).map(Ok).boxed()];
        follow_published(watches, objects, wakes, Health::new(&["rendered apps"])).await;
        assert_eq!(queues.apps.try_recv().unwrap().name, "store");
    }

    #[tokio::test]
    async fn changed_keys_enqueue_their_app_unless_it_used_them_and_nobody_else_claims_its_app_id() {
        let keys = |version: &str| {
            let secret = json!({
                "apiVersion": "v1", "kind": "Secret",
                "metadata": { "name": "latchkey-keys-shop", "namespace": "latchkey", "resourceVersion": version },
            });
            serde_json::from_value::<Metadata<Secret>>(secret).unwrap()
        };
        let woken_by = async |apps: &[&str], event| {
            let there = apps.iter().map(|namespace| Event::InitApply(app(namespace, "shop", "3")));
            let (objects, _) =
                seen(vec![std::iter::once(Event::Init).chain(there).chain([Event::InitDone]).collect()]).await;
            objects.key_versions.record(&"shop".parse().unwrap(), "7");
            let (wakes, mut queues) = ReconcileQueue::new();
            let watches = vec![stream::iter([Event::Init, Event::InitDone, event]).map(Ok).boxed()];
            follow_keys(watches, objects, wakes, Health::new(&["keys"])).await;
            std::iter::from_fn(move || queues.apps.try_recv().ok()).count()
        };
        assert_eq!(woken_by(&["shop"], Event::Apply(keys("7"))).await, 0);
        assert_eq!(woken_by(&["shop"], Event::Apply(keys("8"))).await, 1, "somebody changed them");
        assert_eq!(woken_by(&["shop", "waiting"], Event::Apply(keys("7"))).await, 2, "another App waits for the appID");
        assert_eq!(woken_by(&["shop"], Event::Delete(keys("7"))).await, 1);
    }

    #[tokio::test]
    async fn a_standby_keeps_no_queue() {
        let (objects, mut writer) = objects();
        writer.apply_watcher_event(&Event::Init);
        writer.apply_watcher_event(&Event::InitApply(app("shop", "shop", "3")));
        writer.apply_watcher_event(&Event::InitDone);
        objects.published.record_write("latchkey-app-shop", published("1", b"1"));
        let (wakes, mut queues) = ReconcileQueue::new();
        wakes.enqueue_everything(&objects);
        tokio::select! {
            biased;
            never = queues.discard_all() => match never {},
            () = tokio::task::yield_now() => {}
        }
        assert!(queues.apps.is_empty() && queues.orphans.is_empty());
        // When it becomes the leader, it starts with everything.
        wakes.enqueue_everything(&objects);
        assert_eq!(queues.apps.try_recv().unwrap().name, "store");
        assert_eq!(queues.orphans.try_recv().unwrap(), "latchkey-app-shop");
    }
}
