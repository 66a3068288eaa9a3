//! Opens the watches of a kind: one stream for each watched namespace.

use std::fmt::Debug;

use futures::{StreamExt, stream::BoxStream};
use k8s_openapi::serde::de::DeserializeOwned;
use kube::{
    Api, Client, Resource,
    core::NamespaceResourceScope,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};

use super::objects::strip_metadata;
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
