//! Runs a command or the server. The server runs until it receives a signal to stop. Only this module knows all parts
//! of the server, such as the stores, hashing, mail and the three listeners.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use argon2_simd::Kernel;
use latchkey_crds::{
    rendered::SmtpRelay,
    types::{IssuerUrl, Mailbox},
};
use latchkey_server::{
    args::{Arguments, Command, DatabaseArgs, OutboxCommand, ServeArgs},
    audit,
    callers::Callers,
    client_metrics::ClientMetrics,
    config::{Apps, Ceilings, cache::Cache, directory, kubernetes, metrics::ConfigMetrics},
    deletion,
    domain::clock::Env,
    hashing::{HashingOptions, HashingPool},
    http::{self, Budgets, Drain, HttpMetrics, Readiness},
    import_metrics::ImportMetrics,
    mail::{InstallRelay, MailMetrics, MailSettings, Worker},
    memory,
    outbound::{OutboundPolicy, proxy::OutboundProxy},
    ownership::OwnershipChecker,
    providers::{ProviderOptions, ProviderReports, SocialProviders},
    retention::RetentionMetrics,
    settings::Settings,
    state::State,
    store::{
        Stores, UrlSource,
        postgres::{self, PostgresStore},
        redis::{self, RedisStore},
    },
    token_cache::TokenCache,
    webhooks::{self, EventSender, WebhookMetrics, WebhookWorker},
};
use prometheus_client::registry::Registry;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    net::{TcpListener, TcpSocket},
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};

use crate::check;

/// The content of the file that `--smtp-file` names: the SMTP relay of the installation, and the sender of its mails.
#[derive(serde::Deserialize)]
struct SmtpFile {
    #[serde(flatten)]
    relay: SmtpRelay,
    from: Mailbox,
}

/// The maximum time that the requests in progress can still take after `--drain-seconds` have passed.
const FINISH_TIMEOUT: Duration = Duration::from_secs(35);
/// How many connections the kernel queues before the server accepts them. The kernel limits this number to
/// `net.core.somaxconn` (4096 by default). If the queue is full, the kernel drops connection requests, and the client's
/// kernel repeats them after a second.
const BACKLOG: u32 = 4096;
/// How often the schema is checked again while it is too old.
const SCHEMA_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Runs a command or the server. The exit status of an import distinguishes refused users from an import that did not
/// finish; other commands only report success or an error.
pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    // Without a default crypto provider for TLS, several dependencies would each choose one.
    rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("a TLS provider is installed already"))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = match arguments.command {
        Some(Command::Import(import)) => return Ok(latchkey_import::run(&import)),
        Some(Command::Openapi { administration: true }) => {
            println!("{:#}", http::openapi::administration_document());
            Ok(())
        }
        Some(Command::Openapi { administration: false }) => {
            let base_url = match arguments.serve.base_url {
                Some(base_url) => base_url,
                None => "https://auth.example.com".parse()?,
            };
            println!("{:#}", http::openapi::public_document(&base_url));
            Ok(())
        }
        Some(Command::Check { within, urls }) => runtime.block_on(check::check(&urls, within)),
        Some(Command::Migrate) => runtime.block_on(migrate(&arguments.database)),
        Some(Command::Outbox { command }) => runtime.block_on(outbox(&arguments.database, command)),
        None => runtime.block_on(serve(arguments.serve, &arguments.database)),
    };
    result.map(|()| ExitCode::SUCCESS)
}

async fn migrate(database: &DatabaseArgs) -> Result<()> {
    postgres::migrate::migrate(&database_url(database)?).await.context("the schema was not migrated")
}

async fn outbox(database: &DatabaseArgs, command: OutboxCommand) -> Result<()> {
    let postgres =
        PostgresStore::connect(postgres::Options { listen: false, ..postgres::Options::new(database_url(database)?) })?;
    match command {
        OutboxCommand::List => {
            for dead_letter in postgres.dead_letters().await? {
                println!("{dead_letter}");
            }
        }
        OutboxCommand::Retry { id } => {
            if !postgres.retry_dead_letter(id).await? {
                bail!("there is no dead letter {id}; see `latchkey-server outbox list`");
            }
            println!("{id} will be sent again");
        }
    }
    Ok(())
}

