//! The reconcile queue: one channel for each kind of work.

use std::convert::Infallible;

use kube::{core::DeserializeGuard, runtime::reflector::ObjectRef};
use latchkey_crds::{
    app::App,
    provider::Provider,
    types::{AppId, HostName},
};
use tokio::sync::mpsc;

use super::{
    index::{NamespacedName, Reference},
    state::ClusterState,
};

/// Queues what must be reconciled.
#[derive(Clone)]
pub(crate) struct ReconcileQueue {
    pub(crate) apps: mpsc::UnboundedSender<ObjectRef<DeserializeGuard<App>>>,
    pub(crate) providers: mpsc::UnboundedSender<ObjectRef<DeserializeGuard<Provider>>>,
    /// The names of rendered Secrets whose App might no longer exist.
    pub(crate) orphans: mpsc::UnboundedSender<String>,
    /// AppIDs with keys, whose App might no longer exist.
    pub(crate) releases: mpsc::UnboundedSender<AppId>,
}

/// The receiving ends of the [`ReconcileQueue`].
pub(crate) struct QueueReceivers {
    pub(crate) apps: mpsc::UnboundedReceiver<ObjectRef<DeserializeGuard<App>>>,
    pub(crate) providers: mpsc::UnboundedReceiver<ObjectRef<DeserializeGuard<Provider>>>,
    pub(crate) orphans: mpsc::UnboundedReceiver<String>,
    pub(crate) releases: mpsc::UnboundedReceiver<AppId>,
}

// === impl ReconcileQueue ===

impl ReconcileQueue {
    pub(crate) fn new() -> (Self, QueueReceivers) {
        let (apps, app_receiver) = mpsc::unbounded_channel();
        let (providers, provider_receiver) = mpsc::unbounded_channel();
        let (orphans, orphan_receiver) = mpsc::unbounded_channel();
        let (releases, release_receiver) = mpsc::unbounded_channel();
        let receivers = QueueReceivers {
            apps: app_receiver,
            providers: provider_receiver,
            orphans: orphan_receiver,
            releases: release_receiver,
        };
        (Self { apps, providers, orphans, releases }, receivers)
    }

    pub(super) fn enqueue_app(&self, app: ObjectRef<DeserializeGuard<App>>) {
        // Here and below, a closed receiver means that the process is ending.
        let _ = self.apps.send(app);
    }

    pub(super) fn enqueue_provider(&self, provider: ObjectRef<DeserializeGuard<Provider>>) {
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

    /// Queues every appID with stored keys, because its App might no longer exist.
    pub(crate) fn enqueue_all_releases(&self, objects: &ClusterState) {
        objects.quotas.app_ids().into_iter().for_each(|id| self.enqueue_release(id));
    }

    /// Queues the Apps that wait for room in their namespace and fit now.
    pub(crate) fn enqueue_waiting(&self, objects: &ClusterState, namespace: &str) {
        objects.quotas.admissible(namespace).iter().for_each(|app| self.enqueue_app(app.object_ref()));
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

    pub(super) fn enqueue_apps_with_provider(&self, objects: &ClusterState, namespace: &str, provider: &str) {
        self.enqueue_referencing_apps(objects, &Reference::Provider(NamespacedName::new(namespace, provider)));
    }

    pub(super) fn enqueue_apps_with_config_map(&self, objects: &ClusterState, namespace: &str, name: &str) {
        self.enqueue_referencing_apps(objects, &Reference::ConfigMap(NamespacedName::new(namespace, name)));
    }

    /// Queues the Apps that want this host for their pages, because it may be free now.
    pub(crate) fn enqueue_apps_with_pages_host(&self, objects: &ClusterState, host: &HostName) {
        self.enqueue_referencing_apps(objects, &Reference::PagesHost(host.clone()));
    }

    pub(super) fn enqueue_for_secret(&self, objects: &ClusterState, namespace: &str, name: &str) {
        let secret = NamespacedName::new(namespace, name);
        for provider in objects.providers_by_secret.get(&secret) {
            self.enqueue_apps_with_provider(objects, namespace, provider.name());
            self.enqueue_provider(provider.object_ref());
        }
        self.enqueue_referencing_apps(objects, &Reference::Secret(secret));
    }

    fn enqueue_referencing_apps(&self, objects: &ClusterState, reference: &Reference) {
        for app in objects.apps_by_reference.get(reference) {
            self.enqueue_app(app.object_ref());
        }
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
