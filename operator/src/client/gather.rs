//! Collects the Clients of an App with their secrets or keys, and selects the Clients for the App's document.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use futures::{StreamExt, stream};
use kube::{Resource, ResourceExt};
use latchkey_crds::{app::App, client::Client, conditions::Reason, rendered::RenderedClient, types::AppId};
use time::OffsetDateTime;
use tokio::sync::Semaphore;
use tracing::warn;

use crate::{
    app::publish::read_published,
    client::{
        outcomes::Decision,
        select::{Candidate, MAX_CLIENTS, Selected, needs_last, not_considered, select},
        validate::{ClientPolicy, CreatedSecret, Credentials},
    },
    context::Context,
    error::{Error, ErrorChain, ErrorKind},
    gather,
    watch::{ClientReference, ClientSummary, KnownSecret, NamespacedName, WatchedClient},
};

/// The maximum number of Clients of the App's own namespace that are considered, the oldest first. It is more than an
/// App can have, because some of them may be invalid.
const MAX_OWN_CANDIDATES: usize = 1000;
/// The maximum number of Clients of each other namespace that are considered, the oldest first.
const MAX_CANDIDATES_OF_NAMESPACE: usize = 250;
/// The maximum number of Clients of all other namespaces that are considered, the oldest first.
const MAX_FOREIGN_CANDIDATES: usize = 2000;
/// The maximum number of Clients, of all Apps together, for which Secrets and ConfigMaps are read at the same time.
/// Each of these objects can have 1 MiB. After the read, the operator keeps only a hash or a key set of at most 16 KiB.
const CONCURRENT_READS: usize = 16;
static READS: Semaphore = Semaphore::const_new(CONCURRENT_READS);
/// The maximum number of *rounds*: how often one reconcile selects the Clients of an App. The selection is repeated if
/// it includes Clients with references that were not read yet, because the size of a key set can change the selection.
/// Usually one or two rounds are enough. Between two rounds, the operator reads the references of at most
/// [`MAX_CLIENTS`] Clients, so of at most 600 in total. After the last round, it also reads the references of the
/// served Clients. The remaining Clients with unread references are refused (specification: Clients, Limits).
const MAX_ROUNDS: usize = 4;

/// The Clients of an App.
#[derive(Default)]
pub(crate) struct AppClients {
    /// The clients of the document, the oldest first.
    pub(crate) rendered: Vec<RenderedClient>,
    pub(crate) decisions: Vec<Decision>,
    /// When the document must be rendered again, because a previous client secret expires or a failed read is repeated.
    pub(crate) next_due: Option<OffsetDateTime>,
}

/// A Client about which the selection decides, with its name for the reconcile queue.
struct Considered {
    name: NamespacedName,
    generation: i64,
    candidate: Candidate,
    /// Whether nothing more is read for this Client: its references were read or left out, or it has none.
    is_resolved: bool,
}

