//! Reconciles one App: watch → resolve → validate → keys → render → publish → status.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, Resource, ResourceExt,
    api::{ApiResource, DynamicObject},
    runtime::controller::Action,
};
use latchkey_crds::{
    app::{App, AppProviderStatus, AppStatus},
    conditions::Reason,
    names::{RENDERED_APP_KEY, rendered_app_secret},
    rendered::{FORMAT, RenderedApp, Revision},
    types::AppId,
};

use crate::{
    app::{
        deletion::{DeletionState, FinalizerAction},
        keys::{
            KeyDocument,
            lifecycle::KeyPolicy,
            secret::{self as key_secret, KeyLookup, Stored},
        },
        ownership::{AppIdOwner, Claim, OwnershipDecision, OwnershipFacts},
        publish::{DocumentOwner, is_published, publish},
        render::{TooLarge, needed_format, render},
        status::{Outcome, is_same_but_for_times, write_status},
        validate::{Rejection, ValidatedApp, validate},
    },
    context::Context,
    error::Error,
    facts::FieldError,
    gather,
    monitor::RolloutState,
    panics::Panicked,
    provider::reconcile::undecodable_message,
    quota::{Amount, DocumentSize, QuotaExceeded},
    watch::Guarded,
};

pub(crate) mod deletion;
pub(crate) mod events;
pub(crate) mod keys;
pub(crate) mod ownership;
pub(crate) mod publish;
pub(crate) mod render;
pub(crate) mod resolve;
pub(crate) mod status;
pub(crate) mod templates;
pub(crate) mod validate;

#[cfg(test)]
pub(crate) mod mock_api;

/// Watch events trigger every reconcile; the resync is only a safety net.
const RESYNC: Duration = Duration::from_secs(10 * 60 * 60);
/// Retry delay while an older claimant is not validated yet, or after somebody else changed the keys.
const RETRY_SOON: Duration = Duration::from_millis(500);
/// Retry delay for a rotation that waits for room in its namespace. Key changes that are due by time wait no longer
/// than this.
const QUOTA_RETRY: Duration = Duration::from_secs(10 * 60);
/// An edit that all servers acknowledge within this time costs one status write.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(1);
/// At most this many key transitions in one reconcile: Published, Active, and one spare.
const MAX_KEY_TRANSITIONS: usize = 3;

/// Whether the steps of one App finished.
enum Progress<T> {
    Done(T),
    /// Reconcile again after this time: the App has to wait for its turn, or the owner of the appID is not decided yet.
    RequeueAfter(Duration),
}

/// What was published, and the outcome that the status reports.
struct Reconciled {
    outcome: Outcome,
    requeue: Duration,
    wrote: bool,
}

pub(crate) async fn reconcile(guarded: Arc<Guarded<App>>, context: Arc<Context>) -> Result<Action, Error> {
    let app = match &guarded.0 {
        Ok(app) => app,
        Err(invalid) => return reconcile_undecodable(&guarded, &invalid.error, &context).await,
    };
    let _held_off = match app.app_id() {
        Ok(id) => Some(context.releases.lock_shared(&id).await),
        Err(_) => None,
    };
    match deletion::finalizer_action(app) {
        FinalizerAction::Unchanged => {}
        FinalizerAction::Add => deletion::write_finalizer(&context, &app.metadata, true).await?,
        FinalizerAction::Remove => {
            deletion::write_finalizer(&context, &app.metadata, false).await?;
            if app.metadata.deletion_timestamp.is_some() {
                // It is deleted, or other finalizers hold it; the watch reports either.
                return Ok(Action::await_change());
            }
        }
        FinalizerAction::DeleteUsers => return delete_users(app, &context).await,
    }
    if app.metadata.deletion_timestamp.is_some() {
        // Only finalizers of others are left. The App is served until the API server removes it.
        context.rate_limiter.cancel(&object_key(app));
    }
    let old: AppStatus = context.written_statuses.latest(&app.metadata, app.status.clone());
    let progress = run_steps(app, &old, &context).await;
    if let Ok(id) = app.app_id() {
        context.objects.quotas.release_reservations(&id, &rendered_app_secret(&id));
    }
    match progress? {
        Progress::RequeueAfter(wait) => Ok(Action::requeue(wait)),
        Progress::Done(served) => write_outcome(app, &old, served, &context).await,
    }
}

