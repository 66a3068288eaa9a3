//! Watches the cluster: a store for each kind that the operator needs in full, and a reconcile queue for what changes
//! affect.

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

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{
    Client,
    runtime::{reflector, watcher},
};
use latchkey_crds::names::{APP_KEYS_TYPE, RENDERED_APP_TYPE};

use self::{
    handlers::{follow_apps, follow_config_maps, follow_keys, follow_providers, follow_published, follow_secrets},
    objects::Metadata,
    streams::watches,
};
pub(crate) use self::{
    index::NamespacedName,
    objects::{Guarded, claimed_app_id},
    published::{PublishedApp, app_id_of_secret},
    queue::ReconcileQueue,
    state::ClusterState,
};
use crate::{admin::Health, quota::QuotaLimits};

/// A watch that is dropped silently would otherwise stay unnoticed for five minutes.
pub(crate) const WATCH_SECONDS: u32 = 30;
/// Objects per page of a list. Rendered Apps can have half a MiB each.
const PAGE_SIZE: u32 = 500;
const DOCUMENT_PAGE_SIZE: u32 = 100;

/// The names under which `/readyz` lists watches that have not finished their first list.
pub(crate) const WATCHES: [&str; 6] = ["apps", "providers", "keys", "rendered apps", "secrets", "configmaps"];

/// Starts every watch. Each runs until the process ends.
pub(crate) fn start(
    client: &Client,
    namespace: &str,
    watched: &[String],
    limits: QuotaLimits,
    health: &Health,
    queue: &ReconcileQueue,
) -> (ClusterState, Vec<tokio::task::JoinHandle<()>>) {
    let (apps, apps_writer) = reflector::store();
    let (providers, providers_writer) = reflector::store();
    let objects = ClusterState::new(apps, providers, limits);

    let config = || watcher::Config::default().timeout(WATCH_SECONDS).page_size(PAGE_SIZE);
    // Secrets of Helm releases and ServiceAccounts are never client secrets, and there are many of them.
    let secrets = || config().fields("type!=helm.sh/release.v1,type!=kubernetes.io/service-account-token");
    let tasks = vec![
        tokio::spawn(follow_apps(
            watches(client, watched, config()),
            apps_writer,
            objects.clone(),
            queue.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_providers(
            watches(client, watched, config()),
            providers_writer,
            objects.clone(),
            queue.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_keys(
            watches(client, &[namespace.to_owned()], config().fields(&format!("type={APP_KEYS_TYPE}"))),
            objects.clone(),
            queue.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_published(
            watches(
                client,
                &[namespace.to_owned()],
                config().page_size(DOCUMENT_PAGE_SIZE).fields(&format!("type={RENDERED_APP_TYPE}")),
            ),
            objects.clone(),
            queue.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_secrets(
            watches::<Metadata<Secret>>(client, watched, secrets()),
            objects.clone(),
            queue.clone(),
            health.clone(),
        )),
        tokio::spawn(follow_config_maps(
            watches::<Metadata<ConfigMap>>(client, watched, config()),
            objects.clone(),
            queue.clone(),
            health.clone(),
        )),
    ];
    (objects, tasks)
}
