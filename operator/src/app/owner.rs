//! Who holds an appID: facts about its keys and about the Apps that claim it → whether this App may have it.

use k8s_openapi::{api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{Api, Client, core::Status};
use latchkey_crds::{
    app::App,
    conditions::{ConditionStatus, ConditionType, Reason},
    names::rendered_app_secret,
    types::AppId,
};

use super::{
    keys::secret::{self, Found, KeysError, Unusable},
    resolve,
};

pub(crate) use super::keys::secret::Holder;

#[cfg(test)]
mod tests;

/// An App that asks for the appID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) holder: Holder,
    pub(crate) created: Option<Timestamp>,
    pub(crate) judged: Judged,
}

/// What is known of an App apart from who holds its appID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Judged {
    /// Not at its current generation.
    NotYet,
    Valid,
    /// It cannot be served whoever holds its appID.
    Broken,
    /// It is being deleted.
    Going,
}

/// What is known of the App that holds the appID by the key Secret, or by the rendered Secret where that is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HolderApp {
    /// It exists, or nothing proves that it does not.
    There,
    /// The API server itself says that there is no such App, or it has another appID by now.
    Gone,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OwnerFacts {
    pub(crate) us: Claim,
    pub(crate) keys: Found,
    /// Of the rendered Secret, where there is one and the keys are lost.
    pub(crate) rendered: Option<Holder>,
    /// Of the holder, where that is not this App.
    pub(crate) holder_app: HolderApp,
    /// The other Apps of this appID.
    pub(crate) others: Vec<Claim>,
}

/// Whether the App may have its appID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// It has it.
    Ours,
    /// Nobody has it: this App may make the keys. Who does it first has it.
    Free,
    /// The keys are lost, the rendered Secret is still there: this App may make the key Secret of it.
    Rebuild,
    /// An App of its namespace had it and is gone: this App may put its name on the keys.
    Inherit,
    /// The platform team gave it to the namespace of this App, which may put its name on the keys; servers have to be
    /// told that they changed hands.
    HandedOver,
    /// An older App may have it that is not judged yet: look again soon.
    Wait,
    /// Another App has it.
    Another,
    /// Its App is gone, but only an App of that namespace may have it: the users are still there.
    Reserved,
    /// It is this App's or nobody knows whose, and the keys cannot be used: they are never written over.
    Unusable(Unusable),
}

// === impl Claim ===

impl Claim {
    /// What an App in the store says of itself.
    pub(crate) fn of(app: &App) -> Self {
        let metadata = &app.metadata;
        Self {
            holder: Holder {
                namespace: metadata.namespace.clone().unwrap_or_default(),
                name: metadata.name.clone().unwrap_or_default(),
            },
            created: metadata.creation_timestamp.as_ref().map(|Time(created)| *created),
            judged: Judged::of(app),
        }
    }

    /// Whether it comes before another where both claim a free appID.
    pub(crate) fn is_before(&self, other: &Self) -> bool {
        let order = |claim: &Self| {
            let created = claim.created.unwrap_or(Timestamp::MAX);
            (created, claim.holder.namespace.clone(), claim.holder.name.clone())
        };
        order(self) < order(other)
    }
}

// === impl Judged ===

impl Judged {
    fn of(app: &App) -> Self {
        if app.metadata.deletion_timestamp.is_some() {
            return Self::Going;
        }
        let accepted = app.status.as_ref().and_then(|status| {
            status.conditions.iter().find(|condition| condition.type_ == ConditionType::Accepted.as_str())
        });
        let Some(accepted) = accepted else { return Self::NotYet };
        if accepted.observed_generation.is_none() || accepted.observed_generation != app.metadata.generation {
            return Self::NotYet;
        }
        // Reasons that speak of the appID or of the keys say nothing against the App. One beyond its namespace's bound
        // must not keep a free appID from others.
        let broken = [Reason::InvalidSpec, Reason::TooLarge, Reason::QuotaExceeded].map(Reason::as_str);
        match accepted.status {
            ConditionStatus::True => Self::Valid,
            ConditionStatus::False if broken.contains(&accepted.reason.as_str()) => Self::Broken,
            ConditionStatus::False => Self::Valid,
            ConditionStatus::Unknown => Self::NotYet,
        }
    }
}

// === impl Decision ===

impl Decision {
    /// What the steps that judge an App are told. An App that may take the appID is judged as if it had it already, since
    /// only one that is valid otherwise takes it. None: it is not to be judged yet.
    pub(crate) fn holder(self) -> Option<resolve::Holder> {
        match self {
            Self::Ours | Self::Free | Self::Rebuild | Self::Inherit | Self::HandedOver | Self::Unusable(_) => {
                Some(resolve::Holder::Us)
            }
            Self::Another => Some(resolve::Holder::Another),
            Self::Reserved => Some(resolve::Holder::Reserved),
            Self::Wait => None,
        }
    }
}

