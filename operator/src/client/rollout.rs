//! The part that Clients have in the rollout of an App's document: which revisions contain them, and what is reported
//! about them.

use std::{collections::HashSet, time::Duration};

use latchkey_crds::{
    app::App,
    conditions::{ConditionStatus, Reason},
    names::rendered_app_secret,
    rendered::{CLIENTS_FORMAT, RenderedClient, Revision},
};

use crate::{
    app::{render::Rendered, validate::ValidatedApp},
    client::{
        gather::AppClients,
        outcomes::{Decision, Programmed, PublishCause, PublishedClients},
        status::programmed_state,
    },
    context::Context,
    facts::FieldError,
    monitor::RolloutState,
    watch::NamespacedName,
};

/// A rendered document that is published, or about to be.
pub(crate) struct Document<'a> {
    pub(crate) app: &'a App,
    pub(crate) validated: &'a ValidatedApp,
    pub(crate) rendered: &'a Rendered,
}

/// The document at the end of a rollout.
#[derive(Clone, Copy)]
pub(crate) struct Published<'a> {
    pub(crate) app: &'a App,
    pub(crate) validated: &'a ValidatedApp,
    /// How many of the App's clients the document has: the first ones.
    pub(crate) client_count: usize,
    /// The highest format that all counting servers support.
    pub(crate) supported_format: u32,
}

/// How far the part of the document that is the App's own is rolled out.
pub(crate) struct AppRollout {
    pub(crate) state: RolloutState,
    /// The revisions that have this part.
    pub(crate) revisions: Vec<Revision>,
}

// === impl Document ===

impl Document<'_> {
    /// Returns what causes the publication. An error is the wait until the Clients of the App can cause one.
    pub(crate) fn try_publish(&self, context: &Context) -> Result<PublishCause, Duration> {
        if !self.concerns_clients(context) {
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

    /// Records that this document is published already.
    pub(crate) fn record_published(&self, context: &Context) {
        self.record_publish(Some(&self.rendered.revision), context);
    }

    /// Records that this document was published. `before` is the revision that was published before.
    pub(crate) fn record_publish(&self, before: Option<&Revision>, context: &Context) {
        if !self.concerns_clients(context) {
            return;
        }
        let Rendered { revision, app_part, .. } = self.rendered;
        let published = PublishedClients { revision, app_part, clients: self.clients() };
        let is_reported = |revision: &Revision| context.monitor.is_reported(&self.validated.app_id, revision);
        context.objects.client_outcomes.record_published(&self.app_name(), before, &published, is_reported);
    }

    /// Whether the document has clients, or one before it had.
    fn concerns_clients(&self, context: &Context) -> bool {
        self.rendered.client_count > 0 || context.objects.client_outcomes.has_app(&self.app_name())
    }

    fn clients(&self) -> &[RenderedClient] {
        let clients = &self.validated.clients;
        &clients[..self.rendered.client_count.min(clients.len())]
    }

    fn app_name(&self) -> NamespacedName {
        NamespacedName::from_metadata(&self.app.metadata)
    }
}

/// Records the decisions about the Clients of an App, and queues those with a changed outcome. `state` is the rollout
/// state of the published revision. Returns the state of the part that is the App's own.
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
        context.reconcile_queue.enqueue_client(name.object_ref());
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
    /// Marks the accepted Clients for which the document has no room.
    fn with_left_out(self, mut decisions: Vec<Decision>, context: &Context) -> Vec<Decision> {
        let clients = &self.validated.clients;
        let left_out: HashSet<&str> =
            clients.iter().skip(self.client_count).map(|client| client.uid.as_str()).collect();
        for decision in decisions.iter_mut().filter(|decision| left_out.contains(decision.uid.as_str())) {
            decision.is_served = false;
            if self.supported_format < CLIENTS_FORMAT {
                decision.left_out = Some(servers_too_old(self.supported_format, context));
            } else if decision.refusal.is_none() {
                let message = "the App's namespace has no room for the Client in the App's document; ask the owner of \
                               the App to shorten templates and lists, or to delete Apps or Clients";
                decision.refusal = Some(FieldError::new(Reason::TooManyClients, "", message));
            }
        }
        decisions
    }
}

fn servers_too_old(supported: u32, context: &Context) -> Programmed {
    let pods = context.monitor.pods_limited_to_format(supported).join(", ");
    let message = format!(
        "a Client needs format {CLIENTS_FORMAT}, but these server pods support only format {supported}: {pods}; \
         upgrade them"
    );
    Programmed::No { status: ConditionStatus::False, reason: Reason::ServersTooOld, message: message.into_boxed_str() }
}
