//! Reconciles one Client: writes its Secret and its status, as the reconcile of its App has decided.
//!
//! The reconcile of the App selects the Clients and publishes them. A change to a Client triggers both reconciles. If
//! the App has not been reconciled with this generation of the Client yet, the reconcile of the Client does nothing:
//! the reconcile of the App will queue the Client again. But if the App is not accepted, the status of the Client
//! reports this.

use std::{sync::Arc, time::Duration};

use kube::{Resource, ResourceExt};
use latchkey_crds::{
    app::{App, DeletionPolicy},
    client::{Client, ClientStatus},
    conditions::{ConditionStatus, ConditionType, DesiredCondition, Reason},
};

use crate::{
    client::{
        events,
        gather::has_unknown_clients,
        outcomes::ClientOutcome,
        secret::{self, SecretOutcome},
        select::refusal_without_app,
        status::{ClientReport, StatusDigest, accepted, not_programmed, programmed, resolved_refs, unknown_refs},
    },
    context::Context,
    controller::Action,
    error::Error,
    facts::FieldError,
    panics::Panicked,
    status::{with_field, write::send_status},
    undecodable,
    watch::{NamespacedName, WatchedClient, app_name},
};

/// How long a Client waits for the reconcile of its App, before it reports the outcome that is known by then. The App
/// publishes within half a second, and waits up to one second for the servers.
const OUTCOME_WAIT: Duration = Duration::from_secs(3);

/// The wait before a conflicting Secret is read again. Usually a watch event reports the deletion of such a Secret
/// earlier.
const CONFLICT_RETRY: Duration = Duration::from_secs(10 * 60);

pub(crate) async fn reconcile(watched: Arc<WatchedClient>, context: Arc<Context>) -> Result<Action, Error> {
    let client = match &watched.client {
        Ok(client) => client,
        Err(invalid) => return report_undecodable(&watched, &invalid.error, &context).await,
    };
    if client.metadata.deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    let app_name = app_name(client);
    let Some(app) = context.objects.app_of(client) else {
        return report(&watched, &refusal_report(refusal_without_app(client)), &context).await;
    };
    match &app.0 {
        Ok(app) if is_ending(app) || !context.objects.grants_clients(app, &client.namespace().unwrap_or_default()) => {
            return report(&watched, &refusal_report(refusal_without_app(client)), &context).await;
        }
        Ok(_) => {}
        Err(_) => return report_of_undecodable_app(&watched, client, &app_name, &context).await,
    }
    let generation = client.metadata.generation.unwrap_or(0);
    let outcome = context.objects.client_outcomes.get(&app_name, &client.uid().unwrap_or_default());
    match outcome.filter(|outcome| outcome.generation == generation) {
        Some(outcome) => report_outcome(&watched, client, &app_name, &outcome, &context).await,
        None if context.objects.client_outcomes.is_app_rejected(&app_name) => {
            report(&watched, &waiting_report(client), &context).await
        }
        None => Ok(Action::await_change()),
    }
}

/// Whether the App is being deleted together with its users, so that it is not served any more.
fn is_ending(app: &App) -> bool {
    app.metadata.deletion_timestamp.is_some() && app.spec.deletion_policy == DeletionPolicy::Delete
}

/// Reports a new or edited Client of an App that cannot be decoded. The servers continue to serve the last accepted
/// form of the App, so the status of a Client that is neither new nor edited does not change.
async fn report_of_undecodable_app(
    watched: &WatchedClient,
    client: &Client,
    app: &NamespacedName,
    context: &Context,
) -> Result<Action, Error> {
    if watched_status(watched, context).reports(client.metadata.generation.unwrap_or(0)) {
        return Ok(Action::await_change());
    }
    let uid = client.uid().unwrap_or_default();
    if client.is_in_app_namespace() || context.objects.client_outcomes.is_served(app, &uid) {
        return report(watched, &waiting_report(client), context).await;
    }
    if has_unknown_clients(app, context) {
        // The reconcile of the App must read the document first. It then queues the Client.
        return Ok(Action::await_change());
    }
    // What the App grants cannot be read, and another namespace must not learn that the App exists.
    report(watched, &refusal_report(refusal_without_app(client)), context).await
}

