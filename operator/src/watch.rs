//! What the operator sees of the cluster: a store for each kind that it needs whole, and what wakes whom.

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

pub(crate) use self::index::{Index, Named, Place};
use self::index::{named_by_app, named_by_provider};
use crate::{
    admin::{Health, why},
    app::{
        keys::secret as key_secret,
        owner::{Claim, Judged},
    },
    backoff::ShortBackoff,
    quota::{Limits, Quotas, Size},
};

/// An App or a Provider, or why it does not decode: one bad object does not stop the others.
pub(crate) type Guarded<K> = DeserializeGuard<K>;

/// A watch that is dropped in silence is else unseen for five minutes (design, "How config reaches the servers").
pub(crate) const WATCH_SECONDS: u32 = 30;
/// Objects in a page of a list. Rendered Apps may have half a MiB each.
const PAGE: u32 = 500;
const PAGE_OF_DOCUMENTS: u32 = 100;

/// Everything of which the operator keeps a copy.
#[derive(Clone)]
pub(crate) struct Objects {
    pub(crate) apps: Store<Guarded<App>>,
    pub(crate) providers: Store<Guarded<Provider>>,
    pub(crate) published: Arc<Published>,
    pub(crate) keys: Arc<JudgedKeys>,
    pub(crate) quotas: Arc<Quotas>,
    /// The Apps by what they name.
    apps_by: Arc<Index<Named, Place>>,
    /// The Providers by their Secret.
    providers_by: Arc<Index<Place, Place>>,
}

/// What is published, by the name of its Secret. The documents themselves are not kept.
pub(crate) struct Published {
    apps: Mutex<PublishedApps>,
    quotas: Arc<Quotas>,
}

#[derive(Default)]
struct PublishedApps {
    apps: HashMap<String, PublishedApp>,
    /// The Secrets by the App whose they are.
    secrets: Index<Place, String>,
    /// The newest version that the watch has told of any of them.
    told: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PublishedApp {
    /// Of the octets that are there now, whoever wrote them.
    pub(crate) revision: Option<Revision>,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) resource_version: String,
    pub(crate) uid: String,
    pub(crate) size: Size,
}

/// The version of each App's keys that its last reconcile went by: what a watch tells of it is no news.
#[derive(Default)]
pub(crate) struct JudgedKeys(Mutex<HashMap<AppId, String>>);

/// Versions of one resource grow; what is no number is older than all.
fn version_number(resource_version: &str) -> u64 {
    resource_version.parse().unwrap_or(0)
}

/// Who is to be reconciled, as the receivers of [`Wakes`] hear it.
pub(crate) struct Queues {
    pub(crate) apps: mpsc::UnboundedReceiver<ObjectRef<Guarded<App>>>,
    pub(crate) providers: mpsc::UnboundedReceiver<ObjectRef<Guarded<Provider>>>,
    pub(crate) orphans: mpsc::UnboundedReceiver<String>,
    pub(crate) releases: mpsc::UnboundedReceiver<AppId>,
}

/// Who is to be reconciled.
#[derive(Clone)]
pub(crate) struct Wakes {
    pub(crate) apps: mpsc::UnboundedSender<ObjectRef<Guarded<App>>>,
    pub(crate) providers: mpsc::UnboundedSender<ObjectRef<Guarded<Provider>>>,
    /// Names of rendered Secrets whose App may be gone.
    pub(crate) orphans: mpsc::UnboundedSender<String>,
    /// appIDs with keys whose App may be gone.
    pub(crate) releases: mpsc::UnboundedSender<AppId>,
}

/// A change as a watch tells it, or as a list shows it to have been missed.
enum Seen<K> {
    Applied(K),
    Gone {
        namespace: String,
        name: String,
        /// None: a list showed it.
        version: Option<u64>,
    },
    /// Everything that was there at the start was told.
    Synced,
}