/// Reports a panicked reconcile in the status. What was published before is still served.
pub(crate) async fn report_panic(
    guarded: Arc<Guarded<App>>,
    context: Arc<Context>,
    panicked: Panicked,
) -> Result<(), Error> {
    let Ok(app) = &guarded.0 else { return Ok(()) };
    let old: AppStatus = context.written_statuses.latest(&app.metadata, app.status.clone());
    let refusal = Rejection::new(Reason::InternalError, "", panicked.message());
    write_outcome(app, &old, rejected(app, refusal, Vec::new(), &context), &context).await.map(drop)
}

/// Gathers the facts, validates, gets the keys and publishes the document.
async fn run_steps(app: &App, old: &AppStatus, context: &Context) -> Result<Progress<Reconciled>, Error> {
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &context.namespace);
    let (facts, decision) = match app.app_id() {
        // The owner of an invalid appID does not matter: validation rejects the App.
        Err(_) => (None, OwnershipDecision::Ours),
        Ok(id) => {
            let facts =
                OwnershipFacts::gather(&context.client, &secrets, app, &id, other_claims(app, &id, context)).await?;
            let decision = facts.decide();
            (Some(facts), decision)
        }
    };
    let Some(holder) = decision.assumed_ownership() else { return Ok(Progress::RequeueAfter(RETRY_SOON)) };
    let gathered = gather::for_app(context, app).await?;
    let resolved = resolve::resolve(app.clone(), holder, &gathered);
    let validated = match validate(&resolved, &context.settings) {
        Ok(validated) => validated,
        Err(refusal) => return Ok(Progress::Done(rejected(app, refusal, Vec::new(), context))),
    };
    let policy = KeyPolicy::for_app(&validated, app.annotations());
    if decision != OwnershipDecision::Ours
        && let Some(refusal) = check_quota(&validated, &policy, decision, &Claim::from_app(app), context)?
    {
        // An App that cannot be served must not take an appID.
        return Ok(Progress::Done(rejected(app, refusal, validated.field_errors.clone(), context)));
    }
    let keys = match facts {
        Some(facts) => acquire_keys(facts, decision, &policy, &validated.app_id, &secrets, context).await?,
        None => return Ok(Progress::RequeueAfter(RETRY_SOON)),
    };
    match keys {
        KeyAcquisition::Stored(kept) => {
            context.objects.key_versions.record(&validated.app_id, kept.version());
            render_and_publish(app, old, &validated, *kept, &policy, &secrets, context).await
        }
        KeyAcquisition::Retry => Ok(Progress::RequeueAfter(RETRY_SOON)),
        KeyAcquisition::Rejected(refusal) => {
            Ok(Progress::Done(rejected(app, refusal, validated.field_errors.clone(), context)))
        }
    }
}

/// The keys of an App, or why there are none.
enum KeyAcquisition {
    Stored(Box<Stored>),
    /// Another writer was faster: read and decide again.
    Retry,
    Rejected(Rejection),
}

/// Takes ownership of the appID if the decision allows it. Whoever creates or changes the key Secret owns the appID.
async fn acquire_keys(
    facts: OwnershipFacts,
    decision: OwnershipDecision,
    policy: &KeyPolicy,
    app_id: &AppId,
    secrets: &Api<Secret>,
    context: &Context,
) -> Result<KeyAcquisition, Error> {
    let us = facts.claim.owner.clone();
    let taken = match (decision, facts.keys) {
        (OwnershipDecision::Ours, KeyLookup::Stored(kept)) => return Ok(KeyAcquisition::Stored(kept)),
        (OwnershipDecision::Inherit | OwnershipDecision::HandedOver, KeyLookup::Stored(kept)) => {
            key_secret::replace(secrets, &kept, &kept.document, &us).await?
        }
        (OwnershipDecision::Free, _) => {
            let first = KeyDocument::first_with_policy(app_id, policy, context.now())?;
            key_secret::create(secrets, &first, &us).await?
        }
        (OwnershipDecision::Rebuild, _) => match read_rendered(secrets, app_id).await? {
            Some(document) => {
                let rebuilt = KeyDocument::from_rendered(document, context.now()).restored(policy);
                match rebuilt.validate(app_id) {
                    Ok(()) => key_secret::create(secrets, &rebuilt, &us).await?,
                    Err(invalid) => {
                        let message = format!(
                            "the key Secret is missing, and the keys in the rendered Secret cannot be used: {invalid}; \
                             restore the key Secret from a backup"
                        );
                        return Ok(KeyAcquisition::Rejected(Rejection::new(Reason::KeysLost, "", message)));
                    }
                }
            }
            None => {
                let message = "the key Secret is missing, and the rendered Secret holds no readable keys; \
                               restore the key Secret from a backup, or delete the rendered Secret to start with \
                               new keys";
                return Ok(KeyAcquisition::Rejected(Rejection::new(Reason::KeysLost, "", message)));
            }
        },
        (OwnershipDecision::KeysUnusable(why), _) => {
            let message = format!(
                "the key Secret of the App cannot be used: {why}; it is never overwritten: restore it from a backup"
            );
            return Ok(KeyAcquisition::Rejected(Rejection::new(Reason::KeysInvalid, "", message)));
        }
        (
            OwnershipDecision::Ours
            | OwnershipDecision::Inherit
            | OwnershipDecision::HandedOver
            | OwnershipDecision::OwnedByOther
            | OwnershipDecision::Reserved
            | OwnershipDecision::Wait,
            _,
        ) => None,
    };
    let Some(kept) = taken else { return Ok(KeyAcquisition::Retry) };
    // The quota counts it now, not only when the watch reports it.
    context.objects.quotas.record_keys(app_id, Some(kept.owner.clone()));
    Ok(KeyAcquisition::Stored(Box::new(kept)))
}