/// Selects the Clients of an App.
pub(crate) async fn select_for_app(app: &App, app_id: &AppId, context: &Context) -> Result<AppClients, Error> {
    let app_name = NamespacedName::from_metadata(&app.metadata);
    let mut last: Option<Vec<RenderedClient>> = None;
    if has_unknown_clients(&app_name, context) && context.objects.client_index.has_clients_without_app() {
        let clients = last_clients(app_id, &app_name, context).await?;
        record_app_of_undecodable(&clients, &app_name, context);
        last = Some(clients);
    }
    let (mut considered, mut decisions) = consider(app, &app_name, context);
    if considered.is_empty() {
        return Ok(AppClients { decisions, ..AppClients::default() });
    }
    let waits_for_secret = considered.iter().any(|one| one.candidate.waits_for_secret());
    if last.is_none() && waits_for_secret && has_unknown_clients(&app_name, context) {
        last = Some(last_clients(app_id, &app_name, context).await?);
    }
    let policy = ClientPolicy::of_app(app, app_id);
    let mut round = 0;
    let selected = loop {
        round += 1;
        let mut selected = run_selection(&policy, &considered, last.as_deref().unwrap_or_default(), context);
        let is_read_interrupted = considered.iter().any(|one| one.candidate.credentials.is_read_interrupted());
        if last.is_none() && (is_read_interrupted || needs_last(&selected)) {
            last = Some(last_clients(app_id, &app_name, context).await?);
            selected = run_selection(&policy, &considered, last.as_deref().unwrap_or_default(), context);
        }
        if considered.iter().zip(&selected).all(|(one, selected)| one.is_resolved || selected.rendered.is_none()) {
            break selected;
        }
        if round == MAX_ROUNDS {
            if last.is_none() {
                last = Some(last_clients(app_id, &app_name, context).await?);
            }
            let last = last.as_deref().unwrap_or_default();
            // The references of a served Client are always read, because a withdrawn secret or key must not stay valid.
            let served = unread_of_document(&considered, last);
            resolve(&mut considered, &served, context).await;
            leave_out_unread(&mut considered);
            break run_selection(&policy, &considered, last, context);
        }
        let next = next_reads(&considered, &selected, round);
        resolve(&mut considered, &next, context).await;
    };

    let dues = [next_due(&considered, context), next_read(&considered, &app_name, context)];
    let next_due = dues.into_iter().flatten().min();
    let mut clients = AppClients { next_due, ..AppClients::default() };
    // In the first reconcile of the App after the start of the operator, only the document shows which Clients are
    // served.
    let is_served = |uid: &str| {
        context.objects.client_outcomes.is_served(&app_name, uid)
            || last.as_deref().unwrap_or_default().iter().any(|client| client.uid == uid)
    };
    for (considered, mut selected) in considered.into_iter().zip(selected) {
        let Considered { name, generation, candidate, .. } = considered;
        // A new Client is added to the document only when its secret exists. Otherwise each new Client would cause two
        // publishes. A refused Client is served as it was accepted last, so it is not new.
        if candidate.waits_for_secret() && selected.refusal.is_none() && !is_served(&candidate.uid) {
            selected.rendered = None;
        }
        decisions.push(Decision::new(name, &candidate.uid, generation, &selected));
        clients.rendered.extend(selected.rendered);
    }
    clients.decisions = decisions;
    Ok(clients)
}

/// Returns the Clients that refer to the App from a granted namespace, the oldest first, up to the maximum numbers
/// ([`MAX_OWN_CANDIDATES`] and the two constants after it). For each of the other Clients with a grant, returns the
/// decision that it is not considered. Clients without a grant are in neither list: their own reconcile finds out that
/// there is no grant.
fn consider(app: &App, app_name: &NamespacedName, context: &Context) -> (Vec<Considered>, Vec<Decision>) {
    decode_oldest(find_granted(app, app_name, context), app_name, context)
}

/// Returns the Clients that refer to the App from a granted namespace, the oldest first.
fn find_granted(app: &App, app_name: &NamespacedName, context: &Context) -> Vec<(NamespacedName, ClientSummary)> {
    let objects = &context.objects;
    let reference = ClientReference::App { namespace: app_name.namespace(), name: app_name.name() };
    let mut grants: HashMap<String, bool> = HashMap::new();
    let mut found: Vec<_> = objects
        .client_index
        .get(reference)
        .into_iter()
        .filter_map(|name| {
            let client = objects.clients.summary(&name)?;
            // A Client that cannot be decoded does not show to which App it refers. But the index finds it only if it
            // referred to this App before.
            let refers = client.app.as_ref().is_none_or(|app| app == app_name);
            let is_granted = *grants
                .entry(name.namespace().to_owned())
                .or_insert_with(|| objects.grants_clients(app, name.namespace()));
            (refers && is_granted && !client.is_being_deleted).then_some((name, client))
        })
        .collect();
    found.sort_by(|(one_name, one), (other_name, other)| (one.created, one_name).cmp(&(other.created, other_name)));
    found
}

