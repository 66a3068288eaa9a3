//! Conditions: their types and reasons, the computation of Ready, and the merge with the previous conditions.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The maximum length of a message in characters, as in Kubernetes' own conditions.
pub const MAX_MESSAGE_LENGTH: usize = 32_768;

// Type and reason are strings, so that a status from a newer operator can be read. This operator writes only the names
// in [`ConditionType`] and [`Reason`].
/// Condition is one condition of a status.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// type is the type of the condition.
    #[serde(rename = "type")]
    #[schemars(length(min = 1, max = 316))]
    pub type_: String,
    /// status is True, False or Unknown.
    pub status: ConditionStatus,
    /// observedGeneration is the generation of the spec on which the condition is based.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// lastTransitionTime is when the status last changed from one value to another.
    pub last_transition_time: Time,
    /// reason is the cause of the status, in one CamelCase word.
    #[schemars(length(min = 1, max = 1024), regex(pattern = "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"))]
    pub reason: String,
    /// message explains the status and what to do.
    #[schemars(length(max = 32768))]
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConditionStatus {
    True,
    False,
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConditionType {
    /// The spec is valid. An App must also own its appID, have usable keys, and be within the size limit and the
    /// quotas.
    Accepted,
    /// All referenced objects exist and can be used.
    ResolvedRefs,
    /// App: every serving pod has acknowledged the published revision. Client: every serving pod has a document with
    /// the current generation of the Client.
    Programmed,
    /// Provider: the servers can reach the provider. Not part of Ready.
    Reachable,
    /// Events reach the receivers and consumers of an App's webhooks. Depends on third parties, so it is not part of
    /// Ready.
    Delivering,
    /// Computed from the other conditions, except Reachable and Delivering.
    Ready,
}

/// The reason of a condition. Part of the API: names never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Not checked yet.
    Pending,
    /// The reason of `Accepted=True`.
    Accepted,
    /// The reason of `ResolvedRefs=True`.
    Resolved,
    /// The reason of `Programmed=True`.
    Programmed,
    /// The reason of `Reachable=True`.
    Reachable,
    /// The reason of `Ready=True`.
    Ready,

    /// A field of the spec is invalid, or a request by annotation cannot be fulfilled.
    InvalidSpec,
    /// Another App owns the appID.
    AppIDConflict,
    /// A deleted App of another namespace owned the appID. It left users, or the servers have not yet reported that it
    /// left none.
    AppIDReserved,
    /// The rendered document exceeds the limit.
    TooLarge,
    /// The namespace has reached its quota of Apps or of document bytes.
    QuotaExceeded,
    /// The App's keys are lost. If the App has users, the servers reject other keys.
    KeysLost,
    /// The App's key Secret cannot be used.
    KeysInvalid,
    /// The operator panicked on the object. This is a bug.
    InternalError,

    /// A referenced Provider does not exist.
    ProviderNotFound,
    /// A referenced Provider is not accepted.
    ProviderInvalid,
    /// A referenced Secret does not exist.
    SecretNotFound,
    /// A referenced Secret lacks the key.
    SecretKeyNotFound,
    /// A value in a referenced Secret is invalid.
    SecretKeyInvalid,
    /// A referenced ConfigMap does not exist.
    ConfigMapNotFound,
    /// An email template is invalid, unknown or too large.
    TemplatesInvalid,
    /// The logo of the pages is missing in its ConfigMap, too large, or not an image that can be used.
    LogoInvalid,
    /// A text of the pages is invalid or unknown, or the texts are too large.
    TextsInvalid,
    /// Another App already uses the host in `spec.pages.host`, or has precedence for it.
    HostConflict,

    /// The App of a Client does not exist.
    AppNotFound,
    /// The App of a Client is in another namespace, and does not exist or does not allow Clients of the Client's
    /// namespace.
    NotGranted,
    /// The App of a Client has no hosted pages.
    PagesOff,
    /// An older Client of the App has the same client ID.
    ClientIDConflict,
    /// With this Client, the Clients of the App would exceed the maximum number (in total, or from other namespaces) or
    /// the maximum total size. Older Clients have precedence.
    TooManyClients,
    /// A Secret with the name that the operator would use exists, and the Client does not own it.
    SecretConflict,
    /// The public keys (JWKS) of a Client are invalid.
    KeySetInvalid,

    /// A serving pod has not acknowledged the published revision yet.
    WaitingForServers,
    /// There is no serving pod.
    NoServers,
    /// The App or the Client needs a newer format of the rendered document than a server supports.
    ServersTooOld,
    /// A server rejected the rendered document.
    RefusedByServer,
    /// The users of the App are being deleted.
    Deleting,

    /// The provider's discovery document cannot be read.
    DiscoveryFailed,
    /// The provider's key set (JWKS) cannot be read, or has no usable key.
    KeysUnreadable,
    /// The provider does not know the client, or refuses its secret or key.
    ClientRefused,
    /// The provider's token endpoint cannot be reached.
    TokenEndpointFailed,

    /// The reason of `Delivering=True`.
    Delivering,
    /// The last deliveries to the receiver of a webhook failed.
    ReceiverFails,
    /// The receiver of a webhook is gone, so nothing is sent to it.
    ReceiverGone,
    /// A consumer does not fetch the events of a webhook.
    ConsumerBehind,
}

