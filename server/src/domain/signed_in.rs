//! Who is signed in.

use super::{
    app::App,
    clock::Env,
    ports::{Accounts, Sessions, StoreError},
    session::{LiveSession, Profile, Session},
    token::{self, AccessClaims},
    user::{User, UserId},
};

/// The proof that a request is that of a signed-in user: a valid token of a session that is still there.
#[derive(Clone, Debug)]
pub struct SignedIn {
    pub claims: AccessClaims,
    pub session: Session,
    pub profile: Profile,
}

/// Why nobody is signed in.
#[derive(Debug, thiserror::Error)]
pub enum NotSignedIn {
    #[error("there is no valid access token of a live session")]
    InvalidToken,
    #[error(transparent)]
    Store(#[from] StoreError),
}

// === impl SignedIn ===

impl SignedIn {
    pub async fn prove<S: Sessions>(stores: &S, env: &Env, app: &App, bearer: &str) -> Result<Self, NotSignedIn> {
        let claims = token::verify_access(app, env.now(), bearer).ok_or(NotSignedIn::InvalidToken)?;
        let live = stores.session(app.id(), claims.sub, claims.sid).await?.ok_or(NotSignedIn::InvalidToken)?;
        let LiveSession { session, profile } = live;
        Ok(Self { claims, session, profile })
    }

    /// The user, as Postgres has them now; none where they are gone or disabled, or the session has ended.
    pub async fn account<S: Accounts + Sessions>(&self, stores: &S, app: &App) -> Result<Option<User>, StoreError> {
        let mut session = self.session.clone();
        loop {
            if let Some(user) = stores.user_of_session(app.id(), &session).await? {
                return Ok(Some(user));
            }
            // Between the looks at Redis and at Postgres the epoch may have risen, and this session with it.
            match stores.session(app.id(), session.user, session.id).await? {
                Some(live) if live.session.epoch > session.epoch => session = live.session,
                Some(_) | None => return Ok(None),
            }
        }
    }

    pub fn user(&self) -> UserId {
        self.session.user
    }
}
