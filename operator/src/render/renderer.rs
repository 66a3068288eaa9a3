//! Renders the Apps of a folder: turns manifests into documents and keys, by the same steps as in a cluster.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use anyhow::{Context, ensure};
use latchkey_crds::{
    conditions::Reason,
    rendered::{FORMAT, SigningAlgorithm},
    types::{AppId, IssuerUrl},
};
use time::OffsetDateTime;

use crate::{
    app::{
        keys::KeyDocument,
        render::{Rendered, Room, TooLarge, render},
        resolve::{AppFacts, Ownership, resolve},
        validate::{Rejection, ValidatedApp, validate},
    },
    args::RenderArgs,
    facts::{FieldError, Settings},
    manifests::{AppManifest, Manifests, ParseCache, RejectedManifest, Schemas},
    panics::catch,
    render::{
        clients::{ClientRenderer, has_ended, report_clients_without_app, report_left_out},
        files::{self, KeyFileError},
    },
    run_cache::RunCache,
};

#[cfg(test)]
mod tests;

/// Everything that a run over the manifests needs. The runs of `--watch` share it.
pub(crate) struct Renderer {
    pub(super) args: RenderArgs,
    settings: Settings,
    schemas: Schemas,
    parse_cache: Arc<ParseCache>,
    /// The results of the last run, by App. An App with the same input as in the last run is neither validated nor
    /// rendered again.
    validated: RunCache<AppFacts, Result<ValidatedApp, Rejection>>,
    rendered: RunCache<(ValidatedApp, KeyDocument), Result<Rendered, TooLarge>>,
    /// Called before each validation. Tests set a function that panics.
    #[cfg(test)]
    before_validate: fn(&AppFacts),
}

/// The outcome of a run, as lines to print.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RenderSummary {
    /// One line for each App that is served, for each removed document, and for each document from which clients were
    /// removed.
    pub(crate) apps: Vec<String>,
    /// One line for each rejected file, document, object or field, with the reason.
    pub(crate) rejected: Vec<String>,
    /// Problems that are not errors: references to objects that do not exist, because these objects may be defined
    /// elsewhere, and files with keys or secrets that other users may still be able to read.
    pub(crate) unresolved: Vec<String>,
    /// The earliest time at which a previous client secret expires, so that the documents must be rendered again.
    pub(crate) next_due: Option<OffsetDateTime>,
}

// === impl RenderSummary ===

impl RenderSummary {
    /// Prints to standard error, one line per item.
    pub(crate) fn print(&self) {
        for line in self.rejected.iter().chain(&self.unresolved).chain(&self.apps) {
            eprintln!("{line}");
        }
    }
}

// === impl Renderer ===

/// The base URL if the command runs with `--check` and without `--base-url`.
const PLACEHOLDER_BASE_URL: &str = "https://check.invalid";

impl Renderer {
    pub(crate) fn new(args: RenderArgs) -> anyhow::Result<Self> {
        let base_url = match &args.base_url {
            Some(base_url) => base_url.clone(),
            None => PLACEHOLDER_BASE_URL.parse::<IssuerUrl>()?,
        };
        ensure!(
            args.allow_insecure || base_url.as_str().starts_with("https://"),
            "--base-url is not https; use https, or --allow-insecure for development"
        );
        if !args.check {
            for folder in [&args.to, &args.keys].into_iter().flatten() {
                files::create_private_folder(folder)
                    .with_context(|| format!("cannot create the folder {}", folder.display()))?;
            }
        }
        let schemas = Schemas::new(args.allow_insecure)?;
        let settings = Settings { base_url, allow_insecure: args.allow_insecure };
        Ok(Self {
            args,
            settings,
            schemas,
            parse_cache: Arc::default(),
            validated: RunCache::default(),
            rendered: RunCache::default(),
            #[cfg(test)]
            before_validate: |_| {},
        })
    }