/// Decodes the first Clients, up to the maximum numbers. Returns the decision that it is not considered for each of the
/// others.
fn decode_oldest(
    found: Vec<(NamespacedName, ClientSummary)>,
    app_name: &NamespacedName,
    context: &Context,
) -> (Vec<Considered>, Vec<Decision>) {
    let (mut considered, mut decisions) = (Vec::new(), Vec::new());
    let (mut by_namespace, mut foreign): (HashMap<String, usize>, usize) = (HashMap::new(), 0);
    for (name, summary) in found {
        let is_own = name.namespace() == app_name.namespace();
        let of_namespace = by_namespace.entry(name.namespace().to_owned()).or_default();
        let is_within = if is_own {
            *of_namespace < MAX_OWN_CANDIDATES
        } else {
            *of_namespace < MAX_CANDIDATES_OF_NAMESPACE && foreign < MAX_FOREIGN_CANDIDATES
        };
        if !is_within {
            decisions.push(too_many(name, &summary));
        } else if let Some(client) = context.objects.clients.get(&name)
            // A Client that was deleted and created again in the meantime can refer to another App. Its creation queues
            // a reconcile.
            && client.uid().unwrap_or_default() == summary.uid
        {
            *of_namespace += 1;
            foreign += usize::from(!is_own);
            considered.push(Considered::new(name, &client, context));
        }
    }
    (considered, decisions)
}

fn too_many(name: NamespacedName, client: &ClientSummary) -> Decision {
    let selected = Selected { rendered: None, refusal: Some(not_considered()), unresolved: Vec::new() };
    Decision::new(name, &client.uid, client.generation, &selected)
}

fn run_selection(
    policy: &ClientPolicy,
    considered: &[Considered],
    last: &[RenderedClient],
    context: &Context,
) -> Vec<Selected> {
    select(policy, considered.iter().map(|one| &one.candidate), &*context.objects.namespaces, last)
}

/// Returns the indices of the Clients for which the references are read after this round, the oldest first. After the
/// first round, these are the selected Clients. After later rounds, they are also the Clients for which the selection
/// had no room: if a selected Client turns out to be too large, they get its room. If each round read only the selected
/// Clients, many rounds could be needed.
fn next_reads(considered: &[Considered], selected: &[Selected], round: usize) -> Vec<usize> {
    let has_no_room =
        |one: &Selected| one.refusal.as_ref().is_some_and(|refusal| refusal.reason == Reason::TooManyClients);
    let can_be_selected = |one: &Selected| one.rendered.is_some() || (round > 1 && has_no_room(one));
    let all = considered.iter().zip(selected).enumerate();
    let unread = all.filter(|(_, (one, selected))| !one.is_resolved && can_be_selected(selected));
    unread.map(|(index, _)| index).take(MAX_CLIENTS).collect()
}

/// Returns the indices of the Clients that are in the published document and have references that were not read.
fn unread_of_document(considered: &[Considered], last: &[RenderedClient]) -> Vec<usize> {
    let is_served = |one: &Considered| last.iter().any(|client| client.uid == one.candidate.uid);
    let unread = considered.iter().enumerate().filter(|(_, one)| !one.is_resolved && is_served(one));
    unread.map(|(index, _)| index).collect()
}

/// Makes the selection refuse the Clients with unread references.
fn leave_out_unread(considered: &mut [Considered]) {
    for one in considered.iter_mut().filter(|one| !one.is_resolved) {
        one.candidate.credentials = Credentials::LeftUnread;
        one.is_resolved = true;
    }
}

