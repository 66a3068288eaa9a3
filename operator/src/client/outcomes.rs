//! What the last reconcile of each App decided about its Clients, and which revisions of its document contain them.
//!
//! The revision of a document changes with every change to a Client of the App. So a Client is served by every server
//! if each server serves any of the revisions since the last change to this Client. The same applies to the App's own
//! part of the document. As a result, a change to one Client affects neither the conditions of the App nor those of the
//! other Clients.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use latchkey_crds::{
    conditions::{ConditionStatus, Reason},
    rendered::{RenderedClient, Revision},
};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    client::{digest::digest, select::Selected},
    facts::FieldError,
    watch::NamespacedName,
};

/// The maximum number of revisions of an App that are remembered if all serving pods serve one of them. Clients cause
/// at most two publishes per second, so these are the revisions of several seconds.
const MAX_REVISIONS: usize = 16;
/// The maximum number of revisions of an App that are remembered because a serving pod still serves the oldest of them.
/// These are the revisions of two minutes. A pod with an older revision counts as behind.
const MAX_REVISIONS_OF_LAGGING_POD: usize = 256;
/// The minimum time between two publishes for the same App, if only its Clients have changed.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(500);

/// The decisions about the Clients of every App.
#[derive(Default)]
pub(crate) struct ClientOutcomes(Mutex<HashMap<NamespacedName, AppEntry>>);

/// The known state of the Clients of one App.
#[derive(Default)]
struct AppEntry {
    /// The last published revisions, the oldest first.
    revisions: VecDeque<Revision>,
    /// The number of the first entry of `revisions`. Each later entry has the next number.
    first: u64,
    /// The revision that the document would have without Clients (it identifies the App's own part of the document),
    /// and the number of the first revision with this part.
    app_part: Option<(Revision, u64)>,
    /// For each client in the last published document: the digest of the client in this document, and the number of the
    /// first revision that contains the client in this form.
    rendered: HashMap<UidDigest, (u64, u64)>,
    last_publish_for_clients: Option<Instant>,
    issuer: Arc<str>,
    outcomes: HashMap<UidDigest, ClientOutcome>,
    /// Whether the App was not accepted in its last reconcile, so that nothing was decided about its Clients.
    is_rejected: bool,
}

/// The digest of the uid of a Client, which needs less memory than the uid.
type UidDigest = u64;

/// What was decided about a Client.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ClientOutcome {
    pub(crate) name: NamespacedName,
    pub(crate) generation: i64,
    /// The issuer of the App.
    pub(crate) issuer: Arc<str>,
    /// Why the Client is not accepted.
    pub(crate) refusal: Option<Box<FieldError>>,
    /// Why the Secrets or keys of the Client cannot be used.
    pub(crate) unresolved: Option<Box<FieldError>>,
    /// Whether the document contains the Client, as it is now or as it was accepted last.
    pub(crate) is_served: bool,
    pub(crate) programmed: Programmed,
}

/// Whether every server serves a Client: the state of its condition `Programmed`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Programmed {
    Yes,
    /// Some server has not reported yet. Contains the message of the condition.
    Undecided(Box<str>),
    No {
        status: ConditionStatus,
        reason: Reason,
        message: Box<str>,
    },
}

/// The decision of a reconcile about one Client, like [`Selected`], but without the rendered client.
pub(crate) struct Decision {
    pub(crate) name: NamespacedName,
    pub(crate) uid: String,
    pub(crate) generation: i64,
    pub(crate) refusal: Option<FieldError>,
    pub(crate) unresolved: Option<FieldError>,
    /// Whether the document contains the Client.
    pub(crate) is_served: bool,
    /// Why the document does not contain an accepted Client.
    pub(crate) left_out: Option<Programmed>,
}

/// A published document, as [`ClientOutcomes::record_published`] records it.
pub(crate) struct PublishedClients<'a> {
    pub(crate) revision: &'a Revision,
    /// The revision that the document would have without Clients. `None`: it is the same as for the document that was
    /// published before.
    pub(crate) app_part: Option<&'a Revision>,
    pub(crate) clients: &'a [RenderedClient],
}

// === impl ClientOutcomes ===

impl ClientOutcomes {
    /// Returns what was decided about a Client, or `None` if no reconcile of its App has decided about the Client yet.
    pub(crate) fn get(&self, app: &NamespacedName, uid: &str) -> Option<ClientOutcome> {
        self.0.lock().get(app)?.outcomes.get(&digest(uid)).cloned()
    }

