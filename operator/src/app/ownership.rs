//! Decides whether an App can have its appID, from facts about the keys and about the Apps that claim the appID. Pure.

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use latchkey_crds::{
    app::App,
    conditions::{ConditionStatus, ConditionType, Reason},
};

use super::{
    keys::secret::{KeyLookup, UnusableReason},
    resolve,
};

pub(crate) use super::keys::secret::AppIdOwner;

pub(crate) mod gather;

#[cfg(test)]
mod tests;

/// An App that claims the appID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) owner: AppIdOwner,
    pub(crate) created: Option<Timestamp>,
    pub(crate) validity: ClaimValidity,
}

/// What is known of a claiming App, apart from who owns its appID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClaimValidity {
    /// No status for its current generation.
    Pending,
    Valid,
    /// It cannot be served, whoever owns its appID.
    Invalid,
    /// It is being deleted.
    Deleting,
}

/// What is known of the App that the key Secret names as the owner. If the keys are lost, the rendered Secret names the
/// owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnerState {
    /// It exists, or nothing proves that it does not.
    Exists,
    /// According to the API server the App does not exist, or it has another appID now.
    Deleted,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OwnershipFacts {
    pub(crate) claim: Claim,
    pub(crate) keys: KeyLookup,
    /// The owner that the rendered Secret names, if it exists and the keys are lost.
    pub(crate) rendered_owner: Option<AppIdOwner>,
    /// The state of the owner if it is not this App.
    pub(crate) owner_state: OwnerState,
    /// The other Apps with this appID.
    pub(crate) other_claims: Vec<Claim>,
}

/// Whether the App can have its appID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnershipDecision {
    /// This App owns the appID.
    Ours,
    /// Nobody owns it: this App can create the keys. The first App that creates them owns the appID.
    Free,
    /// The keys are lost but the rendered Secret exists: this App can rebuild the key Secret from it.
    Rebuild,
    /// The owner was an App of the same namespace and is deleted: this App can put its name on the keys.
    Inherit,
    /// The platform team assigned the appID to the namespace of this App, which can put its name on the keys. The
    /// servers must learn of the change of owner.
    HandedOver,
    /// An older App may take the appID: try again soon.
    Wait,
    /// Another App owns the appID.
    OwnedByOther,
    /// The owner is deleted, but its users still exist: only an App of its namespace can have the appID.
    Reserved,
    /// The appID belongs to this App or to an unknown one, and the keys cannot be used. They are never overwritten.
    KeysUnusable(UnusableReason),
}

// === impl Claim ===

impl Claim {
    /// The claim of an App in the store.
    pub(crate) fn from_app(app: &App) -> Self {
        let metadata = &app.metadata;
        Self {
            owner: AppIdOwner::of_app(app),
            created: metadata.creation_timestamp.as_ref().map(|Time(created)| *created),
            validity: ClaimValidity::from_app(app),
        }
    }

    /// Whether this App has precedence over the other if both claim a free appID.
    pub(crate) fn has_precedence_over(&self, other: &Self) -> bool {
        let order = |claim: &Self| {
            let created = claim.created.unwrap_or(Timestamp::MAX);
            (created, claim.owner.namespace.clone(), claim.owner.name.clone())
        };
        order(self) < order(other)
    }
}

// === impl ClaimValidity ===

impl ClaimValidity {
    fn from_app(app: &App) -> Self {
        if app.metadata.deletion_timestamp.is_some() {
            return Self::Deleting;
        }
        let accepted = app.status.as_ref().and_then(|status| {
            status.conditions.iter().find(|condition| condition.type_ == ConditionType::Accepted.as_str())
        });
        let Some(accepted) = accepted else { return Self::Pending };
        if accepted.observed_generation.is_none() || accepted.observed_generation != app.metadata.generation {
            return Self::Pending;
        }
        // Reasons that concern the appID or the keys do not make the App itself invalid. `QuotaExceeded` does: an App
        // over the quota must not block a free appID for others.
        let broken = [Reason::InvalidSpec, Reason::TooLarge, Reason::QuotaExceeded].map(Reason::as_str);
        match accepted.status {
            ConditionStatus::True => Self::Valid,
            ConditionStatus::False if broken.contains(&accepted.reason.as_str()) => Self::Invalid,
            ConditionStatus::False => Self::Valid,
            ConditionStatus::Unknown => Self::Pending,
        }
    }
}

// === impl OwnershipDecision ===

impl OwnershipDecision {
    /// The ownership that validation assumes. An App that can take the appID is validated as its owner, because only a
    /// valid App takes it. `None`: too early to validate.
    pub(crate) fn assumed_ownership(self) -> Option<resolve::Ownership> {
        match self {
            Self::Ours | Self::Free | Self::Rebuild | Self::Inherit | Self::HandedOver | Self::KeysUnusable(_) => {
                Some(resolve::Ownership::Ours)
            }
            Self::OwnedByOther => Some(resolve::Ownership::Taken),
            Self::Reserved => Some(resolve::Ownership::Reserved),
            Self::Wait => None,
        }
    }
}

// === impl OwnershipFacts ===

impl OwnershipFacts {
    pub(crate) fn decide(&self) -> OwnershipDecision {
        match &self.keys {
            KeyLookup::Missing => match &self.rendered_owner {
                Some(owner) => self.decide_for_owner(owner, OwnershipDecision::Rebuild, OwnershipDecision::Rebuild),
                None => self.wait_for_older(OwnershipDecision::Free, |_| true),
            },
            KeyLookup::Stored(stored) => {
                let (ours, next) = match stored.is_handed_over() {
                    true => (OwnershipDecision::HandedOver, OwnershipDecision::HandedOver),
                    false => (OwnershipDecision::Ours, OwnershipDecision::Inherit),
                };
                self.decide_for_owner(&stored.owner, ours, next)
            }
            KeyLookup::Unusable(why, Some(owner)) => self.decide_for_owner(
                owner,
                OwnershipDecision::KeysUnusable(*why),
                OwnershipDecision::KeysUnusable(*why),
            ),
            KeyLookup::Unusable(why, None) => OwnershipDecision::KeysUnusable(*why),
        }
    }

    /// Returns `ours` if this App is the owner, and `next` if the owner is deleted and this App can succeed it.
    fn decide_for_owner(
        &self,
        owner: &AppIdOwner,
        ours: OwnershipDecision,
        next: OwnershipDecision,
    ) -> OwnershipDecision {
        if *owner == self.claim.owner {
            return ours;
        }
        match self.owner_state {
            OwnerState::Exists => OwnershipDecision::OwnedByOther,
            OwnerState::Deleted if owner.namespace != self.claim.owner.namespace => OwnershipDecision::Reserved,
            OwnerState::Deleted => self.wait_for_older(next, |other| other.namespace == owner.namespace),
        }
    }

    /// Returns `Wait` if an older App can have the appID, and `free` otherwise. The older App takes the appID in its
    /// next reconcile if it is valid. Until then there is nothing to report.
    fn wait_for_older(&self, free: OwnershipDecision, can_claim: impl Fn(&AppIdOwner) -> bool) -> OwnershipDecision {
        let waits = self.other_claims.iter().any(|other| {
            let claims = match other.validity {
                ClaimValidity::Pending | ClaimValidity::Valid => can_claim(&other.owner),
                ClaimValidity::Invalid | ClaimValidity::Deleting => false,
            };
            claims && other.has_precedence_over(&self.claim)
        });
        if waits { OwnershipDecision::Wait } else { free }
    }
}
