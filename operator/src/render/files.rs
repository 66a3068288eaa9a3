//! Documents and keys as files: written atomically, readable only by their owner.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    io::Write,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
};

use latchkey_crds::{
    rendered::RenderedApp,
    types::{AppId, ClientId},
};
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use crate::{
    app::keys::{InvalidKeys, KeyDocument},
    client::secret_state::SecretContents,
    facts::SecretBytes,
};

/// The prefix of the names of files with keys.
const KEYS_PREFIX: &str = "latchkey-keys-";
/// The prefix of the names of files with the secrets of Clients.
const CLIENT_SECRET_PREFIX: &str = "latchkey-client-";

/// Why a file with keys or with the secret of a Client cannot be used. The message never reveals the contents of the
/// file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeyFileError {
    #[error("cannot be read or written: {0}")]
    Io(#[source] io::Error),
    #[error("are not a key document")]
    NotKeyDocument,
    #[error("is not a JSON object of strings, with an object annotations")]
    NotClientSecret,
    #[error("cannot be used: {0}")]
    Invalid(#[source] InvalidKeys),
}

/// Creates a folder that only its owner can read, if it does not exist.
pub(crate) fn create_private_folder(folder: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Writes and syncs a temporary file in this folder, with mode 0600. Readers ignore files with such a name.
fn write_temporary(folder: &Path, bytes: &[u8]) -> io::Result<NamedTempFile> {
    let mut file = tempfile::Builder::new().prefix(".latchkey-").suffix(".tmp").tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    Ok(file)
}

/// Replaces a file atomically.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    write_temporary(folder, bytes)?.persist(path).map_err(|error| error.error)?;
    sync_folder(folder)
}

/// Makes renames and deletions in the folder durable.
fn sync_folder(folder: &Path) -> io::Result<()> {
    fs::File::open(folder)?.sync_all()
}

/// Writes the file if its content differs. Returns whether it was written.
pub(crate) fn write_if_changed(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    match fs::read(path) {
        Ok(existing) if existing == bytes => return Ok(false),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    replace(path, bytes)?;
    Ok(true)
}

/// Returns the served document, or `None` if there is none or it cannot be read.
pub(crate) fn read_document(folder: &Path, app_id: &AppId) -> Option<RenderedApp> {
    let document: RenderedApp = fs::read_to_string(folder.join(format!("{app_id}.json"))).ok()?.parse().ok()?;
    (document.app_id == *app_id).then_some(document)
}

/// Removes the documents of all appIDs except `owned`, and returns the appIDs of the removed documents. Other files
/// stay.
pub(crate) fn remove_other_documents(folder: &Path, owned: &BTreeSet<AppId>) -> io::Result<Vec<AppId>> {
    let mut removed = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let Some(app_id) = app_id_of(&path) else { continue };
        if !owned.contains(&app_id) && read_document(folder, &app_id).is_some() {
            fs::remove_file(&path)?;
            removed.push(app_id);
        }
    }
    removed.sort();
    if !removed.is_empty() {
        sync_folder(folder)?;
    }
    Ok(removed)
}

fn app_id_of(path: &Path) -> Option<AppId> {
    path.file_name()?.to_str()?.strip_suffix(".json")?.parse().ok()
}

fn keys_path(folder: &Path, app_id: &AppId) -> PathBuf {
    folder.join(format!("{KEYS_PREFIX}{app_id}.json"))
}

/// Returns the stored keys, or `None` if the file does not exist.
pub(crate) fn read_keys(folder: &Path, app_id: &AppId) -> Result<Option<KeyDocument>, KeyFileError> {
    let bytes = match fs::read(keys_path(folder, app_id)) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(KeyFileError::Io(error)),
    };
    // The parser's error is dropped, because it may quote the input.
    let keys: KeyDocument = serde_json::from_slice(&bytes).map_err(|_| KeyFileError::NotKeyDocument)?;
    keys.validate(app_id).map_err(KeyFileError::Invalid)?;
    Ok(Some(keys))
}

