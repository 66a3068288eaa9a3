//! Authentication of a request by an access token.

use time::Duration;

use super::{
    app::App,
    clock::Env,
    ports::{OwnAccounts, Sessions, StoreError},
    session::{LiveSession, Profile, Session},
    token::{self, AccessClaims},
    user::{User, UserId},
};

/// For how long a login counts in place of the password.
pub(super) const RECENT_LOGIN: Duration = Duration::minutes(5);

/// The proof that a request comes from a logged-in user: a valid token of a live session.
#[derive(Clone, Debug)]
pub struct AuthenticatedSession {
    pub claims: AccessClaims,
    pub session: Session,
    pub profile: Profile,
}

/// Why a request is not authenticated.
#[derive(Debug, thiserror::Error)]
pub enum AuthenticationError {
    #[error("there is no valid access token of a live session")]
    InvalidToken,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Whether the login is recent. The absolute difference is compared because the clocks of two servers differ.
pub(super) fn is_recent_login(env: &Env, session: &Session) -> bool {
    (env.now() - session.auth_time).abs() < RECENT_LOGIN
}

// === impl AuthenticatedSession ===

impl AuthenticatedSession {
    pub async fn authenticate<S: Sessions>(
        stores: &S,
        env: &Env,
        app: &App,
        bearer: &str,
    ) -> Result<Self, AuthenticationError> {
        let claims = token::verify_access_token(app, env.now(), bearer).ok_or(AuthenticationError::InvalidToken)?;
        let live = stores.session(app.id(), claims.sub, claims.sid).await?.ok_or(AuthenticationError::InvalidToken)?;
        let LiveSession { session, profile } = live;
        Ok(Self { claims, session, profile })
    }

    /// The user as Postgres has it now. `None` if the user is deleted or disabled, or the session has ended.
    pub async fn load_user<S: OwnAccounts + Sessions>(
        &self,
        stores: &S,
        app: &App,
    ) -> Result<Option<User>, StoreError> {
        let mut session = self.session.clone();
        loop {
            if let Some(user) = stores.user_of_session(app.id(), &session).await? {
                return Ok(Some(user));
            }
            // Between the reads of Redis and Postgres the epoch may have risen, and this session with it.
            match stores.session(app.id(), session.user, session.id).await? {
                Some(live) if live.session.epoch > session.epoch => session = live.session,
                Some(_) | None => return Ok(None),
            }
        }
    }

    pub fn user_id(&self) -> UserId {
        self.session.user
    }
}
