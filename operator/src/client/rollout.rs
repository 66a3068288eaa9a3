//! Clients in the rollout of an App's document: which revisions contain them, and what their statuses report.

use std::{collections::HashSet, time::Duration};

use latchkey_crds::{
    app::App,
    conditions::{ConditionStatus, Reason},
    names::rendered_app_secret,
    rendered::{CLIENTS_FORMAT, MAX_DOCUMENT_SIZE, RenderedClient, Revision},
};

use crate::{
    app::{render::Rendered, validate::ValidatedApp},
    client::{
        gather::AppClients,
        outcomes::{Decision, Programmed, PublishCause, PublishedClients},
        render::size,
        status::programmed_state,
    },
    context::Context,
    facts::FieldError,
    monitor::RolloutState,
    watch::NamespacedName,
};

const NO_ROOM_IN_NAMESPACE: &str = "the Clients of all Apps in the App's namespace have reached the bytes that the \
                                    platform allows; delete Clients there, or ask the platform team to raise \
                                    --max-rendered-bytes-per-namespace";

/// A rendered document that is published, or about to be.
pub(crate) struct Document<'a> {
    pub(crate) app: &'a App,
    pub(crate) validated: &'a ValidatedApp,
    pub(crate) rendered: &'a Rendered,
}

/// The document that is published at the end of a rollout.
#[derive(Clone, Copy)]
pub(crate) struct Published<'a> {
    pub(crate) app: &'a App,
    pub(crate) validated: &'a ValidatedApp,
    /// How many of the App's clients are in the document. If not all fit, the newest are left out.
    pub(crate) client_count: usize,
    /// The highest format that all serving pods support.
    pub(crate) supported_format: u32,
}

/// The rollout of the App's own part of the document.
pub(crate) struct AppRollout {
    pub(crate) state: RolloutState,
    /// The revisions that differ only in the Clients of the App.
    pub(crate) revisions: Vec<Revision>,
}

// === impl Document ===

impl Document<'_> {
    /// Returns whether this document is published because of the App or only because of its Clients. If only the
    /// Clients changed and the last such publish was too recent, returns the wait as the error.
    pub(crate) fn try_publish(&self, context: &Context) -> Result<PublishCause, Duration> {
        if !self.involves_clients(context) {
            return Ok(PublishCause::App);
        }
        let before = self.published_revision(context);
        context.objects.client_outcomes.try_publish(&self.app_name(), before.as_ref(), &self.rendered.app_part)
    }

    /// Returns the published revision of the App.
    pub(crate) fn published_revision(&self, context: &Context) -> Option<Revision> {
        let published = context.objects.published.get(&rendered_app_secret(&self.validated.app_id))?;
        let is_of_app = published.namespace == self.validated.namespace && published.name == self.validated.name;
        published.revision.filter(|_| is_of_app)
    }

    /// Records that this document is already published.
    pub(crate) fn record_already_published(&self, context: &Context) {
        self.record_publish(Some(&self.rendered.revision), context);
    }

    /// Records that this document was published. `before` is the revision that was published before.
    pub(crate) fn record_publish(&self, before: Option<&Revision>, context: &Context) {
        if !self.involves_clients(context) {
            return;
        }
        let Rendered { revision, app_part, .. } = self.rendered;
        let published = PublishedClients { revision, app_part: Some(app_part), clients: self.clients() };
        let is_reported = |revision: &Revision| context.monitor.is_reported(&self.validated.app_id, revision);
        context.objects.client_outcomes.record_published(&self.app_name(), before, &published, is_reported);
    }

    /// Whether this document or an earlier one has clients, or keys for their ID tokens.
    fn involves_clients(&self, context: &Context) -> bool {
        self.rendered.revision != self.rendered.app_part || context.objects.client_outcomes.has_app(&self.app_name())
    }

    fn clients(&self) -> &[RenderedClient] {
        let clients = &self.validated.clients;
        &clients[..self.rendered.client_count.min(clients.len())]
    }

    fn app_name(&self) -> NamespacedName {
        NamespacedName::from_metadata(&self.app.metadata)
    }
}

/// Records the decisions about the Clients of an App, and queues the Clients with a changed outcome. `state` is the
/// rollout state of the published revision. Returns the state of the App's own part.
pub(crate) fn report(
    published: Published<'_>,
    clients: AppClients,
    state: RolloutState,
    context: &Context,
) -> AppRollout {
    let Published { app, validated, supported_format, .. } = published;
    let (outcomes, monitor) = (&context.objects.client_outcomes, &context.monitor);
    let app_name = NamespacedName::from_metadata(&app.metadata);
    let decisions = published.with_left_out(clients.decisions, context);
    let too_old = (supported_format < CLIENTS_FORMAT).then(|| servers_too_old(supported_format, context));
    let changed = outcomes.record_decisions(&app_name, validated.issuer.as_str(), decisions, |revisions| {
        let state = || programmed_state(&monitor.rollout_of_any(&validated.app_id, revisions));
        too_old.clone().unwrap_or_else(state)
    });
    for name in changed {
        context.reconcile_queue.enqueue_client(name);
    }
    let revisions = outcomes.revisions_of_app(&app_name);
    let is_complete = matches!(state, RolloutState::Complete { .. });
    let app_state = if revisions.is_empty() { state } else { monitor.rollout_of_any(&validated.app_id, &revisions) };
    if is_complete {
        outcomes.forget_earlier_revisions(&app_name);
    }
    AppRollout { state: app_state, revisions }
}

