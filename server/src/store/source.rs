//! Where a store's URL comes from: a file that is read again when a connection fails, or a value given at the start.

use std::{fmt, path::PathBuf};

use zeroize::Zeroizing;

/// A URL with a password in it; never printed.
#[derive(Clone)]
pub enum UrlSource {
    /// A mounted Secret: its content may change while the server runs.
    File(PathBuf),
    /// From an environment variable.
    Given(Zeroizing<String>),
}

/// The URL cannot be read. The text names the file, never its content.
#[derive(Debug, thiserror::Error)]
#[error("the URL of the store cannot be read from {path}")]
pub struct Unreadable {
    path: String,
    #[source]
    source: std::io::Error,
}

// === impl UrlSource ===

impl UrlSource {
    pub fn given(url: impl Into<String>) -> Self {
        Self::Given(Zeroizing::new(url.into()))
    }

    /// The URL as it is now, without white space around it.
    pub fn read(&self) -> Result<Zeroizing<String>, Unreadable> {
        match self {
            Self::Given(url) => Ok(Zeroizing::new(url.trim().to_owned())),
            Self::File(path) => {
                let content = std::fs::read_to_string(path)
                    .map_err(|source| Unreadable { path: path.display().to_string(), source })?;
                Ok(Zeroizing::new(Zeroizing::new(content).trim().to_owned()))
            }
        }
    }
}

impl fmt::Debug for UrlSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Given(_) => f.write_str("Given(…)"),
        }
    }
}
