//! The steps of a release: publish the document with the state `Released`, wait for the servers, free the appID.

use std::{ops::ControlFlow, time::Duration};

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, ResourceExt, runtime::reflector::ObjectRef};
use latchkey_crds::{
    names::rendered_app_secret,
    rendered::{AppState, DELETED_APP_FORMAT, DeletedApp, Revision},
    types::AppId,
};
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep_until},
};
use tracing::info;

use super::state::ReleaseGuard;
use crate::{
    app::{
        deletion::render_unserved,
        keys::secret::{self as key_secret, AppIdOwner, KeyLookup, Stored},
        publish::{DocumentOwner, delete_document, publish},
    },
    context::Context,
    error::Error,
    monitor::ReleaseResponse,
    orphans::owning_app_exists,
    watch::claimed_app_id,
};

/// How often a waiting release checks that its document is still published.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum wait for the servers' response to the document of a release.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// The outcome of a check of an appID.
pub(super) enum ReleaseOutcome {
    /// The appID is free, stays reserved, or belongs to an App.
    Done,
    /// A document with this appID is still published.
    StillPublished,
    /// The servers did not respond.
    Unanswered,
}

/// The release of one appID. `owner` is the owner according to the key Secret.
pub(super) struct Release<'a> {
    context: &'a Context,
    id: &'a AppId,
    owner: AppIdOwner,
    key_secrets: Api<Secret>,
}

/// The keys as stored after `handover` was increased, and the revision of the published document.
struct PublishedRelease {
    keys: Stored,
    revision: Revision,
}

/// Frees the appID if its App is deleted and has no users.
pub(super) async fn release(
    context: &Context,
    id: &AppId,
    guard: &ReleaseGuard<'_>,
    slots: &Semaphore,
) -> Result<ReleaseOutcome, Error> {
    // The semaphore is never closed.
    let Ok(slot) = slots.acquire().await else { return Ok(ReleaseOutcome::Done) };
    let Some(owner) = context.objects.quotas.owner(id) else { return Ok(ReleaseOutcome::Done) };
    let release = Release::new(context, id, owner);
    let published = match release.publish_released(guard).await? {
        ControlFlow::Continue(published) => published,
        ControlFlow::Break(outcome) => return Ok(outcome),
    };
    let response = context.monitor.wait_released(id, &published.revision, RESPONSE_TIMEOUT).await;
    drop(slot);
    // Requests to the deleted App may still be running. While the appID is free, Postgres rejects their writes. After
    // another App has become the owner of the appID, Postgres would accept them. So the keys keep the appID reserved
    // until these requests have ended.
    if response == ReleaseResponse::Freed && !release.wait_for_requests(&published.revision).await {
        return Ok(ReleaseOutcome::Done);
    }
    let _slot = slots.acquire().await;
    release.finish(&published, response).await
}

// === impl Release ===

impl<'a> Release<'a> {
    pub(super) fn new(context: &'a Context, id: &'a AppId, owner: AppIdOwner) -> Self {
        let key_secrets = Api::namespaced(context.client.clone(), &context.namespace);
        Self { context, id, owner, key_secrets }
    }

    /// Asks the servers whether the App has users, by publishing the document of the App with the state `Released`.
    async fn publish_released(
        &self,
        guard: &ReleaseGuard<'_>,
    ) -> Result<ControlFlow<ReleaseOutcome, PublishedRelease>, Error> {
        let Self { context, id, owner, key_secrets } = self;
        if self.is_claimed() {
            return Ok(ControlFlow::Break(ReleaseOutcome::Done));
        }
        let _lock = context.releases.lock_exclusive(id).await;
        if context.objects.published.get(&rendered_app_secret(id)).is_some() {
            return Ok(ControlFlow::Break(ReleaseOutcome::StillPublished));
        }
        let Some(keys) = self.retained_keys().await? else { return Ok(ControlFlow::Break(ReleaseOutcome::Done)) };
        if context.monitor.pod_counts().0 == 0 {
            return Ok(ControlFlow::Break(ReleaseOutcome::Unanswered));
        }
        let document = DeletedApp {
            format: DELETED_APP_FORMAT,
            app_id: (*id).clone(),
            namespace: owner.namespace.clone(),
            name: owner.name.clone(),
            state: AppState::Released,
            incarnation: keys.document.incarnation.clone(),
            handover: (keys.document.handover > 0).then_some(keys.document.handover),
        };
        let mut next_keys = keys.document.clone();
        next_keys.handover = next_keys.handover.saturating_add(1);
        let Some(keys) = key_secret::replace(key_secrets, &keys, &next_keys, owner).await? else {
            return Ok(ControlFlow::Break(ReleaseOutcome::Unanswered));
        };
        let rendered = render_unserved(&document);
        let document_owner = DocumentOwner { app_id: id, namespace: &owner.namespace, name: &owner.name };
        guard.set_asking();
        publish(context, document_owner, &rendered).await?;
        context.monitor.expect_revision(id, &rendered.revision);
        Ok(ControlFlow::Continue(PublishedRelease { keys, revision: rendered.revision }))
    }

