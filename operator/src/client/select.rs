//! Selects the Clients of an App: which are in a namespace with a grant, which are accepted, and which take precedence
//! if there are too many (specification: Clients, Limits). Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use latchkey_crds::{
    client::{Client, ClientNamespaces, NamespacesFrom, WebAuthentication},
    conditions::Reason,
    rendered::{RenderedClient, RenderedClientAuthentication},
    types::ClientId,
};

use super::{
    render::{render, size},
    validate::{ClientPolicy, CreatedSecret, Credentials, authentication, validate},
};
use crate::facts::FieldError;

/// The maximum number of Clients of an App.
pub(crate) const MAX_CLIENTS: usize = 200;
/// The maximum size of a Client in a document, in bytes.
pub(crate) const MAX_CLIENT_BYTES: usize = 16 * 1024;
/// The maximum size of all Clients in a document, in bytes.
pub(crate) const MAX_CLIENTS_BYTES: usize = 256 * 1024;
/// The maximum number of Clients of an App from one other namespace.
pub(crate) const MAX_CLIENTS_OF_NAMESPACE: usize = 50;

/// The label with the name of a namespace, which the API server sets on every namespace.
const NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// A Client that refers to the App, with its secret hashes or keys.
#[derive(Debug, PartialEq)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Candidate {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The identity of the Client ([`RenderedClient::uid`]).
    pub(crate) uid: String,
    /// The Client, or why it cannot be read. Its metadata has the namespace, the name and the UID above.
    pub(crate) client: Result<Arc<Client>, String>,
    pub(crate) credentials: Credentials,
}

/// The decision about a candidate.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Selected {
    /// The served client: the Client as it is now or, if `refusal` is set, as it was accepted last.
    pub(crate) rendered: Option<RenderedClient>,
    /// Why the Client is not accepted.
    pub(crate) refusal: Option<FieldError>,
    /// Why the Secrets or keys of the Client cannot be used.
    pub(crate) unresolved: Vec<FieldError>,
}

/// The labels of namespaces.
pub(crate) trait NamespaceLabels {
    /// Returns the labels of a namespace, or `None` if they are not known yet. If they can never be known, returns
    /// [`implied_labels`].
    fn labels(&self, namespace: &str) -> Option<BTreeMap<String, String>>;
}

/// How many Clients, and how many bytes, have been accepted so far in one selection.
#[derive(Default)]
struct Usage {
    ids: BTreeSet<ClientId>,
    all: Amount,
    /// The part of `all` that belongs to Clients of other namespaces than the App's.
    foreign: Amount,
    /// The number of Clients by namespace.
    by_namespace: BTreeMap<String, usize>,
}

#[derive(Clone, Copy, Default)]
struct Amount {
    clients: usize,
    bytes: usize,
}

/// Returns the labels that the API server sets on every namespace: only the name of the namespace.
pub(crate) fn implied_labels(namespace: &str) -> BTreeMap<String, String> {
    BTreeMap::from([(NAME_LABEL.to_owned(), namespace.to_owned())])
}

/// Whether an App with this grant accepts the Clients of another namespace. If the labels of the namespace are unknown,
/// no selector matches it. It must not count as a namespace without labels, because selectors with `NotIn` and
/// `DoesNotExist` match such a namespace.
pub(crate) fn grants(grant: &ClientNamespaces, namespace: &str, namespaces: &dyn NamespaceLabels) -> bool {
    match namespaces.labels(namespace) {
        Some(labels) => grant.grants(&labels),
        None => grant.from == NamespacesFrom::All,
    }
}

/// Decides about each candidate, in the given order. If there are too many, the earlier candidates win: in a cluster
/// these are the older ones, for `latchkey-operator render` those in earlier files. `last` are the clients of the
/// published document, which stay as they are if their new spec is not accepted.
pub(crate) fn select<'a>(
    policy: &ClientPolicy,
    candidates: impl IntoIterator<Item = &'a Candidate>,
    namespaces: &dyn NamespaceLabels,
    last: &[RenderedClient],
) -> Vec<Selected> {
    let mut usage = Usage::default();
    candidates.into_iter().map(|candidate| select_one(policy, candidate, namespaces, last, &mut usage)).collect()
}

