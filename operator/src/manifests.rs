//! Manifests in a folder: read, parsed, judged by the schema, and looked up as the steps want them.

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
    validation::{BrokenDefinition, Validator},
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use crate::{
    facts::{ConfigMapValues, Lookup, SecretBytes, SecretValues, Source},
    memo::Memo,
    panics::catch,
};

/// The largest file that is read, in octets: an object of Kubernetes is smaller by far.
const MAX_FILE: u64 = 8 * 1024 * 1024;

/// Where a document stands: its file below the folder, and its place in the file, from 1.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) file: String,
    /// None: the file as a whole.
    pub(crate) document: Option<usize>,
}

/// Something that is not used, and why; one line to a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) place: Place,
    /// `App shop/shop`; none where the document is not that far readable.
    pub(crate) object: Option<String>,
    pub(crate) field: String,
    pub(crate) reason: String,
}

/// An App as far as it could be read.
#[derive(Debug)]
pub(crate) struct AppManifest {
    pub(crate) place: Place,
    pub(crate) object: String,
    /// None: neither field nor name is an appID.
    pub(crate) app_id: Option<AppId>,
    /// None: refused.
    pub(crate) app: Option<App>,
}

/// What a folder holds.
#[derive(Debug, Default)]
pub(crate) struct Manifests {
    /// In the order of file names and places.
    pub(crate) apps: Vec<AppManifest>,
    providers: BTreeMap<(String, String), Option<Provider>>,
    secrets: BTreeMap<(String, String), Option<SecretValues>>,
    config_maps: BTreeMap<(String, String), Option<ConfigMapValues>>,
    pub(crate) refused: Vec<Refused>,
    /// Whether something could not be read at all, so that nobody knows which Apps it holds.
    pub(crate) incomplete: bool,
    parsed: Arc<Parsed>,
}

/// Judges objects by the definitions of their kinds.
pub(crate) struct Schemas {
    app: Validator,
    provider: Validator,
    allow_insecure: bool,
}

/// What was parsed by the run before: what did not change since is not parsed again.
#[derive(Debug, Default)]
pub(crate) struct Parsed {
    documents: Memo<String, Result<Value, String>>,
    apps: Memo<Value, Result<App, Faults>>,
    providers: Memo<Value, Result<Provider, Faults>>,
}

// === impl Place ===

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.document {
            Some(document) => write!(f, "{} (document {document})", self.file),
            None => f.write_str(&self.file),
        }
    }
}

// === impl Refused ===

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.place)?;
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
    pub(crate) fn new(allow_insecure: bool) -> Result<Self, BrokenDefinition> {
        Ok(Self {
            app: Validator::new(&app::definition())?,
            provider: Validator::new(&provider::definition())?,
            allow_insecure,
        })
    }

    /// The typed object, or each field that is wrong with what to do.
    fn parse<T: DeserializeOwned>(&self, validator: &Validator, object: &Value) -> Result<T, Faults> {
        let violations = validator.check(object, None);
        let violations: Vec<_> = violations
            .into_iter()
            .filter(|violation| !(violation.policy && self.allow_insecure))
            .map(|violation| (violation.field, violation.reason))
            .collect();
        if !violations.is_empty() {
            return Err(violations);
        }
        // What the schema cannot say, the types do.
        serde_path_to_error::deserialize(validator.stored(object)).map_err(|error| {
            let field = error.path().to_string();
            vec![(if field == "." { String::new() } else { field }, error.inner().to_string())]
        })
    }
}

// === impl Parsed ===

impl Parsed {
    /// Begins a run over the manifests.
    pub(crate) fn begin(&self) {
        self.documents.begin();
        self.apps.begin();
        self.providers.begin();
    }

    /// How many Apps and Providers this run parsed.
    #[cfg(test)]
    pub(crate) fn made(&self) -> usize {
        self.apps.made() + self.providers.made()
    }
}

// === impl Manifests ===

impl Source for Manifests {
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
        Some(None) => Lookup::Refused,
        None => Lookup::Missing,
    }
}

impl Manifests {
    /// Reads every manifest of a folder and its subfolders. An error is the folder's own: what is wrong with a file is
    /// in `refused`.
    pub(crate) fn read(folder: &Path, schemas: &Schemas, parsed: &Arc<Parsed>) -> io::Result<Self> {
        let mut manifests = Self { parsed: Arc::clone(parsed), ..Self::default() };
        for (name, path) in files(folder, &mut manifests)? {
            match read_text(&path) {
                Ok(text) => manifests.add_file(&name, &text, schemas),
                Err(reason) => manifests.refuse_unread(Place { file: name, document: None }, reason),
            }
        }
        Ok(manifests)
    }

