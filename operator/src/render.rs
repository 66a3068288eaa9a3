//! `latchkey-operator render`: manifests in a folder → rendered documents, by the steps that serve a cluster too.

use std::{collections::BTreeSet, io, path::Path, process::ExitCode, sync::Arc};

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
        render::{Rendered, TooLarge, render},
        resolve::{AppFacts, Holder, resolve},
        validate::{Refusal, ValidatedApp, validate},
    },
    args::RenderArgs,
    facts::{Problem, Settings},
    manifests::{AppManifest, Manifests, Parsed, Refused, Schemas},
    memo::Memo,
    panics::{self, catch},
};

mod files;
#[cfg(test)]
mod tests;
mod watch;

/// All that a run over the manifests needs; the runs of `--watch` share it.
pub(crate) struct Renderer {
    args: RenderArgs,
    settings: Settings,
    schemas: Schemas,
    parsed: Arc<Parsed>,
    /// By App: what did not change since the last run is neither validated nor rendered again.
    validated: Memo<AppFacts, Result<ValidatedApp, Refusal>>,
    rendered: Memo<(ValidatedApp, KeyDocument), Result<Rendered, TooLarge>>,
    /// For tests of what a panic does.
    #[cfg(test)]
    before_validate: fn(&AppFacts),
}

/// What a run led to; each line is for a person.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Each App that is served, and each that went.
    pub(crate) apps: Vec<String>,
    /// What is refused.
    pub(crate) refused: Vec<String>,
    /// References that lead nowhere; what they name may be made elsewhere, so nothing is refused for it.
    pub(crate) unresolved: Vec<String>,
}

