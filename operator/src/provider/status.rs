//! Computes the status of a Provider, without I/O.

use latchkey_crds::{
    conditions::{ConditionStatus, ConditionType, DesiredCondition, Reason, equal_except_times, merge_conditions},
    provider::ProviderStatus,
};
use time::OffsetDateTime;

use crate::{
    facts::FieldError,
    provider::{finding::Finding, validate::ValidatedProvider},
    status::{to_k8s_time, unresolved_condition, with_field},
};

/// Returns the status after validation. `finding` is what the servers report now.
pub(super) fn status(
    validated: &Result<ValidatedProvider, FieldError>,
    old: &ProviderStatus,
    finding: Option<Reason>,
    generation: i64,
    now: OffsetDateTime,
) -> ProviderStatus {
    let wanted = [accepted(validated), resolved_refs(validated), reachable(validated, old, finding)];
    ProviderStatus {
        observed_generation: Some(generation),
        conditions: merge_conditions(&old.conditions, &wanted, generation, &to_k8s_time(now)),
    }
}

/// Whether two statuses differ at most in the times of their conditions.
pub(super) fn is_same_except_times(one: &ProviderStatus, other: &ProviderStatus) -> bool {
    one.observed_generation == other.observed_generation && equal_except_times(&one.conditions, &other.conditions)
}

fn accepted(validated: &Result<ValidatedProvider, FieldError>) -> DesiredCondition {
    match validated {
        Ok(_) => DesiredCondition::new(ConditionType::Accepted, ConditionStatus::True, Reason::Accepted, ""),
        Err(error) => DesiredCondition::new(
            ConditionType::Accepted,
            ConditionStatus::False,
            error.reason,
            with_field(&error.field, &error.message),
        ),
    }
}

fn resolved_refs(validated: &Result<ValidatedProvider, FieldError>) -> DesiredCondition {
    let type_ = ConditionType::ResolvedRefs;
    match validated {
        Ok(ValidatedProvider { field_error: None, .. }) => {
            DesiredCondition::new(type_, ConditionStatus::True, Reason::Resolved, "")
        }
        Ok(ValidatedProvider { field_error: Some(error), .. }) => unresolved_condition(std::slice::from_ref(error)),
        Err(_) => DesiredCondition::new(type_, ConditionStatus::Unknown, Reason::Pending, "see Accepted"),
    }
}

fn reachable(
    validated: &Result<ValidatedProvider, FieldError>,
    old: &ProviderStatus,
    finding: Option<Reason>,
) -> DesiredCondition {
    let unknown =
        |message| DesiredCondition::new(ConditionType::Reachable, ConditionStatus::Unknown, Reason::Pending, message);
    match validated {
        Ok(ValidatedProvider { field_error: None, .. }) => {
            // Servers that have just started have not checked the Provider yet, so the status keeps the previous
            // finding.
            let finding = finding.and_then(Finding::from_reason).or_else(|| Finding::reported(old));
            finding.map_or_else(|| unknown("no server has checked it yet"), Finding::condition)
        }
        Ok(_) => unknown("see ResolvedRefs"),
        Err(_) => unknown("see Accepted"),
    }
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::ProviderSettings;
    use serde_json::json;
    use time::Duration;

    use super::*;

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    fn validated(field_error: Option<FieldError>) -> Result<ValidatedProvider, FieldError> {
        let settings = json!({ "preset": "github", "clientID": "x", "secret": "hush" });
        let settings: ProviderSettings = serde_json::from_value(settings).unwrap();
        Ok(ValidatedProvider { settings, links_by_email: true, field_error })
    }

    fn reachable_and_ready(status: &ProviderStatus) -> (ConditionStatus, &str, ConditionStatus) {
        let condition =
            |type_: ConditionType| status.conditions.iter().find(|one| one.type_ == type_.as_str()).unwrap();
        let reachable = condition(ConditionType::Reachable);
        (reachable.status, &reachable.reason, condition(ConditionType::Ready).status)
    }

    #[test]
    fn findings_of_servers_are_reported_but_do_not_affect_ready() {
        use ConditionStatus::{False, True, Unknown};
        let none = ProviderStatus::default();
        let unchecked = status(&validated(None), &none, None, 1, NOW);
        assert_eq!(reachable_and_ready(&unchecked), (Unknown, "Pending", True));
        let reachable = status(&validated(None), &unchecked, Some(Reason::Reachable), 1, NOW);
        assert_eq!(reachable_and_ready(&reachable), (True, "Reachable", True));
        let refused = status(&validated(None), &reachable, Some(Reason::ClientRefused), 1, NOW);
        assert_eq!(reachable_and_ready(&refused), (False, "ClientRefused", True));
    }

    #[test]
    fn servers_that_have_just_started_do_not_change_the_status() {
        let none = ProviderStatus::default();
        for finding in [Reason::Reachable, Reason::DiscoveryFailed] {
            let before = status(&validated(None), &none, Some(finding), 1, NOW);
            let after = status(&validated(None), &before, None, 1, NOW + Duration::HOUR);
            assert_eq!(after, before);
        }
    }

    #[test]
    fn an_unresolved_provider_is_not_reported_as_reachable() {
        let good = status(&validated(None), &ProviderStatus::default(), Some(Reason::Reachable), 1, NOW);
        let missing = FieldError::new(Reason::SecretNotFound, "spec.github.clientSecretRef", "create it");
        let unresolved = status(&validated(Some(missing.clone())), &good, Some(Reason::Reachable), 2, NOW);
        assert_eq!(reachable_and_ready(&unresolved).0, ConditionStatus::Unknown);
        let invalid = status(&Err(missing), &good, Some(Reason::Reachable), 2, NOW);
        assert_eq!(reachable_and_ready(&invalid).0, ConditionStatus::Unknown);
    }
}
