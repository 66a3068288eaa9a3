//! Removes clients from the published document of an App that is not accepted or cannot be decoded. The rest of the
//! document stays as it was accepted last. The deletion of a Client takes effect immediately. If the App can be
//! decoded, the withdrawal of a grant for a namespace and the disabling of hosted pages do, too.

use std::{collections::HashMap, time::Duration};

use kube::Resource;
use latchkey_crds::{
    app::App,
    client::WebAuthentication,
    names::rendered_app_secret,
    rendered::{AppState, RenderedApp, RenderedClient, Revision},
};
use time::OffsetDateTime;
use tracing::info;

use crate::{
    app::{
        publish::{DocumentOwner, publish, read_published},
        render::Rendered,
    },
    client::{
        gather::{has_published_clients, record_app_of_undecodable, select_for_app},
        outcomes::{Decision, PublishedClients},
        reconcile::watched_status,
        select::with_authentication,
        status::programmed_state,
    },
    context::Context,
    error::Error,
    watch::{ClientReference, NamespacedName, WatchedClient, app_id_of_secret},
};

/// Publishes the last accepted document without the clients that must not be served any more, and with the current
/// secrets and keys of the other clients. Records the resulting decisions about the Clients. Returns when this must be
/// repeated.
pub(crate) async fn remove_ended_clients(app: &App, context: &Context) -> Result<Option<OffsetDateTime>, Error> {
    let Ok(app_id) = app.app_id() else { return Ok(None) };
    let app_name = NamespacedName::from_metadata(&app.metadata);
    let objects = &context.objects;
    // For an App without Clients, the document is not read. Most Apps have none.
    if !objects.client_outcomes.has_app(&app_name)
        && !objects.has_clients(&app_name)
        && !has_published_clients(&app_name, context)
    {
        return Ok(None);
    }
    let Some(mut document) = read_published(context, &app_id, &app_name).await? else { return Ok(None) };
    if document.state != AppState::Serving || document.app_id != app_id || document.clients.is_empty() {
        return Ok(None);
    }
    let selected = select_for_app(app, &app_id, context).await?;
    let now: HashMap<_, _> = selected.rendered.into_iter().map(|client| (client.uid.clone(), client)).collect();
    let kept = |client: &RenderedClient| keep(client, now.get(&client.uid)?, declared_method(client, context));
    let kept = document.clients.iter().filter_map(kept).collect();
    if let Some(wait) = publish_with_clients(&mut document, kept, &app_name, context).await? {
        return Ok(Some(context.now() + wait));
    }
    let decisions = drop_waiting(&document.clients, selected.decisions);
    let issuer = document.issuer.as_str();
    let changed = objects.client_outcomes.record_decisions(&app_name, issuer, decisions, |revisions| {
        programmed_state(&context.monitor.rollout_of_any(&app_id, revisions))
    });
    for name in changed {
        context.reconcile_queue.enqueue_client(name);
    }
    Ok(selected.next_due)
}

/// For an App that cannot be decoded: publishes its last documents without the Clients that no longer exist. Queues the
/// Clients that wait for the App, even if a document could not be published. Returns the wait until this must be
/// repeated.
pub(crate) async fn remove_deleted_clients(
    app_name: &NamespacedName,
    context: &Context,
) -> Result<Option<Duration>, Error> {
    let pruned = prune_documents(app_name, context).await;
    let of_app = ClientReference::App { namespace: app_name.namespace(), name: app_name.name() };
    for name in context.objects.client_index.get(of_app) {
        let client = context.objects.clients.get(&name);
        if client.is_some_and(|client| waits_for_app(&client, context)) {
            context.reconcile_queue.enqueue_client(name);
        }
    }
    pruned
}

