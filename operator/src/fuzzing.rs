//! The functions that the fuzz targets call: they turn manifests into rendered documents, without files.

use std::collections::BTreeSet;

use latchkey_crds::{
    app::App,
    rendered::{FORMAT, RenderedClient, SecretString, SigningAlgorithm},
    types::{AppId, IssuerUrl},
};
use parking_lot::Mutex;
use time::OffsetDateTime;

use crate::{
    app::{
        keys::KeyDocument,
        render::{Room, render},
        resolve::{Ownership, resolve},
        validate::{ValidatedApp, logo::media_type, validate},
    },
    client::{
        jwks::normalize,
        secret_state::{SecretHashes, sha256},
        select::{Candidate, select},
        validate::{ClientPolicy, CreatedSecret, Credentials},
    },
    facts::Settings,
    manifests::{ClientManifest, Manifests, Schemas},
};

/// Returns the media type of a logo, or `None` if the logo is not accepted.
pub fn logo_media_type(logo: &[u8]) -> Option<&'static str> {
    media_type(logo).ok()
}

/// Returns a key set (JWKS) of a Client as servers read it, or `None` if it is not accepted.
pub fn client_key_set(text: &str) -> Option<String> {
    normalize(text).ok()
}

/// Runs the steps of `latchkey-operator render` on one file.
pub struct FuzzRenderer {
    schemas: Schemas,
    settings: Settings,
    /// The keys for each algorithm, generated once: generating an RSA key takes longer than rendering thousands of
    /// Apps.
    keys: Mutex<Vec<(SigningAlgorithm, KeyDocument)>>,
}

/// What is rendered from one file, and what is rejected.
#[derive(Debug, Default)]
pub struct FuzzOutput {
    /// The documents that servers would get.
    pub documents: Vec<(AppId, Vec<u8>)>,
    /// The messages about what is rejected, one line for each reason.
    pub rejected: Vec<String>,
}

// === impl FuzzRenderer ===

impl FuzzRenderer {
    /// Loads the definitions of the resources.
    ///
    /// # Panics
    ///
    /// If the definitions of the resources are broken.
    pub fn new(base_url: IssuerUrl, allow_insecure: bool) -> Self {
        Self {
            schemas: Schemas::new(allow_insecure).expect("the definitions are tested"),
            settings: Settings { base_url, allow_insecure },
            keys: Mutex::default(),
        }
    }

    /// Renders the Apps of one file. The extension of `file` decides between YAML and JSON.
    pub fn render(&self, file: &str, text: &str) -> FuzzOutput {
        let mut manifests = Manifests::default();
        manifests.add_file(file, text, &self.schemas);
        let mut rendered = FuzzOutput {
            rejected: manifests.rejected.iter().map(ToString::to_string).collect(),
            ..FuzzOutput::default()
        };
        let mut used_app_ids = BTreeSet::new();
        for manifest in &manifests.apps {
            let Some(app) = &manifest.app else { continue };
            let ownership = match &manifest.app_id {
                Some(app_id) if !used_app_ids.insert(app_id.clone()) => Ownership::Taken,
                Some(_) | None => Ownership::Ours,
            };
            let facts = resolve(app.clone(), ownership, true, &manifests);
            match validate(&facts, &self.settings) {
                Ok(mut valid) => {
                    valid.clients = clients(app, &valid, &manifests);
                    let app = valid;
                    rendered.rejected.extend(app.field_errors.iter().map(|error| error.message.clone()));
                    let keys = self.keys(&app.app_id, app.signing_algorithm());
                    match render(&app, &keys, Room::new(FORMAT, u64::MAX)) {
                        Ok(document) => rendered.documents.push((app.app_id, document.bytes)),
                        Err(too_large) => rendered.rejected.push(too_large.to_string()),
                    }
                }
                Err(rejection) => rendered.rejected.push(rejection.message),
            }
        }
        rendered
    }

    fn keys(&self, app_id: &AppId, algorithm: SigningAlgorithm) -> KeyDocument {
        let mut stored = self.keys.lock();
        let found =
            stored.iter().find(|(stored_algorithm, _)| *stored_algorithm == algorithm).map(|(_, keys)| keys.clone());
        let keys = found.unwrap_or_else(|| {
            let generated =
                KeyDocument::first(app_id, algorithm, OffsetDateTime::UNIX_EPOCH).expect("a key can be generated");
            stored.push((algorithm, generated.clone()));
            generated
        });
        KeyDocument { app_id: app_id.clone(), ..keys }
    }
}

/// Returns the clients of an App. The Secrets that an operator would create have a fixed value.
fn clients(app: &App, valid: &ValidatedApp, manifests: &Manifests) -> Vec<RenderedClient> {
    let hashes = SecretHashes { current: sha256(&SecretString::new("lks_fuzzing")), previous: None };
    let is_of_app = |manifest: &&ClientManifest| {
        let app = manifest.app.as_ref();
        app.is_some_and(|(namespace, name)| *namespace == valid.namespace && *name == valid.name)
    };
    let candidate = |manifest: &ClientManifest| {
        let client = manifest.client.clone();
        let created = CreatedSecret::Stored(hashes.clone());
        Candidate {
            namespace: manifest.namespace.clone(),
            name: manifest.name.clone(),
            uid: format!("{}/{}", manifest.namespace, manifest.name),
            credentials: client
                .as_ref()
                .map_or(Credentials::None, |client| Credentials::resolve(client, created, manifests)),
            client: client.ok_or_else(|| "its manifest is invalid".to_owned()),
        }
    };
    let candidates: Vec<_> = manifests.clients.iter().filter(is_of_app).map(candidate).collect();
    let selected = select(&ClientPolicy::of_app(app, &valid.app_id), &candidates, manifests, &[]);
    selected.into_iter().filter_map(|one| one.rendered).collect()
}
