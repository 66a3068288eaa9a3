//! The Clients of an App: selects them by the same rules as in a cluster, and keeps their secrets in files.

use std::path::Path;

use latchkey_crds::{
    app::App,
    client::Client,
    conditions::Reason,
    names::ROTATE_SECRET_ANNOTATION,
    rendered::{RenderedClient, RenderedClientAuthentication},
    types::ClientId,
};
use time::OffsetDateTime;

use crate::{
    app::{keys::KeyGenerationError, validate::ValidatedApp},
    args::RenderArgs,
    client::{
        secret_state::{DesiredSecret, SecretState, advance, generate_secret},
        select::{Candidate, Selected, grants, refusal_without_app, select},
        validate::{ClientPolicy, CreatedSecret, Credentials},
    },
    facts::FieldError,
    manifests::{ClientManifest, Manifests, RejectedManifest},
    render::{
        files::{self, KeyFileError},
        renderer::{RenderSummary, can_be_defined_elsewhere},
    },
};

/// Renders the Clients of Apps in one run of `latchkey-operator render`.
pub(super) struct ClientRenderer<'a> {
    pub(super) args: &'a RenderArgs,
    pub(super) manifests: &'a Manifests,
    pub(super) now: OffsetDateTime,
}

/// Why the secret of a Client cannot be used.
#[derive(Debug, thiserror::Error)]
enum SecretError {
    #[error("its file {0}; it is never overwritten: repair or delete it")]
    Unusable(#[source] KeyFileError),
    #[error("its file {0}; make the keys' folder writable")]
    NotWritten(#[source] KeyFileError),
    #[error(transparent)]
    NotGenerated(#[from] KeyGenerationError),
}

/// A Client about which the selection decides, with its manifest. `manifest` is `None` if the Client is only in the
/// served document.
struct Considered<'a> {
    manifest: Option<&'a ClientManifest>,
    candidate: Candidate,
    secret: Option<Result<SecretState, SecretError>>,
}

/// Reports the Clients of Apps that are not in the folder. They may be defined elsewhere.
pub(super) fn report_clients_without_app(manifests: &Manifests, summary: &mut RenderSummary) {
    for manifest in &manifests.clients {
        let (Some(client), Some((namespace, name))) = (&manifest.client, &manifest.app) else { continue };
        let app = format!("App {namespace}/{name}");
        if !manifests.apps.iter().any(|manifest| manifest.object == app) {
            let refusal = refusal_without_app(client);
            let line = rejected_client(manifest, &refusal);
            summary.unresolved.push(format!("{line} ({})", refusal.reason));
        }
    }
}

/// Reports the Clients for which the document has no room.
pub(super) fn report_left_out(clients: &[RenderedClient], manifests: &Manifests, rejected: &mut Vec<RejectedManifest>) {
    for client in clients {
        let is_of_client =
            |manifest: &&ClientManifest| manifest.namespace == client.namespace && manifest.name == client.name;
        if let Some(manifest) = manifests.clients.iter().find(is_of_client) {
            let error = FieldError::new(Reason::TooLarge, "", "the document of its App has no room for it");
            rejected.push(rejected_client(manifest, &error));
        }
    }
}

/// Whether a client in the last document of an App must no longer be served. Called if the App is not accepted, and
/// therefore gets no new document. A client has ended if its manifest is gone or names another App, or if the App no
/// longer has pages or no longer accepts Clients from the client's namespace. `app` is `None` if the App cannot be
/// read.
pub(super) fn has_ended(client: &RenderedClient, app: Option<&App>, manifests: &Manifests) -> bool {
    let is_of_client =
        |manifest: &&ClientManifest| manifest.namespace == client.namespace && manifest.name == client.name;
    let Some(manifest) = manifests.clients.iter().find(is_of_client) else {
        // The manifest may be in a file that cannot be read.
        return !manifests.incomplete;
    };
    let Some(app) = app else { return false };
    let namespace = app.metadata.namespace.as_deref().unwrap_or_default();
    let name = app.metadata.name.as_deref().unwrap_or_default();
    let is_of_app = manifest.app.as_ref().is_none_or(|app| (app.0.as_str(), app.1.as_str()) == (namespace, name));
    let is_granted =
        namespace == client.namespace || grants(&app.spec.clients.namespaces, &client.namespace, manifests);
    !(is_of_app && is_granted && app.spec.pages.is_enabled())
}

fn rejected_client(manifest: &ClientManifest, error: &FieldError) -> RejectedManifest {
    RejectedManifest {
        location: manifest.location.clone(),
        object: Some(manifest.object.clone()),
        field: error.field.clone(),
        reason: error.message.clone(),
    }
}

// === impl ClientRenderer ===

impl ClientRenderer<'_> {
    /// Returns the clients of an App, and writes the secrets that they need. `last` returns the clients of the served
    /// document.
    pub(super) fn clients_of(
        &self,
        app: &App,
        validated: &ValidatedApp,
        last: impl FnOnce() -> Vec<RenderedClient>,
        rejected: &mut Vec<RejectedManifest>,
        summary: &mut RenderSummary,
    ) -> Vec<RenderedClient> {
        let mut considered = self.consider(validated);
        if considered.is_empty() && !self.manifests.incomplete {
            return Vec::new();
        }
        let last = last();
        if self.manifests.incomplete {
            add_unknown(&mut considered, &last);
        }
        let policy = ClientPolicy::of_app(app, &validated.app_id);
        let selected = select(&policy, considered.iter().map(|one| &one.candidate), self.manifests, &last);
        let mut clients = Vec::new();
        for (considered, selected) in considered.into_iter().zip(selected) {
            let Selected { mut rendered, refusal, mut unresolved } = selected;
            let is_served = rendered.is_some();
            let end = considered.secret.as_ref().and_then(|secret| secret.as_ref().ok()?.end_of_previous());
            summary.next_due = summary.next_due.into_iter().chain(end.filter(|_| is_served)).min();
            let stored = considered.secret.map(|secret| self.store_secret(&considered.candidate, secret, is_served));
            if let Some(Err(error)) = stored {
                if let Some(rendered) = &mut rendered {
                    rendered.authentication = RenderedClientAuthentication::Unresolved;
                }
                unresolved = vec![FieldError::new(Reason::SecretKeyInvalid, "", error.to_string())];
            }
            clients.extend(rendered);
            // The error of a manifest that cannot be read was already reported.
            let Some(manifest) = considered.manifest.filter(|manifest| manifest.client.is_some()) else { continue };
            for error in refusal.iter().chain(&unresolved) {
                let line = rejected_client(manifest, error);
                if can_be_defined_elsewhere(error) {
                    summary.unresolved.push(format!("{line} ({})", error.reason));
                } else {
                    rejected.push(line);
                }
            }
        }
        clients
    }

    /// Returns the Clients that refer to the App, ordered by file name and by position in the file.
    fn consider(&self, validated: &ValidatedApp) -> Vec<Considered<'_>> {
        let is_of_app = |manifest: &&ClientManifest| {
            let app = manifest.app.as_ref();
            app.is_some_and(|(namespace, name)| *namespace == validated.namespace && *name == validated.name)
        };
        let manifests = self.manifests.clients.iter().filter(is_of_app);
        manifests.map(|manifest| self.consider_manifest(manifest, validated)).collect()
    }