    /// Whether the last published document of the App contains the Client.
    pub(crate) fn is_served(&self, app: &NamespacedName, uid: &str) -> bool {
        self.0.lock().get(app).is_some_and(|entry| entry.rendered.contains_key(&digest(uid)))
    }

    /// Whether it is known which clients are in the published document of the App. If it is not known,
    /// [`Self::is_served`] returns false.
    pub(crate) fn knows_document(&self, app: &NamespacedName) -> bool {
        self.0.lock().get(app).is_some_and(|entry| !entry.revisions.is_empty())
    }

    /// Whether anything is stored about Clients of the App.
    pub(crate) fn has_app(&self, app: &NamespacedName) -> bool {
        self.0.lock().contains_key(app)
    }

    /// Records that the App is not accepted. The servers still serve its last accepted form.
    pub(crate) fn record_rejected_app(&self, app: &NamespacedName) {
        self.0.lock().entry(app.clone()).or_default().is_rejected = true;
    }

    pub(crate) fn is_app_rejected(&self, app: &NamespacedName) -> bool {
        self.0.lock().get(app).is_some_and(|entry| entry.is_rejected)
    }

    /// Returns the Clients about which something was decided in the last reconcile of the App.
    pub(crate) fn names(&self, app: &NamespacedName) -> Vec<NamespacedName> {
        let entries = self.0.lock();
        let outcomes = entries.get(app).into_iter().flat_map(|entry| entry.outcomes.values());
        outcomes.map(|outcome| outcome.name.clone()).collect()
    }

    /// Drops everything that is stored about an App that is no longer served.
    pub(crate) fn remove_app(&self, app: &NamespacedName) {
        self.0.lock().remove(app);
    }

    /// Returns the cause of the publish if the document can be published now. If only the Clients have changed and the
    /// last such publish was too recent, returns the wait as the error. A document with a changed part of the App
    /// itself can always be published.
    ///
    /// `before` is the published revision, or `None` if it is not known.
    pub(crate) fn try_publish(
        &self,
        app: &NamespacedName,
        before: Option<&Revision>,
        app_part: &Revision,
    ) -> Result<PublishCause, Duration> {
        let mut entries = self.0.lock();
        // If the revision of the App's own part is not known, `before` is used instead: the two are equal if the
        // published document has no Clients.
        let known = entries.get(app).and_then(|entry| entry.app_part.as_ref()).map(|(part, _)| part);
        if known.or(before) != Some(app_part) {
            return Ok(PublishCause::App);
        }
        entries.entry(app.clone()).or_default().try_publish()?;
        Ok(PublishCause::Clients)
    }

    /// Like [`Self::try_publish`], for a document that is known to differ from the published one only in its Clients.
    pub(crate) fn try_publish_clients(&self, app: &NamespacedName) -> Result<(), Duration> {
        self.0.lock().entry(app.clone()).or_default().try_publish()
    }

    /// Records a published document. `before` is the revision that was published before, or `None` if it is not known.
    /// `is_reported` returns whether a serving pod serves a revision. A reconcile that finds its document already
    /// published must also call `record_published`.
    pub(crate) fn record_published(
        &self,
        app: &NamespacedName,
        before: Option<&Revision>,
        published: &PublishedClients<'_>,
        is_reported: impl Fn(&Revision) -> bool,
    ) {
        let mut entries = self.0.lock();
        let entry = entries.entry(app.clone()).or_default();
        // If a document without Clients was published before, its revision is the revision of the App's own part.
        if let Some(app_part) = published.app_part
            && entry.revisions.is_empty()
            && before == Some(app_part)
        {
            entry.revisions.push_back(app_part.clone());
            entry.app_part = Some((app_part.clone(), entry.first));
        }
        if entry.revisions.back() != Some(published.revision) {
            entry.revisions.push_back(published.revision.clone());
            entry.forget_unneeded_revisions(is_reported);
        }
        let current = entry.current();
        if let Some(app_part) = published.app_part
            && entry.app_part.as_ref().is_none_or(|(part, _)| part != app_part)
        {
            entry.app_part = Some((app_part.clone(), current));
        }
        let before = std::mem::take(&mut entry.rendered);
        entry.rendered = published
            .clients
            .iter()
            .map(|client| {
                let (uid, content) = (digest(client.uid.as_str()), digest_of_client(client));
                let since = match before.get(&uid) {
                    Some((known, since)) if *known == content => *since,
                    Some(_) | None => current,
                };
                (uid, (content, since))
            })
            .collect();
    }