/// Raises the soft limit on file descriptors to the hard limit. Container runtimes can set a soft limit of 1,024, for
/// programs that use select(2). The budgets (`http/budgets.rs`) allow more connections and held refusals than that.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        warn!(%error, "the limit on file descriptors could not be raised");
    }
}

/// Connects all parts of the server and runs it until it is stopped. It is one function, because the parts depend on
/// each other in this order, and most of them are used only here.
async fn serve(serve: ServeArgs, database: &DatabaseArgs) -> Result<()> {
    if !serve.provider_hosts.is_empty() && !serve.allow_insecure {
        bail!("--provider-host is for tests; it requires --allow-insecure");
    }
    raise_descriptor_limit();
    let memory = serve.memory_limit.unwrap_or_else(memory::limit);
    let native = serve.native_hashes().map_err(anyhow::Error::msg)?;
    let hashing_options = HashingOptions { native, ..HashingOptions::default() };
    hashing_options.check_memory(memory).context("--hashing-memory-mib")?;
    let source = DocumentSource::from_args(&serve).await?;
    let callers = callers(serve.service_account_keys.as_deref(), &source)?;
    let settings = settings(&serve)?;
    let openapi = http::openapi::Documents::render(&settings.base_url);
    let mut registry = Registry::with_prefix("latchkey");

    let config_metrics = ConfigMetrics::register(&mut registry);
    let mut apps = Apps::new(ceilings(serve.limit_ceilings.as_deref())?).with_metrics(config_metrics);
    if let Some(folder) = &serve.cache_dir {
        apps = apps.with_cache(Cache::open(folder.clone())?);
    }
    let apps = Arc::new(apps);
    let readiness = Arc::new(Readiness::default());
    // Becomes true after the complete set of documents was read.
    let has_all_documents = watch::Sender::new(false);
    let has_all_documents_for_ownership = has_all_documents.subscribe();
    let has_all_documents_for_deletion = has_all_documents.subscribe();
    let has_all_documents_for_audit = has_all_documents.subscribe();
    let _watching = watch_documents(source, &apps, &readiness, has_all_documents).await?;

    let listen = !serve.without_listen;
    let postgres =
        PostgresStore::connect(postgres::Options { listen, ..postgres::Options::new(database_url(database)?) })?;
    postgres.register_metrics(registry.sub_registry_with_prefix("postgres"));
    let redis = RedisStore::connect(redis::Options::new(redis_url(&serve)?))?;
    redis.register_metrics(registry.sub_registry_with_prefix("redis"));
    let audit_registry = registry.sub_registry_with_prefix("audit");
    postgres.audit_metrics().register(audit_registry);
    redis.register_audit_metrics(audit_registry);
    let retention_metrics = RetentionMetrics::register(&mut registry);
    let kernel = serve.hashing_kernel.unwrap_or_else(Kernel::fastest);
    let (memory_mib, iterations) = (serve.hashing_memory_mib, serve.hashing_iterations);
    info!(kernel = kernel.name(), memory_mib, iterations, "password hashing starts");
    let hashing = HashingPool::start(HashingOptions { kernel, ..hashing_options }, &mut registry);
    let reach = OutboundPolicy { private_cidrs: serve.private_cidrs.clone(), allow_insecure: serve.allow_insecure };
    let hosts = serve.provider_hosts.iter().cloned().collect();
    let proxy = OutboundProxy::from_env()?;
    let webhook_reach = (reach.clone(), proxy.clone());
    let options = ProviderOptions { reach: reach.clone(), proxy, test_hosts: hosts, ..ProviderOptions::default() };
    let providers = SocialProviders::new(options, Env::system());
    providers.register(registry.sub_registry_with_prefix("provider"));
    let stores = Stores { postgres: postgres.clone(), redis, hashing, providers };

    let mail_settings = MailSettings { install: install_relay(serve.smtp_file.as_deref())?, reach: reach.clone() };
    let mail_metrics = MailMetrics::register(&mut registry);
    let worker = Worker::new(stores.clone(), Arc::clone(&apps), Arc::new(Env::system()), mail_settings, mail_metrics);
    let webhook_metrics = WebhookMetrics::register(registry.sub_registry_with_prefix("webhook"));
    let sender = EventSender::new(Arc::clone(&apps), Arc::new(Env::system()), webhook_reach.0, webhook_reach.1);
    let webhook_worker = WebhookWorker::new(stores.clone(), sender, Arc::new(Env::system()), webhook_metrics.clone());
    let http_metrics = HttpMetrics::register(&mut registry);
    let budgets = Budgets::new(memory, serve.connections_per_client);
    HttpMetrics::register_budgets(&mut registry, &budgets);

    let token_cache = TokenCache::default();
    let import_metrics = ImportMetrics::register(&mut registry);
    let client_metrics = ClientMetrics::register(&mut registry);
    let env = Env::system();
    let state = State { apps, stores, env, settings, openapi, callers, token_cache, import_metrics, client_metrics };
    let state = Arc::new(state);
    let registry = Arc::new(registry);
    let (public, admin, ops) = (
        bind("--public-addr", serve.public_addr)?,
        bind("--admin-addr", serve.admin_addr)?,
        bind("--ops-addr", serve.ops_addr)?,
    );
    let reports = Arc::new(ProviderReports::default());
    let drain = Drain::new(serve.drain_seconds, FINISH_TIMEOUT);
    // The operations listener ends last: after the other listeners and the workers have finished.
    let ops_drain = Drain::new(Duration::ZERO, Duration::from_secs(1));
    let ops_service = http::ops_service(
        Arc::clone(&state),
        http_metrics.clone(),
        Arc::clone(&budgets),
        registry,
        Arc::clone(&readiness),
        Arc::clone(&reports),
        &ops_drain,
    );
    let api_listeners = TaskTracker::new();
    let public_service = http::public_service(Arc::clone(&state), http_metrics.clone(), Arc::clone(&budgets));
    api_listeners.spawn(http::serve(public, public_service, drain.clone()));
    let admin_service = http::admin_service(Arc::clone(&state), http_metrics, budgets);
    api_listeners.spawn(http::serve(admin, admin_service, drain.clone()));
    api_listeners.close();
    let ops_listener = tokio::spawn(http::serve(ops, ops_service, ops_drain.clone()));
    let stop_workers = CancellationToken::new();
    let mail_worker = tokio::spawn(worker.run(stop_workers.clone()));
    let webhook_worker = tokio::spawn(webhook_worker.run(stop_workers.clone()));
    let webhook_reports = webhooks::report_states(state.stores.clone(), Arc::clone(&state.apps), Env::system());
    let webhook_reports = tokio::spawn(webhook_reports).abort_handle();
    tokio::spawn(watch_schema(postgres.clone(), Arc::clone(&readiness)));
    tokio::spawn(prefetch_caller_keys(Arc::clone(&state)));
    let ownership =
        OwnershipChecker::new(Arc::clone(&state.apps), postgres.clone()).run(has_all_documents_for_ownership);
    let ownership = tokio::spawn(ownership).abort_handle();
    let deletion = deletion::run(Arc::clone(&state.apps), state.stores.clone(), has_all_documents_for_deletion);
    let deletion = tokio::spawn(deletion).abort_handle();
    let (audit_apps, audit_stores) = (Arc::clone(&state.apps), state.stores.clone());
    let audit = audit::run(
        audit_apps,
        audit_stores,
        Env::system(),
        retention_metrics,
        webhook_metrics,
        has_all_documents_for_audit,
    );
    let audit = tokio::spawn(audit).abort_handle();
    let checks = state.stores.providers.clone().run_checks(Arc::clone(&state.apps), reports);
    let checks = tokio::spawn(checks).abort_handle();
    info!(memory_mib = memory >> 20, "the limits of connections and requests follow from this memory");
    info!(public = %serve.public_addr, admin = %serve.admin_addr, ops = %serve.ops_addr, "listening");

    shutdown_signal().await?;
    info!("draining");
    readiness.set_draining();
    drain.begin();
    stop_workers.cancel();
    // If an abort interrupts a transaction, another server repeats the transaction.
    deletion.abort();
    audit.abort();
    ownership.abort();
    checks.abort();
    webhook_reports.abort();
    api_listeners.wait().await;
    mail_worker.await?;
    webhook_worker.await?;
    ops_drain.begin();
    ops_listener.await?;
    postgres.close().await;
    info!("drained");
    Ok(())
}

