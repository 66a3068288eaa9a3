//! 700 Apps that reference one large ConfigMap.
//!
//! The templates are plain text, and the ConfigMap is just within the size limit. The rendered document of each App
//! contains the whole ConfigMap, and each server has all rendered documents in memory.
//!
//! Attacks the memory that the Apps of one namespace use in every server.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::Result;
use futures::{StreamExt, TryStreamExt, stream};
use kube::{Api, api::ListParams};
use latchkey_crds::{
    app,
    conditions::{ConditionStatus, ConditionType},
};
use latchkey_tests::{
    builders::App,
    cluster::{TestCluster, apply},
};
use serde_json::{Map, Value, json};
use tokio::time::sleep;

use super::{memory_limit, operator_attack::OperatorAttack};
use crate::{measurements::Bound, operator};

const APP_COUNT: usize = 700;
/// Total size of the templates in the ConfigMap, in bytes. The operator accepts up to 256 KiB.
const TEMPLATE_BYTES: usize = 250 * 1024;
const TEMPLATES: [&str; 10] = [
    "confirm.txt",
    "confirm.html",
    "reset.txt",
    "reset.html",
    "account-exists.txt",
    "account-exists.html",
    "password-changed.txt",
    "password-changed.html",
    "new-sign-in.txt",
    "new-sign-in.html",
];
const LINE: &str = "Dear customer, thank you for your patience while you read these terms.\n";
/// How much memory of a server one tenant can use at most, in bytes: a quarter of the server's memory limit.
const MAX_GROWTH: u64 = memory_limit::LIMIT_BYTES / 4;
const CONCURRENCY: usize = 8;
/// The Apps are settled if no App's status has changed for this long.
const SETTLED_AFTER: Duration = Duration::from_secs(20);
/// Time limit until the Apps are settled.
const SETTLED_LIMIT: Duration = Duration::from_secs(240);

pub(super) async fn run() -> Result<Vec<Bound>> {
    let cluster = TestCluster::start().await?;
    let trial = OperatorAttack::start(&cluster).await?;
    let namespace = trial.hostile_namespace();
    let client = trial.install.admin();
    let attack = async {
        apply(&client, &config_map(namespace)).await?;
        stream::iter(0..APP_COUNT)
            .map(|number| {
                let app =
                    App::with_id(&format!("heavy-{number}")).set("/mail/templatesRef", json!({ "name": "heavy" }));
                let client = client.clone();
                async move {
                    for object in app.objects(namespace) {
                        apply(&client, &object).await?;
                    }
                    anyhow::Ok(())
                }
            })
            .buffer_unordered(CONCURRENCY)
            .try_collect::<()>()
            .await?;
        wait_until_settled(&Api::namespaced(client.clone(), namespace)).await
    };
    let ((reasons, settled), mut bounds) = trial.run_during(attack).await?;
    bounds.push(Bound::new(format!("the statuses of the tenant's Apps settle within {SETTLED_LIMIT:?}"), settled));
    bounds.push(trial.growth_bound(MAX_GROWTH));
    let reasons: Vec<_> = reasons.iter().map(|(reason, apps)| format!("{apps} {reason}")).collect();
    println!("  the tenant's {APP_COUNT} Apps: {}", reasons.join(", "));
    Ok(bounds)
}

/// Waits until the Apps are settled, at most for [`SETTLED_LIMIT`]. Returns the number of Apps by the reason why they
/// are not Ready, with `Ready` for Apps that are Ready. Also returns whether the Apps are settled.
async fn wait_until_settled(apps: &Api<app::App>) -> Result<(BTreeMap<String, usize>, bool)> {
    let end = Instant::now() + SETTLED_LIMIT;
    let (mut reasons, mut last_change) = (BTreeMap::new(), Instant::now());
    while last_change.elapsed() < SETTLED_AFTER {
        if Instant::now() >= end {
            return Ok((reasons, false));
        }
        sleep(Duration::from_secs(1)).await;
        let mut current = BTreeMap::new();
        for app in apps.list(&ListParams::default()).await?.items {
            let ready = operator::has_condition(&app, ConditionType::Ready, ConditionStatus::True);
            let mut conditions = app.status.iter().flat_map(|status| &status.conditions);
            let reason = conditions.find(|condition| condition.type_ == ConditionType::Ready.as_str());
            let reason = reason.map_or("not reconciled", |condition| &condition.reason);
            *current.entry(if ready { "Ready".to_owned() } else { reason.to_owned() }).or_default() += 1;
        }
        if current != reasons {
            (reasons, last_change) = (current, Instant::now());
        }
    }
    Ok((reasons, true))
}

fn config_map(namespace: &str) -> Value {
    let text = LINE.repeat(TEMPLATE_BYTES / TEMPLATES.len() / LINE.len());
    let data: Map<String, Value> = TEMPLATES.iter().map(|template| ((*template).to_owned(), json!(text))).collect();
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": "heavy", "namespace": namespace },
        "data": data,
    })
}
