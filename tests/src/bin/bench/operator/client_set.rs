//! The Clients of the operator benchmark.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{
    Api, Client, ResourceExt,
    runtime::watcher::{self, Event},
};
use latchkey_crds::{
    client,
    conditions::{ConditionStatus, ConditionType},
};
use latchkey_tests::cluster::apply;
use serde_json::{Value, json};

use super::app_set::AppSet;

/// Concurrent requests of the administrator.
const CONCURRENCY: usize = 16;

/// The name of an App's Client with this number.
pub(super) fn name(app: &str, number: usize) -> String {
    format!("{app}-client-{number}")
}

/// Creates `per_app` Clients for each App, in the App's namespace, and waits until all are Ready. Returns how long this
/// took.
pub(super) async fn create_ready(client: &Client, app_set: &AppSet, per_app: usize) -> Result<Duration> {
    let wanted = app_set.len() * per_app;
    let clients: Api<client::Client> = Api::all(client.clone());
    let ready = tokio::spawn(async move {
        let mut ready = HashSet::new();
        let mut events = watcher::watcher(clients, watcher::Config::default()).boxed();
        while ready.len() < wanted {
            match events.try_next().await?.context("a watch does not end")? {
                Event::InitApply(client) | Event::Apply(client) => {
                    if is_ready(&client) {
                        ready.insert(client.name_any());
                    }
                }
                Event::Init | Event::InitDone | Event::Delete(_) => {}
            }
        }
        anyhow::Ok(())
    });
    let started = Instant::now();
    let objects = (0..app_set.len()).flat_map(|index| {
        let (namespace, app) = app_set.app(index);
        (0..per_app).map(move |number| object(namespace, app.id(), number))
    });
    stream::iter(objects)
        .map(|object| async move { apply(client, &object).await.map(drop) })
        .buffer_unordered(CONCURRENCY)
        .try_for_each(|()| async { Ok(()) })
        .await?;
    println!("  {wanted} Clients created by the administrator in {:.1} s", started.elapsed().as_secs_f64());
    ready.await??;
    Ok(started.elapsed())
}

fn object(namespace: &str, app: &str, number: usize) -> Value {
    json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "Client",
        "metadata": { "name": name(app, number), "namespace": namespace },
        "spec": {
            "appRef": { "name": app },
            "web": { "redirectURLs": [format!("https://{app}-{number}.example.com/login/generic_oauth")] },
        },
    })
}

fn is_ready(client: &client::Client) -> bool {
    let conditions = client.status.iter().flat_map(|status| &status.conditions);
    conditions
        .filter(|condition| condition.type_ == ConditionType::Ready.as_str())
        .any(|condition| condition.status == ConditionStatus::True)
}
