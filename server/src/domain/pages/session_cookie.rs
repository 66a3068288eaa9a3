//! The value of a session cookie: it names a browser session, and carries an HMAC.

use aws_lc_rs::constant_time::verify_slices_are_equal;
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use crate::domain::{app::App, keys::mac_for_app, session::SessionId, user::UserId};

/// Length of the truncated HMAC-SHA-256 in bytes (specification: Browser sessions, Cookies).
const MAC_BYTES: usize = 16;
/// Total length of the time, key number, user id and session id, in bytes.
const BODY_BYTES: usize = 8 + 4 + 16 + 16;
/// The length of the text: body and HMAC in base64url.
const CHARS: usize = 80;
/// The maximum time by which a cookie can be older than the latest login of its session. Two tabs can log in at the
/// same time: the browser then keeps only one of the two cookies, which can be the older one.
const MAX_AGE_AT_LOGIN: Duration = Duration::MINUTE;
/// The maximum age of a cookie with an unknown key at which the browser must try again, because this server may get the
/// key soon. Servers get a new key within seconds of each other, so an older cookie belongs to an earlier App with this
/// appID.
const MAX_AGE_WITH_UNKNOWN_KEY: Duration = Duration::minutes(5);

/// The content of a session cookie with a valid HMAC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionCookie {
    /// The time of the login, in Unix milliseconds.
    pub issued_ms: u64,
    pub user: UserId,
    pub session: SessionId,
}

/// Why a session cookie cannot be accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionCookieError {
    #[error("is not a session cookie of this App")]
    Invalid,
    /// The key of the cookie is newer than the keys of this server: the browser must try again after a short time.
    #[error("was made with a newer key than this server has")]
    UnknownKey,
}

// === impl SessionCookie ===

impl SessionCookie {
    pub(super) fn new(session: SessionId, user: UserId, auth_time: OffsetDateTime) -> Self {
        Self { issued_ms: unix_millis(auth_time), user, session }
    }

