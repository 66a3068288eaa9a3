//! 700 Apps that reference one large ConfigMap.
//!
//! The templates are plain text, and the ConfigMap is just within the size limit. The document of each App contains the
//! whole ConfigMap, and each server has all documents in memory.
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
/// Total size of the templates in bytes, spread over the parts below. The operator accepts up to 256 KiB.
const TEMPLATE_BYTES: usize = 250 * 1024;
const PARTS: [&str; 10] = [
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
/// The Apps are settled if nothing has changed for this long.
const SETTLED_AFTER: Duration = Duration::from_secs(20);
const LIMIT: Duration = Duration::from_secs(240);

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
    let (reasons, mut bounds) = trial.run_during(attack).await?;
    bounds.push(trial.growth_bound(MAX_GROWTH));
    let reasons: Vec<_> = reasons.iter().map(|(reason, apps)| format!("{apps} {reason}")).collect();
    println!("  the tenant's {APP_COUNT} Apps: {}", reasons.join(", "));
    Ok(bounds)
}

/// Waits until the Apps no longer change. Returns the number of Apps that are Ready (`Ready`), and for each reason of
/// the other Apps their number.
async fn wait_until_settled(apps: &Api<app::App>) -> Result<BTreeMap<String, usize>> {
    let end = Instant::now() + LIMIT;
    let (mut reasons, mut since) = (BTreeMap::new(), Instant::now());
    while Instant::now() < end && since.elapsed() < SETTLED_AFTER {
        sleep(Duration::from_secs(1)).await;
        let mut now = BTreeMap::new();
        for app in apps.list(&ListParams::default()).await?.items {
            let ready = operator::has_condition(&app, ConditionType::Ready, ConditionStatus::True);
            let mut conditions = app.status.iter().flat_map(|status| &status.conditions);
            let reason = conditions.find(|condition| condition.type_ == ConditionType::Ready.as_str());
            let reason = reason.map_or("not reconciled", |condition| &condition.reason);
            *now.entry(if ready { "Ready".to_owned() } else { reason.to_owned() }).or_default() += 1;
        }
        if now != reasons {
            (reasons, since) = (now, Instant::now());
        }
    }
    Ok(reasons)
}

fn config_map(namespace: &str) -> Value {
    let text = LINE.repeat(TEMPLATE_BYTES / PARTS.len() / LINE.len());
    let data: Map<String, Value> = PARTS.iter().map(|part| ((*part).to_owned(), json!(text))).collect();
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": "heavy", "namespace": namespace },
        "data": data,
    })
}
