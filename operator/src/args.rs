//! The command line. Every flag also has an environment variable `LATCHKEY_…`, except the hidden flag for tests.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Parser, Subcommand};
use latchkey_crds::types::{Invalid, IssuerUrl};
use latchkey_telemetry::LogArgs;

use crate::{
    quota::{self, QuotaLimits},
    release::REQUEST_DRAIN_SECONDS,
};

#[derive(Debug, Parser)]
#[command(
    name = "latchkey-operator",
    version,
    about = "Turns App and Provider resources into what the servers serve",
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub(crate) struct Args {
    /// Without a command: reconcile the resources of a cluster.
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) run: Option<RunArgs>,
    // Not in `RunArgs`: clap does not support a group of arguments inside an optional group.
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// The flags for reconciling a cluster: the cluster of KUBECONFIG, or the cluster in which the operator runs.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// The namespace of the installation, with the rendered Apps and the keys.
    #[arg(long, env = "LATCHKEY_NAMESPACE", value_name = "NAME")]
    pub(crate) namespace: String,
    /// The headless Service of the servers' operations port.
    #[arg(long, env = "LATCHKEY_SERVER_SERVICE", value_name = "NAME")]
    pub(crate) server_service: String,
    /// The namespaces in which Apps, Providers and Clients are reconciled, comma-separated. Default: all.
    #[arg(long, env = "LATCHKEY_WATCH_NAMESPACES", value_name = "NAMES", value_delimiter = ',')]
    pub(crate) watch_namespaces: Vec<String>,
    /// How many appIDs a namespace can have: those of its Apps, and those of deleted Apps that left users.
    #[arg(
        long,
        env = "LATCHKEY_MAX_APPS_PER_NAMESPACE",
        value_name = "COUNT",
        default_value_t = quota::DEFAULT_MAX_APPS,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) max_apps_per_namespace: u32,
    /// How many bytes the rendered documents of a namespace can have together.
    #[arg(
        long,
        env = "LATCHKEY_MAX_RENDERED_BYTES_PER_NAMESPACE",
        value_name = "BYTES",
        default_value_t = quota::DEFAULT_MAX_RENDERED_BYTES,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) max_rendered_bytes_per_namespace: u64,
    /// Tests only: how many seconds the appID of a deleted App stays reserved after the last server has stopped serving
    /// the App.
    #[arg(long, hide = true, value_name = "SECONDS", default_value_t = REQUEST_DRAIN_SECONDS)]
    pub(crate) requests_end_seconds: u64,
    /// Whether the operator creates and updates the Secrets of Clients, in the namespaces of the Clients.
    #[arg(
        long,
        env = "LATCHKEY_CLIENT_SECRETS",
        value_name = "BOOL",
        default_value_t = true,
        action = clap::ArgAction::Set
    )]
    pub(crate) client_secrets: bool,
    /// The URL under which users reach the servers, for example https://auth.example.com.
    #[arg(long, env = "LATCHKEY_BASE_URL", value_name = "URL", value_parser = base_url)]
    pub(crate) base_url: IssuerUrl,
    /// Development: allow http in the base URL and in URLs of Providers. Relays can have any port, and a password
    /// without TLS.
    #[arg(long, env = "LATCHKEY_ALLOW_INSECURE")]
    pub(crate) allow_insecure: bool,
    /// The listen address for liveness, readiness and metrics.
    #[arg(long, env = "LATCHKEY_OPS_ADDR", default_value = "0.0.0.0:9090")]
    pub(crate) ops_addr: SocketAddr,
    /// The Lease for leader election.
    #[arg(long, env = "LATCHKEY_LEASE", value_name = "NAME", default_value = "latchkey-operator")]
    pub(crate) lease: String,
    /// This replica's name in the Lease: the name of its pod.
    #[arg(long, env = "LATCHKEY_IDENTITY", value_name = "NAME")]
    pub(crate) identity: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Turn the manifests of a folder into rendered documents, without a cluster.
    Render(RenderArgs),
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RenderArgs {
    /// The folder with the manifests (App, Provider, Client, Secret, ConfigMap, Namespace; .yaml, .yml and .json,
    /// including subfolders).
    #[arg(long, env = "LATCHKEY_FROM", value_name = "DIR")]
    pub(crate) from: PathBuf,
    /// The folder for the documents, one file per App.
    #[arg(long, env = "LATCHKEY_TO", value_name = "DIR", required_unless_present = "check")]
    pub(crate) to: Option<PathBuf>,
    /// The folder with the keys of the Apps. Back it up: losing it logs out every user.
    #[arg(long, env = "LATCHKEY_KEYS", value_name = "DIR", required_unless_present = "check")]
    pub(crate) keys: Option<PathBuf>,
    /// The URL under which users reach the servers, for example https://auth.example.com.
    #[arg(long, env = "LATCHKEY_BASE_URL", value_name = "URL", value_parser = base_url, required_unless_present = "check")]
    pub(crate) base_url: Option<IssuerUrl>,
    /// Keep running, and render again whenever a manifest changes.
    #[arg(long, env = "LATCHKEY_WATCH", conflicts_with = "check")]
    pub(crate) watch: bool,
    /// Only check the manifests: nothing is written, and the exit code is 1 if a manifest is invalid.
    #[arg(long, env = "LATCHKEY_CHECK")]
    pub(crate) check: bool,
    /// Development: allow http in the base URL and in URLs of Providers. Relays can have any port, and a password
    /// without TLS.
    #[arg(long, env = "LATCHKEY_ALLOW_INSECURE")]
    pub(crate) allow_insecure: bool,
}

impl RunArgs {
    pub(crate) fn limits(&self) -> QuotaLimits {
        QuotaLimits { apps: self.max_apps_per_namespace, bytes: self.max_rendered_bytes_per_namespace }
    }
}

/// Removes trailing slashes from the base URL: an issuer is the base URL, a slash and the appID.
fn base_url(input: &str) -> Result<IssuerUrl, Invalid> {
    input.trim_end_matches('/').parse()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Args::command().debug_assert();
    }

    #[test]
    fn the_operator_reconciles_the_cluster_if_no_command_is_given() {
        let line = "latchkey-operator --namespace a --server-service b --base-url https://c.example --identity d";
        let args = Args::try_parse_from(line.split(' ')).unwrap();
        assert!(args.command.is_none() && args.run.is_some_and(|run| run.limits() == QuotaLimits::default()));
        let bounded = format!("{line} --max-apps-per-namespace 7 --max-rendered-bytes-per-namespace 4096");
        let args = Args::try_parse_from(bounded.split(' ')).unwrap();
        assert_eq!(args.run.as_ref().unwrap().limits(), QuotaLimits { apps: 7, bytes: 4096 });
        assert!(args.run.is_some_and(|run| run.client_secrets));
        let without = Args::try_parse_from(format!("{line} --client-secrets=false").split(' ')).unwrap();
        assert!(without.run.is_some_and(|run| !run.client_secrets));
        assert!(Args::try_parse_from(format!("{line} --max-apps-per-namespace 0").split(' ')).is_err());
        assert!(Args::try_parse_from(["latchkey-operator", "--namespace", "a"]).is_err());
        let line = "latchkey-operator render --check --from a";
        assert!(Args::try_parse_from(line.split(' ')).unwrap().command.is_some());
    }
}