/// Runs the command to its end.
pub(crate) fn run(args: RenderArgs) -> ExitCode {
    panics::install_hook(|location, text| {
        let text = text.unwrap_or("its text is not shown, since it may quote a secret");
        eprintln!("latchkey-operator: a panic at {location}: {text}");
    });
    match start(args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("latchkey-operator: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn start(args: RenderArgs) -> anyhow::Result<ExitCode> {
    let renderer = Renderer::new(args)?;
    if renderer.args.watch {
        watch::run(&renderer)?;
        return Ok(ExitCode::SUCCESS);
    }
    let outcome = renderer.run(now())?;
    outcome.print();
    Ok(if outcome.refused.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[expect(clippy::disallowed_methods, reason = "the one place where the command takes the time")]
fn now() -> OffsetDateTime {
    OffsetDateTime::now_utc()
}

// === impl Outcome ===

impl Outcome {
    /// One line for each thing, on standard error: standard output stays free.
    pub(crate) fn print(&self) {
        for line in self.refused.iter().chain(&self.unresolved).chain(&self.apps) {
            eprintln!("{line}");
        }
    }
}

// === impl Renderer ===

/// Where nothing is served: what `--check` needs of a base URL is only that there is one.
const NO_BASE_URL: &str = "https://check.invalid";

impl Renderer {
    pub(crate) fn new(args: RenderArgs) -> anyhow::Result<Self> {
        let base_url = match &args.base_url {
            Some(base_url) => base_url.clone(),
            None => NO_BASE_URL.parse::<IssuerUrl>()?,
        };
        ensure!(
            args.allow_insecure || base_url.as_str().starts_with("https://"),
            "--base-url is not https; use https, or --allow-insecure for development"
        );
        if !args.check {
            for folder in [&args.to, &args.keys].into_iter().flatten() {
                files::make_folder(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
            }
        }
        let schemas = Schemas::new(args.allow_insecure)?;
        let settings = Settings { base_url, allow_insecure: args.allow_insecure };
        Ok(Self {
            args,
            settings,
            schemas,
            parsed: Arc::default(),
            validated: Memo::default(),
            rendered: Memo::default(),
            #[cfg(test)]
            before_validate: |_| {},
        })
    }

    /// Renders every App once. An error means that a folder cannot be used; nothing was removed then.
    pub(crate) fn run(&self, now: OffsetDateTime) -> anyhow::Result<Outcome> {
        self.parsed.begin();
        self.validated.begin();
        self.rendered.begin();
        let from = &self.args.from;
        let mut manifests = Manifests::read(from, &self.schemas, &self.parsed)
            .with_context(|| format!("cannot read the folder {}", from.display()))?;
        let mut refused = std::mem::take(&mut manifests.refused);
        let mut outcome = Outcome::default();
        let mut held = BTreeSet::new();
        for manifest in &manifests.apps {
            let holder = match &manifest.app_id {
                Some(app_id) if !held.insert(app_id.clone()) => Holder::Another,
                Some(_) | None => Holder::Us,
            };
            let app = catch(|| self.app(manifest, holder, &manifests, now, &mut refused, &mut outcome));
            app.unwrap_or_else(|panicked| {
                refused.push(refusal(manifest, "", &panicked.advice()));
                Ok(())
            })?;
        }
        if let Some(to) = self.folder_to_write(self.args.to.as_deref())
            && !manifests.incomplete
        {
            for app_id in files::remove_others(to, &held)? {
                outcome.apps.push(format!("{app_id}: removed"));
            }
        }
        refused.sort_by(|one, other| one.place.cmp(&other.place));
        outcome.refused = refused.iter().map(Refused::to_string).collect();
        Ok(outcome)
    }

    fn folder_to_write<'a>(&self, folder: Option<&'a Path>) -> Option<&'a Path> {
        folder.filter(|_| !self.args.check)
    }

    /// The steps of one App, in their order.
    fn app(
        &self,
        manifest: &AppManifest,
        holder: Holder,
        manifests: &Manifests,
        now: OffsetDateTime,
        refused: &mut Vec<Refused>,
        outcome: &mut Outcome,
    ) -> anyhow::Result<()> {
        // Why it is refused was told when it was read.
        let Some(app) = &manifest.app else { return Ok(()) };
        let facts = resolve(app.clone(), holder, manifests);
        let validated = self.validated.get(&manifest.object, facts, |facts| {
            #[cfg(test)]
            (self.before_validate)(facts);
            validate(facts, &self.settings)
        });
        let steps = Result::clone(&validated).and_then(|validated| {
            let input = (validated.clone(), self.keys(&validated, now)?);
            let rendered = self
                .rendered
                .get(&manifest.object, input, |(validated, keys)| render(validated, keys, FORMAT).within_limit());
            Ok((validated, rendered))
        });
        match steps {
            Ok((validated, rendered)) => {
                let rendered = match &*rendered {
                    Ok(rendered) => rendered,
                    Err(large) => {
                        refused.push(refusal(manifest, "", &large.to_string()));
                        return Ok(());
                    }
                };
                for problem in &validated.problems {
                    let line = refusal(manifest, &problem.field, &problem.message);
                    if is_elsewhere(problem) {
                        outcome.unresolved.push(format!("{line} ({})", problem.reason));
                    } else {
                        refused.push(line);
                    }
                }
                outcome.apps.push(self.publish(&validated.app_id, rendered)?);
            }
            Err(Refusal { field, message, .. }) => refused.push(refusal(manifest, &field, &message)),
        }
        Ok(())
    }

    /// The App's keys: those that are kept, else, where there never were any, new ones.
    fn keys(&self, app: &ValidatedApp, now: OffsetDateTime) -> Result<KeyDocument, Refusal> {
        let algorithm = app.signing_algorithm();
        let refuse = |error: KeysError| {
            let message = format!("its keys {error}; they are never written over: put the file back from a copy");
            Refusal::new(Reason::KeysInvalid, "", message)
        };
        let made = |_| Refusal::new(Reason::KeysInvalid, "", "no key could be made");
        let Some(folder) = self.args.keys.as_deref() else {
            return KeyDocument::first(&app.app_id, algorithm, now).map_err(made);
        };
        let kept = match files::read_keys(folder, &app.app_id).map_err(refuse)? {
            Some(kept) => kept,
            None => self.first_keys(folder, &app.app_id, algorithm, now)?,
        };
        match kept.with_algorithm(algorithm, now).map_err(made)? {
            None => Ok(kept),
            Some(changed) => {
                if !self.args.check {
                    files::replace_keys(folder, &changed).map_err(refuse)?;
                }
                Ok(changed)
            }
        }
    }

    /// Keys where there is no key file: those of the document that is served, if there is one, else new ones.
    fn first_keys(
        &self,
        folder: &Path,
        app_id: &AppId,
        algorithm: SigningAlgorithm,
        now: OffsetDateTime,
    ) -> Result<KeyDocument, Refusal> {
        let served = self.args.to.as_deref().and_then(|to| files::read_document(to, app_id));
        let keys = match served.map(|served| KeyDocument::of_document(served, now)) {
            Some(keys) if keys.check(app_id).is_ok() => keys,
            Some(_) | None => KeyDocument::first(app_id, algorithm, now)
                .map_err(|error| Refusal::new(Reason::KeysInvalid, "", error.to_string()))?,
        };
        if self.args.check {
            return Ok(keys);
        }
        files::keep_first_keys(folder, keys).map_err(|error| {
            Refusal::new(Reason::KeysInvalid, "", format!("its keys {error}; make the keys' folder writable"))
        })
    }

    /// Writes the document where it differs, and says so.
    fn publish(&self, app_id: &AppId, rendered: &Rendered) -> anyhow::Result<String> {
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

/// Why an App is not rendered as its manifest says.
fn refusal(manifest: &AppManifest, field: &str, reason: &str) -> Refused {
    Refused {
        place: manifest.place.clone(),
        object: Some(manifest.object.clone()),
        field: field.to_owned(),
        reason: reason.to_owned(),
    }
}

/// Whether a reference names something that may simply be kept elsewhere, as Secrets are by people who keep Apps in
/// git; what is there and wrong is refused.
fn is_elsewhere(problem: &Problem) -> bool {
    matches!(
        problem.reason,
        Reason::ProviderNotFound | Reason::SecretNotFound | Reason::SecretKeyNotFound | Reason::ConfigMapNotFound
    )
}

/// Why a key file cannot be used. Never tells what is in it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeysError {
    #[error("cannot be read or written: {0}")]
    Io(#[source] io::Error),
    #[error("are not a key document")]
    NotKeys,
    #[error("are not usable: {0}")]
    Invalid(#[source] crate::app::keys::InvalidKeys),
}
