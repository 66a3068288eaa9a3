//! Keys from a file, for servers without a cluster.

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

use super::keys::{KeySet, NotKeys};

/// A change of the file counts within so long.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// More than any set of keys has.
const MAX_FILE: u64 = 1024 * 1024;

/// A JWK Set in a file.
pub struct FileKeys {
    path: PathBuf,
    keys: ArcSwap<KeySet>,
    looked: Mutex<Looked>,
}

/// The file as it was last read.
struct Looked {
    at: Instant,
    /// None where it could not be read.
    bytes: Option<Vec<u8>>,
}

/// The file has no keys to start with.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    #[error("cannot read {}", .path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} has no keys", .path.display())]
    NotKeys {
        path: PathBuf,
        #[source]
        source: NotKeys,
    },
}

// === impl FileKeys ===

impl FileKeys {
    pub(super) fn open(path: PathBuf, now: Instant) -> Result<Self, Unusable> {
        let bytes = read(&path).map_err(|source| Unusable::Unreadable { path: path.clone(), source })?;
        let keys = KeySet::parse(&bytes, None).map_err(|source| Unusable::NotKeys { path: path.clone(), source })?;
        let looked = Mutex::new(Looked { at: now, bytes: Some(bytes) });
        Ok(Self { path, keys: ArcSwap::from_pointee(keys), looked })
    }

    /// The keys of now; those of before where the file is gone or broken.
    pub(super) async fn keys(&self, now: Instant) -> Arc<KeySet> {
        // Who finds somebody else reading does not wait.
        if let Ok(mut looked) = self.looked.try_lock()
            && now.saturating_duration_since(looked.at) >= LOOK_AGAIN
        {
            looked.at = now;
            let path = self.path.clone();
            let read = tokio::task::spawn_blocking(move || read(&path)).await.unwrap_or_else(|_| Ok(Vec::new()));
            self.take(&mut looked, read);
        }
        self.keys.load_full()
    }

    fn take(&self, looked: &mut Looked, read: io::Result<Vec<u8>>) {
        let path = self.path.display();
        match read {
            Ok(bytes) if looked.bytes.as_deref() == Some(&bytes) => {}
            Ok(bytes) => {
                match KeySet::parse(&bytes, None) {
                    Ok(keys) => {
                        self.keys.store(Arc::new(keys));
                        info!(%path, "the keys of ServiceAccounts were read again");
                    }
                    Err(error) => warn!(%path, %error, "the file has no keys of ServiceAccounts; those before go on"),
                }
                looked.bytes = Some(bytes);
            }
            Err(error) => {
                if looked.bytes.take().is_some() {
                    warn!(%path, %error, "the keys of ServiceAccounts cannot be read; those before go on");
                }
            }
        }
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(MAX_FILE).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::callers::keys::fixtures::Signer;

    #[tokio::test]
    async fn a_change_of_the_file_counts_and_a_broken_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.json");
        let jwks = |signer: &Signer| json!({ "keys": [signer.jwk()] }).to_string();
        assert!(matches!(FileKeys::open(path.clone(), Instant::now()), Err(Unusable::Unreadable { .. })));
        fs::write(&path, "{}").unwrap();
        assert!(matches!(FileKeys::open(path.clone(), Instant::now()), Err(Unusable::NotKeys { .. })));

        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        fs::write(&path, jwks(&Signer::new("a"))).unwrap();
        let keys = FileKeys::open(path.clone(), start).unwrap();
        fs::write(&path, jwks(&Signer::new("b"))).unwrap();
        assert!(keys.keys(start).await.has("a"), "a look a second is enough");
        let seen = keys.keys(after(1)).await;
        assert!(seen.has("b") && !seen.has("a"));
        fs::write(&path, "{").unwrap();
        assert!(keys.keys(after(2)).await.has("b"));
        fs::remove_file(&path).unwrap();
        assert!(keys.keys(after(3)).await.has("b"));
        fs::write(&path, jwks(&Signer::new("c"))).unwrap();
        let seen = keys.keys(after(4)).await;
        assert!(seen.has("c") && !seen.has("b"));
    }
}
