//! Handles changes of watched objects: updates the cluster state and queues the affected reconciles.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{ResourceExt, core::DeserializeGuard, runtime::reflector::store::Writer};
use latchkey_crds::{app::App, provider::Provider, types::AppId};

use super::{
    changes::{WatchEvent, WatchName, follow_watches},
    client_index::ClientReference,
    index::{NamespacedName, references_of_app, references_of_provider},
    objects::{Metadata, claimed_app_id, claimed_pages_host, is_same_except_status},
    published::{PublishedApp, app_id_of_secret},
    queue::ReconcileQueue,
    state::ClusterState,
    store::StoreWriter,
    streams::Watch,
};
use crate::{admin::Health, app::keys::secret as key_secret};

/// The prefix of the names of key Secrets, before the appID (`latchkey_crds::names`).
const KEYS_PREFIX: &str = "latchkey-keys-";

/// Handles the changes of all kinds. Each method runs until its watches end.
#[derive(Clone)]
pub(super) struct Handlers {
    pub(super) objects: ClusterState,
    pub(super) queue: ReconcileQueue,
    pub(super) health: Health,
}

// === impl Handlers ===

impl Handlers {
    pub(super) async fn follow_apps(
        self,
        watches: Vec<Watch<DeserializeGuard<App>>>,
        writer: Writer<DeserializeGuard<App>>,
    ) {
        let Self { objects, queue, health } = self;
        let mut store = StoreWriter::new(writer);
        follow_watches(WatchName::Apps, watches, health, |event| {
            let before = store.apply(&event);
            objects.apps_by_reference.reindex(
                &before.as_deref().map(references_of_app).unwrap_or_default(),
                &references_now(&event, references_of_app),
            );
            let id_before = before.as_ref().and_then(|app| claimed_app_id(app));
            let host_before = before.as_ref().and_then(|app| claimed_pages_host(app));
            let host_now = match &event {
                WatchEvent::Applied(_, app) => claimed_pages_host(app),
                WatchEvent::Deleted { .. } | WatchEvent::Synced => None,
            };
            // If no document has the host, a younger App can take it now.
            if let Some(host) = host_before.filter(|host| host_now.as_ref() != Some(host)) {
                queue.enqueue_apps_with_pages_host(&objects, &host);
            }
            // Called if the App is new, claims another appID than before, or is deleted. Queues its documents and its
            // previous appID, so that the operator checks whether they are still needed.
            let enqueue_abandoned = |app: &NamespacedName| {
                let (namespace, name) = (app.namespace(), app.name());
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
            match &event {
                WatchEvent::Applied(name, app) => {
                    // A change of only the status is no reason to reconcile, because the operator writes the status
                    // itself.
                    if before.is_none_or(|before| !is_same_except_status(&before, app)) {
                        queue.enqueue_app(name.clone());
                    }
                    // The App is new, or claims another appID than before, for example because it was deleted and
                    // created again under the same name.
                    if id_before != claimed_app_id(app) {
                        enqueue_abandoned(name);
                    }
                }
                WatchEvent::Deleted { name, .. } => {
                    enqueue_abandoned(name);
                    // Queues the Clients of the App, because they must report now that the App does not exist.
                    objects.client_outcomes.remove_app(name);
                    let of_app = ClientReference::App { namespace: name.namespace(), name: name.name() };
                    queue.push_changes_of_clients_with(&objects, of_app);
                }
                WatchEvent::Synced => {}
            }
        })
        .await;
    }

    pub(super) async fn follow_providers(
        self,
        watches: Vec<Watch<DeserializeGuard<Provider>>>,
        writer: Writer<DeserializeGuard<Provider>>,
    ) {
        let Self { objects, queue, health } = self;
        let mut store = StoreWriter::new(writer);
        follow_watches(WatchName::Providers, watches, health, |event| {
            let before = store.apply(&event);
            objects.providers_by_secret.reindex(
                &before.as_deref().map(references_of_provider).unwrap_or_default(),
                &references_now(&event, references_of_provider),
            );
            match &event {
                WatchEvent::Applied(name, provider) => {
                    if before.is_none_or(|before| !is_same_except_status(&before, provider)) {
                        queue.enqueue_provider(name.clone());
                        queue.enqueue_apps_with_provider(&objects, name);
                    }
                }
                WatchEvent::Deleted { name, .. } => queue.enqueue_apps_with_provider(&objects, name),
                WatchEvent::Synced => {}
            }
        })
        .await;
    }

    pub(super) async fn follow_keys(self, watches: Vec<Watch<Metadata<Secret>>>) {
        let Self { objects, queue, health } = self;
        let mut synced = false;
        follow_watches(WatchName::Keys, watches, health, |event| match event {
            WatchEvent::Applied(name, secret) => {
                let Some(id) = app_id_of_key_secret(name.name()) else { return };
                let owner_before = objects.quotas.owner(&id);
                let owner = key_secret::owner_of(&secret.metadata);
                objects.quotas.record_keys(&id, owner.clone());
                // Before the watches are synced, nothing is queued, because everything is reconciled afterwards.
                if !synced {
                    return;
                }
                if !objects.is_reconciled(&id, &secret.resource_version().unwrap_or_default()) {
                    queue.enqueue_apps_with_id(&objects, &id);
                }
                // If the appID no longer belongs to its previous namespace, the quota of that namespace has room for a
                // waiting App.
                if let Some(before) =
                    owner_before.filter(|before| owner.is_none_or(|owner| owner.namespace != before.namespace))
                {
                    queue.enqueue_waiting(&objects, &before.namespace);
                }
            }
            WatchEvent::Deleted { name, .. } => {
                let Some(id) = app_id_of_key_secret(name.name()) else { return };
                objects.key_versions.forget(&id);
                let owner_before = objects.quotas.owner(&id);
                objects.quotas.record_keys(&id, None);
                queue.enqueue_apps_with_id(&objects, &id);
                if let Some(before) = owner_before {
                    queue.enqueue_waiting(&objects, &before.namespace);
                }
            }
            WatchEvent::Synced => synced = true,
        })
        .await;
    }

    pub(super) async fn follow_published(self, watches: Vec<Watch<Secret>>) {
        let Self { objects, queue, health } = self;
        let mut synced = false;
        follow_watches(WatchName::RenderedApps, watches, health, |event| {
            let name = match event {
                WatchEvent::Applied(name, secret) => {
                    let name = name.name().to_owned();
                    let Some(published) = PublishedApp::from_secret(&secret) else { return };
                    let host_before = objects.published.get(&name).and_then(|app| app.pages_host);
                    let host_now = published.pages_host.clone();
                    if !objects.published.record_watched(&name, published) {
                        return;
                    }
                    if let Some(host) = host_before.filter(|host| host_now.as_ref() != Some(host)) {
                        queue.enqueue_apps_with_pages_host(&objects, &host);
                    }
                    name
                }
                // The App is queued even if this operator deleted the document: the App may have been created again
                // before the deletion.
                WatchEvent::Deleted { name, version } => {
                    let name = name.name().to_owned();
                    let before = objects.published.get(&name);
                    objects.published.record_deletion(&name, version);
                    if let Some(before) = before {
                        queue.enqueue_waiting(&objects, &before.namespace);
                        if let Some(host) = before.pages_host {
                            queue.enqueue_apps_with_pages_host(&objects, &host);
                        }
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

    pub(super) async fn follow_secrets(self, watches: Vec<Watch<Metadata<Secret>>>) {
        let Self { objects, queue, health } = self;
        let mut synced = false;
        follow_watches(WatchName::Secrets, watches, health, |event| match &event {
            // Before the watches are synced, nothing is queued, because everything is reconciled afterwards.
            WatchEvent::Applied(..) if !synced => {}
            WatchEvent::Applied(name, _) => queue.enqueue_for_secret(&objects, name),
            WatchEvent::Deleted { name, .. } => {
                objects.client_secrets.forget_foreign(name);
                queue.enqueue_for_secret(&objects, name);
            }
            WatchEvent::Synced => synced = true,
        })
        .await;
    }

    pub(super) async fn follow_config_maps(self, watches: Vec<Watch<Metadata<ConfigMap>>>) {
        let Self { objects, queue, health } = self;
        let mut synced = false;
        follow_watches(WatchName::ConfigMaps, watches, health, |event| match &event {
            // Before the watches are synced, nothing is queued, because everything is reconciled afterwards.
            WatchEvent::Applied(..) if !synced => {}
            WatchEvent::Applied(name, _) | WatchEvent::Deleted { name, .. } => {
                queue.enqueue_for_config_map(&objects, name);
            }
            WatchEvent::Synced => synced = true,
        })
        .await;
    }
}

/// Returns the appID in the name of a key Secret, or `None` if no key Secret has this name.
fn app_id_of_key_secret(secret: &str) -> Option<AppId> {
    secret.strip_prefix(KEYS_PREFIX)?.parse().ok()
}

/// Returns the references of the object after the event.
fn references_now<K, N, V>(event: &WatchEvent<K>, references: fn(&K) -> BTreeSet<(N, V)>) -> BTreeSet<(N, V)> {
    match event {
        WatchEvent::Applied(_, object) => references(object),
        WatchEvent::Deleted { .. } | WatchEvent::Synced => BTreeSet::new(),
    }
}
