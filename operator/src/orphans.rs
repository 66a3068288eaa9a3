//! Takes away rendered Apps whose App is gone. Under `deletionPolicy: Retain` nothing holds an App back, so its document
//! is found here: it goes when the API server itself says that there is no such App.

use std::sync::Arc;

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
    app::{owner::proves_absence, publish::withdraw},
    context::Context,
    error::Error,
    watch::{PublishedApp, published_app_id},
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
    let (namespace, name) = (published.namespace.as_str(), published.name.as_str());
    // Of a Secret that names nobody, nobody's App can be gone; a reconcile writes it anew if it is somebody's.
    if name.is_empty() || context.objects.apps.get(&ObjectRef::new(name).within(namespace)).is_some() {
        return Ok(());
    }
    if exists(context, &published).await? {
        return Ok(());
    }
    // Before it goes: an App that is made anew meanwhile is woken when its document goes, and expects its own.
    if let Some(app_id) = published_app_id(secret) {
        context.probe.forget(&app_id);
    }
    withdraw(context, secret, &published).await?;
    info!(secret, namespace, app = name, "the App is gone; its rendered document is taken away");
    Ok(())
}

/// Whether there is such an App, by the API server's own word: a watch can be behind.
async fn exists(context: &Context, published: &PublishedApp) -> Result<bool, Error> {
    if published.namespace.is_empty() {
        return Ok(false);
    }
    let resource = ApiResource::erase::<App>(&());
    // An App that does not decode is one.
    let api: Api<DynamicObject> = Api::namespaced_with(context.client.clone(), &published.namespace, &resource);
    match api.get(&published.name).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if proves_absence(&status, &published.name) => Ok(false),
        Err(error) => Err(Error::api("look for an App")(error)),
    }
}
