//! Watches the cluster. Each kind has its watches (`streams`). Their events become changes (`changes`). A handler
//! (`handlers`) updates what the operator knows of the cluster (`state`) and queues what the change affects (`queue`).
//!
//! docs/decisions/0031 explains why `kube::runtime::Controller` is not used.

mod changes;
mod client_handlers;
mod client_index;
mod client_secrets;
mod client_store;
mod fair_queue;
mod handlers;
mod index;
mod namespaces;
mod objects;
mod published;
mod queue;
mod state;
mod store;
mod streams;
#[cfg(test)]
mod tests;

use kube::{
    Client,
    runtime::{reflector, watcher},
};
use latchkey_crds::names::{APP_KEYS_TYPE, CLIENT_SECRET_TYPE, RENDERED_APP_TYPE};
use strum::VariantNames;
use tokio::task::JoinHandle;

use self::{
    changes::WatchName,
    handlers::Handlers,
    streams::{client_watches, namespace_watch, watches},
};
pub(crate) use self::{
    client_index::ClientReference,
    client_secrets::{ClientSecretState, KnownSecret},
    client_store::ClientSummary,
    fair_queue::FairQueue,
    index::{NamespacedName, app_name},
    namespaces::Namespaces,
    objects::{WatchedClient, claimed_app_id},
    published::{PublishedApp, app_id_of_secret},
    queue::{QueueReceivers, ReconcileQueue},
    state::ClusterState,
};
use crate::{admin::Health, quota::QuotaLimits};

/// How long a watch lasts before it is opened again. With kube's default, a connection that is dropped silently would
/// stay unnoticed for five minutes.
pub(crate) const WATCH_SECONDS: u32 = 30;
/// The maximum number of objects per page of a list.
const PAGE_SIZE: u32 = 500;
/// The maximum number of rendered Apps or Clients per page of a list. It is less than [`PAGE_SIZE`], because each of
/// them can have hundreds of KiB.
const DOCUMENT_PAGE_SIZE: u32 = 100;
/// The maximum number of Secrets of Clients per page of a list. Anybody who can create Secrets in a namespace can
/// create many of this type with 1 MiB each. The watch holds a whole page in memory, both parsed and as JSON, so 16
/// Secrets need less than 50 MiB.
const CLIENT_SECRET_PAGE_SIZE: u32 = 16;

/// Returns the names under which `/readyz` lists watches that have not finished their first list. Namespaces are
/// watched only if the operator watches all namespaces: a Namespace is not in any namespace, so a Role cannot grant the
/// right to list Namespaces.
pub(crate) fn watch_names(watched_namespaces: &[String]) -> Vec<&'static str> {
    let namespaces: &'static str = WatchName::Namespaces.into();
    let all = WatchName::VARIANTS.iter().copied();
    all.filter(|name| *name != namespaces || watched_namespaces.is_empty()).collect()
}

/// Starts every watch. Each runs until the process ends.
pub(crate) fn start(
    client: &Client,
    namespace: &str,
    watched_namespaces: &[String],
    limits: QuotaLimits,
    health: &Health,
    queue: &ReconcileQueue,
) -> (ClusterState, Vec<JoinHandle<()>>) {
    let (apps, apps_writer) = reflector::store();
    let (providers, providers_writer) = reflector::store();
    let namespaces = if watched_namespaces.is_empty() { Namespaces::watched() } else { Namespaces::default() };
    let objects = ClusterState::new(apps, providers, namespaces, limits);
    let handlers = Handlers { objects: objects.clone(), queue: queue.clone(), health: health.clone() };

    let mut tasks = Vec::new();
    let own_namespace = [namespace.to_owned()];
    let config = watcher::Config::default().timeout(WATCH_SECONDS).page_size(PAGE_SIZE);
    let keys = config.clone().fields(&format!("type={APP_KEYS_TYPE}"));
    let documents = config.clone().page_size(DOCUMENT_PAGE_SIZE).fields(&format!("type={RENDERED_APP_TYPE}"));
    let client_secrets =
        config.clone().page_size(CLIENT_SECRET_PAGE_SIZE).fields(&format!("type={CLIENT_SECRET_TYPE}"));
    let client_config = config.clone().page_size(DOCUMENT_PAGE_SIZE);
    // No App, Provider or Client references the Secrets of Helm releases and ServiceAccounts, and there are many of
    // them. The Secrets of Clients have their own watch.
    let secrets = config.clone().fields(&format!(
        "type!=helm.sh/release.v1,type!=kubernetes.io/service-account-token,type!={CLIENT_SECRET_TYPE}"
    ));
    if watched_namespaces.is_empty() {
        tasks.push(tokio::spawn(handlers.clone().follow_namespaces(vec![namespace_watch(client, config.clone())])));
    }
    tasks.extend([
        tokio::spawn(handlers.clone().follow_apps(watches(client, watched_namespaces, config.clone()), apps_writer)),
        tokio::spawn(
            handlers.clone().follow_providers(watches(client, watched_namespaces, config.clone()), providers_writer),
        ),
        tokio::spawn(handlers.clone().follow_keys(watches(client, &own_namespace, keys))),
        tokio::spawn(handlers.clone().follow_published(watches(client, &own_namespace, documents))),
        tokio::spawn(handlers.clone().follow_secrets(watches(client, watched_namespaces, secrets))),
        tokio::spawn(handlers.clone().follow_clients(client_watches(client, watched_namespaces, client_config))),
        tokio::spawn(handlers.clone().follow_client_secrets(watches(client, watched_namespaces, client_secrets))),
        tokio::spawn(handlers.follow_config_maps(watches(client, watched_namespaces, config))),
    ]);
    (objects, tasks)
}
