//! A social login in progress: the sealed flow from *redirect* to *callback*, and the one-time code that an application
//! can get instead of tokens.

use std::{fmt, time::Duration};

use aws_lc_rs::{
    aead::{Aad, NONCE_LEN, Nonce},
    digest::{SHA256, digest},
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_crds::{
    rendered::Window,
    types::{AppId, ProviderName},
};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use zeroize::Zeroizing;

use super::{
    app::App,
    clock::Env,
    redirect::RedirectReference,
    session::{Profile, SessionId},
    user::{Epoch, UserId},
};

/// How long a flow lives (specification: Social login, Redirect).
pub const FLOW_SECONDS: i64 = 600;
/// How long a one-time code lives (specification: Social login, Callback).
pub const LOGIN_CODE_SECONDS: i64 = 60;
/// The prefix of one-time codes. Secret scanners recognize leaked codes by it.
const LOGIN_CODE_PREFIX: &str = "lkc_";

/// The `state` of the authorization request: 256 random bits. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct FlowState(String);

/// The id of a flow, for cookie names and Redis keys. The state of the flow must not appear there. Also identifies the
/// cookies in which hosted pages keep a transaction (the target of a login).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FlowId(String);

/// Where the flow is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowBinding {
    /// In a cookie of the browser that started the flow.
    Browser,
    /// In Redis: any client that sends the state can continue the flow.
    Unbound,
}

/// What *redirect* stores for *callback*.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flow {
    /// The PKCE verifier (RFC 7636, 4.1).
    #[serde(rename = "v")]
    pub code_verifier: String,
    /// The nonce that the ID token of the provider must repeat (OpenID Connect Core, 3.1.2.1).
    #[serde(rename = "n")]
    pub nonce: String,
    /// The redirect URL to which *callback* sends the browser. `None` if the App has no redirect URLs: *callback* then
    /// returns JSON.
    #[serde(rename = "t", skip_serializing_if = "Option::is_none", default)]
    pub target: Option<RedirectReference>,
    /// The `state` that the application sent to *redirect*. The application gets it back with the result.
    #[serde(rename = "s", skip_serializing_if = "Option::is_none", default)]
    pub app_state: Option<String>,
    /// The `code_challenge` that the application sent to *redirect*. If it is set, the flow ends with a one-time code.
    #[serde(rename = "c", skip_serializing_if = "Option::is_none", default)]
    pub code_challenge: Option<CodeChallenge>,
    /// Unix seconds.
    #[serde(rename = "e")]
    pub expires_at: i64,
}

/// A `code_challenge` of method S256 (RFC 7636, 4.2).
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CodeChallenge(String);

/// The text is not a `code_challenge` of method S256.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not the SHA-256 of a verifier in base64url: 43 characters")]
pub struct InvalidChallenge;

/// An unbound flow was refused, because a limit on unbound flows is reached (specification: Social
/// login, Redirect).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is reached")]
pub struct TooManyFlows {
    /// The name of the limit in the response.
    pub name: &'static str,
    pub window: Window,
    pub retry_after: Duration,
}

/// A one-time code in clear text. Never printed or stored.
#[derive(Clone, PartialEq, Eq)]
pub struct LoginCode(Zeroizing<String>);

/// The key under which a one-time code is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoginCodeKey(String);

/// What is stored for a one-time code: the login for which the code exchange opens a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingLogin {
    pub user: UserId,
    pub epoch: Epoch,
    pub profile: Profile,
    /// The redirect URL to which the code was sent. `None` if the code was returned as JSON.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub redirect_url: Option<String>,
    pub challenge: CodeChallenge,
    /// Unix seconds.
    pub auth_time: i64,
    /// The IP address of the browser. The code exchange can come from another IP address.
    pub ip: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub user_agent: Option<String>,
    /// Unix seconds.
    pub expires_at: i64,
    /// Set if the code is for the page *continue*. *token* refuses such a code.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub page: Option<ContinuePurpose>,
}

