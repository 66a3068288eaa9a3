//! Gets the keys of an App. This also gives the appID to the App, because the App named in the key Secret owns the
//! appID.

use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use latchkey_crds::{conditions::Reason, types::AppId};

use crate::{
    app::{
        keys::{
            KeyDocument,
            policy::KeyPolicy,
            secret::{self as key_secret, AppIdOwner, KeyLookup, Stored, UnusableReason},
        },
        ownership::{OwnershipDecision, OwnershipFacts},
        publish::read_published_of_any,
        stop::Stop,
        validate::Rejection,
    },
    context::Context,
};

/// Returns the stored keys of an App that owns its appID. If the App does not own the appID yet and the decision allows
/// it, makes the App the owner first.
pub(crate) async fn acquire(
    facts: OwnershipFacts,
    decision: OwnershipDecision,
    app_id: &AppId,
    policy: &KeyPolicy,
    context: &Context,
) -> Result<Stored, Stop> {
    let stored = match (decision, facts.keys) {
        (OwnershipDecision::Ours, KeyLookup::Stored(stored)) => *stored,
        (decision, keys) => {
            let Some(stored) = take_app_id(decision, keys, &facts.claim.owner, app_id, policy, context).await? else {
                return Err(Stop::RETRY_SOON);
            };
            // The quota includes the appID from now on, before the watch reports the key Secret.
            context.objects.quotas.record_keys(app_id, Some(stored.owner.clone()));
            stored
        }
    };
    context.objects.key_versions.record(app_id, stored.version());
    Ok(stored)
}

/// Creates the key Secret, or makes the App its owner. Returns `None` if another writer was faster. In this case, the
/// facts must be read again, and the decision must be made again.
async fn take_app_id(
    decision: OwnershipDecision,
    keys: KeyLookup,
    owner: &AppIdOwner,
    app_id: &AppId,
    policy: &KeyPolicy,
    context: &Context,
) -> Result<Option<Stored>, Stop> {
    let secrets = &context.install_secrets();
    let written = match (decision, keys) {
        (OwnershipDecision::Inherit | OwnershipDecision::HandedOver, KeyLookup::Stored(stored)) => {
            key_secret::replace(secrets, &stored, &stored.document, owner).await?
        }
        (OwnershipDecision::Free, _) => {
            let first = KeyDocument::first_with_policy(app_id, policy, context.now())?;
            key_secret::create(secrets, &first, owner).await?
        }
        (OwnershipDecision::Rebuild, _) => {
            let rebuilt = rebuild(secrets, app_id, policy, context).await?;
            key_secret::create(secrets, &rebuilt, owner).await?
        }
        (OwnershipDecision::KeysUnusable(why), _) => return Err(reject_unusable(why).into()),
        // Never reached: with `Ours`, `Inherit` and `HandedOver`, keys are stored; with the other decisions, the
        // reconcile has stopped before this step.
        (
            OwnershipDecision::Ours
            | OwnershipDecision::Inherit
            | OwnershipDecision::HandedOver
            | OwnershipDecision::OwnedByOther
            | OwnershipDecision::Reserved
            | OwnershipDecision::Wait,
            _,
        ) => None,
    };
    Ok(written)
}

fn reject_unusable(why: UnusableReason) -> Rejection {
    let message =
        format!("the key Secret of the App cannot be used: {why}; it is never overwritten: restore it from a backup");
    Rejection::new(Reason::KeysInvalid, "", message)
}

/// Restores the keys from the rendered Secret, because the key Secret is missing.
async fn rebuild(
    secrets: &Api<Secret>,
    app_id: &AppId,
    policy: &KeyPolicy,
    context: &Context,
) -> Result<KeyDocument, Stop> {
    let Some(document) = read_published_of_any(secrets, app_id).await? else {
        let message = "the key Secret is missing, and the rendered Secret holds no readable keys; \
                       restore the key Secret from a backup, or delete the rendered Secret to start with \
                       new keys";
        return Err(Rejection::new(Reason::KeysLost, "", message).into());
    };
    let rebuilt = KeyDocument::from_rendered(document, context.now()).restored(policy);
    match rebuilt.validate(app_id) {
        Ok(()) => Ok(rebuilt),
        Err(invalid) => {
            let message = format!(
                "the key Secret is missing, and the keys in the rendered Secret cannot be used: {invalid}; \
                 restore the key Secret from a backup"
            );
            Err(Rejection::new(Reason::KeysLost, "", message).into())
        }
    }
}
