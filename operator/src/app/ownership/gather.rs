//! Collects the facts that decide who owns an appID. The key Secret and the owner are read from the API server, because
//! a cache can be outdated.

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, core::Status};
use latchkey_crds::{app::App, names::rendered_app_secret, types::AppId};

use crate::{
    app::{
        keys::secret::{self as key_secret, AppIdOwner, KeyLookup, KeySecretError},
        ownership::{Claim, OwnerState, OwnershipFacts},
    },
    context::Context,
};

/// Collects the facts about the appID of an App.
pub(crate) async fn for_app(app: &App, app_id: &AppId, context: &Context) -> Result<OwnershipFacts, KeySecretError> {
    let others = other_claims(app, app_id, context);
    OwnershipFacts::gather(&context.client, &context.install_secrets(), app, app_id, others).await
}

/// Returns the claims of the other Apps with the same appID, as the watch reports them.
fn other_claims(app: &App, app_id: &AppId, context: &Context) -> Vec<Claim> {
    let others = context.objects.apps_with_id(app_id);
    others
        .iter()
        .filter_map(|other| other.0.as_ref().ok())
        .filter(|other| other.metadata.uid != app.metadata.uid && other.app_id().as_ref() == Ok(app_id))
        .map(Claim::from_app)
        .collect()
}

// === impl OwnershipFacts ===

impl OwnershipFacts {
    /// Reads the keys and the state of their owner. `secrets` is the API for Secrets of the installation's namespace.
    pub(crate) async fn gather(
        client: &Client,
        secrets: &Api<Secret>,
        app: &App,
        app_id: &AppId,
        other_claims: Vec<Claim>,
    ) -> Result<Self, KeySecretError> {
        let claim = Claim::from_app(app);
        let keys = key_secret::read(secrets, app_id).await?;
        let rendered_owner = match &keys {
            KeyLookup::Missing => rendered_secret_owner(secrets, app_id).await?,
            KeyLookup::Stored(_) | KeyLookup::Unusable(..) => None,
        };
        let owner_state = match keys.owner().or(rendered_owner.as_ref()) {
            Some(owner) if *owner != claim.owner => read_owner_state(client, owner, app_id).await?,
            Some(_) | None => OwnerState::Exists,
        };
        Ok(Self { claim, keys, rendered_owner, owner_state, other_claims })
    }
}

/// Returns the owner that the rendered Secret names.
async fn rendered_secret_owner(secrets: &Api<Secret>, app_id: &AppId) -> Result<Option<AppIdOwner>, KeySecretError> {
    match secrets.get_metadata_opt(&rendered_app_secret(app_id)).await {
        Ok(found) => Ok(found.and_then(|found| key_secret::owner_of(&found.metadata))),
        Err(source) => Err(KeySecretError::new("get", format!("Secret {}", rendered_app_secret(app_id)), source)),
    }
}

/// Finds out by a GET whether the owner exists, because an owner that is missing in a cache may still exist.
async fn read_owner_state(client: &Client, owner: &AppIdOwner, app_id: &AppId) -> Result<OwnerState, KeySecretError> {
    let apps: Api<App> = Api::namespaced(client.clone(), &owner.namespace);
    match apps.get(&owner.name).await {
        // The App with the name of the owner has another appID.
        Ok(app) if app.app_id().is_ok_and(|other| other != *app_id) => Ok(OwnerState::Deleted),
        Ok(_) => Ok(OwnerState::Exists),
        Err(kube::Error::Api(status)) if proves_absence(&status, &owner.name) => Ok(OwnerState::Deleted),
        // The owner exists, but its object cannot be decoded.
        Err(kube::Error::SerdeError(_)) => Ok(OwnerState::Exists),
        // This operator cannot read the owner's namespace, so nothing proves that the owner is deleted.
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(OwnerState::Exists),
        Err(source) => Err(KeySecretError::new("get", format!("App that holds the appID {app_id}"), source)),
    }
}

/// Whether this error status of the API server proves that no object of this name exists. A 404 without a name proves
/// nothing, because the API server also returns such a 404 if the CRD is missing.
pub(crate) fn proves_absence(status: &Status, name: &str) -> bool {
    status.code == 404 && status.details.as_ref().is_some_and(|details| details.name == name)
}
