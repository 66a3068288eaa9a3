//! The applications of a user: the clients with a stored consent of the user, and the clients with a session that
//! continues after the user logs out (specification: Authorization, Applications).

use std::{collections::BTreeMap, sync::Arc};

use latchkey_crds::client::ClientScope;
use time::OffsetDateTime;

use super::client::OpenIdClient;
use crate::domain::{
    app::App,
    audit::{Detail, EventKind},
    authentication::AuthenticatedSession,
    call::Call,
    ports::{AuditLog, ClientSessions, Consents, StoreError},
};

/// A client with a stored consent, or with a session that continues after the user logs out.
#[derive(Clone, Debug)]
pub struct Application {
    pub client_uid: String,
    /// `None` if the App no longer has the client. The consent and the sessions of the client are kept, and become
    /// valid again if the App has the client again.
    pub client: Option<Arc<OpenIdClient>>,
    /// The client ID that is stored in a session. `None` if the application has only a consent.
    stored_client_id: Option<String>,
    /// When the user last allowed the access or, without a stored consent, when the oldest session began.
    pub since: OffsetDateTime,
}

/// Returns the applications of the user, the newest first. Includes Clients that the App no longer has.
pub async fn list_applications<S: Consents + ClientSessions>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
) -> Result<Vec<Application>, StoreError> {
    let consents = call.stores.consents(call.app_id(), signed_in.user_id()).await?;
    let sessions = call.stores.client_sessions(call.app_id(), signed_in.user_id()).await?;
    let offline = sessions.into_iter().filter(|session| session.scopes.contains(ClientScope::OfflineAccess));
    let consents = consents.into_iter().map(|consent| (consent.client_uid, consent.at));
    let sessions = offline.map(|session| (session.client_uid, session.client_id, session.created_at));
    Ok(join_by_client(call.app, consents, sessions))
}

/// Joins the consents and sessions of each client. `consents`: the UID of the client, and when the user consented.
/// `sessions`: the UID of the client, the client ID, and when the session began.
fn join_by_client(
    app: &App,
    consents: impl Iterator<Item = (String, OffsetDateTime)>,
    sessions: impl Iterator<Item = (String, String, OffsetDateTime)>,
) -> Vec<Application> {
    let mut found: BTreeMap<String, (Option<String>, OffsetDateTime)> = BTreeMap::new();
    for (uid, client_id, created_at) in sessions {
        let (_, oldest) = found.entry(uid).or_insert((Some(client_id), created_at));
        *oldest = created_at.min(*oldest);
    }
    for (uid, at) in consents {
        found.entry(uid).or_insert((None, at)).1 = at;
    }
    let mut applications: Vec<Application> = found
        .into_iter()
        .map(|(client_uid, (stored_client_id, since))| {
            let client = app.client_by_uid(&client_uid).map(Arc::clone);
            Application { client_uid, client, stored_client_id, since }
        })
        .collect();
    applications.sort_by(|one, other| other.since.cmp(&one.since).then_with(|| one.id().cmp(other.id())));
    applications
}

// === impl Application ===

impl Application {
    /// The id of the application in forms: the client ID or, if the App no longer has the client, the client's UID.
    pub fn id(&self) -> &str {
        self.client.as_ref().map_or(self.client_uid.as_str(), |client| client.client_id.as_str())
    }

    /// The name for people. If the App no longer has the client: the client ID that a session contains, or the client's
    /// UID.
    pub fn name(&self) -> &str {
        match &self.client {
            Some(client) => &client.display_name,
            None => self.stored_client_id.as_deref().unwrap_or(&self.client_uid),
        }
    }
}

/// Removes the user's consent to the client with this UID, and ends the user's sessions at this client. `client` is set
/// if the App has the client. Returns false if there was neither a consent nor a session. If Redis fails after the
/// consent was removed, a repeated call ends the sessions.
pub async fn withdraw_access<S: Consents + ClientSessions + AuditLog>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
    client_uid: &str,
    client: Option<&OpenIdClient>,
) -> Result<bool, StoreError> {
    let user = signed_in.user_id();
    let event = || {
        let detail = client.map_or_else(Detail::default, |client| Detail::from_client(&client.client_id));
        signed_in.event(call, EventKind::ConsentWithdrawn).with_detail(detail)
    };
    let had_consent = call.stores.remove_consent(call.app_id(), user, client_uid, event()).await?;
    let ended = call.stores.end_client_sessions(call.app_id(), user, client_uid).await?;
    if !had_consent && !ended.is_empty() {
        call.stores.record(call.app_id(), event()).await;
    }
    Ok(had_consent || !ended.is_empty())
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;
    use crate::fixtures;

    #[test]
    fn consents_and_sessions_of_one_client_are_one_application() {
        let app = fixtures::provider(["a", "b", "c"].map(fixtures::client).into());
        let at = |day| datetime!(2026-11-01 00:00 UTC) + time::Duration::days(day);
        let entry = |id: &str, day| (format!("uid-{id}"), at(day));
        let consents = [entry("a", 9), entry("gone", 8)];
        let session = |id: &str, day| (format!("uid-{id}"), format!("old-{id}"), at(day));
        let sessions = [session("a", 2), session("b", 5), session("b", 3), session("b", 4), session("away", 1)];
        let applications = join_by_client(&app, consents.into_iter(), sessions.into_iter());
        let listed: Vec<_> = applications.iter().map(|found| (found.id(), found.name(), found.since)).collect();
        let away = [("uid-gone", "uid-gone", at(8)), ("uid-away", "old-away", at(1))];
        assert_eq!(listed, [("a", "a", at(9)), away[0], ("b", "b", at(3)), away[1]]);
        assert!(join_by_client(&app, [].into_iter(), [].into_iter()).is_empty());
    }
}