/// The source of the rendered Apps.
enum DocumentSource {
    Directory(PathBuf),
    Namespace { namespace: String, api_server: Box<kube::Config> },
}

/// A running watch of the documents. The watch ends when this value is dropped.
enum DocumentWatch {
    Directory { _watching: directory::WatchGuard },
    Kubernetes { _watching: kubernetes::WatchGuard },
}

impl DocumentSource {
    async fn from_args(serve: &ServeArgs) -> Result<Self> {
        match (serve.config_dir.clone(), serve.namespace.clone()) {
            (Some(_), None) if serve.cache_dir.is_some() => {
                bail!("--cache-dir requires --namespace; --config-dir needs no cache")
            }
            (Some(directory), None) => Ok(Self::Directory(directory)),
            (None, Some(namespace)) => {
                let api_server = kube::Config::infer()
                    .await
                    .context("no API server is configured: set KUBECONFIG, or run in a pod with a ServiceAccount")?;
                Ok(Self::Namespace { namespace, api_server: Box::new(api_server) })
            }
            (None, None) => bail!("set the source of the rendered Apps: --config-dir DIR or --namespace NAMESPACE"),
            (Some(_), Some(_)) => bail!("the rendered Apps have one source: --config-dir or --namespace, not both"),
        }
    }
}

