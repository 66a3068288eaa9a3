//! What the operator knows of the cluster.

use std::{collections::HashMap, sync::Arc};

use kube::{core::DeserializeGuard, runtime::reflector::Store};
use latchkey_crds::{
    app::App,
    client::Client,
    provider::Provider,
    types::{AppId, HostName},
};
use parking_lot::{Mutex, MutexGuard};

use super::{
    client_index::{ClientIndex, ClientReference},
    client_secrets::ClientSecrets,
    client_store::ClientStore,
    index::{NamespacedName, Reference, ReferenceIndex, app_name},
    namespaces::Namespaces,
    published::PublishedDocuments,
};
use crate::{
    app::ownership::{Claim, ClaimValidity},
    client::{outcomes::ClientOutcomes, select::grants, status::WrittenClientStatuses},
    quota::{QuotaLimits, Quotas},
};

/// The operator's copies of watched objects, and what the operator derives from them.
#[derive(Clone)]
pub(crate) struct ClusterState {
    /// [`DeserializeGuard`] stores the error of an object that cannot be decoded. So such an object does not stop the
    /// watch of the other objects.
    pub(crate) apps: Store<DeserializeGuard<App>>,
    pub(crate) providers: Store<DeserializeGuard<Provider>>,
    pub(crate) clients: Arc<ClientStore>,
    pub(crate) client_index: Arc<ClientIndex>,
    pub(crate) client_secrets: Arc<ClientSecrets>,
    pub(crate) client_outcomes: Arc<ClientOutcomes>,
    pub(crate) written_client_statuses: Arc<WrittenClientStatuses>,
    pub(crate) namespaces: Arc<Namespaces>,
    pub(crate) published: Arc<PublishedDocuments>,
    pub(crate) key_versions: Arc<ReconciledKeyVersions>,
    pub(crate) quotas: Arc<Quotas>,
    /// The names of the Apps, by the objects that they reference.
    pub(super) apps_by_reference: Arc<ReferenceIndex<Reference, NamespacedName>>,
    /// The names of the Providers, by the Secret that they reference.
    pub(super) providers_by_secret: Arc<ReferenceIndex<NamespacedName, NamespacedName>>,
}

/// For each appID, the resourceVersion of the key Secret that the last reconcile used ([`ClusterState::is_reconciled`]
/// compares it).
#[derive(Default)]
pub(crate) struct ReconciledKeyVersions(Mutex<HashMap<AppId, String>>);

// === impl ClusterState ===

impl ClusterState {
    pub(crate) fn new(
        apps: Store<DeserializeGuard<App>>,
        providers: Store<DeserializeGuard<Provider>>,
        namespaces: Namespaces,
        limits: QuotaLimits,
    ) -> Self {
        let quotas = Arc::new(Quotas::new(limits));
        Self {
            apps,
            providers,
            clients: Arc::default(),
            client_index: Arc::default(),
            client_secrets: Arc::default(),
            client_outcomes: Arc::default(),
            written_client_statuses: Arc::default(),
            namespaces: Arc::new(namespaces),
            published: Arc::new(PublishedDocuments::new(Arc::clone(&quotas))),
            key_versions: Arc::default(),
            quotas,
            apps_by_reference: Arc::default(),
            providers_by_secret: Arc::default(),
        }
    }

    /// Returns how many Apps of the namespace have precedence over the App of this claim: older Apps that wait for room
    /// or are not validated yet. Returns 0 if there is room for all Apps.
    pub(crate) fn count_ahead_of(&self, claim: &Claim) -> u32 {
        let namespace = claim.owner.namespace.as_str();
        let in_namespace = Reference::Namespace(namespace.to_owned());
        if self.quotas.has_room(namespace, self.apps_by_reference.count(&in_namespace)) {
            return 0;
        }
        let apps = self.referencing_apps(&in_namespace);
        let ahead = apps.iter().filter(|app| {
            let Ok(app) = &app.0 else { return false };
            let other = Claim::from_app(app);
            let owns = app.app_id().is_ok_and(|id| self.quotas.owns_app_id(&id, namespace));
            let competes = match other.validity {
                ClaimValidity::Pending => true,
                ClaimValidity::Valid | ClaimValidity::Invalid => {
                    self.quotas.is_waiting_for_app_id(namespace, &other.owner.name)
                }
                ClaimValidity::Deleting => false,
            };
            competes && !owns && other.has_precedence_over(claim)
        });
        u32::try_from(ahead.count()).unwrap_or(u32::MAX)
    }

    /// Returns the Apps that claim this appID.
    pub(crate) fn apps_with_id(&self, id: &AppId) -> Vec<Arc<DeserializeGuard<App>>> {
        self.referencing_apps(&Reference::AppId(id.clone()))
    }

    /// Returns the Apps that want this host for their pages.
    pub(crate) fn apps_with_pages_host(&self, host: &HostName) -> Vec<Arc<DeserializeGuard<App>>> {
        self.referencing_apps(&Reference::PagesHost(host.clone()))
    }

    /// Returns the App that a Client refers to, if the watch has reported it.
    pub(crate) fn app_of(&self, client: &Client) -> Option<Arc<DeserializeGuard<App>>> {
        self.apps.get(&app_name(client).object_ref())
    }

    /// Whether any Client refers to the App.
    pub(crate) fn has_clients(&self, app: &NamespacedName) -> bool {
        let reference = ClientReference::App { namespace: app.namespace(), name: app.name() };
        !self.client_index.get(reference).is_empty()
    }

    /// Whether the App accepts Clients of this namespace.
    pub(crate) fn grants_clients(&self, app: &App, namespace: &str) -> bool {
        app.metadata.namespace.as_deref() == Some(namespace)
            || grants(&app.spec.clients.namespaces, namespace, &*self.namespaces)
    }

    fn referencing_apps(&self, reference: &Reference) -> Vec<Arc<DeserializeGuard<App>>> {
        let apps = self.apps_by_reference.get(reference);
        apps.iter().filter_map(|app| self.apps.get(&app.object_ref())).collect()
    }

    /// Whether a watch event about the key Secret of this appID needs no reconcile: the App has already been reconciled
    /// with this version of the Secret, and no other App claims the appID.
    pub(super) fn is_reconciled(&self, id: &AppId, version: &str) -> bool {
        self.key_versions.lock().get(id).is_some_and(|reconciled| reconciled == version)
            && self.apps_by_reference.get(&Reference::AppId(id.clone())).len() == 1
    }
}

// === impl ReconciledKeyVersions ===

impl ReconciledKeyVersions {
    fn lock(&self) -> MutexGuard<'_, HashMap<AppId, String>> {
        self.0.lock()
    }

    pub(crate) fn record(&self, id: &AppId, version: &str) {
        self.lock().insert(id.clone(), version.to_owned());
    }

    pub(super) fn forget(&self, id: &AppId) {
        self.lock().remove(id);
    }
}