/// Reads the rendered document, to recover keys from it.
async fn read_rendered(secrets: &Api<Secret>, app_id: &AppId) -> Result<Option<RenderedApp>, Error> {
    let secret = secrets.get_opt(&rendered_app_secret(app_id)).await.map_err(Error::api("read the rendered App"))?;
    let document = secret.and_then(|secret| secret.data?.remove(RENDERED_APP_KEY));
    Ok(document.and_then(|document| std::str::from_utf8(&document.0).ok()?.parse().ok()))
}

/// Renders and publishes the document, and makes the key transitions that are due.
async fn render_and_publish(
    app: &App,
    old: &AppStatus,
    validated: &ValidatedApp,
    mut kept: Stored,
    policy: &KeyPolicy,
    secrets: &Api<Secret>,
    context: &Context,
) -> Result<Progress<Reconciled>, Error> {
    let owner = DocumentOwner { app_id: &validated.app_id, namespace: &validated.namespace, name: &validated.name };
    let rotation_waits = policy.rotate_request.is_some()
        && policy.rotate_request != kept.document.rotation
        && context.objects.quotas.is_byte_quota_reached(owner.namespace);
    let policy = &match rotation_waits {
        true => KeyPolicy { rotate_request: kept.document.rotation.clone(), ..policy.clone() },
        false => policy.clone(),
    };
    let honoured = context.monitor.format();
    let (needed, feature) = needed_format(validated);
    let servers_too_old = (honoured < needed).then(|| {
        let pods = context.monitor.pods_at_format(honoured).join(", ");
        format!(
            "{feature} needs format {needed}, but these server pods support only format {honoured}: {pods}; \
             upgrade them"
        )
    });
    // Older servers ignore fields that they do not know.
    let format = honoured.clamp(needed, FORMAT);
    let mut wrote = false;
    let mut steps = 0;
    let (revision, verdict) = loop {
        let rendered = match render(validated, &kept.document, format).within_limit() {
            Ok(rendered) => rendered,
            Err(TooLarge) => {
                return Ok(Progress::Done(rejected(app, too_large(), validated.field_errors.clone(), context)));
            }
        };
        let secret = rendered_app_secret(owner.app_id);
        let size = DocumentSize::of(&rendered.bytes);
        let admitted = context.objects.quotas.admit_document(&secret, owner.namespace, size);
        if let Err((exceeded, need)) = admitted {
            let refusal = wait_for_quota(&Claim::from_app(app), exceeded, need, context);
            return Ok(Progress::Done(rejected(app, refusal, validated.field_errors.clone(), context)));
        }
        let verdict = if is_published(context, owner, &rendered) {
            context.monitor.expect_revision(owner.app_id, &rendered.revision)
        } else {
            if !wrote
                && !has_unreported_edit(app, old)
                && let Err(wait) = context.rate_limiter.try_acquire(&object_key(app))
            {
                return Ok(Progress::RequeueAfter(wait));
            }
            publish(context, owner, &rendered).await?;
            wrote = true;
            context.monitor.expect_revision(owner.app_id, &rendered.revision);
            context.monitor.wait_for_rollout(owner.app_id, ACKNOWLEDGED_WITHIN).await
        };
        if steps == MAX_KEY_TRANSITIONS {
            break (rendered.revision, verdict);
        }
        let acknowledged = matches!(verdict, RolloutState::Complete { .. });
        let Some(next) = kept.document.advance(policy, context.now(), acknowledged)? else {
            break (rendered.revision, verdict);
        };
        let Some(replaced) = key_secret::replace(secrets, &kept, &next, &kept.owner).await? else {
            return Ok(Progress::RequeueAfter(RETRY_SOON));
        };
        context.objects.key_versions.record(owner.app_id, replaced.version());
        events::record_key_change(context, app, &kept.document.status(policy), &replaced.document.status(policy)).await;
        kept = replaced;
        steps += 1;
    };
    let (signing_keys, hmac_keys) = kept.document.status(policy);
    let mut problems = validated.field_errors.clone();
    problems.extend(
        kept.document
            .request_problem(policy)
            .map(|message| FieldError::new(Reason::InvalidSpec, "metadata.annotations", message)),
    );
    if rotation_waits {
        let message = "the requested rotation waits: the rendered documents of this namespace have reached the byte \
                       quota of the platform; shorten templates and lists, or delete Apps";
        problems.push(FieldError::new(Reason::QuotaExceeded, "metadata.annotations", message));
    }
    let due = kept.document.next_due(policy, context.now()).map(|due| due - context.now());
    let outcome = Outcome {
        app_id: Some(validated.app_id.clone()),
        issuer: Some(validated.issuer.to_string()),
        revision: Some(revision),
        providers: callback_statuses(validated),
        signing_keys,
        hmac_keys,
        field_errors: problems,
        rollout: Some(verdict),
        servers_too_old,
        ..Outcome::default()
    };
    // If the due time has passed meanwhile, requeue soon: the transition may need no acknowledgement, so no other event
    // would trigger it.
    let requeue = match due {
        // One more transition may be due.
        _ if steps == MAX_KEY_TRANSITIONS => RETRY_SOON,
        _ if rotation_waits => QUOTA_RETRY,
        None => RESYNC,
        Some(due) => due.try_into().unwrap_or(RETRY_SOON).clamp(RETRY_SOON, RESYNC),
    };
    Ok(Progress::Done(Reconciled { outcome, requeue, wrote }))
}

