//! The webhooks of an App, with the keys from the Secrets that they reference.

use base64::{Engine, engine::general_purpose::STANDARD};
use latchkey_crds::{
    app::AppSpec,
    conditions::Reason,
    rendered::{RenderedDelivery, RenderedPush, RenderedWebhook, RenderedWebhookKeys, SecretString},
    webhook::{WebhookDelivery, WebhookInclude},
};

use super::{
    Rejection,
    secrets::{SecretError, SecretReference, optional_text, require_values, required_text},
};
use crate::{
    app::resolve::AppFacts,
    facts::{FieldError, Lookup, SecretValues, Settings},
};

/// The prefix of a signing key in the format of Standard Webhooks.
const KEY_PREFIX: &str = "whsec_";

/// Checks again what the schema checks for webhooks: unique names, and `https`.
pub(super) fn check(spec: &AppSpec, settings: &Settings) -> Result<(), Rejection> {
    for (index, webhook) in spec.webhooks.iter().enumerate() {
        if spec.webhooks[..index].iter().any(|earlier| earlier.name == webhook.name) {
            let message = "is already the name of an earlier webhook; set another name";
            return Err(Rejection::new(Reason::InvalidSpec, format!("spec.webhooks[{index}].name"), message));
        }
        if let WebhookDelivery::Push(push) = &webhook.delivery
            && !settings.allow_insecure
            && !push.url.as_str().starts_with("https://")
        {
            return Err(Rejection::new(Reason::InvalidSpec, format!("spec.webhooks[{index}].push.url"), "use https"));
        }
    }
    Ok(())
}

/// Returns the webhooks. If the Secret of a webhook cannot be used, an error is added to `field_errors`, and the events
/// of this webhook wait.
pub(super) fn webhooks(facts: &AppFacts, field_errors: &mut Vec<FieldError>) -> Vec<RenderedWebhook> {
    let webhooks = facts.app.spec.webhooks.iter().zip(&facts.webhook_secrets).enumerate();
    let mut rendered = Vec::new();
    for (index, (webhook, secret)) in webhooks {
        let delivery = match &webhook.delivery {
            WebhookDelivery::Push(push) => {
                let keys = secret.as_ref().ok_or(SecretError::NoSecret).and_then(parse_keys);
                if let Err(error) = &keys {
                    field_errors.push(error.to_field_error(&SecretReference {
                        field: format!("spec.webhooks[{index}].push.secretRef"),
                        name: &push.secret_ref.name,
                        consequence: "The events of this webhook wait until then",
                    }));
                }
                RenderedDelivery::Push(RenderedPush { url: push.url.clone(), keys: keys.ok() })
            }
            WebhookDelivery::Pull(pull) => RenderedDelivery::Pull(pull.service_account.clone()),
        };
        rendered.push(RenderedWebhook {
            name: webhook.name.clone(),
            events: webhook.events.iter().map(|event| event.as_str().to_owned()).collect(),
            include_profile: webhook.include.contains(&WebhookInclude::Profile),
            delivery,
        });
    }
    rendered
}

fn parse_keys(secret: &Lookup<SecretValues>) -> Result<RenderedWebhookKeys, SecretError> {
    let values = require_values(secret)?;
    let checked = |name: &'static str, key: SecretString| {
        if is_signing_key(&key) {
            Ok(key)
        } else {
            Err(SecretError::InvalidKey(name, "must be whsec_ and 24 to 64 bytes in base64"))
        }
    };
    let current = checked("current", required_text(values, "current")?)?;
    let previous = optional_text(values, "previous")?.map(|key| checked("previous", key)).transpose()?;
    Ok(RenderedWebhookKeys { current, previous })
}

fn is_signing_key(text: &SecretString) -> bool {
    let base64 = text.expose().strip_prefix(KEY_PREFIX);
    base64.and_then(|base64| STANDARD.decode(base64).ok()).is_some_and(|key| (24..=64).contains(&key.len()))
}
