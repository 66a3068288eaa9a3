//! What the operator sees of the cluster: a store for each kind that it needs whole, and what wakes whom.

use std::{
    collections::{HashMap, HashSet},
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

use crate::{admin::Health, backoff::ShortBackoff};

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
}

/// What is published, by the name of its Secret. The documents themselves are not kept.
#[derive(Default)]
pub(crate) struct Published(Mutex<HashMap<String, PublishedApp>>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PublishedApp {
    /// Of the octets that are there now, whoever wrote them.
    pub(crate) revision: Option<Revision>,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) resource_version: String,
    pub(crate) uid: String,
}

/// Who is to be reconciled.
#[derive(Clone)]
pub(crate) struct Wakes {
    pub(crate) apps: mpsc::UnboundedSender<ObjectRef<Guarded<App>>>,
    pub(crate) providers: mpsc::UnboundedSender<ObjectRef<Guarded<Provider>>>,
    /// Names of rendered Secrets whose App may be gone.
    pub(crate) orphans: mpsc::UnboundedSender<String>,
}

/// A change as a watch tells it, or as a list shows it to have been missed.
enum Seen<K> {
    Applied(K),
    Gone {
        namespace: String,
        name: String,
    },
    /// Everything that was there at the start was told.
    Synced,
}

/// Starts every watch. Each goes on until the process ends.
pub(crate) fn start(
    client: &Client,
    namespace: &str,
    watched: &[String],
    health: &Health,
    wakes: &Wakes,
) -> (Objects, Vec<tokio::task::JoinHandle<()>>) {
    let (apps, apps_writer) = store();
    let (providers, providers_writer) = store();
    let objects = Objects { apps, providers, published: Arc::default() };

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

/// Without what nobody here reads.
fn lighter<K: Resource>(event: watcher::Result<Event<K>>) -> watcher::Result<Event<K>> {
    event.map(|event| {
        event.modify(|object| {
            object.meta_mut().managed_fields = None;
            object.annotations_mut().remove("kubectl.kubernetes.io/last-applied-configuration");
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
                    tell(Seen::Gone { namespace, name });
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
                tell(Seen::Gone { namespace, name });
            }
            Err(error) => {
                warn!(watch = what, error = &error as &dyn std::error::Error, "a watch failed; it is tried again");
                health.watch_failed(what, &error);
            }
        }
    }
}

/// Puts what is seen into a store.
struct Keeper<K: Resource<DynamicType = ()> + Clone + 'static> {
    writer: Writer<K>,
    store: Store<K>,
    synced: bool,
}

impl<K: Resource<DynamicType = ()> + Clone + 'static> Keeper<K> {
    fn new(mut writer: Writer<K>) -> Self {
        let store = writer.as_reader();
        writer.apply_watcher_event(&Event::Init);
        Self { writer, store, synced: false }
    }

    /// Gives the object before it.
    fn keep(&mut self, seen: &Seen<K>) -> Option<Arc<K>> {
        match seen {
            Seen::Applied(object) => {
                let before = self.store.get(&ObjectRef::from_obj(object));
                let event = if self.synced { Event::Apply(object.clone()) } else { Event::InitApply(object.clone()) };
                self.writer.apply_watcher_event(&event);
                before
            }
            Seen::Gone { namespace, name } => {
                let before = self.store.get(&ObjectRef::new(name).within(namespace))?;
                self.writer.apply_watcher_event(&Event::Delete(K::clone(&before)));
                Some(before)
            }
            Seen::Synced => {
                self.synced = true;
                self.writer.apply_watcher_event(&Event::InitDone);
                None
            }
        }
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
        match &seen {
            Seen::Applied(app) => {
                // Its own status written is no news.
                if before.is_none_or(|before| !same_but_for_status(&before, app)) {
                    wakes.app(ObjectRef::from_obj(app));
                }
            }
            Seen::Gone { namespace, name } => {
                for secret in objects.published.of_app(namespace, name) {
                    wakes.orphan(secret);
                }
                // The appID may be free for another now.
                if let Some(id) = before.as_ref().and_then(|app| app_id(app)) {
                    wakes.apps_with_id(&objects, &id);
                }
            }
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
        match &seen {
            Seen::Applied(provider) => {
                if before.is_none_or(|before| !same_but_for_status(&before, provider)) {
                    wakes.provider(ObjectRef::from_obj(provider));
                    let namespace = provider.namespace().unwrap_or_default();
                    wakes.apps_with_provider(&objects, &namespace, &provider.name_any());
                }
            }
            Seen::Gone { namespace, name } => wakes.apps_with_provider(&objects, namespace, name),
            Seen::Synced => {}
        }
    })
    .await;
}

async fn follow_keys(watches: Vec<Watch<Metadata<Secret>>>, objects: Objects, wakes: Wakes, health: Health) {
    let mut synced = false;
    follow("keys", watches, health, |seen| {
        let name = match seen {
            Seen::Applied(secret) if synced => secret.name_any(),
            // At the start everything is reconciled anyway.
            Seen::Applied(_) => return,
            Seen::Gone { name, .. } => name,
            Seen::Synced => {
                synced = true;
                return;
            }
        };
        if let Some(id) = name.strip_prefix(KEYS_PREFIX).and_then(|id| id.parse().ok()) {
            wakes.apps_with_id(&objects, &id);
        }
    })
    .await;
}

