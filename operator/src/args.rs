//! The command line; every flag is an environment variable `LATCHKEY_…` too.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use latchkey_crds::types::{Invalid, IssuerUrl};

#[derive(Debug, Parser)]
#[command(name = "latchkey-operator", version, about = "Turns App and Provider resources into what the servers serve")]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Turn the manifests of a folder into rendered documents, without a cluster.
    Render(RenderArgs),
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RenderArgs {
    /// The folder with the manifests (App, Provider, Secret, ConfigMap; .yaml, .yml and .json, subfolders too).
    #[arg(long, env = "LATCHKEY_FROM", value_name = "DIR")]
    pub(crate) from: PathBuf,
    /// The folder for the documents, one file for each App.
    #[arg(long, env = "LATCHKEY_TO", value_name = "DIR", required_unless_present = "check")]
    pub(crate) to: Option<PathBuf>,
    /// The folder with the keys of the Apps. Keep it: who loses it logs out every user.
    #[arg(long, env = "LATCHKEY_KEYS", value_name = "DIR", required_unless_present = "check")]
    pub(crate) keys: Option<PathBuf>,
    /// The address under which users reach the servers, for example https://auth.example.com.
    #[arg(long, env = "LATCHKEY_BASE_URL", value_name = "URL", value_parser = base_url, required_unless_present = "check")]
    pub(crate) base_url: Option<IssuerUrl>,
    /// Go on, and render again whenever a manifest changes.
    #[arg(long, env = "LATCHKEY_WATCH", conflicts_with = "check")]
    pub(crate) watch: bool,
    /// Only judge the manifests: nothing is written, and the exit code is 1 if one is refused.
    #[arg(long, env = "LATCHKEY_CHECK")]
    pub(crate) check: bool,
    /// Development: an http base URL; http, loopback addresses and any port for mail and providers.
    #[arg(long, env = "LATCHKEY_ALLOW_INSECURE")]
    pub(crate) allow_insecure: bool,
}

/// A base URL ends without a slash, so that an issuer is it, a slash and the appID.
fn base_url(input: &str) -> Result<IssuerUrl, Invalid> {
    input.trim_end_matches('/').parse()
}
