//! Keys from the JWKS file that `--service-account-keys` names.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use tokio::sync::Mutex;
use tracing::{info, warn};

use super::keys::{KeySet, KeySetError};

/// The shortest time between two reads of the file.
const REREAD_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum number of bytes that are read from the file. A JWKS is much smaller.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// A JWK Set in a file.
pub struct FileKeys {
    path: PathBuf,
    keys: ArcSwap<KeySet>,
    last_read: Mutex<LastRead>,
}

/// The file as it was last read.
struct LastRead {
    at: Instant,
    /// The content of the file. `None`: the file could not be read.
    bytes: Option<Vec<u8>>,
}

/// Why the file cannot be used when the server starts.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    #[error("cannot read {}", .path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} has no keys", .path.display())]
    Invalid {
        path: PathBuf,
        #[source]
        source: KeySetError,
    },
}

// === impl FileKeys ===

impl FileKeys {
    pub(super) fn open(path: PathBuf, now: Instant) -> Result<Self, KeyFileError> {
        let bytes = read(&path).map_err(|source| KeyFileError::Unreadable { path: path.clone(), source })?;
        let keys =
            KeySet::parse(&bytes, None).map_err(|source| KeyFileError::Invalid { path: path.clone(), source })?;
        let last_read = Mutex::new(LastRead { at: now, bytes: Some(bytes) });
        Ok(Self { path, keys: ArcSwap::from_pointee(keys), last_read })
    }

    /// Returns the current keys, or the previous keys if the file is missing or invalid.
    pub(super) async fn keys(&self, now: Instant) -> Arc<KeySet> {
        // If another task is reading the file, use the previous keys.
        if let Ok(mut last_read) = self.last_read.try_lock()
            && now.saturating_duration_since(last_read.at) >= REREAD_INTERVAL
        {
            last_read.at = now;
            let path = self.path.clone();
            let read = tokio::task::spawn_blocking(move || read(&path)).await.unwrap_or_else(|error| Err(error.into()));
            self.update(&mut last_read, read);
        }
        self.keys.load_full()
    }

    fn update(&self, last_read: &mut LastRead, read: io::Result<Vec<u8>>) {
        let path = self.path.display();
        match read {
            Ok(bytes) if last_read.bytes.as_deref() == Some(&bytes) => {}
            Ok(bytes) => {
                match KeySet::parse(&bytes, None) {
                    Ok(keys) => {
                        self.keys.store(Arc::new(keys));
                        info!(%path, "the keys of ServiceAccounts were read again");
                    }
                    Err(error) => warn!(%path, %error, "the file has no keys; the previous keys stay in use"),
                }
                last_read.bytes = Some(bytes);
            }
            Err(error) => {
                if last_read.bytes.take().is_some() {
                    warn!(%path, %error, "the keys of ServiceAccounts cannot be read; the previous keys stay in use");
                }
            }
        }
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::callers::keys::fixtures::Signer;

    #[tokio::test]
    async fn a_changed_file_is_used_only_if_it_is_valid() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.json");
        let jwks = |signer: &Signer| json!({ "keys": [signer.jwk()] }).to_string();
        assert!(matches!(FileKeys::open(path.clone(), Instant::now()), Err(KeyFileError::Unreadable { .. })));
        fs::write(&path, "{}").unwrap();
        assert!(matches!(FileKeys::open(path.clone(), Instant::now()), Err(KeyFileError::Invalid { .. })));

        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        fs::write(&path, jwks(&Signer::new("a"))).unwrap();
        let keys = FileKeys::open(path.clone(), start).unwrap();
        fs::write(&path, jwks(&Signer::new("b"))).unwrap();
        assert!(keys.keys(start).await.contains("a"), "the file is read once per second");
        let current_keys = keys.keys(after(1)).await;
        assert!(current_keys.contains("b") && !current_keys.contains("a"));
        fs::write(&path, "{").unwrap();
        assert!(keys.keys(after(2)).await.contains("b"));
        fs::remove_file(&path).unwrap();
        assert!(keys.keys(after(3)).await.contains("b"));
        fs::write(&path, jwks(&Signer::new("c"))).unwrap();
        let current_keys = keys.keys(after(4)).await;
        assert!(current_keys.contains("c") && !current_keys.contains("b"));
    }
}
