//! The Secret that keeps an App's keys and says who holds the appID: read by GET, made by POST, changed by PUT with its
//! resourceVersion. Never by patch or apply: that of a leader which was paused would take newer keys away.

use std::collections::BTreeMap;

use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api,
    api::{DeleteParams, ObjectMeta, PostParams, Preconditions},
};
use latchkey_crds::{
    names::{APP_KEYS_KEY, APP_KEYS_TYPE, FIELD_MANAGER, NAME_ANNOTATION, NAMESPACE_ANNOTATION, app_keys_secret},
    types::AppId,
};

use super::{InvalidKeys, KeyDocument};

#[cfg(test)]
mod tests;

/// The App that holds an appID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

/// Keys as they are in the cluster, with all that a PUT in their place needs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Kept {
    pub(crate) document: KeyDocument,
    pub(crate) holder: Holder,
    metadata: ObjectMeta,
}

/// What there is of an App's keys.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Found {
    Missing,
    /// There, and never written over. The holder is told where the Secret tells it.
    Unusable(Unusable, Option<Holder>),
    Kept(Box<Kept>),
}

/// Why a key Secret that is there cannot be used. Never tells what is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unusable {
    #[error("its type is not {APP_KEYS_TYPE}")]
    Type,
    #[error("it has no annotation {NAMESPACE_ANNOTATION} or {NAME_ANNOTATION}, which say whose keys they are")]
    Holder,
    #[error("it has no key {APP_KEYS_KEY}")]
    NoKey,
    #[error("its {APP_KEYS_KEY} is not a key document")]
    NotKeys,
    #[error("its keys are not usable: {0}")]
    Invalid(#[source] InvalidKeys),
}

/// The API server did not do what was asked of it for the keys, or to know whose they are.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} the {what}")]
pub(crate) struct KeysError {
    verb: &'static str,
    what: String,
    #[source]
    source: Box<kube::Error>,
}

// === impl Kept, Found ===

impl Kept {
    /// Of the Secret as it was read or written.
    pub(crate) fn version(&self) -> &str {
        self.metadata.resource_version.as_deref().unwrap_or_default()
    }

    /// Whether the platform team gave them to another namespace since they were written.
    pub(crate) fn are_handed_over(&self) -> bool {
        self.document.namespace.as_ref().is_some_and(|namespace| *namespace != self.holder.namespace)
    }
}

impl Found {
    /// Keys as they are in a Secret with these annotations.
    #[cfg(test)]
    pub(crate) fn kept(document: KeyDocument, holder: Holder) -> Self {
        Self::Kept(Box::new(Kept { document, holder, metadata: ObjectMeta::default() }))
    }

    /// Who holds the appID by this.
    pub(crate) fn holder(&self) -> Option<&Holder> {
        match self {
            Self::Missing => None,
            Self::Unusable(_, holder) => holder.as_ref(),
            Self::Kept(kept) => Some(&kept.holder),
        }
    }

    fn of(secret: Secret, app_id: &AppId) -> Self {
        let holder = holder(&secret.metadata);
        match document(&secret, app_id) {
            Err(unusable) => Self::Unusable(unusable, holder),
            Ok(document) => match holder {
                None => Self::Unusable(Unusable::Holder, None),
                Some(holder) => Self::Kept(Box::new(Kept { document, holder, metadata: secret.metadata })),
            },
        }
    }
}

/// Whose a key Secret or a rendered Secret is, by its annotations.
pub(crate) fn holder(metadata: &ObjectMeta) -> Option<Holder> {
    let annotation =
        |name| metadata.annotations.as_ref().and_then(|all| all.get(name)).filter(|value| !value.is_empty());
    Some(Holder { namespace: annotation(NAMESPACE_ANNOTATION)?.clone(), name: annotation(NAME_ANNOTATION)?.clone() })
}

fn document(secret: &Secret, app_id: &AppId) -> Result<KeyDocument, Unusable> {
    if secret.type_.as_deref() != Some(APP_KEYS_TYPE) {
        return Err(Unusable::Type);
    }
    let octets = secret.data.as_ref().and_then(|data| data.get(APP_KEYS_KEY)).ok_or(Unusable::NoKey)?;
    // The parser's error may quote what it read.
    let document: KeyDocument = serde_json::from_slice(&octets.0).map_err(|_| Unusable::NotKeys)?;
    document.check(app_id).map_err(Unusable::Invalid)?;
    Ok(document)
}

