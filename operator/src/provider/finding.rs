//! What the servers find out about a Provider, and the condition `Reachable` that reports it.

use latchkey_crds::{
    conditions::{ConditionStatus, ConditionType, DesiredCondition, Reason},
    provider::ProviderStatus,
};

/// The result of the servers' check of a Provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    Reachable,
    TokenEndpointFailed,
    KeysUnreadable,
    DiscoveryFailed,
    ClientRefused,
}

// === impl Finding ===

impl Finding {
    const ALL: [Self; 5] =
        [Self::Reachable, Self::TokenEndpointFailed, Self::KeysUnreadable, Self::DiscoveryFailed, Self::ClientRefused];

    /// Returns the finding with this reason, or `None` for a reason of another condition.
    pub(super) fn from_reason(reason: Reason) -> Option<Self> {
        Self::ALL.into_iter().find(|finding| finding.reason() == reason)
    }

    /// Returns the finding that the condition `Reachable` reports now, or `None` if it reports none.
    pub(super) fn reported(status: &ProviderStatus) -> Option<Self> {
        let condition = status.conditions.iter().find(|one| one.type_ == ConditionType::Reachable.as_str())?;
        let finding = Self::ALL.into_iter().find(|finding| finding.reason().as_str() == condition.reason)?;
        (condition.status != ConditionStatus::Unknown).then_some(finding)
    }

    pub(super) fn condition(self) -> DesiredCondition {
        let status = match self {
            Self::Reachable => ConditionStatus::True,
            Self::TokenEndpointFailed | Self::KeysUnreadable | Self::DiscoveryFailed | Self::ClientRefused => {
                ConditionStatus::False
            }
        };
        DesiredCondition::new(ConditionType::Reachable, status, self.reason(), self.message())
    }

    fn reason(self) -> Reason {
        match self {
            Self::Reachable => Reason::Reachable,
            Self::TokenEndpointFailed => Reason::TokenEndpointFailed,
            Self::KeysUnreadable => Reason::KeysUnreadable,
            Self::DiscoveryFailed => Reason::DiscoveryFailed,
            Self::ClientRefused => Reason::ClientRefused,
        }
    }

    fn message(self) -> &'static str {
        match self {
            Self::Reachable => "",
            Self::TokenEndpointFailed => {
                "a server cannot reach the provider's token endpoint; check its address, and the servers' network"
            }
            Self::KeysUnreadable => "a server cannot read the provider's keys; check the servers' network",
            Self::DiscoveryFailed => {
                "a server cannot read the provider's discovery document; check the issuer, and the servers' network"
            }
            Self::ClientRefused => {
                "the provider does not know the client, or rejects its secret or key; check the client ID and the Secret"
            }
        }
    }
}
