//! Takes away rendered Apps whose App is gone. Under `deletionPolicy: Retain` nothing holds an App back, so its document
//! is found here: it goes when the API server itself says that there is no such App.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, runtime::reflector::ObjectRef};
use latchkey_crds::{app::App, types::AppId};
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
    error::{Chain, Error},
    panics::catch_async,
    watch::rendered_id,
};

/// Judges each Secret that is named, one after the other, until asked to stop.
pub(crate) async fn run(context: Arc<Context>, mut named: mpsc::UnboundedReceiver<String>, stop: &CancellationToken) {
    while let Some(Some(secret)) = stop.run_until_cancelled(named.recv()).await {
        if let Err(error) = catch_async(judge(&context, &secret)).await.unwrap_or_else(|panicked| Err(panicked.into()))
        {
            let wait = context.failures.retry_after(&secret, error.kind());
            warn!(secret, error = %Chain(&error), "a rendered App is not taken away yet");
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
    let Some(id) = rendered_id(secret) else { return Ok(()) };
    if context.releases.is_under_way(&id) {
        // Its document goes when that ends.
        return Ok(());
    }
    let of = Holder { namespace: published.namespace.clone(), name: published.name.clone() };
    // Of a Secret that names nobody, nobody's App can be gone; a reconcile writes it anew if it is somebody's.
    if of.name.is_empty() || exists(context, &of, &id).await? {
        return Ok(());
    }
    if let Some(holder) = holder(context, &id).await?
        && holder != of
        && exists(context, &holder, &id).await?
    {
        // Somebody edited whose it says that it is; the holder's reconcile writes it anew.
        return Ok(());
    }
    // Before it goes: an App that is made anew meanwhile is woken when its document goes, and then expects its own.
    context.probe.forget(&id);
    withdraw(context, secret, &published).await?;
    info!(secret, of.namespace, app = of.name, "the App is gone; its rendered document is taken away");
    context.wakes.release(id);
    Ok(())
}

/// Who holds the appID by its keys.
async fn holder(context: &Context, id: &AppId) -> Result<Option<Holder>, Error> {
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &context.namespace);
    Ok(key_secret::read(&secrets, id).await?.holder().cloned())
}

/// Whether there is such an App: in the store, else by the API server's own word, since a watch can be behind.
pub(crate) async fn exists(context: &Context, holder: &Holder, id: &AppId) -> Result<bool, Error> {
    let stored = context.objects.apps.get(&ObjectRef::new(&holder.name).within(&holder.namespace));
    // An App that does not decode is one.
    if stored.is_some_and(|app| app.0.as_ref().map_or(true, |app| may_hold(app, id))) {
        return Ok(true);
    }
    if holder.namespace.is_empty() {
        return Ok(false);
    }
    let api: Api<App> = Api::namespaced(context.client.clone(), &holder.namespace);
    match api.get(&holder.name).await {
        Ok(app) => Ok(may_hold(&app, id)),
        Err(kube::Error::SerdeError(_)) => Ok(true),
        Err(kube::Error::Api(status)) if proves_absence(&status, &holder.name) => Ok(false),
        Err(error) => Err(Error::api("look for an App")(error)),
    }
}

/// Whether the App may be the one of this appID; not one that was made anew under the name, with another.
fn may_hold(app: &App, id: &AppId) -> bool {
    app.app_id().map_or(true, |own| own == *id)
}

#[cfg(test)]
mod tests {
    use http::{Method, StatusCode};
    use kube::runtime::watcher::Event;
    use latchkey_crds::rendered::Revision;
    use serde_json::{Value, json};

    use super::*;
    use crate::app::scripted::{Script, context, not_found};
    use crate::{quota::Size, watch::PublishedApp};

    const APP: &str = "/apis/latchkey.dev/v1alpha1/namespaces/shop/apps/store";
    const SECRET: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-app-shop";
    const KEYS: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-keys-shop";

    fn app(app_id: &str) -> Value {
        json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "App", "metadata": { "namespace": "shop", "name": "store" },
            "spec": { "appID": app_id, "displayName": "Shop" },
        })
    }

    /// What becomes of the document of `shop`, which App `shop/store` left.
    async fn judged(script: &Script, stored: Option<Value>) {
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
            resource_version: "7".into(),
            uid: "1".into(),
            size: Size::default(),
        };
        context.objects.published.wrote("latchkey-app-shop", published);
        judge(&context, "latchkey-app-shop").await.unwrap();
    }

    #[tokio::test]
    async fn a_document_goes_only_when_the_api_server_says_that_there_is_no_such_app() {
        judged(&Script::default(), Some(app("shop"))).await;
        let there = Script::default().expect(Method::GET, APP, |_| (StatusCode::OK, app("shop")));
        judged(&there, None).await;
        there.calls();
        let gone = Script::default()
            .expect(Method::GET, APP, |_| not_found("store"))
            .expect(Method::GET, KEYS, |_| not_found("latchkey-keys-shop"))
            .expect(Method::DELETE, SECRET, |call| {
                assert_eq!(call.body["preconditions"], json!({ "resourceVersion": "7", "uid": "1" }));
                not_found("latchkey-app-shop")
            });
        judged(&gone, None).await;
        gone.calls();
    }

    #[tokio::test]
    async fn a_document_goes_when_its_app_was_made_anew_with_another_app_id() {
        let script = Script::default()
            .expect(Method::GET, APP, |_| (StatusCode::OK, app("other")))
            .expect(Method::GET, KEYS, |_| not_found("latchkey-keys-shop"))
            .expect(Method::DELETE, SECRET, |_| not_found("latchkey-app-shop"));
        judged(&script, Some(app("other"))).await;
        script.calls();
    }
}
