//! The command line. An environment variable `LATCHKEY_…` can set most flags.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use argon2_simd::Kernel;
use clap::{Args, Parser, Subcommand};
use ipnet::IpNet;
use latchkey_crds::types::IssuerUrl;
use latchkey_import::ImportArgs;
use latchkey_telemetry::LogArgs;
use url::Url;
use uuid::Uuid;

use crate::{
    domain::foreign_hash::{Argon2Class, MAX_WEIGHT},
    memory,
};

/// The login API of Latchkey.
#[derive(Debug, Parser)]
#[command(
    name = "latchkey-server",
    version,
    max_term_width = 100,
    // These two flags can also follow a command.
    mut_arg("log", |arg| arg.global(true)),
    mut_arg("log_format", |arg| arg.global(true))
)]
pub struct Arguments {
    /// Without a command, the program serves requests.
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub serve: ServeArgs,
    #[command(flatten)]
    pub database: DatabaseArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Migrate the database schema to the version that this program needs. Safe to repeat and to run concurrently.
    Migrate,
    /// List or retry emails that could not be delivered.
    Outbox {
        #[command(subcommand)]
        command: OutboxCommand,
    },
    /// Print the OpenAPI document.
    Openapi {
        /// Print the document of the administration API.
        #[arg(long)]
        administration: bool,
    },
    /// Import users of another login service into an App.
    Import(Box<ImportArgs>),
    /// Check that URLs in the cluster respond with a success status.
    Check {
        /// A URL that fails is retried until this many seconds after the start.
        #[arg(long, default_value = "0", value_parser = parse_seconds)]
        within: Duration,
        /// `http://HOST:PORT/PATH`.
        #[arg(required = true)]
        urls: Vec<Url>,
    },
}

#[derive(Debug, Subcommand)]
pub enum OutboxCommand {
    /// List dead letters, one per line.
    List,
    /// Send a dead letter again.
    Retry {
        /// The ID that `outbox list` prints.
        id: Uuid,
    },
}

