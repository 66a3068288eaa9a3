//! Checks an App against the size limit of its document and the quotas of its namespace. An App that would exceed a
//! quota waits, and is reconciled again as soon as the quota has room for it.

use kube::{Resource, ResourceExt};
use latchkey_crds::{app::App, conditions::Reason, names::rendered_app_secret};

use crate::{
    app::{
        keys::{KeyDocument, policy::KeyPolicy},
        ownership::{Claim, OwnershipDecision},
        render::{Rendered, Room, TooLarge, render},
        stop::Stop,
        validate::{Rejection, ValidatedApp},
    },
    context::Context,
    quota::{DocumentSize, NoRoom},
};

/// Reserves room in the quotas for the first keys and the first document of an App before the App takes its appID,
/// because an App that cannot be served must not take an appID.
pub(crate) fn admit_app(
    app: &App,
    validated: &ValidatedApp,
    policy: &KeyPolicy,
    decision: OwnershipDecision,
    context: &Context,
) -> Result<(), Stop> {
    if decision == OwnershipDecision::Ours {
        return Ok(());
    }
    let keys = KeyDocument::first_with_policy(&validated.app_id, policy, context.now())?;
    let rendered = render(validated, &keys, Room::APP_ONLY).map_err(too_large)?;
    let secret = rendered_app_secret(&validated.app_id);
    let size = DocumentSize::of(&rendered.bytes);
    let claim = Claim::from_app(app);
    let quotas = &context.objects.quotas;
    let admitted = if decision == OwnershipDecision::Free {
        let older_apps = context.objects.count_ahead_of(&claim);
        quotas.admit_app(&validated.app_id, &claim.owner, &secret, size, older_apps)
    } else {
        // The quota of appIDs is not checked: the quota already counts this appID, or the platform team assigned the
        // appID.
        quotas.admit_document(&secret, &validated.namespace, size)
    };
    admitted.map_err(|no_room| record_waiting(&claim, no_room, context).into())
}

/// Renders a document that is about to be published, and reserves room for it in the quotas. `supported_format` is the
/// highest format that all serving pods support. Clients for which there is no room are left out.
pub(crate) fn admit_document(
    app: &App,
    validated: &ValidatedApp,
    keys: &KeyDocument,
    supported_format: u32,
    context: &Context,
) -> Result<Rendered, Rejection> {
    let secret = rendered_app_secret(&validated.app_id);
    let room_for_clients = context.objects.quotas.room_for_clients(&secret, &validated.namespace);
    let rendered = render(validated, keys, Room::new(supported_format, room_for_clients)).map_err(too_large)?;
    let size = DocumentSize::of(&rendered.bytes);
    match context.objects.quotas.admit_document(&secret, &validated.namespace, size) {
        Ok(()) => Ok(rendered),
        Err(no_room) => Err(record_waiting(&Claim::from_app(app), no_room, context)),
    }
}

/// Releases the room in the quotas that this reconcile reserved but did not use.
pub(crate) fn release_reservations(app: &App, context: &Context) {
    if let Ok(app_id) = app.app_id() {
        context.objects.quotas.release_reservations(&app_id, &rendered_app_secret(&app_id));
    }
}

/// Removes the App from the list of Apps that wait for room in a quota. If there is room now for other waiting Apps of
/// the namespace, enqueues them.
pub(crate) fn stop_waiting<K: Resource>(app: &K, context: &Context) {
    let namespace = app.namespace().unwrap_or_default();
    context.objects.quotas.remove_waiting(&namespace, &app.name_any());
    context.reconcile_queue.enqueue_waiting(&context.objects, &namespace);
}

/// Records that the App waits for room in a quota. Returns the rejection for the status.
fn record_waiting(claim: &Claim, no_room: NoRoom, context: &Context) -> Rejection {
    context.objects.quotas.add_waiting(&claim.owner.namespace, &claim.owner.name, claim.created, no_room.need);
    Rejection::new(Reason::QuotaExceeded, "", no_room.exceeded.to_string())
}

fn too_large(error: TooLarge) -> Rejection {
    Rejection::new(Reason::TooLarge, "", error.to_string())
}
