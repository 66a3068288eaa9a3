//! The reconcile queue: one channel for each kind of work.

use std::{collections::HashSet, convert::Infallible, sync::Arc};

use kube::Resource;
use latchkey_crds::types::{AppId, HostName};
use tokio::sync::mpsc;

use super::{
    client_index::ClientReference,
    fair_queue::{ClientChange, FairQueue},
    index::{NamespacedName, Reference},
    state::ClusterState,
};

/// Queues what must be reconciled.
#[derive(Clone)]
pub(crate) struct ReconcileQueue {
    pub(crate) apps: mpsc::UnboundedSender<NamespacedName>,
    pub(crate) providers: mpsc::UnboundedSender<NamespacedName>,
    /// The names of rendered Secrets. Their Apps might no longer exist.
    pub(crate) orphans: mpsc::UnboundedSender<String>,
    /// AppIDs with keys. Their Apps might no longer exist.
    pub(crate) releases: mpsc::UnboundedSender<AppId>,
    pub(crate) clients: mpsc::UnboundedSender<NamespacedName>,
    /// Changes of Clients and of the objects that they reference, as the watches report them.
    pub(crate) client_changes: Arc<FairQueue>,
}

/// The receiving ends of the [`ReconcileQueue`].
pub(crate) struct QueueReceivers {
    pub(crate) apps: mpsc::UnboundedReceiver<NamespacedName>,
    pub(crate) providers: mpsc::UnboundedReceiver<NamespacedName>,
    pub(crate) orphans: mpsc::UnboundedReceiver<String>,
    pub(crate) releases: mpsc::UnboundedReceiver<AppId>,
    pub(crate) clients: mpsc::UnboundedReceiver<NamespacedName>,
    pub(crate) client_changes: Arc<FairQueue>,
}

// === impl ReconcileQueue ===

impl ReconcileQueue {
    pub(crate) fn new() -> (Self, QueueReceivers) {
        let (apps, app_receiver) = mpsc::unbounded_channel();
        let (providers, provider_receiver) = mpsc::unbounded_channel();
        let (orphans, orphan_receiver) = mpsc::unbounded_channel();
        let (releases, release_receiver) = mpsc::unbounded_channel();
        let (clients, client_receiver) = mpsc::unbounded_channel();
        let client_changes = Arc::<FairQueue>::default();
        let receivers = QueueReceivers {
            apps: app_receiver,
            providers: provider_receiver,
            orphans: orphan_receiver,
            releases: release_receiver,
            clients: client_receiver,
            client_changes: Arc::clone(&client_changes),
        };
        (Self { apps, providers, orphans, releases, clients, client_changes }, receivers)
    }

    /// Queues an App, without a delay.
    pub(crate) fn enqueue_app(&self, app: NamespacedName) {
        // Here and below, a closed receiver means that the process is ending.
        let _ = self.apps.send(app);
    }

    pub(crate) fn enqueue_provider(&self, provider: NamespacedName) {
        let _ = self.providers.send(provider);
    }

    pub(crate) fn enqueue_orphan(&self, secret: String) {
        let _ = self.orphans.send(secret);
    }

    pub(crate) fn enqueue_release(&self, id: AppId) {
        let _ = self.releases.send(id);
    }

    /// Queues every appID with stored keys, because its App might no longer exist.
    pub(crate) fn enqueue_all_releases(&self, objects: &ClusterState) {
        objects.quotas.app_ids().into_iter().for_each(|id| self.enqueue_release(id));
    }

    /// Queues the Apps of the namespace that wait for room in a quota and for which there is room now.
    pub(crate) fn enqueue_waiting(&self, objects: &ClusterState, namespace: &str) {
        objects.quotas.admissible(namespace).into_iter().for_each(|app| self.enqueue_app(app));
    }

    pub(crate) fn enqueue_all_apps(&self, objects: &ClusterState) {
        for app in objects.apps.state() {
            self.enqueue_app(NamespacedName::from_metadata(app.meta()));
        }
    }

    /// Queues all objects. Called when this replica becomes the leader.
    pub(crate) fn enqueue_everything(&self, objects: &ClusterState) {
        objects.published.secrets().into_iter().for_each(|secret| self.enqueue_orphan(secret));
        for provider in objects.providers.state() {
            self.enqueue_provider(NamespacedName::from_metadata(provider.meta()));
        }
        self.enqueue_all_releases(objects);
        self.enqueue_all_apps(objects);
        self.enqueue_clients_without_outcome(objects);
    }

