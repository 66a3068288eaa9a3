//! The Secret that stores the keys of an App and names the owner of its appID: read by GET, created by POST, changed by
//! PUT with its resourceVersion. The operator never changes this Secret by patch or apply, because a leader that was
//! paused could then overwrite newer keys.

use std::collections::BTreeMap;

use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api,
    api::{DeleteParams, ObjectMeta, PostParams, Preconditions},
};
use latchkey_crds::{
    app::App,
    names::{APP_KEYS_KEY, APP_KEYS_TYPE, FIELD_MANAGER, NAME_ANNOTATION, NAMESPACE_ANNOTATION, app_keys_secret},
    types::AppId,
};

use super::document::{InvalidKeys, KeyDocument};

#[cfg(test)]
mod tests;

/// The App that owns an appID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AppIdOwner {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

/// Stored keys, with everything that a PUT needs to replace them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stored {
    pub(crate) document: KeyDocument,
    pub(crate) owner: AppIdOwner,
    metadata: ObjectMeta,
}

/// The state of an App's key Secret.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum KeyLookup {
    Missing,
    /// The Secret exists, but cannot be used. It is never overwritten. Contains the owner if the Secret names one.
    Unusable(UnusableReason, Option<AppIdOwner>),
    Stored(Box<Stored>),
}

/// Why an existing key Secret cannot be used. The message never reveals the contents of the Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UnusableReason {
    #[error("its type is not {APP_KEYS_TYPE}")]
    WrongType,
    #[error("it has no annotation {NAMESPACE_ANNOTATION} or {NAME_ANNOTATION}, which name the App of the keys")]
    NoOwner,
    #[error("it has no key {APP_KEYS_KEY}")]
    MissingEntry,
    #[error("its {APP_KEYS_KEY} is not a key document")]
    NotKeyDocument,
    #[error("its keys cannot be used: {0}")]
    Invalid(#[source] InvalidKeys),
}

/// The error if a request for the key Secret, or for the App that owns the appID, failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} the {what}")]
pub(crate) struct KeySecretError {
    verb: &'static str,
    what: String,
    #[source]
    source: Box<kube::Error>,
}

// === impl AppIdOwner ===

impl AppIdOwner {
    /// Returns the namespace and the name of `app`.
    pub(crate) fn of_app(app: &App) -> Self {
        Self {
            namespace: app.metadata.namespace.clone().unwrap_or_default(),
            name: app.metadata.name.clone().unwrap_or_default(),
        }
    }
}

// === impl Stored, KeyLookup ===

impl Stored {
    /// Returns the resourceVersion that the Secret had when it was read or written.
    pub(crate) fn version(&self) -> &str {
        self.metadata.resource_version.as_deref().unwrap_or_default()
    }

    /// Whether the platform team has assigned the keys to another namespace since the operator wrote them last.
    pub(crate) fn is_handed_over(&self) -> bool {
        self.document.namespace.as_ref().is_some_and(|namespace| *namespace != self.owner.namespace)
    }
}

impl KeyLookup {
    /// Returns these keys as if they were stored in a Secret that names this owner.
    #[cfg(test)]
    pub(crate) fn stored(document: KeyDocument, owner: AppIdOwner) -> Self {
        Self::Stored(Box::new(Stored { document, owner, metadata: ObjectMeta::default() }))
    }

    /// Returns the owner that the Secret names.
    pub(crate) fn owner(&self) -> Option<&AppIdOwner> {
        match self {
            Self::Missing => None,
            Self::Unusable(_, owner) => owner.as_ref(),
            Self::Stored(stored) => Some(&stored.owner),
        }
    }

    fn from_secret(secret: Secret, app_id: &AppId) -> Self {
        let owner = owner_of(&secret.metadata);
        match parse_document(&secret, app_id) {
            Err(unusable) => Self::Unusable(unusable, owner),
            Ok(document) => match owner {
                None => Self::Unusable(UnusableReason::NoOwner, None),
                Some(owner) => Self::Stored(Box::new(Stored { document, owner, metadata: secret.metadata })),
            },
        }
    }
}

/// Returns the owner of a key Secret or a rendered Secret, from its annotations.
pub(crate) fn owner_of(metadata: &ObjectMeta) -> Option<AppIdOwner> {
    let annotation =
        |name| metadata.annotations.as_ref().and_then(|all| all.get(name)).filter(|value| !value.is_empty());
    Some(AppIdOwner {
        namespace: annotation(NAMESPACE_ANNOTATION)?.clone(),
        name: annotation(NAME_ANNOTATION)?.clone(),
    })
}

