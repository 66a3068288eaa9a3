//! Publishes documents to the servers, as Secrets in the installation's namespace, and deletes these Secrets.

use base64::{Engine, engine::general_purpose::STANDARD};
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use latchkey_crds::{
    names::{
        FIELD_MANAGER, NAME_ANNOTATION, NAMESPACE_ANNOTATION, PAGES_HOST_ANNOTATION, RENDERED_APP_KEY,
        RENDERED_APP_TYPE, rendered_app_secret,
    },
    rendered::RenderedApp,
    types::AppId,
};
use serde_json::json;

use crate::{
    app::render::Rendered,
    context::Context,
    error::Error,
    watch::{NamespacedName, PublishedApp},
};

/// The App that a document belongs to.
#[derive(Clone, Copy)]
pub(crate) struct DocumentOwner<'a> {
    pub(crate) app_id: &'a AppId,
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
}

/// Whether this document is already published for this App, according to the watch and the operator's own writes.
pub(crate) fn is_published(context: &Context, owner: DocumentOwner<'_>, rendered: &Rendered) -> bool {
    context.objects.published.get(&rendered_app_secret(owner.app_id)).is_some_and(|published| {
        published.revision.as_ref() == Some(&rendered.revision)
            && published.namespace == owner.namespace
            && published.name == owner.name
            && published.pages_host == rendered.pages_host
    })
}

/// Reads the published document of an App. Returns `None` if there is none, if it belongs to another App, or if it
/// cannot be parsed.
pub(crate) async fn read_published(
    context: &Context,
    app_id: &AppId,
    app: &NamespacedName,
) -> Result<Option<RenderedApp>, Error> {
    let Some(secret) = read_secret(&context.install_secrets(), app_id).await? else { return Ok(None) };
    let is_of_app = PublishedApp::from_secret(&secret)
        .is_some_and(|published| published.namespace == app.namespace() && published.name == app.name());
    Ok(parse_document(secret).filter(|_| is_of_app))
}

/// Reads the published document with this appID, even if it belongs to another App. Returns `None` if there is no
/// document, or if it cannot be parsed. `secrets` is the API for Secrets of the installation's namespace.
pub(crate) async fn read_published_of_any(secrets: &Api<Secret>, app_id: &AppId) -> Result<Option<RenderedApp>, Error> {
    Ok(read_secret(secrets, app_id).await?.and_then(parse_document))
}

async fn read_secret(secrets: &Api<Secret>, app_id: &AppId) -> Result<Option<Secret>, Error> {
    secrets.get_opt(&rendered_app_secret(app_id)).await.map_err(Error::api("read the rendered App"))
}

fn parse_document(secret: Secret) -> Option<RenderedApp> {
    let document = secret.data?.remove(RENDERED_APP_KEY)?;
    std::str::from_utf8(&document.0).ok()?.parse().ok()
}

/// Writes the Secret of the document, and overwrites changes that others made to it.
pub(crate) async fn publish(context: &Context, owner: DocumentOwner<'_>, rendered: &Rendered) -> Result<(), Error> {
    let name = rendered_app_secret(owner.app_id);
    let api = context.install_secrets();
    let mut annotations = json!({ NAMESPACE_ANNOTATION: owner.namespace, NAME_ANNOTATION: owner.name });
    if let Some(host) = &rendered.pages_host {
        annotations[PAGES_HOST_ANNOTATION] = json!(host);
    }
    let secret = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "labels": { "app.kubernetes.io/managed-by": FIELD_MANAGER, "app.kubernetes.io/part-of": "latchkey" },
            "annotations": annotations,
        },
        "type": RENDERED_APP_TYPE,
        "data": { RENDERED_APP_KEY: STANDARD.encode(&rendered.bytes) },
    });
    let (parameters, patch) = (PatchParams::apply(FIELD_MANAGER).force(), Patch::Apply(&secret));
    let published = match api.patch(&name, &parameters, &patch).await {
        // The patch is invalid if somebody created a Secret of this name with another type, because the type of a
        // Secret is immutable.
        Err(kube::Error::Api(status)) if status.code == 422 => {
            delete_secret(&api, &name, None).await?;
            api.patch(&name, &parameters, &patch).await
        }
        result => result,
    };
    let published = published.map_err(Error::api("publish the rendered App"))?;
    let host_before = context.objects.published.get(&name).and_then(|app| app.pages_host);
    if let Some(app) = PublishedApp::from_secret(&published) {
        context.objects.published.record_write(&name, app);
    }
    // The watch reports no change after this write, so the Apps that wait for the host are queued here.
    if let Some(host) = host_before.filter(|host| rendered.pages_host.as_ref() != Some(host)) {
        context.reconcile_queue.enqueue_apps_with_pages_host(&context.objects, &host);
    }
    context.metrics.record_publish();
    Ok(())
}

/// Deletes the Secret of a document. Fails if the Secret has changed since the operator read it as `published`.
pub(crate) async fn delete_document(context: &Context, secret: &str, published: &PublishedApp) -> Result<(), Error> {
    let api = context.install_secrets();
    delete_secret(&api, secret, Some(published)).await
}

async fn delete_secret(api: &Api<Secret>, name: &str, expected: Option<&PublishedApp>) -> Result<(), Error> {
    let preconditions = expected.map(|expected| Preconditions {
        uid: Some(expected.uid.clone()),
        resource_version: Some(expected.resource_version.clone()),
    });
    let parameters = DeleteParams { preconditions, ..DeleteParams::default() };
    match api.delete(name, &parameters).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(Error::api("delete a rendered App")(error)),
    }
}
