//! Reconciles one Provider: resolves its references, validates it, and writes its status. Its settings are rendered
//! with each App that references it.

use std::{sync::Arc, time::Duration};

use kube::{Resource, ResourceExt, core::DeserializeGuard};
use latchkey_crds::{
    conditions::Reason,
    provider::{Provider, ProviderStatus},
};

use crate::{
    context::Context,
    controller::Action,
    error::Error,
    facts::FieldError,
    gather,
    panics::Panicked,
    provider::{
        resolve::resolve,
        status::{is_same_except_times, status},
        validate::validate,
    },
    status::write::write_status,
    undecodable,
};

/// The time until the next reconcile if no watch event comes earlier. Watch events report every change, so this is only
/// a safety net.
const RESYNC: Duration = Duration::from_secs(10 * 60 * 60);

pub(crate) async fn reconcile(
    guarded: Arc<DeserializeGuard<Provider>>,
    context: Arc<Context>,
) -> Result<Action, Error> {
    let (validated, watched) = match &guarded.0 {
        Ok(provider) => {
            let objects = gather::for_provider(&context, provider).await?;
            (validate(&resolve(provider.clone(), &objects), &context.settings), provider.status.clone())
        }
        Err(invalid) => {
            let Some(object) = undecodable::read::<Provider>(&context, &*guarded).await? else {
                return Ok(Action::await_change());
            };
            let message = undecodable::message::<Provider>(&object, &invalid.error);
            (Err(FieldError::new(Reason::InvalidSpec, "", message)), None)
        }
    };
    let meta = guarded.meta();
    let generation = meta.generation.unwrap_or(0);
    let (namespace, name) = (guarded.namespace().unwrap_or_default(), guarded.name_any());
    let old: ProviderStatus = context.written_statuses.latest(meta, watched);
    let finding = context.monitor.finding(&namespace, &name);
    let new = status(&validated, &old, finding, generation, context.now());
    if is_same_except_times(&old, &new) {
        return Ok(Action::requeue(RESYNC));
    }
    // A status that reports an edit to the Provider itself does not wait for the rate limiter: somebody may be waiting
    // for the status.
    if old.observed_generation == Some(generation)
        && let Err(wait) = context.rate_limiter.try_acquire(&format!("Provider {namespace}/{name}"))
    {
        return Ok(Action::requeue(wait));
    }
    write_status(&context, &*guarded, &new).await?;
    Ok(Action::requeue(RESYNC))
}

/// Reports in the status that a reconcile panicked.
pub(crate) async fn report_panic(
    guarded: Arc<DeserializeGuard<Provider>>,
    context: Arc<Context>,
    panicked: Panicked,
) -> Result<(), Error> {
    let Ok(provider) = &guarded.0 else { return Ok(()) };
    let generation = provider.metadata.generation.unwrap_or(0);
    let old: ProviderStatus = context.written_statuses.latest(&provider.metadata, provider.status.clone());
    let error = FieldError::new(Reason::InternalError, "", panicked.message());
    let new = status(&Err(error), &old, None, generation, context.now());
    if is_same_except_times(&old, &new) {
        return Ok(());
    }
    write_status(&context, provider, &new).await
}