/// The purpose of a one-time code for the page *continue*.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContinuePurpose {
    /// To open a browser session.
    LogIn,
    /// To link this identity to the user of the login, who is logged in already.
    Link(IdentityToLink),
}

/// An identity that the provider has verified, and that is not linked yet.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentityToLink {
    /// The Provider's name.
    pub provider: ProviderName,
    pub authority: String,
    pub subject: String,
    pub email: Option<String>,
}

/// A stored login and, if its one-time code was already exchanged, the session of the first exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredLogin {
    pub login: PendingLogin,
    pub session: Option<SessionId>,
}

// === impl FlowState ===

impl FlowState {
    pub fn generate(env: &Env) -> Self {
        Self(URL_SAFE_NO_PAD.encode(env.random_bytes::<32>()))
    }

    /// Parses the state that the provider sent back. `None` if it does not have the format of a state.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
        (bytes.len() == 32).then(|| Self(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn id(&self) -> FlowId {
        FlowId(URL_SAFE_NO_PAD.encode(&digest(&SHA256, self.0.as_bytes()).as_ref()[..16]))
    }
}

impl fmt::Debug for FlowState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FlowState(…)")
    }
}

impl FlowId {
    /// A random id, which belongs to no state.
    pub fn generate(env: &Env) -> Self {
        Self(URL_SAFE_NO_PAD.encode(env.random_bytes::<16>()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

// === impl Flow ===

impl Flow {
    /// Starts a flow without parameters from the application.
    pub fn start(env: &Env) -> Self {
        Self {
            code_verifier: URL_SAFE_NO_PAD.encode(env.random_bytes::<32>()),
            nonce: URL_SAFE_NO_PAD.encode(env.random_bytes::<16>()),
            target: None,
            app_state: None,
            code_challenge: None,
            expires_at: env.now().unix_timestamp() + FLOW_SECONDS,
        }
    }

    /// Returns the S256 challenge that the provider gets for the flow's own verifier.
    pub fn provider_challenge(&self) -> String {
        CodeChallenge::of(&self.code_verifier).0
    }

    /// Seals the flow for this App, Provider, state and binding. If any of them differs, the flow cannot be opened.
    pub fn seal(
        &self,
        env: &Env,
        app: &App,
        provider: &ProviderName,
        state: &FlowState,
        binding: FlowBinding,
    ) -> String {
        let nonce: [u8; NONCE_LEN] = env.random_bytes();
        let mut sealed = serde_json::to_vec(self).expect("a flow is strings and numbers");
        app.keys
            .active_hmac()
            .flows
            .seal_in_place_append_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(associated_data(app.id(), provider, state, binding)),
                &mut sealed,
            )
            .expect("a flow is far shorter than what can be sealed");
        URL_SAFE_NO_PAD.encode([&nonce[..], &sealed].concat())
    }

    /// Opens a sealed flow with any HMAC key that the App still has. Returns `None` if the flow was sealed for another
    /// App, Provider, state or binding, or has expired.
    pub fn open(
        app: &App,
        provider: &ProviderName,
        state: &FlowState,
        binding: FlowBinding,
        sealed: &str,
        now: OffsetDateTime,
    ) -> Option<Self> {
        let sealed = URL_SAFE_NO_PAD.decode(sealed).ok()?;
        let (nonce, sealed) = sealed.split_first_chunk::<NONCE_LEN>()?;
        let associated = associated_data(app.id(), provider, state, binding);
        let flow: Self = app.keys.all_hmac().find_map(|key| {
            let mut buffer = sealed.to_vec();
            let nonce = Nonce::assume_unique_for_key(*nonce);
            let opened = key.flows.open_in_place(nonce, Aad::from(&associated), &mut buffer).ok()?;
            serde_json::from_slice(opened).ok()
        })?;
        (now.unix_timestamp() < flow.expires_at).then_some(flow)
    }
}

fn associated_data(app: &AppId, provider: &ProviderName, state: &FlowState, binding: FlowBinding) -> Vec<u8> {
    let binding = match binding {
        FlowBinding::Browser => "browser",
        FlowBinding::Unbound => "none",
    };
    // The appID and the name of the Provider contain no newline, so different values give different data.
    format!("{app}\n{provider}\n{binding}\n{}", state.0).into_bytes()
}

impl fmt::Debug for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flow").field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}

// === impl CodeChallenge ===

impl CodeChallenge {
    pub fn parse(text: &str) -> Result<Self, InvalidChallenge> {
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| InvalidChallenge)?;
        if bytes.len() == 32 { Ok(Self(text.to_owned())) } else { Err(InvalidChallenge) }
    }

    pub(super) fn of(verifier: &str) -> Self {
        Self(URL_SAFE_NO_PAD.encode(digest(&SHA256, verifier.as_bytes())))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the challenge belongs to this verifier (RFC 7636, 4.6). A valid verifier has 43 to 128
    /// unreserved characters (4.1).
    pub fn is_satisfied_by(&self, verifier: &str) -> bool {
        let unreserved = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
        (43..=128).contains(&verifier.len()) && verifier.bytes().all(unreserved) && Self::of(verifier) == *self
    }
}

impl fmt::Debug for CodeChallenge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Challenge(…)")
    }
}

// === impl IdentityToLink ===

impl fmt::Debug for IdentityToLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdentityToLink").field("provider", &self.provider).finish_non_exhaustive()
    }
}

