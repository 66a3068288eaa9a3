//! The Secret that the operator creates for a Client: read by GET, created by POST, changed by PUT with the
//! resourceVersion that was read. So if two writers rotate a client secret at the same time, only one of them succeeds.
//!
//! Everything that a rotation needs is in this one Secret: the new value, the hash of the previous value with the time
//! at which it expires, and the request that was fulfilled. If the operator ends before the write, the next operator
//! repeats the rotation. If the operator ends after the write, the next operator sees that the request is fulfilled. In
//! both cases the next operator publishes the hashes that the Secret then has. A late PUT from the first operator
//! fails, because the version has changed.

use std::collections::BTreeMap;

use k8s_openapi::{ByteString, api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::OwnerReference};
use kube::{
    Api, Resource, ResourceExt,
    api::{ObjectMeta, PostParams},
};
use latchkey_crds::{
    client::Client,
    names::{CLIENT_SECRET_TYPE, CLIENT_SECRET_VALUE_KEY, FIELD_MANAGER, ROTATE_SECRET_ANNOTATION},
    types::{ClientId, is_subdomain},
};

use crate::{
    app::keys::policy::digest_if_long,
    client::secret_state::{DesiredSecret, SecretContents, SecretState, advance, generate_secret},
    context::Context,
    error::Error,
    facts::SecretBytes,
    undecodable,
    watch::{ClientSecretState, KnownSecret, NamespacedName},
};

/// The maximum number of attempts to write the Secret. A write is repeated if somebody else has written the Secret in
/// the meantime.
const MAX_ATTEMPTS: usize = 3;

/// The outcome of a reconcile for the Secret of a Client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SecretOutcome {
    /// The operator has written nothing: the Client needs no Secret, the Secret is up to date, or the watch has not
    /// reported the newest state of the Client yet.
    Unchanged,
    /// The operator has written the Secret, or learned something new about it. The document of the App may be outdated.
    Changed { rotated: bool },
    /// The Client does not own the Secret of this name. `is_news`: the operator did not know this before.
    Conflict { is_news: bool },
}

/// Creates, repairs or rotates the Secret of a Client, if the operator creates one for this Client. If there is nothing
/// to do, sends no request.
pub(super) async fn ensure(
    context: &Context,
    client: &Client,
    client_id: &ClientId,
    issuer: &str,
) -> Result<SecretOutcome, Error> {
    // The name of the Secret can be invalid: a Client that was edited to have such a name is refused, but can still be
    // served as it was accepted last. The operator sends no request for such a name.
    let name = client.created_secret().filter(|name| is_subdomain(name));
    let Some(name) = name else { return Ok(SecretOutcome::Unchanged) };
    let Some(web) = client.spec.web() else { return Ok(SecretOutcome::Unchanged) };
    let namespace = client.namespace().unwrap_or_default();
    let desired = DesiredSecret {
        issuer,
        client_id,
        rotate_request: client.annotations().get(ROTATE_SECRET_ANNOTATION).map(String::as_str),
        overlap_seconds: web.rotation_overlap_seconds(),
    };
    let secret_name = NamespacedName::new(&namespace, &name);
    match context.objects.client_secrets.get(&secret_name) {
        Some(known) if !context.creates_client_secrets || is_settled(&known, client, &desired, context) => {
            return Ok(match known {
                KnownSecret::OfType(state) if state.is_owned_by(&uid(client)) => SecretOutcome::Unchanged,
                KnownSecret::OfType(_) | KnownSecret::Foreign => SecretOutcome::Conflict { is_news: false },
            });
        }
        None if !context.creates_client_secrets => return Ok(SecretOutcome::Unchanged),
        Some(_) | None => {}
    }
    let api: Api<Secret> = Api::namespaced(context.client.clone(), &namespace);
    let mut attempts = 0;
    loop {
        attempts += 1;
        let stored = api.get_opt(&name).await.map_err(Error::api("read the Secret of a Client"))?;
        if let Some(stored) = &stored
            && !ClientSecretState::belongs_to(stored, &uid(client))
        {
            let is_news = if stored.type_.as_deref() == Some(CLIENT_SECRET_TYPE) {
                context.objects.client_secrets.record_read(&secret_name, ClientSecretState::of(stored))
            } else {
                context.objects.client_secrets.record_foreign(&secret_name)
            };
            return Ok(SecretOutcome::Conflict { is_news });
        }
        let contents = stored.as_ref().map(contents_of);
        let state = advance(contents.as_ref(), &desired, context.now(), generate_secret)?;
        let SecretState { write: Some(next), .. } = state else {
            // Records the state that was read, because the watch has not reported it yet.
            let stored = stored.unwrap_or_default();
            context.objects.client_secrets.record_read(&secret_name, ClientSecretState::of(&stored));
            return Ok(SecretOutcome::Changed { rotated: false });
        };
        let rotated = contents.is_some_and(|before| has_other_value(&before, &next));
        if rotated && !is_current(context, client).await? {
            // The watch has reported an outdated rotation request. It will report the request that must be fulfilled.
            return Ok(SecretOutcome::Unchanged);
        }
        let written = match stored {
            None => api.create(&post_params(), &new_secret(client, &name, next)).await,
            Some(stored) => api.replace(&name, &post_params(), &changed_secret(stored, next)).await,
        };
        match written {
            Ok(written) => {
                context.objects.client_secrets.record_read(&secret_name, ClientSecretState::of(&written));
                return Ok(SecretOutcome::Changed { rotated });
            }
            // Somebody else has created, changed or deleted the Secret since it was read.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) && attempts < MAX_ATTEMPTS => {}
            Err(error) => return Err(Error::api("write the Secret of a Client")(error)),
        }
    }
}