    /// Returns the published revision of the App, and the revisions before it that differ only in their Clients.
    /// Returns an empty list if nothing is stored about Clients of the App.
    pub(crate) fn revisions_of_app(&self, app: &NamespacedName) -> Vec<Revision> {
        let entries = self.0.lock();
        let Some(entry) = entries.get(app) else { return Vec::new() };
        entry.app_part.as_ref().map(|(_, since)| entry.revisions_since(*since)).unwrap_or_default()
    }

    /// Records the decisions about all Clients of an App. `state` returns whether every server serves one of the given
    /// revisions. Returns the Clients with a changed outcome, including the Clients that have a previous outcome but no
    /// decision now.
    pub(crate) fn record_decisions(
        &self,
        app: &NamespacedName,
        issuer: &str,
        decisions: Vec<Decision>,
        mut state: impl FnMut(&[Revision]) -> Programmed,
    ) -> Vec<NamespacedName> {
        let mut entries = self.0.lock();
        if decisions.is_empty() && !entries.contains_key(app) {
            return Vec::new();
        }
        let entry = entries.entry(app.clone()).or_default();
        entry.is_rejected = false;
        if *entry.issuer != *issuer {
            entry.issuer = issuer.into();
        }
        let mut states: HashMap<u64, Programmed> = HashMap::new();
        let mut outcomes = HashMap::with_capacity(decisions.len());
        for decision in decisions {
            let uid = digest(decision.uid.as_str());
            let since = entry.rendered.get(&uid).map(|(_, since)| *since).filter(|_| decision.is_served);
            let programmed = match since {
                Some(since) => states.entry(since).or_insert_with(|| state(&entry.revisions_since(since))).clone(),
                None => decision.left_out.unwrap_or_else(Programmed::not_served),
            };
            let outcome = ClientOutcome {
                name: decision.name,
                generation: decision.generation,
                issuer: Arc::clone(&entry.issuer),
                refusal: decision.refusal.map(Box::new),
                unresolved: decision.unresolved.map(Box::new),
                is_served: decision.is_served,
                programmed,
            };
            outcomes.insert(uid, outcome);
        }
        let before = std::mem::replace(&mut entry.outcomes, outcomes);
        let now = &entry.outcomes;
        let changed = now.iter().filter(|(uid, outcome)| before.get(*uid) != Some(*outcome));
        let gone = before.iter().filter(|(uid, _)| !now.contains_key(*uid));
        let affected: HashSet<_> = changed.chain(gone).map(|(_, outcome)| outcome.name.clone()).collect();
        if entry.outcomes.is_empty() && entry.rendered.is_empty() && entry.revisions.len() <= 1 {
            entries.remove(app);
        }
        affected.into_iter().collect()
    }

    /// Drops all revisions before the published one. Called when every server serves the published one. Does nothing if
    /// no revisions of `app` are known.
    pub(crate) fn forget_earlier_revisions(&self, app: &NamespacedName) {
        if let Some(entry) = self.0.lock().get_mut(app) {
            let current = entry.current();
            while entry.revisions.len() > 1 {
                entry.revisions.pop_front();
            }
            entry.first = current;
        }
    }
}

/// What causes the publication of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PublishCause {
    App,
    /// The document differs from the published one only in its Clients.
    Clients,
}

// === impl AppEntry ===

impl AppEntry {
    /// Returns `Ok` if a document that differs only in its Clients can be published now. Otherwise returns the wait.
    fn try_publish(&mut self) -> Result<(), Duration> {
        let now = Instant::now();
        let next = self.last_publish_for_clients.map(|last| last + PUBLISH_INTERVAL);
        match next.and_then(|next| next.checked_duration_since(now)).filter(|wait| !wait.is_zero()) {
            Some(wait) => Err(wait),
            None => {
                self.last_publish_for_clients = Some(now);
                Ok(())
            }
        }
    }

    /// Returns the number of the published revision.
    fn current(&self) -> u64 {
        self.first + (self.revisions.len() as u64).saturating_sub(1)
    }