// === impl OwnerFacts ===

impl OwnerFacts {
    /// Asks the API server for what a cache cannot prove. `secrets` are those of the install's namespace, `others` the
    /// Apps in the store that ask for the same appID.
    pub(crate) async fn gather(
        client: &Client,
        secrets: &Api<Secret>,
        app: &App,
        app_id: &AppId,
        others: Vec<Claim>,
    ) -> Result<Self, KeysError> {
        let us = Claim::of(app);
        let keys = secret::read(secrets, app_id).await?;
        let rendered = match &keys {
            Found::Missing => rendered_holder(secrets, app_id).await?,
            Found::Kept(_) | Found::Unusable(..) => None,
        };
        let holder = keys.holder().or(rendered.as_ref());
        let holder_app = match holder {
            Some(holder) if *holder != us.holder => look_for(client, holder, app_id).await?,
            Some(_) | None => HolderApp::There,
        };
        Ok(Self { us, keys, rendered, holder_app, others })
    }

    pub(crate) fn decide(&self) -> Decision {
        match &self.keys {
            Found::Missing => match &self.rendered {
                Some(holder) => self.held_by(holder, Decision::Rebuild, Decision::Rebuild),
                None => self.unless_older(Decision::Free, |_| true),
            },
            Found::Kept(kept) => {
                let (ours, next) = match kept.are_handed_over() {
                    true => (Decision::HandedOver, Decision::HandedOver),
                    false => (Decision::Ours, Decision::Inherit),
                };
                self.held_by(&kept.holder, ours, next)
            }
            Found::Unusable(why, Some(holder)) => {
                self.held_by(holder, Decision::Unusable(*why), Decision::Unusable(*why))
            }
            Found::Unusable(why, None) => Decision::Unusable(*why),
        }
    }

    /// `ours` where this App is the holder, `next` where it may come after one that is gone.
    fn held_by(&self, holder: &Holder, ours: Decision, next: Decision) -> Decision {
        if *holder == self.us.holder {
            return ours;
        }
        match self.holder_app {
            HolderApp::There => Decision::Another,
            HolderApp::Gone if holder.namespace != self.us.holder.namespace => Decision::Reserved,
            HolderApp::Gone => self.unless_older(next, |other| other.namespace == holder.namespace),
        }
    }

    /// Whether no other App that may claim the appID comes before this one. An older one that is valid takes it within
    /// its next reconcile, so that there is nothing to tell until then.
    fn unless_older(&self, free: Decision, may_claim: impl Fn(&Holder) -> bool) -> Decision {
        let waits = self.others.iter().any(|other| {
            let claims = match other.judged {
                Judged::NotYet | Judged::Valid => may_claim(&other.holder),
                Judged::Broken | Judged::Going => false,
            };
            claims && other.is_before(&self.us)
        });
        if waits { Decision::Wait } else { free }
    }
}

/// Whose the rendered Secret is.
async fn rendered_holder(secrets: &Api<Secret>, app_id: &AppId) -> Result<Option<Holder>, KeysError> {
    match secrets.get_metadata_opt(&rendered_app_secret(app_id)).await {
        Ok(found) => Ok(found.and_then(|found| secret::holder(&found.metadata))),
        Err(source) => Err(KeysError::new("get", format!("Secret {}", rendered_app_secret(app_id)), source)),
    }
}

/// Whether the holder is still there, by a live GET: a cache that does not know it proves nothing.
async fn look_for(client: &Client, holder: &Holder, app_id: &AppId) -> Result<HolderApp, KeysError> {
    let apps: Api<App> = Api::namespaced(client.clone(), &holder.namespace);
    match apps.get(&holder.name).await {
        // Made anew under its name, with another appID.
        Ok(app) if app.app_id().is_ok_and(|other| other != *app_id) => Ok(HolderApp::Gone),
        Ok(_) => Ok(HolderApp::There),
        Err(kube::Error::Api(status)) if proves_absence(&status, &holder.name) => Ok(HolderApp::Gone),
        // An App that does not decode is there. One in a namespace that is not for this operator to look at may be.
        Err(kube::Error::SerdeError(_)) => Ok(HolderApp::There),
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(HolderApp::There),
        Err(source) => Err(KeysError::new("get", format!("App that holds the appID {app_id}"), source)),
    }
}

/// Whether the API server says that there is no object of that name. Where the whole resource is gone (no CRD) it
/// answers 404 as well, but names nothing: that proves nothing.
pub(crate) fn proves_absence(status: &Status, name: &str) -> bool {
    status.code == 404 && status.details.as_ref().is_some_and(|details| details.name == name)
}