/// Reads the Secrets and ConfigMaps that these Clients reference. A failed read affects only one Client.
async fn resolve(considered: &mut [Considered], indices: &[usize], context: &Context) {
    let clients: Vec<_> = indices
        .iter()
        .filter_map(|index| Some((*index, considered[*index].candidate.client.as_ref().ok()?.clone())))
        .collect();
    let read = stream::iter(clients).map(|(index, client)| async move {
        // The semaphore is never closed.
        let _permit = READS.acquire().await;
        let credentials = match gather::for_client(context, &client).await {
            Ok(objects) => Credentials::resolve(&client, created_secret(&client, context), &objects),
            Err(error) => {
                let (namespace, name) = (client.namespace().unwrap_or_default(), client.name_any());
                warn!(
                    k8s.namespace.name = namespace,
                    client = name,
                    error = %ErrorChain(&error),
                    "could not read a Secret or a ConfigMap of a Client; retrying"
                );
                Credentials::Unread(error.kind())
            }
        };
        (index, credentials)
    });
    let resolved: Vec<_> = read.buffer_unordered(CONCURRENT_READS).collect().await;
    for (index, credentials) in resolved {
        considered[index].candidate.credentials = credentials;
    }
    for index in indices {
        considered[*index].is_resolved = true;
    }
}

/// Returns when the failed reads must be repeated, or `None` if no read failed.
fn next_read(considered: &[Considered], app: &NamespacedName, context: &Context) -> Option<OffsetDateTime> {
    let errors: Vec<_> = considered.iter().filter_map(|one| one.candidate.credentials.read_error()).collect();
    let key = format!("Clients of {app}");
    // An interrupted read is repeated sooner than one that needs a permission.
    let kind = errors.iter().copied().find(|kind| *kind == ErrorKind::Unavailable).or(errors.first().copied());
    let Some(kind) = kind else {
        context.failures.reset(&key);
        return None;
    };
    Some(context.now() + context.failures.retry_after(&key, kind))
}

/// Returns the state of the Secret that the operator creates for a Client.
pub(crate) fn created_secret(client: &Client, context: &Context) -> CreatedSecret {
    let Some(secret) = client.created_secret() else { return CreatedSecret::Pending };
    let name = NamespacedName::new(client.metadata.namespace.as_deref().unwrap_or_default(), &secret);
    let missing = if context.creates_client_secrets { CreatedSecret::Pending } else { CreatedSecret::Disabled };
    match context.objects.client_secrets.get(&name) {
        Some(KnownSecret::OfType(state)) if state.is_owned_by(&client.uid().unwrap_or_default()) => {
            state.hashes_at(context.now()).map_or(missing, CreatedSecret::Stored)
        }
        Some(KnownSecret::OfType(_) | KnownSecret::Foreign) => CreatedSecret::Conflict,
        None => missing,
    }
}

/// Returns the earliest time at which a previous client secret (the one before a rotation) expires.
fn next_due(considered: &[Considered], context: &Context) -> Option<OffsetDateTime> {
    let now = context.now();
    let ends = considered.iter().filter_map(|one| {
        let client = one.candidate.client.as_ref().ok()?;
        let name = NamespacedName::new(&one.candidate.namespace, &client.created_secret()?);
        match context.objects.client_secrets.get(&name)? {
            KnownSecret::OfType(state) if state.is_owned_by(&one.candidate.uid) => state.next_due(now),
            KnownSecret::OfType(_) | KnownSecret::Foreign => None,
        }
    });
    ends.min()
}

/// Returns the clients of the published document, or none if there is no document of this App.
async fn last_clients(
    app_id: &AppId,
    app_name: &NamespacedName,
    context: &Context,
) -> Result<Vec<RenderedClient>, Error> {
    let published = read_published(context, app_id, app_name).await?;
    Ok(published.map(|document| document.clients).unwrap_or_default())
}

/// Whether the published document has clients that the operator does not know yet, as in the first reconcile of the App
/// after the start of the operator.
pub(crate) fn has_unknown_clients(app_name: &NamespacedName, context: &Context) -> bool {
    !context.objects.client_outcomes.knows_document(app_name) && has_published_clients(app_name, context)
}

