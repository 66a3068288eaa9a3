//! What the operator stores about a watched object.

use std::{borrow::Cow, sync::Arc};

use kube::{
    Resource, ResourceExt,
    core::{DeserializeGuard, NamespaceResourceScope, ObjectMeta, PartialObjectMeta, error_boundary::InvalidObject},
    runtime::watcher::{self, Event},
};
use latchkey_crds::{
    app::App,
    client::Client,
    names::ROTATE_SECRET_ANNOTATION,
    types::{AppId, HostName},
};

use super::index::{NamespacedName, app_name};
use crate::{app::keys::policy::digest_if_long, client::status::StatusDigest};

/// The prefix of Latchkey's annotations (`latchkey_crds::names`).
const ANNOTATION_PREFIX: &str = "latchkey.dev/";
/// The maximum length of the error of a Client that cannot be decoded, in characters. The error can quote the Client.
const MAX_ERROR_LENGTH: usize = 1024;

/// The metadata of a Secret, a ConfigMap or a Namespace. The values of Secrets and ConfigMaps are read when they are
/// needed.
pub(super) type Metadata<K> = PartialObjectMeta<K>;

/// A Client without its status. A cluster can have 50,000 Clients, and a status needs more memory than the rest of a
/// Client, so only its digest is kept. Of the annotations, only the rotation request is kept, in the form of
/// [`digest_if_long`]. [`ClientStore`](super::client_store::ClientStore) stores it.
#[derive(Clone, Debug)]
pub(crate) struct WatchedClient {
    /// The Client, or why it cannot be decoded.
    pub(crate) client: Result<Arc<Client>, Arc<InvalidObject>>,
    /// The status that the watch reported.
    pub(crate) status: StatusDigest,
}

/// Removes the metadata that the operator does not read. The removed annotations and labels can have 256 KiB and more
/// per object, and a change of them is no reason to reconcile.
pub(super) fn strip_metadata<K: Resource>(event: watcher::Result<Event<K>>) -> watcher::Result<Event<K>> {
    event.map(|event| {
        event.modify(|object| {
            object.meta_mut().managed_fields = None;
            object.meta_mut().labels = None;
            object.annotations_mut().retain(|name, _| name.starts_with(ANNOTATION_PREFIX));
        })
    })
}

/// Whether two versions of an object are equal in everything that a reconcile reads, except the status.
pub(super) fn is_same_except_status<K: Resource>(one: &DeserializeGuard<K>, other: &DeserializeGuard<K>) -> bool {
    has_same_metadata(one.meta(), other.meta()) && one.0.is_ok() == other.0.is_ok()
}

fn has_same_metadata(one: &ObjectMeta, other: &ObjectMeta) -> bool {
    one.uid == other.uid
        && one.generation == other.generation
        && one.deletion_timestamp == other.deletion_timestamp
        && one.annotations == other.annotations
        && one.finalizers == other.finalizers
}

/// Returns the host that an App wants for its pages, if the pages are enabled.
pub(super) fn claimed_pages_host(app: &DeserializeGuard<App>) -> Option<HostName> {
    app.0.as_ref().ok()?.spec.pages.enabled_host().cloned()
}

/// Returns the appID that an App claims, if it is valid.
pub(crate) fn claimed_app_id(app: &DeserializeGuard<App>) -> Option<AppId> {
    app.0.as_ref().ok()?.app_id().ok()
}

// === impl WatchedClient ===

impl WatchedClient {
    /// Returns the Client, or `None` if it cannot be decoded.
    pub(crate) fn decoded(&self) -> Option<&Client> {
        self.client.as_deref().ok()
    }

    /// Returns the App that the Client names, or `None` if the Client cannot be decoded.
    pub(super) fn app_name(&self) -> Option<NamespacedName> {
        self.decoded().map(app_name)
    }

    /// Whether two versions are equal in everything that a reconcile reads, except the status.
    pub(super) fn is_same_except_status(&self, other: &Self) -> bool {
        has_same_metadata(self.meta(), other.meta()) && self.client.is_ok() == other.client.is_ok()
    }
}

impl From<DeserializeGuard<Client>> for WatchedClient {
    fn from(mut client: DeserializeGuard<Client>) -> Self {
        let status = client.0.as_mut().ok().and_then(|client| client.status.take());
        strip_client_metadata(client.meta_mut());
        if let Err(invalid) = &mut client.0 {
            invalid.error = invalid.error.chars().take(MAX_ERROR_LENGTH).collect();
        }
        Self {
            client: client.0.map(Arc::new).map_err(Arc::new),
            status: status.as_ref().map(StatusDigest::of).unwrap_or_default(),
        }
    }
}

/// Removes the metadata that the operator does not read. It can have hundreds of KiB for each Client.
fn strip_client_metadata(metadata: &mut ObjectMeta) {
    let request = metadata.annotations.take().and_then(|mut annotations| annotations.remove(ROTATE_SECRET_ANNOTATION));
    metadata.annotations =
        request.map(|request| [(ROTATE_SECRET_ANNOTATION.to_owned(), digest_if_long(&request))].into());
    metadata.owner_references = None;
    metadata.finalizers = None;
}

impl Resource for WatchedClient {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind(dynamic: &()) -> Cow<'_, str> {
        Client::kind(dynamic)
    }

    fn group(dynamic: &()) -> Cow<'_, str> {
        Client::group(dynamic)
    }

    fn version(dynamic: &()) -> Cow<'_, str> {
        Client::version(dynamic)
    }

    fn plural(dynamic: &()) -> Cow<'_, str> {
        Client::plural(dynamic)
    }

    fn meta(&self) -> &ObjectMeta {
        match &self.client {
            Ok(client) => &client.metadata,
            Err(invalid) => &invalid.metadata,
        }
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match &mut self.client {
            Ok(client) => &mut Arc::make_mut(client).metadata,
            Err(invalid) => &mut Arc::make_mut(invalid).metadata,
        }
    }
}
