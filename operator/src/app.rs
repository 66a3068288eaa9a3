//! The App's reconcile: watch → resolve → validate → keys → render → publish → status.

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
        deletion::{Finalizer, Going},
        keys::{
            KeyDocument,
            lifecycle::KeyPolicy,
            secret::{self as key_secret, Found, Kept},
        },
        owner::{Claim, Decision, Holder, OwnerFacts},
        publish::{Owner, is_published, publish},
        render::{TooLarge, needed_format, render},
        status::{Outcome, says_the_same, write},
        validate::{Refusal, ValidatedApp, validate},
    },
    context::Context,
    error::Error,
    facts::Problem,
    gather,
    panics::Panicked,
    probe::Verdict,
    provider::reconcile::undecodable,
    quota::{Exceeded, Need, Size},
    watch::Guarded,
};

pub(crate) mod deletion;
pub(crate) mod events;
pub(crate) mod keys;
pub(crate) mod owner;
pub(crate) mod publish;
pub(crate) mod render;
pub(crate) mod resolve;
pub(crate) mod status;
pub(crate) mod templates;
pub(crate) mod validate;

#[cfg(test)]
pub(crate) mod scripted;

/// Watches are not missed; this is for what nobody thought of.
const RESYNC: Duration = Duration::from_secs(10 * 60 * 60);
/// For an older claimant that is not judged yet, or keys that somebody else changed just now.
const SOON: Duration = Duration::from_millis(500);
/// For a rotation that waits until the namespace has room. Keys that are due by time wait no longer than that either.
const ROOM: Duration = Duration::from_secs(10 * 60);
/// An edit that all servers acknowledge within this costs one write of the status (design, Acknowledgement).
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(1);
/// Steps of the keys in one reconcile: Published, Active, and one for what nobody thought of.
const KEY_STEPS: usize = 3;

/// How the steps of one App go on.
enum Progress<T> {
    Done(T),
    /// It has no turn yet, or it is not known yet whose the appID is.
    Again(Duration),
}

/// What was published, and what is said of it.
struct Served {
    outcome: Outcome,
    requeue: Duration,
    wrote: bool,
}

pub(crate) async fn reconcile(guarded: Arc<Guarded<App>>, context: Arc<Context>) -> Result<Action, Error> {
    let app = match &guarded.0 {
        Ok(app) => app,
        Err(invalid) => return undecoded(&guarded, &invalid.error, &context).await,
    };
    let _held_off = match app.app_id() {
        Ok(id) => Some(context.releases.hold_off(&id).await),
        Err(_) => None,
    };
    match deletion::finalizer(app) {
        Finalizer::Stay => {}
        Finalizer::Set => deletion::write_finalizer(&context, &app.metadata, true).await?,
        Finalizer::Drop => {
            deletion::write_finalizer(&context, &app.metadata, false).await?;
            if app.metadata.deletion_timestamp.is_some() {
                // It is gone, or other people's finalizers hold it, and the watch tells so.
                return Ok(Action::await_change());
            }
        }
        Finalizer::DeleteUsers => return delete_users(app, &context).await,
    }
    if app.metadata.deletion_timestamp.is_some() {
        // What is left of it is other people's finalizers. It is served until it is gone.
        context.pace.leave(&place(app));
    }
    let old: AppStatus = context.written.latest(&app.metadata, app.status.clone());
    let progress = steps(app, &old, &context).await;
    if let Ok(id) = app.app_id() {
        context.objects.quotas.settle(&id, &rendered_app_secret(&id));
    }
    match progress? {
        Progress::Again(wait) => Ok(Action::requeue(wait)),
        Progress::Done(served) => conclude(app, &old, served, &context).await,
    }
}

/// Reports in the status that a reconcile panicked. What was published before goes on.
pub(crate) async fn report_panic(
    guarded: Arc<Guarded<App>>,
    context: Arc<Context>,
    panicked: Panicked,
) -> Result<(), Error> {
    let Ok(app) = &guarded.0 else { return Ok(()) };
    let old: AppStatus = context.written.latest(&app.metadata, app.status.clone());
    let refusal = Refusal::new(Reason::InternalError, "", panicked.advice());
    conclude(app, &old, refused(app, refusal, Vec::new(), &context), &context).await.map(drop)
}