/// A condition as a reconcile computes it, without time and generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredCondition {
    pub type_: ConditionType,
    pub status: ConditionStatus,
    pub reason: Reason,
    pub message: String,
}

// === impl ConditionType ===

impl ConditionType {
    /// The conditions of every App, in the order of the status. An App with webhooks also has Delivering, before Ready.
    pub const APP: [Self; 4] = [Self::Accepted, Self::ResolvedRefs, Self::Programmed, Self::Ready];
    /// The conditions of a Provider, in the order of the status.
    pub const PROVIDER: [Self; 4] = [Self::Accepted, Self::ResolvedRefs, Self::Reachable, Self::Ready];
    /// The conditions of a Client, in the order of the status.
    pub const CLIENT: [Self; 4] = [Self::Accepted, Self::ResolvedRefs, Self::Programmed, Self::Ready];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "Accepted",
            Self::ResolvedRefs => "ResolvedRefs",
            Self::Programmed => "Programmed",
            Self::Reachable => "Reachable",
            Self::Delivering => "Delivering",
            Self::Ready => "Ready",
        }
    }

    /// Whether the condition is part of Ready. Reachable and Delivering are not, because they depend on third parties.
    pub const fn is_part_of_ready(self) -> bool {
        match self {
            Self::Accepted | Self::ResolvedRefs | Self::Programmed => true,
            Self::Reachable | Self::Delivering | Self::Ready => false,
        }
    }
}

impl fmt::Display for ConditionType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

// === impl Reason ===