/// Whether a published document of the App has clients.
pub(crate) fn has_published_clients(app_name: &NamespacedName, context: &Context) -> bool {
    let published = &context.objects.published;
    let secrets = published.of_app(app_name.namespace(), app_name.name());
    secrets.iter().any(|secret| published.get(secret).is_some_and(|published| published.size.has_clients()))
}

/// Records the App for each of these clients that the operator has never decoded since its start, so that the client
/// stays served. A new Client of the same name has another UID, so nothing is recorded for it.
pub(super) fn record_app_of_undecodable(clients: &[RenderedClient], app_name: &NamespacedName, context: &Context) {
    for client in clients {
        let name = NamespacedName::new(&client.namespace, &client.name);
        let watched = context.objects.clients.summary(&name);
        if watched.is_some_and(|watched| watched.uid == client.uid) {
            context.objects.client_index.record_app(&name, app_name);
        }
    }
}

/// Records that an App is not accepted. Queues the Clients that have no decision about their current generation, and
/// those that have a decision but are no longer considered.
pub(crate) fn report_rejected_app(app: &App, context: &Context) {
    let app_name = NamespacedName::from_metadata(&app.metadata);
    let (considered, _) = consider(app, &app_name, context);
    let outcomes = &context.objects.client_outcomes;
    let known: HashSet<_> = considered
        .iter()
        .filter(|one| {
            outcomes.get(&app_name, &one.candidate.uid).is_some_and(|known| known.generation == one.generation)
        })
        .map(|one| one.name.clone())
        .collect();
    if considered.len() > known.len() || outcomes.has_app(&app_name) {
        outcomes.record_rejected_app(&app_name);
    }
    let undecided = considered.iter().map(|one| one.name.clone()).filter(|name| !known.contains(name));
    // Clients are no longer considered, for example, if the grant for their namespace was withdrawn.
    let withdrawn = outcomes.names(&app_name).into_iter().filter(|name| !known.contains(name));
    for name in undecided.chain(withdrawn) {
        context.reconcile_queue.enqueue_client(name);
    }
}

/// Queues the Clients of an App that is being deleted together with its users. Drops the stored decisions about these
/// Clients, because the App is not served any more.
pub(crate) fn report_deleted_app(app: &App, context: &Context) {
    let app_name = NamespacedName::from_metadata(&app.metadata);
    let outcomes = &context.objects.client_outcomes;
    if !outcomes.has_app(&app_name) {
        return;
    }
    let names = outcomes.names(&app_name);
    outcomes.remove_app(&app_name);
    for name in names {
        context.reconcile_queue.enqueue_client(name);
    }
}

// === impl Considered ===

impl Considered {
    fn new(name: NamespacedName, client: &WatchedClient, context: &Context) -> Self {
        let (is_resolved, credentials) = match client.decoded() {
            // Secrets and ConfigMaps that the Client itself references are read only after the Client was selected.
            Some(client) if client.spec.secret_refs().next().is_some() || client.spec.jwks_ref().is_some() => {
                (false, Credentials::NotRead)
            }
            Some(client) if client.created_secret().is_some() => {
                (true, Credentials::Created(created_secret(client, context)))
            }
            Some(_) | None => (true, Credentials::None),
        };
        let read = match &client.client {
            Ok(client) => Ok(Arc::clone(client)),
            Err(invalid) => Err(format!("this operator cannot read the Client: {}", invalid.error)),
        };
        Self {
            generation: client.meta().generation.unwrap_or(0),
            candidate: Candidate {
                namespace: name.namespace().to_owned(),
                name: name.name().to_owned(),
                uid: client.uid().unwrap_or_default(),
                client: read,
                credentials,
            },
            name,
            is_resolved,
        }
    }
}

#[cfg(test)]
mod tests;