    /// The value of the cookie.
    pub fn encode(&self, app: &App) -> String {
        let key = app.keys.active_hmac();
        let mut bytes = Vec::with_capacity(BODY_BYTES + MAC_BYTES);
        bytes.extend_from_slice(&self.issued_ms.to_be_bytes());
        bytes.extend_from_slice(&key.number.to_be_bytes());
        bytes.extend_from_slice(self.user.0.as_bytes());
        bytes.extend_from_slice(self.session.0.as_bytes());
        let mac = mac_for_app(&key.pages.session_cookies(), app.id(), &bytes);
        bytes.extend_from_slice(&mac.as_ref()[..MAC_BYTES]);
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// Parses a cookie of this App and checks its HMAC, without a call to Redis.
    pub fn decode(app: &App, text: &str, now: OffsetDateTime) -> Result<Self, SessionCookieError> {
        let bytes = decode_bytes(text).ok_or(SessionCookieError::Invalid)?;
        let (body, sent_mac) = bytes.split_at(BODY_BYTES);
        let (time, rest) = split_array::<8>(body)?;
        let (number, rest) = split_array::<4>(rest)?;
        let (user, rest) = split_array::<16>(rest)?;
        let (session, _) = split_array::<16>(rest)?;
        let (issued_ms, number) = (u64::from_be_bytes(time), u32::from_be_bytes(number));
        let Some(key) = app.keys.hmac_by_number(number) else {
            let is_newer = app.keys.all_hmac().all(|key| number > key.number);
            let is_recent = unix_millis(now).abs_diff(issued_ms) <= millis(MAX_AGE_WITH_UNKNOWN_KEY);
            let error =
                if is_newer && is_recent { SessionCookieError::UnknownKey } else { SessionCookieError::Invalid };
            return Err(error);
        };
        let expected = mac_for_app(&key.pages.session_cookies(), app.id(), body);
        verify_slices_are_equal(&expected.as_ref()[..MAC_BYTES], sent_mac).map_err(|_| SessionCookieError::Invalid)?;
        Ok(Self { issued_ms, user: UserId(Uuid::from_bytes(user)), session: SessionId(Uuid::from_bytes(session)) })
    }

    /// The time in a cookie of any App, in Unix milliseconds. It is not verified. Use it only for the order in which
    /// cookies are cleared. `None` if the text has no such time.
    pub fn unverified_issued_ms(text: &str) -> Option<u64> {
        let bytes = decode_bytes(text)?;
        split_array::<8>(&bytes).ok().map(|(time, _)| u64::from_be_bytes(time))
    }

    /// Returns a time in Unix milliseconds. The cookie is not accepted if the last login of its session was later.
    /// Another login of the same user keeps the session and replaces the cookie. After that, a stolen older cookie must
    /// not work.
    pub(super) fn latest_auth_time_ms(&self) -> u64 {
        self.issued_ms.saturating_add(millis(MAX_AGE_AT_LOGIN))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.whole_milliseconds()).unwrap_or(0)
}

pub(super) fn unix_millis(time: OffsetDateTime) -> u64 {
    u64::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap_or(0)
}

fn decode_bytes(text: &str) -> Option<[u8; BODY_BYTES + MAC_BYTES]> {
    if text.len() != CHARS {
        return None;
    }
    URL_SAFE_NO_PAD.decode(text).ok()?.try_into().ok()
}

fn split_array<const N: usize>(bytes: &[u8]) -> Result<([u8; N], &[u8]), SessionCookieError> {
    bytes.split_first_chunk::<N>().map(|(first, rest)| (*first, rest)).ok_or(SessionCookieError::Invalid)
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::{KeyState, RenderedApp};
    use time::macros::datetime;

    use super::*;
    use crate::fixtures;

    const NOW: OffsetDateTime = datetime!(2030-01-02 03:04:05.678 UTC);

    fn cookie() -> SessionCookie {
        SessionCookie::new(SessionId(Uuid::from_u128(9)), UserId(Uuid::from_u128(7)), NOW)
    }

    fn decode(app: &App, text: &str) -> Result<SessionCookie, SessionCookieError> {
        SessionCookie::decode(app, text, NOW)
    }

    #[test]
    fn a_session_cookie_is_valid_only_for_its_app() {
        let app = fixtures::app(fixtures::rendered("shop"));
        let text = cookie().encode(&app);
        assert_eq!(text.len(), CHARS);
        assert_eq!(decode(&app, &text), Ok(cookie()));
        assert_eq!(SessionCookie::unverified_issued_ms(&text), Some(cookie().issued_ms));
        let other = fixtures::app(RenderedApp { keys: app.doc.keys.clone(), ..fixtures::rendered("other") });
        assert_eq!(decode(&other, &text), Err(SessionCookieError::Invalid));
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            assert!(decode(&app, std::str::from_utf8(&changed).unwrap()).is_err(), "character {at}");
        }
        for bad in ["", "x", &text[1..], &format!("{text}A"), &"é".repeat(40)] {
            assert_eq!(decode(&app, bad), Err(SessionCookieError::Invalid), "{bad}");
            assert_eq!(SessionCookie::unverified_issued_ms(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_session_cookie_survives_a_rotation_and_a_newer_key_is_reported_as_unknown() {
        let old = fixtures::rendered("shop");
        let mut new = old.clone();
        new.keys.hmac =
            vec![fixtures::hmac_key("h1", 1, KeyState::Retired), fixtures::hmac_key("h2", 2, KeyState::Active)];
        let mut newest = new.clone();
        newest.keys.hmac.remove(0);
        let (old, new, newest) = (fixtures::app(old), fixtures::app(new), fixtures::app(newest));
        assert_eq!(decode(&new, &cookie().encode(&old)), Ok(cookie()));
        assert_eq!(decode(&old, &cookie().encode(&new)), Err(SessionCookieError::UnknownKey));
        assert_eq!(decode(&newest, &cookie().encode(&old)), Err(SessionCookieError::Invalid), "the key was dropped");
    }

    #[test]
    fn a_refresh_token_without_its_prefix_is_no_session_cookie() {
        let app = fixtures::app(fixtures::rendered("shop"));
        let token =
            crate::domain::token::RefreshToken { user: cookie().user, session: cookie().session, generation: 1 };
        let text = token.encode(&app);
        let text = text.strip_prefix(crate::domain::token::REFRESH_PREFIX).unwrap();
        assert_eq!(text.len(), CHARS);
        assert!(decode(&app, text).is_err());
    }

    #[test]
    fn a_cookie_can_be_one_minute_older_than_the_last_login() {
        assert_eq!(cookie().latest_auth_time_ms(), unix_millis(NOW + Duration::MINUTE));
        let last = SessionCookie { issued_ms: u64::MAX, ..cookie() };
        assert_eq!(last.latest_auth_time_ms(), u64::MAX);
    }

    #[test]
    fn the_browser_must_retry_an_unknown_key_only_if_the_cookie_is_recent() {
        let old = fixtures::rendered("shop");
        let mut new = old.clone();
        new.keys.hmac = vec![fixtures::hmac_key("h2", 2, KeyState::Active)];
        let (old, new) = (fixtures::app(old), fixtures::app(new));
        let text = cookie().encode(&new);
        let at = |time: OffsetDateTime| SessionCookie::decode(&old, &text, time).unwrap_err();
        for recent in [-Duration::minutes(5), Duration::ZERO, Duration::minutes(5)] {
            assert_eq!(at(NOW + recent), SessionCookieError::UnknownKey, "{recent}");
        }
        // At any other time, the cookie counts as one of a deleted App with this appID: the new App numbers its keys
        // from 1 again.
        for other in [-Duration::HOUR, Duration::minutes(5) + Duration::MILLISECOND, Duration::DAY] {
            assert_eq!(at(NOW + other), SessionCookieError::Invalid, "{other}");
        }
        assert_eq!(SessionCookie::decode(&new, &text, NOW + Duration::DAY), Ok(cookie()), "of a known key");
    }
}