/// From the facts to the published document.
async fn steps(app: &App, old: &AppStatus, context: &Context) -> Result<Progress<Served>, Error> {
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &context.namespace);
    let (facts, decision) = match app.app_id() {
        // Whose an appID is that is none does not matter: the App is refused for it.
        Err(_) => (None, Decision::Ours),
        Ok(id) => {
            let facts =
                OwnerFacts::gather(&context.client, &secrets, app, &id, other_claims(app, &id, context)).await?;
            let decision = facts.decide();
            (Some(facts), decision)
        }
    };
    let Some(holder) = decision.holder() else { return Ok(Progress::Again(SOON)) };
    let gathered = gather::for_app(context, app).await?;
    let resolved = resolve::resolve(app.clone(), holder, &gathered);
    let validated = match validate(&resolved, &context.settings) {
        Ok(validated) => validated,
        Err(refusal) => return Ok(Progress::Done(refused(app, refusal, Vec::new(), context))),
    };
    let policy = KeyPolicy::of(&validated, app.annotations());
    if decision != Decision::Ours
        && let Some(refusal) = no_room(&validated, &policy, decision, &Claim::of(app), context)?
    {
        // An appID is not taken by an App that cannot be served.
        return Ok(Progress::Done(refused(app, refusal, validated.problems.clone(), context)));
    }
    let keys = match facts {
        Some(facts) => take_keys(facts, decision, &policy, &validated.app_id, &secrets, context).await?,
        None => return Ok(Progress::Again(SOON)),
    };
    match keys {
        TakenKeys::Kept(kept) => {
            context.objects.keys.judged(&validated.app_id, kept.version());
            serve(app, old, &validated, *kept, &policy, &secrets, context).await
        }
        TakenKeys::LookAgain => Ok(Progress::Again(SOON)),
        TakenKeys::Refused(refusal) => Ok(Progress::Done(refused(app, refusal, validated.problems.clone(), context))),
    }
}

/// The keys under which an App is served, or why there are none.
enum TakenKeys {
    Kept(Box<Kept>),
    /// Somebody else was faster.
    LookAgain,
    Refused(Refusal),
}

/// Takes the appID where it may be taken: who makes or changes its key Secret has it.
async fn take_keys(
    facts: OwnerFacts,
    decision: Decision,
    policy: &KeyPolicy,
    app_id: &AppId,
    secrets: &Api<Secret>,
    context: &Context,
) -> Result<TakenKeys, Error> {
    let us = facts.us.holder.clone();
    let taken = match (decision, facts.keys) {
        (Decision::Ours, Found::Kept(kept)) => return Ok(TakenKeys::Kept(kept)),
        (Decision::Inherit | Decision::HandedOver, Found::Kept(kept)) => {
            key_secret::replace(secrets, &kept, &kept.document, &us).await?
        }
        (Decision::Free, _) => {
            let first = KeyDocument::first_of(app_id, policy, context.now())?;
            key_secret::create(secrets, &first, &us).await?
        }
        (Decision::Rebuild, _) => match rendered(secrets, app_id).await? {
            Some(document) => {
                let rebuilt = KeyDocument::of_document(document, context.now()).rebuilt(policy);
                match rebuilt.check(app_id) {
                    Ok(()) => key_secret::create(secrets, &rebuilt, &us).await?,
                    Err(invalid) => {
                        let message = format!(
                            "the key Secret is gone, and the rendered Secret's keys are not usable: {invalid}; \
                             put the key Secret back from a copy"
                        );
                        return Ok(TakenKeys::Refused(Refusal::new(Reason::KeysLost, "", message)));
                    }
                }
            }
            None => {
                let message = "the key Secret is gone, and no keys can be read back from the rendered Secret; \
                               put the key Secret back from a copy, or delete the rendered Secret to start anew";
                return Ok(TakenKeys::Refused(Refusal::new(Reason::KeysLost, "", message)));
            }
        },
        (Decision::Unusable(why), _) => {
            let message = format!(
                "the key Secret of the App cannot be used: {why}; it is never written over: put it back from a copy"
            );
            return Ok(TakenKeys::Refused(Refusal::new(Reason::KeysInvalid, "", message)));
        }
        (
            Decision::Ours
            | Decision::Inherit
            | Decision::HandedOver
            | Decision::Another
            | Decision::Reserved
            | Decision::Wait,
            _,
        ) => None,
    };
    let Some(kept) = taken else { return Ok(TakenKeys::LookAgain) };
    // It counts from now on, not only when the watch reports it.
    context.objects.quotas.keys(app_id, Some(kept.holder.clone()));
    Ok(TakenKeys::Kept(Box::new(kept)))
}