/// Starts the watch of the documents. With a directory, all documents are read before this function returns. With a
/// namespace, this function waits only for the cached documents, because the API server can be unavailable.
async fn watch_documents(
    source: DocumentSource,
    apps: &Arc<Apps>,
    readiness: &Arc<Readiness>,
    has_all_documents: watch::Sender<bool>,
) -> Result<DocumentWatch> {
    match source {
        DocumentSource::Directory(directory) => {
            let watching = directory::watch(directory, Arc::clone(apps))?;
            readiness.set_configuration_loaded();
            has_all_documents.send_replace(true);
            Ok(DocumentWatch::Directory { _watching: watching })
        }
        DocumentSource::Namespace { namespace, api_server } => {
            if apps.restore_from_cache() {
                readiness.set_configuration_loaded();
            }
            let readiness = Arc::clone(readiness);
            let on_result = move |result| match result {
                Ok(()) => {
                    readiness.set_configuration_loaded();
                    has_all_documents.send_replace(true);
                }
                Err(reason) => readiness.set_configuration_error(reason),
            };
            let watching = kubernetes::watch(*api_server, &namespace, Arc::clone(apps), on_result)?;
            Ok(DocumentWatch::Kubernetes { _watching: watching })
        }
    }
}

/// Returns the keys that verify ServiceAccount tokens. The keys in a file take precedence over the API server's keys.
fn callers(file: Option<&Path>, source: &DocumentSource) -> Result<Callers> {
    match (file, source) {
        (Some(file), _) => Callers::from_file(file.to_owned()).context("--service-account-keys"),
        (None, DocumentSource::Namespace { api_server, .. }) => {
            Callers::from_cluster((**api_server).clone()).context("the client of the API server cannot be made")
        }
        (None, DocumentSource::Directory(_)) => Ok(Callers::Disabled),
    }
}

async fn prefetch_caller_keys(state: Arc<State>) {
    state.callers.prefetch_keys().await;
}

fn bind(flag: &str, address: std::net::SocketAddr) -> Result<TcpListener> {
    listen(address).with_context(|| format!("cannot listen on {address} ({flag})"))
}