async fn follow_published(watches: Vec<Watch<Secret>>, objects: Objects, wakes: Wakes, health: Health) {
    let mut synced = false;
    follow("rendered apps", watches, health, |seen| {
        let name = match seen {
            Seen::Applied(secret) => {
                let name = secret.name_any();
                if !PublishedApp::of(&secret).is_some_and(|app| objects.published.see(&name, app)) {
                    return;
                }
                name
            }
            Seen::Gone { name, .. } => match objects.published.forget(&name) {
                Some(_) => name,
                None => return,
            },
            Seen::Synced => {
                synced = true;
                return;
            }
        };
        if synced && let Some(id) = published_app_id(&name) {
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
            Seen::Gone { namespace, name } => wakes.with_secret(&objects, namespace, name),
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
        Seen::Gone { namespace, name } => wakes.apps_with_config_map(&objects, namespace, name),
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

/// The appID that an App asks for, if it is one.
pub(crate) fn app_id(app: &Guarded<App>) -> Option<AppId> {
    app.0.as_ref().ok()?.app_id().ok()
}

/// The appID of a rendered Secret, by its name.
pub(crate) fn published_app_id(secret: &str) -> Option<AppId> {
    secret.strip_prefix(RENDERED_PREFIX)?.parse().ok()
}

// === impl Wakes ===

impl Wakes {
    /// A receiver that is gone means that the process ends.
    fn app(&self, app: ObjectRef<Guarded<App>>) {
        let _ = self.apps.send(app);
    }

    fn provider(&self, provider: ObjectRef<Guarded<Provider>>) {
        let _ = self.providers.send(provider);
    }

    fn orphan(&self, secret: String) {
        let _ = self.orphans.send(secret);
    }

    pub(crate) fn all(&self, objects: &Objects) {
        for app in objects.apps.state() {
            self.app(ObjectRef::from_obj(&*app));
        }
    }

    /// All that is there: what a leader begins with.
    pub(crate) fn everything(&self, objects: &Objects) {
        for provider in objects.providers.state() {
            self.provider(ObjectRef::from_obj(&*provider));
        }
        self.all(objects);
        for secret in objects.published.names() {
            self.orphan(secret);
        }
    }

    pub(crate) fn apps_with_id(&self, objects: &Objects, id: &AppId) {
        self.apps_that(objects, |app| app.app_id().is_ok_and(|own| own == *id));
    }

    /// In one walk through the store, however many they are.
    pub(crate) fn apps_with_ids(&self, objects: &Objects, ids: &HashSet<AppId>) {
        self.apps_that(objects, |app| app.app_id().is_ok_and(|own| ids.contains(&own)));
    }

    fn apps_with_provider(&self, objects: &Objects, namespace: &str, provider: &str) {
        self.apps_that(objects, |app| {
            app.metadata.namespace.as_deref() == Some(namespace)
                && app.spec.provider_refs.iter().any(|reference| reference.name == provider)
        });
    }

    fn apps_with_config_map(&self, objects: &Objects, namespace: &str, name: &str) {
        self.apps_that(objects, |app| {
            app.metadata.namespace.as_deref() == Some(namespace)
                && app.spec.mail.templates_ref.as_ref().is_some_and(|reference| reference.name == name)
        });
    }

    fn with_secret(&self, objects: &Objects, namespace: &str, name: &str) {
        let providers: Vec<String> = objects
            .providers
            .state()
            .iter()
            .filter_map(|provider| provider.0.as_ref().ok())
            .filter(|provider| {
                provider.metadata.namespace.as_deref() == Some(namespace)
                    && provider.spec.client.secret_ref().name == name
            })
            .map(|provider| {
                self.provider(ObjectRef::new(&provider.name_any()).within(namespace));
                provider.name_any()
            })
            .collect();
        self.apps_that(objects, |app| {
            app.metadata.namespace.as_deref() == Some(namespace)
                && (app.spec.mail.smtp_secret_ref.as_ref().is_some_and(|reference| reference.name == name)
                    || app.spec.provider_refs.iter().any(|reference| providers.contains(&reference.name)))
        });
    }

    fn apps_that(&self, objects: &Objects, fits: impl Fn(&App) -> bool) {
        for app in objects.apps.state() {
            if app.0.as_ref().is_ok_and(&fits) {
                self.app(ObjectRef::from_obj(&*app));
            }
        }
    }
}

// === impl Published ===

impl Published {
    fn held(&self) -> std::sync::MutexGuard<'_, HashMap<String, PublishedApp>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, secret: &str) -> Option<PublishedApp> {
        self.held().get(secret).cloned()
    }

    /// Notes what is there; tells whether that is news.
    pub(crate) fn see(&self, secret: &str, app: PublishedApp) -> bool {
        self.held().insert(secret.to_owned(), app.clone()) != Some(app)
    }

    pub(crate) fn forget(&self, secret: &str) -> Option<PublishedApp> {
        self.held().remove(secret)
    }

    fn names(&self) -> Vec<String> {
        self.held().keys().cloned().collect()
    }

    /// The Secrets that are published for an App.
    fn of_app(&self, namespace: &str, name: &str) -> Vec<String> {
        let is_its = |app: &PublishedApp| app.namespace == namespace && app.name == name;
        self.held().iter().filter(|(_, app)| is_its(app)).map(|(secret, _)| secret.clone()).collect()
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
            namespace: annotation(NAMESPACE_ANNOTATION),
            name: annotation(NAME_ANNOTATION),
            resource_version: secret.resource_version()?,
            uid: secret.uid()?,
        })
    }
}
