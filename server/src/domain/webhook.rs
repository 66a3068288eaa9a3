//! The webhooks of an App: which events are delivered, and how.

use std::{collections::BTreeSet, fmt, time::Duration};

use aws_lc_rs::{
    digest::{self, SHA256},
    hmac,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use latchkey_crds::{
    refs::ServiceAccountRef,
    rendered::{RenderedDelivery, RenderedWebhook, SecretString},
    types::{EndpointUrl, WebhookName},
    webhook::WebhookEvent,
};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use uuid::Uuid;
use zeroize::Zeroizing;

use super::audit::EventKind;

/// A webhook of an App.
#[derive(Debug)]
pub struct Webhook {
    pub name: WebhookName,
    events: BTreeSet<WebhookEvent>,
    /// Whether each event contains the profile of its user.
    pub includes_profile: bool,
    pub delivery: Delivery,
    /// A hash of the settings and the keys of the webhook: it changes when they change. 64 hexadecimal digits.
    pub fingerprint: String,
}

/// How the events of a webhook are delivered.
#[derive(Debug)]
pub enum Delivery {
    Push(PushTarget),
    /// The ServiceAccount that fetches the events.
    Pull(ServiceAccountRef),
}

/// The receiver of a push webhook, and the keys that sign its events.
#[derive(Debug)]
pub struct PushTarget {
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

/// An event in the queue of a webhook.
#[derive(Clone, Debug)]
pub struct QueuedEvent {
    pub id: Uuid,
    /// The number of failed deliveries. For a pull webhook: the number of fetches.
    pub attempts: u32,
    pub kind: EventKind,
    pub at: OffsetDateTime,
    pub user: Option<Uuid>,
    pub session: Option<Uuid>,
    /// The version of the user after the event.
    pub version: Option<i64>,
    pub detail: Option<Value>,
    /// The user as it was when the event was claimed. `None` if the user is deleted.
    pub profile: Option<UserProfile>,
}

/// What a webhook with `include: [Profile]` says about the user of an event.
#[derive(Clone, Serialize, JsonSchema)]
#[schemars(rename = "WebhookUser")]
pub struct UserProfile {
    pub email: Option<String>,
    pub email_verified: bool,
    pub name: String,
    /// `disabled`, `contested`, `unverified` or `active`.
    pub state: &'static str,
    pub external_id: Option<String>,
    pub version: i64,
}

/// An event as receivers and consumers get it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "WebhookEvent")]
pub struct EventBody {
    /// The type of the event, for example `user.created`.
    #[serde(rename = "type")]
    pub event_type: &'static str,
    /// When the event happened (RFC 3339).
    pub timestamp: String,
    pub data: EventData,
}

/// What happened. A field without a value is null.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "WebhookEventData")]
pub struct EventData {
    /// The appID.
    pub app: String,
    pub user_id: Option<String>,
    pub session_id: Option<String>,
    /// The version of the user after the event; only for the types `user.*`. Events can come in any order: the state
    /// with the highest version is the newest. A change of identities does not raise the version.
    pub version: Option<i64>,
    /// More about the event, as in the audit log.
    pub detail: Option<Value>,
    /// Only for a webhook with `include: [Profile]`: the user at the time of the delivery; null if the user is deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<Option<UserProfile>>,
}

/// The delays after the first failed delivery, the second, …; the last one repeats (specification: Administration,
/// Webhooks).
const RETRY_DELAYS: [Duration; 6] = [
    Duration::from_secs(5),
    Duration::from_secs(60),
    Duration::from_secs(5 * 60),
    Duration::from_secs(30 * 60),
    Duration::from_secs(2 * 60 * 60),
    Duration::from_secs(6 * 60 * 60),
];
/// The age of an event at which its delivery is given up.
const MAX_AGE: time::Duration = time::Duration::hours(72);
/// The maximum delay that a `Retry-After` from a receiver can cause. A longer `Retry-After` is shortened to it.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60 * 60);

/// A rendered document contains a webhook key that cannot be used.
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
                Delivery::Push(PushTarget { url: push.url.clone(), keys: keys.transpose()? })
            }
        };
        Ok(Self {
            name: rendered.name.clone(),
            // Names of events that only a later version knows are ignored.
            events: rendered.events.iter().filter_map(|name| name.parse().ok()).collect(),
            includes_profile: rendered.include_profile,
            delivery,
            fingerprint: fingerprint(rendered),
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

/// Returns the names of the webhooks that report events of this kind.
pub fn names_reporting(webhooks: &[Webhook], kind: EventKind) -> Vec<String> {
    let Some(event) = kind.webhook_event() else { return Vec::new() };
    webhooks.iter().filter(|webhook| webhook.reports(event)).map(|webhook| webhook.name.to_string()).collect()
}

/// Returns the SHA-256 of the settings and keys. If it changes, a stopped webhook resumes, so all versions of the
/// server must compute the same fingerprint. Therefore this function lists the settings, instead of hashing the
/// document.
///
/// A setting is encoded as its name, the number of its values, and the values. The length of a name or value in bytes
/// precedes it. Lengths and numbers are 8 bytes, big-endian. So different settings have different encodings. A setting
/// without values is left out: if a later version adds a setting at the end, it changes only the fingerprints of the
/// webhooks that have the setting.
fn fingerprint(rendered: &RenderedWebhook) -> String {
    // The names in the document are used, because this version does not know all events of later versions.
    let events: BTreeSet<&str> = rendered.events.iter().map(String::as_str).collect();
    let (url, consumer, keys) = match &rendered.delivery {
        RenderedDelivery::Push(push) => {
            let keys = push.keys.iter().flat_map(|keys| std::iter::once(&keys.current).chain(&keys.previous));
            (vec![push.url.as_str()], Vec::new(), keys.map(SecretString::expose).collect())
        }
        RenderedDelivery::Pull(consumer) => {
            (Vec::new(), vec![consumer.namespace.as_str(), consumer.name.as_str()], Vec::new())
        }
    };
    let settings: [(&str, Vec<&str>); 5] = [
        ("url", url),
        ("consumer", consumer),
        ("events", events.into_iter().collect()),
        ("include", rendered.include_profile.then_some("Profile").into_iter().collect()),
        ("keys", keys),
    ];
    let mut hash = digest::Context::new(&SHA256);
    for (name, values) in settings.iter().filter(|(_, values)| !values.is_empty()) {
        update_with_text(&mut hash, name);
        hash.update(&(values.len() as u64).to_be_bytes());
        values.iter().for_each(|value| update_with_text(&mut hash, value));
    }
    hash.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn update_with_text(hash: &mut digest::Context, text: &str) {
    hash.update(&(text.len() as u64).to_be_bytes());
    hash.update(text.as_bytes());
}

/// Returns the delay until the next attempt if a delivery fails now, or `None` if the delivery is given up. `attempts`
/// is the number of failures before this one. `random_unit` (0 to 1) varies the delay by ±20 %.
pub fn retry_delay(
    event_at: OffsetDateTime,
    attempts: u32,
    retry_after: Option<Duration>,
    now: OffsetDateTime,
    random_unit: f64,
) -> Option<Duration> {
    let left = Duration::try_from(event_at.saturating_add(MAX_AGE) - now).ok().filter(|left| !left.is_zero())?;
    let index = usize::try_from(attempts).unwrap_or(usize::MAX).min(RETRY_DELAYS.len() - 1);
    let delay = RETRY_DELAYS[index].mul_f64(0.8 + 0.4 * random_unit.clamp(0.0, 1.0));
    Some(delay.max(retry_after.unwrap_or_default().min(MAX_RETRY_AFTER)).min(left))
}

// === impl QueuedEvent ===

impl QueuedEvent {
    /// Returns the event as the receivers of the webhook get it.
    pub fn body(&self, app: &str, webhook: &Webhook) -> EventBody {
        EventBody {
            // Only events that webhooks report are queued, so there is always a type.
            event_type: self.kind.webhook_event().map_or("", WebhookEvent::as_str),
            timestamp: self.at.format(&Rfc3339).unwrap_or_default(),
            data: EventData {
                app: app.to_owned(),
                user_id: self.user.map(|user| user.to_string()),
                session_id: self.session.map(|session| session.to_string()),
                version: self.version,
                detail: self.detail.clone(),
                user: webhook.includes_profile.then(|| self.profile.clone()),
            },
        }
    }
}

// === impl UserProfile ===

impl fmt::Debug for UserProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UserProfile(…)")
    }
}

// === impl SigningKeys ===

impl SigningKeys {
    /// Returns the header `webhook-signature` of Standard Webhooks, with a signature for each key. `timestamp` is in
    /// Unix seconds.
    pub fn sign(&self, id: &str, timestamp: i64, body: &str) -> String {
        let content = format!("{id}.{timestamp}.{body}");
        let signatures = [Some(&self.current), self.previous.as_ref()].into_iter().flatten().map(|key| {
            let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &key.0), content.as_bytes());
            format!("v1,{}", STANDARD.encode(tag))
        });
        signatures.collect::<Vec<_>>().join(" ")
    }
}

