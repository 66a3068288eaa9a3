//! Decides who owns an appID: facts about its keys and about the Apps that claim it → whether this App may take it.

use k8s_openapi::{api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{Api, Client, core::Status};
use latchkey_crds::{
    app::App,
    conditions::{ConditionStatus, ConditionType, Reason},
    names::rendered_app_secret,
    types::AppId,
};

use super::{
    keys::secret::{self, KeyLookup, KeySecretError, UnusableReason},
    resolve,
};

pub(crate) use super::keys::secret::AppIdOwner;

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

/// What is known of the App that owns the appID according to the key Secret, or to the rendered Secret if the keys are
/// lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnerState {
    /// It exists, or nothing proves that it does not.
    Exists,
    /// The API server says that there is no such App, or the App now has another appID.
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

/// Whether the App may have its appID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnershipDecision {
    /// It owns the appID.
    Ours,
    /// Nobody owns it: this App may create the keys. The first to create them owns it.
    Free,
    /// The keys are lost but the rendered Secret exists: this App may rebuild the key Secret from it.
    Rebuild,
    /// The owner was an App of the same namespace and is deleted: this App may put its name on the keys.
    Inherit,
    /// The platform team assigned it to the namespace of this App, which may put its name on the keys. The servers must
    /// learn of the change of owner.
    HandedOver,
    /// An older App that is not validated yet may get it: try again soon.
    Wait,
    /// Another App owns it.
    OwnedByOther,
    /// The owner is deleted, but its users still exist: only an App of its namespace may have the appID.
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
            owner: AppIdOwner {
                namespace: metadata.namespace.clone().unwrap_or_default(),
                name: metadata.name.clone().unwrap_or_default(),
            },
            created: metadata.creation_timestamp.as_ref().map(|Time(created)| *created),
            validity: ClaimValidity::from_app(app),
        }
    }

    /// Whether it has precedence if both claim a free appID.
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
        // Reasons that concern the appID or the keys do not count against the App. An App over its namespace's quota
        // must not block a free appID for others.
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
    /// The ownership that validation assumes. An App that may take the appID is validated as if it already owned it,
    /// because only a valid App takes it. `None`: too early to validate.
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
    /// Asks the API server for what a cache cannot prove. `secrets` are those of the install's namespace, `others` the
    /// Apps in the store that claim the same appID.
    pub(crate) async fn gather(
        client: &Client,
        secrets: &Api<Secret>,
        app: &App,
        app_id: &AppId,
        others: Vec<Claim>,
    ) -> Result<Self, KeySecretError> {
        let us = Claim::from_app(app);
        let keys = secret::read(secrets, app_id).await?;
        let rendered = match &keys {
            KeyLookup::Missing => rendered_secret_owner(secrets, app_id).await?,
            KeyLookup::Stored(_) | KeyLookup::Unusable(..) => None,
        };
        let holder = keys.owner().or(rendered.as_ref());
        let holder_app = match holder {
            Some(holder) if *holder != us.owner => find_owner(client, holder, app_id).await?,
            Some(_) | None => OwnerState::Exists,
        };
        Ok(Self { claim: us, keys, rendered_owner: rendered, owner_state: holder_app, other_claims: others })
    }

    pub(crate) fn decide(&self) -> OwnershipDecision {
        match &self.keys {
            KeyLookup::Missing => match &self.rendered_owner {
                Some(holder) => self.decide_for_owner(holder, OwnershipDecision::Rebuild, OwnershipDecision::Rebuild),
                None => self.wait_for_older(OwnershipDecision::Free, |_| true),
            },
            KeyLookup::Stored(kept) => {
                let (ours, next) = match kept.is_handed_over() {
                    true => (OwnershipDecision::HandedOver, OwnershipDecision::HandedOver),
                    false => (OwnershipDecision::Ours, OwnershipDecision::Inherit),
                };
                self.decide_for_owner(&kept.owner, ours, next)
            }
            KeyLookup::Unusable(why, Some(holder)) => self.decide_for_owner(
                holder,
                OwnershipDecision::KeysUnusable(*why),
                OwnershipDecision::KeysUnusable(*why),
            ),
            KeyLookup::Unusable(why, None) => OwnershipDecision::KeysUnusable(*why),
        }
    }

    /// `ours` if this App is the owner, `next` if it may succeed an owner that is deleted.
    fn decide_for_owner(
        &self,
        holder: &AppIdOwner,
        ours: OwnershipDecision,
        next: OwnershipDecision,
    ) -> OwnershipDecision {
        if *holder == self.claim.owner {
            return ours;
        }
        match self.owner_state {
            OwnerState::Exists => OwnershipDecision::OwnedByOther,
            OwnerState::Deleted if holder.namespace != self.claim.owner.namespace => OwnershipDecision::Reserved,
            OwnerState::Deleted => self.wait_for_older(next, |other| other.namespace == holder.namespace),
        }
    }

    /// Whether no other App with a right to the appID has precedence. An older, valid one takes it in its next
    /// reconcile; until then there is nothing to report.
    fn wait_for_older(&self, free: OwnershipDecision, may_claim: impl Fn(&AppIdOwner) -> bool) -> OwnershipDecision {
        let waits = self.other_claims.iter().any(|other| {
            let claims = match other.validity {
                ClaimValidity::Pending | ClaimValidity::Valid => may_claim(&other.owner),
                ClaimValidity::Invalid | ClaimValidity::Deleting => false,
            };
            claims && other.has_precedence_over(&self.claim)
        });
        if waits { OwnershipDecision::Wait } else { free }
    }
}

/// The owner that the rendered Secret names.
async fn rendered_secret_owner(secrets: &Api<Secret>, app_id: &AppId) -> Result<Option<AppIdOwner>, KeySecretError> {
    match secrets.get_metadata_opt(&rendered_app_secret(app_id)).await {
        Ok(found) => Ok(found.and_then(|found| secret::owner_of(&found.metadata))),
        Err(source) => Err(KeySecretError::new("get", format!("Secret {}", rendered_app_secret(app_id)), source)),
    }
}

/// Checks by a live GET whether the owner exists: absence from a cache proves nothing.
async fn find_owner(client: &Client, holder: &AppIdOwner, app_id: &AppId) -> Result<OwnerState, KeySecretError> {
    let apps: Api<App> = Api::namespaced(client.clone(), &holder.namespace);
    match apps.get(&holder.name).await {
        // Created again under its name, with another appID.
        Ok(app) if app.app_id().is_ok_and(|other| other != *app_id) => Ok(OwnerState::Deleted),
        Ok(_) => Ok(OwnerState::Exists),
        Err(kube::Error::Api(status)) if proves_absence(&status, &holder.name) => Ok(OwnerState::Deleted),
        // An App that does not decode exists. An App in a namespace that this operator cannot read may exist.
        Err(kube::Error::SerdeError(_)) => Ok(OwnerState::Exists),
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(OwnerState::Exists),
        Err(source) => Err(KeySecretError::new("get", format!("App that holds the appID {app_id}"), source)),
    }
}

/// Whether the API server says that no object of this name exists. If the whole resource is missing (no CRD), it also
/// answers 404, but without a name: that proves nothing.
pub(crate) fn proves_absence(status: &Status, name: &str) -> bool {
    status.code == 404 && status.details.as_ref().is_some_and(|details| details.name == name)
}
