//! Reconciles one App: ownership → resolve → validate → Clients → admit → keys → roll out → status.

use std::sync::Arc;

use kube::{ResourceExt, core::DeserializeGuard};
use latchkey_crds::{
    app::{App, AppStatus},
    conditions::Reason,
};
use time::OffsetDateTime;

use crate::{
    app::{
        finalizer::NextStep,
        keys::{acquire::acquire, policy::KeyPolicy},
        ownership::{OwnershipDecision, OwnershipFacts},
        requeue::{RESYNC, wait_until},
        resolve::{Ownership, resolve},
        rollout::roll_out,
        status::{
            Reconciled,
            write::{write_outcome, write_rejection},
        },
        stop::Stop,
        validate::{Rejection, ValidatedApp, parse_app_id, validate},
    },
    client::{self, gather::AppClients},
    context::Context,
    controller::Action,
    error::Error,
    gather,
    panics::Panicked,
};

pub(crate) mod admission;
pub(crate) mod deletion;
pub(crate) mod events;
pub(crate) mod finalizer;
pub(crate) mod keys;
pub(crate) mod ownership;
pub(crate) mod pages_host;
pub(crate) mod publish;
pub(crate) mod rate_limit;
pub(crate) mod render;
pub(crate) mod requeue;
pub(crate) mod resolve;
pub(crate) mod rollout;
pub(crate) mod status;
pub(crate) mod stop;
pub(crate) mod templates;
pub(crate) mod undecodable;
pub(crate) mod validate;

#[cfg(test)]
pub(crate) mod mock_api;

pub(crate) async fn reconcile(guarded: Arc<DeserializeGuard<App>>, context: Arc<Context>) -> Result<Action, Error> {
    let app = match &guarded.0 {
        Ok(app) => app,
        Err(invalid) => return undecodable::reconcile(&guarded, &invalid.error, &context).await,
    };
    // While this lock is held, the operator does not release the appID: no step of `release.rs` runs.
    let _lock = match app.app_id() {
        Ok(app_id) => Some(context.releases.lock_shared(&app_id).await),
        Err(_) => None,
    };
    match finalizer::update(app, &context).await? {
        NextStep::Serve => {}
        NextStep::DeleteUsers => {
            client::gather::report_deleted_app(app, &context);
            return deletion::delete_users(app, &context).await;
        }
        NextStep::AwaitChange => return Ok(Action::await_change()),
    }
    let old: AppStatus = context.written_statuses.latest(&app.metadata, app.status.clone());
    let result = run_steps(app, &old, &context).await;
    admission::release_reservations(app, &context);
    pages_host::release(app, &context.objects);
    match result {
        Ok(reconciled) => write_outcome(app, &old, reconciled, &context).await,
        Err(Stop::Rejected { rejection, field_errors }) => {
            let due = client::prune::remove_ended_clients(app, &context).await?;
            client::gather::report_rejected_app(app, &context);
            let action = write_rejection(app, &old, rejection, field_errors, &context).await?;
            // `due` is when the Clients must be checked again. It replaces only the wait `RESYNC`: the only other wait,
            // for the rate limiter, is short.
            let is_earlier = |due: &OffsetDateTime| action == Action::requeue(RESYNC) && *due < context.now() + RESYNC;
            Ok(due.filter(is_earlier).map_or(action, |due| Action::requeue(wait_until(due, &context))))
        }
        Err(Stop::Requeue(wait)) => Ok(Action::requeue(wait)),
        Err(Stop::Failed(error)) => Err(error),
    }
}

/// Runs the steps between the update of the finalizer and the write of the status.
async fn run_steps(app: &App, old: &AppStatus, context: &Context) -> Result<Reconciled, Stop> {
    let app_id = parse_app_id(app)?;
    let facts = ownership::gather::for_app(app, &app_id, context).await?;
    let decision = facts.decide();
    let assumed = decision.assumed_ownership().ok_or(Stop::RETRY_SOON)?;
    let objects = gather::for_app(context, app).await?;
    let holds_pages_host = assumed == Ownership::Ours && pages_host::claim(app, &app_id, &context.objects);
    let mut validated = validate(&resolve(app.clone(), assumed, holds_pages_host, &objects), &context.settings)?;
    let mut clients = client::gather::select_for_app(app, &app_id, context).await?;
    validated.clients = std::mem::take(&mut clients.rendered);
    let served = serve(app, old, facts, decision, &validated, clients, context).await;
    served.map_err(|stop| stop.with_field_errors(&validated.field_errors))
}

/// Runs the steps after the validation: admits the App, acquires its keys, and rolls out its document.
async fn serve(
    app: &App,
    old: &AppStatus,
    facts: OwnershipFacts,
    decision: OwnershipDecision,
    validated: &ValidatedApp,
    clients: AppClients,
    context: &Context,
) -> Result<Reconciled, Stop> {
    let policy = KeyPolicy::for_app(validated, app.annotations());
    admission::admit_app(app, validated, &policy, decision, context)?;
    let keys = acquire(facts, decision, &validated.app_id, &policy, context).await?;
    roll_out(app, old, validated, &policy, keys, clients, context).await
}

/// Reports in the App's status that its reconcile panicked. The servers still serve the document that was published
/// before.
pub(crate) async fn report_panic(
    guarded: Arc<DeserializeGuard<App>>,
    context: Arc<Context>,
    panicked: Panicked,
) -> Result<(), Error> {
    let Ok(app) = &guarded.0 else { return Ok(()) };
    pages_host::release(app, &context.objects);
    let old: AppStatus = context.written_statuses.latest(&app.metadata, app.status.clone());
    let rejection = Rejection::new(Reason::InternalError, "", panicked.message());
    write_rejection(app, &old, rejection, Vec::new(), &context).await.map(drop)
}
