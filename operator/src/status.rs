//! Functions for the statuses of Apps, Providers and Clients.

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use latchkey_crds::conditions::{ConditionStatus, ConditionType, DesiredCondition, Reason};
use time::OffsetDateTime;

use crate::facts::FieldError;

pub(crate) mod write;

/// Returns the condition `ResolvedRefs` of an object with references that cannot be used. Its reason is the reason of
/// the first error. Its message contains the messages of all errors.
pub(crate) fn unresolved_condition(errors: &[FieldError]) -> DesiredCondition {
    let messages: Vec<_> = errors.iter().map(|error| with_field(&error.field, &error.message)).collect();
    let reason = errors.first().map_or(Reason::Resolved, |error| error.reason);
    DesiredCondition::new(ConditionType::ResolvedRefs, ConditionStatus::False, reason, messages.join("; "))
}

/// Returns a message, preceded by its field.
pub(crate) fn with_field(field: &str, message: &str) -> String {
    if field.is_empty() { message.to_owned() } else { format!("{field}: {message}") }
}

/// Converts a time to whole seconds, as Kubernetes stores times.
pub(crate) fn to_k8s_time(at: OffsetDateTime) -> Time {
    Time(Timestamp::from_second(at.unix_timestamp()).unwrap_or(Timestamp::UNIX_EPOCH))
}