    /// Adds the documents of one file.
    pub(crate) fn add_file(&mut self, file: &str, text: &str, schemas: &Schemas) {
        for (index, document) in documents(file, text, &self.parsed).into_iter().enumerate() {
            let place = Place { file: file.to_owned(), document: Some(index + 1) };
            match document {
                Ok(Value::Null) => {}
                Ok(value) => {
                    if let Err(panicked) = catch(|| self.add(&place, value, schemas)) {
                        self.refuse_unread(place, panicked.advice());
                    }
                }
                Err(reason) => self.refuse_unread(place, reason),
            }
        }
    }

    fn refuse_unread(&mut self, place: Place, reason: String) {
        self.incomplete = true;
        self.refused.push(Refused { place, object: None, field: String::new(), reason });
    }

    fn refuse(&mut self, place: &Place, object: &str, field: &str, reason: impl Into<String>) {
        self.refused.push(Refused {
            place: place.clone(),
            object: Some(object.to_owned()),
            field: field.to_owned(),
            reason: reason.into(),
        });
    }

    fn add(&mut self, place: &Place, value: Value, schemas: &Schemas) {
        let Value::Object(object) = value else {
            return self.refuse_unread(place.clone(), "is not an object".into());
        };
        let api_version = object.get("apiVersion").and_then(Value::as_str).unwrap_or_default();
        let kind = object.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
        let group = api_version.split_once('/').map_or("", |(group, _)| group);
        match (api_version, kind.as_str()) {
            ("v1", "List") => match object.get("items") {
                Some(Value::Array(items)) => items.iter().for_each(|item| self.add(place, item.clone(), schemas)),
                _ => self.refuse_unread(place.clone(), "is a List without items".into()),
            },
            ("v1", "Secret" | "ConfigMap") => self.add_named(place, &kind, object, schemas),
            (version, "App" | "Provider") if version == format!("{GROUP}/{VERSION}") => {
                self.add_named(place, &kind, object, schemas);
            }
            (_, "App" | "Provider") if group == GROUP || api_version.is_empty() => {
                // It may be an App that was served so far.
                self.incomplete = true;
                self.refuse(place, &kind, "apiVersion", format!("must be {GROUP}/{VERSION}"));
            }
            (_, kind) if group == GROUP => {
                self.refuse(place, kind, "kind", format!("must be App or Provider in {GROUP}"));
            }
            // Of another kind, or nothing for Kubernetes: not ours.
            _ => {}
        }
    }

    fn add_named(&mut self, place: &Place, kind: &str, mut object: Map<String, Value>, schemas: &Schemas) {
        let metadata = object.get("metadata").and_then(Value::as_object);
        let text = |field: &str| metadata.and_then(|metadata| metadata.get(field)).and_then(Value::as_str);
        let name = text("name").unwrap_or_default().to_owned();
        let namespace = text("namespace").filter(|namespace| !namespace.is_empty()).unwrap_or("default").to_owned();
        let label = format!("{kind} {namespace}/{name}");
        if name.is_empty() {
            self.incomplete |= kind == "App";
            return self.refuse(place, kind, "metadata.name", "is required");
        }
        let key = (namespace.clone(), name);
        let twice = match kind {
            "App" => self.apps.iter().any(|app| app.object == label),
            "Provider" => self.providers.contains_key(&key),
            "Secret" => self.secrets.contains_key(&key),
            _ => self.config_maps.contains_key(&key),
        };
        if twice {
            return self.refuse(place, &label, "", "is there twice; the first one counts, take this one away");
        }
        if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
            metadata.insert("namespace".into(), Value::String(namespace));
        }
        let object = Value::Object(object);
        match kind {
            "App" => {
                let app_id = raw_app_id(&object);
                self.incomplete |= app_id.is_none();
                let parsed = self.parsed.apps.get(&label, object, |object| schemas.parse(&schemas.app, object));
                let app = self.judged(place, &label, Result::clone(&parsed));
                self.apps.push(AppManifest { place: place.clone(), object: label, app_id, app });
            }
            "Provider" => {
                let parsed =
                    self.parsed.providers.get(&label, object, |object| schemas.parse(&schemas.provider, object));
                let provider = self.judged(place, &label, Result::clone(&parsed));
                self.providers.insert(key, provider);
            }
            "Secret" => {
                let values = self.judged(place, &label, secret_values(&object));
                self.secrets.insert(key, values);
            }
            _ => {
                let values = self.judged(place, &label, config_map_values(&object));
                self.config_maps.insert(key, values);
            }
        }
    }

    fn judged<T>(&mut self, place: &Place, label: &str, parsed: Result<T, Faults>) -> Option<T> {
        match parsed {
            Ok(parsed) => Some(parsed),
            Err(faults) => {
                for (field, reason) in faults {
                    self.refuse(place, label, &field, reason);
                }
                None
            }
        }
    }
}