/// The document that is there, for its keys.
async fn rendered(secrets: &Api<Secret>, app_id: &AppId) -> Result<Option<RenderedApp>, Error> {
    let secret = secrets.get_opt(&rendered_app_secret(app_id)).await.map_err(Error::api("read the rendered App"))?;
    let document = secret.and_then(|secret| secret.data?.remove(RENDERED_APP_KEY));
    Ok(document.and_then(|document| std::str::from_utf8(&document.0).ok()?.parse().ok()))
}

/// Renders and publishes, and takes the steps of the keys that are due.
async fn serve(
    app: &App,
    old: &AppStatus,
    validated: &ValidatedApp,
    mut kept: Kept,
    policy: &KeyPolicy,
    secrets: &Api<Secret>,
    context: &Context,
) -> Result<Progress<Served>, Error> {
    let owner = Owner { app_id: &validated.app_id, namespace: &validated.namespace, name: &validated.name };
    let rotation_waits = policy.rotate.is_some()
        && policy.rotate != kept.document.rotation
        && context.objects.quotas.is_full(owner.namespace);
    let policy = &match rotation_waits {
        true => KeyPolicy { rotate: kept.document.rotation.clone(), ..policy.clone() },
        false => policy.clone(),
    };
    let honoured = context.probe.format();
    let (needed, feature) = needed_format(validated);
    let servers_too_old = (honoured < needed).then(|| {
        let pods = context.probe.pods_at_format(honoured).join(", ");
        format!("{feature} needs format {needed}, and these server pods honour only {honoured}: {pods}; upgrade them")
    });
    // What old servers do not know of it they pass over.
    let format = honoured.clamp(needed, FORMAT);
    let mut wrote = false;
    let mut steps = 0;
    let (revision, verdict) = loop {
        let rendered = match render(validated, &kept.document, format).within_limit() {
            Ok(rendered) => rendered,
            Err(TooLarge) => return Ok(Progress::Done(refused(app, too_large(), validated.problems.clone(), context))),
        };
        let secret = rendered_app_secret(owner.app_id);
        let size = Size::of(&rendered.bytes);
        let admitted = context.objects.quotas.admit_document(&secret, owner.namespace, size);
        if let Err((exceeded, need)) = admitted {
            let refusal = waits_for_room(&Claim::of(app), exceeded, need, context);
            return Ok(Progress::Done(refused(app, refusal, validated.problems.clone(), context)));
        }
        let verdict = if is_published(context, owner, &rendered) {
            context.probe.expect(owner.app_id, &rendered.revision)
        } else {
            if !wrote
                && !is_fresh(app, old)
                && let Err(wait) = context.pace.enter(&place(app))
            {
                return Ok(Progress::Again(wait));
            }
            publish(context, owner, &rendered).await?;
            wrote = true;
            context.probe.expect(owner.app_id, &rendered.revision);
            context.probe.wait(owner.app_id, ACKNOWLEDGED_WITHIN).await
        };
        if steps == KEY_STEPS {
            break (rendered.revision, verdict);
        }
        let acknowledged = matches!(verdict, Verdict::All { .. });
        let Some(next) = kept.document.step(policy, context.now(), acknowledged)? else {
            break (rendered.revision, verdict);
        };
        let Some(replaced) = key_secret::replace(secrets, &kept, &next, &kept.holder).await? else {
            return Ok(Progress::Again(SOON));
        };
        context.objects.keys.judged(owner.app_id, replaced.version());
        events::keys_changed(context, app, &kept.document.status(policy), &replaced.document.status(policy)).await;
        kept = replaced;
        steps += 1;
    };
    let (signing_keys, hmac_keys) = kept.document.status(policy);
    let mut problems = validated.problems.clone();
    problems.extend(
        kept.document.problem(policy).map(|message| Problem::new(Reason::InvalidSpec, "metadata.annotations", message)),
    );
    if rotation_waits {
        let message = "the rotation that is asked for waits: the rendered documents of this namespace have as many bytes \
                       as the platform allows; shorten templates and lists, or delete Apps";
        problems.push(Problem::new(Reason::QuotaExceeded, "metadata.annotations", message));
    }
    let due = kept.document.due(policy, context.now()).map(|due| due - context.now());
    let outcome = Outcome {
        app_id: Some(validated.app_id.clone()),
        issuer: Some(validated.issuer.to_string()),
        revision: Some(revision),
        providers: callbacks(validated),
        signing_keys,
        hmac_keys,
        problems,
        verdict: Some(verdict),
        servers_too_old,
        ..Outcome::default()
    };
    // A time that is over is looked at again soon: nothing says that it waits for no acknowledgement.
    let requeue = match due {
        // There may be one step more.
        _ if steps == KEY_STEPS => SOON,
        _ if rotation_waits => ROOM,
        None => RESYNC,
        Some(due) => due.try_into().unwrap_or(SOON).clamp(SOON, RESYNC),
    };
    Ok(Progress::Done(Served { outcome, requeue, wrote }))
}