/// Whether the selection must be repeated with the clients of the published document, because a refused Client may stay
/// served.
pub(crate) fn needs_last(selected: &[Selected]) -> bool {
    selected
        .iter()
        .any(|one| one.rendered.is_none() && one.refusal.as_ref().is_some_and(|why| stays_served(why.reason)))
}

/// Whether a Client that is refused for this reason stays served as it was accepted last. A refusal for another reason
/// takes effect at once.
fn stays_served(reason: Reason) -> bool {
    matches!(reason, Reason::InvalidSpec | Reason::TooLarge | Reason::TooManyClients | Reason::ClientIDConflict)
}

/// Returns why a Client of an App that does not exist is refused. The message to another namespace does not reveal
/// whether the App exists.
pub(crate) fn refusal_without_app(client: &Client) -> FieldError {
    if client.is_in_app_namespace() {
        let message = format!("App {} does not exist in this namespace; create it", client.spec.app_ref.name);
        FieldError::new(Reason::AppNotFound, "spec.appRef", message)
    } else {
        not_granted()
    }
}

/// Returns why a Client is refused if it is beyond the maximum number of Clients that are considered or read.
pub(super) fn not_considered() -> FieldError {
    let message = "the App has too many Clients, and the older ones win; delete Clients";
    FieldError::new(Reason::TooManyClients, "", message)
}

fn not_granted() -> FieldError {
    let message = "names no App that grants clients to this namespace; correct it, or ask the owner of the App to set \
                   spec.clients.namespaces";
    FieldError::new(Reason::NotGranted, "spec.appRef", message)
}

fn select_one(
    policy: &ClientPolicy,
    candidate: &Candidate,
    namespaces: &dyn NamespaceLabels,
    last: &[RenderedClient],
    usage: &mut Usage,
) -> Selected {
    let is_foreign = candidate.namespace != policy.namespace;
    if is_foreign && !grants(&policy.grant, &candidate.namespace, namespaces) {
        return Selected::refused(not_granted());
    }
    if !policy.has_pages {
        let message = "the App has no hosted pages, without which nobody can sign in; set spec.pages.mode of the App";
        return Selected::refused(FieldError::new(Reason::PagesOff, "spec.appRef", message));
    }
    let last = last.iter().find(|last| last.uid == candidate.uid).cloned();
    let client = match &candidate.client {
        Ok(client) => client,
        Err(reason) => {
            let refusal = FieldError::new(Reason::InvalidSpec, "", reason);
            let rendered = last.and_then(|last| keep(policy, last, is_foreign, usage));
            return Selected { rendered, refusal: Some(refusal), unresolved: Vec::new() };
        }
    };
    let mut unresolved = Vec::new();
    let authentication = match &last {
        // Users of the client must not notice it if the API server does not respond to one request.
        Some(last) if candidate.is_last_used(last, client) => last.authentication.clone(),
        Some(_) | None => authentication(client, &candidate.credentials, &mut unresolved),
    };
    let accepted = validate(client, policy).and_then(|client_id| {
        if candidate.credentials == Credentials::LeftUnread {
            return Err(not_considered());
        }
        let rendered = render(client, client_id, authentication.clone());
        usage.try_add(&rendered, is_foreign)?;
        Ok(rendered)
    });
    let (rendered, refusal) =
        match accepted {
            Ok(rendered) => (Some(rendered), None),
            Err(refusal) => {
                let declared = client.spec.web().map(|web| web.authentication);
                let is_read_interrupted = candidate.credentials.is_read_interrupted();
                let last = last.map(|last| {
                    if is_read_interrupted { last } else { with_authentication(last, authentication, declared) }
                });
                (last.and_then(|last| keep(policy, last, is_foreign, usage)), Some(refusal))
            }
        };
    Selected { rendered, refusal, unresolved }
}

/// Returns a client as it was accepted last, if the App still allows it and there is room for it.
fn keep(policy: &ClientPolicy, last: RenderedClient, is_foreign: bool, usage: &mut Usage) -> Option<RenderedClient> {
    let last = policy.restrict(last)?;
    usage.try_add(&last, is_foreign).is_ok().then_some(last)
}

