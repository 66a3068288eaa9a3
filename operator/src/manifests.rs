//! Reads the manifests of a folder, parses them, checks them against the schemas, and looks them up for the steps.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use latchkey_crds::{
    GROUP, VERSION, app,
    app::App,
    provider,
    provider::Provider,
    types::AppId,
    validation::{InvalidDefinition, Validator},
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use crate::{
    facts::{ConfigMapValues, Lookup, ObjectSource, SecretBytes, SecretValues},
    panics::catch,
    run_cache::RunCache,
};

/// The largest file that is read, in bytes. A Kubernetes object is much smaller.
const MAX_FILE: u64 = 8 * 1024 * 1024;

/// The location of a document: its file relative to the folder, and its number in the file, starting at 1.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DocumentLocation {
    pub(crate) file: String,
    /// `None`: the file as a whole.
    pub(crate) document: Option<usize>,
}

/// Something that is not used, and why, as one line for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RejectedManifest {
    pub(crate) location: DocumentLocation,
    /// `App shop/shop`; `None` if the document cannot be read that far.
    pub(crate) object: Option<String>,
    pub(crate) field: String,
    pub(crate) reason: String,
}

/// An App as far as it could be read.
#[derive(Debug)]
pub(crate) struct AppManifest {
    pub(crate) location: DocumentLocation,
    pub(crate) object: String,
    /// `None`: neither the field nor the name is a valid appID.
    pub(crate) app_id: Option<AppId>,
    /// `None`: the manifest is invalid.
    pub(crate) app: Option<App>,
}

/// The contents of a folder.
#[derive(Debug, Default)]
pub(crate) struct Manifests {
    /// In the order of file names and positions.
    pub(crate) apps: Vec<AppManifest>,
    providers: BTreeMap<(String, String), Option<Provider>>,
    secrets: BTreeMap<(String, String), Option<SecretValues>>,
    config_maps: BTreeMap<(String, String), Option<ConfigMapValues>>,
    pub(crate) rejected: Vec<RejectedManifest>,
    /// Whether something could not be read at all. It may contain Apps that nobody knows of.
    pub(crate) incomplete: bool,
    parsed: Arc<ParseCache>,
}

/// Validates objects against the definitions of their kinds.
pub(crate) struct Schemas {
    app: Validator,
    provider: Validator,
    allow_insecure: bool,
}

/// What the previous run parsed: unchanged documents are not parsed again.
#[derive(Debug, Default)]
pub(crate) struct ParseCache {
    documents: RunCache<String, Result<Value, String>>,
    apps: RunCache<Value, Result<App, Violations>>,
    providers: RunCache<Value, Result<Provider, Violations>>,
}

// === impl DocumentLocation ===

impl fmt::Display for DocumentLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.document {
            Some(document) => write!(f, "{} (document {document})", self.file),
            None => f.write_str(&self.file),
        }
    }
}

// === impl Refused ===

impl fmt::Display for RejectedManifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.location)?;
        if let Some(object) = &self.object {
            write!(f, "{object}: ")?;
        }
        if !self.field.is_empty() {
            write!(f, "field {}: ", self.field)?;
        }
        f.write_str(&self.reason)
    }
}

// === impl Schemas ===

impl Schemas {
    pub(crate) fn new(allow_insecure: bool) -> Result<Self, InvalidDefinition> {
        Ok(Self {
            app: Validator::new(&app::definition())?,
            provider: Validator::new(&provider::definition())?,
            allow_insecure,
        })
    }

    /// The typed object, or each wrong field with what to do.
    fn parse<T: DeserializeOwned>(&self, validator: &Validator, object: &Value) -> Result<T, Violations> {
        let violations = validator.validate(object, None);
        let violations: Vec<_> = violations
            .into_iter()
            .filter(|violation| !(violation.is_policy && self.allow_insecure))
            .map(|violation| (violation.field, violation.reason))
            .collect();
        if !violations.is_empty() {
            return Err(violations);
        }
        // The types check what the schema cannot express.
        serde_path_to_error::deserialize(validator.normalize(object)).map_err(|error| {
            let field = error.path().to_string();
            vec![(if field == "." { String::new() } else { field }, error.inner().to_string())]
        })
    }
}

// === impl ParseCache ===

impl ParseCache {
    /// Begins a run over the manifests.
    pub(crate) fn begin(&self) {
        self.documents.begin_run();
        self.apps.begin_run();
        self.providers.begin_run();
    }

