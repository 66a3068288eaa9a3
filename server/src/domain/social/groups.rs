//! Takes over the groups of a user that a provider reports at a login (specification: Groups, Groups from providers).

use latchkey_crds::rendered::RenderedProvider;

use super::provider::provider_detail;
use crate::domain::{
    audit::EventKind,
    call::Call,
    error::CommonError,
    groups::{ReportedGroups, propagate_groups},
    identity::VerifiedIdentity,
    ports::GroupChanges,
    user::UserId,
};

/// The presets of providers that can report groups.
const PRESETS: [&str; 4] = ["oidc", "oauth2", "gitlab", "microsoft"];

/// Replaces the groups that the Provider reported at the last login. This also applies if the App no longer takes over
/// groups from the Provider: otherwise the user would keep the earlier groups.
pub(super) async fn replace_groups<S: GroupChanges>(
    call: Call<'_, S>,
    provider: &RenderedProvider,
    user: UserId,
    verified: &VerifiedIdentity,
) -> Result<(), CommonError> {
    if !PRESETS.contains(&provider.settings.preset.as_str()) {
        return Ok(());
    }
    let reported = ReportedGroups { user, provider: provider.name.clone(), names: verified.groups.clone() };
    // The store sets the kind of each event.
    let event = call.event(EventKind::GroupMemberAdded, user).with_detail(provider_detail(&provider.name));
    if let Some(change) = call.stores.replace_reported_groups(call.app_id(), reported, event).await? {
        propagate_groups(call.stores, call.app_id(), &[change]).await;
    }
    Ok(())
}
