//! Authentication of a request by an access token.

use time::Duration;

use super::{
    audit::{Event, EventKind},
    call::Call,
    clock::Env,
    ports::{OwnAccounts, Sessions, StoreError},
    session::{LiveSession, Profile, Session, SessionKind},
    token,
    user::{User, UserId},
};

/// For this long after a login, some calls need no password (specification: Accounts, Change of password).
const RECENT_LOGIN: Duration = Duration::minutes(5);

/// The proof that a request comes from a logged-in user: a valid token of a live session of the App, or a valid cookie
/// of a live browser session.
#[derive(Clone, Debug)]
pub struct AuthenticatedSession {
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

// === impl AuthenticatedSession ===

impl AuthenticatedSession {
    pub async fn authenticate<S: Sessions>(call: Call<'_, S>, bearer: &str) -> Result<Self, AuthenticationError> {
        let claims =
            token::verify_access_token(call.app, call.env.now(), bearer).ok_or(AuthenticationError::InvalidToken)?;
        let live = call.stores.session(call.app_id(), claims.sub, claims.sid).await?;
        let LiveSession { session, profile } = live.ok_or(AuthenticationError::InvalidToken)?;
        Ok(Self { session, profile })
    }

    /// Reads the user from Postgres. Returns `None` if the user is deleted or disabled, or the session has ended.
    pub async fn load_user<S: OwnAccounts + Sessions>(&self, call: Call<'_, S>) -> Result<Option<User>, StoreError> {
        let mut session = self.session.clone();
        loop {
            if let Some(user) = call.stores.user_of_session(call.app_id(), &session).await? {
                return Ok(Some(user));
            }
            // A change to the user between the reads of Redis and Postgres can raise the user's epoch, which ends most
            // sessions of the user. If this session is the one that the change keeps, the session has the new epoch
            // now, and the loop reads the user again.
            let live = match session.kind() {
                None => call.stores.session(call.app_id(), session.user, session.id).await?,
                Some(SessionKind::Browser) => {
                    call.stores.browser_session(call.app_id(), session.user, session.id, None).await?
                }
            };
            match live {
                Some(live) if live.session.epoch > session.epoch => session = live.session,
                Some(_) | None => return Ok(None),
            }
        }
    }

    /// Whether the login of the session is recent. The time of the login can be in the future, because the clocks of
    /// servers differ. Therefore the absolute difference is compared.
    pub fn is_recent(&self, env: &Env) -> bool {
        (env.now() - self.session.auth_time).abs() < RECENT_LOGIN
    }

    pub fn user_id(&self) -> UserId {
        self.session.user
    }

    /// Returns a new event caused by the user in this session.
    pub fn event<S>(&self, call: Call<'_, S>, kind: EventKind) -> Event {
        call.event(kind, self.user_id()).in_session(self.session.id)
    }
}

#[cfg(test)]
mod tests {
    use time::{OffsetDateTime, macros::datetime};
    use uuid::Uuid;

    use super::*;
    use crate::domain::{
        clock::Clock,
        session::{Amr, SessionId},
        user::Epoch,
    };

    const NOW: OffsetDateTime = datetime!(2030-01-02 03:04:05 UTC);

    struct FixedClock(OffsetDateTime);

    impl Clock for FixedClock {
        fn now(&self) -> OffsetDateTime {
            self.0
        }
    }

    #[test]
    fn a_login_less_than_five_minutes_in_the_past_or_future_is_recent() {
        let env = Env { clock: Box::new(FixedClock(NOW)), ..Env::system() };
        let is_recent = |age: Duration| {
            let session = Session {
                id: SessionId(Uuid::from_u128(1)),
                user: UserId(Uuid::from_u128(7)),
                epoch: Epoch(1),
                generation: 1,
                amr: Amr::Password,
                auth_time: NOW - age,
            };
            let profile = Profile { version: 1, email: None, email_verified: false, name: String::new() };
            AuthenticatedSession { session, profile }.is_recent(&env)
        };
        let almost = Duration::minutes(5) - Duration::SECOND;
        assert!(is_recent(Duration::ZERO) && is_recent(almost) && is_recent(-almost));
        assert!(!is_recent(Duration::minutes(5)) && !is_recent(Duration::minutes(-5)));
    }
}
