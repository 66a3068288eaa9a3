//! Opens the watches: one stream for each watched namespace.

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
use crate::backoff::ShortBackoff;

pub(super) type Watch<K> = BoxStream<'static, watcher::Result<Event<K>>>;

/// One API handle per watched namespace, or one for all namespaces if none is named.
fn apis<K>(client: &Client, watched: &[String]) -> Vec<Api<K>>
where
    K: Resource<Scope = NamespaceResourceScope>,
    K::DynamicType: Default,
{
    match watched {
        [] => vec![Api::all(client.clone())],
        listed => listed.iter().map(|namespace| Api::namespaced(client.clone(), namespace)).collect(),
    }
}

pub(super) fn watches<K>(client: &Client, watched: &[String], config: watcher::Config) -> Vec<Watch<K>>
where
    K: Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Default,
{
    let watch = |api| watcher(api, config.clone()).backoff(ShortBackoff::for_watch()).map(strip_metadata).boxed();
    apis(client, watched).into_iter().map(watch).collect()
}