    /// Renders every App once. Fails if the folder of the manifests cannot be read, or if a document cannot be written
    /// or removed. If keys cannot be read or written, only their App is rejected. If a manifest cannot be read, no
    /// document is removed.
    pub(crate) fn run(&self, now: OffsetDateTime) -> anyhow::Result<RenderSummary> {
        self.parse_cache.begin();
        self.validated.begin_run();
        self.rendered.begin_run();
        let from = &self.args.from;
        let mut manifests = Manifests::read(from, &self.schemas, &self.parse_cache)
            .with_context(|| format!("cannot read the folder {}", from.display()))?;
        let mut rejected = std::mem::take(&mut manifests.rejected);
        let mut summary = RenderSummary::default();
        if let Some(folder) = self.folder_to_write(self.args.keys.as_deref()) {
            for (file, error) in files::tighten_modes(folder) {
                let line = format!("{}: its mode cannot be set to 0600: {error}; set it yourself", file.display());
                summary.unresolved.push(line);
            }
        }
        let mut owned = BTreeSet::new();
        let mut pages_hosts = BTreeSet::new();
        for manifest in &manifests.apps {
            let ownership = match &manifest.app_id {
                Some(app_id) if !owned.insert(app_id.clone()) => Ownership::Taken,
                Some(_) | None => Ownership::Ours,
            };
            // If several Apps want the same host for their pages, the first by file name and position in the file gets
            // it.
            let host = manifest.app.as_ref().and_then(|app| app.spec.pages.enabled_host());
            let holds_pages_host =
                ownership == Ownership::Ours && host.is_some_and(|host| pages_hosts.insert(host.clone()));
            let claims = (ownership, holds_pages_host);
            let app = catch(|| self.render_app(manifest, claims, &manifests, now, &mut rejected, &mut summary));
            app.unwrap_or_else(|panicked| {
                rejected.push(rejected_manifest(manifest, "", &panicked.message()));
                Ok(())
            })?;
        }
        if let Some(to) = self.folder_to_write(self.args.to.as_deref())
            && !manifests.incomplete
        {
            for app_id in files::remove_other_documents(to, &owned)? {
                summary.apps.push(format!("{app_id}: removed"));
            }
        }
        report_clients_without_app(&manifests, &mut summary);
        rejected.sort_by(|one, other| one.location.cmp(&other.location));
        summary.rejected = rejected.iter().map(RejectedManifest::to_string).collect();
        Ok(summary)
    }

