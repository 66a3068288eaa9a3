//! The programs that `scripts/need` builds from the Go modules in `tests`, into a cache outside `target`.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, bail};

use crate::process;

/// `promtool`, which checks alert rules and runs unit tests of them.
pub fn promtool() -> Result<PathBuf> {
    built_tool("promtool", "github.com/prometheus/prometheus", "promtool", "promtool")
}

/// The path of the program `name`, which `scripts/need` has built in the cache folder `{folder}-{version}`. The version
/// is that of `dependency` in `tests/{module}/go.mod`.
pub(crate) fn built_tool(module: &str, dependency: &str, folder: &str, name: &str) -> Result<PathBuf> {
    let go_mod = format!("tests/{module}/go.mod");
    let text = fs::read_to_string(process::root().join(&go_mod)).with_context(|| format!("reading {go_mod}"))?;
    let version = text
        .lines()
        .find_map(|line| {
            let mut words = line.trim_start_matches("require ").split_whitespace();
            (words.next() == Some(dependency)).then(|| words.next()).flatten()
        })
        .with_context(|| format!("{go_mod} does not name {dependency}"))?;
    let cache = match std::env::var_os("XDG_CACHE_HOME").filter(|folder| !folder.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => std::env::home_dir().context("a home folder")?.join(".cache"),
    };
    let path = cache.join(format!("latchkey/{folder}-{version}/bin/{name}"));
    if !path.is_file() {
        bail!("{} is not built: run `make tools`, or `make test`, which does it", path.display());
    }
    Ok(path)
}
