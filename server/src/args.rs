//! The command line; each flag is also an environment variable `LATCHKEY_…`.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use latchkey_crds::types::IssuerUrl;
use url::Url;
use uuid::Uuid;

use crate::memory;

/// The login API of Latchkey.
#[derive(Debug, Parser)]
#[command(name = "latchkey-server", version, max_term_width = 100)]
pub struct Arguments {
    /// Without a command: serve.
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub serve: Serve,
    #[command(flatten)]
    pub database: Database,
    #[command(flatten)]
    pub log: Log,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Bring the schema of the database up to what this version needs; safe to run twice, and at once.
    Migrate,
    /// Look at mails that could not be delivered.
    Outbox {
        #[command(subcommand)]
        command: Outbox,
    },
    /// Print the OpenAPI document.
    Openapi,
    /// Ask whether addresses in the cluster answer with a success.
    Check {
        /// Seconds for which those that do not are asked again.
        #[arg(long, default_value = "0", value_parser = seconds)]
        within: Duration,
        /// `http://HOST:PORT/PATH`.
        #[arg(required = true)]
        urls: Vec<Url>,
    },
}

#[derive(Debug, Subcommand)]
pub enum Outbox {
    /// List dead letters, one a line.
    List,
    /// Send one again.
    Retry {
        /// As listed.
        id: Uuid,
    },
}

#[derive(Debug, Args)]
pub struct Database {
    /// File with the URL of the Postgres database; re-read when a connection is made. TLS by `sslmode` and `sslrootcert`.
    #[arg(long, env = "LATCHKEY_DATABASE_URL_FILE", global = true)]
    pub database_url_file: Option<PathBuf>,
    /// The URL itself; only by environment, since command lines are seen by all.
    #[arg(skip = std::env::var("LATCHKEY_DATABASE_URL").ok())]
    pub database_url: Option<String>,
}

#[derive(Debug, Args)]
pub struct Log {
    /// What is logged, in the syntax of tracing's EnvFilter.
    #[arg(long, env = "LATCHKEY_LOG", default_value = "info", global = true)]
    pub log: String,
    #[arg(long, env = "LATCHKEY_LOG_FORMAT", value_enum, default_value_t = LogFormat::Json, global = true)]
    pub log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Json,
    Text,
}

