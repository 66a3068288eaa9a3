//! The manifests of a folder. They are parsed and checked against the schemas, and the steps of `latchkey-operator
//! render` look them up.

use std::{collections::BTreeMap, fmt, io, path::Path, sync::Arc};

use latchkey_crds::{
    GROUP, VERSION,
    app::App,
    client::Client,
    provider::Provider,
    types::{AppId, ClientId},
};
use serde_json::{Map, Value};

use self::{
    documents::parse_documents,
    schemas::WrongField,
    values::{config_map_values, secret_values},
};
pub(crate) use self::{parse_cache::ParseCache, schemas::Schemas};
use crate::{
    client::select::{NamespaceLabels, implied_labels},
    facts::{ConfigMapValues, Lookup, ObjectSource, SecretValues},
    panics::catch,
};

mod documents;
mod files;
mod parse_cache;
mod schemas;
mod values;

/// The location of a document: its file relative to the folder, and its number in the file, starting at 1.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DocumentLocation {
    pub(crate) file: String,
    /// The number of the document in the file. `None`: the file as a whole.
    pub(crate) document: Option<usize>,
}

/// A file, document or object that is not used, and the reason. It is shown as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RejectedManifest {
    pub(crate) location: DocumentLocation,
    /// `App shop/shop`, for example. `None` if the kind of the object cannot be read.
    pub(crate) object: Option<String>,
    pub(crate) field: String,
    pub(crate) reason: String,
}

/// The manifest of an App. It has as much of the App as could be read.
#[derive(Debug)]
pub(crate) struct AppManifest {
    pub(crate) location: DocumentLocation,
    pub(crate) object: String,
    /// `None`: the appID of the manifest is missing or invalid.
    pub(crate) app_id: Option<AppId>,
    /// `None`: the manifest is invalid.
    pub(crate) app: Option<App>,
}

/// The manifest of a Client. It has as much of the Client as could be read.
#[derive(Debug)]
pub(crate) struct ClientManifest {
    pub(crate) location: DocumentLocation,
    pub(crate) object: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The namespace and the name of its App. `None`: the manifest does not name one.
    pub(crate) app: Option<(String, String)>,
    /// The Client, with its namespace and name as its UID. `None`: the manifest is invalid.
    pub(crate) client: Option<Arc<Client>>,
}

