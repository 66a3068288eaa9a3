//! Who is signed in.

use super::{
    app::App,
    clock::Env,
    ports::{Sessions, StoreError},
    session::{LiveSession, Profile, Session},
    token::{self, AccessClaims},
    user::UserId,
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

    pub fn user(&self) -> UserId {
        self.session.user
    }
}
