//! The Apps of the operator benchmark.

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
    app,
    conditions::{ConditionStatus, ConditionType},
};
use latchkey_tests::{
    builders::{App, Relay},
    cluster::{Installation, apply},
};
use tokio::{sync::oneshot, task::JoinHandle};

/// If there are at most this many Apps, each App has an SMTP Secret.
const MAX_APPS_WITH_SECRETS: usize = 1000;
/// Concurrent requests of the administrator.
const CONCURRENCY: usize = 16;

/// The Apps, spread over the tenants' namespaces.
pub(crate) struct AppSet {
    apps: Vec<(String, App)>,
}

/// Whether a condition has this status for the current generation of the App.
pub(crate) fn has_condition(app: &app::App, type_: ConditionType, wanted: ConditionStatus) -> bool {
    let conditions = app.status.iter().flat_map(|status| &status.conditions);
    conditions
        .filter(|condition| condition.type_ == type_.as_str())
        .any(|condition| condition.status == wanted && condition.observed_generation == app.metadata.generation)
}

// === impl AppSet ===

impl AppSet {
    /// With `with_pages`, the Apps have hosted pages, which their Clients need.
    pub(crate) fn new(install: &Installation<'_>, apps: usize, with_pages: bool) -> Self {
        let make = |(number, tenant): (usize, &String)| {
            let app = App::with_id(&format!("app-{number}"));
            let app = if apps <= MAX_APPS_WITH_SECRETS { app.relay(Relay::of(&install.smtp)) } else { app };
            let app = if with_pages { app.set("/pages/mode", "Enabled") } else { app };
            (tenant.clone(), app)
        };
        Self { apps: (0..apps).zip(install.tenants().iter().cycle()).map(make).collect() }
    }

    pub(crate) fn len(&self) -> usize {
        self.apps.len()
    }

    /// An App and its namespace.
    pub(crate) fn app(&self, number: usize) -> (&str, &App) {
        let (namespace, app) = &self.apps[number];
        (namespace, app)
    }

    /// Creates all Apps and returns how long that took.
    pub(crate) async fn create(&self, client: &Client) -> Result<Duration> {
        let started = Instant::now();
        stream::iter(&self.apps)
            .map(|(namespace, app)| async move {
                for object in app.objects(namespace) {
                    apply(client, &object).await?;
                }
                anyhow::Ok(())
            })
            .buffer_unordered(CONCURRENCY)
            .try_for_each(|()| async { Ok(()) })
            .await?;
        Ok(started.elapsed())
    }

    /// Starts to watch the Apps. The returned task ends when all are Programmed.
    pub(crate) async fn watch_until_programmed(&self, client: &Client) -> Result<JoinHandle<Result<()>>> {
        let apps: Api<app::App> = Api::all(client.clone());
        let wanted = self.len();
        let (listed, listed_receiver) = oneshot::channel();
        let task = tokio::spawn(async move {
            let mut listed = Some(listed);
            let mut programmed = HashSet::new();
            let mut events = watcher::watcher(apps, watcher::Config::default()).boxed();
            while programmed.len() < wanted {
                let event = events.try_next().await?.context("a watch does not end")?;
                match event {
                    Event::InitApply(app) | Event::Apply(app) => {
                        if has_condition(&app, ConditionType::Programmed, ConditionStatus::True) {
                            programmed.insert(app.name_any());
                        }
                    }
                    Event::InitDone => {
                        if let Some(listed) = listed.take() {
                            // The receiver exists, because `watch_until_programmed` waits for this message.
                            let _ = listed.send(());
                        }
                    }
                    Event::Init | Event::Delete(_) => {}
                }
            }
            Ok(())
        });
        listed_receiver.await.context("the watch begins")?;
        Ok(task)
    }
}