fn parse_document(secret: &Secret, app_id: &AppId) -> Result<KeyDocument, UnusableReason> {
    if secret.type_.as_deref() != Some(APP_KEYS_TYPE) {
        return Err(UnusableReason::WrongType);
    }
    let bytes = secret.data.as_ref().and_then(|data| data.get(APP_KEYS_KEY)).ok_or(UnusableReason::MissingEntry)?;
    // The parser's error is dropped, because it may quote the input.
    let document: KeyDocument = serde_json::from_slice(&bytes.0).map_err(|_| UnusableReason::NotKeyDocument)?;
    document.validate(app_id).map_err(UnusableReason::Invalid)?;
    Ok(document)
}

/// Builds the Secret with these keys. `metadata` comes from the Secret that the new Secret replaces.
fn build_secret(document: &KeyDocument, owner: &AppIdOwner, metadata: Option<&ObjectMeta>) -> Secret {
    let mut metadata = metadata.cloned().unwrap_or_default();
    metadata.name = Some(app_keys_secret(&document.app_id));
    // If a request has no `managedFields`, the API server keeps the stored `managedFields`. It would reject some of the
    // `managedFields` that it returned itself.
    metadata.managed_fields = None;
    let annotations = metadata.annotations.get_or_insert_default();
    annotations.insert(NAMESPACE_ANNOTATION.to_owned(), owner.namespace.clone());
    annotations.insert(NAME_ANNOTATION.to_owned(), owner.name.clone());
    let bytes = serde_json::to_vec(document).expect("a key document has string keys, strings, numbers and times");
    Secret {
        metadata,
        type_: Some(APP_KEYS_TYPE.to_owned()),
        data: Some(BTreeMap::from([(APP_KEYS_KEY.to_owned(), ByteString(bytes))])),
        ..Secret::default()
    }
}

/// Reads the keys of an App. Here and below, `secrets` is the API for Secrets of the installation's namespace.
pub(crate) async fn read(secrets: &Api<Secret>, app_id: &AppId) -> Result<KeyLookup, KeySecretError> {
    match secrets.get_opt(&app_keys_secret(app_id)).await {
        Ok(None) => Ok(KeyLookup::Missing),
        Ok(Some(secret)) => Ok(KeyLookup::from_secret(secret, app_id)),
        Err(source) => Err(KeySecretError::for_keys_of("get", app_id, source)),
    }
}

/// Creates the Secret. Returns `None` if the Secret already exists. In this case, the caller must read again who claims
/// and owns the appID, and decide again about the owner.
pub(crate) async fn create(
    secrets: &Api<Secret>,
    document: &KeyDocument,
    owner: &AppIdOwner,
) -> Result<Option<Stored>, KeySecretError> {
    let document = document.written_for(&owner.namespace);
    match secrets.create(&post_params(), &build_secret(&document, owner, None)).await {
        Ok(created) => Ok(Some(Stored { document, owner: owner.clone(), metadata: created.metadata })),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
        Err(source) => Err(KeySecretError::for_keys_of("create", &document.app_id, source)),
    }
}

/// Replaces the keys that were read. Returns `None` if the keys have changed or are deleted. In this case, the caller
/// must read again who claims and owns the appID, and decide again about the owner.
pub(crate) async fn replace(
    secrets: &Api<Secret>,
    stored: &Stored,
    document: &KeyDocument,
    owner: &AppIdOwner,
) -> Result<Option<Stored>, KeySecretError> {
    let name = app_keys_secret(&document.app_id);
    let document = document.written_for(&owner.namespace);
    match secrets.replace(&name, &post_params(), &build_secret(&document, owner, Some(&stored.metadata))).await {
        Ok(replaced) => Ok(Some(Stored { document, owner: owner.clone(), metadata: replaced.metadata })),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(None),
        Err(source) => Err(KeySecretError::for_keys_of("update", &document.app_id, source)),
    }
}

/// Deletes the key Secret, which frees the appID. Returns `false`, and deletes nothing, if the Secret has changed since
/// it was read.
pub(crate) async fn delete(secrets: &Api<Secret>, stored: &Stored) -> Result<bool, KeySecretError> {
    let name = app_keys_secret(&stored.document.app_id);
    let preconditions =
        Preconditions { uid: stored.metadata.uid.clone(), resource_version: stored.metadata.resource_version.clone() };
    match secrets.delete(&name, &DeleteParams::default().preconditions(preconditions)).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(source) => Err(KeySecretError::for_keys_of("delete", &stored.document.app_id, source)),
    }
}

fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

// === impl KeySecretError ===

impl KeySecretError {
    pub(crate) fn new(verb: &'static str, what: String, source: kube::Error) -> Self {
        Self { verb, what, source: Box::new(source) }
    }

    fn for_keys_of(verb: &'static str, app_id: &AppId, source: kube::Error) -> Self {
        Self::new(verb, format!("Secret {} of the App's keys", app_keys_secret(app_id)), source)
    }

    /// Returns the error of the API client.
    pub(crate) fn api_error(&self) -> &kube::Error {
        &self.source
    }
}