#[derive(Debug, Args)]
pub struct DatabaseArgs {
    /// File with the URL of the Postgres database. The server reads the file again while it runs. `sslmode` and
    /// `sslrootcert` in the URL configure TLS.
    #[arg(long, env = "LATCHKEY_DATABASE_URL_FILE", global = true)]
    pub database_url_file: Option<PathBuf>,
    /// URL of the Postgres database. Only an environment variable can set it, because other processes can read the
    /// command line.
    #[arg(skip = std::env::var("LATCHKEY_DATABASE_URL").ok())]
    pub database_url: Option<String>,
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Directory with one rendered document `<appID>.json` for each App. The server watches it for changes.
    #[arg(long, env = "LATCHKEY_CONFIG_DIR")]
    pub config_dir: Option<PathBuf>,
    /// Namespace of the installation, as an alternative to --config-dir: the Secrets of type
    /// `latchkey.dev/rendered-app` in this namespace hold the rendered Apps. KUBECONFIG or, in a pod, the
    /// ServiceAccount of the pod gives access to the API server.
    #[arg(long, env = "LATCHKEY_NAMESPACE")]
    pub namespace: Option<String>,
    /// With --namespace: directory for the last valid documents, from which a restarted container serves without the
    /// API server. The documents contain secrets, so use a memory-backed volume.
    #[arg(long, env = "LATCHKEY_CACHE_DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Listen address of the public API.
    #[arg(long, env = "LATCHKEY_PUBLIC_ADDR", default_value = "0.0.0.0:8080")]
    pub public_addr: SocketAddr,
    /// Listen address of the administration API for in-cluster callers. Never expose it outside the cluster.
    #[arg(long, env = "LATCHKEY_ADMIN_ADDR", default_value = "0.0.0.0:8081")]
    pub admin_addr: SocketAddr,
    /// Listen address of the operations endpoints: liveness, readiness, metrics and revisions.
    #[arg(long, env = "LATCHKEY_OPS_ADDR", default_value = "0.0.0.0:9090")]
    pub ops_addr: SocketAddr,
    /// External URL of the public API, without a trailing slash.
    #[arg(long, env = "LATCHKEY_BASE_URL")]
    pub base_url: Option<IssuerUrl>,
    /// Poll the outbox and the webhook events instead of using LISTEN, for connection poolers in transaction mode. The
    /// pooler must support protocol-level prepared statements in transaction mode (PgBouncer 1.21 or later with
    /// `max_prepared_statements` above 0).
    #[arg(long, env = "LATCHKEY_WITHOUT_LISTEN")]
    pub without_listen: bool,
    /// File with the URL of Redis: `redis://`, `redis-sentinel://` or `redis-cluster://`, with `rediss` for TLS.
    #[arg(long, env = "LATCHKEY_REDIS_URL_FILE")]
    pub redis_url_file: Option<PathBuf>,
    /// URL of Redis. Only an environment variable can set it.
    #[arg(skip = std::env::var("LATCHKEY_REDIS_URL").ok())]
    pub redis_url: Option<String>,
    /// JSON file that describes the SMTP relay of the installation: `host`, `port`, `tls` (starttls, implicit or none),
    /// `from` and, for a relay with authentication, `username` and `password`. Apps without their own relay use this
    /// relay.
    #[arg(long, env = "LATCHKEY_SMTP_FILE")]
    pub smtp_file: Option<PathBuf>,
    /// Networks of trusted proxies, comma-separated; X-Forwarded-For is used only in requests from these networks.
    #[arg(long, env = "LATCHKEY_TRUSTED_PROXIES", value_delimiter = ',')]
    pub trusted_proxies: Vec<IpNet>,
    /// Use the sampled flag of a `traceparent` header from a trusted proxy. Set this option only if the proxy sets the
    /// header itself. If the proxy forwards the header of a client, any client can decide what is traced.
    #[arg(long, env = "LATCHKEY_TRUST_TRACEPARENT")]
    pub trust_traceparent: bool,
    /// Maximum concurrent connections per client address (IPv6: per /64) on a listener; trusted proxies are exempt. The
    /// maximum is never more than an eighth of the connections that the listener accepts in total.
    #[arg(long, env = "LATCHKEY_CONNECTIONS_PER_CLIENT", default_value_t = 256, value_parser = parse_connections)]
    pub connections_per_client: usize,
    /// Memory that this process can use, such as 256Mi. The limits on connections and on the memory of requests follow
    /// from it. Default: the memory limit of the process's cgroup or the memory of the machine, whichever is smaller.
    #[arg(long, env = "LATCHKEY_MEMORY_LIMIT", value_parser = memory::parse)]
    pub memory_limit: Option<u64>,
    /// Instruction set for password hashing: avx512, avx2, neon or portable. Default: the fastest one that the CPU
    /// supports.
    #[arg(long, env = "LATCHKEY_HASHING_KERNEL", value_parser = parse_kernel)]
    pub hashing_kernel: Option<Kernel>,
    /// Memory of a password hash in MiB, 19 to 128: the parameter m of Argon2id. Each hashing thread needs this much.
    #[arg(
        long,
        env = "LATCHKEY_HASHING_MEMORY_MIB",
        default_value_t = 19,
        value_parser = clap::value_parser!(u32).range(19..=128)
    )]
    pub hashing_memory_mib: u32,
    /// Iterations of a password hash, 2 to 16: the parameter t of Argon2id.
    #[arg(
        long,
        env = "LATCHKEY_HASHING_ITERATIONS",
        default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(2..=16)
    )]
    pub hashing_iterations: u32,
    /// Private networks in which the SMTP relays, providers and webhook receivers of Apps are allowed, comma-separated.
    #[arg(long, env = "LATCHKEY_PRIVATE_CIDRS", value_delimiter = ',')]
    pub private_cidrs: Vec<IpNet>,
    /// JSON file with ceilings for the rate limits of Apps: a map from the name of a limit to windows.
    #[arg(long, env = "LATCHKEY_LIMIT_CEILINGS")]
    pub limit_ceilings: Option<PathBuf>,
    /// JWKS file with the public keys that verify the tokens of in-cluster callers; read again when it changes.
    /// Default: with --namespace, the keys of the cluster's API server; otherwise no caller is accepted.
    #[arg(long, env = "LATCHKEY_SERVICE_ACCOUNT_KEYS")]
    pub service_account_keys: Option<PathBuf>,
    /// For development on one machine: allow a base URL with http, SMTP relays of Apps on loopback and on any port, and
    /// providers on loopback and without TLS.
    #[arg(long, env = "LATCHKEY_ALLOW_INSECURE")]
    pub allow_insecure: bool,
    /// For tests, with --allow-insecure: calls to the provider HOST connect to ADDRESS.
    #[arg(long = "provider-host", hide = true, value_name = "HOST=ADDRESS", value_parser = parse_host_address)]
    pub provider_hosts: Vec<(String, SocketAddr)>,
    /// UID of the pod, by which the operator identifies the pod. Default: a random UUID.
    #[arg(long, env = "LATCHKEY_POD_UID")]
    pub pod_uid: Option<String>,
    /// Seconds for which new connections are still accepted after SIGTERM, so that load balancers have time to remove
    /// this server.
    #[arg(long, env = "LATCHKEY_DRAIN_SECONDS", default_value = "5", value_parser = parse_seconds)]
    pub drain_seconds: Duration,
}

