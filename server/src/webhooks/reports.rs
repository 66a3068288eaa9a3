//! Reports to the operator whether the events of webhooks reach their receivers and consumers.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use latchkey_crds::{
    types::{AppId, WebhookName},
    webhook::WebhookState,
};
use time::OffsetDateTime;
use tokio::time::sleep;

use crate::{
    config::Apps,
    domain::{
        clock::Env,
        ports::{DeliveryState, KnownWebhook, WebhookEvents, WebhookKey},
        webhook::{Delivery, PushTarget, Webhook},
    },
};

/// The average time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// The maximum number of webhooks in one query.
const WEBHOOKS_PER_QUERY: usize = 500;
/// The number of failures in a row after which the receiver counts as failing.
const MANY_FAILURES: u32 = 10;
/// A consumer counts as behind when its oldest event is older than this.
const MAX_DELAY: time::Duration = time::Duration::hours(24);

/// Reports the states of all webhooks until the future is dropped. While Postgres is unavailable, the last reports
/// stay.
pub async fn report_states<S: WebhookEvents>(stores: S, apps: Arc<Apps>, env: Env) {
    loop {
        let apps_with_webhooks: HashMap<AppId, _> =
            apps.all().into_iter().filter(|app| !app.webhooks.is_empty()).map(|app| (app.id().clone(), app)).collect();
        let webhooks: Vec<KnownWebhook> = apps_with_webhooks
            .values()
            .flat_map(|app| {
                app.webhooks.iter().map(|webhook| KnownWebhook {
                    key: WebhookKey { app: app.id().clone(), webhook: webhook.name.clone() },
                    fingerprint: webhook.fingerprint.clone(),
                })
            })
            .collect();
        let mut reports: BTreeMap<AppId, BTreeMap<WebhookName, WebhookState>> = BTreeMap::new();
        let mut is_complete = true;
        for webhooks in webhooks.chunks(WEBHOOKS_PER_QUERY) {
            let Ok(states) = stores.delivery_states(webhooks).await else {
                // The error is not logged here, because the store logs an outage of Postgres.
                is_complete = false;
                break;
            };
            for KnownWebhook { key, .. } in webhooks {
                let webhook = apps_with_webhooks.get(&key.app).and_then(|app| app.webhook(key.webhook.as_str()));
                let known = states.get(key).cloned().unwrap_or_default();
                let state = webhook.and_then(|webhook| state_of(webhook, &known, env.now()));
                let report = reports.entry(key.app.clone()).or_default();
                report.extend(state.map(|state| (key.webhook.clone(), state)));
            }
        }
        if is_complete {
            for (app, states) in &reports {
                apps.report_webhooks(app, states);
            }
        }
        sleep(REPORT_INTERVAL.mul_f64(0.5 + env.random_unit())).await;
    }
}

/// Returns the state of a webhook, or `None` for a push webhook without a usable key. The condition `ResolvedRefs`
/// reports the missing key.
fn state_of(webhook: &Webhook, known: &DeliveryState, now: OffsetDateTime) -> Option<WebhookState> {
    Some(match &webhook.delivery {
        Delivery::Push(PushTarget { keys: None, .. }) => return None,
        Delivery::Push(_) if known.stopped_for.as_ref() == Some(&webhook.fingerprint) => WebhookState::ReceiverGone,
        Delivery::Push(_) if known.failures >= MANY_FAILURES => WebhookState::ReceiverFails,
        Delivery::Pull(_) if known.oldest.is_some_and(|oldest| now - oldest > MAX_DELAY) => {
            WebhookState::ConsumerBehind
        }
        Delivery::Push(_) | Delivery::Pull(_) => WebhookState::Delivering,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn webhook(delivery: Value) -> Webhook {
        let rendered = json!({ "name": "crm", "events": ["user.created"], "delivery": delivery });
        Webhook::new(&serde_json::from_value(rendered).unwrap()).unwrap()
    }

    #[test]
    fn the_state_of_a_push_webhook_follows_from_its_deliveries() {
        let key = "whsec_aHVzaGh1c2hodXNoaHVzaGh1c2hodXNo";
        let push = |key: Option<&str>| {
            let keys = key.map(|key| json!({ "current": key }));
            webhook(json!({ "push": { "url": "https://crm.example.com/hook", "keys": keys } }))
        };
        let now = OffsetDateTime::UNIX_EPOCH;
        let old = now - time::Duration::days(2);
        let webhook = push(Some(key));
        let state = |known: DeliveryState| state_of(&webhook, &known, now);
        assert_eq!(state(DeliveryState::default()), Some(WebhookState::Delivering));
        let failing = |failures| DeliveryState { failures, stopped_for: None, oldest: Some(old) };
        assert_eq!(state(failing(9)), Some(WebhookState::Delivering));
        assert_eq!(state(failing(10)), Some(WebhookState::ReceiverFails));
        let stopped = |fingerprint: &str| DeliveryState { stopped_for: Some(fingerprint.to_owned()), ..failing(1) };
        assert_eq!(state(stopped(&webhook.fingerprint)), Some(WebhookState::ReceiverGone));
        assert_eq!(state(stopped("of earlier settings")), Some(WebhookState::Delivering));
        assert_eq!(state_of(&push(None), &DeliveryState::default(), now), None);
    }

    #[test]
    fn a_consumer_is_behind_if_an_event_waits_for_more_than_a_day() {
        let webhook = webhook(json!({ "pull": { "namespace": "shop", "name": "sync" } }));
        let now = OffsetDateTime::UNIX_EPOCH;
        let state = |hours| {
            let oldest = Some(now - time::Duration::hours(hours));
            state_of(&webhook, &DeliveryState { oldest, ..DeliveryState::default() }, now)
        };
        assert_eq!(state(24), Some(WebhookState::Delivering));
        assert_eq!(state(25), Some(WebhookState::ConsumerBehind));
    }
}