#[derive(Debug, Args)]
pub struct Serve {
    /// Directory of rendered Apps, `<appID>.json` each; watched for changes.
    #[arg(long, env = "LATCHKEY_CONFIG_DIR")]
    pub config_dir: Option<PathBuf>,
    /// Instead of a directory: the namespace of the install, whose Secrets of type `latchkey.dev/rendered-app` hold the
    /// rendered Apps. The API server is found by KUBECONFIG or, in a pod, by its ServiceAccount.
    #[arg(long, env = "LATCHKEY_NAMESPACE")]
    pub namespace: Option<String>,
    /// With a namespace: directory that keeps the last good documents, so that a restarted container serves without the
    /// API server. They hold secrets: let it lie in memory.
    #[arg(long, env = "LATCHKEY_CACHE_DIR")]
    pub cache_dir: Option<PathBuf>,
    /// The API for users and their apps.
    #[arg(long, env = "LATCHKEY_PUBLIC_ADDR", default_value = "0.0.0.0:8080")]
    pub public_addr: SocketAddr,
    /// The API for in-cluster callers; never to be routed from outside.
    #[arg(long, env = "LATCHKEY_ADMIN_ADDR", default_value = "0.0.0.0:8081")]
    pub admin_addr: SocketAddr,
    /// Liveness, readiness, metrics, revisions.
    #[arg(long, env = "LATCHKEY_OPS_ADDR", default_value = "0.0.0.0:9090")]
    pub ops_addr: SocketAddr,
    /// Where the public API is reached from outside, without a slash at the end.
    #[arg(long, env = "LATCHKEY_BASE_URL")]
    pub base_url: Option<IssuerUrl>,
    /// Do not LISTEN for new rows of the outbox: polling alone is enough, and poolers that give out connections by
    /// transaction lose it. Behind such a pooler also put `statement-cache-capacity=0` into the database's URL.
    #[arg(long, env = "LATCHKEY_WITHOUT_LISTEN")]
    pub without_listen: bool,
    /// File with the URL of Redis: `redis://`, `redis-sentinel://` or `redis-cluster://`, with `rediss` for TLS.
    #[arg(long, env = "LATCHKEY_REDIS_URL_FILE")]
    pub redis_url_file: Option<PathBuf>,
    /// The URL itself; only by environment.
    #[arg(skip = std::env::var("LATCHKEY_REDIS_URL").ok())]
    pub redis_url: Option<String>,
    /// File that describes the install's own mail relay: `host`, `port`, `tls` (starttls, implicit or none), `from` and,
    /// where it wants a login, `username` and `password`; JSON. Apps without a relay of their own send through it.
    #[arg(long, env = "LATCHKEY_SMTP_FILE")]
    pub smtp_file: Option<PathBuf>,
    /// Networks of the proxies whose X-Forwarded-For is believed, comma-separated.
    #[arg(long, env = "LATCHKEY_TRUSTED_PROXIES", value_delimiter = ',')]
    pub trusted_proxies: Vec<IpNet>,
    /// Believe the sampled flag of a `traceparent` that comes from a listed proxy. Set it only if the proxy sets that
    /// header itself: one that passes it on lets any client decide what is traced.
    #[arg(long, env = "LATCHKEY_TRUST_TRACEPARENT")]
    pub trust_traceparent: bool,
    /// Connections that one client address (of IPv6: one /64) can have at a time on a listener, unless it is a listed
    /// proxy. At most an eighth of all.
    #[arg(long, env = "LATCHKEY_CONNECTIONS_PER_CLIENT", default_value_t = 256, value_parser = connections)]
    pub connections_per_client: usize,
    /// Memory that this process can use, such as 256Mi: from it follow how many connections it takes and how much requests
    /// can hold. Default: the limit of its cgroup, or the memory of the machine.
    #[arg(long, env = "LATCHKEY_MEMORY_LIMIT", value_parser = memory::parse)]
    pub memory_limit: Option<u64>,
    /// Private networks that Apps' mail relays and social providers may be in, comma-separated.
    #[arg(long, env = "LATCHKEY_PRIVATE_CIDRS", value_delimiter = ',')]
    pub private_cidrs: Vec<IpNet>,
    /// File with ceilings for the limits of Apps: a map from a limit's name to windows, JSON.
    #[arg(long, env = "LATCHKEY_LIMIT_CEILINGS")]
    pub limit_ceilings: Option<PathBuf>,
    /// File with the public keys by which callers in the cluster are known: a JWKS, read again when it changes. Without
    /// it, with a namespace, these are the keys of the cluster's own API server; without either nobody is known.
    #[arg(long, env = "LATCHKEY_SERVICE_ACCOUNT_KEYS")]
    pub service_account_keys: Option<PathBuf>,
    /// For development on one machine: mail relays on loopback and on any port, providers on loopback and without TLS.
    #[arg(long, env = "LATCHKEY_ALLOW_INSECURE")]
    pub allow_insecure: bool,
    /// For tests, with --allow-insecure: a host at which providers are asked stands at this address.
    #[arg(long = "provider-host", hide = true, value_name = "HOST=ADDRESS", value_parser = host_at)]
    pub provider_hosts: Vec<(String, SocketAddr)>,
    /// The pod's UID, by which the operator knows it; a random one where there is none.
    #[arg(long, env = "LATCHKEY_POD_UID")]
    pub pod_uid: Option<String>,
    /// Seconds for which new connections are still taken after SIGTERM, while load balancers catch up.
    #[arg(long, env = "LATCHKEY_DRAIN_SECONDS", default_value = "5", value_parser = seconds)]
    pub drain_seconds: Duration,
}

fn host_at(text: &str) -> Result<(String, SocketAddr), String> {
    let (host, address) = text.split_once('=').ok_or("is not HOST=ADDRESS")?;
    let address = address.parse().map_err(|_| "has no address such as 127.0.0.1:8443 after the =")?;
    Ok((host.to_owned(), address))
}

fn connections(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "is not a number from 1 up".to_owned())
}

fn seconds(text: &str) -> Result<Duration, std::num::ParseIntError> {
    text.parse().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Arguments::command().debug_assert();
    }
}