    /// Drops the oldest revisions beyond the maximum, but keeps all revisions since the oldest one that a serving pod
    /// serves. Otherwise this pod would count as behind, even if neither the App nor the Client has changed since that
    /// revision.
    fn forget_unneeded_revisions(&mut self, is_reported: impl Fn(&Revision) -> bool) {
        let surplus = self.revisions.len().saturating_sub(MAX_REVISIONS);
        if surplus == 0 {
            return;
        }
        let unneeded = self.revisions.iter().take(surplus).position(is_reported).unwrap_or(surplus);
        let forgotten = unneeded.max(self.revisions.len().saturating_sub(MAX_REVISIONS_OF_LAGGING_POD));
        self.revisions.drain(..forgotten);
        self.first += forgotten as u64;
    }

    fn revisions_since(&self, since: u64) -> Vec<Revision> {
        let skipped = usize::try_from(since.saturating_sub(self.first)).unwrap_or(usize::MAX);
        self.revisions.iter().skip(skipped).cloned().collect()
    }
}

fn digest_of_client(client: &RenderedClient) -> u64 {
    digest(serde_json::to_vec(client).expect("a rendered client has only string keys"))
}

// === impl Programmed ===

impl Programmed {
    /// Returns the state of a Client that the document does not contain.
    fn not_served() -> Self {
        Self::No {
            status: ConditionStatus::Unknown,
            reason: Reason::Pending,
            message: "nothing is served yet; see ResolvedRefs".into(),
        }
    }
}

// === impl Decision ===

impl Decision {
    pub(crate) fn new(name: NamespacedName, uid: &str, generation: i64, selected: &Selected) -> Self {
        Self {
            name,
            uid: uid.to_owned(),
            generation,
            refusal: selected.refusal.clone(),
            unresolved: merge(&selected.unresolved),
            is_served: selected.rendered.is_some(),
            left_out: None,
        }
    }
}

