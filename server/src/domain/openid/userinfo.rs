//! *userinfo*: the claims about a user, for an access token of a client (OpenID Connect Core 1.0, 5.3). Reads Postgres
//! only for the claim `groups`, and only if Redis does not have the groups of the user.

use std::sync::Arc;

use latchkey_crds::types::GroupName;

use super::{
    claims::UserClaims,
    claims_request::{ClaimSet, UserClaim},
    client::OpenIdClient,
    client_session::{ClientSession, SessionUse, find_client_session},
};
use crate::domain::{
    call::Call,
    groups::user_groups,
    ports::{ClientSessions, Groups, StoreError},
    token::AccessClaims,
    user::UserId,
};

/// The user of an access token, with everything that the claims need.
pub struct ClientUserInfo<'a> {
    client: &'a OpenIdClient,
    session: ClientSession,
    groups: Arc<[GroupName]>,
    granted: ClaimSet,
}

/// Finds the user of a valid access token of a client. Returns `None` if the session has ended, or the App no longer
/// has the client.
pub async fn client_userinfo<'a, S: ClientSessions + Groups>(
    call: Call<'a, S>,
    token: &AccessClaims,
) -> Result<Option<ClientUserInfo<'a>>, StoreError> {
    let found = find_client_session(call, token.sub, token.sid, SessionUse::Counted).await?;
    let found = found.filter(|(client, _)| client.client_id.as_str() == token.client_id);
    let Some((client, session)) = found else { return Ok(None) };
    let requested = session.grant.claims.userinfo.narrowed(session.grant.scopes, token.scope);
    let granted = ClaimSet::released(token.scope, client.scopes, requested);
    // `allow` is checked at the login and at each refresh, so here the groups are read only for the claim `groups`.
    let groups = if granted.contains(UserClaim::Groups) { user_groups(call, token.sub).await? } else { Arc::from([]) };
    Ok(Some(ClientUserInfo { client, session, groups, granted }))
}

// === impl ClientUserInfo ===

impl ClientUserInfo<'_> {
    pub fn user(&self) -> UserId {
        self.session.session.user
    }

    pub fn claims(&self) -> UserClaims<'_> {
        UserClaims::new(self.client, &self.session.profile, &self.groups, self.granted)
    }
}
