//! The chart as Helm renders it.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::objects;
use crate::{control_plane, process};

/// Time limit for Helm to render the chart. It takes a second, longer on a loaded machine.
const RENDER_LIMIT: Duration = Duration::from_secs(60);

pub fn folder() -> PathBuf {
    process::root().join("charts/latchkey")
}

/// The values files in the chart's folder `ci`, sorted by name.
pub fn value_files() -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder().join("ci")).context("charts/latchkey/ci")?;
    let mut files: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.sort();
    Ok(files)
}

/// Runs `helm template` with additional arguments, and returns the objects without those of `helm test`. If Helm fails,
/// the error contains Helm's output.
pub async fn template<I>(release: &str, namespace: &str, args: I) -> Result<Vec<Value>>
where
    I: IntoIterator<Item: AsRef<Path>>,
{
    let args = args.into_iter().map(|arg| arg.as_ref().to_owned());
    template_with_tests(release, namespace, [PathBuf::from("--skip-tests")].into_iter().chain(args)).await
}

/// Like [`template`], but with the objects of `helm test`.
pub async fn template_with_tests<I>(release: &str, namespace: &str, args: I) -> Result<Vec<Value>>
where
    I: IntoIterator<Item: AsRef<Path>>,
{
    let mut helm = tokio::process::Command::new(control_plane::helm()?);
    helm.args(["template", release, "--namespace", namespace]).arg(folder());
    helm.args(args.into_iter().map(|arg| arg.as_ref().as_os_str().to_owned()));
    let output = tokio::time::timeout(RENDER_LIMIT, helm.kill_on_drop(true).output()).await.context("helm")??;
    ensure!(output.status.success(), "helm ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    objects::parse(&String::from_utf8(output.stdout)?)
}
