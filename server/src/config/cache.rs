//! The last good documents, a file each, from which a restarted container starts without the API server.

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use latchkey_crds::{rendered::Revision, types::AppId};
use tracing::warn;

/// Written when a whole set is there: what a first list left unfinished is no set to start from.
const COMPLETE: &str = "complete";
const ENDING: &str = "app";

/// A folder of documents, of which each file leads with its revision. It is to lie in memory: it holds secrets.
#[derive(Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// The folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the folder {} (--cache-dir)", .folder.display())]
pub struct Unusable {
    folder: PathBuf,
    #[source]
    source: io::Error,
}

// === impl Cache ===

impl Cache {
    pub fn open(folder: PathBuf) -> Result<Self, Unusable> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        match made.and_then(|()| fs::read_dir(&folder)) {
            Ok(_) => Ok(Self { folder }),
            Err(source) => Err(Unusable { folder, source }),
        }
    }

    /// Whether a whole set was kept.
    pub(super) fn is_complete(&self) -> bool {
        self.folder.join(COMPLETE).exists()
    }

    /// What was kept, one at a time; a damaged file is passed over.
    pub(super) fn documents(&self) -> impl Iterator<Item = (AppId, Vec<u8>)> {
        self.ids().into_iter().filter_map(|id| match read(&self.path(&id)) {
            Ok(document) => Some((id, document)),
            Err(error) => {
                warn!(app = %id, error = &error as &dyn std::error::Error, "a kept document is damaged and not used");
                None
            }
        })
    }

    /// Keeps a document in place of the one before it. What cannot be kept is told, and only a restart feels it.
    pub(super) fn keep(&self, id: &AppId, revision: &Revision, document: &[u8]) {
        let head = [revision.as_str().as_bytes(), b"\n"].concat();
        if let Err(error) = replace(&self.path(id), &[&head, document]) {
            warn!(app = %id, error = &error as &dyn std::error::Error, "a document cannot be kept in --cache-dir");
            // An older one would come back at a restart.
            self.forget(id);
        }
    }

    pub(super) fn forget(&self, id: &AppId) {
        match fs::remove_file(self.path(id)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                warn!(app = %id, error = &error as &dyn std::error::Error, "a kept document cannot be removed");
            }
        }
    }

    /// Forgets all that is not wanted any more, and says that the set is whole.
    pub(super) fn complete(&self, wanted: impl Fn(&AppId) -> bool) {
        for id in self.ids().into_iter().filter(|id| !wanted(id)) {
            self.forget(&id);
        }
        if !self.is_complete()
            && let Err(error) = replace(&self.folder.join(COMPLETE), &[])
        {
            warn!(error = &error as &dyn std::error::Error, "the set of kept documents cannot be marked as whole");
        }
    }

    fn path(&self, id: &AppId) -> PathBuf {
        self.folder.join(format!("{id}.{ENDING}"))
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
            .filter(|path| path.extension().is_some_and(|ending| ending == ENDING))
            .filter_map(|path| id(&path))
            .collect()
    }
}

fn id(path: &Path) -> Option<AppId> {
    path.file_stem()?.to_str()?.parse().ok()
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = fs::read(path)?;
    let end = content.iter().position(|octet| *octet == b'\n').ok_or(io::ErrorKind::InvalidData)?;
    let document = content.split_off(end + 1);
    if Revision::of(&document).as_str().as_bytes() != &content[..end] {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(document)
}

/// Readers see the old content or the new one, whole.
fn replace(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let new = path.with_extension("new");
    // One that an earlier process left behind may have another mode.
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

    fn keep(cache: &Cache, id: &str, document: &[u8]) {
        cache.keep(&id.parse().unwrap(), &Revision::of(document), document);
    }

    #[test]
    fn what_is_kept_comes_back_and_is_for_the_owner_alone() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path().join("apps")).unwrap();
        keep(&cache, "shop", b"first");
        keep(&cache, "shop", b"second");
        assert_eq!(cache.documents().collect::<Vec<_>>(), [("shop".parse().unwrap(), b"second".to_vec())]);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&folder.path().join("apps")), mode(&folder.path().join("apps/shop.app"))), (0o700, 0o600));
    }

    #[test]
    fn a_damaged_file_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path().to_owned()).unwrap();
        for id in ["whole", "cut", "altered", "empty"] {
            keep(&cache, id, b"a document");
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
    fn a_set_is_whole_once_it_was_completed_without_what_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path().to_owned()).unwrap();
        keep(&cache, "stays", b"a document");
        keep(&cache, "goes", b"a document");
        assert!(!cache.is_complete());
        cache.complete(|id| id.as_str() == "stays");
        assert!(cache.is_complete());
        assert_eq!(cache.documents().count(), 1);
    }
}