fn listen(address: std::net::SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // With this option, a restarted process can listen while connections of its predecessor are in TIME_WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

async fn shutdown_signal() -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// Waits until the schema of the database is new enough; before that, the server is not ready. A later outage of
/// Postgres does not make the server unready.
async fn watch_schema(postgres: PostgresStore, readiness: Arc<Readiness>) {
    let required = postgres::migrate::REQUIRED_SCHEMA;
    let mut has_warned = false;
    loop {
        match postgres.schema_version().await {
            Ok(Some(version)) if version >= required => {
                readiness.set_schema_ready();
                info!(version, "the schema is new enough");
                return;
            }
            Ok(version) => {
                let reason = match version {
                    Some(version) => {
                        format!("it is at {version}, this server needs {required}; run `latchkey-server migrate`")
                    }
                    None => "it is empty; run `latchkey-server migrate`".to_owned(),
                };
                if !has_warned {
                    warn!("not ready: the schema of the database is too old: {reason}");
                    has_warned = true;
                }
                readiness.set_schema_error(reason);
            }
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "the version of the database schema cannot be read");
            }
        }
        tokio::time::sleep(SCHEMA_POLL_INTERVAL).await;
    }
}

fn settings(serve: &ServeArgs) -> Result<Settings> {
    let base_url: IssuerUrl = serve.base_url.clone().context("set the external URL of the API: --base-url URL")?;
    if base_url.as_str().starts_with("http://") && !serve.allow_insecure {
        bail!("--base-url is http; use https, or --allow-insecure for development");
    }
    let pod_uid = serve.pod_uid.clone().unwrap_or_else(|| Env::system().new_uuid().to_string());
    let trusted_proxies = serve.trusted_proxies.clone();
    Ok(Settings { base_url, trusted_proxies, trusts_traceparent: serve.trust_traceparent, pod_uid })
}

fn database_url(database: &DatabaseArgs) -> Result<UrlSource> {
    url_source(
        "--database-url-file",
        "LATCHKEY_DATABASE_URL",
        database.database_url_file.as_deref(),
        database.database_url.as_deref(),
    )
}

fn redis_url(serve: &ServeArgs) -> Result<UrlSource> {
    url_source("--redis-url-file", "LATCHKEY_REDIS_URL", serve.redis_url_file.as_deref(), serve.redis_url.as_deref())
}

fn url_source(flag: &str, variable: &str, file: Option<&Path>, value: Option<&str>) -> Result<UrlSource> {
    match (file, value) {
        (Some(file), _) => Ok(UrlSource::File(file.to_owned())),
        (None, Some(value)) => Ok(UrlSource::from_value(value)),
        (None, None) => bail!("set the URL of the store: {flag} FILE or the variable {variable}"),
    }
}

fn install_relay(file: Option<&Path>) -> Result<Option<InstallRelay>> {
    let Some(file) = file else { return Ok(None) };
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {} (--smtp-file)", file.display()))?;
    // The error text of serde could quote the password.
    let smtp: SmtpFile = serde_json::from_str(&text).map_err(|error| {
        anyhow::anyhow!(
            "{} (--smtp-file) is not an object with host, port, tls and from: line {}, column {}",
            file.display(),
            error.line(),
            error.column()
        )
    })?;
    Ok(Some(InstallRelay { relay: smtp.relay, from: smtp.from }))
}

fn ceilings(file: Option<&Path>) -> Result<Ceilings> {
    let Some(file) = file else { return Ok(Ceilings::new()) };
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {} (--limit-ceilings)", file.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} (--limit-ceilings) is not a map of limits", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_on_file_descriptors_is_raised_to_the_hard_limit() {
        let limit = getrlimit(Resource::Nofile);
        let lower = limit.maximum.map(|maximum| maximum - 1).or(Some(65_536));
        setrlimit(Resource::Nofile, Rlimit { current: lower, ..limit }).unwrap();
        assert_eq!(getrlimit(Resource::Nofile).current, lower);
        raise_descriptor_limit();
        assert_eq!(getrlimit(Resource::Nofile).current, limit.maximum);
    }
}
