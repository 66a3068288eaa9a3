//! Apps that are created and deleted, and leave Secrets with their keys behind.
//!
//! A tenant creates an App with `deletionPolicy: Retain`, waits until it has keys, deletes it, and continues with the
//! next appID. No App ever has a user. Each App leaves a Secret with its keys in the installation's namespace, where
//! the tenant's quota does not apply.
//!
//! Attacks the number of those Secrets, which must not grow with the number of deleted Apps.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api,
    api::{DeleteParams, ListParams},
};
use latchkey_crds::{
    app,
    names::{APP_KEYS_TYPE, app_keys_secret},
    types::AppId,
};
use latchkey_tests::{
    builders::App,
    cluster::{TestCluster, apply},
};
use tokio::time::sleep;

use super::operator_attack::OperatorAttack;
use crate::measurements::Bound;

const APPS: usize = 60;
const CONCURRENCY: usize = 4;
/// Time limit for the creation of an App's keys, on a busy machine.
const KEYS_LIMIT: Duration = Duration::from_secs(20);
/// Time limit until the operator has deleted the key Secrets of deleted Apps that had no users.
const RELEASE_LIMIT: Duration = Duration::from_secs(90);
/// Maximum number of key Secrets at the end: the ordinary App's, and those of deletions in progress.
const MAX_KEY_SECRETS: usize = 8;

pub(super) async fn run() -> Result<Vec<Bound>> {
    let cluster = TestCluster::start().await?;
    let trial = OperatorAttack::start(&cluster).await?;
    let namespace = trial.hostile_namespace();
    let client = trial.install.admin();
    let secrets: Api<Secret> = Api::namespaced(client.clone(), trial.install.namespace());
    let apps: Api<app::App> = Api::namespaced(client.clone(), namespace);
    let attack = async {
        let cycles = stream::iter(0..APPS).map(|number| {
            let (client, secrets, apps) = (client.clone(), secrets.clone(), apps.clone());
            async move {
                let id = format!("passing-{number}");
                let app = App::with_id(&id).set("/deletionPolicy", "Retain");
                for object in app.objects(namespace) {
                    apply(&client, &object).await?;
                }
                let keys = app_keys_secret(&id.parse::<AppId>()?);
                let end = Instant::now() + KEYS_LIMIT;
                let mut has_keys = false;
                while !has_keys && Instant::now() < end {
                    sleep(Duration::from_millis(100)).await;
                    has_keys = secrets.get_opt(&keys).await?.is_some();
                }
                apps.delete(&id, &DeleteParams::default()).await?;
                anyhow::Ok(has_keys)
            }
        });
        let apps_with_keys: Vec<bool> = cycles.buffer_unordered(CONCURRENCY).try_collect().await?;
        let apps_with_keys = apps_with_keys.into_iter().filter(|has_keys| *has_keys).count();
        let end = Instant::now() + RELEASE_LIMIT;
        let remaining = loop {
            let remaining =
                secrets.list(&ListParams::default().fields(&format!("type={APP_KEYS_TYPE}"))).await?.items.len();
            if remaining <= MAX_KEY_SECRETS || Instant::now() >= end {
                break remaining;
            }
            sleep(Duration::from_secs(1)).await;
        };
        Ok((apps_with_keys, remaining))
    };
    let ((apps_with_keys, remaining), mut bounds) = trial.run_during(attack).await?;
    ensure!(apps_with_keys > MAX_KEY_SECRETS, "only {apps_with_keys} of {APPS} Apps had keys before they were deleted");
    bounds.push(Bound::new(
        format!(
            "at most {MAX_KEY_SECRETS} key Secrets are left of {apps_with_keys} deleted Apps without users: {remaining}"
        ),
        remaining <= MAX_KEY_SECRETS,
    ));
    Ok(bounds)
}
