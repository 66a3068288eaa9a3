//! Rendered Apps from a directory with one file `<appID>.json` for each App. The directory is watched for changes.

use std::{
    collections::HashMap,
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, SystemTime},
};

use latchkey_crds::{rendered::MAX_DOCUMENT_SIZE, types::AppId};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tracing::{debug, warn};

use super::Apps;

/// How often the directory is polled, because file notifications can be missing. A change must be served within two
/// seconds (specification: Delivery of configuration, Local files).
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The directory cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the directory of rendered Apps {}", .directory.display())]
pub struct DirectoryError {
    directory: PathBuf,
    #[source]
    source: io::Error,
}

/// Keeps the watch running until this value is dropped.
pub struct WatchGuard {
    _stop: mpsc::Sender<ChangeSignal>,
    _watcher: Option<RecommendedWatcher>,
}

/// The signal that a file in the directory may have changed.
struct ChangeSignal;

/// Identifies a version of a file without reading it.
#[derive(PartialEq, Eq)]
struct FileVersion {
    modified: Option<SystemTime>,
    length: u64,
    inode: u64,
}

struct DirectorySource {
    path: PathBuf,
    apps: Arc<Apps>,
    versions: HashMap<AppId, FileVersion>,
}

/// Loads the documents, then watches them in a separate thread until the returned value is dropped.
pub fn watch(path: PathBuf, apps: Arc<Apps>) -> Result<WatchGuard, DirectoryError> {
    let mut directory = DirectorySource { path, apps, versions: HashMap::new() };
    directory.load_all().map_err(|source| DirectoryError { directory: directory.path.clone(), source })?;

    let (stop, signals) = mpsc::channel();
    let watcher = start_notifications(&directory.path, stop.clone());
    thread::Builder::new()
        .name("config-dir".to_owned())
        .spawn(move || {
            while let Ok(ChangeSignal) | Err(mpsc::RecvTimeoutError::Timeout) = signals.recv_timeout(POLL_INTERVAL) {
                // Several files often change together. The loop waits until no more signals come, so that each file is
                // read once.
                while signals.recv_timeout(Duration::from_millis(20)).is_ok() {}
                if let Err(error) = directory.poll() {
                    warn!(error = &error as &dyn std::error::Error, "the directory of rendered Apps cannot be read");
                }
            }
        })
        .expect("the system can start a thread");
    Ok(WatchGuard { _stop: stop, _watcher: watcher })
}

/// Starts file notifications. They only make changes visible sooner: the directory is polled in any case.
fn start_notifications(path: &Path, signal: mpsc::Sender<ChangeSignal>) -> Option<RecommendedWatcher> {
    let on_event = move |event: notify::Result<notify::Event>| {
        // Reading a file is an event, too: without this condition, each poll would cause the next poll.
        if event.map_or(true, |event| !event.kind.is_access()) {
            // This fails if the thread has ended.
            let _ = signal.send(ChangeSignal);
        }
    };
    let watcher = notify::recommended_watcher(on_event).and_then(|mut watcher| {
        watcher.watch(path, RecursiveMode::NonRecursive)?;
        Ok(watcher)
    });
    watcher
        .inspect_err(|error| {
            debug!(error = error as &dyn std::error::Error, "no file notifications; polling once per second")
        })
        .ok()
}

// === impl DirectorySource ===

impl DirectorySource {
    /// Loads the documents of all files, and replaces the previous documents in one step.
    fn load_all(&mut self) -> io::Result<()> {
        let apps = Arc::clone(&self.apps);
        let mut sync = apps.start_full_sync();
        for (id, path) in self.list_files()? {
            match self.read(&id, &path) {
                Ok(Some(document)) => sync.put(&id, &document),
                Ok(None) => {}
                Err(error) => self.log_unreadable(&id, &error),
            }
        }
        sync.commit();
        Ok(())
    }

    fn poll(&mut self) -> io::Result<()> {
        let present = self.list_files()?;
        for (id, path) in &present {
            match self.read(id, path) {
                Ok(Some(document)) => self.apps.put(id, &document),
                Ok(None) => {}
                Err(error) => self.log_unreadable(id, &error),
            }
        }
        for id in self.apps.known_ids().into_iter().filter(|id| !present.contains_key(id)) {
            self.apps.remove(&id);
        }
        self.versions.retain(|id, _| present.contains_key(id));
        Ok(())
    }

    fn list_files(&self) -> io::Result<HashMap<AppId, PathBuf>> {
        let mut present = HashMap::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            if let Some(id) = app_id_from_path(&path) {
                present.insert(id, path);
            }
        }
        Ok(present)
    }

    /// Logs the error. The next poll reads the file again.
    fn log_unreadable(&mut self, id: &AppId, error: &io::Error) {
        warn!(
            app = %id,
            error = error as &dyn std::error::Error,
            "a rendered App cannot be read; an earlier one, if there is one, stays in service"
        );
        self.versions.remove(id);
    }

    /// Returns the document if the file has changed since it was last read.
    fn read(&mut self, id: &AppId, path: &Path) -> io::Result<Option<Vec<u8>>> {
        use std::os::unix::fs::MetadataExt;
        let metadata = fs::metadata(path)?;
        let version = FileVersion { modified: metadata.modified().ok(), length: metadata.len(), inode: metadata.ino() };
        if self.versions.get(id) == Some(&version) {
            return Ok(None);
        }
        // At most one byte more than the maximum size is read, which is enough to reject a larger document.
        let mut document = Vec::new();
        fs::File::open(path)?.take(MAX_DOCUMENT_SIZE as u64 + 1).read_to_end(&mut document)?;
        self.versions.insert(id.clone(), version);
        Ok(Some(document))
    }
}

fn app_id_from_path(path: &Path) -> Option<AppId> {
    if path.extension()? != "json" {
        return None;
    }
    path.file_stem()?.to_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_writing_a_file_causes_a_signal() {
        let folder = tempfile::TempDir::new().unwrap();
        let file = folder.path().join("shop.json");
        fs::write(&file, "{}").unwrap();
        let (sender, signals) = mpsc::channel();
        let _watcher = start_notifications(folder.path(), sender).expect("the system notifies");
        for _ in 0..50 {
            fs::read_dir(folder.path()).unwrap().for_each(drop);
            fs::read(&file).unwrap();
        }
        fs::write(&file, "{ }").unwrap();
        signals.recv_timeout(Duration::from_secs(60)).expect("writing wakes the thread");
        let mut further_signals = 0;
        while signals.recv_timeout(Duration::from_millis(500)).is_ok() {
            further_signals += 1;
        }
        // A write causes two or three events.
        assert!(further_signals < 10, "{further_signals}");
    }
}
