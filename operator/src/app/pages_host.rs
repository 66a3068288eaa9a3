//! Decides whether an App gets its own host for its pages (specification: Hosted pages, Own host).

use latchkey_crds::{
    app::App,
    conditions::{ConditionStatus, ConditionType},
    names::rendered_app_secret,
    types::AppId,
};

use crate::{
    app::ownership::{Claim, ClaimValidity},
    watch::ClusterState,
};

/// Whether the App has the host `spec.pages.host`, or takes it now because no other App has it or can take it first. A
/// host that the App takes is reserved until [`release`], so that two Apps that are reconciled at the same time never
/// both publish it.
pub(crate) fn claim(app: &App, app_id: &AppId, objects: &ClusterState) -> bool {
    let Some(host) = app.spec.pages.enabled_host() else { return false };
    let claim = Claim::from_app(app);
    let is_oldest = !objects.apps_with_pages_host(host).iter().any(|other| {
        other.0.as_ref().is_ok_and(|other| {
            let other_claim = Claim::from_app(other);
            other_claim.owner != claim.owner
                && can_take_host(other, other_claim.validity)
                && other_claim.has_precedence_over(&claim)
        })
    });
    objects.published.claim_pages_host(host, &rendered_app_secret(app_id), is_oldest)
}

/// Ends the reservation that [`claim`] made for the App in this reconcile. If the App's document was published with the
/// host, the App keeps the host without a reservation.
pub(crate) fn release(app: &App, objects: &ClusterState) {
    if let Ok(app_id) = app.app_id() {
        objects.published.release_pages_host(&rendered_app_secret(&app_id));
    }
}

/// Whether the App can be served with the host: the App is accepted, or the operator has not checked it yet.
fn can_take_host(app: &App, validity: ClaimValidity) -> bool {
    match validity {
        ClaimValidity::Pending => true,
        // `Valid` is not enough: it includes Apps that do not own their appID or have no usable keys.
        ClaimValidity::Valid => app.status.as_ref().is_some_and(|status| {
            status.conditions.iter().any(|condition| {
                condition.type_ == ConditionType::Accepted.as_str() && condition.status == ConditionStatus::True
            })
        }),
        ClaimValidity::Invalid | ClaimValidity::Deleting => false,
    }
}
