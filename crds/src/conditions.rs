//! Conditions: the closed sets of their types and reasons, how a new set joins the old one, and what Ready follows from.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The longest message, in characters, as in Kubernetes' own conditions.
pub const MAX_MESSAGE: usize = 32_768;

/// A condition as it stands in a status. Type and reason are text here, so that a status which a newer operator wrote
/// can still be read; they are written from [`ConditionType`] and [`Reason`] only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What the condition is about.
    #[serde(rename = "type")]
    #[schemars(length(min = 1, max = 316))]
    pub type_: String,
    /// True, False or Unknown.
    pub status: ConditionStatus,
    /// The generation of the resource that this was judged on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When the status last changed from one value to another.
    pub last_transition_time: Time,
    /// Why, in one word.
    #[schemars(length(min = 1, max = 1024), regex(pattern = "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"))]
    pub reason: String,
    /// What to do about it.
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
    /// The spec is valid and the appID is this App's.
    Accepted,
    /// What it refers to exists and can be used.
    ResolvedRefs,
    /// Every counting server pod has told the published revision (App).
    Programmed,
    /// The servers reached the provider (Provider); never part of Ready.
    Reachable,
    /// Computed from the others.
    Ready,
}

/// Why a condition is as it is. Part of the API: names are never changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Not judged yet.
    Pending,
    /// Accepted=True.
    Accepted,
    /// ResolvedRefs=True.
    Resolved,
    /// Programmed=True.
    Programmed,
    /// Reachable=True.
    Reachable,
    /// Ready=True.
    Ready,

    /// A field of the spec is not what it has to be.
    InvalidSpec,
    /// Another App holds the appID.
    AppIDConflict,
    /// The appID belonged to an App of another namespace, whose users are still there.
    AppIDReserved,
    /// The rendered document is over the limit.
    TooLarge,
    /// The namespace is at the platform's bound on Apps or on bytes of documents.
    QuotaExceeded,
    /// The App's keys are gone while users are there.
    KeysLost,
    /// The App's keys cannot be read.
    KeysInvalid,
    /// The operator failed on the object, which is a bug.
    InternalError,

    /// A referenced Provider does not exist.
    ProviderNotFound,
    /// A referenced Provider is not accepted.
    ProviderInvalid,
    /// A referenced Secret does not exist.
    SecretNotFound,
    /// A referenced Secret lacks the key.
    SecretKeyNotFound,
    /// A value in a referenced Secret is not what it has to be.
    SecretKeyInvalid,
    /// A referenced ConfigMap does not exist.
    ConfigMapNotFound,
    /// A mail template is broken, unknown or too large.
    TemplatesInvalid,

    /// Some server has not told the published revision yet.
    WaitingForServers,
    /// No server is there.
    NoServers,
    /// A server honours only an older format of the document than the App needs.
    ServersTooOld,
    /// A server refused the document.
    RefusedByServer,
    /// The users are being deleted.
    Deleting,

    /// The provider's discovery document cannot be read.
    DiscoveryFailed,
    /// The provider's keys cannot be read.
    KeysUnreadable,
    /// The provider does not know the client, or refuses its secret or key.
    ClientRefused,
    /// The provider's token endpoint cannot be asked.
    TokenEndpointFailed,
}

/// A condition as a step wants it, before time and generation are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub type_: ConditionType,
    pub status: ConditionStatus,
    pub reason: Reason,
    pub message: String,
}

// === impl ConditionType ===

