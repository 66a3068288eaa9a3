//! The state of a social login that a page started, from the login page to the return to `continue`.

use std::fmt;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::{
    browser::BrowserId,
    seal::{self, SealedPurpose},
};
use crate::domain::{
    app::App,
    call::Call,
    clock::Env,
    flow::{CodeChallenge, FLOW_SECONDS, FlowBinding, FlowId},
    ports::{Flows, StoreError, StoreFlowError},
    session::SessionId,
    user::UserId,
};

/// How long the browser can stay at the provider: as long as the flow lives.
pub const SOCIAL_LOGIN_SECONDS: i64 = FLOW_SECONDS;
/// The longest `tx` (the text of a transaction) in the cookie, in characters. A longer `tx` is stored in Redis.
const MAX_COOKIE_TRANSACTION_CHARS: usize = 1_024;
/// The longest value of the cookie, in characters.
const MAX_COOKIE_CHARS: usize = 3_500;
/// The longest sealed state, in characters: *redirect* rejects a longer `state`.
const MAX_STATE_CHARS: usize = 512;

/// Why a page started a social login.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SocialPurpose {
    /// The login page started it: `continue` opens a session.
    LogIn,
    /// The identities page started it: `continue` links the identity, if this session is live and is the session of the
    /// browser.
    Link { user: UserId, session: SessionId },
}

/// The `state` that a page sends to *redirect*, and that comes back to `continue`. It is not bound to the browser,
/// because the browser cookie does not reach the host of *redirect* and *callback* if the pages have their own host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocialState {
    #[serde(rename = "p")]
    pub purpose: SocialPurpose,
    /// The id of the cookie without which the login cannot continue.
    #[serde(rename = "c")]
    pub cookie: FlowId,
    /// Unix seconds.
    #[serde(rename = "e")]
    expires_at: i64,
}

/// The content of the cookie of a social login.
#[derive(Serialize, Deserialize)]
struct CookieContent {
    #[serde(rename = "v")]
    code_verifier: String,
    #[serde(rename = "t")]
    transaction: CarriedTransaction,
    /// Unix seconds.
    #[serde(rename = "e")]
    expires_at: i64,
}

/// Where the `tx` of the login page is.
#[derive(Serialize, Deserialize)]
enum CarriedTransaction {
    #[serde(rename = "none")]
    None,
    #[serde(rename = "here")]
    Here(String),
    /// In Redis, under the id of the cookie.
    #[serde(rename = "stored")]
    Stored,
}

/// A social login that begins.
pub struct StartedSocialLogin {
    /// The id and the value of the cookie to set, for [`SOCIAL_LOGIN_SECONDS`].
    pub cookie: FlowId,
    pub cookie_value: String,
    /// The parameters `code_challenge` and `state` of *redirect*.
    pub code_challenge: CodeChallenge,
    pub state: String,
}

/// A social login after the browser has returned from the provider. Never printed.
pub struct SocialLogin {
    pub code_verifier: String,
    /// The `tx` of the login page.
    pub transaction: Option<String>,
}

/// Starts a social login. `transaction` is the `tx` of the login page, which the caller has opened. A long `tx` is
/// stored in Redis, within the limits on unbound flows.
pub async fn start_social_login<S: Flows>(
    call: Call<'_, S>,
    browser: &BrowserId,
    purpose: SocialPurpose,
    transaction: Option<&str>,
) -> Result<StartedSocialLogin, StoreFlowError> {
    let cookie = FlowId::generate(call.env);
    let transaction = match transaction {
        None => CarriedTransaction::None,
        Some(text) if text.len() <= MAX_COOKIE_TRANSACTION_CHARS => CarriedTransaction::Here(text.to_owned()),
        Some(text) => {
            call.stores.store_flow(call.app_id(), &cookie, text, call.client_address(), SOCIAL_LOGIN_SECONDS).await?;
            CarriedTransaction::Stored
        }
    };
    let expires_at = call.env.now().unix_timestamp() + SOCIAL_LOGIN_SECONDS;
    let code_verifier = URL_SAFE_NO_PAD.encode(call.env.random_bytes::<32>());
    let code_challenge = CodeChallenge::of(&code_verifier);
    let content = CookieContent { code_verifier, transaction, expires_at };
    let cookie_value =
        seal::seal(call.env, call.app, SealedPurpose::SocialLogin, &cookie_binding(browser, &cookie), &content);
    let state = SocialState { purpose, cookie: cookie.clone(), expires_at }.seal(call.env, call.app);
    Ok(StartedSocialLogin { cookie, cookie_value, code_challenge, state })
}

