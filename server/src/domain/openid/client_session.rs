//! Client sessions: the exchange of a code opens one (specification: OpenID provider, Client sessions).

use time::OffsetDateTime;

use super::{claims_request::RequestedClaims, client::OpenIdClient, scope::Scopes};
use crate::domain::{
    app::App,
    call::Call,
    ports::{ClientSessions, StoreError},
    session::{Amr, NO_REFRESH_TOKEN, Profile, Session, SessionId},
    user::{Epoch, UserId},
};

/// A client session to open.
#[derive(Clone, Debug)]
pub struct NewClientSession {
    pub id: SessionId,
    pub user: UserId,
    pub epoch: Epoch,
    pub grant: ClientGrant,
    pub amr: Amr,
    pub auth_time: OffsetDateTime,
    /// The IP address of the browser.
    pub ip: String,
    pub user_agent: Option<String>,
    pub ends_at: OffsetDateTime,
    pub idle_seconds: u32,
    /// Whether the session has a refresh token. No list shows a session without one.
    pub has_refresh_token: bool,
}

/// What the user has granted to the client of a session. It never changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientGrant {
    pub client_uid: String,
    pub client_id: String,
    pub scopes: Scopes,
    pub claims: RequestedClaims,
    /// The browser session in which the user granted the access.
    pub browser_session: SessionId,
    /// Whether the session ends with the browser session.
    pub ends_with_browser: bool,
}

/// A live client session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientSession {
    /// Id, user, epoch, generation, `amr` and `auth_time`.
    pub session: Session,
    pub profile: Profile,
    pub grant: ClientGrant,
}

/// Whether reading a session counts as a use, which restarts its idle time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionUse {
    Counted,
    NotCounted,
}

/// A client session with a refresh token, for the list of applications.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedClientSession {
    pub id: SessionId,
    pub client_uid: String,
    pub client_id: String,
    pub scopes: Scopes,
    pub created_at: OffsetDateTime,
    pub last_used_at: OffsetDateTime,
}

/// Finds the live session of a client's token, if the App still has this client. Returns the client, too.
pub async fn find_client_session<'a, S: ClientSessions>(
    call: Call<'a, S>,
    user: UserId,
    session: SessionId,
    counts: SessionUse,
) -> Result<Option<(&'a OpenIdClient, ClientSession)>, StoreError> {
    let found = call.stores.client_session(call.app_id(), user, session, counts).await?;
    Ok(found.and_then(|found| Some((found.grant.client(call.app)?, found))))
}

// === impl ClientGrant ===

impl ClientGrant {
    /// Finds the client of this grant in the App, by client ID and UID. `None` if the client was deleted, or if the App
    /// no longer accepts clients from its namespace.
    pub fn client<'a>(&self, app: &'a App) -> Option<&'a OpenIdClient> {
        let client = app.client(&self.client_id)?;
        (*client.uid == *self.client_uid).then_some(&**client)
    }
}

// === impl NewClientSession ===

impl NewClientSession {
    /// Returns the session as it is directly after it was opened.
    pub fn opened(&self) -> Session {
        Session {
            id: self.id,
            user: self.user,
            epoch: self.epoch,
            generation: if self.has_refresh_token { 1 } else { NO_REFRESH_TOKEN },
            amr: self.amr,
            auth_time: self.auth_time,
        }
    }
}
