//! Documents and keys as files: whole or not at all, for their owner's eyes only.

use std::{
    collections::BTreeSet,
    fs, io,
    io::Write,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use latchkey_crds::{rendered::RenderedApp, types::AppId};
use tempfile::NamedTempFile;

use crate::{app::keys::KeyDocument, render::KeysError};

/// A folder that only its owner can look into, where there is none yet.
pub(crate) fn make_folder(folder: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// A file beside its place, whole and on the disk, with mode 0600. Readers pass over its name.
fn written(folder: &Path, octets: &[u8]) -> io::Result<NamedTempFile> {
    let mut file = tempfile::Builder::new().prefix(".latchkey-").suffix(".tmp").tempfile_in(folder)?;
    file.write_all(octets)?;
    file.as_file().sync_all()?;
    Ok(file)
}

/// Replaces a file in one step.
fn replace(path: &Path, octets: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    written(folder, octets)?.persist(path).map_err(|error| error.error)?;
    sync(folder)
}

/// Makes the change of a name last.
fn sync(folder: &Path) -> io::Result<()> {
    fs::File::open(folder)?.sync_all()
}

/// Whether the file was other than that, and is that now.
pub(crate) fn write_if_changed(path: &Path, octets: &[u8]) -> io::Result<bool> {
    match fs::read(path) {
        Ok(there) if there == octets => return Ok(false),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    replace(path, octets)?;
    Ok(true)
}

/// The document that is served; none where there is none that can be read.
pub(crate) fn read_document(folder: &Path, app_id: &AppId) -> Option<RenderedApp> {
    let document: RenderedApp = fs::read_to_string(folder.join(format!("{app_id}.json"))).ok()?.parse().ok()?;
    (document.app_id == *app_id).then_some(document)
}

/// Removes the documents of Apps that are not among these, and tells which. Other files stay.
pub(crate) fn remove_others(folder: &Path, held: &BTreeSet<AppId>) -> io::Result<Vec<AppId>> {
    let mut removed = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let Some(app_id) = app_id_of(&path) else { continue };
        if !held.contains(&app_id) && read_document(folder, &app_id).is_some() {
            fs::remove_file(&path)?;
            removed.push(app_id);
        }
    }
    removed.sort();
    if !removed.is_empty() {
        sync(folder)?;
    }
    Ok(removed)
}

fn app_id_of(path: &Path) -> Option<AppId> {
    path.file_name()?.to_str()?.strip_suffix(".json")?.parse().ok()
}

fn keys_path(folder: &Path, app_id: &AppId) -> PathBuf {
    folder.join(format!("latchkey-keys-{app_id}.json"))
}

/// The keys that are kept; none: there is no such file.
pub(crate) fn read_keys(folder: &Path, app_id: &AppId) -> Result<Option<KeyDocument>, KeysError> {
    let octets = match fs::read(keys_path(folder, app_id)) {
        Ok(octets) => octets,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(KeysError::Io(error)),
    };
    // The parser's error may quote what it read.
    let keys: KeyDocument = serde_json::from_slice(&octets).map_err(|_| KeysError::NotKeys)?;
    keys.check(app_id).map_err(KeysError::Invalid)?;
    Ok(Some(keys))
}

/// Keeps the first keys of an App. Where somebody else was faster, theirs are the keys.
pub(crate) fn keep_first_keys(folder: &Path, keys: KeyDocument) -> Result<KeyDocument, KeysError> {
    let path = keys_path(folder, &keys.app_id);
    let file = written(folder, &octets(&keys)).map_err(KeysError::Io)?;
    match file.persist_noclobber(&path) {
        Ok(_) => {
            sync(folder).map_err(KeysError::Io)?;
            Ok(keys)
        }
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => {
            read_keys(folder, &keys.app_id)?.ok_or(KeysError::NotKeys)
        }
        Err(error) => Err(KeysError::Io(error.error)),
    }
}

/// Writes keys that were read, with one more among them.
pub(crate) fn replace_keys(folder: &Path, keys: &KeyDocument) -> Result<(), KeysError> {
    replace(&keys_path(folder, &keys.app_id), &octets(keys)).map_err(KeysError::Io)
}

fn octets(keys: &KeyDocument) -> Vec<u8> {
    let mut octets = serde_json::to_vec_pretty(keys).expect("keys are maps with string keys, strings and times");
    octets.push(b'\n');
    octets
}