/// Opens the cookie of a social login, after the provider has sent the browser back to `continue`. `state` is the
/// parameter `state` of the request, already opened, and `cookie_value` is the value of the cookie with the id
/// `state.cookie`. Returns `None` if the cookie is forged or has expired, or belongs to another App, browser or login,
/// or if Redis no longer has its `tx`. A `tx` in Redis can be read only once.
pub async fn open_returned_login<S: Flows>(
    call: Call<'_, S>,
    browser: &BrowserId,
    state: &SocialState,
    cookie_value: &str,
) -> Result<Option<SocialLogin>, StoreError> {
    let bound_to = cookie_binding(browser, &state.cookie);
    let opened: Option<CookieContent> =
        seal::open(call.app, SealedPurpose::SocialLogin, &bound_to, cookie_value, MAX_COOKIE_CHARS);
    let Some(content) = opened.filter(|content| call.env.now().unix_timestamp() < content.expires_at) else {
        return Ok(None);
    };
    let transaction = match content.transaction {
        CarriedTransaction::None => None,
        CarriedTransaction::Here(text) => Some(text),
        CarriedTransaction::Stored => {
            let stored = call.stores.find_flow(call.app_id(), &state.cookie).await?;
            let is_first = call.stores.consume_flow(call.app_id(), &state.cookie, FlowBinding::Unbound).await?;
            let Some(text) = stored.filter(|_| is_first) else { return Ok(None) };
            Some(text)
        }
    };
    Ok(Some(SocialLogin { code_verifier: content.code_verifier, transaction }))
}

fn cookie_binding(browser: &BrowserId, cookie: &FlowId) -> String {
    format!("{}\n{}", browser.encode(), cookie.as_str())
}

// === impl SocialState ===

impl SocialState {
    fn seal(&self, env: &Env, app: &App) -> String {
        seal::seal(env, app, SealedPurpose::SocialState, "", self)
    }

    /// Opens the `state` of a request. Returns `None` if it is forged, has expired or belongs to another App.
    pub fn open(app: &App, text: &str, now: OffsetDateTime) -> Option<Self> {
        let opened: Self = seal::open(app, SealedPurpose::SocialState, "", text, MAX_STATE_CHARS)?;
        (now.unix_timestamp() < opened.expires_at).then_some(opened)
    }
}

impl fmt::Debug for SocialLogin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SocialLogin(…)")
    }
}

#[cfg(test)]
mod tests {
    use time::Duration;
    use uuid::Uuid;

    use super::*;
    use crate::fixtures;

    fn state(purpose: SocialPurpose) -> SocialState {
        let env = Env::system();
        let expires_at = env.now().unix_timestamp() + SOCIAL_LOGIN_SECONDS;
        SocialState { purpose, cookie: FlowId::generate(&env), expires_at }
    }

    #[test]
    fn a_state_opens_for_ten_minutes_and_fits_into_a_redirect() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let link = SocialPurpose::Link { user: UserId(Uuid::from_u128(7)), session: SessionId(Uuid::from_u128(9)) };
        for purpose in [SocialPurpose::LogIn, link] {
            let state = state(purpose);
            let text = state.seal(&env, &app);
            assert!(text.len() <= MAX_STATE_CHARS, "{}", text.len());
            let end = OffsetDateTime::from_unix_timestamp(state.expires_at).unwrap();
            assert_eq!(SocialState::open(&app, &text, end - Duration::SECOND), Some(state));
            assert_eq!(SocialState::open(&app, &text, end), None);
            assert_eq!(SocialState::open(&app, &text[1..], end - Duration::SECOND), None);
        }
    }

    #[test]
    fn a_cookie_with_the_longest_transaction_fits_in_a_browser() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let content = CookieContent {
            code_verifier: "v".repeat(43),
            transaction: CarriedTransaction::Here("A".repeat(MAX_COOKIE_TRANSACTION_CHARS)),
            expires_at: i64::MAX,
        };
        let bound_to = cookie_binding(&BrowserId::generate(&env), &FlowId::generate(&env));
        let sealed = seal::seal(&env, &app, SealedPurpose::SocialLogin, &bound_to, &content);
        assert!(sealed.len() < 2_048, "{}", sealed.len());
    }
}
