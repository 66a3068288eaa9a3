//! The webhooks of an App: which events are delivered, and how.

use std::{collections::BTreeSet, fmt};

use base64::{Engine, engine::general_purpose::STANDARD};
use latchkey_crds::{
    refs::ServiceAccountRef,
    rendered::{RenderedDelivery, RenderedWebhook, SecretString},
    types::{EndpointUrl, WebhookName},
    webhook::WebhookEvent,
};
use zeroize::Zeroizing;

/// A webhook of an App.
#[derive(Debug)]
pub struct Webhook {
    pub name: WebhookName,
    events: BTreeSet<WebhookEvent>,
    /// Whether each event has the profile of its user.
    pub includes_profile: bool,
    pub delivery: Delivery,
}

/// How the events of a webhook are delivered.
#[derive(Debug)]
pub enum Delivery {
    Push(Push),
    /// The ServiceAccount that fetches the events.
    Pull(ServiceAccountRef),
}

/// A receiver of events.
#[derive(Debug)]
pub struct Push {
    pub url: EndpointUrl,
    /// `None` if the App's Secret cannot be used. Events wait until it can be used.
    pub keys: Option<SigningKeys>,
}

/// The keys that sign events. An event has one signature for each key, so that the receiver can replace its key at any
/// time during a rotation.
#[derive(Debug)]
pub struct SigningKeys {
    pub current: SigningKey,
    pub previous: Option<SigningKey>,
}

/// A key of Standard Webhooks: 24–64 bytes.
pub struct SigningKey(Zeroizing<Vec<u8>>);

/// The key of a webhook in a document cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key of a webhook is not whsec_ and 24 to 64 bytes in base64")]
pub struct InvalidSigningKey;

// === impl Webhook ===

impl Webhook {
    pub fn new(rendered: &RenderedWebhook) -> Result<Self, InvalidSigningKey> {
        let delivery = match &rendered.delivery {
            RenderedDelivery::Pull(consumer) => Delivery::Pull(consumer.clone()),
            RenderedDelivery::Push(push) => {
                let keys = push.keys.as_ref().map(|keys| {
                    let current = SigningKey::parse(&keys.current)?;
                    let previous = keys.previous.as_ref().map(SigningKey::parse).transpose()?;
                    Ok(SigningKeys { current, previous })
                });
                Delivery::Push(Push { url: push.url.clone(), keys: keys.transpose()? })
            }
        };
        Ok(Self {
            name: rendered.name.clone(),
            // A later version can have events that this version does not know.
            events: rendered.events.iter().filter_map(|name| name.parse().ok()).collect(),
            includes_profile: rendered.include_profile,
            delivery,
        })
    }

    pub fn reports(&self, event: WebhookEvent) -> bool {
        self.events.contains(&event)
    }

    /// Whether the ServiceAccount can fetch and acknowledge the events.
    pub fn is_pulled_by(&self, namespace: &str, service_account: &str) -> bool {
        match &self.delivery {
            Delivery::Push(_) => false,
            Delivery::Pull(consumer) => consumer.namespace == namespace && consumer.name == service_account,
        }
    }
}

// === impl SigningKey ===

impl SigningKey {
    fn parse(text: &SecretString) -> Result<Self, InvalidSigningKey> {
        let base64 = text.expose().strip_prefix("whsec_").ok_or(InvalidSigningKey)?;
        let key = STANDARD.decode(base64).map(Zeroizing::new).map_err(|_| InvalidSigningKey)?;
        if (24..=64).contains(&key.len()) { Ok(Self(key)) } else { Err(InvalidSigningKey) }
    }

    /// The key itself. Call this only to sign.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningKey(…)")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const KEY: &str = "whsec_aHVzaGh1c2hodXNoaHVzaGh1c2hodXNo";

    fn webhook(rendered: Value) -> Result<Webhook, InvalidSigningKey> {
        Webhook::new(&serde_json::from_value(rendered).unwrap())
    }

    fn push(current: &str, previous: Option<&str>) -> Result<Webhook, InvalidSigningKey> {
        let mut keys = json!({ "current": current });
        if let Some(previous) = previous {
            keys["previous"] = json!(previous);
        }
        let url = "https://crm.example.com/hook";
        let push = json!({ "url": url, "keys": keys });
        webhook(json!({ "name": "crm", "events": ["user.created"], "delivery": { "push": push } }))
    }

    #[test]
    fn the_keys_of_a_push_webhook_are_decoded_and_not_printed() {
        let webhook = push(KEY, Some(KEY)).unwrap();
        let Delivery::Push(Push { keys: Some(keys), .. }) = &webhook.delivery else { panic!("{webhook:?}") };
        assert_eq!(keys.current.expose(), b"hushhushhushhushhushhush");
        assert_eq!(keys.previous.as_ref().unwrap().expose(), keys.current.expose());
        let printed = format!("{webhook:?}");
        assert!(!printed.contains("hush") && !printed.contains("aHVz"), "{printed}");
    }

    #[test]
    fn unusable_keys_are_rejected() {
        let too_long = format!("whsec_{}", "A".repeat(88));
        for key in ["", "whsec_", "aHVzaGh1c2hodXNoaHVzaGh1c2hodXNo", "whsec_aHVzaA==", "whsec_?", too_long.as_str()] {
            assert_eq!(push(key, None).unwrap_err(), InvalidSigningKey, "{key}");
            assert_eq!(push(KEY, Some(key)).unwrap_err(), InvalidSigningKey, "{key}");
        }
    }

    #[test]
    fn a_webhook_without_a_secret_has_no_keys() {
        let url = "https://crm.example.com/hook";
        let push = json!({ "url": url, "keys": null });
        let push = webhook(json!({ "name": "crm", "events": [], "delivery": { "push": push } }));
        assert!(matches!(push.unwrap().delivery, Delivery::Push(Push { keys: None, .. })));
    }

    #[test]
    fn an_event_of_a_later_version_is_ignored() {
        let consumer = json!({ "namespace": "jobs", "name": "sync" });
        let pull = webhook(json!({
            "name": "sync", "events": ["user.created", "user.abducted"], "delivery": { "pull": consumer },
        }));
        let pull = pull.unwrap();
        assert!(pull.reports(WebhookEvent::UserCreated) && !pull.reports(WebhookEvent::UserDeleted));
        assert!(pull.is_pulled_by("jobs", "sync") && !pull.includes_profile);
        assert!(!pull.is_pulled_by("shop", "sync") && !pull.is_pulled_by("jobs", "other"));
    }
}