/// Why the App cannot take its appID: its document would be over the limit with its first keys, or its namespace is at
/// a bound.
fn no_room(
    validated: &ValidatedApp,
    policy: &KeyPolicy,
    decision: Decision,
    claim: &Claim,
    context: &Context,
) -> Result<Option<Refusal>, Error> {
    let keys = KeyDocument::first_of(&validated.app_id, policy, context.now())?;
    let Ok(rendered) = render(validated, &keys, FORMAT).within_limit() else { return Ok(Some(too_large())) };
    let secret = rendered_app_secret(&validated.app_id);
    let size = Size::of(&rendered.bytes);
    let quotas = &context.objects.quotas;
    let admitted = match decision {
        Decision::Free => {
            let ahead = context.objects.ahead_of(claim);
            quotas.admit_app(&validated.app_id, &claim.holder, &secret, size, ahead)
        }
        // It counts already, or the platform team gave it.
        _ => quotas.admit_document(&secret, &validated.namespace, size),
    };
    Ok(admitted.err().map(|(exceeded, need)| waits_for_room(claim, exceeded, need, context)))
}

/// It is reconciled again once there is room.
fn waits_for_room(claim: &Claim, exceeded: Exceeded, need: Need, context: &Context) -> Refusal {
    context.objects.quotas.wait(&claim.holder.namespace, &claim.holder.name, claim.created, need);
    Refusal::new(Reason::QuotaExceeded, "", exceeded.to_string())
}

fn too_large() -> Refusal {
    Refusal::new(Reason::TooLarge, "", TooLarge.to_string())
}

/// What is said of an App that is not accepted: the revision that was published before goes on.
fn refused(app: &App, refusal: Refusal, problems: Vec<Problem>, context: &Context) -> Served {
    let app_id = app.app_id().ok();
    let published = app_id.as_ref().and_then(|id| context.objects.published.get(&rendered_app_secret(id)));
    let ours = published.filter(|published| {
        Some(published.namespace.as_str()) == app.metadata.namespace.as_deref()
            && Some(published.name.as_str()) == app.metadata.name.as_deref()
    });
    let revision = ours.and_then(|published| published.revision);
    if let (Some(id), Some(revision)) = (&app_id, &revision) {
        context.probe.expect(id, revision);
    }
    let outcome = Outcome { app_id, revision, refusal: Some(refusal), problems, ..Outcome::default() };
    Served { outcome, requeue: RESYNC, wrote: false }
}

