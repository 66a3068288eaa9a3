//! Deletes the rendered documents of deleted Apps. `deletionPolicy: Retain` sets no finalizer, so a deleted App leaves
//! its document. The document is deleted if the App does not exist according to the API server.

use std::sync::Arc;

use kube::{Api, runtime::reflector::ObjectRef};
use latchkey_crds::{app::App, types::AppId};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    app::{
        keys::secret as key_secret,
        ownership::{AppIdOwner, gather::proves_absence},
        publish::delete_document,
    },
    context::Context,
    error::{Error, ErrorChain},
    panics::catch_async,
    watch::app_id_of_secret,
};

/// Checks each queued Secret, one after the other, until asked to stop.
pub(crate) async fn run(context: Arc<Context>, mut queue: mpsc::UnboundedReceiver<String>, stop: &CancellationToken) {
    while let Some(Some(secret)) = stop.run_until_cancelled(queue.recv()).await {
        if let Err(error) =
            catch_async(delete_if_orphan(&context, &secret)).await.unwrap_or_else(|panicked| Err(panicked.into()))
        {
            let wait = context.failures.retry_after(&secret, error.kind());
            warn!(secret, error = %ErrorChain(&error), "a rendered App could not be deleted yet");
            let orphans = context.reconcile_queue.orphans.clone();
            tokio::spawn(async move {
                tokio::time::sleep(wait).await;
                let _ = orphans.send(secret);
            });
        } else {
            context.failures.reset(&secret);
        }
    }
}

async fn delete_if_orphan(context: &Context, secret: &str) -> Result<(), Error> {
    let Some(published) = context.objects.published.get(secret) else { return Ok(()) };
    let Some(id) = app_id_of_secret(secret) else { return Ok(()) };
    if context.releases.is_asking_servers(&id) {
        // A release of this appID (see `release.rs`) has published the document, and deletes the document when it ends.
        return Ok(());
    }
    let owner = AppIdOwner { namespace: published.namespace.clone(), name: published.name.clone() };
    // A Secret that names no App is not deleted. If it belongs to an App, the reconcile of that App rewrites it.
    if owner.name.is_empty() || owning_app_exists(context, &owner, &id).await? {
        return Ok(());
    }
    if let Some(app_id_owner) = app_id_owner(context, &id).await?
        && app_id_owner != owner
        && owning_app_exists(context, &app_id_owner, &id).await?
    {
        // Somebody edited the annotations of the Secret. The reconcile of the App that owns the appID rewrites them.
        return Ok(());
    }
    // Drop the published revision before the document is deleted, not after it. If the App is created again, the watch
    // event about the deletion triggers a reconcile of the new App. This reconcile records the revision of the new
    // document, which must not be dropped.
    context.monitor.forget(&id);
    delete_document(context, secret, &published).await?;
    info!(
        secret,
        of.namespace = owner.namespace,
        app = owner.name,
        "the App is deleted; deleted its rendered document"
    );
    context.reconcile_queue.enqueue_release(id);
    Ok(())
}

/// Returns the App that the key Secret names as the owner of the appID.
async fn app_id_owner(context: &Context, id: &AppId) -> Result<Option<AppIdOwner>, Error> {
    Ok(key_secret::read(&context.install_secrets(), id).await?.owner().cloned())
}

/// Whether the App `owner` exists and can own the appID. If the store has no such App, asks the API server, because a
/// watch can be late.
pub(crate) async fn owning_app_exists(context: &Context, owner: &AppIdOwner, id: &AppId) -> Result<bool, Error> {
    let stored = context.objects.apps.get(&ObjectRef::new(&owner.name).within(&owner.namespace));
    // An App that cannot be decoded counts as existing.
    if stored.is_some_and(|app| app.0.as_ref().map_or(true, |app| can_own(app, id))) {
        return Ok(true);
    }
    if owner.namespace.is_empty() {
        return Ok(false);
    }
    let api: Api<App> = Api::namespaced(context.client.clone(), &owner.namespace);
    match api.get(&owner.name).await {
        Ok(app) => Ok(can_own(&app, id)),
        Err(kube::Error::SerdeError(_)) => Ok(true),
        Err(kube::Error::Api(status)) if proves_absence(&status, &owner.name) => Ok(false),
        Err(error) => Err(Error::api("look for an App")(error)),
    }
}

/// Whether the App can own this appID. An App that was deleted and created again with another appID cannot.
fn can_own(app: &App, id: &AppId) -> bool {
    app.app_id().map_or(true, |own| own == *id)
}

#[cfg(test)]
mod tests {
    use http::{Method, StatusCode};
    use kube::runtime::watcher::Event;
    use latchkey_crds::rendered::Revision;
    use serde_json::{Value, json};

    use super::*;
    use crate::app::mock_api::{MockApi, context, not_found};
    use crate::{quota::DocumentSize, watch::PublishedApp};

    const APP: &str = "/apis/latchkey.dev/v1alpha1/namespaces/shop/apps/store";
    const SECRET: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-app-shop";
    const KEYS: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-keys-shop";

    fn app(app_id: &str) -> Value {
        json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "App", "metadata": { "namespace": "shop", "name": "store" },
            "spec": { "appID": app_id, "displayName": "Shop" },
        })
    }

    /// Checks the document of the appID `shop`. Its annotations name the App `shop/store`.
    async fn check_document(script: &MockApi, stored: Option<Value>) {
        let (context, mut apps) = context(script.client());
        apps.apply_watcher_event(&Event::Init);
        if let Some(stored) = stored {
            apps.apply_watcher_event(&Event::InitApply(serde_json::from_value(stored).unwrap()));
        }
        apps.apply_watcher_event(&Event::InitDone);
        let published = PublishedApp {
            revision: Some(Revision::of(b"1")),
            namespace: "shop".into(),
            name: "store".into(),
            pages_host: None,
            resource_version: "7".into(),
            uid: "1".into(),
            size: DocumentSize::default(),
        };
        context.objects.published.record_write("latchkey-app-shop", published);
        delete_if_orphan(&context, "latchkey-app-shop").await.unwrap();
    }

    #[tokio::test]
    async fn a_document_is_deleted_when_its_app_does_not_exist_according_to_the_api_server() {
        check_document(&MockApi::default(), Some(app("shop"))).await;
        let existing = MockApi::default().expect(Method::GET, APP, |_| (StatusCode::OK, app("shop")));
        check_document(&existing, None).await;
        existing.finish();
        let deleted = MockApi::default()
            .expect(Method::GET, APP, |_| not_found("store"))
            .expect(Method::GET, KEYS, |_| not_found("latchkey-keys-shop"))
            .expect(Method::DELETE, SECRET, |call| {
                assert_eq!(call.body["preconditions"], json!({ "resourceVersion": "7", "uid": "1" }));
                not_found("latchkey-app-shop")
            });
        check_document(&deleted, None).await;
        deleted.finish();
    }

    #[tokio::test]
    async fn a_document_is_deleted_when_its_app_was_recreated_with_another_app_id() {
        let script = MockApi::default()
            .expect(Method::GET, APP, |_| (StatusCode::OK, app("other")))
            .expect(Method::GET, KEYS, |_| not_found("latchkey-keys-shop"))
            .expect(Method::DELETE, SECRET, |_| not_found("latchkey-app-shop"));
        check_document(&script, Some(app("other"))).await;
        script.finish();
    }
}