/// Starts every watch. Each goes on until the process ends.
pub(crate) fn start(
    client: &Client,
    namespace: &str,
    watched: &[String],
    limits: Limits,
    health: &Health,
    wakes: &Wakes,
) -> (Objects, Vec<tokio::task::JoinHandle<()>>) {
    let (apps, apps_writer) = store();
    let (providers, providers_writer) = store();
    let objects = Objects::new(apps, providers, limits);

    let config = || watcher::Config::default().timeout(WATCH_SECONDS).page_size(PAGE);
    // What belongs to releases of Helm and to ServiceAccounts is nobody's client secret, and there is much of it.
    let secrets = || config().fields("type!=helm.sh/release.v1,type!=kubernetes.io/service-account-token");
    let tasks = vec![
        tokio::spawn(follow_apps(
            watches(client, watched, config()),
            apps_writer,
            objects.clone(),
            wakes.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_providers(
            watches(client, watched, config()),
            providers_writer,
            objects.clone(),
            wakes.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_keys(
            watches(client, &[namespace.to_owned()], config().fields(&format!("type={APP_KEYS_TYPE}"))),
            objects.clone(),
            wakes.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_published(
            own(client, namespace, config().page_size(PAGE_OF_DOCUMENTS).fields(&format!("type={RENDERED_APP_TYPE}"))),
            objects.clone(),
            wakes.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_secrets(
            watches::<Metadata<Secret>>(client, watched, secrets()),
            objects.clone(),
            wakes.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_config_maps(
            watches::<Metadata<ConfigMap>>(client, watched, config()),
            objects.clone(),
            wakes.clone(),
            health.clone(),
        )),
    ];
    (objects, tasks)
}

/// What the names of our annotations begin with (`latchkey_crds::names`).
const OWN_ANNOTATIONS: &str = "latchkey.dev/";
/// The names of the install's Secrets, up to the appID (`latchkey_crds::names`).
const KEYS_PREFIX: &str = "latchkey-keys-";
const RENDERED_PREFIX: &str = "latchkey-app-";

/// The names by which readiness tells that a watch has not told everything yet.
pub(crate) const WATCHES: [&str; 6] = ["apps", "providers", "keys", "rendered apps", "secrets", "configmaps"];

type Watch<K> = BoxStream<'static, watcher::Result<Event<K>>>;

/// A watch of every watched namespace; of all of them at once where none is named.
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
    let watch = |api| watcher(api, config.clone()).backoff(ShortBackoff::of_watch()).map(lighter).boxed();
    apis(client, watched).into_iter().map(watch).collect()
}

/// Of an object only its metadata: values stay where they are until they are needed.
type Metadata<K> = PartialObjectMeta<K>;

fn own(client: &Client, namespace: &str, config: watcher::Config) -> Vec<Watch<Secret>> {
    watches(client, &[namespace.to_owned()], config)
}

/// Without what nobody here reads: others' annotations and labels can have 256 KiB and more on each object, and an edit
/// of them is no reason to reconcile.
fn lighter<K: Resource>(event: watcher::Result<Event<K>>) -> watcher::Result<Event<K>> {
    event.map(|event| {
        event.modify(|object| {
            object.meta_mut().managed_fields = None;
            object.meta_mut().labels = None;
            object.annotations_mut().retain(|name, _| name.starts_with(OWN_ANNOTATIONS));
        })
    })
}

/// Tells what the watches see. What a new list shows unchanged is not told again.
async fn follow<K>(what: &'static str, watches: Vec<Watch<K>>, health: Health, mut tell: impl FnMut(Seen<K>))
where
    K: Resource + Send + 'static,
{
    /// By namespace and name, what tells one version of an object from another.
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
                    tell(Seen::Applied(object));
                }
            }
            Ok(Event::InitDone) => {
                let listed = scope.listing.take().unwrap_or_default();
                let gone: Vec<_> = scope.known.keys().filter(|key| !listed.contains(*key)).cloned().collect();
                for (namespace, name) in gone {
                    scope.known.remove(&(namespace.clone(), name.clone()));
                    tell(Seen::Gone { namespace, name, version: None });
                }
                if !std::mem::replace(&mut scope.synced, true) && scopes.iter().all(|scope| scope.synced) {
                    tell(Seen::Synced);
                    health.synced(what);
                }
            }
            Ok(Event::Apply(object)) => {
                scope.known.insert(key(&object), version(&object));
                tell(Seen::Applied(object));
            }
            Ok(Event::Delete(object)) => {
                let (namespace, name) = key(&object);
                scope.known.remove(&(namespace.clone(), name.clone()));
                let version = object.resource_version().as_deref().map(version_number);
                tell(Seen::Gone { namespace, name, version });
            }
            Err(error) => {
                warn!(watch = what, error = why(&error), "a watch failed; it is tried again");
                health.watch_failed(what, &error);
            }
        }
    }
}

/// Puts what is seen into a store.
struct Keeper<K: Resource<DynamicType = ()> + Clone + 'static> {
    writer: Writer<K>,
    store: Store<K>,
    /// What is there before everything was told; none afterwards. What goes meanwhile is not to come into the store.
    early: Option<HashMap<ObjectRef<K>, Arc<K>>>,
}