    /// How many Apps and Providers this run parsed.
    #[cfg(test)]
    pub(crate) fn parsed_count(&self) -> usize {
        self.apps.computed() + self.providers.computed()
    }
}

// === impl Manifests ===

impl ObjectSource for Manifests {
    fn provider(&self, namespace: &str, name: &str) -> Lookup<Provider> {
        look_up(&self.providers, namespace, name)
    }

    fn secret(&self, namespace: &str, name: &str) -> Lookup<SecretValues> {
        look_up(&self.secrets, namespace, name)
    }

    fn config_map(&self, namespace: &str, name: &str) -> Lookup<ConfigMapValues> {
        look_up(&self.config_maps, namespace, name)
    }
}

fn look_up<T: Clone>(objects: &BTreeMap<(String, String), Option<T>>, namespace: &str, name: &str) -> Lookup<T> {
    match objects.get(&(namespace.to_owned(), name.to_owned())) {
        Some(Some(object)) => Lookup::Found(object.clone()),
        Some(None) => Lookup::Invalid,
        None => Lookup::Missing,
    }
}

impl Manifests {
    /// Reads every manifest of a folder and its subfolders. Fails only if the folder itself cannot be read: problems of
    /// a file are collected.
    pub(crate) fn read(folder: &Path, schemas: &Schemas, parsed: &Arc<ParseCache>) -> io::Result<Self> {
        let mut manifests = Self { parsed: Arc::clone(parsed), ..Self::default() };
        for (name, path) in manifest_files(folder, &mut manifests)? {
            match read_text(&path) {
                Ok(text) => manifests.add_file(&name, &text, schemas),
                Err(reason) => manifests.reject_unreadable(DocumentLocation { file: name, document: None }, reason),
            }
        }
        Ok(manifests)
    }

    /// Adds the documents of one file.
    pub(crate) fn add_file(&mut self, file: &str, text: &str, schemas: &Schemas) {
        for (index, document) in parse_documents(file, text, &self.parsed).into_iter().enumerate() {
            let place = DocumentLocation { file: file.to_owned(), document: Some(index + 1) };
            match document {
                Ok(Value::Null) => {}
                Ok(value) => {
                    if let Err(panicked) = catch(|| self.add_object(&place, value, schemas)) {
                        self.reject_unreadable(place, panicked.message());
                    }
                }
                Err(reason) => self.reject_unreadable(place, reason),
            }
        }
    }

    fn reject_unreadable(&mut self, place: DocumentLocation, reason: String) {
        self.incomplete = true;
        self.rejected.push(RejectedManifest { location: place, object: None, field: String::new(), reason });
    }

    fn reject(&mut self, place: &DocumentLocation, object: &str, field: &str, reason: impl Into<String>) {
        self.rejected.push(RejectedManifest {
            location: place.clone(),
            object: Some(object.to_owned()),
            field: field.to_owned(),
            reason: reason.into(),
        });
    }

    fn add_object(&mut self, place: &DocumentLocation, value: Value, schemas: &Schemas) {
        let Value::Object(object) = value else {
            return self.reject_unreadable(place.clone(), "is not an object".into());
        };
        let api_version = object.get("apiVersion").and_then(Value::as_str).unwrap_or_default();
        let kind = object.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
        let group = api_version.split_once('/').map_or("", |(group, _)| group);
        match (api_version, kind.as_str()) {
            ("v1", "List") => match object.get("items") {
                Some(Value::Array(items)) => {
                    items.iter().for_each(|item| self.add_object(place, item.clone(), schemas))
                }
                _ => self.reject_unreadable(place.clone(), "is a List without items".into()),
            },
            ("v1", "Secret" | "ConfigMap") => self.add_named_object(place, &kind, object, schemas),
            (version, "App" | "Provider") if version == format!("{GROUP}/{VERSION}") => {
                self.add_named_object(place, &kind, object, schemas);
            }
            (_, "App" | "Provider") if group == GROUP || api_version.is_empty() => {
                // It may be an App that is being served.
                self.incomplete = true;
                self.reject(place, &kind, "apiVersion", format!("must be {GROUP}/{VERSION}"));
            }
            (_, kind) if group == GROUP => {
                self.reject(place, kind, "kind", format!("must be App or Provider in {GROUP}"));
            }
            // Other kinds, or no Kubernetes objects: not ours.
            _ => {}
        }
    }