/// Why the App cannot take its appID: its document with its first keys would be too large, or its namespace has reached
/// a quota.
fn check_quota(
    validated: &ValidatedApp,
    policy: &KeyPolicy,
    decision: OwnershipDecision,
    claim: &Claim,
    context: &Context,
) -> Result<Option<Rejection>, Error> {
    let keys = KeyDocument::first_with_policy(&validated.app_id, policy, context.now())?;
    let Ok(rendered) = render(validated, &keys, FORMAT).within_limit() else { return Ok(Some(too_large())) };
    let secret = rendered_app_secret(&validated.app_id);
    let size = DocumentSize::of(&rendered.bytes);
    let quotas = &context.objects.quotas;
    let admitted = match decision {
        OwnershipDecision::Free => {
            let ahead = context.objects.count_ahead_of(claim);
            quotas.admit_app(&validated.app_id, &claim.owner, &secret, size, ahead)
        }
        // The quota counts the appID already, or the platform team assigned it.
        _ => quotas.admit_document(&secret, &validated.namespace, size),
    };
    Ok(admitted.err().map(|(exceeded, need)| wait_for_quota(claim, exceeded, need, context)))
}

/// Records that the App waits. It is reconciled again once the namespace has room.
fn wait_for_quota(claim: &Claim, exceeded: QuotaExceeded, need: Amount, context: &Context) -> Rejection {
    context.objects.quotas.add_waiting(&claim.owner.namespace, &claim.owner.name, claim.created, need);
    Rejection::new(Reason::QuotaExceeded, "", exceeded.to_string())
}

fn too_large() -> Rejection {
    Rejection::new(Reason::TooLarge, "", TooLarge.to_string())
}