    /// Deletes the document of the release, and the keys if the App had no users.
    async fn finish(&self, release: &PublishedRelease, response: ReleaseResponse) -> Result<ReleaseOutcome, Error> {
        let Self { context, id, owner, key_secrets } = self;
        let secret = rendered_app_secret(id);
        let _lock = context.releases.lock_exclusive(id).await;
        let published = context.objects.published.get(&secret);
        let Some(own_document) = published.filter(|published| published.revision.as_ref() == Some(&release.revision))
        else {
            // The document of an App with this appID was published instead, or somebody deleted the document of the
            // release.
            return Ok(ReleaseOutcome::Done);
        };
        if self.is_claimed() {
            // The reconcile of the App that claims the appID replaces this document.
            return Ok(ReleaseOutcome::Done);
        }
        context.monitor.forget(id);
        delete_document(context, &secret, &own_document).await?;
        match response {
            ReleaseResponse::Reserved => return Ok(ReleaseOutcome::Done),
            ReleaseResponse::Unanswered => return Ok(ReleaseOutcome::Unanswered),
            ReleaseResponse::Freed => {}
        }
        if self.retained_keys().await?.is_none() {
            return Ok(ReleaseOutcome::Done);
        }
        if !key_secret::delete(key_secrets, &release.keys).await? {
            return Ok(ReleaseOutcome::Unanswered);
        }
        info!(app = %id, owner.namespace = owner.namespace, "the App is deleted and left no users; its appID is free");
        Ok(ReleaseOutcome::Done)
    }

    /// Waits for the end of every request that began while the App's document was served. Returns false as soon as an
    /// App claims the appID or the document of the release is no longer published.
    pub(super) async fn wait_for_requests(&self, revision: &Revision) -> bool {
        let secret = rendered_app_secret(self.id);
        let end = Instant::now() + self.context.request_drain;
        loop {
            let published = self.context.objects.published.get(&secret);
            if published.and_then(|published| published.revision).as_ref() != Some(revision) || self.is_claimed() {
                return false;
            }
            let now = Instant::now();
            if now >= end {
                return true;
            }
            sleep_until(end.min(now + POLL_INTERVAL)).await;
        }
    }

    /// Returns the keys if their App is deleted according to the API server, and no App of its namespace claims the
    /// appID.
    async fn retained_keys(&self) -> Result<Option<Box<Stored>>, Error> {
        let keys = match key_secret::read(&self.key_secrets, self.id).await? {
            // Keys that were handed over wait for an App of their new namespace.
            KeyLookup::Stored(keys) if keys.owner == self.owner && !keys.is_handed_over() => keys,
            KeyLookup::Stored(_) | KeyLookup::Unusable(..) | KeyLookup::Missing => return Ok(None),
        };
        let is_gone = !self.is_claimed() && !owning_app_exists(self.context, &self.owner, self.id).await?;
        Ok(is_gone.then_some(keys))
    }

    /// Whether an App of the owner's namespace claims the appID, as far as the watch has reported.
    fn is_claimed(&self) -> bool {
        let objects = &self.context.objects;
        let AppIdOwner { namespace, name } = &self.owner;
        let stored = objects.apps.get(&ObjectRef::new(name).within(namespace));
        // An App that cannot be decoded may claim the appID.
        stored.is_some_and(|app| app.0.is_err() || claimed_app_id(&app).as_ref() == Some(self.id))
            || objects.apps_with_id(self.id).iter().any(|app| app.namespace().as_ref() == Some(namespace))
    }
}