    fn add_named_object(
        &mut self,
        place: &DocumentLocation,
        kind: &str,
        mut object: Map<String, Value>,
        schemas: &Schemas,
    ) {
        let metadata = object.get("metadata").and_then(Value::as_object);
        let text = |field: &str| metadata.and_then(|metadata| metadata.get(field)).and_then(Value::as_str);
        let name = text("name").unwrap_or_default().to_owned();
        let namespace = text("namespace").filter(|namespace| !namespace.is_empty()).unwrap_or("default").to_owned();
        let label = format!("{kind} {namespace}/{name}");
        if name.is_empty() {
            self.incomplete |= kind == "App";
            return self.reject(place, kind, "metadata.name", "is required");
        }
        let key = (namespace.clone(), name);
        let twice = match kind {
            "App" => self.apps.iter().any(|app| app.object == label),
            "Provider" => self.providers.contains_key(&key),
            "Secret" => self.secrets.contains_key(&key),
            _ => self.config_maps.contains_key(&key),
        };
        if twice {
            return self.reject(place, &label, "", "is defined twice; the first one counts, remove this one");
        }
        if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
            metadata.insert("namespace".into(), Value::String(namespace));
        }
        let object = Value::Object(object);
        match kind {
            "App" => {
                let app_id = unchecked_app_id(&object);
                self.incomplete |= app_id.is_none();
                let parsed =
                    self.parsed.apps.get_or_compute(&label, object, |object| schemas.parse(&schemas.app, object));
                let app = self.accept_or_reject(place, &label, Result::clone(&parsed));
                self.apps.push(AppManifest { location: place.clone(), object: label, app_id, app });
            }
            "Provider" => {
                let parsed = self
                    .parsed
                    .providers
                    .get_or_compute(&label, object, |object| schemas.parse(&schemas.provider, object));
                let provider = self.accept_or_reject(place, &label, Result::clone(&parsed));
                self.providers.insert(key, provider);
            }
            "Secret" => {
                let values = self.accept_or_reject(place, &label, secret_values(&object));
                self.secrets.insert(key, values);
            }
            _ => {
                let values = self.accept_or_reject(place, &label, config_map_values(&object));
                self.config_maps.insert(key, values);
            }
        }
    }

    fn accept_or_reject<T>(
        &mut self,
        place: &DocumentLocation,
        label: &str,
        parsed: Result<T, Violations>,
    ) -> Option<T> {
        match parsed {
            Ok(parsed) => Some(parsed),
            Err(faults) => {
                for (field, reason) in faults {
                    self.reject(place, label, &field, reason);
                }
                None
            }
        }
    }
}

fn unchecked_app_id(object: &Value) -> Option<AppId> {
    let field = object.pointer("/spec/appID").filter(|field| !field.is_null());
    field.or_else(|| object.pointer("/metadata/name"))?.as_str()?.parse().ok()
}

/// The manifest files, by name relative to the folder.
fn manifest_files(folder: &Path, manifests: &mut Manifests) -> io::Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut seen = BTreeSet::new();
    let mut open = vec![(String::new(), folder.to_path_buf())];
    while let Some((prefix, folder)) = open.pop() {
        // A symbolic link can lead back to a folder above.
        if !seen.insert(fs::canonicalize(&folder)?) {
            continue;
        }
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            // Files of editors and version control.
            if name.starts_with('.') {
                continue;
            }
            let below = format!("{prefix}{name}");
            match fs::metadata(entry.path()) {
                Ok(metadata) if metadata.is_dir() => open.push((format!("{below}/"), entry.path())),
                Ok(metadata) if metadata.is_file() && is_manifest(&name) => {
                    found.insert(below, entry.path());
                }
                Ok(_) => {}
                Err(error) if is_manifest(&name) => {
                    manifests.reject_unreadable(
                        DocumentLocation { file: below, document: None },
                        format!("cannot be read: {error}"),
                    );
                }
                Err(_) => {}
            }
        }
    }
    Ok(found)
}

fn is_manifest(name: &str) -> bool {
    Path::new(name)
        .extension()
        .and_then(|extension| extension.to_str())
        .is_some_and(|extension| ["yaml", "yml", "json"].contains(&extension))
}

fn read_text(path: &Path) -> Result<String, String> {
    let unreadable = |error: io::Error| format!("cannot be read: {error}");
    if fs::metadata(path).map_err(unreadable)?.len() > MAX_FILE {
        return Err(format!("is over {} MiB", MAX_FILE / 1024 / 1024));
    }
    let bytes = fs::read(path).map_err(unreadable)?;
    String::from_utf8(bytes).map_err(|error| format!("is not UTF-8 at byte {}", error.utf8_error().valid_up_to()))
}

