//! Handles the watch events of Clients, of their Secrets and of Namespaces: updates the known states, and queues the
//! changes of Clients.

use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::{Resource, ResourceExt};

use super::{
    changes::{WatchEvent, WatchName, follow_watches, parse_version},
    client_index::ClientReference,
    client_secrets::ClientSecretState,
    handlers::Handlers,
    objects::{Metadata, WatchedClient},
    streams::Watch,
};

// === impl Handlers ===

impl Handlers {
    pub(super) async fn follow_clients(self, watches: Vec<Watch<WatchedClient>>) {
        let Self { objects, queue, health } = self;
        follow_watches(WatchName::Clients, watches, health, |event| {
            let before = objects.clients.apply(&event);
            let (name, now) = match event {
                WatchEvent::Applied(name, client) => (name, Some(client)),
                WatchEvent::Deleted { name, .. } => (name, None),
                WatchEvent::Synced => return,
            };
            let (before, now) = (before.as_ref(), now.as_ref());
            let app_of = |client: &WatchedClient| objects.client_index.app_of(&name, client.app_name());
            let app_before = before.and_then(app_of);
            objects.client_index.update(&name, before, now);
            if let Some(client) = now {
                let version = client.resource_version().as_deref().map_or(0, parse_version);
                objects.written_client_statuses.forget_reported(&client.uid().unwrap_or_default(), version);
            }
            match (before, now) {
                // A change of only the status is no reason to reconcile, because the operator writes the status itself.
                (Some(before), Some(now)) if before.is_same_except_status(now) => {}
                (before, now) => {
                    // The two versions can name different Apps, if the Client was deleted and created again.
                    let is_deletion = now.is_none_or(|client| client.meta().deletion_timestamp.is_some());
                    if before.is_some() && is_deletion {
                        queue.push_client_deletion(name.clone(), app_before);
                    } else if before.is_some() {
                        queue.push_client_change(name.clone(), app_before);
                    }
                    if let Some(now) = now {
                        queue.push_client_change(name.clone(), app_of(now));
                    }
                }
            }
        })
        .await;
    }

    /// Watches the Secrets of Clients with their values, and stores only hashes of the values.
    pub(super) async fn follow_client_secrets(self, watches: Vec<Watch<Secret>>) {
        let Self { objects, queue, health } = self;
        let mut synced = false;
        follow_watches(WatchName::ClientSecrets, watches, health, |event| {
            let (name, has_changed) = match event {
                WatchEvent::Applied(name, secret) => {
                    let has_changed = objects.client_secrets.record_watched(&name, ClientSecretState::of(&secret));
                    (name, has_changed)
                }
                WatchEvent::Deleted { name, version } => {
                    objects.client_secrets.record_deletion(&name, version);
                    (name, true)
                }
                WatchEvent::Synced => {
                    synced = true;
                    return;
                }
            };
            // Before the watches are synced, nothing is queued, because everything is reconciled afterwards. After a
            // write of the operator itself, there is nothing to do.
            if synced && has_changed {
                queue.enqueue_for_secret(&objects, &name);
            }
        })
        .await;
    }

    pub(super) async fn follow_namespaces(self, watches: Vec<Watch<Metadata<Namespace>>>) {
        let Self { objects, queue, health } = self;
        let mut synced = false;
        follow_watches(WatchName::Namespaces, watches, health, |event| {
            let (name, labels) = match event {
                WatchEvent::Applied(name, namespace) => (name, Some(namespace.labels().clone())),
                WatchEvent::Deleted { name, .. } => (name, None),
                WatchEvent::Synced => {
                    synced = true;
                    return;
                }
            };
            let name = name.name();
            if objects.namespaces.record(name, labels) && synced {
                // The Apps are queued directly, and do not wait for other changes of Clients, because the Apps may now
                // have to remove the Clients of this namespace.
                queue.enqueue_apps_of_clients_with(&objects, ClientReference::GrantedNamespace(name));
                queue.push_changes_of_clients_with(&objects, ClientReference::GrantedNamespace(name));
            }
        })
        .await;
    }
}
