//! Takes away rendered Apps whose App is gone. Under `deletionPolicy: Retain` nothing holds an App back, so its document
//! is found here: it goes when the API server itself says that there is no such App.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api,
    api::{ApiResource, DynamicObject},
    runtime::reflector::ObjectRef,
};
use latchkey_crds::app::App;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    app::{
        keys::secret as key_secret,
        owner::{Holder, proves_absence},
        publish::withdraw,
    },
    context::Context,
    error::Error,
    watch::rendered_app_id,
};

/// Judges each Secret that is named, one after the other, until asked to stop.
pub(crate) async fn run(context: Arc<Context>, mut named: mpsc::UnboundedReceiver<String>, stop: &CancellationToken) {
    while let Some(Some(secret)) = stop.run_until_cancelled(named.recv()).await {
        if let Err(error) = judge(&context, &secret).await {
            let wait = context.failures.retry_after(&secret, error.kind());
            warn!(secret, error = &error as &dyn std::error::Error, "a rendered App is not taken away yet");
            let again = context.wakes.orphans.clone();
            tokio::spawn(async move {
                tokio::time::sleep(wait).await;
                let _ = again.send(secret);
            });
        } else {
            context.failures.forget(&secret);
        }
    }
}

async fn judge(context: &Context, secret: &str) -> Result<(), Error> {
    let Some(published) = context.objects.published.get(secret) else { return Ok(()) };
    let of = Holder { namespace: published.namespace.clone(), name: published.name.clone() };
    // Of a Secret that names nobody, nobody's App can be gone; a reconcile writes it anew if it is somebody's.
    if of.name.is_empty() || exists(context, &of).await? {
        return Ok(());
    }
    if let Some(holder) = holder(context, secret).await?
        && holder != of
        && exists(context, &holder).await?
    {
        // Somebody edited whose it says that it is; the holder's reconcile writes it anew.
        return Ok(());
    }
    withdraw(context, secret, &published).await?;
    info!(secret, of.namespace, app = of.name, "the App is gone; its rendered document is taken away");
    Ok(())
}

/// Who holds the appID of a rendered Secret by its keys.
async fn holder(context: &Context, secret: &str) -> Result<Option<Holder>, Error> {
    let Some(id) = rendered_app_id(secret) else { return Ok(None) };
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &context.namespace);
    Ok(key_secret::read(&secrets, &id).await?.holder().cloned())
}

/// Whether there is such an App: in the store, else by the API server's own word, since a watch can be behind.
async fn exists(context: &Context, app: &Holder) -> Result<bool, Error> {
    if context.objects.apps.get(&ObjectRef::new(&app.name).within(&app.namespace)).is_some() {
        return Ok(true);
    }
    if app.namespace.is_empty() {
        return Ok(false);
    }
    let resource = ApiResource::erase::<App>(&());
    // An App that does not decode is one.
    let api: Api<DynamicObject> = Api::namespaced_with(context.client.clone(), &app.namespace, &resource);
    match api.get(&app.name).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if proves_absence(&status, &app.name) => Ok(false),
        Err(error) => Err(Error::api("look for an App")(error)),
    }
}