// === impl SigningKey ===

impl SigningKey {
    fn parse(text: &SecretString) -> Result<Self, InvalidSigningKey> {
        let base64 = text.expose().strip_prefix("whsec_").ok_or(InvalidSigningKey)?;
        let key = STANDARD.decode(base64).map(Zeroizing::new).map_err(|_| InvalidSigningKey)?;
        if (24..=64).contains(&key.len()) { Ok(Self(key)) } else { Err(InvalidSigningKey) }
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

    fn push_webhook(current: &str, previous: Option<&str>) -> Result<Webhook, InvalidSigningKey> {
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
        let webhook = push_webhook(KEY, Some(KEY)).unwrap();
        let Delivery::Push(PushTarget { keys: Some(keys), .. }) = &webhook.delivery else { panic!("{webhook:?}") };
        assert_eq!(*keys.current.0, b"hushhushhushhushhushhush");
        assert_eq!(keys.previous.as_ref().unwrap().0, keys.current.0);
        let printed = format!("{webhook:?}");
        assert!(!printed.contains("hush") && !printed.contains("aHVz"), "{printed}");
    }

    #[test]
    fn unusable_keys_are_rejected() {
        let too_long = format!("whsec_{}", "A".repeat(88));
        for key in ["", "whsec_", "aHVzaGh1c2hodXNoaHVzaGh1c2hodXNo", "whsec_aHVzaA==", "whsec_?", too_long.as_str()] {
            assert_eq!(push_webhook(key, None).unwrap_err(), InvalidSigningKey, "{key}");
            assert_eq!(push_webhook(KEY, Some(key)).unwrap_err(), InvalidSigningKey, "{key}");
        }
    }

    #[test]
    fn a_webhook_without_a_secret_has_no_keys() {
        let url = "https://crm.example.com/hook";
        let push = json!({ "url": url, "keys": null });
        let push = webhook(json!({ "name": "crm", "events": [], "delivery": { "push": push } }));
        assert!(matches!(push.unwrap().delivery, Delivery::Push(PushTarget { keys: None, .. })));
    }

    #[test]
    fn an_event_name_of_a_later_version_is_ignored() {
        let consumer = json!({ "namespace": "jobs", "name": "sync" });
        let pull = webhook(json!({
            "name": "sync", "events": ["user.created", "user.abducted"], "delivery": { "pull": consumer },
        }));
        let pull = pull.unwrap();
        assert!(pull.reports(WebhookEvent::UserCreated) && !pull.reports(WebhookEvent::UserDeleted));
        assert!(pull.is_pulled_by("jobs", "sync") && !pull.includes_profile);
        assert!(!pull.is_pulled_by("shop", "sync") && !pull.is_pulled_by("jobs", "other"));
    }

    #[test]
    fn the_signature_equals_the_example_of_standard_webhooks() {
        // The example of the specification of Standard Webhooks.
        let webhook = push_webhook("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", Some(KEY)).unwrap();
        let Delivery::Push(PushTarget { keys: Some(keys), .. }) = &webhook.delivery else { panic!("{webhook:?}") };
        let signed = keys.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, r#"{"test": 2432232314}"#);
        let (current, previous) = signed.split_once(' ').unwrap();
        assert_eq!(current, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        assert!(previous.starts_with("v1,") && previous != current);
    }

    /// Builds a push webhook with these settings. `keys`: the current key and, if there are two keys, the previous key.
    fn push_webhook_with(url: &str, events: &[&str], include_profile: bool, keys: &[&str]) -> Webhook {
        let keys = keys.first().map(|current| json!({ "current": current, "previous": keys.get(1) }));
        let push = json!({ "url": url, "keys": keys });
        let rendered = json!({
            "name": "crm", "events": events, "includeProfile": include_profile, "delivery": { "push": push },
        });
        webhook(rendered).unwrap()
    }

    #[test]
    fn the_fingerprint_is_the_same_in_every_version() {
        let url = "https://crm.example.com/hook";
        let consumer = json!({ "namespace": "jobs", "name": "sync" });
        let pull = json!({ "name": "sync", "events": ["user.created"], "delivery": { "pull": consumer } });
        // If these fingerprints change, an update of the server resumes webhooks that receivers have stopped.
        for (webhook, fingerprint) in [
            (
                push_webhook_with(url, &["user.created"], false, &[KEY]),
                "219f93be750c96ea9bae5e2c7253f7e019d66a88938d5d3f940784fd3d28c431",
            ),
            (
                push_webhook_with(url, &["user.created", "user.abducted"], true, &[KEY, KEY]),
                "193bb1562a3ca449047725c1c12a2a79d7c7cf3e55b6d22391d2985a7aa7221f",
            ),
            (webhook(pull).unwrap(), "65939d13a08ef21de4e9ef60facce55d07e3d6928d6272c2281e923d5a858219"),
        ] {
            assert_eq!(webhook.fingerprint, fingerprint, "{webhook:?}");
        }
    }

    #[test]
    fn the_fingerprint_changes_with_the_settings_and_the_keys() {
        let url = "https://crm.example.com/hook";
        let other_key: &str = &format!("whsec_{}", STANDARD.encode([1; 24]));
        let both = ["user.created", "user.deleted"];
        let webhooks = [
            push_webhook_with(url, &both, false, &[KEY]),
            push_webhook_with("https://crm.example.com/", &both, false, &[KEY]),
            push_webhook_with(url, &both[..1], false, &[KEY]),
            push_webhook_with(url, &["user.createduser.deleted"], false, &[KEY]),
            push_webhook_with(url, &[], false, &[KEY]),
            push_webhook_with(url, &both, true, &[KEY]),
            push_webhook_with(url, &both, false, &[]),
            push_webhook_with(url, &both, false, &[other_key]),
            push_webhook_with(url, &both, false, &[KEY, other_key]),
            push_webhook_with(url, &both, false, &[other_key, KEY]),
        ];
        let fingerprints: BTreeSet<&str> = webhooks.iter().map(|webhook| webhook.fingerprint.as_str()).collect();
        assert_eq!(fingerprints.len(), webhooks.len());
        assert!(fingerprints.iter().all(|fingerprint| fingerprint.len() == 64));
        let reordered = push_webhook_with(url, &["user.deleted", "user.created", "user.deleted"], false, &[KEY]);
        assert_eq!(reordered.fingerprint, webhooks[0].fingerprint, "the order of the events does not matter");
    }

    #[test]
    fn deliveries_are_retried_for_three_days() {
        let event_at = OffsetDateTime::UNIX_EPOCH;
        let delay =
            |attempts, random_unit| retry_delay(event_at, attempts, None, event_at, random_unit).unwrap().as_secs();
        assert_eq!([0, 1, 2, 3, 4, 5, 99].map(|attempts| delay(attempts, 0.5)), [5, 60, 300, 1800, 7200, 21600, 21600]);
        assert_eq!([delay(0, 0.0), delay(0, 1.0)], [4, 6]);

        let after = |hours| event_at + time::Duration::hours(hours);
        let hour = Duration::from_secs(3600);
        assert_eq!(retry_delay(event_at, 20, None, after(71), 0.5), Some(hour), "the last delivery");
        assert_eq!(retry_delay(event_at, 20, None, after(72), 0.5), None);
    }

    #[test]
    fn a_receiver_can_ask_for_a_later_delivery() {
        let at = OffsetDateTime::UNIX_EPOCH;
        let delay = |attempts, retry_after| {
            retry_delay(at, attempts, Some(Duration::from_secs(retry_after)), at, 0.5).unwrap().as_secs()
        };
        assert_eq!(delay(0, 8), 8);
        assert_eq!(delay(1, 8), 60, "a shorter time is ignored");
        assert_eq!(delay(0, 1_000_000), 3600, "an hour at most");
    }
}
