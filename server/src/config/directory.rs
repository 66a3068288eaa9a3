//! Rendered Apps from a directory, `<appID>.json` each, watched for changes.

use std::{
    collections::HashMap,
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, SystemTime},
};

use latchkey_crds::{rendered::MAX_DOCUMENT, types::AppId};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tracing::{debug, warn};

use super::Apps;

/// What the file system may fail to tell is found by looking: changes are live within two seconds (design).
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The directory cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the directory of rendered Apps {}", .directory.display())]
pub struct Unreadable {
    directory: PathBuf,
    #[source]
    source: io::Error,
}

/// Ends the watching when dropped.
pub struct Watching {
    _stop: mpsc::Sender<Wake>,
    _watcher: Option<RecommendedWatcher>,
}

/// Something may have changed.
struct Wake;

/// What tells one version of a file from another without reading it.
#[derive(PartialEq, Eq)]
struct Stamp {
    modified: Option<SystemTime>,
    length: u64,
    inode: u64,
}

struct Directory {
    path: PathBuf,
    apps: Arc<Apps>,
    seen: HashMap<AppId, Stamp>,
}

/// Loads what is there, then goes on in a thread of its own until the returned value is dropped.
pub fn watch(path: PathBuf, apps: Arc<Apps>) -> Result<Watching, Unreadable> {
    let mut directory = Directory { path, apps, seen: HashMap::new() };
    directory.begin().map_err(|source| Unreadable { directory: directory.path.clone(), source })?;

    let (stop, wakes) = mpsc::channel();
    let watcher = notify_of(&directory.path, stop.clone());
    thread::Builder::new()
        .name("config-dir".to_owned())
        .spawn(move || {
            while let Ok(Wake) | Err(mpsc::RecvTimeoutError::Timeout) = wakes.recv_timeout(LOOK_AGAIN) {
                // Files come in flocks; one look serves them all.
                while wakes.recv_timeout(Duration::from_millis(20)).is_ok() {}
                if let Err(error) = directory.look() {
                    warn!(error = &error as &dyn std::error::Error, "the directory of rendered Apps cannot be read");
                }
            }
        })
        .expect("the system has room for a thread");
    Ok(Watching { _stop: stop, _watcher: watcher })
}

/// Only makes it quicker: without notifications the looks go on.
fn notify_of(path: &Path, wake: mpsc::Sender<Wake>) -> Option<RecommendedWatcher> {
    let told = move |event: notify::Result<notify::Event>| {
        // Reading is an event too: each look would wake the next.
        if event.map_or(true, |event| !event.kind.is_access()) {
            // The thread has ended; there is nobody to wake.
            let _ = wake.send(Wake);
        }
    };
    let watcher = notify::recommended_watcher(told).and_then(|mut watcher| {
        watcher.watch(path, RecursiveMode::NonRecursive)?;
        Ok(watcher)
    });
    watcher
        .inspect_err(|error| {
            debug!(error = error as &dyn std::error::Error, "no file notifications; looking each second")
        })
        .ok()
}

// === impl Directory ===

impl Directory {
    /// Takes in what is there, in one step.
    fn begin(&mut self) -> io::Result<()> {
        let apps = Arc::clone(&self.apps);
        let mut whole = apps.whole();
        for (id, path) in self.present()? {
            match self.read(&id, &path) {
                Ok(Some(document)) => whole.put(&id, &document),
                Ok(None) => {}
                Err(error) => self.unreadable(&id, &error),
            }
        }
        whole.commit();
        Ok(())
    }

    fn look(&mut self) -> io::Result<()> {
        let present = self.present()?;
        for (id, path) in &present {
            match self.read(id, path) {
                Ok(Some(document)) => self.apps.put(id, &document),
                Ok(None) => {}
                Err(error) => self.unreadable(id, &error),
            }
        }
        for id in self.apps.known().into_iter().filter(|id| !present.contains_key(id)) {
            self.apps.remove(&id);
        }
        self.seen.retain(|id, _| present.contains_key(id));
        Ok(())
    }

    fn present(&self) -> io::Result<HashMap<AppId, PathBuf>> {
        let mut present = HashMap::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            if let Some(id) = app_of(&path) {
                present.insert(id, path);
            }
        }
        Ok(present)
    }

    /// Tried again at the next look.
    fn unreadable(&mut self, id: &AppId, error: &io::Error) {
        warn!(
            app = %id,
            error = error as &dyn std::error::Error,
            "a rendered App cannot be read; what was served before goes on"
        );
        self.seen.remove(id);
    }

    /// The document, where it is another than at the last look.
    fn read(&mut self, id: &AppId, path: &Path) -> io::Result<Option<Vec<u8>>> {
        use std::os::unix::fs::MetadataExt;
        let metadata = fs::metadata(path)?;
        let stamp = Stamp { modified: metadata.modified().ok(), length: metadata.len(), inode: metadata.ino() };
        if self.seen.get(id) == Some(&stamp) {
            return Ok(None);
        }
        // One octet more than a document may have is enough to refuse it.
        let mut document = Vec::new();
        fs::File::open(path)?.take(MAX_DOCUMENT as u64 + 1).read_to_end(&mut document)?;
        self.seen.insert(id.clone(), stamp);
        Ok(Some(document))
    }
}

fn app_of(path: &Path) -> Option<AppId> {
    if path.extension()? != "json" {
        return None;
    }
    path.file_stem()?.to_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_wakes_nobody_and_writing_does() {
        let folder = tempfile::TempDir::new().unwrap();
        let file = folder.path().join("shop.json");
        fs::write(&file, "{}").unwrap();
        let (sender, wakes) = mpsc::channel();
        let _watcher = notify_of(folder.path(), sender).expect("the system notifies");
        for _ in 0..50 {
            fs::read_dir(folder.path()).unwrap().for_each(drop);
            fs::read(&file).unwrap();
        }
        fs::write(&file, "{ }").unwrap();
        wakes.recv_timeout(Duration::from_secs(60)).expect("writing wakes");
        let mut more = 0;
        while wakes.recv_timeout(Duration::from_millis(500)).is_ok() {
            more += 1;
        }
        // A write is two or three events.
        assert!(more < 10, "{more}");
    }
}
