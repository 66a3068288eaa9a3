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
    panics::Panicked,
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
    let finding = context.probe.finding(&guarded.namespace().unwrap_or_default(), &guarded.name_any());
    let new = status(&judged, &old, finding, generation, context.now());
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

/// Reports in the status that a reconcile panicked.
pub(crate) async fn report_panic(
    guarded: Arc<Guarded<Provider>>,
    context: Arc<Context>,
    panicked: Panicked,
) -> Result<(), Error> {
    let Ok(provider) = &guarded.0 else { return Ok(()) };
    let generation = provider.metadata.generation.unwrap_or(0);
    let old: ProviderStatus = context.written.latest(&provider.metadata, provider.status.clone());
    let problem = Problem::new(Reason::InternalError, "", panicked.advice());
    let new = status(&Err(problem), &old, None, generation, context.now());
    if old.observed_generation == new.observed_generation && same_but_for_time(&old.conditions, &new.conditions) {
        return Ok(());
    }
    write(&context, provider, &new).await
}

/// What is said of an object that an API server keeps and this operator cannot read.
pub(crate) fn undecodable(error: &str) -> String {
    format!("the object cannot be read by this operator: {error}; mend the field, or upgrade the operator")
}

fn status(
    judged: &Result<ValidatedProvider, Problem>,
    old: &ProviderStatus,
    finding: Option<Reason>,
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
    let reachable = match judged {
        Ok(ValidatedProvider { problem: None, .. }) => match finding {
            Some(finding) => reachable(finding),
            // Servers that were just started have not looked yet: what was found before stands.
            None => told(old).unwrap_or_else(|| {
                Wanted::new(ConditionType::Reachable, Unknown, Reason::Pending, "no server has tried it yet")
            }),
        },
        Ok(_) => Wanted::new(ConditionType::Reachable, Unknown, Reason::Pending, "see ResolvedRefs"),
        Err(_) => Wanted::new(ConditionType::Reachable, Unknown, Reason::Pending, "see Accepted"),
    };
    ProviderStatus {
        observed_generation: Some(generation),
        conditions: merge(&old.conditions, &[accepted, resolved, reachable], generation, &time(now)),
    }
}

/// What the servers found, as the condition says it.
fn reachable(finding: Reason) -> Wanted {
    let (status, message) = match finding {
        Reason::DiscoveryFailed => (
            ConditionStatus::False,
            "a server cannot read the provider's discovery document; check the issuer, and the servers' network",
        ),
        Reason::KeysUnreadable => {
            (ConditionStatus::False, "a server cannot read the provider's keys; check the servers' network")
        }
        Reason::TokenEndpointFailed => (
            ConditionStatus::False,
            "a server cannot ask the provider's token endpoint; check its address, and the servers' network",
        ),
        Reason::ClientRefused => (
            ConditionStatus::False,
            "the provider does not know the client, or refuses its secret or key; check the client's id and the Secret",
        ),
        Reason::Reachable => (ConditionStatus::True, ""),
        // The probe tells none of these.
        Reason::Pending
        | Reason::Accepted
        | Reason::Resolved
        | Reason::Programmed
        | Reason::Ready
        | Reason::InvalidSpec
        | Reason::AppIDConflict
        | Reason::AppIDReserved
        | Reason::TooLarge
        | Reason::QuotaExceeded
        | Reason::KeysLost
        | Reason::KeysInvalid
        | Reason::InternalError
        | Reason::ProviderNotFound
        | Reason::ProviderInvalid
        | Reason::SecretNotFound
        | Reason::SecretKeyNotFound
        | Reason::SecretKeyInvalid
        | Reason::ConfigMapNotFound
        | Reason::TemplatesInvalid
        | Reason::WaitingForServers
        | Reason::NoServers
        | Reason::ServersTooOld
        | Reason::RefusedByServer
        | Reason::Deleting => (ConditionStatus::Unknown, "no server has tried it yet"),
    };
    Wanted::new(ConditionType::Reachable, status, finding, message)
}

/// What the condition said before; none: nothing was found yet.
fn told(old: &ProviderStatus) -> Option<Wanted> {
    let condition = old.conditions.iter().find(|old| old.type_ == ConditionType::Reachable.as_str())?;
    let reason = Reason::ALL.into_iter().find(|reason| reason.as_str() == condition.reason)?;
    (condition.status != ConditionStatus::Unknown).then(|| reachable(reason))
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::ProviderSettings;
    use serde_json::json;
    use time::Duration;

    use super::*;

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    fn judged(problem: Option<Problem>) -> Result<ValidatedProvider, Problem> {
        let settings = json!({ "preset": "github", "clientID": "x", "secret": "hush" });
        let settings: ProviderSettings = serde_json::from_value(settings).unwrap();
        Ok(ValidatedProvider { settings, links_by_email: true, problem })
    }

    fn said(status: &ProviderStatus) -> (ConditionStatus, &str, ConditionStatus) {
        let of = |type_: ConditionType| status.conditions.iter().find(|one| one.type_ == type_.as_str()).unwrap();
        let reachable = of(ConditionType::Reachable);
        (reachable.status, &reachable.reason, of(ConditionType::Ready).status)
    }

    #[test]
    fn what_servers_find_is_told_and_never_part_of_ready() {
        use ConditionStatus::{False, True, Unknown};
        let none = ProviderStatus::default();
        let fresh = status(&judged(None), &none, None, 1, NOW);
        assert_eq!(said(&fresh), (Unknown, "Pending", True));
        let good = status(&judged(None), &fresh, Some(Reason::Reachable), 1, NOW);
        assert_eq!(said(&good), (True, "Reachable", True));
        let bad = status(&judged(None), &good, Some(Reason::ClientRefused), 1, NOW);
        assert_eq!(said(&bad), (False, "ClientRefused", True));
    }

    #[test]
    fn servers_that_were_just_started_change_nothing() {
        let none = ProviderStatus::default();
        for finding in [Reason::Reachable, Reason::DiscoveryFailed] {
            let before = status(&judged(None), &none, Some(finding), 1, NOW);
            let after = status(&judged(None), &before, None, 1, NOW + Duration::HOUR);
            assert_eq!(after, before);
        }
    }

    #[test]
    fn what_is_not_there_is_not_said_to_be_reached() {
        let good = status(&judged(None), &ProviderStatus::default(), Some(Reason::Reachable), 1, NOW);
        let gone = Problem::new(Reason::SecretNotFound, "spec.github.clientSecretRef", "make it");
        let unresolved = status(&judged(Some(gone.clone())), &good, Some(Reason::Reachable), 2, NOW);
        assert_eq!(said(&unresolved).0, ConditionStatus::Unknown);
        let invalid = status(&Err(gone), &good, Some(Reason::Reachable), 2, NOW);
        assert_eq!(said(&invalid).0, ConditionStatus::Unknown);
    }
}