/// The objects in the manifests of a folder.
#[derive(Debug, Default)]
pub(crate) struct Manifests {
    /// All Apps, in the order of the file names and, within a file, of the documents.
    pub(crate) apps: Vec<AppManifest>,
    /// All Clients, in the same order as the Apps.
    pub(crate) clients: Vec<ClientManifest>,
    /// The labels of the Namespaces.
    namespace_labels: BTreeMap<String, BTreeMap<String, String>>,
    providers: BTreeMap<(String, String), Option<Provider>>,
    secrets: BTreeMap<(String, String), Option<SecretValues>>,
    config_maps: BTreeMap<(String, String), Option<ConfigMapValues>>,
    pub(crate) rejected: Vec<RejectedManifest>,
    /// Whether a file, a document or the appID of an App could not be read. What could not be read may belong to an App
    /// that is being served.
    pub(crate) incomplete: bool,
    parse_cache: Arc<ParseCache>,
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

// === impl RejectedManifest ===

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

impl NamespaceLabels for Manifests {
    fn labels(&self, namespace: &str) -> Option<BTreeMap<String, String>> {
        let mut labels = self.namespace_labels.get(namespace).cloned().unwrap_or_default();
        labels.extend(implied_labels(namespace));
        Some(labels)
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
    /// Reads every manifest of a folder and its subfolders. Fails only if one of these folders cannot be read. If a
    /// file has an error, the other files are still read, and the result contains the error.
    pub(crate) fn read(folder: &Path, schemas: &Schemas, parse_cache: &Arc<ParseCache>) -> io::Result<Self> {
        let mut manifests = Self { parse_cache: Arc::clone(parse_cache), ..Self::default() };
        for (name, path) in files::find(folder)? {
            match path.and_then(|path| files::read_text(&path)) {
                Ok(text) => manifests.add_file(&name, &text, schemas),
                Err(reason) => manifests.reject_unreadable(DocumentLocation { file: name, document: None }, reason),
            }
        }
        Ok(manifests)
    }

    /// Adds the documents of one file.
    pub(crate) fn add_file(&mut self, file: &str, text: &str, schemas: &Schemas) {
        for (index, document) in parse_documents(file, text, &self.parse_cache).into_iter().enumerate() {
            let location = DocumentLocation { file: file.to_owned(), document: Some(index + 1) };
            match document {
                Ok(Value::Null) => {}
                Ok(value) => {
                    if let Err(panicked) = catch(|| self.add_object(&location, value, schemas)) {
                        self.reject_unreadable(location, panicked.message());
                    }
                }
                Err(reason) => self.reject_unreadable(location, reason),
            }
        }
    }

    fn reject_unreadable(&mut self, location: DocumentLocation, reason: String) {
        self.incomplete = true;
        self.rejected.push(RejectedManifest { location, object: None, field: String::new(), reason });
    }

    fn reject(&mut self, location: &DocumentLocation, object: &str, field: &str, reason: impl Into<String>) {
        self.rejected.push(RejectedManifest {
            location: location.clone(),
            object: Some(object.to_owned()),
            field: field.to_owned(),
            reason: reason.into(),
        });
    }

    fn add_object(&mut self, location: &DocumentLocation, value: Value, schemas: &Schemas) {
        let Value::Object(object) = value else {
            return self.reject_unreadable(location.clone(), "is not an object".into());
        };
        let api_version = object.get("apiVersion").and_then(Value::as_str).unwrap_or_default();
        let kind = object.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
        let group = api_version.split_once('/').map_or("", |(group, _)| group);
        match (api_version, kind.as_str()) {
            ("v1", "List") => match object.get("items") {
                Some(Value::Array(items)) => {
                    items.iter().for_each(|item| self.add_object(location, item.clone(), schemas))
                }
                _ => self.reject_unreadable(location.clone(), "is a List without items".into()),
            },
            ("v1", "Secret" | "ConfigMap") => self.add_named_object(location, &kind, object, schemas),
            ("v1", "Namespace") => self.add_namespace(location, &object),
            (version, "App" | "Provider" | "Client") if version == format!("{GROUP}/{VERSION}") => {
                self.add_named_object(location, &kind, object, schemas);
            }
            (_, "App" | "Provider" | "Client") if group == GROUP || api_version.is_empty() => {
                // The object that cannot be read may be an App that is being served.
                self.incomplete = true;
                self.reject(location, &kind, "apiVersion", format!("must be {GROUP}/{VERSION}"));
            }
            (_, kind) if group == GROUP => {
                self.reject(location, kind, "kind", format!("must be App, Provider or Client in {GROUP}"));
            }
            // Objects of other API groups, and documents that are not Kubernetes objects, are ignored.
            _ => {}
        }
    }

    fn add_named_object(
        &mut self,
        location: &DocumentLocation,
        kind: &str,
        mut object: Map<String, Value>,
        schemas: &Schemas,
    ) {
        let metadata = object.get("metadata").and_then(Value::as_object);
        let metadata_field = |field: &str| metadata.and_then(|metadata| metadata.get(field)).and_then(Value::as_str);
        let name = metadata_field("name").unwrap_or_default().to_owned();
        let namespace =
            metadata_field("namespace").filter(|namespace| !namespace.is_empty()).unwrap_or("default").to_owned();
        let label = format!("{kind} {namespace}/{name}");
        if name.is_empty() {
            self.incomplete |= matches!(kind, "App" | "Client");
            return self.reject(location, kind, "metadata.name", "is required");
        }
        let key = (namespace.clone(), name);
        let is_duplicate = match kind {
            "App" => self.apps.iter().any(|app| app.object == label),
            "Provider" => self.providers.contains_key(&key),
            "Client" => self.clients.iter().any(|client| client.object == label),
            "Secret" => self.secrets.contains_key(&key),
            _ => self.config_maps.contains_key(&key),
        };
        if is_duplicate {
            return self.reject(location, &label, "", "is defined twice; the first one counts, remove this one");
        }
        if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
            metadata.insert("namespace".into(), Value::String(namespace));
            if kind == "Client" {
                metadata.insert("uid".into(), Value::String(format!("{}/{}", key.0, key.1)));
            }
        }
        let object = Value::Object(object);
        match kind {
            "App" => {
                let app_id = app_id_of_manifest(&object);
                self.incomplete |= app_id.is_none();
                let parsed = self.parse_cache.apps.get_or_compute(&label, object, |object| schemas.parse_app(object));
                let app = self.accept_or_reject(location, &label, Result::clone(&parsed));
                self.apps.push(AppManifest { location: location.clone(), object: label, app_id, app });
            }
            "Provider" => {
                let parsed =
                    self.parse_cache.providers.get_or_compute(&label, object, |object| schemas.parse_provider(object));
                let provider = self.accept_or_reject(location, &label, Result::clone(&parsed));
                self.providers.insert(key, provider);
            }
            "Client" => {
                // In a cluster, the API server checks these names. Here they must be valid, because they are in the
                // name of the file with the secret of the Client.
                if ClientId::of_client(&key.0, &key.1).is_err() {
                    return self.reject(location, &label, "metadata", "namespace and name must be names of objects");
                }
                let app = app_of_client(&object, &key.0);
                let parsed =
                    self.parse_cache.clients.get_or_compute(&label, object, |object| schemas.parse_client(object));
                let client = self.accept_or_reject(location, &label, Result::clone(&parsed));
                let (namespace, name) = key;
                let location = location.clone();
                self.clients.push(ClientManifest { location, object: label, namespace, name, app, client });
            }
            "Secret" => {
                let values = self.accept_or_reject(location, &label, secret_values(&object));
                self.secrets.insert(key, values);
            }
            _ => {
                let values = self.accept_or_reject(location, &label, config_map_values(&object));
                self.config_maps.insert(key, values);
            }
        }
    }

