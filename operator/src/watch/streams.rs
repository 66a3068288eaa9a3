//! Opens the watches of a kind: one stream for each watched namespace.

use std::fmt::Debug;

use futures::{StreamExt, stream::BoxStream};
use k8s_openapi::{api::core::v1::Namespace, serde::de::DeserializeOwned};
use kube::{
    Api, Client, Resource,
    core::{DeserializeGuard, NamespaceResourceScope},
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use latchkey_crds::client::Client as ClientResource;

use super::objects::{Metadata, WatchedClient, strip_metadata};
use crate::backoff;

/// The events of one watch. The watch retries forever.
pub(super) type Watch<K> = BoxStream<'static, watcher::Result<Event<K>>>;

/// Opens one watch for each of these namespaces. An empty list means one watch for all namespaces.
pub(super) fn watches<K>(client: &Client, namespaces: &[String], config: watcher::Config) -> Vec<Watch<K>>
where
    K: Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Default,
{
    let watch = |api| watcher(api, config.clone()).backoff(backoff::for_watch()).map(strip_metadata).boxed();
    match namespaces {
        [] => vec![watch(Api::all(client.clone()))],
        named => named.iter().map(|namespace| watch(Api::namespaced(client.clone(), namespace))).collect(),
    }
}

/// Opens the watches of Clients. Only a digest of the status of each Client is kept.
pub(super) fn client_watches(
    client: &Client,
    namespaces: &[String],
    config: watcher::Config,
) -> Vec<Watch<WatchedClient>> {
    let watches = watches::<DeserializeGuard<ClientResource>>(client, namespaces, config);
    watches.into_iter().map(|watch| watch.map(|event| event.map(to_watched_client)).boxed()).collect()
}

/// Opens the watch of all Namespaces. Their labels are kept.
pub(super) fn namespace_watch(client: &Client, config: watcher::Config) -> Watch<Metadata<Namespace>> {
    watcher(Api::all(client.clone()), config).backoff(backoff::for_watch()).boxed()
}

fn to_watched_client(event: Event<DeserializeGuard<ClientResource>>) -> Event<WatchedClient> {
    match event {
        Event::Apply(client) => Event::Apply(client.into()),
        Event::Delete(client) => Event::Delete(client.into()),
        Event::Init => Event::Init,
        Event::InitApply(client) => Event::InitApply(client.into()),
        Event::InitDone => Event::InitDone,
    }
}
