//! Watches the cluster. Each kind has its watches (`streams`). Their events become changes (`changes`). A handler
//! (`handlers`) updates what the operator knows of the cluster (`state`) and queues what the change affects (`queue`).
//!
//! docs/decisions/0031 explains why `kube::runtime::Controller` is not used.

mod changes;
mod handlers;
mod index;
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
use latchkey_crds::names::{APP_KEYS_TYPE, RENDERED_APP_TYPE};
use strum::VariantNames;
use tokio::task::JoinHandle;

use self::{changes::WatchName, handlers::Handlers, streams::watches};
pub(crate) use self::{
    index::NamespacedName,
    objects::claimed_app_id,
    published::{PublishedApp, app_id_of_secret},
    queue::{QueueReceivers, ReconcileQueue},
    state::ClusterState,
};
use crate::{admin::Health, quota::QuotaLimits};

/// How long a watch lasts before it is opened again. With kube's default, a connection that is dropped silently would
/// stay unnoticed for five minutes.
pub(crate) const WATCH_SECONDS: u32 = 30;
/// Objects per page of a list.
const PAGE_SIZE: u32 = 500;
/// Rendered Apps per page of a list: fewer, because each can have half a MiB.
const DOCUMENT_PAGE_SIZE: u32 = 100;

/// The names under which `/readyz` lists watches that have not finished their first list.
pub(crate) const WATCHES: &[&str] = WatchName::VARIANTS;

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
    let objects = ClusterState::new(apps, providers, limits);
    let handlers = Handlers { objects: objects.clone(), queue: queue.clone(), health: health.clone() };

    let own_namespace = [namespace.to_owned()];
    let config = watcher::Config::default().timeout(WATCH_SECONDS).page_size(PAGE_SIZE);
    let keys = config.clone().fields(&format!("type={APP_KEYS_TYPE}"));
    let documents = config.clone().page_size(DOCUMENT_PAGE_SIZE).fields(&format!("type={RENDERED_APP_TYPE}"));
    // No App or Provider references the Secrets of Helm releases and ServiceAccounts, and there are many of them.
    let secrets = config.clone().fields("type!=helm.sh/release.v1,type!=kubernetes.io/service-account-token");
    let tasks = vec![
        tokio::spawn(handlers.clone().follow_apps(watches(client, watched_namespaces, config.clone()), apps_writer)),
        tokio::spawn(
            handlers.clone().follow_providers(watches(client, watched_namespaces, config.clone()), providers_writer),
        ),
        tokio::spawn(handlers.clone().follow_keys(watches(client, &own_namespace, keys))),
        tokio::spawn(handlers.clone().follow_published(watches(client, &own_namespace, documents))),
        tokio::spawn(handlers.clone().follow_secrets(watches(client, watched_namespaces, secrets))),
        tokio::spawn(handlers.follow_config_maps(watches(client, watched_namespaces, config))),
    ];
    (objects, tasks)
}