    /// Adds the labels of a Namespace. Labels that are not strings are ignored.
    fn add_namespace(&mut self, location: &DocumentLocation, object: &Map<String, Value>) {
        let metadata = object.get("metadata").and_then(Value::as_object);
        let name = metadata.and_then(|metadata| metadata.get("name")).and_then(Value::as_str).unwrap_or_default();
        if name.is_empty() {
            return self.reject(location, "Namespace", "metadata.name", "is required");
        }
        if self.namespace_labels.contains_key(name) {
            let reason = "is defined twice; the first one counts, remove this one";
            return self.reject(location, &format!("Namespace {name}"), "", reason);
        }
        let labels = metadata.and_then(|metadata| metadata.get("labels")).and_then(Value::as_object);
        let labels =
            labels.into_iter().flatten().filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())));
        self.namespace_labels.insert(name.to_owned(), labels.collect());
    }

    fn accept_or_reject<T>(
        &mut self,
        location: &DocumentLocation,
        label: &str,
        parsed: Result<T, Vec<WrongField>>,
    ) -> Option<T> {
        match parsed {
            Ok(parsed) => Some(parsed),
            Err(wrong) => {
                for WrongField { field, reason } in wrong {
                    self.reject(location, label, &field, reason);
                }
                None
            }
        }
    }
}

/// Returns the namespace and the name of the App that a Client names.
fn app_of_client(object: &Value, own_namespace: &str) -> Option<(String, String)> {
    let name = object.pointer("/spec/appRef/name")?.as_str()?;
    let namespace = object.pointer("/spec/appRef/namespace").and_then(Value::as_str).unwrap_or(own_namespace);
    Some((namespace.to_owned(), name.to_owned()))
}

fn app_id_of_manifest(object: &Value) -> Option<AppId> {
    let field = object.pointer("/spec/appID").filter(|field| !field.is_null());
    field.or_else(|| object.pointer("/metadata/name"))?.as_str()?.parse().ok()
}