/// Reports in the Client's status that its reconcile panicked. The servers still serve what was published before.
pub(crate) async fn report_panic(
    watched: Arc<WatchedClient>,
    context: Arc<Context>,
    panicked: Panicked,
) -> Result<(), Error> {
    let error = FieldError::new(Reason::InternalError, "", panicked.message());
    report(&watched, &refusal_report(error), &context).await.map(drop)
}

/// Updates the Secret of a Client that is accepted or still served as it was accepted last, and reports the outcome.
async fn report_outcome(
    watched: &WatchedClient,
    client: &Client,
    app: &NamespacedName,
    outcome: &ClientOutcome,
    context: &Context,
) -> Result<Action, Error> {
    if (outcome.refusal.is_none() || outcome.is_served)
        && let Ok(client_id) = client.client_id()
    {
        match secret::ensure(context, client, &client_id, &outcome.issuer).await {
            Ok(SecretOutcome::Unchanged | SecretOutcome::Conflict { is_news: false }) => {}
            Ok(changed @ (SecretOutcome::Changed { .. } | SecretOutcome::Conflict { is_news: true })) => {
                // The reconcile of the App publishes the new hashes, and queues this Client if the decision about it
                // changes.
                context.app_triggers.trigger(app.clone(), &context.reconcile_queue);
                if changed == (SecretOutcome::Changed { rotated: true }) {
                    events::record_rotation(context, watched, &client.created_secret().unwrap_or_default()).await;
                }
                return Ok(Action::requeue(OUTCOME_WAIT));
            }
            Err(error) => return report_unwritten_secret(watched, client, outcome, error, context).await,
        }
    }
    let report_of_outcome = outcome_report(client, outcome, watched_status(watched, context));
    let action = report(watched, &report_of_outcome, context).await?;
    let is_conflict = outcome.unresolved.as_ref().is_some_and(|error| error.reason == Reason::SecretConflict);
    Ok(if is_conflict && action == Action::await_change() { Action::requeue(CONFLICT_RETRY) } else { action })
}

/// Reports that the Secret cannot be written, if the API server rejects the write. Other errors are only retried.
async fn report_unwritten_secret(
    watched: &WatchedClient,
    client: &Client,
    outcome: &ClientOutcome,
    error: Error,
    context: &Context,
) -> Result<Action, Error> {
    let Error::Api { source: kube::Error::Api(status), .. } = &error else { return Err(error) };
    if status.code != 403 && status.code != 422 {
        return Err(error);
    }
    let name = client.created_secret().unwrap_or_default();
    // The message of a 422 can quote values of the Secret.
    let why = if status.code == 403 { status.message.as_str() } else { "it is not valid" };
    let message = format!("the API server does not let the operator write Secret {name}: {why}");
    let unresolved = FieldError::new(Reason::SecretNotFound, "spec.web.secret", message);
    let outcome = ClientOutcome { unresolved: Some(Box::new(unresolved)), ..outcome.clone() };
    let reported = report(watched, &outcome_report(client, &outcome, watched_status(watched, context)), context).await;
    // The error is logged and counted. Retries wait as long as after other errors that somebody must fix.
    reported.and(Err(error))
}

/// Reports a Client that the API server stores but this operator cannot decode.
async fn report_undecodable(watched: &WatchedClient, error: &str, context: &Context) -> Result<Action, Error> {
    let Some(object) = undecodable::read::<Client>(context, watched).await? else {
        return Ok(Action::await_change());
    };
    let old: ClientStatus =
        object.data.get("status").and_then(|status| serde_json::from_value(status.clone()).ok()).unwrap_or_default();
    let error = FieldError::new(Reason::InvalidSpec, "", undecodable::message::<Client>(&object, error));
    let mut report = refusal_report(error);
    report.programmed = not_programmed(old.client_id.is_some());
    let digest = StatusDigest::of(&old);
    let generation = object.metadata.generation.unwrap_or(0);
    let conditions = report.status(&digest, generation, context.now()).conditions;
    let new = ClientStatus { observed_generation: Some(generation), conditions, ..old };
    if !digest.is_same_except_times(&StatusDigest::of(&new)) {
        write(watched, &new, context).await?;
    }
    Ok(Action::await_change())
}