impl Reason {
    pub const ALL: [Self; 44] = [
        Self::Pending,
        Self::Accepted,
        Self::Resolved,
        Self::Programmed,
        Self::Reachable,
        Self::Ready,
        Self::InvalidSpec,
        Self::AppIDConflict,
        Self::AppIDReserved,
        Self::TooLarge,
        Self::QuotaExceeded,
        Self::KeysLost,
        Self::KeysInvalid,
        Self::InternalError,
        Self::ProviderNotFound,
        Self::ProviderInvalid,
        Self::SecretNotFound,
        Self::SecretKeyNotFound,
        Self::SecretKeyInvalid,
        Self::ConfigMapNotFound,
        Self::TemplatesInvalid,
        Self::LogoInvalid,
        Self::TextsInvalid,
        Self::HostConflict,
        Self::AppNotFound,
        Self::NotGranted,
        Self::PagesOff,
        Self::ClientIDConflict,
        Self::TooManyClients,
        Self::SecretConflict,
        Self::KeySetInvalid,
        Self::WaitingForServers,
        Self::NoServers,
        Self::ServersTooOld,
        Self::RefusedByServer,
        Self::Deleting,
        Self::DiscoveryFailed,
        Self::KeysUnreadable,
        Self::ClientRefused,
        Self::TokenEndpointFailed,
        Self::Delivering,
        Self::ReceiverFails,
        Self::ReceiverGone,
        Self::ConsumerBehind,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Accepted => "Accepted",
            Self::Resolved => "Resolved",
            Self::Programmed => "Programmed",
            Self::Reachable => "Reachable",
            Self::Ready => "Ready",
            Self::InvalidSpec => "InvalidSpec",
            Self::AppIDConflict => "AppIDConflict",
            Self::AppIDReserved => "AppIDReserved",
            Self::TooLarge => "TooLarge",
            Self::QuotaExceeded => "QuotaExceeded",
            Self::KeysLost => "KeysLost",
            Self::KeysInvalid => "KeysInvalid",
            Self::InternalError => "InternalError",
            Self::ProviderNotFound => "ProviderNotFound",
            Self::ProviderInvalid => "ProviderInvalid",
            Self::SecretNotFound => "SecretNotFound",
            Self::SecretKeyNotFound => "SecretKeyNotFound",
            Self::SecretKeyInvalid => "SecretKeyInvalid",
            Self::ConfigMapNotFound => "ConfigMapNotFound",
            Self::TemplatesInvalid => "TemplatesInvalid",
            Self::LogoInvalid => "LogoInvalid",
            Self::TextsInvalid => "TextsInvalid",
            Self::HostConflict => "HostConflict",
            Self::AppNotFound => "AppNotFound",
            Self::NotGranted => "NotGranted",
            Self::PagesOff => "PagesOff",
            Self::ClientIDConflict => "ClientIDConflict",
            Self::TooManyClients => "TooManyClients",
            Self::SecretConflict => "SecretConflict",
            Self::KeySetInvalid => "KeySetInvalid",
            Self::WaitingForServers => "WaitingForServers",
            Self::NoServers => "NoServers",
            Self::ServersTooOld => "ServersTooOld",
            Self::RefusedByServer => "RefusedByServer",
            Self::Deleting => "Deleting",
            Self::DiscoveryFailed => "DiscoveryFailed",
            Self::KeysUnreadable => "KeysUnreadable",
            Self::ClientRefused => "ClientRefused",
            Self::TokenEndpointFailed => "TokenEndpointFailed",
            Self::Delivering => "Delivering",
            Self::ReceiverFails => "ReceiverFails",
            Self::ReceiverGone => "ReceiverGone",
            Self::ConsumerBehind => "ConsumerBehind",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

// === impl DesiredCondition ===

impl DesiredCondition {
    pub fn new(type_: ConditionType, status: ConditionStatus, reason: Reason, message: impl Into<String>) -> Self {
        Self { type_, status, reason, message: message.into() }
    }
}

/// Computes Ready from the conditions that are part of it. Ready copies the first of them that is False. If none is
/// False, Ready copies the first that is Unknown. If all are True, Ready is True.
pub fn compute_ready(conditions: &[DesiredCondition]) -> DesiredCondition {
    let relevant = || conditions.iter().filter(|condition| condition.type_.is_part_of_ready());
    let worst = relevant()
        .find(|condition| condition.status == ConditionStatus::False)
        .or_else(|| relevant().find(|condition| condition.status == ConditionStatus::Unknown));
    match worst {
        Some(worst) => DesiredCondition::new(ConditionType::Ready, worst.status, worst.reason, worst.message.clone()),
        None => DesiredCondition::new(ConditionType::Ready, ConditionStatus::True, Reason::Ready, ""),
    }
}

/// Returns the conditions `wanted`, followed by Ready, which is computed from them. A condition with an unchanged
/// status keeps its transition time. Old conditions that are not in `wanted` are removed.
pub fn merge_conditions(old: &[Condition], wanted: &[DesiredCondition], generation: i64, now: &Time) -> Vec<Condition> {
    let ready = compute_ready(wanted);
    wanted
        .iter()
        .filter(|wanted| wanted.type_ != ConditionType::Ready)
        .chain([&ready])
        .map(|wanted| {
            let before = old.iter().find(|old| old.type_ == wanted.type_.as_str() && old.status == wanted.status);
            Condition {
                type_: wanted.type_.as_str().into(),
                status: wanted.status,
                observed_generation: Some(generation),
                last_transition_time: before.map_or_else(|| now.clone(), |old| old.last_transition_time.clone()),
                reason: wanted.reason.as_str().into(),
                message: wanted.message.chars().take(MAX_MESSAGE_LENGTH).collect(),
            }
        })
        .collect()
}

/// Whether two lists of conditions differ at most in their transition times. If so, no write is needed.
pub fn equal_except_times(one: &[Condition], other: &[Condition]) -> bool {
    let content = |condition: &Condition| {
        (
            condition.type_.clone(),
            condition.status,
            condition.observed_generation,
            condition.reason.clone(),
            condition.message.clone(),
        )
    };
    one.len() == other.len() && one.iter().map(content).eq(other.iter().map(content))
}

/// Returns the status of a new resource: every condition is Unknown, for generation -1, so that tools which follow
/// kstatus never report a new object as healthy.
pub(crate) fn initial_status(types: &[ConditionType]) -> Value {
    let conditions: Vec<Value> = types
        .iter()
        .map(|type_| {
            json!({
                "type": type_.as_str(),
                "status": "Unknown",
                "observedGeneration": -1,
                "lastTransitionTime": "1970-01-01T00:00:00Z",
                "reason": Reason::Pending.as_str(),
                "message": "Waiting for the operator",
            })
        })
        .collect();
    json!({ "observedGeneration": -1, "conditions": conditions })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn at(second: i64) -> Time {
        serde_json::from_value(json!(format!("2026-01-02T03:04:{second:02}Z"))).unwrap()
    }

    fn desired(type_: ConditionType, status: ConditionStatus, reason: Reason) -> DesiredCondition {
        DesiredCondition::new(type_, status, reason, format!("because {reason}"))
    }

    fn all_true() -> Vec<DesiredCondition> {
        vec![
            desired(ConditionType::Accepted, ConditionStatus::True, Reason::Accepted),
            desired(ConditionType::ResolvedRefs, ConditionStatus::True, Reason::Resolved),
            desired(ConditionType::Programmed, ConditionStatus::True, Reason::Programmed),
        ]
    }

    #[test]
    fn reasons_are_unique_camel_case_words() {
        let names: BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(names.len(), Reason::ALL.len());
        assert!(
            names.iter().all(|name| name.starts_with(char::is_uppercase)
                && name.chars().all(|letter| letter.is_ascii_alphanumeric()))
        );
    }

    #[test]
    fn ready_is_true_only_if_every_condition_that_is_part_of_it_is_true() {
        let ready_of = |wanted: &[DesiredCondition]| (compute_ready(wanted).status, compute_ready(wanted).reason);
        assert_eq!(ready_of(&all_true()), (ConditionStatus::True, Reason::Ready));
        let mut conditions = all_true();
        conditions[1] = desired(ConditionType::ResolvedRefs, ConditionStatus::Unknown, Reason::Pending);
        assert_eq!(ready_of(&conditions), (ConditionStatus::Unknown, Reason::Pending));
        conditions[2] = desired(ConditionType::Programmed, ConditionStatus::False, Reason::WaitingForServers);
        assert_eq!(ready_of(&conditions), (ConditionStatus::False, Reason::WaitingForServers));
        conditions[0] = desired(ConditionType::Accepted, ConditionStatus::False, Reason::InvalidSpec);
        assert_eq!(ready_of(&conditions), (ConditionStatus::False, Reason::InvalidSpec));
    }

    #[test]
    fn reachable_and_delivering_are_not_part_of_ready() {
        let unreachable = desired(ConditionType::Reachable, ConditionStatus::False, Reason::DiscoveryFailed);
        let undelivered = desired(ConditionType::Delivering, ConditionStatus::False, Reason::ReceiverFails);
        assert_eq!(compute_ready(&[unreachable, undelivered]).status, ConditionStatus::True);
    }

    #[test]
    fn the_transition_time_changes_only_with_the_status() {
        let first = merge_conditions(&[], &all_true(), 1, &at(1));
        assert_eq!(
            first.iter().map(|one| one.type_.as_str()).collect::<Vec<_>>(),
            ["Accepted", "ResolvedRefs", "Programmed", "Ready"]
        );
        let mut next = all_true();
        next[2] = desired(ConditionType::Programmed, ConditionStatus::False, Reason::WaitingForServers);
        let second = merge_conditions(&first, &next, 2, &at(2));
        let times: Vec<_> = second.iter().map(|one| one.last_transition_time.clone()).collect();
        assert_eq!(times, [at(1), at(1), at(2), at(2)]);
        assert!(second.iter().all(|one| one.observed_generation == Some(2)));
        // A changed reason is not a transition.
        next[2] = desired(ConditionType::Programmed, ConditionStatus::False, Reason::RefusedByServer);
        assert_eq!(merge_conditions(&second, &next, 2, &at(3))[2].last_transition_time, at(2));
    }

    #[test]
    fn a_ready_condition_in_the_input_is_replaced_by_the_computed_one() {
        let mut with_ready = all_true();
        with_ready.push(desired(ConditionType::Ready, ConditionStatus::False, Reason::Pending));
        let merged = merge_conditions(&[], &with_ready, 1, &at(1));
        assert_eq!((merged.len(), merged[3].status), (4, ConditionStatus::True));
    }

    #[test]
    fn equality_ignores_times_and_nothing_else() {
        let one = merge_conditions(&[], &all_true(), 1, &at(1));
        assert!(equal_except_times(&one, &merge_conditions(&[], &all_true(), 1, &at(2))));
        assert!(!equal_except_times(&one, &merge_conditions(&[], &all_true(), 2, &at(1))));
        assert!(!equal_except_times(&one, &one[..3]));
        type Change = fn(&mut Condition);
        let changes: [Change; 4] = [
            |one| one.status = ConditionStatus::Unknown,
            |one| one.reason = "Other".into(),
            |one| one.message.push('!'),
            |one| one.type_ = "Other".into(),
        ];
        for change in changes {
            let mut other = one.clone();
            change(&mut other[0]);
            assert!(!equal_except_times(&one, &other));
        }
    }

    #[test]
    fn messages_fit_the_schema() {
        let long = DesiredCondition::new(
            ConditionType::Accepted,
            ConditionStatus::False,
            Reason::InvalidSpec,
            "é".repeat(40_000),
        );
        assert_eq!(merge_conditions(&[], &[long], 1, &at(1))[0].message.chars().count(), MAX_MESSAGE_LENGTH);
    }

    #[test]
    fn a_condition_from_a_newer_operator_can_be_read() {
        let condition = json!({
            "type": "Novel", "status": "True", "reason": "Unheard", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z",
        });
        assert_eq!(serde_json::from_value::<Condition>(condition).unwrap().reason, "Unheard");
    }
}