/// Publishes the last documents of an App without the Clients that no longer exist. Returns the wait until this must be
/// repeated.
async fn prune_documents(app_name: &NamespacedName, context: &Context) -> Result<Option<Duration>, Error> {
    let mut repeat = None;
    for secret in context.objects.published.of_app(app_name.namespace(), app_name.name()) {
        let Some(app_id) = app_id_of_secret(&secret) else { continue };
        if !context.objects.published.get(&secret).is_some_and(|published| published.size.has_clients()) {
            continue;
        }
        // While this lock is held, no step of a release of the appID runs (see `release.rs`).
        let _lock = context.releases.lock_shared(&app_id).await;
        let Some(mut document) = read_published(context, &app_id, app_name).await? else { continue };
        if document.state != AppState::Serving || document.app_id != app_id {
            continue;
        }
        // This must be recorded now, because later reconciles already know the document and do not search it for
        // Clients that cannot be decoded.
        record_app_of_undecodable(&document.clients, app_name, context);
        let kept = document.clients.iter().filter(|client| exists(client, context)).cloned().collect();
        repeat = publish_with_clients(&mut document, kept, app_name, context).await?.or(repeat);
    }
    Ok(repeat)
}

/// Whether a Client waits for its App, which cannot be decoded: no status reports the current generation of the Client
/// yet. A Client that cannot be decoded itself does not wait for its App.
fn waits_for_app(client: &WatchedClient, context: &Context) -> bool {
    let generation = client.meta().generation.unwrap_or(0);
    client.decoded().is_some() && !watched_status(client, context).reports(generation)
}

/// Whether the Client still exists. A new Client of the same name has another UID.
fn exists(client: &RenderedClient, context: &Context) -> bool {
    let name = NamespacedName::new(&client.namespace, &client.name);
    let watched = context.objects.clients.summary(&name);
    watched.is_some_and(|watched| watched.uid == client.uid && !watched.is_being_deleted)
}

/// If the document does not have exactly these clients, replaces its clients and publishes it. Records which clients
/// the published document has. If the last publish for Clients was too recent, publishes nothing and returns the wait.
async fn publish_with_clients(
    document: &mut RenderedApp,
    clients: Vec<RenderedClient>,
    app_name: &NamespacedName,
    context: &Context,
) -> Result<Option<Duration>, Error> {
    let outcomes = &context.objects.client_outcomes;
    let app_id = document.app_id.clone();
    let before = context.objects.published.get(&rendered_app_secret(&app_id)).and_then(|published| published.revision);
    let mut revision = before.clone();
    if document.clients != clients {
        if let Err(wait) = outcomes.try_publish_clients(app_name) {
            return Ok(Some(wait));
        }
        document.clients = clients;
        let rendered = rendered(document);
        let owner = DocumentOwner { app_id: &app_id, namespace: &document.namespace, name: &document.name };
        publish(context, owner, &rendered).await?;
        info!(
            k8s.namespace.name = document.namespace,
            app = document.name,
            "removed clients from the last accepted document of an App"
        );
        revision = Some(rendered.revision);
    }
    if let Some(revision) = &revision {
        let published = PublishedClients { revision, app_part: None, clients: &document.clients };
        let is_reported = |revision: &Revision| context.monitor.is_reported(&app_id, revision);
        outcomes.record_published(app_name, before.as_ref(), &published, is_reported);
    }
    Ok(None)
}

/// Drops the decisions about new and edited Clients, which wait until the App is accepted. Keeps the decisions about
/// Clients that are refused, or that are served in their current generation.
fn drop_waiting(served: &[RenderedClient], decisions: Vec<Decision>) -> Vec<Decision> {
    let generations: HashMap<_, _> = served.iter().map(|client| (client.uid.as_str(), client.generation)).collect();
    let decide = |decision: Decision| {
        let served = generations.get(decision.uid.as_str());
        let is_decided = decision.refusal.is_some() || served == Some(&decision.generation);
        let is_served = served.is_some();
        is_decided.then_some(Decision { is_served, ..decision })
    };
    decisions.into_iter().filter_map(decide).collect()
}