/// The documents of a file, each parsed separately, so that a broken one does not affect the others. Empty ones are
/// dropped.
fn parse_documents(file: &str, text: &str, parsed: &ParseCache) -> Vec<Result<Value, String>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if Path::new(file).extension().is_some_and(|extension| extension == "json") {
        return vec![serde_json::from_str(text).map_err(|error| format!("is not JSON: {error}"))];
    }
    split_documents(text)
        .into_iter()
        .map(|(first_line, document)| {
            let name = format!("{file}:{first_line}");
            let parsed = parsed.documents.get_or_compute(&name, document, |document| {
                let parsed = catch(|| parse_yaml(document)).map_err(|panicked| panicked.message())?;
                parsed.map_err(|error| yaml_error(&error, first_line))
            });
            Result::clone(&parsed)
        })
        .filter(|document| !matches!(document, Ok(Value::Null)))
        .collect()
}

/// Splits at the lines `---`, which cannot occur inside a document (YAML 1.2, 9.1.2). Returns each part with the number
/// of lines before it.
fn split_documents(text: &str) -> Vec<(usize, String)> {
    let mut parts = vec![(0, String::new())];
    for (number, line) in text.lines().enumerate() {
        let marker = line.strip_prefix("---").filter(|rest| rest.is_empty() || rest.starts_with([' ', '\t']));
        match (marker, parts.last_mut()) {
            // Text after the marker belongs to the document; spaces keep its column.
            (Some(rest), _) => parts.push((number, format!("   {rest}\n"))),
            (None, Some((_, part))) => {
                // Directives and end markers have no meaning here.
                if line.trim_end() != "..." && !(line.starts_with('%') && part.trim().is_empty()) {
                    part.push_str(line);
                }
                part.push('\n');
            }
            (None, None) => {}
        }
    }
    parts
}

fn parse_yaml(document: &str) -> Result<Value, serde_yaml::Error> {
    let mut value: serde_yaml::Value = serde_yaml::from_str(document)?;
    value.apply_merge()?;
    Value::deserialize(value)
}

/// The parser's message, with the line number in the file.
fn yaml_error(error: &serde_yaml::Error, lines_before: usize) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or(&text);
    match error.location() {
        Some(location) => format!("is not YAML: {text} (line {})", lines_before + location.line()),
        None => format!("is not YAML: {text}"),
    }
}

type Violations = Vec<(String, String)>;

/// The values of a Secret: `data` in base64, and `stringData`, which takes precedence.
fn secret_values(object: &Value) -> Result<SecretValues, Violations> {
    let mut values = SecretValues::new();
    let mut faults = Violations::new();
    for (key, text) in string_entries(object, "data", &mut faults) {
        // kubectl accepts base64 with line breaks.
        match STANDARD.decode(text.split_ascii_whitespace().collect::<String>()) {
            Ok(bytes) => drop(values.insert(key, SecretBytes(bytes))),
            Err(_) => faults.push((format!("data.{key}"), "must be base64; plain text goes under stringData".into())),
        }
    }
    for (key, text) in string_entries(object, "stringData", &mut faults) {
        values.insert(key, SecretBytes(text.into_bytes()));
    }
    if faults.is_empty() { Ok(values) } else { Err(faults) }
}

fn config_map_values(object: &Value) -> Result<ConfigMapValues, Violations> {
    let mut faults = Violations::new();
    let text = string_entries(object, "data", &mut faults).into_iter().collect();
    let binary = string_entries(object, "binaryData", &mut faults).into_iter().map(|(key, _)| key).collect();
    if faults.is_empty() { Ok(ConfigMapValues { text, binary }) } else { Err(faults) }
}

/// The strings of a map, by key. Values are never quoted, because they may be secret.
fn string_entries(object: &Value, field: &str, faults: &mut Violations) -> Vec<(String, String)> {
    let mut found = Vec::new();
    match object.get(field) {
        None | Some(Value::Null) => {}
        Some(Value::Object(members)) => {
            for (key, value) in members {
                match value {
                    Value::String(text) => found.push((key.clone(), text.clone())),
                    Value::Null => found.push((key.clone(), String::new())),
                    Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                        faults.push((format!("{field}.{key}"), "must be a string; put it in quotes".into()));
                    }
                }
            }
        }
        Some(Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_)) => {
            faults.push((field.into(), "must be a map of strings".into()));
        }
    }
    found
}