/// Stores the first keys of an App. If another process has already stored keys, returns the stored keys.
pub(crate) fn store_first_keys(folder: &Path, keys: KeyDocument) -> Result<KeyDocument, KeyFileError> {
    let path = keys_path(folder, &keys.app_id);
    let file = write_temporary(folder, &to_json(&keys)).map_err(KeyFileError::Io)?;
    match file.persist_noclobber(&path) {
        Ok(_) => {
            sync_folder(folder).map_err(KeyFileError::Io)?;
            Ok(keys)
        }
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => {
            read_keys(folder, &keys.app_id)?.ok_or(KeyFileError::NotKeyDocument)
        }
        Err(error) => Err(KeyFileError::Io(error.error)),
    }
}

/// Replaces the key file of an App. Called with keys that were read and then changed.
pub(crate) fn replace_keys(folder: &Path, keys: &KeyDocument) -> Result<(), KeyFileError> {
    replace(&keys_path(folder, &keys.app_id), &to_json(keys)).map_err(KeyFileError::Io)
}

/// Returns the paths of the files with keys and with the secrets of Clients. Returns an empty list if the folder cannot
/// be read.
fn secret_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| has_prefix(path, KEYS_PREFIX) || is_client_secret(path)).collect()
}

/// Makes the files with keys and secrets readable only by their owner. Returns the files for which this failed.
pub(crate) fn tighten_modes(folder: &Path) -> Vec<(PathBuf, io::Error)> {
    let tighten = |path: PathBuf| {
        let is_private = fs::metadata(&path).map(|metadata| metadata.permissions().mode() & 0o077 == 0);
        let tightened = match is_private {
            Ok(true) => Ok(()),
            Ok(false) => fs::set_permissions(&path, fs::Permissions::from_mode(0o600)),
            // Another process may have removed the file.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        };
        tightened.err().map(|error| (path, error))
    };
    secret_files(folder).into_iter().filter_map(tighten).collect()
}

/// Whether this is the file with the secret of a Client.
pub(crate) fn is_client_secret(path: &Path) -> bool {
    has_prefix(path, CLIENT_SECRET_PREFIX)
}

fn has_prefix(path: &Path, prefix: &str) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with(prefix) && name.ends_with(".json"))
}

fn client_secret_path(folder: &Path, client: &ClientId) -> PathBuf {
    folder.join(format!("{CLIENT_SECRET_PREFIX}{client}.json"))
}

/// The file with the secret of a Client. It has the same keys as the Secret of the Client in a cluster.
#[derive(Serialize, Deserialize)]
struct ClientSecretFile {
    #[serde(flatten)]
    values: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// Returns the secret of a Client, or `None` if the file does not exist. `client` consists of the namespace and the
/// name of the Client.
pub(crate) fn read_client_secret(folder: &Path, client: &ClientId) -> Result<Option<SecretContents>, KeyFileError> {
    let bytes = match fs::read(client_secret_path(folder, client)) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(KeyFileError::Io(error)),
    };
    // The parser's error is dropped, because it may quote the input.
    let file: ClientSecretFile = serde_json::from_slice(&bytes).map_err(|_| KeyFileError::NotClientSecret)?;
    let values = file.values.into_iter().map(|(key, value)| (key, SecretBytes(value.into_bytes())));
    Ok(Some(SecretContents { values: values.collect(), annotations: file.annotations }))
}

/// Creates or replaces the file with the secret of a Client.
pub(crate) fn store_client_secret(
    folder: &Path,
    client: &ClientId,
    contents: &SecretContents,
) -> Result<(), KeyFileError> {
    let text = |bytes: &SecretBytes| String::from_utf8_lossy(&bytes.0).into_owned();
    let file = ClientSecretFile {
        values: contents.values.iter().map(|(key, value)| (key.clone(), text(value))).collect(),
        annotations: contents.annotations.clone(),
    };
    let mut bytes = serde_json::to_vec_pretty(&file).expect("the file has only strings");
    bytes.push(b'\n');
    replace(&client_secret_path(folder, client), &bytes).map_err(KeyFileError::Io)
}

fn to_json(keys: &KeyDocument) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(keys).expect("keys are maps with string keys, strings and times");
    bytes.push(b'\n');
    bytes
}
