//! Removes clients from the published document of an App that is not accepted. The document stays as it was accepted
//! last, but a deleted Client, a withdrawn grant, and pages that are turned off take effect at once.

use std::collections::HashMap;

use latchkey_crds::{
    app::App,
    client::WebAuthentication,
    rendered::{AppState, RenderedApp, RenderedClient, Revision},
};
use time::OffsetDateTime;
use tracing::info;

use crate::{
    app::{
        publish::{DocumentOwner, publish, read_published},
        render::Rendered,
    },
    client::{gather::select_for_app, select::with_authentication},
    context::Context,
    error::Error,
    watch::NamespacedName,
};

/// Publishes the last accepted document without the clients that have ended since then, and with the current secrets
/// and keys of the others. Returns when this must be repeated.
pub(crate) async fn remove_ended_clients(app: &App, context: &Context) -> Result<Option<OffsetDateTime>, Error> {
    let Ok(app_id) = app.app_id() else { return Ok(None) };
    let app_name = NamespacedName::from_metadata(&app.metadata);
    // Most Apps have no Clients.
    if !context.objects.client_outcomes.has_app(&app_name) && !context.objects.has_clients(&app_name) {
        return Ok(None);
    }
    let Some(mut document) = read_published(context, &app_id, &app_name).await? else { return Ok(None) };
    if document.state != AppState::Serving || document.app_id != app_id || document.clients.is_empty() {
        return Ok(None);
    }
    let selected = select_for_app(app, &app_id, context).await?;
    let now: HashMap<_, _> = selected.rendered.into_iter().map(|client| (client.uid.clone(), client)).collect();
    let before = std::mem::take(&mut document.clients);
    let kept = |client: &RenderedClient| keep(client, now.get(&client.uid)?, declared_method(client, context));
    let kept: Vec<_> = before.iter().filter_map(kept).collect();
    if kept == before {
        return Ok(selected.next_due);
    }
    if let Err(wait) = context.objects.client_outcomes.try_publish_clients(&app_name) {
        return Ok(Some(context.now() + wait));
    }
    document.clients = kept;
    let owner = DocumentOwner { app_id: &app_id, namespace: &document.namespace, name: &document.name };
    publish(context, owner, &rendered(&document)).await?;
    info!(
        k8s.namespace.name = document.namespace,
        app = document.name,
        "removed clients from the last accepted document of an App"
    );
    Ok(selected.next_due)
}

/// Returns the client as it was accepted last, with the secret or keys of now.
fn keep(last: &RenderedClient, now: &RenderedClient, declared: Option<WebAuthentication>) -> Option<RenderedClient> {
    let is_same = last.client_id == now.client_id;
    is_same.then(|| with_authentication(last.clone(), now.authentication.clone(), declared))
}

/// Returns how the current spec of a Client authenticates, or `None` if the Client is public or cannot be decoded.
fn declared_method(client: &RenderedClient, context: &Context) -> Option<WebAuthentication> {
    let name = NamespacedName::new(&client.namespace, &client.name);
    let watched = context.objects.clients.get(&name.object_ref())?;
    let web = watched.decoded()?.spec.web()?;
    Some(web.authentication)
}

fn rendered(document: &RenderedApp) -> Rendered {
    let bytes = document.to_bytes();
    let revision = Revision::of(&bytes);
    Rendered {
        bytes,
        app_part: revision.clone(),
        revision,
        pages_host: document.pages.as_ref().and_then(|pages| pages.host.clone()),
        client_count: document.clients.len(),
    }
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::RenderedClientAuthentication;
    use serde_json::json;

    use super::*;
    use crate::client::{fixtures::client_with, render::render};

    fn client(generation: i64, sha256: &str) -> RenderedClient {
        let mut client = client_with("monitoring", "grafana", json!({}));
        client.metadata.generation = Some(generation);
        let client_id = client.client_id().unwrap();
        let authentication = RenderedClientAuthentication::Secret { sha256: sha256.to_owned(), previous: None };
        render(&client, client_id, authentication)
    }

    #[test]
    fn a_kept_client_has_the_secret_of_now_and_otherwise_its_last_accepted_form() {
        let secret = Some(WebAuthentication::Secret);
        assert_eq!(keep(&client(1, "old"), &client(1, "new"), secret), Some(client(1, "new")));
        let edited = RenderedClient { display_name: "Edited".to_owned(), ..client(2, "new") };
        assert_eq!(
            keep(&client(1, "old"), &edited, secret),
            Some(client(1, "new")),
            "a rotation with an edit takes effect"
        );
        let public = RenderedClient { authentication: RenderedClientAuthentication::None, ..client(2, "new") };
        assert_eq!(keep(&client(1, "old"), &public, None), Some(client(1, "old")), "it authenticated with a secret");
        let unresolved =
            RenderedClient { authentication: RenderedClientAuthentication::Unresolved, ..client(2, "new") };
        let keys = Some(WebAuthentication::PrivateKeyJwt);
        assert_eq!(keep(&client(1, "old"), &unresolved, keys), Some(client(1, "old")), "its keys are missing");
        let other_id = RenderedClient { client_id: "grafana".parse().unwrap(), ..client(1, "new") };
        assert_eq!(keep(&client(1, "old"), &other_id, secret), None);
    }
}