impl<K: Resource<DynamicType = ()> + Clone + 'static> Keeper<K> {
    fn new(writer: Writer<K>) -> Self {
        let store = writer.as_reader();
        Self { writer, store, early: Some(HashMap::new()) }
    }

    /// Gives the object before it.
    fn keep(&mut self, seen: &Seen<K>) -> Option<Arc<K>> {
        match (seen, &mut self.early) {
            (Seen::Applied(object), Some(early)) => early.insert(ObjectRef::from_obj(object), Arc::new(object.clone())),
            (Seen::Applied(object), None) => {
                let before = self.store.get(&ObjectRef::from_obj(object));
                self.writer.apply_watcher_event(&Event::Apply(object.clone()));
                before
            }
            (Seen::Gone { namespace, name, .. }, Some(early)) => early.remove(&ObjectRef::new(name).within(namespace)),
            (Seen::Gone { namespace, name, .. }, None) => {
                let before = self.store.get(&ObjectRef::new(name).within(namespace))?;
                self.writer.apply_watcher_event(&Event::Delete(K::clone(&before)));
                Some(before)
            }
            (Seen::Synced, early) => {
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

/// What is named by what is there now.
fn now<K, N, V>(seen: &Seen<K>, named: fn(&K) -> BTreeSet<(N, V)>) -> BTreeSet<(N, V)> {
    match seen {
        Seen::Applied(object) => named(object),
        Seen::Gone { .. } | Seen::Synced => BTreeSet::new(),
    }
}

async fn follow_apps(
    watches: Vec<Watch<Guarded<App>>>,
    writer: Writer<Guarded<App>>,
    objects: Objects,
    wakes: Wakes,
    health: Health,
) {
    let mut keeper = Keeper::new(writer);
    follow("apps", watches, health, |seen| {
        let before = keeper.keep(&seen);
        objects.apps_by.turn(&before.as_deref().map(named_by_app).unwrap_or_default(), &now(&seen, named_by_app));
        let id_before = before.as_ref().and_then(|app| app_id(app));
        let left = |namespace: &str, name: &str| {
            for secret in objects.published.of_app(namespace, name) {
                wakes.orphan(secret);
            }
            // The appID may be free for another now.
            if let Some(id) = &id_before {
                wakes.apps_with_id(&objects, id);
                wakes.release(id.clone());
            }
            objects.quotas.wait_no_more(namespace, name);
            wakes.waiting(&objects, namespace);
        };
        match &seen {
            Seen::Applied(app) => {
                // Its own status written is no news.
                if before.is_none_or(|before| !same_but_for_status(&before, app)) {
                    wakes.app(ObjectRef::from_obj(app));
                }
                // Made anew under its name, with another appID.
                if id_before != app_id(app) {
                    left(&app.namespace().unwrap_or_default(), &app.name_any());
                }
            }
            Seen::Gone { namespace, name, .. } => left(namespace, name),
            Seen::Synced => {}
        }
    })
    .await;
}

async fn follow_providers(
    watches: Vec<Watch<Guarded<Provider>>>,
    writer: Writer<Guarded<Provider>>,
    objects: Objects,
    wakes: Wakes,
    health: Health,
) {
    let mut keeper = Keeper::new(writer);
    follow("providers", watches, health, |seen| {
        let before = keeper.keep(&seen);
        let named_before = before.as_deref().map(named_by_provider).unwrap_or_default();
        objects.providers_by.turn(&named_before, &now(&seen, named_by_provider));
        match &seen {
            Seen::Applied(provider) => {
                if before.is_none_or(|before| !same_but_for_status(&before, provider)) {
                    wakes.provider(ObjectRef::from_obj(provider));
                    let namespace = provider.namespace().unwrap_or_default();
                    wakes.apps_with_provider(&objects, &namespace, &provider.name_any());
                }
            }
            Seen::Gone { namespace, name, .. } => wakes.apps_with_provider(&objects, namespace, name),
            Seen::Synced => {}
        }
    })
    .await;
}

async fn follow_keys(watches: Vec<Watch<Metadata<Secret>>>, objects: Objects, wakes: Wakes, health: Health) {
    let id = |name: &str| name.strip_prefix(KEYS_PREFIX).and_then(|id| id.parse().ok());
    let mut synced = false;
    follow("keys", watches, health, |seen| match seen {
        Seen::Applied(secret) => {
            let Some(id) = id(&secret.name_any()) else { return };
            let before = objects.quotas.holder(&id);
            let holder = key_secret::holder(&secret.metadata);
            objects.quotas.keys(&id, holder.clone());
            // At the start everything is reconciled anyway.
            if !synced {
                return;
            }
            if !objects.is_judged(&id, &secret.resource_version().unwrap_or_default()) {
                wakes.apps_with_id(&objects, &id);
            }
            // The platform team gave the appID to another namespace.
            if let Some(before) =
                before.filter(|before| holder.is_none_or(|holder| holder.namespace != before.namespace))
            {
                wakes.waiting(&objects, &before.namespace);
            }
        }
        Seen::Gone { name, .. } => {
            if let Some(id) = id(&name) {
                objects.keys.forget(&id);
                let before = objects.quotas.holder(&id);
                objects.quotas.keys(&id, None);
                wakes.apps_with_id(&objects, &id);
                if let Some(before) = before {
                    wakes.waiting(&objects, &before.namespace);
                }
            }
        }
        Seen::Synced => synced = true,
    })
    .await;
}

async fn follow_published(watches: Vec<Watch<Secret>>, objects: Objects, wakes: Wakes, health: Health) {
    let mut synced = false;
    follow("rendered apps", watches, health, |seen| {
        let before = |name: &str| objects.published.get(name).map(|app| app.namespace);
        let name = match seen {
            Seen::Applied(secret) => {
                let name = secret.name_any();
                if !PublishedApp::of(&secret).is_some_and(|app| objects.published.told(&name, app)) {
                    return;
                }
                name
            }
            // Also where this operator took it away: its App may have been made anew meanwhile.
            Seen::Gone { name, version, .. } => {
                let namespace = before(&name);
                objects.published.gone(&name, version);
                if let Some(namespace) = namespace {
                    wakes.waiting(&objects, &namespace);
                }
                name
            }
            Seen::Synced => {
                synced = true;
                return;
            }
        };
        if synced && let Some(id) = rendered_id(&name) {
            wakes.apps_with_id(&objects, &id);
        }
        wakes.orphan(name);
    })
    .await;
}

async fn follow_secrets(watches: Vec<Watch<Metadata<Secret>>>, objects: Objects, wakes: Wakes, health: Health) {
    let mut synced = false;
    follow("secrets", watches, health, |seen| {
        // At the start everything is reconciled anyway.
        match &seen {
            Seen::Applied(secret) if synced => {
                wakes.with_secret(&objects, &secret.namespace().unwrap_or_default(), &secret.name_any());
            }
            Seen::Applied(_) => {}
            Seen::Gone { namespace, name, .. } => wakes.with_secret(&objects, namespace, name),
            Seen::Synced => synced = true,
        }
    })
    .await;
}

async fn follow_config_maps(watches: Vec<Watch<Metadata<ConfigMap>>>, objects: Objects, wakes: Wakes, health: Health) {
    let mut synced = false;
    follow("configmaps", watches, health, |seen| match &seen {
        Seen::Applied(map) if synced => {
            wakes.apps_with_config_map(&objects, &map.namespace().unwrap_or_default(), &map.name_any());
        }
        Seen::Applied(_) => {}
        Seen::Gone { namespace, name, .. } => wakes.apps_with_config_map(&objects, namespace, name),
        Seen::Synced => synced = true,
    })
    .await;
}

/// Whether two versions of an object differ in what a reconcile reads.
fn same_but_for_status<K: Resource>(one: &Guarded<K>, other: &Guarded<K>) -> bool {
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

/// The appID whose document a Secret of this name holds.
pub(crate) fn rendered_id(secret: &str) -> Option<AppId> {
    secret.strip_prefix(RENDERED_PREFIX)?.parse().ok()
}

/// The appID that an App asks for, if it is one.
pub(crate) fn app_id(app: &Guarded<App>) -> Option<AppId> {
    app.0.as_ref().ok()?.app_id().ok()
}

// === impl Objects ===

impl Objects {
    pub(crate) fn new(apps: Store<Guarded<App>>, providers: Store<Guarded<Provider>>, limits: Limits) -> Self {
        let (apps_by, providers_by) = (Arc::default(), Arc::default());
        let quotas = Arc::new(Quotas::new(limits));
        let published = Published { apps: Mutex::default(), quotas: Arc::clone(&quotas) };
        Self { apps, providers, published: Arc::new(published), keys: Arc::default(), quotas, apps_by, providers_by }
    }

    /// How many Apps of the namespace may take an appID before this one: older ones that wait for room, or that nobody
    /// has judged yet. Counted only where not all of them have room.
    pub(crate) fn ahead_of(&self, claim: &Claim) -> u32 {
        let namespace = claim.holder.namespace.as_str();
        let named = Named::Namespace(namespace.to_owned());
        if self.quotas.has_room(namespace, self.apps_by.count(&named)) {
            return 0;
        }
        let places = self.apps_by.of(&named);
        let apps = places.iter().filter_map(|place| self.apps.get(&place.object()));
        let ahead = apps.filter(|app| {
            let Ok(app) = &app.0 else { return false };
            let other = Claim::of(app);
            let holds = app.app_id().is_ok_and(|id| self.quotas.holds_id(&id, namespace));
            let comes = match other.judged {
                Judged::NotYet => true,
                Judged::Valid | Judged::Broken => self.quotas.waits(namespace, &other.holder.name),
                Judged::Going => false,
            };
            comes && !holds && other.is_before(claim)
        });
        u32::try_from(ahead.count()).unwrap_or(u32::MAX)
    }

    /// The Apps that ask for an appID.
    pub(crate) fn apps_with_id(&self, id: &AppId) -> Vec<Arc<Guarded<App>>> {
        let named = self.apps_by.of(&Named::AppId(id.clone()));
        named.iter().filter_map(|place| self.apps.get(&place.object())).collect()
    }

    /// Whether these keys are no news to anybody: their App has seen them, and no other asks for the appID.
    fn is_judged(&self, id: &AppId, version: &str) -> bool {
        self.keys.held().get(id).is_some_and(|judged| judged == version)
            && self.apps_by.of(&Named::AppId(id.clone())).len() == 1
    }
}

// === impl JudgedKeys ===

impl JudgedKeys {
    fn held(&self) -> std::sync::MutexGuard<'_, HashMap<AppId, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn judged(&self, id: &AppId, version: &str) {
        self.held().insert(id.clone(), version.to_owned());
    }

    fn forget(&self, id: &AppId) {
        self.held().remove(id);
    }
}

// === impl Queues ===

impl Queues {
    /// Hears and does nothing, while another operator acts: what nobody takes would be kept for ever.
    pub(crate) async fn drain(&mut self) -> Infallible {
        loop {
            tokio::select! {
                Some(_) = self.apps.recv() => {}
                Some(_) = self.providers.recv() => {}
                Some(_) = self.orphans.recv() => {}
                Some(_) = self.releases.recv() => {}
                // Nobody is left who could wake anybody.
                else => std::future::pending().await,
            }
        }
    }
}

// === impl Wakes ===

impl Wakes {
    pub(crate) fn new() -> (Self, Queues) {
        let (apps, app_queue) = mpsc::unbounded_channel();
        let (providers, provider_queue) = mpsc::unbounded_channel();
        let (orphans, orphan_queue) = mpsc::unbounded_channel();
        let (releases, release_queue) = mpsc::unbounded_channel();
        let queues =
            Queues { apps: app_queue, providers: provider_queue, orphans: orphan_queue, releases: release_queue };
        (Self { apps, providers, orphans, releases }, queues)
    }

    /// A receiver that is gone means that the process ends.
    fn app(&self, app: ObjectRef<Guarded<App>>) {
        let _ = self.apps.send(app);
    }

    fn provider(&self, provider: ObjectRef<Guarded<Provider>>) {
        let _ = self.providers.send(provider);
    }

    pub(crate) fn provider_named(&self, namespace: &str, name: &str) {
        self.provider(ObjectRef::new(name).within(namespace));
    }

    pub(crate) fn orphan(&self, secret: String) {
        let _ = self.orphans.send(secret);
    }

    pub(crate) fn release(&self, id: AppId) {
        let _ = self.releases.send(id);
    }

    /// Every appID of which keys are kept: its App may be gone.
    pub(crate) fn retained(&self, objects: &Objects) {
        objects.quotas.ids().into_iter().for_each(|id| self.release(id));
    }

    /// Those that wait for room in their namespace and have it now.
    pub(crate) fn waiting(&self, objects: &Objects, namespace: &str) {
        objects.quotas.admissible(namespace).iter().for_each(|place| self.app(place.object()));
    }

    pub(crate) fn all(&self, objects: &Objects) {
        for app in objects.apps.state() {
            self.app(ObjectRef::from_obj(&*app));
        }
    }

    /// What a reconcile is to begin with.
    pub(crate) fn everything(&self, objects: &Objects) {
        objects.published.secrets().into_iter().for_each(|secret| self.orphan(secret));
        for provider in objects.providers.state() {
            self.provider(ObjectRef::from_obj(&*provider));
        }
        self.retained(objects);
        self.all(objects);
    }

    pub(crate) fn apps_with_id(&self, objects: &Objects, id: &AppId) {
        self.apps_that_name(objects, &Named::AppId(id.clone()));
    }

    fn apps_with_provider(&self, objects: &Objects, namespace: &str, provider: &str) {
        self.apps_that_name(objects, &Named::Provider(Place::new(namespace, provider)));
    }

    fn apps_with_config_map(&self, objects: &Objects, namespace: &str, name: &str) {
        self.apps_that_name(objects, &Named::ConfigMap(Place::new(namespace, name)));
    }

    fn with_secret(&self, objects: &Objects, namespace: &str, name: &str) {
        let secret = Place::new(namespace, name);
        for provider in objects.providers_by.of(&secret) {
            self.apps_with_provider(objects, namespace, provider.name());
            self.provider(provider.object());
        }
        self.apps_that_name(objects, &Named::Secret(secret));
    }

    fn apps_that_name(&self, objects: &Objects, named: &Named) {
        for app in objects.apps_by.of(named) {
            self.app(app.object());
        }
    }
}

// === impl Published, PublishedApps ===

impl Published {
    fn held(&self) -> std::sync::MutexGuard<'_, PublishedApps> {
        self.apps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, secret: &str) -> Option<PublishedApp> {
        self.held().apps.get(secret).cloned()
    }

    /// Notes what this operator wrote. Where the watch is further already, it knows better what is there.
    pub(crate) fn wrote(&self, secret: &str, app: PublishedApp) {
        let mut held = self.held();
        if version_number(&app.resource_version) > held.told {
            self.put(&mut held, secret, Some(app));
        }
    }

    /// Notes what the watch tells; tells whether that is news. What this operator wrote since then is newer.
    fn told(&self, secret: &str, app: PublishedApp) -> bool {
        let version = version_number(&app.resource_version);
        let mut held = self.held();
        held.told = held.told.max(version);
        if held.apps.get(secret).is_some_and(|known| version_number(&known.resource_version) > version) {
            return false;
        }
        self.put(&mut held, secret, Some(app.clone())) != Some(app)
    }

    /// Notes that the watch tells it gone, as of that version.
    fn gone(&self, secret: &str, version: Option<u64>) {
        let mut held = self.held();
        held.told = held.told.max(version.unwrap_or(0));
        let is_newer =
            |known: &PublishedApp| version.is_some_and(|gone| version_number(&known.resource_version) > gone);
        if !held.apps.get(secret).is_some_and(is_newer) {
            self.put(&mut held, secret, None);
        }
    }

    fn put(&self, held: &mut PublishedApps, secret: &str, app: Option<PublishedApp>) -> Option<PublishedApp> {
        self.quotas.document(secret, app.as_ref().map(|app| (app.namespace.as_str(), app.size)));
        held.put(secret, app)
    }

    /// Every Secret that is known.
    fn secrets(&self) -> Vec<String> {
        self.held().apps.keys().cloned().collect()
    }

    /// The Secrets that are published for an App.
    fn of_app(&self, namespace: &str, name: &str) -> Vec<String> {
        self.held().secrets.of(&Place::new(namespace, name))
    }
}

impl PublishedApps {
    /// Gives what was there.
    fn put(&mut self, secret: &str, app: Option<PublishedApp>) -> Option<PublishedApp> {
        let place = |app: &PublishedApp| (Place::new(&app.namespace, &app.name), secret.to_owned());
        let now = app.iter().map(place).collect();
        let before = match app {
            Some(app) => self.apps.insert(secret.to_owned(), app),
            None => self.apps.remove(secret),
        };
        self.secrets.turn(&before.iter().map(place).collect(), &now);
        before
    }
}

// === impl PublishedApp ===

impl PublishedApp {
    /// What a Secret publishes.
    pub(crate) fn of(secret: &Secret) -> Option<Self> {
        let annotation = |name: &str| secret.annotations().get(name).cloned().unwrap_or_default();
        let document = secret.data.as_ref().and_then(|data| data.get(RENDERED_APP_KEY));
        Some(Self {
            revision: document.map(|document| Revision::of(&document.0)),
            size: document.map(|document| Size::of(&document.0)).unwrap_or_default(),
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
    use crate::app::owner::Holder;

    fn app(namespace: &str, app_id: &str, version: &str) -> Guarded<App> {
        let app = json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "App",
            "metadata": { "namespace": namespace, "name": "store", "uid": app_id, "resourceVersion": version },
            "spec": { "appID": app_id, "displayName": "Shop" },
        });
        serde_json::from_value(app).unwrap()
    }

    fn objects() -> (Objects, Writer<Guarded<App>>) {
        let (apps, writer) = store();
        let (providers, _) = store();
        (Objects::new(apps, providers, Limits::default()), writer)
    }

    fn published(version: &str, document: &[u8]) -> PublishedApp {
        PublishedApp {
            revision: Some(Revision::of(document)),
            namespace: "shop".into(),
            name: "store".into(),
            resource_version: version.into(),
            uid: "1".into(),
            size: Size::of(document),
        }
    }

    /// What the watches of Apps tell, each of a namespace.
    async fn seen(watches: Vec<Vec<Event<Guarded<App>>>>) -> (Objects, Queues) {
        let (objects, writer) = objects();
        objects.published.wrote("latchkey-app-shop", published("1", b"1"));
        let (wakes, queues) = Wakes::new();
        let watches = watches.into_iter().map(|events| stream::iter(events).map(Ok).boxed()).collect();
        follow_apps(watches, writer, objects.clone(), wakes, Health::new(&["apps"])).await;
        (objects, queues)
    }

    #[tokio::test]
    async fn an_app_that_goes_before_every_watch_has_told_all_does_not_come_back() {
        let first = vec![
            Event::Init,
            Event::InitApply(app("shop", "shop", "3")),
            Event::InitDone,
            Event::Delete(app("shop", "shop", "4")),
        ];
        let second = vec![Event::Init, Event::InitApply(app("other", "other", "3")), Event::InitDone];
        // The second tells last: every one of the first comes before its end.
        let (objects, writer) = objects();
        let (wakes, _queues) = Wakes::new();
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
    async fn who_is_made_anew_with_another_app_id_leaves_its_document() {
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
        assert_eq!(woken, ["shop", "waiting", "shop", "waiting"], "its appID may be free for another");
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
    async fn where_not_all_apps_of_a_namespace_have_room_the_older_come_first() {
        let apps = [created("young", 3), created("held", 0), created("old", 1), created("middle", 2)];
        let claims = apps.clone().map(|app| Claim::of(app.0.as_ref().unwrap()));
        let ahead = async |limit| {
            let (apps_store, writer) = store();
            let (providers, _) = store();
            let objects = Objects::new(apps_store, providers, Limits { apps: limit, ..Limits::default() });
            let holder = Holder { namespace: "shop".into(), name: "held".into() };
            objects.quotas.keys(&"held".parse().unwrap(), Some(holder));
            let there = apps.clone().into_iter().map(Event::InitApply);
            let events: Vec<_> = std::iter::once(Event::Init).chain(there).chain([Event::InitDone]).collect();
            let (wakes, _queues) = Wakes::new();
            let watches = vec![stream::iter(events).map(Ok).boxed()];
            follow_apps(watches, writer, objects.clone(), wakes, Health::new(&["apps"])).await;
            claims.clone().map(|claim| objects.ahead_of(&claim))
        };
        assert_eq!(ahead(3).await, [2, 0, 0, 1], "the one that has its appID already is ahead of nobody");
        assert_eq!(ahead(100).await, [0; 4], "there is room for all");
    }

    #[test]
    fn what_others_write_on_an_object_is_neither_kept_nor_news() {
        let edited = |note: &str| {
            let mut app = app("shop", "shop", "3");
            let annotations = [("example.com/note", note), ("latchkey.dev/rotate-keys", "1")];
            let annotations = annotations.map(|(name, value)| (name.to_owned(), value.to_owned()));
            app.meta_mut().annotations = Some(annotations.into());
            app.meta_mut().labels = Some([("note".to_owned(), note.to_owned())].into());
            let Event::Apply(app) = lighter(Ok(Event::Apply(app))).unwrap() else { unreachable!("it stays an event") };
            app
        };
        let (one, other) = (edited("1"), edited("2"));
        assert!(same_but_for_status(&one, &other));
        assert_eq!(one.annotations().keys().collect::<Vec<_>>(), ["latchkey.dev/rotate-keys"]);
        assert!(one.labels().is_empty());
    }

    #[test]
    fn of_what_was_written_and_what_the_watch_tells_the_newer_counts() {
        let there = objects().0.published;
        let revision = |there: &Published| there.get("shop").and_then(|app| app.revision);
        there.wrote("shop", published("10", b"ours"));
        assert!(!there.told("shop", published("10", b"ours")), "no news");
        // Somebody edits it at once, and the watch is faster than the answer to our own write.
        assert!(there.told("shop", published("12", b"theirs")));
        there.wrote("shop", published("11", b"ours"));
        assert_eq!(revision(&there), Some(Revision::of(b"theirs")));
        there.gone("shop", Some(14));
        there.wrote("shop", published("13", b"ours"));
        assert_eq!(revision(&there), None);
        // The watch is behind what we wrote.
        there.wrote("shop", published("20", b"ours"));
        assert!(!there.told("shop", published("17", b"theirs")));
        there.gone("shop", Some(18));
        assert_eq!(revision(&there), Some(Revision::of(b"ours")));
        // A list does not say since when.
        there.gone("shop", None);
        assert_eq!(revision(&there), None);
    }

    #[tokio::test]
    async fn the_app_of_a_document_that_went_is_woken_although_we_took_it_away() {
        let there = vec![Event::Init, Event::InitApply(app("shop", "shop", "3")), Event::InitDone];
        let (objects, _) = seen(vec![there]).await;
        let secret = json!({
            "metadata": { "name": "latchkey-app-shop", "namespace": "latchkey", "uid": "1", "resourceVersion": "7" },
        });
        let secret: Secret = serde_json::from_value(secret).unwrap();
        let events = vec![Event::Init, Event::InitApply(secret.clone()), Event::InitDone, Event::Delete(secret)];
        let (wakes, mut queues) = Wakes::new();
        let watches = vec![stream::iter(events).map(Ok).boxed()];
        follow_published(watches, objects, wakes, Health::new(&["rendered apps"])).await;
        assert_eq!(queues.apps.try_recv().unwrap().name, "store");
    }

    #[tokio::test]
    async fn keys_wake_their_app_unless_it_has_seen_them_and_nobody_else_asks_for_its_app_id() {
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
            objects.keys.judged(&"shop".parse().unwrap(), "7");
            let (wakes, mut queues) = Wakes::new();
            let watches = vec![stream::iter([Event::Init, Event::InitDone, event]).map(Ok).boxed()];
            follow_keys(watches, objects, wakes, Health::new(&["keys"])).await;
            std::iter::from_fn(move || queues.apps.try_recv().ok()).count()
        };
        assert_eq!(woken_by(&["shop"], Event::Apply(keys("7"))).await, 0);
        assert_eq!(woken_by(&["shop"], Event::Apply(keys("8"))).await, 1, "somebody changed them");
        assert_eq!(woken_by(&["shop", "waiting"], Event::Apply(keys("7"))).await, 2, "the appID is taken");
        assert_eq!(woken_by(&["shop"], Event::Delete(keys("7"))).await, 1);
    }

    #[tokio::test]
    async fn a_standby_keeps_no_list_of_whom_to_wake() {
        let (objects, mut writer) = objects();
        writer.apply_watcher_event(&Event::Init);
        writer.apply_watcher_event(&Event::InitApply(app("shop", "shop", "3")));
        writer.apply_watcher_event(&Event::InitDone);
        objects.published.wrote("latchkey-app-shop", published("1", b"1"));
        let (wakes, mut queues) = Wakes::new();
        wakes.everything(&objects);
        tokio::select! {
            biased;
            never = queues.drain() => match never {},
            () = tokio::task::yield_now() => {}
        }
        assert!(queues.apps.is_empty() && queues.orphans.is_empty());
        // Once it acts it begins with everything.
        wakes.everything(&objects);
        assert_eq!(queues.apps.try_recv().unwrap().name, "store");
        assert_eq!(queues.orphans.try_recv().unwrap(), "latchkey-app-shop");
    }
}