// === impl Published ===

impl Published<'_> {
    /// Whether the quota of the App's namespace has no room for the first client that is missing in the document.
    fn is_quota_reached(self, context: &Context) -> bool {
        let secret = rendered_app_secret(&self.validated.app_id);
        let room = context.objects.quotas.room_for_clients(&secret, &self.validated.namespace);
        let needed = self.validated.clients.iter().take(self.client_count + 1).map(|client| size(client) + 1);
        u64::try_from(needed.sum::<usize>()).unwrap_or(u64::MAX) > room
    }

    /// Marks the accepted Clients for which the document has no room.
    fn with_left_out(self, mut decisions: Vec<Decision>, context: &Context) -> Vec<Decision> {
        let clients = &self.validated.clients;
        let left_out: HashSet<&str> =
            clients.iter().skip(self.client_count).map(|client| client.uid.as_str()).collect();
        if left_out.is_empty() {
            return decisions;
        }
        let no_room =
            if self.is_quota_reached(context) { NO_ROOM_IN_NAMESPACE.to_owned() } else { no_room_in_document() };
        for decision in decisions.iter_mut().filter(|decision| left_out.contains(decision.uid.as_str())) {
            decision.is_served = false;
            if self.supported_format < CLIENTS_FORMAT {
                decision.left_out = Some(servers_too_old(self.supported_format, context));
            } else if decision.refusal.is_none() {
                decision.refusal = Some(FieldError::new(Reason::TooManyClients, "", no_room.as_str()));
            }
        }
        decisions
    }
}

fn no_room_in_document() -> String {
    let kib = MAX_DOCUMENT_SIZE / 1024;
    format!(
        "the document of the App can have {kib} KiB, and has no room for the Client; ask the owner of the App to \
         shorten templates and lists, or to delete Clients"
    )
}

fn servers_too_old(supported: u32, context: &Context) -> Programmed {
    let pods = context.monitor.pods_limited_to_format(supported).join(", ");
    let message = format!(
        "a Client needs format {CLIENTS_FORMAT}, but these server pods support only format {supported}: {pods}; \
         upgrade them"
    );
    Programmed::No { status: ConditionStatus::False, reason: Reason::ServersTooOld, message: message.into_boxed_str() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use latchkey_crds::rendered::RenderedClientAuthentication;
    use serde_json::json;

    use super::*;
    use crate::{
        app::mock_api::{MockApi, context},
        client::{
            fixtures::{app, client_with, validated},
            render::render,
            select::Selected,
        },
        quota::{QuotaLimits, Quotas},
    };

    #[tokio::test]
    async fn a_client_that_is_left_out_reports_the_limit_that_was_reached() {
        let mut context = context(MockApi::default().client()).0;
        let client = client_with("identity", "grafana", json!({}));
        let client = render(&client, client.client_id().unwrap(), RenderedClientAuthentication::Unresolved);
        let (app, validated) = (app(json!({})), ValidatedApp { clients: vec![client.clone()], ..validated() });
        let message = |context: &Context| {
            let selected = Selected { rendered: Some(client.clone()), refusal: None, unresolved: Vec::new() };
            let name = NamespacedName::new("identity", "grafana");
            let decision = Decision::new(name, &client.uid, 1, &selected);
            let document =
                Published { app: &app, validated: &validated, client_count: 0, supported_format: CLIENTS_FORMAT };
            document.with_left_out(vec![decision], context).remove(0).refusal.unwrap().message
        };
        assert!(message(&context).contains("can have 768 KiB"), "{}", message(&context));
        context.objects.quotas = Arc::new(Quotas::new(QuotaLimits { apps: 1, bytes: 100 }));
        assert!(message(&context).contains("--max-rendered-bytes-per-namespace"), "{}", message(&context));
    }

    #[tokio::test(start_paused = true)]
    async fn keys_for_id_tokens_are_published_at_most_twice_per_second() {
        let context = context(MockApi::default().client()).0;
        let (app, validated) = (app(json!({})), validated());
        let app_part = Revision::of(b"app");
        let rendered = |keys: &[u8]| Rendered {
            bytes: Vec::new(),
            revision: Revision::of(keys),
            pages_host: None,
            client_count: 0,
            app_part: app_part.clone(),
        };
        let first = rendered(b"1");
        let first = Document { app: &app, validated: &validated, rendered: &first };
        assert_eq!(first.try_publish(&context), Ok(PublishCause::App), "nothing is published yet");
        first.record_publish(None, &context);
        let second = rendered(b"2");
        let second = Document { app: &app, validated: &validated, rendered: &second };
        assert_eq!(second.try_publish(&context), Ok(PublishCause::Clients));
        assert_eq!(second.try_publish(&context), Err(Duration::from_millis(500)));
    }
}
