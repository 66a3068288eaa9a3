//! The source of a store's URL: a file, which is read again while the server runs, or a value given at startup.

use std::{fmt, path::PathBuf};

use zeroize::Zeroizing;

/// Where a URL with a password comes from. `Debug` never prints the URL.
#[derive(Clone)]
pub enum UrlSource {
    /// A file of a mounted Secret. Its content can change while the server runs.
    File(PathBuf),
    /// The URL itself, from an environment variable.
    Value(Zeroizing<String>),
}

/// The URL cannot be read. The message contains the path of the file, never its content.
#[derive(Debug, thiserror::Error)]
#[error("the URL of the store cannot be read from {path}")]
pub struct UrlReadError {
    path: String,
    #[source]
    source: std::io::Error,
}

// === impl UrlSource ===

impl UrlSource {
    pub fn from_value(url: impl Into<String>) -> Self {
        Self::Value(Zeroizing::new(url.into()))
    }

    /// Reads the current URL and trims white space around it.
    pub fn read(&self) -> Result<Zeroizing<String>, UrlReadError> {
        match self {
            Self::Value(url) => Ok(Zeroizing::new(url.trim().to_owned())),
            Self::File(path) => {
                let content = std::fs::read_to_string(path)
                    .map_err(|source| UrlReadError { path: path.display().to_string(), source })?;
                Ok(Zeroizing::new(Zeroizing::new(content).trim().to_owned()))
            }
        }
    }
}

impl fmt::Debug for UrlSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Value(_) => f.write_str("Value(…)"),
        }
    }
}
