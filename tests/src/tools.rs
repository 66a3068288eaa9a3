//! The programs that `scripts/need` builds from the Go modules in `tests`, into a cache outside `target`.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, bail};

use crate::process;

/// `promtool`, which checks alert rules and runs unit tests of them.
pub fn promtool() -> Result<PathBuf> {
    built_tool("promtool", "github.com/prometheus/prometheus", "promtool", "promtool")
}

/// `oauth2-proxy`, which signs in users in front of an application.
pub fn oauth2_proxy() -> Result<PathBuf> {
    built_tool("oauth2-proxy", "github.com/oauth2-proxy/oauth2-proxy/v7", "oauth2-proxy", "oauth2-proxy")
}

/// `kubelogin`, the plugin of kubectl that signs in users.
pub fn kubelogin() -> Result<PathBuf> {
    built_tool("kubelogin", "github.com/int128/kubelogin", "kubelogin", "kubelogin")
}

/// The folder of Keycloak, which `scripts/need keycloak` has fetched.
pub fn keycloak() -> Result<PathBuf> {
    let script = "import/tests/fixtures/keycloak/generate";
    let text = fs::read_to_string(process::root().join(script)).with_context(|| format!("reading {script}"))?;
    let version = text.lines().find_map(|line| line.strip_prefix("version="));
    let version = version.with_context(|| format!("{script} does not name a version"))?;
    let path = cache_folder()?.join(format!("latchkey/keycloak-{version}"));
    if !path.join("bin/kc.sh").is_file() {
        bail!("{} does not exist: run `scripts/need keycloak`", path.display());
    }
    Ok(path)
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
    let path = cache_folder()?.join(format!("latchkey/{folder}-{version}/bin/{name}"));
    if !path.is_file() {
        bail!("{} is not built: run `make tools`, or `make test`, which does it", path.display());
    }
    Ok(path)
}

fn cache_folder() -> Result<PathBuf> {
    Ok(match std::env::var_os("XDG_CACHE_HOME").filter(|folder| !folder.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => std::env::home_dir().context("a home folder")?.join(".cache"),
    })
}
