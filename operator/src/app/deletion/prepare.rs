//! Prepares the deletion of an App's users: finds out who owns the appID, and creates the document by which the servers
//! identify the users to delete.

use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use latchkey_crds::{
    names::{RENDERED_APP_KEY, rendered_app_secret},
    rendered::{AppState, DELETED_APP_FORMAT, DeletedApp},
    types::AppId,
};

use crate::{
    app::keys::{
        KeyDocument,
        secret::{self as key_secret, AppIdOwner, KeyLookup, Stored, UnusableReason},
    },
    error::Error,
};

/// Whether an App's users can be deleted.
pub(super) enum DeletionState {
    /// This App owns the appID. Contains the document for the servers, and the keys unless they are lost.
    Owned(DeletedApp, Option<Box<Stored>>),
    /// The appID and its users belong to another App, or to no App.
    NotOwned,
    /// Another writer changed the stored keys after they were read, so the reconcile must start again.
    KeysChanged,
    /// The key Secret exists but cannot be used, so the users cannot be deleted: the Secret contains `incarnation` and
    /// `handover`, by which the servers recognize the users of this App.
    KeysUnusable(UnusableReason),
}

/// Checks whether the App `us` owns the appID. If so, creates the document with the state `Deleted`. The servers delete
/// the users when they get this document.
pub(super) async fn prepare_deletion(
    secrets: &Api<Secret>,
    app_id: &AppId,
    us: &AppIdOwner,
) -> Result<DeletionState, Error> {
    let state = match key_secret::read(secrets, app_id).await? {
        KeyLookup::Stored(stored) if stored.owner != *us => DeletionState::NotOwned,
        // The keys are written again, which raises `handover`. Otherwise the servers would not accept that the users
        // belong to this App.
        KeyLookup::Stored(stored) if stored.is_handed_over() => {
            match key_secret::replace(secrets, &stored, &stored.document, us).await? {
                Some(stored) => DeletionState::Owned(document_from_keys(us, &stored.document), Some(Box::new(stored))),
                None => DeletionState::KeysChanged,
            }
        }
        KeyLookup::Stored(stored) => DeletionState::Owned(document_from_keys(us, &stored.document), Some(stored)),
        KeyLookup::Unusable(why, Some(owner)) if owner == *us => DeletionState::KeysUnusable(why),
        KeyLookup::Unusable(_, Some(_)) => DeletionState::NotOwned,
        KeyLookup::Unusable(why, None) => match document_from_rendered(secrets, app_id, us).await? {
            Some(_) => DeletionState::KeysUnusable(why),
            None => DeletionState::NotOwned,
        },
        KeyLookup::Missing => match document_from_rendered(secrets, app_id, us).await? {
            Some(document) => DeletionState::Owned(document, None),
            None => DeletionState::NotOwned,
        },
    };
    Ok(state)
}

fn document_from_keys(us: &AppIdOwner, keys: &KeyDocument) -> DeletedApp {
    DeletedApp {
        format: DELETED_APP_FORMAT,
        app_id: keys.app_id.clone(),
        namespace: us.namespace.clone(),
        name: us.name.clone(),
        state: AppState::Deleted,
        incarnation: keys.incarnation.clone(),
        handover: (keys.handover > 0).then_some(keys.handover),
    }
}

/// Creates the document from the rendered Secret. Returns `None` if no rendered Secret of the App `us` can be read.
async fn document_from_rendered(
    secrets: &Api<Secret>,
    app_id: &AppId,
    us: &AppIdOwner,
) -> Result<Option<DeletedApp>, Error> {
    let found = secrets.get_opt(&rendered_app_secret(app_id)).await.map_err(Error::api("read the rendered App"))?;
    let Some(secret) = found.filter(|secret| key_secret::owner_of(&secret.metadata).as_ref() == Some(us)) else {
        return Ok(None);
    };
    let document = secret.data.and_then(|mut data| data.remove(RENDERED_APP_KEY));
    // A document with the state `Serving` has more fields; they are ignored.
    let document: Option<DeletedApp> = document.and_then(|document| serde_json::from_slice(&document.0).ok());
    let ours = document.filter(|document| document.app_id == *app_id && document.namespace == us.namespace);
    Ok(ours.map(|document| DeletedApp {
        format: DELETED_APP_FORMAT,
        name: us.name.clone(),
        state: AppState::Deleted,
        ..document
    }))
}