/// Writes the status if something other than times changed.
async fn report(watched: &WatchedClient, report: &ClientReport, context: &Context) -> Result<Action, Error> {
    let old = watched_status(watched, context);
    let generation = watched.meta().generation.unwrap_or(0);
    let new = report.status(&old, generation, context.now());
    let digest = StatusDigest::of(&new);
    let limiter_key = format!("{}/{}", watched.namespace().unwrap_or_default(), watched.name_any());
    if old.is_same_except_times(&digest) {
        context.client_rate_limiter.cancel(&limiter_key);
        return Ok(Action::await_change());
    }
    // A status that reports an edit to the Client itself does not wait for the rate limiter: somebody may be waiting
    // for the status.
    if old.reports(generation)
        && let Err(wait) = context.client_rate_limiter.try_acquire(&limiter_key)
    {
        return Ok(Action::requeue(wait));
    }
    write(watched, &new, context).await?;
    events::record_status_change(context, watched, &old, &new).await;
    Ok(Action::await_change())
}

async fn write(watched: &WatchedClient, status: &ClientStatus, context: &Context) -> Result<(), Error> {
    if let Some(version) = send_status(context, watched, status).await? {
        let digest = StatusDigest::of(status);
        context.objects.written_client_statuses.record(&watched.uid().unwrap_or_default(), version, digest);
    }
    Ok(())
}

/// Returns the latest status of a Client.
pub(super) fn watched_status(watched: &WatchedClient, context: &Context) -> StatusDigest {
    let version = watched.resource_version().and_then(|version| version.parse().ok()).unwrap_or(0);
    let uid = watched.uid().unwrap_or_default();
    context.objects.written_client_statuses.latest(&uid, version, watched.status)
}

/// Returns what to report about a Client after the reconcile of its App decided about it.
fn outcome_report(client: &Client, outcome: &ClientOutcome, old: StatusDigest) -> ClientReport {
    let generation = client.metadata.generation.unwrap_or(0);
    let is_named = outcome.refusal.is_none() || outcome.is_served;
    let base = match &outcome.refusal {
        Some(refusal) => {
            let mut report = refusal_report((**refusal).clone());
            report.programmed = not_programmed(outcome.is_served);
            report
        }
        None => ClientReport {
            client_id: None,
            issuer: None,
            secret_name: None,
            accepted: accepted(),
            resolved_refs: resolved_refs(outcome.unresolved.as_deref()),
            programmed: programmed(&outcome.programmed, &old, generation),
        },
    };
    ClientReport {
        client_id: client.client_id().ok().filter(|_| is_named).map(|client_id| client_id.to_string()),
        issuer: Some(outcome.issuer.to_string()).filter(|_| is_named),
        secret_name: client.secret_name().filter(|_| is_named),
        ..base
    }
}

/// Returns what to report about a Client that is not accepted, and not served.
fn refusal_report(refusal: FieldError) -> ClientReport {
    let message = with_field(&refusal.field, &refusal.message);
    ClientReport {
        client_id: None,
        issuer: None,
        secret_name: None,
        accepted: DesiredCondition::new(ConditionType::Accepted, ConditionStatus::False, refusal.reason, message),
        resolved_refs: unknown_refs(),
        programmed: not_programmed(false),
    }
}

/// Returns what to report about a Client of an App that is not accepted itself.
fn waiting_report(client: &Client) -> ClientReport {
    let message = format!("App {} is not accepted; see its conditions", client.spec.app_ref.name);
    let pending = |type_| DesiredCondition::new(type_, ConditionStatus::Unknown, Reason::Pending, message.clone());
    ClientReport {
        client_id: client.client_id().ok().map(|client_id| client_id.to_string()),
        issuer: None,
        secret_name: None,
        accepted: pending(ConditionType::Accepted),
        resolved_refs: unknown_refs(),
        programmed: pending(ConditionType::Programmed),
    }
}

#[cfg(test)]
mod tests;
