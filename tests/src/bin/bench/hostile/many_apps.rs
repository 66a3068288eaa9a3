//! 700 Apps that name one large ConfigMap.
//!
//! The templates are plain text, and the ConfigMap is just within its limit. Each App's document holds all of it, and
//! each server holds all documents.
//!
//! Attacks the memory that the Apps of one namespace take in every server.

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
    cluster::{Cluster, apply},
};
use serde_json::{Map, Value, json};
use tokio::time::sleep;

use super::{limit, operator_trial::OperatorTrial};
use crate::{figures::Bound, fleet};

const APPS: usize = 700;
/// In bytes, over these parts; the operator takes 256 KiB.
const TEMPLATES: usize = 250 * 1024;
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
/// What one tenant may take of each server's memory, in bytes: a quarter.
const MAX_GROWTH: u64 = limit::BYTES / 4;
const AT_A_TIME: usize = 8;
/// When nothing has changed for so long, nothing more will.
const STILL: Duration = Duration::from_secs(20);
const LIMIT: Duration = Duration::from_secs(240);

pub(super) async fn run() -> Result<Vec<Bound>> {
    let cluster = Cluster::start().await?;
    let trial = OperatorTrial::start(&cluster).await?;
    let namespace = trial.hostile_namespace();
    let client = trial.install.admin();
    let attack = async {
        apply(&client, &config_map(namespace)).await?;
        stream::iter(0..APPS)
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
            .buffer_unordered(AT_A_TIME)
            .try_collect::<()>()
            .await?;
        settle(&Api::namespaced(client.clone(), namespace)).await
    };
    let (reasons, mut bounds) = trial.during(attack).await?;
    bounds.push(trial.growth(MAX_GROWTH));
    let reasons: Vec<_> = reasons.iter().map(|(reason, apps)| format!("{apps} {reason}")).collect();
    println!("  the tenant's {APPS} Apps: {}", reasons.join(", "));
    Ok(bounds)
}

/// Waits until the Apps change no more: how many are Ready, or for which reason they are not.
async fn settle(apps: &Api<app::App>) -> Result<BTreeMap<String, usize>> {
    let end = Instant::now() + LIMIT;
    let (mut reasons, mut since) = (BTreeMap::new(), Instant::now());
    while Instant::now() < end && since.elapsed() < STILL {
        sleep(Duration::from_secs(1)).await;
        let mut now = BTreeMap::new();
        for app in apps.list(&ListParams::default()).await?.items {
            let ready = fleet::says(&app, ConditionType::Ready, ConditionStatus::True);
            let mut conditions = app.status.iter().flat_map(|status| &status.conditions);
            let reason = conditions.find(|condition| condition.type_ == ConditionType::Ready.as_str());
            let reason = reason.map_or("not judged", |condition| &condition.reason);
            *now.entry(if ready { "Ready".to_owned() } else { reason.to_owned() }).or_default() += 1;
        }
        if now != reasons {
            (reasons, since) = (now, Instant::now());
        }
    }
    Ok(reasons)
}

fn config_map(namespace: &str) -> Value {
    let text = LINE.repeat(TEMPLATES / PARTS.len() / LINE.len());
    let data: Map<String, Value> = PARTS.iter().map(|part| ((*part).to_owned(), json!(text))).collect();
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": "heavy", "namespace": namespace },
        "data": data,
    })
}