/// Writes the status where it says something else, and tells people of what changed.
async fn conclude(app: &App, old: &AppStatus, served: Served, context: &Context) -> Result<Action, Error> {
    if served.outcome.refusal.as_ref().is_none_or(|refusal| refusal.reason != Reason::QuotaExceeded) {
        wait_no_more(app, context);
    }
    let generation = app.metadata.generation.unwrap_or(0);
    let mut new = served.outcome.status(old, generation, context.now());
    if served.outcome.refusal.is_some() && new.revision.is_some() {
        // What goes on has the keys and callbacks that it had.
        new.issuer = new.issuer.or_else(|| old.issuer.clone());
        new.providers.clone_from(&old.providers);
        new.signing_keys.clone_from(&old.signing_keys);
        new.hmac_keys.clone_from(&old.hmac_keys);
    }
    if says_the_same(old, &new) {
        context.pace.leave(&place(app));
        return Ok(Action::requeue(served.requeue));
    }
    if !served.wrote
        && !is_fresh(app, old)
        && let Err(wait) = context.pace.enter(&place(app))
    {
        return Ok(Action::requeue(wait));
    }
    write(context, app, &new).await?;
    events::changed(context, app, old, &new).await;
    Ok(Action::requeue(served.requeue))
}

/// It waits for nothing any more, so others can have the room.
fn wait_no_more<K: Resource>(app: &K, context: &Context) {
    let namespace = app.namespace().unwrap_or_default();
    context.objects.quotas.wait_no_more(&namespace, &app.name_any());
    context.wakes.waiting(&context.objects, &namespace);
}

/// An App that this operator cannot read: what was published for it goes on.
async fn undecoded(guarded: &Guarded<App>, error: &str, context: &Context) -> Result<Action, Error> {
    let meta = guarded.meta();
    let namespace = meta.namespace.clone().unwrap_or_default();
    let name = meta.name.clone().unwrap_or_default();
    wait_no_more(guarded, context);
    let resource = ApiResource::erase::<App>(&());
    let api: Api<DynamicObject> = Api::namespaced_with(context.client.clone(), &namespace, &resource);
    let Some(there) = api.get_opt(&name).await.map_err(Error::api("read an App"))? else {
        return Ok(Action::await_change());
    };
    if deletion::is_let_go(&there) {
        deletion::write_finalizer(context, &there.metadata, false).await?;
        return Ok(Action::await_change());
    }
    let old: AppStatus =
        there.data.get("status").and_then(|status| serde_json::from_value(status.clone()).ok()).unwrap_or_default();
    let refusal = Refusal::new(Reason::InvalidSpec, "", undecodable(error));
    let outcome = Outcome { refusal: Some(refusal), ..Outcome::default() };
    let generation = there.metadata.generation.unwrap_or(0);
    let said = outcome.status(&old, generation, context.now());
    let new = AppStatus { conditions: said.conditions, observed_generation: said.observed_generation, ..old.clone() };
    if !says_the_same(&old, &new) {
        write(context, guarded, &new).await?;
    }
    Ok(Action::requeue(RESYNC))
}