/// Returns the client as it was accepted last, but with its current secret or keys. Returns `None` if its client ID has
/// changed.
fn keep(last: &RenderedClient, now: &RenderedClient, declared: Option<WebAuthentication>) -> Option<RenderedClient> {
    let is_same = last.client_id == now.client_id;
    is_same.then(|| with_authentication(last.clone(), now.authentication.clone(), declared))
}

/// Returns how a Client authenticates according to its current spec, or `None` if the Client is public or cannot be
/// decoded.
fn declared_method(client: &RenderedClient, context: &Context) -> Option<WebAuthentication> {
    let name = NamespacedName::new(&client.namespace, &client.name);
    let watched = context.objects.clients.get(&name)?;
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
    use http::{Method, StatusCode};
    use latchkey_crds::{conditions::Reason, rendered::RenderedClientAuthentication};
    use serde_json::json;

    use super::*;
    use crate::{
        app::mock_api::{MockApi, context},
        client::{
            fixtures::{client_with, record_document, rendered_secret},
            render::render,
            select::Selected,
        },
        facts::FieldError,
    };

    fn client(generation: i64, sha256: &str) -> RenderedClient {
        let mut client = client_with("monitoring", "grafana", json!({}));
        client.metadata.generation = Some(generation);
        let client_id = client.client_id().unwrap();
        let authentication = RenderedClientAuthentication::Secret { sha256: sha256.to_owned(), previous: None };
        render(&client, client_id, authentication)
    }

    fn decision(client: &RenderedClient, generation: i64, refusal: Option<Reason>) -> Decision {
        let refusal = refusal.map(|reason| FieldError::new(reason, "", "correct it"));
        let selected = Selected { rendered: None, refusal, unresolved: Vec::new() };
        let name = NamespacedName::new(&client.namespace, &client.name);
        Decision::new(name, &client.uid, generation, &selected)
    }

    #[test]
    fn only_refused_and_unchanged_served_clients_are_decided_while_the_app_is_rejected() {
        let served = [client(1, "hash")];
        let other = RenderedClient { uid: "other".to_owned(), ..client(1, "hash") };
        let decided = |client, generation, refusal| {
            let decisions = drop_waiting(&served, vec![decision(client, generation, refusal)]);
            decisions.first().map(|decision| decision.is_served)
        };
        assert_eq!(decided(&served[0], 1, None), Some(true));
        assert_eq!(decided(&served[0], 2, None), None, "the edit waits for the App");
        assert_eq!(decided(&served[0], 2, Some(Reason::InvalidSpec)), Some(true));
        assert_eq!(decided(&other, 1, None), None, "the new Client waits for the App");
        assert_eq!(decided(&other, 1, Some(Reason::PagesOff)), Some(false), "it was removed");
    }

    #[tokio::test]
    async fn a_deleted_client_of_an_undecodable_app_is_removed() {
        const RENDERED: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-app-platform";
        let deleted = client(1, "hash");
        let secret = rendered_secret(vec![deleted.clone()]);
        let script = MockApi::default().expect(Method::GET, RENDERED, move |_| (StatusCode::OK, secret)).expect(
            Method::PATCH,
            RENDERED,
            |call| {
                let mut published = call.body.clone();
                published["metadata"]["resourceVersion"] = json!("8");
                published["metadata"]["uid"] = json!("1");
                (StatusCode::OK, published)
            },
        );
        let context = context(script.client()).0;
        let app_name = NamespacedName::new("identity", "platform");
        assert_eq!(remove_deleted_clients(&app_name, &context).await.unwrap(), None, "nothing is published");
        record_document(&context, vec![deleted.clone()]);
        assert_eq!(remove_deleted_clients(&app_name, &context).await.unwrap(), None);
        assert!(!has_published_clients(&app_name, &context));
        assert!(!context.objects.client_outcomes.is_served(&app_name, &deleted.uid));
        script.finish();
    }

    #[test]
    fn a_kept_client_has_its_current_secret_and_otherwise_its_last_accepted_form() {
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