/// Merges the errors of several references into one error, which has the reason of the first.
fn merge(errors: &[FieldError]) -> Option<FieldError> {
    let (first, others) = errors.split_first()?;
    let mut message = first.message.clone();
    for other in others {
        message.push_str("; ");
        message.push_str(&crate::status::with_field(&other.field, &other.message));
    }
    Some(FieldError { message, ..first.clone() })
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::RenderedClientAuthentication;

    use super::*;
    use crate::client::{fixtures::client_with, render::render};

    fn app() -> NamespacedName {
        NamespacedName::new("identity", "platform")
    }

    fn revision(of: u8) -> Revision {
        Revision::of(&[of])
    }

    fn client(name: &str, generation: i64) -> RenderedClient {
        let mut client = client_with("monitoring", name, serde_json::json!({}));
        client.metadata.generation = Some(generation);
        let client_id = client.client_id().unwrap();
        render(&client, client_id, RenderedClientAuthentication::Unresolved)
    }

    fn publish(outcomes: &ClientOutcomes, before: Option<u8>, of: u8, app_part: u8, clients: &[RenderedClient]) {
        let (of, app_part) = (revision(of), revision(app_part));
        let published = PublishedClients { revision: &of, app_part: Some(&app_part), clients };
        outcomes.record_published(&app(), before.map(revision).as_ref(), &published, |_| false);
    }

    fn decision(client: &RenderedClient) -> Decision {
        Decision {
            name: NamespacedName::new(&client.namespace, &client.name),
            uid: client.uid.clone(),
            generation: client.generation,
            refusal: None,
            unresolved: None,
            is_served: true,
            left_out: None,
        }
    }

    /// Records the decisions. Returns the names of the Clients with a changed outcome, and for each Client the list of
    /// revisions that contain it in its current form. Equal lists are returned once, the shortest list first.
    fn decide(outcomes: &ClientOutcomes, clients: &[RenderedClient]) -> (Vec<String>, Vec<Vec<Revision>>) {
        let mut asked = Vec::new();
        let decisions = clients.iter().map(decision).collect();
        let changed = outcomes.record_decisions(&app(), "https://auth.example.com/platform", decisions, |revisions| {
            asked.push(revisions.to_vec());
            Programmed::Yes
        });
        let mut changed: Vec<_> = changed.iter().map(|name| name.name().to_owned()).collect();
        changed.sort();
        asked.sort_by_key(Vec::len);
        (changed, asked)
    }

    #[test]
    fn a_client_is_served_by_each_revision_since_its_last_change() {
        let outcomes = ClientOutcomes::default();
        let (one, two) = (client("one", 1), client("two", 1));
        publish(&outcomes, None, 1, 101, std::slice::from_ref(&one));
        publish(&outcomes, Some(1), 2, 101, &[one.clone(), two.clone()]);
        let (changed, asked) = decide(&outcomes, &[one.clone(), two.clone()]);
        assert_eq!(changed, ["one", "two"]);
        assert_eq!(asked, [vec![revision(2)], vec![revision(1), revision(2)]]);
        assert_eq!(outcomes.revisions_of_app(&app()), [revision(1), revision(2)]);
        assert_eq!(decide(&outcomes, &[one.clone(), two.clone()]).0, [""; 0], "nothing has changed");

        publish(&outcomes, Some(2), 3, 101, &[client("one", 2), two.clone()]);
        let (changed, asked) = decide(&outcomes, &[client("one", 2), two.clone()]);
        assert_eq!(changed, ["one"], "an edit of a Client does not affect another one");
        assert_eq!(asked, [vec![revision(3)], vec![revision(2), revision(3)]]);

        // An edit of the App does not affect its Clients.
        publish(&outcomes, Some(3), 4, 102, &[client("one", 2), two.clone()]);
        assert_eq!(outcomes.revisions_of_app(&app()), [revision(4)]);
        let (changed, asked) = decide(&outcomes, &[client("one", 2), two]);
        assert_eq!((changed.len(), asked[0].len(), asked[1].len()), (0, 2, 3));

        outcomes.forget_earlier_revisions(&app());
        assert_eq!(outcomes.revisions_of_app(&app()), [revision(4)]);
        assert_eq!(decide(&outcomes, &[client("one", 2)]).1, [vec![revision(4)]]);
    }

    #[test]
    fn the_first_client_does_not_affect_the_app() {
        let outcomes = ClientOutcomes::default();
        // Revision 101 was published before. It is the document without Clients, so it is equal to the App's own part.
        publish(&outcomes, Some(101), 1, 101, &[client("one", 1)]);
        assert_eq!(outcomes.revisions_of_app(&app()), [revision(101), revision(1)]);
        assert_eq!(decide(&outcomes, &[client("one", 1)]).1, [vec![revision(1)]]);
        // After a start of the operator, the document before the published one is not known.
        let restarted = ClientOutcomes::default();
        publish(&restarted, Some(1), 1, 101, &[client("one", 1)]);
        assert_eq!(restarted.revisions_of_app(&app()), [revision(1)]);
    }

    #[test]
    fn a_document_with_an_unchanged_app_part_does_not_affect_the_app() {
        let outcomes = ClientOutcomes::default();
        publish(&outcomes, None, 1, 101, &[client("one", 1), client("two", 1)]);
        let clients = [client("one", 1)];
        let pruned = PublishedClients { revision: &revision(2), app_part: None, clients: &clients };
        outcomes.record_published(&app(), Some(&revision(1)), &pruned, |_| false);
        assert_eq!(outcomes.revisions_of_app(&app()), [revision(1), revision(2)]);
        let restarted = ClientOutcomes::default();
        restarted.record_published(&app(), Some(&revision(1)), &pruned, |_| false);
        assert!(restarted.knows_document(&app()) && restarted.is_served(&app(), &clients[0].uid));
        assert!(restarted.revisions_of_app(&app()).is_empty(), "the part of the App is not known");
    }

    #[test]
    fn only_the_last_revisions_are_remembered() {
        let outcomes = ClientOutcomes::default();
        let one = client("one", 1);
        for number in 0..40 {
            publish(&outcomes, None, number, 101, std::slice::from_ref(&one));
        }
        assert_eq!(outcomes.revisions_of_app(&app()).len(), MAX_REVISIONS);
        assert_eq!(outcomes.revisions_of_app(&app()).last(), Some(&revision(39)));
        assert_eq!(decide(&outcomes, &[one]).1[0].len(), MAX_REVISIONS);
    }

    #[test]
    fn revisions_are_remembered_back_to_the_one_of_a_lagging_pod() {
        let outcomes = ClientOutcomes::default();
        let clients = [client("one", 1)];
        let remembered = |published: u16, reported: u16| {
            let revision = |of: u16| Revision::of(&of.to_be_bytes());
            let app_part = Revision::of(b"app");
            let document =
                PublishedClients { revision: &revision(published), app_part: Some(&app_part), clients: &clients };
            outcomes.record_published(&app(), None, &document, |of| *of == revision(reported));
            let revisions = outcomes.revisions_of_app(&app());
            (revisions.len(), revisions.contains(&revision(reported)))
        };
        for number in 0..MAX_REVISIONS_OF_LAGGING_POD as u16 {
            assert_eq!(remembered(number, 0), (usize::from(number) + 1, true));
        }
        assert_eq!(remembered(1000, 0), (MAX_REVISIONS_OF_LAGGING_POD, false), "the pod lags too much");
        // Now the lagging pod serves a later revision, so the earlier ones are dropped.
        assert_eq!(remembered(1001, 1000).0, MAX_REVISIONS);
    }

    #[test]
    fn a_client_that_is_no_longer_a_candidate_has_a_changed_outcome() {
        let outcomes = ClientOutcomes::default();
        let (one, two) = (client("one", 1), client("two", 1));
        publish(&outcomes, None, 1, 101, &[one.clone(), two.clone()]);
        decide(&outcomes, &[one.clone(), two.clone()]);
        assert!(outcomes.is_served(&app(), &two.uid));
        publish(&outcomes, Some(1), 2, 101, std::slice::from_ref(&one));
        assert_eq!(decide(&outcomes, std::slice::from_ref(&one)).0, ["two"]);
        assert_eq!(outcomes.get(&app(), &two.uid), None);
        assert!(!outcomes.is_served(&app(), &two.uid));
        publish(&outcomes, Some(2), 101, 101, &[]);
        assert_eq!(decide(&outcomes, &[]).0, ["one"]);
        outcomes.forget_earlier_revisions(&app());
        decide(&outcomes, &[]);
        assert!(!outcomes.has_app(&app()), "nothing is stored of an App without Clients");
        decide(&outcomes, &[]);
        assert!(!outcomes.has_app(&app()));
    }

    #[tokio::test(start_paused = true)]
    async fn clients_cause_at_most_two_publishes_per_second() {
        let outcomes = ClientOutcomes::default();
        let try_publish = |part: u8| outcomes.try_publish(&app(), Some(&revision(100)), &revision(part));
        assert_eq!(try_publish(101), Ok(PublishCause::App), "the published document may have another part of the App");
        assert_eq!(try_publish(100), Ok(PublishCause::Clients), "a Client is added to a document without Clients");
        publish(&outcomes, None, 1, 101, &[client("one", 1)]);
        tokio::time::advance(PUBLISH_INTERVAL).await;
        let mut published = 0;
        for _ in 0..1000 {
            published += u32::from(try_publish(101).is_ok());
            tokio::time::advance(Duration::from_millis(10)).await;
        }
        assert_eq!(published, 20, "in ten seconds");
        assert_eq!(try_publish(101), Ok(PublishCause::Clients));
        assert_eq!(try_publish(101), Err(PUBLISH_INTERVAL));
        assert_eq!(try_publish(102), Ok(PublishCause::App), "an edit of the App does not wait");
        assert_eq!(outcomes.try_publish_clients(&app()), Err(PUBLISH_INTERVAL), "a rejected App has the same limit");
        tokio::time::advance(PUBLISH_INTERVAL).await;
        assert_eq!(outcomes.try_publish_clients(&app()), Ok(()));
        assert_eq!(try_publish(101), Err(PUBLISH_INTERVAL));
    }

    #[test]
    fn the_errors_of_several_references_are_merged() {
        let missing = FieldError::new(Reason::SecretNotFound, "spec.web.secretRef", "create it");
        let no_key = FieldError::new(Reason::SecretKeyNotFound, "spec.web.previousSecretRef", "add it");
        assert_eq!(merge(&[]), None);
        assert_eq!(merge(std::slice::from_ref(&missing)), Some(missing.clone()));
        let merged = merge(&[missing, no_key]).unwrap();
        assert_eq!((merged.reason, merged.field.as_str()), (Reason::SecretNotFound, "spec.web.secretRef"));
        assert_eq!(merged.message, "create it; spec.web.previousSecretRef: add it");
    }
}