/// `deletionPolicy: Delete` of an App that is to go: its document says so, the servers delete the users, and then the
/// document, the keys and the finalizer go.
async fn delete_users(app: &App, context: &Context) -> Result<Action, Error> {
    wait_no_more(app, context);
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &context.namespace);
    let us = Holder { namespace: app.namespace().unwrap_or_default(), name: app.name_any() };
    let Ok(id) = app.app_id() else {
        deletion::write_finalizer(context, &app.metadata, false).await?;
        return Ok(Action::await_change());
    };
    let going = deletion::begin(&secrets, &id, &us).await?;
    let (document, kept) = match going {
        Going::Ours(document, kept) => (document, kept),
        Going::NotOurs => {
            deletion::write_finalizer(context, &app.metadata, false).await?;
            return Ok(Action::await_change());
        }
        Going::Changed => return Ok(Action::requeue(SOON)),
        Going::Stuck(why) => return tell_progress(app, &id, None, deletion::stuck(&why), context).await,
    };
    let owner = Owner { app_id: &id, namespace: &us.namespace, name: &us.name };
    let rendered = deletion::render_gone(&document);
    if !is_published(context, owner, &rendered) {
        context.releases.not_deleted(&id);
        publish(context, owner, &rendered).await?;
        context.probe.expect(&id, &rendered.revision);
        context.probe.wait(&id, ACKNOWLEDGED_WITHIN).await;
    }
    let verdict = context.probe.expect(&id, &rendered.revision);
    let deletion = context.probe.deletion(&id);
    if matches!(verdict, Verdict::All { .. }) && deletion.is_some_and(|deletion| deletion.done) {
        // Until then the database refuses what these requests write. Once another App has the appID, it no longer would.
        if let Some(left) = context.releases.requests_end(&id, &rendered.revision, context.requests_end) {
            return Ok(Action::requeue(left));
        }
        let secret = rendered_app_secret(&id);
        // The lock goes last: until then nobody else can have the appID.
        if let Some(published) = context.objects.published.get(&secret) {
            publish::withdraw(context, &secret, &published).await?;
        }
        context.probe.forget(&id);
        if let Some(kept) = kept
            && !key_secret::remove(&secrets, &kept).await?
        {
            return Ok(Action::requeue(SOON));
        }
        context.releases.not_deleted(&id);
        deletion::write_finalizer(context, &app.metadata, false).await?;
        events::users_deleted(context, app).await;
        return Ok(Action::await_change());
    }
    context.releases.not_deleted(&id);
    let progress = deletion::progress(&verdict, deletion.map(|deletion| deletion.users_left));
    tell_progress(app, &id, Some(rendered.revision), progress, context).await
}

/// Says now and then how far a deletion is, and looks again.
async fn tell_progress(
    app: &App,
    id: &AppId,
    revision: Option<Revision>,
    progress: String,
    context: &Context,
) -> Result<Action, Error> {
    let old: AppStatus = context.written.latest(&app.metadata, app.status.clone());
    let outcome = Outcome { app_id: Some(id.clone()), revision, deleting: Some(progress), ..Outcome::default() };
    let new = outcome.status(&old, app.metadata.generation.unwrap_or(0), context.now());
    if !says_the_same(&old, &new) && context.told.again(&app.uid().unwrap_or_default(), deletion::PROGRESS) {
        write(context, app, &new).await?;
    }
    Ok(Action::requeue(deletion::PROGRESS))
}

/// The other Apps in the store that ask for the same appID.
fn other_claims(app: &App, id: &AppId, context: &Context) -> Vec<Claim> {
    let others = context.objects.apps_with_id(id);
    others
        .iter()
        .filter_map(|other| other.0.as_ref().ok())
        .filter(|other| other.metadata.uid != app.metadata.uid && other.app_id().as_ref() == Ok(id))
        .map(Claim::of)
        .collect()
}

fn callbacks(app: &ValidatedApp) -> Vec<AppProviderStatus> {
    let callback = |name: &latchkey_crds::types::ProviderName| format!("{}/{name}/callback", app.issuer);
    app.providers
        .iter()
        .map(|provider| AppProviderStatus { name: provider.name.to_string(), callback_url: callback(&provider.name) })
        .collect()
}

/// Whether its own owner waits for this: an edit that was not judged yet.
fn is_fresh(app: &App, old: &AppStatus) -> bool {
    app.metadata.generation.is_none() || old.observed_generation != app.metadata.generation
}

fn place(app: &App) -> String {
    format!("App {}/{}", app.namespace().unwrap_or_default(), app.name_any())
}