    /// Queues each Client that the reconcile of an App might not queue: the Client cannot be decoded, or its App does
    /// not exist, is being deleted, or might not accept Clients of this namespace. The other Clients are not queued
    /// here, because there can be 50,000 of them.
    fn enqueue_clients_without_outcome(&self, objects: &ClusterState) {
        for name in objects.clients.names() {
            let Some(client) = objects.clients.summary(&name) else { continue };
            let app = client.app.filter(|app| app.namespace() == name.namespace());
            let app = app.and_then(|app| objects.apps.get(&app.object_ref()));
            let is_decided_with_app = app.is_some_and(|app| app.meta().deletion_timestamp.is_none());
            if !is_decided_with_app {
                self.enqueue_client(name);
            }
        }
    }

    pub(crate) fn enqueue_client(&self, client: NamespacedName) {
        let _ = self.clients.send(client);
    }

    /// Records that a Client of this App has changed. `app` is `None` if the App is not known.
    pub(super) fn push_client_change(&self, client: NamespacedName, app: Option<NamespacedName>) {
        self.client_changes.push(ClientChange { client, app: app.unwrap_or_default() });
    }

    /// Records that a Client of this App is deleted. The deletion is handled before other changes of the Client's
    /// namespace.
    pub(super) fn push_client_deletion(&self, client: NamespacedName, app: Option<NamespacedName>) {
        self.client_changes.push_deletion(ClientChange { client, app: app.unwrap_or_default() });
    }

    /// Records a change for each Client that has this reference.
    pub(super) fn push_changes_of_clients_with(&self, objects: &ClusterState, reference: ClientReference<'_>) {
        for name in objects.client_index.get(reference) {
            if let Some(client) = objects.clients.summary(&name) {
                let app = objects.client_index.app_of(&name, client.app);
                self.push_client_change(name, app);
            }
        }
    }

    /// Queues, without a delay, the Apps of all Clients that have this reference.
    pub(super) fn enqueue_apps_of_clients_with(&self, objects: &ClusterState, reference: ClientReference<'_>) {
        let clients = objects.client_index.get(reference);
        let app_of = |name: &NamespacedName| {
            let client = objects.clients.summary(name)?;
            objects.client_index.app_of(name, client.app)
        };
        let apps: HashSet<_> = clients.iter().filter_map(app_of).collect();
        apps.into_iter().for_each(|app| self.enqueue_app(app));
    }

    pub(crate) fn enqueue_apps_with_id(&self, objects: &ClusterState, id: &AppId) {
        self.enqueue_referencing_apps(objects, &Reference::AppId(id.clone()));
    }

    pub(super) fn enqueue_apps_with_provider(&self, objects: &ClusterState, provider: &NamespacedName) {
        self.enqueue_referencing_apps(objects, &Reference::Provider(provider.clone()));
    }

    pub(super) fn enqueue_for_config_map(&self, objects: &ClusterState, config_map: &NamespacedName) {
        self.enqueue_referencing_apps(objects, &Reference::ConfigMap(config_map.clone()));
        let (namespace, name) = (config_map.namespace(), config_map.name());
        self.push_changes_of_clients_with(objects, ClientReference::ConfigMap { namespace, name });
    }

    /// Queues the Apps that want this host for their pages, because it may be free now.
    pub(crate) fn enqueue_apps_with_pages_host(&self, objects: &ClusterState, host: &HostName) {
        self.enqueue_referencing_apps(objects, &Reference::PagesHost(host.clone()));
    }

    pub(super) fn enqueue_for_secret(&self, objects: &ClusterState, secret: &NamespacedName) {
        for provider in objects.providers_by_secret.get(secret) {
            self.enqueue_apps_with_provider(objects, &provider);
            self.enqueue_provider(provider);
        }
        self.enqueue_referencing_apps(objects, &Reference::Secret(secret.clone()));
        let (namespace, name) = (secret.namespace(), secret.name());
        self.push_changes_of_clients_with(objects, ClientReference::Secret { namespace, name });
    }

    fn enqueue_referencing_apps(&self, objects: &ClusterState, reference: &Reference) {
        for app in objects.apps_by_reference.get(reference) {
            self.enqueue_app(app);
        }
    }
}

// === impl QueueReceivers ===

impl QueueReceivers {
    /// Receives and discards everything that is queued while another replica is the leader. Otherwise the queues would
    /// grow forever.
    pub(crate) async fn discard_all(&mut self) -> Infallible {
        loop {
            tokio::select! {
                Some(_) = self.apps.recv() => {}
                Some(_) = self.providers.recv() => {}
                Some(_) = self.orphans.recv() => {}
                Some(_) = self.releases.recv() => {}
                Some(_) = self.clients.recv() => {}
                _ = self.client_changes.pop() => {}
                // Waits forever if all senders are dropped.
                else => std::future::pending().await,
            }
        }
    }
}
