//! Renders and publishes the document of an App, and makes the key transitions that are due. After a transition that
//! changes the document, the document is published again.

use std::time::Duration;

use latchkey_crds::{
    app::{App, AppProviderStatus, AppStatus},
    conditions::Reason,
    rendered::{CLIENTS_FORMAT, Revision},
    types::ProviderName,
};

use crate::{
    app::{
        admission, events,
        keys::{
            KeyDocument,
            lifecycle::KeyStatuses,
            policy::KeyPolicy,
            secret::{self as key_secret, Stored},
        },
        publish::{DocumentOwner, is_published, publish},
        rate_limit,
        render::needed_format,
        requeue::{HOST_RETRY, QUOTA_RETRY, RESYNC, RETRY_SOON, wait_until},
        status::{Outcome, Reconciled},
        stop::Stop,
        validate::ValidatedApp,
    },
    client::{gather::AppClients, outcomes::PublishCause, rollout as client_rollout},
    context::Context,
    facts::FieldError,
    monitor::RolloutState,
};

/// How long a reconcile waits for all servers to acknowledge the published document. If they acknowledge it within this
/// time, the status is written only once.
const ACKNOWLEDGEMENT_WAIT: Duration = Duration::from_secs(1);
/// The maximum number of key transitions in one reconcile. Three are enough to rotate the HMAC keys: the new key
/// becomes Published, the new key becomes Active, and the end of the old key is recorded.
const MAX_KEY_TRANSITIONS: usize = 3;

/// The rollout of one App in one reconcile.
struct Rollout<'a> {
    app: &'a App,
    old: &'a AppStatus,
    validated: &'a ValidatedApp,
    policy: KeyPolicy,
    /// The highest format that all serving pods support.
    supported_format: u32,
    context: &'a Context,
    /// Whether this reconcile has published a document.
    has_published: bool,
    /// How many clients are in the document that was rendered last.
    client_count: usize,
    /// Whether each document that this reconcile has published differs only in its clients from the document that was
    /// published before it.
    differs_only_in_clients: bool,
}

/// Publishes the document and makes the next key transition, repeatedly, until no transition is due. Reports the
/// outcome of the App's Clients.
pub(crate) async fn roll_out(
    app: &App,
    old: &AppStatus,
    validated: &ValidatedApp,
    policy: &KeyPolicy,
    mut keys: Stored,
    clients: AppClients,
    context: &Context,
) -> Result<Reconciled, Stop> {
    let rotation_waits = does_rotation_wait(validated, policy, &keys.document, context);
    let mut policy = policy.clone();
    if rotation_waits {
        policy.rotate_request.clone_from(&keys.document.rotation);
    }
    let supported = context.monitor.format();
    policy.id_token_keys_are_read = supported >= CLIENTS_FORMAT;
    let (needed, feature) = needed_format(validated);
    let servers_too_old = (supported < needed).then(|| servers_too_old_message(feature, needed, supported, context));
    // The document is published even if the servers are too old: servers ignore fields that they do not know.
    let mut rollout = Rollout {
        app,
        old,
        validated,
        policy,
        supported_format: supported,
        context,
        has_published: false,
        client_count: 0,
        differs_only_in_clients: false,
    };
    let mut transitions = 0;
    let (revision, state) = loop {
        let (revision, state) = rollout.publish(&keys.document).await?;
        if transitions == MAX_KEY_TRANSITIONS {
            break (revision, state);
        }
        let is_acknowledged = matches!(state, RolloutState::Complete { .. });
        match rollout.advance_keys(&keys, is_acknowledged).await? {
            Some(advanced) => keys = advanced,
            None => break (revision, state),
        }
        transitions += 1;
    };

    let policy = &rollout.policy;
    let requeue = match keys.document.next_due(policy, context.now()) {
        // The loop stopped at the limit, so one more transition may be due.
        _ if transitions == MAX_KEY_TRANSITIONS => RETRY_SOON,
        _ if rotation_waits => QUOTA_RETRY,
        None => RESYNC,
        // If `due` has already passed, the App is reconciled soon. No event would trigger a transition that needs no
        // acknowledgement.
        Some(due) => (due - context.now()).try_into().unwrap_or(RETRY_SOON).clamp(RETRY_SOON, RESYNC),
    };
    let requeue = if validated.waits_for_pages_host() { requeue.min(HOST_RETRY) } else { requeue };
    let requeue = match clients.next_due {
        Some(due) => requeue.min(wait_until(due, context)),
        None => requeue,
    };
    // If clients were left out, the App is reconciled again after `QUOTA_RETRY`, because no event will report when there
    // is room for them.
    let requeue = if rollout.client_count < validated.clients.len() { requeue.min(QUOTA_RETRY) } else { requeue };
    let document =
        client_rollout::Published { app, validated, client_count: rollout.client_count, supported_format: supported };
    let app_rollout = client_rollout::report(document, clients, state, context);
    let KeyStatuses { signing: signing_keys, hmac: hmac_keys } = keys.document.status(policy);
    let outcome = Outcome {
        app_id: Some(validated.app_id.clone()),
        issuer: Some(validated.issuer.to_string()),
        revision: Some(revision),
        providers: callback_statuses(validated),
        signing_keys,
        hmac_keys,
        field_errors: field_errors(validated, policy, &keys.document, rotation_waits),
        rollout: Some(app_rollout.state),
        revisions_with_app_part: app_rollout.revisions,
        webhooks: validated.webhooks.iter().map(|webhook| webhook.name.clone()).collect(),
        webhooks_without_keys: validated
            .webhooks
            .iter()
            .filter(|webhook| webhook.lacks_keys())
            .map(|webhook| webhook.name.clone())
            .collect(),
        webhook_states: context.monitor.webhook_states(&validated.app_id),
        servers_too_old,
        ..Outcome::default()
    };
    Ok(Reconciled {
        outcome,
        requeue,
        published: rollout.has_published,
        differs_only_in_clients: rollout.differs_only_in_clients,
    })
}