/// Whether the known state of the Secret shows that there is nothing to do.
fn is_settled(known: &KnownSecret, client: &Client, desired: &DesiredSecret<'_>, context: &Context) -> bool {
    match known {
        KnownSecret::OfType(state) if state.is_owned_by(&uid(client)) => {
            state.hashes_at(context.now()).is_some()
                && state.identifies(desired.issuer, desired.client_id.as_str())
                && state.has_fulfilled(desired.rotate_request)
        }
        // The watch reports when this Secret is deleted or gets another owner.
        KnownSecret::OfType(_) => true,
        // A Secret of another type. It may have been deleted after the operator read it and before the operator
        // recorded it here. Then the watch reports no deletion any more, so the Secret is read again.
        KnownSecret::Foreign => false,
    }
}

/// Reads the Client from the API server, and returns whether it still has the rotation request that the watch has
/// reported. Another operator may have fulfilled a later request already. To fulfil the earlier request again would
/// rotate once too often.
async fn is_current(context: &Context, client: &Client) -> Result<bool, Error> {
    let current = undecodable::read::<Client>(context, client).await?;
    // The watch stores long requests as their digests.
    let request = |annotations: &BTreeMap<String, String>| {
        annotations.get(ROTATE_SECRET_ANNOTATION).map(|value| digest_if_long(value))
    };
    Ok(current.is_some_and(|current| {
        current.uid() == client.uid() && request(current.annotations()) == request(client.annotations())
    }))
}

fn uid(client: &Client) -> String {
    client.uid().unwrap_or_default()
}

fn contents_of(secret: &Secret) -> SecretContents {
    let values = secret.data.iter().flatten();
    SecretContents {
        values: values.map(|(key, value)| (key.clone(), SecretBytes(value.0.clone()))).collect(),
        annotations: secret.annotations().clone(),
    }
}

fn has_other_value(before: &SecretContents, next: &SecretContents) -> bool {
    let value = |contents: &SecretContents| contents.values.get(CLIENT_SECRET_VALUE_KEY).map(|value| value.0.clone());
    value(before).is_some() && value(before) != value(next)
}

fn to_data(contents: &SecretContents) -> BTreeMap<String, ByteString> {
    contents.values.iter().map(|(key, value)| (key.clone(), ByteString(value.0.clone()))).collect()
}

fn new_secret(client: &Client, name: &str, contents: SecretContents) -> Secret {
    let labels = [("app.kubernetes.io/managed-by", FIELD_MANAGER), ("app.kubernetes.io/part-of", "latchkey")];
    let labels = labels.map(|(name, value)| (name.to_owned(), value.to_owned()));
    Secret {
        data: Some(to_data(&contents)),
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: client.namespace(),
            labels: Some(labels.into()),
            annotations: Some(contents.annotations).filter(|annotations| !annotations.is_empty()),
            owner_references: Some(vec![owner_reference(client)]),
            ..ObjectMeta::default()
        },
        type_: Some(CLIENT_SECRET_TYPE.to_owned()),
        ..Secret::default()
    }
}

/// Returns the stored Secret with other contents. It has the resourceVersion that was read, so the write fails if the
/// Secret has changed since the read.
fn changed_secret(mut stored: Secret, contents: SecretContents) -> Secret {
    stored.data = Some(to_data(&contents));
    stored.metadata.annotations = Some(contents.annotations);
    // If a request has no `managedFields`, the API server keeps the stored `managedFields`.
    stored.metadata.managed_fields = None;
    stored
}

/// Makes the Client the controller of its Secret, so that the garbage collector deletes the Secret with the Client.
/// `blockOwnerDeletion` would need a permission on the finalizers of Clients.
fn owner_reference(client: &Client) -> OwnerReference {
    OwnerReference {
        api_version: Client::api_version(&()).into_owned(),
        kind: Client::kind(&()).into_owned(),
        name: client.name_any(),
        uid: uid(client),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

#[cfg(test)]
mod tests;