fn raw_app_id(object: &Value) -> Option<AppId> {
    let field = object.pointer("/spec/appID").filter(|field| !field.is_null());
    field.or_else(|| object.pointer("/metadata/name"))?.as_str()?.parse().ok()
}

/// The files with manifests, by name below the folder.
fn files(folder: &Path, manifests: &mut Manifests) -> io::Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut seen = BTreeSet::new();
    let mut open = vec![(String::new(), folder.to_path_buf())];
    while let Some((prefix, folder)) = open.pop() {
        // A symbolic link may lead back to a folder above.
        if !seen.insert(fs::canonicalize(&folder)?) {
            continue;
        }
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            // Editors' and version control's own.
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
                    manifests.refuse_unread(Place { file: below, document: None }, format!("cannot be read: {error}"));
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
    let octets = fs::read(path).map_err(unreadable)?;
    String::from_utf8(octets).map_err(|error| format!("is not UTF-8 at octet {}", error.utf8_error().valid_up_to()))
}

/// The documents of a file, each parsed alone, so that a broken one does not take the others with it. Null: empty.
fn documents(file: &str, text: &str, parsed: &Parsed) -> Vec<Result<Value, String>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if Path::new(file).extension().is_some_and(|extension| extension == "json") {
        return vec![serde_json::from_str(text).map_err(|error| format!("is not JSON: {error}"))];
    }
    split(text)
        .into_iter()
        .map(|(first_line, document)| {
            let name = format!("{file}:{first_line}");
            let parsed = parsed.documents.get(&name, document, |document| {
                let parsed = catch(|| parse_yaml(document)).map_err(|panicked| panicked.advice())?;
                parsed.map_err(|error| not_yaml(&error, first_line))
            });
            Result::clone(&parsed)
        })
        .filter(|document| !matches!(document, Ok(Value::Null)))
        .collect()
}

/// Splits at the lines `---`, which cannot stand inside a document (YAML 1.2, 9.1.2). Each part comes with the number
/// of lines before it.
fn split(text: &str) -> Vec<(usize, String)> {
    let mut parts = vec![(0, String::new())];
    for (number, line) in text.lines().enumerate() {
        let marker = line.strip_prefix("---").filter(|rest| rest.is_empty() || rest.starts_with([' ', '\t']));
        match (marker, parts.last_mut()) {
            // What follows the marker on its line belongs to the document; spaces keep its column.
            (Some(rest), _) => parts.push((number, format!("   {rest}\n"))),
            (None, Some((_, part))) => {
                // A directive or the end of a document says nothing to us.
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

/// The parser's words, with the line in the file.
fn not_yaml(error: &serde_yaml::Error, lines_before: usize) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or(&text);
    match error.location() {
        Some(location) => format!("is not YAML: {text} (line {})", lines_before + location.line()),
        None => format!("is not YAML: {text}"),
    }
}

type Faults = Vec<(String, String)>;

/// The values of a Secret: `data` in base64, and `stringData`, which wins.
fn secret_values(object: &Value) -> Result<SecretValues, Faults> {
    let mut values = SecretValues::new();
    let mut faults = Faults::new();
    for (key, text) in strings(object, "data", &mut faults) {
        // kubectl takes base64 with line breaks.
        match STANDARD.decode(text.split_ascii_whitespace().collect::<String>()) {
            Ok(octets) => drop(values.insert(key, SecretBytes(octets))),
            Err(_) => faults.push((format!("data.{key}"), "must be base64; plain text goes under stringData".into())),
        }
    }
    for (key, text) in strings(object, "stringData", &mut faults) {
        values.insert(key, SecretBytes(text.into_bytes()));
    }
    if faults.is_empty() { Ok(values) } else { Err(faults) }
}

fn config_map_values(object: &Value) -> Result<ConfigMapValues, Faults> {
    let mut faults = Faults::new();
    let text = strings(object, "data", &mut faults).into_iter().collect();
    let binary = strings(object, "binaryData", &mut faults).into_iter().map(|(key, _)| key).collect();
    if faults.is_empty() { Ok(ConfigMapValues { text, binary }) } else { Err(faults) }
}

/// The strings of a map, by key. The values are never quoted: they may be secret.
fn strings(object: &Value, field: &str, faults: &mut Faults) -> Vec<(String, String)> {
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
