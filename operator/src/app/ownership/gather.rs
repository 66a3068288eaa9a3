//! Collects the facts that decide who owns an appID. The key Secret and the owner are read live, because a cache can be
//! outdated.

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

/// The other Apps in the store that claim the same appID.
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
    /// `secrets` are those of the installation's namespace. `other_claims` are the other Apps in the store that claim
    /// the appID.
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
            Some(owner) if *owner != claim.owner => find_owner(client, owner, app_id).await?,
            Some(_) | None => OwnerState::Exists,
        };
        Ok(Self { claim, keys, rendered_owner, owner_state, other_claims })
    }
}

/// The owner that the rendered Secret names.
async fn rendered_secret_owner(secrets: &Api<Secret>, app_id: &AppId) -> Result<Option<AppIdOwner>, KeySecretError> {
    match secrets.get_metadata_opt(&rendered_app_secret(app_id)).await {
        Ok(found) => Ok(found.and_then(|found| key_secret::owner_of(&found.metadata))),
        Err(source) => Err(KeySecretError::new("get", format!("Secret {}", rendered_app_secret(app_id)), source)),
    }
}

/// Checks by a live GET whether the owner exists: absence from a cache proves nothing.
async fn find_owner(client: &Client, owner: &AppIdOwner, app_id: &AppId) -> Result<OwnerState, KeySecretError> {
    let apps: Api<App> = Api::namespaced(client.clone(), &owner.namespace);
    match apps.get(&owner.name).await {
        // The App was created again under the same name, with another appID.
        Ok(app) if app.app_id().is_ok_and(|other| other != *app_id) => Ok(OwnerState::Deleted),
        Ok(_) => Ok(OwnerState::Exists),
        Err(kube::Error::Api(status)) if proves_absence(&status, &owner.name) => Ok(OwnerState::Deleted),
        // An App that does not decode exists. An App in a namespace that this operator cannot read may exist.
        Err(kube::Error::SerdeError(_)) => Ok(OwnerState::Exists),
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(OwnerState::Exists),
        Err(source) => Err(KeySecretError::new("get", format!("App that holds the appID {app_id}"), source)),
    }
}

/// Whether this status of the API server proves that no object of this name exists. If the whole resource is missing
/// (no CRD), the status is also 404 but without a name, which proves nothing.
pub(crate) fn proves_absence(status: &Status, name: &str) -> bool {
    status.code == 404 && status.details.as_ref().is_some_and(|details| details.name == name)
}