    fn consider_manifest<'a>(&self, manifest: &'a ClientManifest, validated: &ValidatedApp) -> Considered<'a> {
        let (namespace, name) = (manifest.namespace.clone(), manifest.name.clone());
        let uid = format!("{namespace}/{name}");
        let Some(client) = &manifest.client else {
            let (client, credentials) = (Err("its manifest is invalid".to_owned()), Credentials::None);
            let candidate = Candidate { namespace, name, uid, client, credentials };
            return Considered { manifest: Some(manifest), candidate, secret: None };
        };
        let secret = client.created_secret().map(|_| self.next_secret(client, validated));
        let created = match &secret {
            Some(Ok(state)) => CreatedSecret::Stored(state.hashes.clone()),
            Some(Err(_)) | None => CreatedSecret::Pending,
        };
        let credentials = Credentials::resolve(client, created, self.manifests);
        let candidate = Candidate { namespace, name, uid, client: Ok(client.clone()), credentials };
        Considered { manifest: Some(manifest), candidate, secret }
    }

    /// Returns the folder with the secrets, or `None` if none are stored.
    fn folder(&self) -> Option<&Path> {
        self.args.keys.as_deref()
    }

    /// Computes the next secret of a Client. Writes nothing.
    fn next_secret(&self, client: &Client, validated: &ValidatedApp) -> Result<SecretState, SecretError> {
        let (name, client_id) = (default_id(client), client.client_id().unwrap_or_else(|_| default_id(client)));
        let stored = match self.folder() {
            Some(folder) => files::read_client_secret(folder, &name).map_err(SecretError::Unusable)?,
            None => None,
        };
        let annotations = client.metadata.annotations.as_ref();
        let desired = DesiredSecret {
            issuer: validated.issuer.as_str(),
            client_id: &client_id,
            rotate_request: annotations.and_then(|all| all.get(ROTATE_SECRET_ANNOTATION)).map(String::as_str),
            overlap_seconds: client.spec.web().map_or(0, |web| web.rotation_overlap_seconds()),
        };
        Ok(advance(stored.as_ref(), &desired, self.now, generate_secret)?)
    }

    /// Stores the next secret of a Client if the Client is served.
    fn store_secret(
        &self,
        candidate: &Candidate,
        secret: Result<SecretState, SecretError>,
        is_served: bool,
    ) -> Result<(), SecretError> {
        let SecretState { write, .. } = secret?;
        let folder = self.folder().filter(|_| is_served && !self.args.check);
        if let (Some(contents), Some(folder), Ok(client)) = (write, folder, &candidate.client) {
            files::store_client_secret(folder, &default_id(client), &contents).map_err(SecretError::NotWritten)?;
        }
        Ok(())
    }
}

/// Adds the Clients that are in the served document but in no manifest that was read. Their manifests may be in a file
/// that cannot be read.
fn add_unknown(considered: &mut Vec<Considered<'_>>, last: &[RenderedClient]) {
    let is_known = |client: &RenderedClient| considered.iter().any(|one| one.candidate.uid == client.uid);
    let unknown: Vec<_> = last.iter().filter(|client| !is_known(client)).map(Considered::only_served).collect();
    considered.extend(unknown);
}

/// Returns namespace and name of a Client, which also name its file. The manifests were checked when they were read.
fn default_id(client: &Client) -> ClientId {
    let (namespace, name) = (client.metadata.namespace.as_deref(), client.metadata.name.as_deref());
    ClientId::of_client(namespace.unwrap_or_default(), name.unwrap_or_default())
        .expect("a Client with other names is rejected when its manifest is read")
}

// === impl Considered ===

impl Considered<'_> {
    /// A Client that is only in the served document.
    fn only_served(last: &RenderedClient) -> Self {
        let candidate = Candidate {
            namespace: last.namespace.clone(),
            name: last.name.clone(),
            uid: last.uid.clone(),
            client: Err("its manifest cannot be read".to_owned()),
            credentials: Credentials::None,
        };
        Self { manifest: None, candidate, secret: None }
    }
}