    fn folder_to_write<'a>(&self, folder: Option<&'a Path>) -> Option<&'a Path> {
        folder.filter(|_| !self.args.check)
    }

    /// Runs the steps of one App, in order.
    fn render_app(
        &self,
        manifest: &AppManifest,
        (ownership, holds_pages_host): (Ownership, bool),
        manifests: &Manifests,
        now: OffsetDateTime,
        rejected: &mut Vec<RejectedManifest>,
        summary: &mut RenderSummary,
    ) -> anyhow::Result<()> {
        // The reason was already reported when the manifest was read.
        let Some(app) = &manifest.app else { return self.remove_ended_clients(manifest, manifests, summary) };
        let facts = resolve(app.clone(), ownership, holds_pages_host, manifests);
        let clients = ClientRenderer { args: &self.args, manifests, now };
        let validated = self.validated.get_or_compute(&manifest.object, facts, |facts| {
            #[cfg(test)]
            (self.before_validate)(facts);
            validate(facts, &self.settings)
        });
        let steps = Result::clone(&validated).and_then(|mut validated| {
            let last = || {
                let to = self.args.to.as_deref();
                let served = to.and_then(|to| files::read_document(to, &validated.app_id));
                served.map(|served| served.clients).unwrap_or_default()
            };
            validated.clients = clients.clients_of(app, &validated, last, rejected, summary);
            let input = (validated.clone(), self.load_keys(&validated, now)?);
            let rendered = self.rendered.get_or_compute(&manifest.object, input, |(validated, keys)| {
                render(validated, keys, Room::new(FORMAT, u64::MAX))
            });
            Ok((validated, rendered))
        });
        match steps {
            Ok((validated, rendered)) => {
                let rendered = match &*rendered {
                    Ok(rendered) => rendered,
                    Err(too_large) => {
                        rejected.push(rejected_manifest(manifest, "", &too_large.to_string()));
                        return self.remove_ended_clients(manifest, manifests, summary);
                    }
                };
                report_left_out(&validated.clients[rendered.client_count..], manifests, rejected);
                for error in &validated.field_errors {
                    let line = rejected_manifest(manifest, &error.field, &error.message);
                    if can_be_defined_elsewhere(error) {
                        summary.unresolved.push(format!("{line} ({})", error.reason));
                    } else {
                        rejected.push(line);
                    }
                }
                summary.apps.push(self.write_document(&validated.app_id, rendered)?);
            }
            Err(Rejection { field, message, .. }) => {
                rejected.push(rejected_manifest(manifest, &field, &message));
                if ownership == Ownership::Ours {
                    self.remove_ended_clients(manifest, manifests, summary)?;
                }
            }
        }
        Ok(())
    }

    /// Rewrites the last document of an App that is not accepted, without the clients that must not be served any more.
    fn remove_ended_clients(
        &self,
        manifest: &AppManifest,
        manifests: &Manifests,
        summary: &mut RenderSummary,
    ) -> anyhow::Result<()> {
        let Some((to, app_id)) = self.folder_to_write(self.args.to.as_deref()).zip(manifest.app_id.as_ref()) else {
            return Ok(());
        };
        let Some(mut document) = files::read_document(to, app_id) else { return Ok(()) };
        // The document may belong to another App, which had this appID before.
        let object = format!("App {}/{}", document.namespace, document.name);
        let before = document.clients.len();
        document.clients.retain(|client| !has_ended(client, manifest.app.as_ref(), manifests));
        if object != manifest.object || document.clients.len() == before {
            return Ok(());
        }
        let path = to.join(format!("{app_id}.json"));
        files::write_if_changed(&path, &document.to_bytes())
            .with_context(|| format!("cannot write {}", path.display()))?;
        let count = before - document.clients.len();
        summary.apps.push(format!("{app_id}: removed {count} ended clients from the last accepted document"));
        Ok(())
    }

    /// Returns the stored keys of the App. Creates keys if none are stored.
    fn load_keys(&self, app: &ValidatedApp, now: OffsetDateTime) -> Result<KeyDocument, Rejection> {
        let algorithm = app.signing_algorithm();
        let id_tokens: BTreeSet<_> = app.clients.iter().map(|client| client.tokens.id_token_algorithm).collect();
        let file_error = |error: KeyFileError| {
            let message = format!("its keys {error}; the file is never overwritten: restore it from a backup");
            Rejection::new(Reason::KeysInvalid, "", message)
        };
        let generation_error = |_| Rejection::new(Reason::KeysInvalid, "", "no key could be generated");
        let Some(folder) = self.args.keys.as_deref() else {
            return KeyDocument::first(&app.app_id, algorithm, now).map_err(generation_error);
        };
        let keys = match files::read_keys(folder, &app.app_id).map_err(file_error)? {
            Some(stored) => stored,
            None => self.create_first_keys(folder, &app.app_id, algorithm, now)?,
        };
        let changed = keys.changed_to_algorithm(algorithm, now).map_err(generation_error)?;
        let changed = changed.unwrap_or_else(|| keys.clone());
        let for_id_tokens = changed.changed_to_id_token_algorithms(&id_tokens, now).map_err(generation_error)?;
        let changed = for_id_tokens.unwrap_or(changed);
        if changed != keys && !self.args.check {
            files::replace_keys(folder, &changed).map_err(file_error)?;
        }
        Ok(changed)
    }

    /// Returns keys for an App without a key file: the keys of the served document if they are valid, otherwise new
    /// keys. Stores these keys, except with `--check`.
    fn create_first_keys(
        &self,
        folder: &Path,
        app_id: &AppId,
        algorithm: SigningAlgorithm,
        now: OffsetDateTime,
    ) -> Result<KeyDocument, Rejection> {
        let served = self.args.to.as_deref().and_then(|to| files::read_document(to, app_id));
        let keys = match served.map(|served| KeyDocument::from_rendered(served, now)) {
            Some(keys) if keys.validate(app_id).is_ok() => keys,
            Some(_) | None => KeyDocument::first(app_id, algorithm, now)
                .map_err(|error| Rejection::new(Reason::KeysInvalid, "", error.to_string()))?,
        };
        if self.args.check {
            return Ok(keys);
        }
        files::store_first_keys(folder, keys).map_err(|error| {
            Rejection::new(Reason::KeysInvalid, "", format!("its keys {error}; make the keys' folder writable"))
        })
    }

    /// Writes the document if it changed. Returns the line to print.
    fn write_document(&self, app_id: &AppId, rendered: &Rendered) -> anyhow::Result<String> {
        let revision = &rendered.revision.as_str()[..12];
        let Some(to) = self.folder_to_write(self.args.to.as_deref()) else {
            return Ok(format!("{app_id}: valid"));
        };
        let path = to.join(format!("{app_id}.json"));
        let changed = files::write_if_changed(&path, &rendered.bytes)
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(match changed {
            true => format!("{app_id}: rendered, revision {revision}"),
            false => format!("{app_id}: unchanged, revision {revision}"),
        })
    }
}

/// Returns the entry that reports why an App is not rendered as its manifest requires.
fn rejected_manifest(manifest: &AppManifest, field: &str, reason: &str) -> RejectedManifest {
    RejectedManifest {
        location: manifest.location.clone(),
        object: Some(manifest.object.clone()),
        field: field.to_owned(),
        reason: reason.to_owned(),
    }
}

/// Whether the error is a reference to an object that may be defined elsewhere: people who store Apps in git often
/// store Secrets elsewhere. An object that exists and is invalid is rejected.
pub(super) fn can_be_defined_elsewhere(error: &FieldError) -> bool {
    matches!(
        error.reason,
        Reason::ProviderNotFound | Reason::SecretNotFound | Reason::SecretKeyNotFound | Reason::ConfigMapNotFound
    )
}