// === impl LoginCode ===

impl LoginCode {
    pub fn generate(env: &Env) -> Self {
        Self(Zeroizing::new(format!("{LOGIN_CODE_PREFIX}{}", URL_SAFE_NO_PAD.encode(env.random_bytes::<32>()))))
    }

    /// Parses a one-time code. Returns `None` if the text does not have the format of a one-time code.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = URL_SAFE_NO_PAD.decode(text.strip_prefix(LOGIN_CODE_PREFIX)?).ok()?;
        (bytes.len() == 32).then(|| Self(Zeroizing::new(text.to_owned())))
    }

    /// Returns the code in clear text, only for the application that gets it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Returns the SHA-256 of the code. The hash needs no secret, because the code has 256 random bits.
    pub fn key(&self) -> LoginCodeKey {
        LoginCodeKey(URL_SAFE_NO_PAD.encode(digest(&SHA256, self.0.as_bytes())))
    }
}

impl fmt::Debug for LoginCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoginCode(…)")
    }
}

impl LoginCodeKey {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::{KeyState, RenderedApp};
    use time::Duration;

    use super::*;
    use crate::fixtures;

    fn provider(name: &str) -> ProviderName {
        name.parse().unwrap()
    }

    #[test]
    fn a_flow_opens_only_for_its_app_provider_state_and_binding() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let (state, github) = (FlowState::generate(&env), provider("github"));
        let flow = Flow { app_state: Some("x".repeat(512)), ..Flow::start(&env) };
        let sealed = flow.seal(&env, &app, &github, &state, FlowBinding::Browser);
        let open = |app: &App, name: &ProviderName, state: &FlowState, binding, sealed: &str| {
            Flow::open(app, name, state, binding, sealed, env.now())
        };
        assert_eq!(open(&app, &github, &state, FlowBinding::Browser, &sealed), Some(flow));
        assert_eq!(open(&app, &github, &state, FlowBinding::Unbound, &sealed), None);
        assert_eq!(open(&app, &provider("google"), &state, FlowBinding::Browser, &sealed), None);
        assert_eq!(open(&app, &github, &FlowState::generate(&env), FlowBinding::Browser, &sealed), None);
        let other = fixtures::app(RenderedApp { keys: app.doc.keys.clone(), ..fixtures::rendered("other") });
        assert_eq!(open(&other, &github, &state, FlowBinding::Browser, &sealed), None);
        for at in 0..sealed.len() {
            let mut changed = sealed.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            assert_eq!(open(&app, &github, &state, FlowBinding::Browser, &changed), None, "symbol {at}");
        }
        for truncated in ["", "A", "AAAA", &sealed[..16]] {
            assert_eq!(open(&app, &github, &state, FlowBinding::Browser, truncated), None);
        }
    }

    #[test]
    fn a_flow_lives_ten_minutes_and_survives_a_key_rotation() {
        let env = Env::system();
        let mut doc = fixtures::rendered("shop");
        let old = fixtures::app(doc.clone());
        let (state, name) = (FlowState::generate(&env), provider("github"));
        let flow = Flow::start(&env);
        let sealed = flow.seal(&env, &old, &name, &state, FlowBinding::Browser);
        doc.keys.hmac =
            vec![fixtures::hmac_key("h1", 1, KeyState::Retired), fixtures::hmac_key("h2", 2, KeyState::Active)];
        let new = fixtures::app(doc.clone());
        let end = OffsetDateTime::from_unix_timestamp(flow.expires_at).unwrap();
        let open = |app: &App, at| Flow::open(app, &name, &state, FlowBinding::Browser, &sealed, at);
        assert_eq!(open(&new, end - Duration::SECOND), Some(flow));
        assert_eq!(open(&new, end), None);
        doc.keys.hmac = vec![fixtures::hmac_key("h2", 2, KeyState::Active)];
        assert_eq!(open(&fixtures::app(doc), env.now()), None, "the key was dropped");
    }

    #[test]
    fn a_sealed_flow_of_maximum_size_fits_in_a_cookie() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let flow = Flow {
            app_state: Some("\u{10ffff}".repeat(512)),
            code_challenge: Some(CodeChallenge::of("x")),
            target: Some(
                serde_json::from_value(serde_json::json!({ "entry": "e".repeat(22), "port": 65535 })).unwrap(),
            ),
            ..Flow::start(&env)
        };
        let sealed = flow.seal(&env, &app, &provider("github"), &FlowState::generate(&env), FlowBinding::Browser);
        // Browsers accept a cookie if its name, value and attributes together have at most 4096 bytes (RFC 6265, 6.1).
        assert!(sealed.len() < 3500, "{}", sealed.len());
    }

    #[test]
    fn a_challenge_accepts_only_its_verifier() {
        // The example of RFC 7636, appendix B.
        let challenge = CodeChallenge::parse("E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM").unwrap();
        let verifier = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk";
        assert!(challenge.is_satisfied_by(verifier));
        assert!(!challenge.is_satisfied_by(&verifier[1..]));
        assert!(!challenge.is_satisfied_by(&verifier.replace('d', "e")));
        for malformed in ["", "x", &"x".repeat(42), &"x".repeat(129), &"é".repeat(43)] {
            assert!(!CodeChallenge::of(malformed).is_satisfied_by(malformed), "{malformed}");
        }
        for bad in
            ["", "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-c", "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM=", "plain"]
        {
            assert_eq!(CodeChallenge::parse(bad), Err(InvalidChallenge), "{bad}");
        }
    }

    #[test]
    fn one_time_codes_and_states_are_never_printed_and_malformed_ones_are_rejected() {
        let env = Env::system();
        let (state, code) = (FlowState::generate(&env), LoginCode::generate(&env));
        assert_eq!(FlowState::parse(state.as_str()), Some(state.clone()));
        assert_eq!(LoginCode::parse(code.expose()), Some(code.clone()));
        for bad in ["", "x", "lkc_", "lkr_AAAA"] {
            assert_eq!(FlowState::parse(bad), None);
            assert_eq!(LoginCode::parse(bad), None);
        }
        assert_eq!(format!("{state:?} {code:?}"), "FlowState(…) LoginCode(…)");
        assert!(!state.id().as_str().contains(state.as_str()));
    }
}
