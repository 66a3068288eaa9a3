//! The step of the keys: what was decided of the appID's owner and what is due now → the keys that are kept.

use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use latchkey_crds::{rendered::RenderedApp, types::AppId};
use time::OffsetDateTime;

use super::{
    KeyDocument, KeyNotMade,
    lifecycle::KeyPolicy,
    secret::{self, Change, Found, Holder, Kept, SecretError, Unusable},
};
use crate::app::owner::{Decision, OwnerFacts};

/// What became of the keys of an App.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Keeping {
    /// They are this App's, and as they should be.
    Ours(Box<Kept>),
    /// Somebody else was faster, or the App may not have them: who holds the appID is to be asked again.
    LookAgain,
    /// They are never written over.
    Unusable(Unusable),
}

/// What is asked of the keys in one reconcile.
pub(crate) struct Keeper<'a> {
    pub(crate) app_id: &'a AppId,
    pub(crate) policy: &'a KeyPolicy,
    pub(crate) decision: Decision,
    /// What is published of the App, where there is something: only read where the keys are lost.
    pub(crate) rendered: Option<&'a RenderedApp>,
    pub(crate) now: OffsetDateTime,
}

// === impl Keeper ===

impl Keeper<'_> {
    /// Keeps the keys of a valid App. `acknowledged` tells whether there are counting pods and each has told the revision
    /// with these very keys.
    pub(crate) async fn keep(
        &self,
        secrets: &Api<Secret>,
        facts: &OwnerFacts,
        acknowledged: impl Fn(&KeyDocument) -> bool,
    ) -> Result<Keeping, SecretError> {
        let us = &facts.us.holder;
        let before = facts.keys.holder();
        let decide = |found: &Found| self.change(found, us, before, &acknowledged);
        let found = secret::settle(secrets, self.app_id, facts.keys.clone(), decide).await?;
        Ok(match found {
            Found::Kept(kept) if kept.holder == *us => Keeping::Ours(kept),
            Found::Kept(_) | Found::Missing => Keeping::LookAgain,
            Found::Unusable(why, _) => Keeping::Unusable(why),
        })
    }

    /// `before`: who held the appID when it was decided that this App may have it.
    fn change(
        &self,
        found: &Found,
        us: &Holder,
        before: Option<&Holder>,
        acknowledged: impl Fn(&KeyDocument) -> bool,
    ) -> Result<Change, KeyNotMade> {
        let put = |document: KeyDocument| Change::Put(Box::new(document), us.clone());
        match (found, self.decision) {
            (Found::Kept(kept), _) if kept.holder == *us => {
                let next = kept.document.step(self.policy, self.now, acknowledged(&kept.document))?;
                Ok(next.map_or(Change::Leave, put))
            }
            (Found::Kept(kept), Decision::Inherit | Decision::HandedOver) if Some(&kept.holder) == before => {
                Ok(put(kept.document.clone()))
            }
            (Found::Missing, Decision::Free) => KeyDocument::first_of(self.app_id, self.policy, self.now).map(put),
            (Found::Missing, Decision::Rebuild) => self.rebuilt().map(put),
            (Found::Kept(_) | Found::Missing | Found::Unusable(..), _) => Ok(Change::Leave),
        }
    }

    /// The keys of what is published; new ones where it holds none that can be used, of which the servers then say that
    /// they are another incarnation's.
    fn rebuilt(&self) -> Result<KeyDocument, KeyNotMade> {
        let document = self.rendered.cloned().map(|rendered| KeyDocument::of_document(rendered, self.now));
        match document {
            Some(keys) if keys.check(self.app_id).is_ok() => Ok(keys.rebuilt(self.policy)),
            Some(_) | None => KeyDocument::first_of(self.app_id, self.policy, self.now),
        }
    }
}