/// The Secret with these keys; `metadata` is that of the Secret in whose place it goes.
fn secret(document: &KeyDocument, holder: &Holder, metadata: Option<&ObjectMeta>) -> Secret {
    let mut metadata = metadata.cloned().unwrap_or_default();
    metadata.name = Some(app_keys_secret(&document.app_id));
    // The API server knows better, and refuses some of what it tells itself.
    metadata.managed_fields = None;
    let annotations = metadata.annotations.get_or_insert_default();
    annotations.insert(NAMESPACE_ANNOTATION.to_owned(), holder.namespace.clone());
    annotations.insert(NAME_ANNOTATION.to_owned(), holder.name.clone());
    let octets = serde_json::to_vec(document).expect("keys are maps with string keys, strings, numbers and times");
    Secret {
        metadata,
        type_: Some(APP_KEYS_TYPE.to_owned()),
        data: Some(BTreeMap::from([(APP_KEYS_KEY.to_owned(), ByteString(octets))])),
        ..Secret::default()
    }
}

/// Looks at the keys of an App; `secrets` are those of the install's namespace.
pub(crate) async fn read(secrets: &Api<Secret>, app_id: &AppId) -> Result<Found, KeysError> {
    match secrets.get_opt(&app_keys_secret(app_id)).await {
        Ok(None) => Ok(Found::Missing),
        Ok(Some(secret)) => Ok(Found::of(secret, app_id)),
        Err(source) => Err(KeysError::of("get", app_id, source)),
    }
}

/// Makes the Secret. None: somebody else did, so all has to be read and decided again.
pub(crate) async fn create(
    secrets: &Api<Secret>,
    document: &KeyDocument,
    holder: &Holder,
) -> Result<Option<Kept>, KeysError> {
    let document = document.held_by(&holder.namespace);
    match secrets.create(&post_params(), &secret(&document, holder, None)).await {
        Ok(made) => Ok(Some(Kept { document, holder: holder.clone(), metadata: made.metadata })),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
        Err(source) => Err(KeysError::of("create", &document.app_id, source)),
    }
}

/// Puts keys in the place of those that were read. None: they are not there any more as they were read, so all has to be
/// read and decided again.
pub(crate) async fn replace(
    secrets: &Api<Secret>,
    kept: &Kept,
    document: &KeyDocument,
    holder: &Holder,
) -> Result<Option<Kept>, KeysError> {
    let name = app_keys_secret(&document.app_id);
    let document = document.held_by(&holder.namespace);
    match secrets.replace(&name, &post_params(), &secret(&document, holder, Some(&kept.metadata))).await {
        Ok(put) => Ok(Some(Kept { document, holder: holder.clone(), metadata: put.metadata })),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(None),
        Err(source) => Err(KeysError::of("update", &document.app_id, source)),
    }
}

/// Takes the keys away, which frees the appID: once `deletionPolicy: Delete` has run to its end. Only those that were
/// read go. Whether they are gone.
pub(crate) async fn remove(secrets: &Api<Secret>, kept: &Kept) -> Result<bool, KeysError> {
    let name = app_keys_secret(&kept.document.app_id);
    let preconditions =
        Preconditions { uid: kept.metadata.uid.clone(), resource_version: kept.metadata.resource_version.clone() };
    match secrets.delete(&name, &DeleteParams::default().preconditions(preconditions)).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(source) => Err(KeysError::of("delete", &kept.document.app_id, source)),
    }
}

fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

// === impl KeysError ===

impl KeysError {
    pub(crate) fn new(verb: &'static str, what: String, source: kube::Error) -> Self {
        Self { verb, what, source: Box::new(source) }
    }

    fn of(verb: &'static str, app_id: &AppId, source: kube::Error) -> Self {
        Self::new(verb, format!("Secret {} of the App's keys", app_keys_secret(app_id)), source)
    }

    /// What the API server said.
    pub(crate) fn api(&self) -> &kube::Error {
        &self.source
    }
}