/// Returns a client as it was accepted last, with the current secret or keys: a rotated or deleted secret takes effect
/// at once. If the new spec declares another method (`declared`; `None` for a public client), the client keeps the
/// secret or keys of its last accepted spec, even if an object to which the new spec refers does not exist.
pub(super) fn with_authentication(
    mut last: RenderedClient,
    now: RenderedClientAuthentication,
    declared: Option<WebAuthentication>,
) -> RenderedClient {
    use RenderedClientAuthentication as Authentication;
    let is_same_method = match declared {
        None => false,
        Some(WebAuthentication::Secret) => {
            matches!(last.authentication, Authentication::Secret { .. } | Authentication::Unresolved)
        }
        Some(WebAuthentication::PrivateKeyJwt) => {
            matches!(last.authentication, Authentication::PrivateKeyJwt { .. } | Authentication::Unresolved)
        }
    };
    if is_same_method && now != Authentication::None {
        last.authentication = now;
    }
    last
}

// === impl Candidate ===

impl Candidate {
    /// Whether the operator has not created the Secret of the Client yet.
    pub(crate) fn waits_for_secret(&self) -> bool {
        self.credentials == Credentials::Created(CreatedSecret::Pending)
    }

    /// Whether the client keeps the secret or keys of its last accepted form, because its current secret or keys could
    /// not be read now.
    fn is_last_used(&self, last: &RenderedClient, client: &Client) -> bool {
        self.credentials.is_read_interrupted() && Some(last.generation) == client.metadata.generation
    }
}

// === impl Selected ===

impl Selected {
    fn refused(refusal: FieldError) -> Self {
        Self { rendered: None, refusal: Some(refusal), unresolved: Vec::new() }
    }
}

// === impl Usage, Amount ===

impl Usage {
    /// Counts a client as accepted, or returns why there is no room for it.
    fn try_add(&mut self, client: &RenderedClient, is_foreign: bool) -> Result<(), FieldError> {
        if self.ids.contains(&client.client_id) {
            let message = "an older Client of the App has this client ID; create a Client with another one";
            return Err(FieldError::new(Reason::ClientIDConflict, "spec.clientID", message));
        }
        let bytes = size(client);
        if bytes > MAX_CLIENT_BYTES {
            let message = format!(
                "the Client needs {} KiB, and can have {}; shorten its lists",
                bytes.div_ceil(1024),
                MAX_CLIENT_BYTES / 1024
            );
            return Err(FieldError::new(Reason::TooLarge, "", message));
        }
        let of_namespace = self.by_namespace.get(&client.namespace).copied().unwrap_or(0);
        if is_foreign && of_namespace >= MAX_CLIENTS_OF_NAMESPACE {
            return Err(too_many(&format!("{MAX_CLIENTS_OF_NAMESPACE} Clients of this namespace")));
        }
        let (all, foreign) = (self.all.plus(bytes), self.foreign.plus(bytes));
        if !all.is_within(MAX_CLIENTS, MAX_CLIENTS_BYTES) {
            let kib = MAX_CLIENTS_BYTES / 1024;
            return Err(too_many(&format!("{MAX_CLIENTS} Clients, with {kib} KiB together")));
        }
        if is_foreign && !foreign.is_within(MAX_CLIENTS / 2, MAX_CLIENTS_BYTES / 2) {
            let (clients, kib) = (MAX_CLIENTS / 2, MAX_CLIENTS_BYTES / 2 / 1024);
            return Err(too_many(&format!("{clients} Clients of other namespaces, with {kib} KiB together")));
        }
        self.all = all;
        if is_foreign {
            self.foreign = foreign;
        }
        self.ids.insert(client.client_id.clone());
        self.by_namespace.insert(client.namespace.clone(), of_namespace + 1);
        Ok(())
    }
}

impl Amount {
    const fn plus(self, bytes: usize) -> Self {
        Self { clients: self.clients + 1, bytes: self.bytes + bytes }
    }

    const fn is_within(self, clients: usize, bytes: usize) -> bool {
        self.clients <= clients && self.bytes <= bytes
    }
}

fn too_many(limit: &str) -> FieldError {
    let message = format!("an App can have at most {limit}, and the older ones win; delete Clients");
    FieldError::new(Reason::TooManyClients, "", message)
}

#[cfg(test)]
mod tests;
