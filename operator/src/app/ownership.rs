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

/// Whether an App that claims an appID can be served, regardless of who owns the appID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClaimValidity {
    /// Not known yet: no status reports whether the current generation of the App can be served.
    Pending,
    Valid,
    /// The App cannot be served, whoever owns the appID.
    Invalid,
    /// The App is being deleted.
    Deleting,
}

/// Whether the App that owns the appID exists. The owner is the App that the key Secret names. If the key Secret is
/// lost, the owner is the App that the rendered Secret names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnerState {
    /// The App exists, or nothing proves that it does not exist.
    Exists,
    /// According to the API server the App does not exist, or it has another appID now.
    Deleted,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OwnershipFacts {
    pub(crate) claim: Claim,
    pub(crate) keys: KeyLookup,
    /// The owner that the rendered Secret names. `None`: the rendered Secret was not read because the key Secret
    /// exists, or no rendered Secret names an owner.
    pub(crate) rendered_owner: Option<AppIdOwner>,
    /// The state of the owner. `Exists` if this App is the owner, or if no owner is known.
    pub(crate) owner_state: OwnerState,
    /// The claims of the other Apps with this appID.
    pub(crate) other_claims: Vec<Claim>,
}

/// Whether the App can have its appID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnershipDecision {
    /// This App owns the appID.
    Ours,
    /// Nobody owns the appID: this App can create the keys. The App that creates the keys first owns the appID.
    Free,
    /// The keys are lost but the rendered Secret exists: this App can rebuild the key Secret from it.
    Rebuild,
    /// The owner was an App of the same namespace and is deleted: this App can become the owner of the keys.
    Inherit,
    /// The platform team assigned the appID to the namespace of this App: this App can become the owner of the keys.
    /// The keys must be written again, because this raises `handover`, by which servers recognize the change of owner.
    HandedOver,
    /// An older App can take the appID, and takes it in its next reconcile if it is valid. So this App must wait and
    /// decide again soon.
    Wait,
    /// Another App owns the appID.
    OwnedByOther,
    /// The owner is deleted, but its users still exist: only an App of the owner's namespace can have the appID.
    Reserved,
    /// The keys cannot be used, and no other existing App is known to own the appID. Such keys are never overwritten.
    KeysUnusable(UnusableReason),
}

// === impl Claim ===

impl Claim {
    /// Returns the claim of `app` to its appID.
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
        // A rejection because of the appID or the keys does not make the claim invalid. `QuotaExceeded` makes it
        // invalid, because an App over the quota must not block a free appID for others.
        let invalidating = [Reason::InvalidSpec, Reason::TooLarge, Reason::QuotaExceeded].map(Reason::as_str);
        match accepted.status {
            ConditionStatus::True => Self::Valid,
            ConditionStatus::False if invalidating.contains(&accepted.reason.as_str()) => Self::Invalid,
            ConditionStatus::False => Self::Valid,
            ConditionStatus::Unknown => Self::Pending,
        }
    }
}

// === impl OwnershipDecision ===

impl OwnershipDecision {
    /// Returns the ownership that the validation of the App assumes, or `None` if the App must wait before it is
    /// validated. An App that can take the appID is validated as the owner, because only a valid App takes an appID.
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
                None => self.defer_to_older(OwnershipDecision::Free, |_| true),
            },
            KeyLookup::Stored(stored) => {
                let (ours, inherited) = match stored.is_handed_over() {
                    true => (OwnershipDecision::HandedOver, OwnershipDecision::HandedOver),
                    false => (OwnershipDecision::Ours, OwnershipDecision::Inherit),
                };
                self.decide_for_owner(&stored.owner, ours, inherited)
            }
            KeyLookup::Unusable(why, Some(owner)) => self.decide_for_owner(
                owner,
                OwnershipDecision::KeysUnusable(*why),
                OwnershipDecision::KeysUnusable(*why),
            ),
            KeyLookup::Unusable(why, None) => OwnershipDecision::KeysUnusable(*why),
        }
    }

    /// Returns `ours` if this App is the owner, and `inherited` if the owner is deleted and this App can take the
    /// appID.
    fn decide_for_owner(
        &self,
        owner: &AppIdOwner,
        ours: OwnershipDecision,
        inherited: OwnershipDecision,
    ) -> OwnershipDecision {
        if *owner == self.claim.owner {
            return ours;
        }
        match self.owner_state {
            OwnerState::Exists => OwnershipDecision::OwnedByOther,
            OwnerState::Deleted if owner.namespace != self.claim.owner.namespace => OwnershipDecision::Reserved,
            OwnerState::Deleted => self.defer_to_older(inherited, |other| other.namespace == owner.namespace),
        }
    }

    /// Returns `Wait` if an older App can take the appID. If the older App is valid, it takes the appID in its next
    /// reconcile. Returns `oldest` if this App is the oldest App that can take the appID.
    fn defer_to_older(&self, oldest: OwnershipDecision, can_claim: impl Fn(&AppIdOwner) -> bool) -> OwnershipDecision {
        let waits = self.other_claims.iter().any(|other| {
            let claims = match other.validity {
                ClaimValidity::Pending | ClaimValidity::Valid => can_claim(&other.owner),
                ClaimValidity::Invalid | ClaimValidity::Deleting => false,
            };
            claims && other.has_precedence_over(&self.claim)
        });
        if waits { OwnershipDecision::Wait } else { oldest }
    }
}
