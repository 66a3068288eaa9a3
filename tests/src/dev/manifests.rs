//! The manifests that `make run` renders, with the configured socket addresses instead of the default ones.

use std::{
    collections::BTreeMap,
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::postgres::write_private;

/// File extensions that the operator reads.
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// The folder of manifests to render. If no socket address has to be replaced, this is the original folder. Otherwise
/// it is a copy with replaced addresses, and [`Manifests::update_copy`] copies changes from the original.
pub(super) struct Manifests {
    from: PathBuf,
    to: PathBuf,
    /// Default URLs (`http://127.0.0.1:5556`) and their replacements.
    addresses: Vec<(String, String)>,
    /// Content of the copied files, by their path in `to`.
    written: BTreeMap<PathBuf, String>,
}

// === impl Manifests ===

impl Manifests {
    /// Copies the folder `from` to `to` if an address has to be replaced, otherwise uses `from` itself. `addresses` are
    /// pairs of a default and a configured socket address.
    pub(super) fn new(from: &Path, to: PathBuf, addresses: &[(&str, SocketAddr)]) -> Result<Self> {
        let addresses: Vec<(String, String)> = addresses
            .iter()
            .map(|(default, configured)| (format!("http://{default}"), format!("http://{configured}")))
            .filter(|(default, configured)| default != configured)
            .collect();
        let to = if addresses.is_empty() { from.to_owned() } else { to };
        let mut this = Self { from: from.to_owned(), to, addresses, written: BTreeMap::new() };
        if this.is_copy() {
            // Removes the files of an earlier run, because they can belong to deleted manifests.
            if this.to.exists() {
                fs::remove_dir_all(&this.to)?;
            }
            fs::create_dir_all(&this.to)?;
            this.update_copy()?;
        }
        Ok(this)
    }

    /// The folder to render.
    pub(super) fn folder(&self) -> &Path {
        &self.to
    }

    /// Copies changed files and removes deleted ones.
    pub(super) fn update_copy(&mut self) -> Result<()> {
        if !self.is_copy() {
            return Ok(());
        }
        let mut found = BTreeMap::new();
        // A file or folder can disappear for a moment while an editor or git writes. The next call tries again.
        if read_manifests(&self.from, Path::new(""), &mut found).is_err() {
            return Ok(());
        }
        for text in found.values_mut() {
            for (default, configured) in &self.addresses {
                *text = replace(text, default, configured);
            }
        }
        for (path, text) in &found {
            if self.written.get(path) != Some(text) {
                let to = self.to.join(path);
                fs::create_dir_all(to.parent().context("a file has a parent folder")?)?;
                write_private(&to, text)?;
            }
        }
        for path in self.written.keys().filter(|path| !found.contains_key(*path)) {
            fs::remove_file(self.to.join(path))?;
        }
        self.written = found;
        Ok(())
    }

    fn is_copy(&self) -> bool {
        !self.addresses.is_empty()
    }
}

fn read_manifests(from: &Path, below: &Path, found: &mut BTreeMap<PathBuf, String>) -> io::Result<()> {
    for entry in fs::read_dir(from.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        // `metadata` follows symbolic links.
        let kind = fs::metadata(entry.path())?;
        if kind.is_dir() {
            read_manifests(from, &path, found)?;
        } else if path.extension().is_some_and(|ending| EXTENSIONS.iter().any(|known| ending == *known)) {
            found.insert(path, fs::read_to_string(entry.path())?);
        }
    }
    Ok(())
}

/// Replaces the default URL. A URL with a longer port number, such as 55560 instead of 5556, stays.
fn replace(text: &str, default: &str, configured: &str) -> String {
    let mut parts = text.split(default);
    let mut replaced = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let has_longer_port = part.starts_with(|first: char| first.is_ascii_digit());
        replaced += if has_longer_port { default } else { configured };
        replaced += part;
    }
    replaced
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process;

    #[test]
    fn the_copy_follows_the_original_with_replaced_socket_addresses() {
        let (from, to) = (process::fresh_dir("from"), process::fresh_dir("to").join("copy"));
        let configured: SocketAddr = "127.0.0.1:9999".parse().unwrap();
        let write = |name: &str, text: &str| {
            let path = from.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let copied = |name: &str| fs::read_to_string(to.join(name)).ok();
        write("a.yaml", "issuer: http://127.0.0.1:5556/dex # not http://127.0.0.1:55560");
        write("below/b.yml", "one");
        write("notes.txt", "not a manifest");

        let addresses = [("127.0.0.1:5556", configured)];
        let mut manifests = Manifests::new(&from, to.clone(), &addresses).unwrap();
        assert_eq!(manifests.folder(), to);
        assert_eq!(copied("a.yaml").unwrap(), "issuer: http://127.0.0.1:9999/dex # not http://127.0.0.1:55560");
        assert_eq!((copied("below/b.yml").as_deref(), copied("notes.txt")), (Some("one"), None));

        write("below/b.yml", "two");
        fs::remove_file(from.join("a.yaml")).unwrap();
        manifests.update_copy().unwrap();
        assert_eq!((copied("below/b.yml").as_deref(), copied("a.yaml")), (Some("two"), None));

        let unchanged = [("127.0.0.1:9999", configured)];
        assert_eq!(Manifests::new(&from, to, &unchanged).unwrap().folder(), from);
    }
}