impl ConditionType {
    /// Those of an App, in the order in which they are written.
    pub const APP: [Self; 4] = [Self::Accepted, Self::ResolvedRefs, Self::Programmed, Self::Ready];
    /// Those of a Provider, in the order in which they are written.
    pub const PROVIDER: [Self; 4] = [Self::Accepted, Self::ResolvedRefs, Self::Reachable, Self::Ready];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "Accepted",
            Self::ResolvedRefs => "ResolvedRefs",
            Self::Programmed => "Programmed",
            Self::Reachable => "Reachable",
            Self::Ready => "Ready",
        }
    }

    /// Whether Ready follows from it. What a provider's own servers do is not the App's doing.
    pub const fn counts_for_ready(self) -> bool {
        match self {
            Self::Accepted | Self::ResolvedRefs | Self::Programmed => true,
            Self::Reachable | Self::Ready => false,
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
    pub const ALL: [Self; 30] = [
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
        Self::WaitingForServers,
        Self::NoServers,
        Self::ServersTooOld,
        Self::RefusedByServer,
        Self::Deleting,
        Self::DiscoveryFailed,
        Self::KeysUnreadable,
        Self::ClientRefused,
        Self::TokenEndpointFailed,
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
            Self::WaitingForServers => "WaitingForServers",
            Self::NoServers => "NoServers",
            Self::ServersTooOld => "ServersTooOld",
            Self::RefusedByServer => "RefusedByServer",
            Self::Deleting => "Deleting",
            Self::DiscoveryFailed => "DiscoveryFailed",
            Self::KeysUnreadable => "KeysUnreadable",
            Self::ClientRefused => "ClientRefused",
            Self::TokenEndpointFailed => "TokenEndpointFailed",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

// === impl Wanted ===

impl Wanted {
    pub fn new(type_: ConditionType, status: ConditionStatus, reason: Reason, message: impl Into<String>) -> Self {
        Self { type_, status, reason, message: message.into() }
    }
}

/// Ready as it follows from the others: the first that is False, else the first that is Unknown, else True.
pub fn ready(others: &[Wanted]) -> Wanted {
    let counting = || others.iter().filter(|wanted| wanted.type_.counts_for_ready());
    let worst = counting()
        .find(|wanted| wanted.status == ConditionStatus::False)
        .or_else(|| counting().find(|wanted| wanted.status == ConditionStatus::Unknown));
    match worst {
        Some(wanted) => Wanted::new(ConditionType::Ready, wanted.status, wanted.reason, wanted.message.clone()),
        None => Wanted::new(ConditionType::Ready, ConditionStatus::True, Reason::Ready, ""),
    }
}

/// The new set of conditions, with Ready at its end: the transition time of the old one stays where the status does.
/// A condition that is not wanted goes.
pub fn merge(old: &[Condition], wanted: &[Wanted], generation: i64, now: &Time) -> Vec<Condition> {
    let ready = ready(wanted);
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
                message: wanted.message.chars().take(MAX_MESSAGE).collect(),
            }
        })
        .collect()
}

/// Whether two sets say the same, whatever the times: then there is nothing to write.
pub fn same_but_for_time(one: &[Condition], other: &[Condition]) -> bool {
    let says = |condition: &Condition| {
        (
            condition.type_.clone(),
            condition.status,
            condition.observed_generation,
            condition.reason.clone(),
            condition.message.clone(),
        )
    };
    one.len() == other.len() && one.iter().map(says).eq(other.iter().map(says))
}

