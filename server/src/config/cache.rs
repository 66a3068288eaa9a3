//! A cache of the last valid documents, one file each. A restarted container can start from it without the API server.

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use latchkey_crds::{rendered::Revision, types::AppId};
use tracing::warn;

/// The name of the file that marks the cached documents as a complete set. The file is missing if the first listing of
/// the documents was interrupted.
const COMPLETE_MARKER: &str = "complete";
const EXTENSION: &str = "app";

/// A folder of documents. Each file starts with the revision of its document. The documents contain secrets, so the
/// folder must be on a memory-backed volume.
#[derive(Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// The folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the folder {} (--cache-dir)", .folder.display())]
pub struct CacheError {
    folder: PathBuf,
    #[source]
    source: io::Error,
}

// === impl Cache ===

impl Cache {
    pub fn open(folder: PathBuf) -> Result<Self, CacheError> {
        let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        match created.and_then(|()| fs::read_dir(&folder)) {
            Ok(_) => Ok(Self { folder }),
            Err(source) => Err(CacheError { folder, source }),
        }
    }

    /// Whether the cached documents are a complete set, from which a restarted server can start.
    pub(super) fn is_complete(&self) -> bool {
        self.folder.join(COMPLETE_MARKER).exists()
    }

    /// Reads the cached documents, one at a time. Damaged files are skipped.
    pub(super) fn documents(&self) -> impl Iterator<Item = (AppId, Vec<u8>)> {
        self.ids().into_iter().filter_map(|id| match read_document(&self.path(&id)) {
            Ok(document) => Some((id, document)),
            Err(error) => {
                warn!(app = %id, error = &error as &dyn std::error::Error, "a cached document is damaged and not used");
                None
            }
        })
    }

    /// Stores a document and replaces the previous one. A failure is only logged: the cache is not read before a
    /// restart.
    pub(super) fn store(&self, id: &AppId, revision: &Revision, document: &[u8]) {
        let header = [revision.as_str().as_bytes(), b"\n"].concat();
        if let Err(error) = write_atomically(&self.path(id), &[&header, document]) {
            warn!(app = %id, error = &error as &dyn std::error::Error, "a document cannot be written to --cache-dir");
            // If the previous document stayed in the cache, a restarted server would serve it.
            self.remove(id);
        }
    }

    pub(super) fn remove(&self, id: &AppId) {
        match fs::remove_file(self.path(id)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                warn!(app = %id, error = &error as &dyn std::error::Error, "a cached document cannot be removed");
            }
        }
    }

    /// Removes the documents for which `is_in_set` returns false, and marks the remaining documents as a complete set.
    pub(super) fn mark_complete(&self, is_in_set: impl Fn(&AppId) -> bool) {
        for id in self.ids().into_iter().filter(|id| !is_in_set(id)) {
            self.remove(&id);
        }
        if !self.is_complete()
            && let Err(error) = write_atomically(&self.folder.join(COMPLETE_MARKER), &[])
        {
            warn!(error = &error as &dyn std::error::Error, "the set of cached documents cannot be marked as complete");
        }
    }

    fn path(&self, id: &AppId) -> PathBuf {
        self.folder.join(format!("{id}.{EXTENSION}"))
    }

    fn ids(&self) -> Vec<AppId> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "--cache-dir cannot be read");
                return Vec::new();
            }
        };
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        paths
            .filter(|path| path.extension().is_some_and(|ending| ending == EXTENSION))
            .filter_map(|path| app_id_from_path(&path))
            .collect()
    }
}

fn app_id_from_path(path: &Path) -> Option<AppId> {
    path.file_stem()?.to_str()?.parse().ok()
}

fn read_document(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = fs::read(path)?;
    let end = content.iter().position(|byte| *byte == b'\n').ok_or(io::ErrorKind::InvalidData)?;
    let document = content.split_off(end + 1);
    if Revision::of(&document).as_str().as_bytes() != &content[..end] {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(document)
}

/// Replaces a file atomically.
fn write_atomically(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let new = path.with_extension("new");
    // A file that an earlier process left behind is removed, because it can have other permissions.
    if let Err(error) = fs::remove_file(&new)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    for part in parts {
        file.write_all(part)?;
    }
    drop(file);
    fs::rename(new, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn store(cache: &Cache, id: &str, document: &[u8]) {
        cache.store(&id.parse().unwrap(), &Revision::of(document), document);
    }

    #[test]
    fn cached_documents_are_read_back_and_readable_only_by_the_owner() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path().join("apps")).unwrap();
        store(&cache, "shop", b"first");
        store(&cache, "shop", b"second");
        assert_eq!(cache.documents().collect::<Vec<_>>(), [("shop".parse().unwrap(), b"second".to_vec())]);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&folder.path().join("apps")), mode(&folder.path().join("apps/shop.app"))), (0o700, 0o600));
    }

    #[test]
    fn a_damaged_file_is_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path().to_owned()).unwrap();
        for id in ["whole", "cut", "altered", "empty"] {
            store(&cache, id, b"a document");
        }
        let edit = |id: &str, edit: fn(&mut Vec<u8>)| {
            let path = folder.path().join(format!("{id}.app"));
            let mut content = fs::read(&path).unwrap();
            edit(&mut content);
            fs::write(path, content).unwrap();
        };
        edit("cut", |content| content.truncate(content.len() - 1));
        edit("altered", |content| *content.last_mut().unwrap() ^= 1);
        edit("empty", Vec::clear);
        let ids: Vec<_> = cache.documents().map(|(id, _)| id.to_string()).collect();
        assert_eq!(ids, ["whole"]);
    }

    #[test]
    fn mark_complete_removes_the_documents_outside_the_set() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path().to_owned()).unwrap();
        store(&cache, "stays", b"a document");
        store(&cache, "goes", b"a document");
        assert!(!cache.is_complete());
        cache.mark_complete(|id| id.as_str() == "stays");
        assert!(cache.is_complete());
        assert_eq!(cache.documents().count(), 1);
    }
}