// === impl ServeArgs ===

impl ServeArgs {
    /// Returns the parameters of new password hashes.
    ///
    /// # Errors
    ///
    /// The hashes would cost more than [`MAX_WEIGHT`] times the default.
    pub fn native_hashes(&self) -> Result<Argon2Class, String> {
        let (memory, iterations) = (self.hashing_memory_mib, self.hashing_iterations);
        Argon2Class::native(memory, iterations).ok_or_else(|| {
            format!(
                "--hashing-memory-mib={memory} and --hashing-iterations={iterations} cost more than {MAX_WEIGHT} times \
                 the default"
            )
        })
    }
}

fn parse_host_address(text: &str) -> Result<(String, SocketAddr), String> {
    let (host, address) = text.split_once('=').ok_or("is not HOST=ADDRESS")?;
    let address = address.parse().map_err(|_| "has no address such as 127.0.0.1:8443 after the =")?;
    Ok((host.to_owned(), address))
}

fn parse_connections(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "is not a whole number of at least 1".to_owned())
}

fn parse_kernel(text: &str) -> Result<Kernel, String> {
    let supported = Kernel::supported();
    supported.iter().copied().find(|kernel| kernel.name() == text).ok_or_else(|| {
        let names: Vec<_> = supported.iter().map(|kernel| kernel.name()).collect();
        format!("this CPU supports {}", names.join(", "))
    })
}

fn parse_seconds(text: &str) -> Result<Duration, std::num::ParseIntError> {
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

    #[test]
    fn password_hashes_can_cost_more_than_the_default_up_to_a_limit_but_not_less() {
        let parse = |args: &[&str]| {
            let args = ["latchkey-server"].iter().chain(args);
            Arguments::try_parse_from(args).map(|arguments| arguments.serve.native_hashes())
        };
        assert_eq!(parse(&[]).unwrap(), Ok(Argon2Class::DEFAULT_NATIVE));
        let stronger = Argon2Class::native(64, 3).unwrap();
        assert_eq!(parse(&["--hashing-memory-mib=64", "--hashing-iterations=3"]).unwrap(), Ok(stronger));
        for refused in [
            "--hashing-memory-mib=18",
            "--hashing-memory-mib=129",
            "--hashing-memory-mib=64Mi",
            "--hashing-iterations=1",
            "--hashing-iterations=17",
        ] {
            let error = parse(&[refused]).unwrap_err().to_string();
            assert!(error.contains(refused.split('=').next().unwrap()), "{error}");
        }
        assert_eq!(
            parse(&["--hashing-memory-mib=128", "--hashing-iterations=16"]).unwrap(),
            Err("--hashing-memory-mib=128 and --hashing-iterations=16 cost more than 32 times the default".to_owned())
        );
    }
}
