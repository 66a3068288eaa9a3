//! A Provider's reconcile: resolve, validate, status. What it is for is rendered with each App that names it.

use std::{sync::Arc, time::Duration};

use kube::{ResourceExt, runtime::controller::Action};
use latchkey_crds::{
    conditions::{ConditionStatus, ConditionType, Reason, Wanted, merge, same_but_for_time},
    provider::{Provider, ProviderStatus},
};
use time::OffsetDateTime;

use crate::{
    app::status::{located, problems_wanted, time, write},
    context::Context,
    error::Error,
    facts::Problem,
    gather,
    provider::{
        resolve::resolve,
        validate::{ValidatedProvider, validate},
    },
    watch::Guarded,
};

/// Watches are not missed; this is for what nobody thought of (kube's advice for `Action`).
const RESYNC: Duration = Duration::from_secs(10 * 60 * 60);

pub(crate) async fn reconcile(guarded: Arc<Guarded<Provider>>, context: Arc<Context>) -> Result<Action, Error> {
    let (judged, told) = match &guarded.0 {
        Ok(provider) => {
            let gathered = gather::for_provider(&context, provider).await?;
            (validate(&resolve(provider.clone(), &gathered), &context.settings), provider.status.clone())
        }
        Err(invalid) => (Err(Problem::new(Reason::InvalidSpec, "", undecodable(&invalid.error))), None),
    };
    let meta = kube::Resource::meta(&*guarded);
    let generation = meta.generation.unwrap_or(0);
    let old: ProviderStatus = context.written.latest(meta, told);
    let new = status(&judged, &old, generation, context.now());
    if old.observed_generation == new.observed_generation && same_but_for_time(&old.conditions, &new.conditions) {
        return Ok(Action::requeue(RESYNC));
    }
    let place = format!("Provider {}/{}", guarded.namespace().unwrap_or_default(), guarded.name_any());
    if old.observed_generation == Some(generation)
        && let Err(wait) = context.pace.enter(&place)
    {
        return Ok(Action::requeue(wait));
    }
    write(&context, &*guarded, &new).await?;
    Ok(Action::requeue(RESYNC))
}

/// What is said of an object that an API server keeps and this operator cannot read.
pub(crate) fn undecodable(error: &str) -> String {
    format!("the object cannot be read by this operator: {error}; mend the field, or upgrade the operator")
}

fn status(
    judged: &Result<ValidatedProvider, Problem>,
    old: &ProviderStatus,
    generation: i64,
    now: OffsetDateTime,
) -> ProviderStatus {
    use ConditionStatus::{False, True, Unknown};
    let (accepted, resolved) = match judged {
        Ok(provider) => (
            Wanted::new(ConditionType::Accepted, True, Reason::Accepted, ""),
            match &provider.problem {
                None => Wanted::new(ConditionType::ResolvedRefs, True, Reason::Resolved, ""),
                Some(problem) => problems_wanted(ConditionType::ResolvedRefs, std::slice::from_ref(problem)),
            },
        ),
        Err(problem) => (
            Wanted::new(ConditionType::Accepted, False, problem.reason, located(&problem.field, &problem.message)),
            Wanted::new(ConditionType::ResolvedRefs, Unknown, Reason::Pending, "see Accepted"),
        ),
    };
    let reachable = Wanted::new(ConditionType::Reachable, Unknown, Reason::Pending, "no server has tried it yet");
    ProviderStatus {
        observed_generation: Some(generation),
        conditions: merge(&old.conditions, &[accepted, resolved, reachable], generation, &time(now)),
    }
}