// === impl Rollout ===

impl Rollout<'_> {
    /// Publishes the document with these keys, unless this document is published already.
    async fn publish(&mut self, keys: &KeyDocument) -> Result<(Revision, RolloutState), Stop> {
        let Self { app, old, validated, supported_format, context, .. } = *self;
        let rendered = admission::admit_document(app, validated, keys, supported_format, context)?;
        let owner = DocumentOwner { app_id: &validated.app_id, namespace: &validated.namespace, name: &validated.name };
        self.client_count = rendered.client_count;
        let clients = client_rollout::Document { app, validated, rendered: &rendered };
        if is_published(context, owner, &rendered) {
            clients.record_already_published(context);
            let state = context.monitor.expect_revision(owner.app_id, &rendered.revision);
            return Ok((rendered.revision, state));
        }
        // If only the Clients or the keys for their ID tokens have changed, the document waits until the rate limit for
        // Clients allows it. Any other document waits for the rate limiter of Apps, but only if it is the first of this
        // reconcile: a further document differs only in the App's own keys, and does not wait.
        let cause = clients.try_publish(context).map_err(Stop::Requeue)?;
        if cause == PublishCause::App && !self.has_published {
            rate_limit::try_acquire(app, old, context).map_err(Stop::Requeue)?;
        }
        let before = clients.published_revision(context);
        publish(context, owner, &rendered).await?;
        self.differs_only_in_clients =
            cause == PublishCause::Clients && (self.differs_only_in_clients || !self.has_published);
        self.has_published = true;
        clients.record_publish(before.as_ref(), context);
        context.monitor.expect_revision(owner.app_id, &rendered.revision);
        let state = context.monitor.wait_for_rollout(owner.app_id, ACKNOWLEDGEMENT_WAIT).await;
        Ok((rendered.revision, state))
    }

    /// Makes the key transition that is due, and returns the changed keys. Returns `None` if no transition is due.
    async fn advance_keys(&self, keys: &Stored, is_acknowledged: bool) -> Result<Option<Stored>, Stop> {
        let Self { app, validated, ref policy, context, .. } = *self;
        let Some(next) = keys.document.advance(policy, context.now(), is_acknowledged)? else { return Ok(None) };
        let replaced = key_secret::replace(&context.install_secrets(), keys, &next, &keys.owner).await?;
        let Some(replaced) = replaced else { return Err(Stop::RETRY_SOON) };
        context.objects.key_versions.record(&validated.app_id, replaced.version());
        let (before, after) = (keys.document.status(policy), replaced.document.status(policy));
        events::record_key_change(context, app, &before, &after).await;
        Ok(Some(replaced))
    }
}

/// Whether a requested rotation must wait, because the namespace has reached its byte quota: new keys would make the
/// document larger.
fn does_rotation_wait(validated: &ValidatedApp, policy: &KeyPolicy, keys: &KeyDocument, context: &Context) -> bool {
    policy.rotate_request.is_some()
        && policy.rotate_request != keys.rotation
        && context.objects.quotas.is_byte_quota_reached(&validated.namespace)
}

/// Returns the field errors of the validation, and an error for each request in an annotation that cannot be fulfilled.
fn field_errors(
    validated: &ValidatedApp,
    policy: &KeyPolicy,
    keys: &KeyDocument,
    rotation_waits: bool,
) -> Vec<FieldError> {
    const FIELD: &str = "metadata.annotations";
    let mut errors = validated.field_errors.clone();
    errors.extend(keys.request_error(policy).map(|message| FieldError::new(Reason::InvalidSpec, FIELD, message)));
    if rotation_waits {
        let message = "the requested rotation waits: the rendered documents of this namespace have reached the byte \
                       quota of the platform; shorten templates and lists, or delete Apps";
        errors.push(FieldError::new(Reason::QuotaExceeded, FIELD, message));
    }
    errors
}

fn servers_too_old_message(feature: &str, needed: u32, supported: u32, context: &Context) -> String {
    let pods = context.monitor.pods_limited_to_format(supported).join(", ");
    format!(
        "{feature} needs format {needed}, but these server pods support only format {supported}: {pods}; upgrade them"
    )
}

fn callback_statuses(app: &ValidatedApp) -> Vec<AppProviderStatus> {
    let callback = |name: &ProviderName| format!("{}/{name}/callback", app.issuer);
    app.providers
        .iter()
        .map(|provider| AppProviderStatus { name: provider.name.to_string(), callback_url: callback(&provider.name) })
        .collect()
}