/// The outcome of an App that is not accepted. The revision that was published before is still served.
fn rejected(app: &App, refusal: Rejection, problems: Vec<FieldError>, context: &Context) -> Reconciled {
    let app_id = app.app_id().ok();
    let published = app_id.as_ref().and_then(|id| context.objects.published.get(&rendered_app_secret(id)));
    let ours = published.filter(|published| {
        Some(published.namespace.as_str()) == app.metadata.namespace.as_deref()
            && Some(published.name.as_str()) == app.metadata.name.as_deref()
    });
    let revision = ours.and_then(|published| published.revision);
    if let (Some(id), Some(revision)) = (&app_id, &revision) {
        context.monitor.expect_revision(id, revision);
    }
    let outcome = Outcome { app_id, revision, rejection: Some(refusal), field_errors: problems, ..Outcome::default() };
    Reconciled { outcome, requeue: RESYNC, wrote: false }
}

/// Writes the status if it changed in more than time, and records Events for the change.
async fn write_outcome(app: &App, old: &AppStatus, served: Reconciled, context: &Context) -> Result<Action, Error> {
    if served.outcome.rejection.as_ref().is_none_or(|refusal| refusal.reason != Reason::QuotaExceeded) {
        stop_waiting(app, context);
    }
    let generation = app.metadata.generation.unwrap_or(0);
    let mut new = served.outcome.status(old, generation, context.now());
    if served.outcome.rejection.is_some() && new.revision.is_some() {
        // The revision that is still served keeps its keys and callbacks.
        new.issuer = new.issuer.or_else(|| old.issuer.clone());
        new.providers.clone_from(&old.providers);
        new.signing_keys.clone_from(&old.signing_keys);
        new.hmac_keys.clone_from(&old.hmac_keys);
    }
    if is_same_but_for_times(old, &new) {
        context.rate_limiter.cancel(&object_key(app));
        return Ok(Action::requeue(served.requeue));
    }
    if !served.wrote
        && !has_unreported_edit(app, old)
        && let Err(wait) = context.rate_limiter.try_acquire(&object_key(app))
    {
        return Ok(Action::requeue(wait));
    }
    write_status(context, app, &new).await?;
    events::record_status_change(context, app, old, &new).await;
    Ok(Action::requeue(served.requeue))
}

/// Removes the App from those that wait for room, so that others can have it.
fn stop_waiting<K: Resource>(app: &K, context: &Context) {
    let namespace = app.namespace().unwrap_or_default();
    context.objects.quotas.remove_waiting(&namespace, &app.name_any());
    context.reconcile_queue.enqueue_waiting(&context.objects, &namespace);
}

/// Handles an App that does not decode. What was published for it is still served.
async fn reconcile_undecodable(guarded: &Guarded<App>, error: &str, context: &Context) -> Result<Action, Error> {
    let meta = guarded.meta();
    let namespace = meta.namespace.clone().unwrap_or_default();
    let name = meta.name.clone().unwrap_or_default();
    stop_waiting(guarded, context);
    let resource = ApiResource::erase::<App>(&());
    let api: Api<DynamicObject> = Api::namespaced_with(context.client.clone(), &namespace, &resource);
    let Some(there) = api.get_opt(&name).await.map_err(Error::api("read an App"))? else {
        return Ok(Action::await_change());
    };
    if deletion::is_finalizer_removable(&there) {
        deletion::write_finalizer(context, &there.metadata, false).await?;
        return Ok(Action::await_change());
    }
    let old: AppStatus =
        there.data.get("status").and_then(|status| serde_json::from_value(status.clone()).ok()).unwrap_or_default();
    let refusal = Rejection::new(Reason::InvalidSpec, "", undecodable_message(error));
    let outcome = Outcome { rejection: Some(refusal), ..Outcome::default() };
    let generation = there.metadata.generation.unwrap_or(0);
    let said = outcome.status(&old, generation, context.now());
    let new = AppStatus { conditions: said.conditions, observed_generation: said.observed_generation, ..old.clone() };
    if !is_same_but_for_times(&old, &new) {
        write_status(context, guarded, &new).await?;
    }
    Ok(Action::requeue(RESYNC))
}

