//! Reconciles one Provider: resolve, validate, status. Its settings are rendered with each App that references it.

use std::{sync::Arc, time::Duration};

use kube::{ResourceExt, runtime::controller::Action};
use latchkey_crds::{
    conditions::{ConditionStatus, ConditionType, DesiredCondition, Reason, equal_except_times, merge_conditions},
    provider::{Provider, ProviderStatus},
};
use time::OffsetDateTime;

use crate::{
    context::Context,
    error::Error,
    facts::FieldError,
    gather,
    panics::Panicked,
    provider::{
        resolve::resolve,
        validate::{ValidatedProvider, validate},
    },
    status::{to_k8s_time, undecodable_message, unresolved_condition, with_field, write_status},
    watch::Guarded,
};

/// Watch events trigger every reconcile; the resync is only a safety net (kube's advice for `Action`).
const RESYNC: Duration = Duration::from_secs(10 * 60 * 60);

pub(crate) async fn reconcile(guarded: Arc<Guarded<Provider>>, context: Arc<Context>) -> Result<Action, Error> {
    let (judged, watched) = match &guarded.0 {
        Ok(provider) => {
            let gathered = gather::for_provider(&context, provider).await?;
            (validate(&resolve(provider.clone(), &gathered), &context.settings), provider.status.clone())
        }
        Err(invalid) => (Err(FieldError::new(Reason::InvalidSpec, "", undecodable_message(&invalid.error))), None),
    };
    let meta = kube::Resource::meta(&*guarded);
    let generation = meta.generation.unwrap_or(0);
    let old: ProviderStatus = context.written_statuses.latest(meta, watched);
    let finding = context.monitor.finding(&guarded.namespace().unwrap_or_default(), &guarded.name_any());
    let new = status(&judged, &old, finding, generation, context.now());
    if old.observed_generation == new.observed_generation && equal_except_times(&old.conditions, &new.conditions) {
        return Ok(Action::requeue(RESYNC));
    }
    let place = format!("Provider {}/{}", guarded.namespace().unwrap_or_default(), guarded.name_any());
    if old.observed_generation == Some(generation)
        && let Err(wait) = context.rate_limiter.try_acquire(&place)
    {
        return Ok(Action::requeue(wait));
    }
    write_status(&context, &*guarded, &new).await?;
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
    let old: ProviderStatus = context.written_statuses.latest(&provider.metadata, provider.status.clone());
    let problem = FieldError::new(Reason::InternalError, "", panicked.message());
    let new = status(&Err(problem), &old, None, generation, context.now());
    if old.observed_generation == new.observed_generation && equal_except_times(&old.conditions, &new.conditions) {
        return Ok(());
    }
    write_status(&context, provider, &new).await
}

fn status(
    judged: &Result<ValidatedProvider, FieldError>,
    old: &ProviderStatus,
    finding: Option<Reason>,
    generation: i64,
    now: OffsetDateTime,
) -> ProviderStatus {
    use ConditionStatus::{False, True, Unknown};
    let (accepted, resolved) = match judged {
        Ok(provider) => (
            DesiredCondition::new(ConditionType::Accepted, True, Reason::Accepted, ""),
            match &provider.field_error {
                None => DesiredCondition::new(ConditionType::ResolvedRefs, True, Reason::Resolved, ""),
                Some(problem) => unresolved_condition(std::slice::from_ref(problem)),
            },
        ),
        Err(problem) => (
            DesiredCondition::new(
                ConditionType::Accepted,
                False,
                problem.reason,
                with_field(&problem.field, &problem.message),
            ),
            DesiredCondition::new(ConditionType::ResolvedRefs, Unknown, Reason::Pending, "see Accepted"),
        ),
    };
    let reachable = match judged {
        Ok(ValidatedProvider { field_error: None, .. }) => match finding {
            Some(finding) => reachable_condition(finding),
            // Servers that have just started have not checked yet: the previous finding remains.
            None => previous_finding(old).unwrap_or_else(|| {
                DesiredCondition::new(
                    ConditionType::Reachable,
                    Unknown,
                    Reason::Pending,
                    "no server has checked it yet",
                )
            }),
        },
        Ok(_) => DesiredCondition::new(ConditionType::Reachable, Unknown, Reason::Pending, "see ResolvedRefs"),
        Err(_) => DesiredCondition::new(ConditionType::Reachable, Unknown, Reason::Pending, "see Accepted"),
    };
    ProviderStatus {
        observed_generation: Some(generation),
        conditions: merge_conditions(&old.conditions, &[accepted, resolved, reachable], generation, &to_k8s_time(now)),
    }
}

/// The condition for a finding of the servers.
fn reachable_condition(finding: Reason) -> DesiredCondition {
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
            "a server cannot reach the provider's token endpoint; check its address, and the servers' network",
        ),
        Reason::ClientRefused => (
            ConditionStatus::False,
            "the provider does not know the client, or rejects its secret or key; check the client ID and the Secret",
        ),
        Reason::Reachable => (ConditionStatus::True, ""),
        // The servers report none of these.
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
        | Reason::Deleting => (ConditionStatus::Unknown, "no server has checked it yet"),
    };
    DesiredCondition::new(ConditionType::Reachable, status, finding, message)
}

/// The previous condition, or `None` if nothing was found yet.
fn previous_finding(old: &ProviderStatus) -> Option<DesiredCondition> {
    let condition = old.conditions.iter().find(|old| old.type_ == ConditionType::Reachable.as_str())?;
    let reason = Reason::ALL.into_iter().find(|reason| reason.as_str() == condition.reason)?;
    (condition.status != ConditionStatus::Unknown).then(|| reachable_condition(reason))
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::ProviderSettings;
    use serde_json::json;
    use time::Duration;

    use super::*;

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    fn judged(problem: Option<FieldError>) -> Result<ValidatedProvider, FieldError> {
        let settings = json!({ "preset": "github", "clientID": "x", "secret": "hush" });
        let settings: ProviderSettings = serde_json::from_value(settings).unwrap();
        Ok(ValidatedProvider { settings, links_by_email: true, field_error: problem })
    }

    fn said(status: &ProviderStatus) -> (ConditionStatus, &str, ConditionStatus) {
        let of = |type_: ConditionType| status.conditions.iter().find(|one| one.type_ == type_.as_str()).unwrap();
        let reachable = of(ConditionType::Reachable);
        (reachable.status, &reachable.reason, of(ConditionType::Ready).status)
    }

    #[test]
    fn findings_of_servers_are_reported_and_never_part_of_ready() {
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
    fn servers_that_have_just_started_change_nothing() {
        let none = ProviderStatus::default();
        for finding in [Reason::Reachable, Reason::DiscoveryFailed] {
            let before = status(&judged(None), &none, Some(finding), 1, NOW);
            let after = status(&judged(None), &before, None, 1, NOW + Duration::HOUR);
            assert_eq!(after, before);
        }
    }

    #[test]
    fn an_unresolved_provider_is_not_reported_as_reachable() {
        let good = status(&judged(None), &ProviderStatus::default(), Some(Reason::Reachable), 1, NOW);
        let gone = FieldError::new(Reason::SecretNotFound, "spec.github.clientSecretRef", "create it");
        let unresolved = status(&judged(Some(gone.clone())), &good, Some(Reason::Reachable), 2, NOW);
        assert_eq!(said(&unresolved).0, ConditionStatus::Unknown);
        let invalid = status(&Err(gone), &good, Some(Reason::Reachable), 2, NOW);
        assert_eq!(said(&invalid).0, ConditionStatus::Unknown);
    }
}
