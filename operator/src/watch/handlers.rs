//! What each change of a watched object updates and queues.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{
    ResourceExt,
    runtime::reflector::{ObjectRef, store::Writer},
};
use latchkey_crds::{app::App, provider::Provider};

use super::{
    changes::{WatchEvent, follow_watches},
    index::{references_of_app, references_of_provider},
    objects::{Guarded, Metadata, claimed_app_id, is_same_but_for_status},
    published::{PublishedApp, app_id_of_secret},
    queue::ReconcileQueue,
    state::ClusterState,
    store::StoreWriter,
    streams::Watch,
};
use crate::{admin::Health, app::keys::secret as key_secret};

/// The prefix of the names of key Secrets, before the appID (`latchkey_crds::names`).
const KEYS_PREFIX: &str = "latchkey-keys-";

pub(super) async fn follow_apps(
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

pub(super) async fn follow_providers(
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

pub(super) async fn follow_keys(
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

pub(super) async fn follow_published(
    watches: Vec<Watch<Secret>>,
    objects: ClusterState,
    queue: ReconcileQueue,
    health: Health,
) {
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

pub(super) async fn follow_secrets(
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

pub(super) async fn follow_config_maps(
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

/// What the present object references.
fn references_now<K, N, V>(seen: &WatchEvent<K>, named: fn(&K) -> BTreeSet<(N, V)>) -> BTreeSet<(N, V)> {
    match seen {
        WatchEvent::Applied(object) => named(object),
        WatchEvent::Deleted { .. } | WatchEvent::Synced => BTreeSet::new(),
    }
}