/// Handles a deleted App with `deletionPolicy: Delete`: publishes its document with the state `PendingDeletion`, waits until
/// the servers have deleted the users, then deletes the document, the keys and the finalizer.
async fn delete_users(app: &App, context: &Context) -> Result<Action, Error> {
    stop_waiting(app, context);
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &context.namespace);
    let us = AppIdOwner { namespace: app.namespace().unwrap_or_default(), name: app.name_any() };
    let Ok(id) = app.app_id() else {
        deletion::write_finalizer(context, &app.metadata, false).await?;
        return Ok(Action::await_change());
    };
    let state = deletion::prepare_deletion(&secrets, &id, &us).await?;
    let (document, kept) = match state {
        DeletionState::Owned(document, kept) => (document, kept),
        DeletionState::NotOwned => {
            deletion::write_finalizer(context, &app.metadata, false).await?;
            return Ok(Action::await_change());
        }
        DeletionState::KeysChanged => return Ok(Action::requeue(RETRY_SOON)),
        DeletionState::KeysUnusable(why) => {
            return report_progress(app, &id, None, deletion::stuck_message(&why), context).await;
        }
    };
    let owner = DocumentOwner { app_id: &id, namespace: &us.namespace, name: &us.name };
    let rendered = deletion::render_unserved(&document);
    if !is_published(context, owner, &rendered) {
        context.releases.forget_deletion(&id);
        publish(context, owner, &rendered).await?;
        context.monitor.expect_revision(&id, &rendered.revision);
        context.monitor.wait_for_rollout(&id, ACKNOWLEDGED_WITHIN).await;
    }
    let verdict = context.monitor.expect_revision(&id, &rendered.revision);
    let deletion = context.monitor.deletion(&id);
    if matches!(verdict, RolloutState::Complete { .. }) && deletion.is_some_and(|deletion| deletion.done) {
        // Until these requests have ended, the database must refuse their writes. Once another App owns the appID, it
        // no longer would.
        if let Some(left) = context.releases.request_drain_left(&id, &rendered.revision, context.request_drain) {
            return Ok(Action::requeue(left));
        }
        let secret = rendered_app_secret(&id);
        // The key Secret is the lock on the appID, so it is deleted after the document: until then no other App can own
        // the appID.
        if let Some(published) = context.objects.published.get(&secret) {
            publish::delete_document(context, &secret, &published).await?;
        }
        context.monitor.forget(&id);
        if let Some(kept) = kept
            && !key_secret::delete(&secrets, &kept).await?
        {
            return Ok(Action::requeue(RETRY_SOON));
        }
        context.releases.forget_deletion(&id);
        deletion::write_finalizer(context, &app.metadata, false).await?;
        events::record_users_deleted(context, app).await;
        return Ok(Action::await_change());
    }
    context.releases.forget_deletion(&id);
    let progress = deletion::progress_message(&verdict, deletion.map(|deletion| deletion.users_left));
    report_progress(app, &id, Some(rendered.revision), progress, context).await
}

/// Reports the progress of a deletion in the status, but not too often, and requeues.
async fn report_progress(
    app: &App,
    id: &AppId,
    revision: Option<Revision>,
    progress: String,
    context: &Context,
) -> Result<Action, Error> {
    let old: AppStatus = context.written_statuses.latest(&app.metadata, app.status.clone());
    let outcome =
        Outcome { app_id: Some(id.clone()), revision, deletion_progress: Some(progress), ..Outcome::default() };
    let new = outcome.status(&old, app.metadata.generation.unwrap_or(0), context.now());
    if !is_same_but_for_times(&old, &new)
        && context.progress_throttle.try_report(&app.uid().unwrap_or_default(), deletion::PROGRESS_INTERVAL)
    {
        write_status(context, app, &new).await?;
    }
    Ok(Action::requeue(deletion::PROGRESS_INTERVAL))
}

/// The other Apps in the store that claim the same appID.
fn other_claims(app: &App, id: &AppId, context: &Context) -> Vec<Claim> {
    let others = context.objects.apps_with_id(id);
    others
        .iter()
        .filter_map(|other| other.0.as_ref().ok())
        .filter(|other| other.metadata.uid != app.metadata.uid && other.app_id().as_ref() == Ok(id))
        .map(Claim::from_app)
        .collect()
}

fn callback_statuses(app: &ValidatedApp) -> Vec<AppProviderStatus> {
    let callback = |name: &latchkey_crds::types::ProviderName| format!("{}/{name}/callback", app.issuer);
    app.providers
        .iter()
        .map(|provider| AppProviderStatus { name: provider.name.to_string(), callback_url: callback(&provider.name) })
        .collect()
}

/// Whether the App has an edit that no status reports yet, so somebody waits for this reconcile.
fn has_unreported_edit(app: &App, old: &AppStatus) -> bool {
    app.metadata.generation.is_none() || old.observed_generation != app.metadata.generation
}

fn object_key(app: &App) -> String {
    format!("App {}/{}", app.namespace().unwrap_or_default(), app.name_any())
}