/// The status with which a resource is born: nothing known, of no generation, so that tools which know kstatus never
/// call a new object healthy.
pub(crate) fn first_status(types: &[ConditionType]) -> Value {
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

    fn wanted(type_: ConditionType, status: ConditionStatus, reason: Reason) -> Wanted {
        Wanted::new(type_, status, reason, format!("because {reason}"))
    }

    fn all_true() -> Vec<Wanted> {
        vec![
            wanted(ConditionType::Accepted, ConditionStatus::True, Reason::Accepted),
            wanted(ConditionType::ResolvedRefs, ConditionStatus::True, Reason::Resolved),
            wanted(ConditionType::Programmed, ConditionStatus::True, Reason::Programmed),
        ]
    }

    #[test]
    fn reasons_are_one_word_each_and_all_different() {
        let names: BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(names.len(), Reason::ALL.len());
        assert!(
            names.iter().all(|name| name.starts_with(char::is_uppercase)
                && name.chars().all(|letter| letter.is_ascii_alphanumeric()))
        );
    }

    #[test]
    fn ready_is_true_only_where_all_others_are() {
        let ready_of = |wanted: &[Wanted]| (ready(wanted).status, ready(wanted).reason);
        assert_eq!(ready_of(&all_true()), (ConditionStatus::True, Reason::Ready));
        let mut some = all_true();
        some[1] = wanted(ConditionType::ResolvedRefs, ConditionStatus::Unknown, Reason::Pending);
        assert_eq!(ready_of(&some), (ConditionStatus::Unknown, Reason::Pending));
        some[2] = wanted(ConditionType::Programmed, ConditionStatus::False, Reason::WaitingForServers);
        assert_eq!(ready_of(&some), (ConditionStatus::False, Reason::WaitingForServers));
        some[0] = wanted(ConditionType::Accepted, ConditionStatus::False, Reason::InvalidSpec);
        assert_eq!(ready_of(&some), (ConditionStatus::False, Reason::InvalidSpec));
    }

    #[test]
    fn reachable_is_no_part_of_ready() {
        let unreachable = wanted(ConditionType::Reachable, ConditionStatus::False, Reason::DiscoveryFailed);
        assert_eq!(ready(&[unreachable]).status, ConditionStatus::True);
    }

    #[test]
    fn the_transition_time_moves_only_with_the_status() {
        let first = merge(&[], &all_true(), 1, &at(1));
        assert_eq!(
            first.iter().map(|one| one.type_.as_str()).collect::<Vec<_>>(),
            ["Accepted", "ResolvedRefs", "Programmed", "Ready"]
        );
        let mut next = all_true();
        next[2] = wanted(ConditionType::Programmed, ConditionStatus::False, Reason::WaitingForServers);
        let second = merge(&first, &next, 2, &at(2));
        let times: Vec<_> = second.iter().map(|one| one.last_transition_time.clone()).collect();
        assert_eq!(times, [at(1), at(1), at(2), at(2)]);
        assert!(second.iter().all(|one| one.observed_generation == Some(2)));
        // Another reason is no transition.
        next[2] = wanted(ConditionType::Programmed, ConditionStatus::False, Reason::RefusedByServer);
        assert_eq!(merge(&second, &next, 2, &at(3))[2].last_transition_time, at(2));
    }

    #[test]
    fn a_wanted_ready_is_computed_anew() {
        let mut with_ready = all_true();
        with_ready.push(wanted(ConditionType::Ready, ConditionStatus::False, Reason::Pending));
        let merged = merge(&[], &with_ready, 1, &at(1));
        assert_eq!((merged.len(), merged[3].status), (4, ConditionStatus::True));
    }

    #[test]
    fn equality_is_blind_to_time_and_to_nothing_else() {
        let one = merge(&[], &all_true(), 1, &at(1));
        assert!(same_but_for_time(&one, &merge(&[], &all_true(), 1, &at(2))));
        assert!(!same_but_for_time(&one, &merge(&[], &all_true(), 2, &at(1))));
        assert!(!same_but_for_time(&one, &one[..3]));
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
            assert!(!same_but_for_time(&one, &other));
        }
    }

    #[test]
    fn messages_fit_the_schema() {
        let long =
            Wanted::new(ConditionType::Accepted, ConditionStatus::False, Reason::InvalidSpec, "é".repeat(40_000));
        assert_eq!(merge(&[], &[long], 1, &at(1))[0].message.chars().count(), MAX_MESSAGE);
    }

    #[test]
    fn a_status_of_a_newer_operator_can_be_read() {
        let condition = json!({
            "type": "Novel", "status": "True", "reason": "Unheard", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z",
        });
        assert_eq!(serde_json::from_value::<Condition>(condition).unwrap().reason, "Unheard");
    }
}
