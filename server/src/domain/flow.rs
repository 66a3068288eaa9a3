//! A social login under way: what *redirect* must remember until the *callback*, sealed, and the code that an App may
//! get in place of tokens.

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
    redirect::Mark,
    session::{Profile, SessionId},
    user::{Epoch, UserId},
};

/// How long a flow may take (contract, 5).
pub const FLOW_SECONDS: i64 = 600;
/// How long a code waits for its exchange (contract, 5).
pub const LOGIN_CODE_SECONDS: i64 = 60;
/// Marks codes, so that scanners find leaked ones.
const LOGIN_CODE_PREFIX: &str = "lkc_";

/// `state` as the provider carries it: 256 random bits. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct FlowState(String);

/// What a flow is known by where its state must not stand: names of cookies, keys in Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowId(String);

/// Who holds what a flow must remember.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// The browser that began it, in a cookie.
    Browser,
    /// Redis: whoever shows the state goes on with it.
    None,
}

/// What a flow must remember.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flow {
    /// RFC 7636, 4.1.
    #[serde(rename = "v")]
    pub code_verifier: String,
    /// OpenID Connect Core, 3.1.2.1.
    #[serde(rename = "n")]
    pub nonce: String,
    /// Where the user goes in the end; none: the App has no addresses, and gets JSON.
    #[serde(rename = "t", skip_serializing_if = "Option::is_none", default)]
    pub target: Option<Mark>,
    /// The app's own `state`.
    #[serde(rename = "s", skip_serializing_if = "Option::is_none", default)]
    pub app_state: Option<String>,
    /// The app's own `code_challenge`: the flow ends with a code.
    #[serde(rename = "c", skip_serializing_if = "Option::is_none", default)]
    pub code_challenge: Option<Challenge>,
    /// Unix seconds.
    #[serde(rename = "e")]
    pub expires_at: i64,
}

/// A `code_challenge` by S256 (RFC 7636, 4.2).
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Challenge(String);

/// The text is not a `code_challenge` by S256.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not the SHA-256 of a verifier in base64url: 43 characters")]
pub struct NotAChallenge;

/// An unbound flow is not kept: there are too many (contract, 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is reached")]
pub struct TooManyFlows {
    /// The limit's name in answers.
    pub name: &'static str,
    pub window: Window,
    pub retry_after: Duration,
}

/// A one-time code in clear. Never printed or stored.
#[derive(Clone, PartialEq, Eq)]
pub struct LoginCode(Zeroizing<String>);

/// Under what a one-time code is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoginCodeKey(String);

/// What is kept of a one-time code: the session that it opens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingLogin {
    pub user: UserId,
    pub epoch: Epoch,
    pub profile: Profile,
    /// The address that the code was sent to; none: it was answered as JSON.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub redirect_url: Option<String>,
    pub challenge: Challenge,
    /// Unix seconds.
    pub auth_time: i64,
    /// The browser's, which may not be that of the exchange.
    pub ip: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub user_agent: Option<String>,
    /// Unix seconds.
    pub expires_at: i64,
}

/// A login that waited for its code, and the session that the code was exchanged for before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLogin {
    pub login: PendingLogin,
    pub session: Option<SessionId>,
}

// === impl FlowState ===

impl FlowState {
    pub fn generate(env: &Env) -> Self {
        Self(URL_SAFE_NO_PAD.encode(env.random::<32>()))
    }

    /// As the provider sent it back; what has not the form of one is none of ours.
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
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

// === impl Flow ===

impl Flow {
    /// A new one, with nothing of the app's own.
    pub fn begin(env: &Env) -> Self {
        Self {
            code_verifier: URL_SAFE_NO_PAD.encode(env.random::<32>()),
            nonce: URL_SAFE_NO_PAD.encode(env.random::<16>()),
            target: None,
            app_state: None,
            code_challenge: None,
            expires_at: env.now().unix_timestamp() + FLOW_SECONDS,
        }
    }

    /// The S256 challenge of the flow's own verifier, for the provider.
    pub fn provider_challenge(&self) -> String {
        Challenge::of(&self.code_verifier).0
    }

    /// Sealed for that App, Provider, state and holder: with any other of them it does not open.
    pub fn seal(&self, env: &Env, app: &App, provider: &ProviderName, state: &FlowState, binding: Binding) -> String {
        let nonce: [u8; NONCE_LEN] = env.random();
        let mut sealed = serde_json::to_vec(self).expect("a flow is strings and numbers");
        app.keys
            .hmac()
            .flows
            .seal_in_place_append_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(bound_to(app.id(), provider, state, binding)),
                &mut sealed,
            )
            .expect("a flow is far shorter than what can be sealed");
        URL_SAFE_NO_PAD.encode([&nonce[..], &sealed].concat())
    }

    /// Opens what was sealed under any key not yet dropped; none where it is not that, or too old.
    pub fn open(
        app: &App,
        provider: &ProviderName,
        state: &FlowState,
        binding: Binding,
        sealed: &str,
        now: OffsetDateTime,
    ) -> Option<Self> {
        let sealed = URL_SAFE_NO_PAD.decode(sealed).ok()?;
        let (nonce, sealed) = sealed.split_first_chunk::<NONCE_LEN>()?;
        let bound_to = bound_to(app.id(), provider, state, binding);
        let flow: Self = app.keys.hmacs().find_map(|key| {
            let mut text = sealed.to_vec();
            let nonce = Nonce::assume_unique_for_key(*nonce);
            let opened = key.flows.open_in_place(nonce, Aad::from(&bound_to), &mut text).ok()?;
            serde_json::from_slice(opened).ok()
        })?;
        (now.unix_timestamp() < flow.expires_at).then_some(flow)
    }
}

fn bound_to(app: &AppId, provider: &ProviderName, state: &FlowState, binding: Binding) -> Vec<u8> {
    let binding = match binding {
        Binding::Browser => "browser",
        Binding::None => "none",
    };
    // No name has a line end.
    format!("{app}\n{provider}\n{binding}\n{}", state.0).into_bytes()
}

impl fmt::Debug for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flow").field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}

// === impl Challenge ===

impl Challenge {
    pub fn parse(text: &str) -> Result<Self, NotAChallenge> {
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| NotAChallenge)?;
        if bytes.len() == 32 { Ok(Self(text.to_owned())) } else { Err(NotAChallenge) }
    }

    fn of(verifier: &str) -> Self {
        Self(URL_SAFE_NO_PAD.encode(digest(&SHA256, verifier.as_bytes())))
    }

    /// Whether it is that of this verifier (RFC 7636, 4.6), which is 43 to 128 unreserved characters (4.1).
    pub fn admits(&self, verifier: &str) -> bool {
        let unreserved = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
        (43..=128).contains(&verifier.len()) && verifier.bytes().all(unreserved) && Self::of(verifier) == *self
    }
}

impl fmt::Debug for Challenge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Challenge(…)")
    }
}

// === impl LoginCode ===

impl LoginCode {
    pub fn generate(env: &Env) -> Self {
        Self(Zeroizing::new(format!("{LOGIN_CODE_PREFIX}{}", URL_SAFE_NO_PAD.encode(env.random::<32>()))))
    }

    /// None where it has not the form of one.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = URL_SAFE_NO_PAD.decode(text.strip_prefix(LOGIN_CODE_PREFIX)?).ok()?;
        (bytes.len() == 32).then(|| Self(Zeroizing::new(text.to_owned())))
    }

    /// The code itself; only for the address that it is sent to.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// With 256 bits a plain hash hides it.
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
    fn a_flow_opens_for_its_app_provider_state_and_holder_alone() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let (state, github) = (FlowState::generate(&env), provider("github"));
        let flow = Flow { app_state: Some("x".repeat(512)), ..Flow::begin(&env) };
        let sealed = flow.seal(&env, &app, &github, &state, Binding::Browser);
        let open = |app: &App, name: &ProviderName, state: &FlowState, binding, sealed: &str| {
            Flow::open(app, name, state, binding, sealed, env.now())
        };
        assert_eq!(open(&app, &github, &state, Binding::Browser, &sealed), Some(flow));
        assert_eq!(open(&app, &github, &state, Binding::None, &sealed), None);
        assert_eq!(open(&app, &provider("google"), &state, Binding::Browser, &sealed), None);
        assert_eq!(open(&app, &github, &FlowState::generate(&env), Binding::Browser, &sealed), None);
        let other = fixtures::app(RenderedApp { keys: app.doc.keys.clone(), ..fixtures::rendered("other") });
        assert_eq!(open(&other, &github, &state, Binding::Browser, &sealed), None);
        for at in 0..sealed.len() {
            let mut changed = sealed.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            assert_eq!(open(&app, &github, &state, Binding::Browser, &changed), None, "symbol {at}");
        }
        for nothing in ["", "A", "AAAA", &sealed[..16]] {
            assert_eq!(open(&app, &github, &state, Binding::Browser, nothing), None);
        }
    }

    #[test]
    fn a_flow_lives_ten_minutes_and_outlives_a_rotation() {
        let env = Env::system();
        let mut doc = fixtures::rendered("shop");
        let old = fixtures::app(doc.clone());
        let (state, name) = (FlowState::generate(&env), provider("github"));
        let flow = Flow::begin(&env);
        let sealed = flow.seal(&env, &old, &name, &state, Binding::Browser);
        doc.keys.hmac =
            vec![fixtures::hmac_key("h1", 1, KeyState::Retired), fixtures::hmac_key("h2", 2, KeyState::Active)];
        let new = fixtures::app(doc.clone());
        let end = OffsetDateTime::from_unix_timestamp(flow.expires_at).unwrap();
        let open = |app: &App, at| Flow::open(app, &name, &state, Binding::Browser, &sealed, at);
        assert_eq!(open(&new, end - Duration::SECOND), Some(flow));
        assert_eq!(open(&new, end), None);
        doc.keys.hmac = vec![fixtures::hmac_key("h2", 2, KeyState::Active)];
        assert_eq!(open(&fixtures::app(doc), env.now()), None, "the key was dropped");
    }

    #[test]
    fn a_sealed_flow_fits_in_a_cookie_whatever_the_app_remembers() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let flow = Flow {
            app_state: Some("\u{10ffff}".repeat(512)),
            code_challenge: Some(Challenge::of("x")),
            target: Some(serde_json::from_value(serde_json::json!({ "entry": "e".repeat(22), "port": 65535 })).unwrap()),
            ..Flow::begin(&env)
        };
        let sealed = flow.seal(&env, &app, &provider("github"), &FlowState::generate(&env), Binding::Browser);
        // 4096 octets are what browsers take for name and value (RFC 6265, 6.1).
        assert!(sealed.len() < 3500, "{}", sealed.len());
    }

    #[test]
    fn a_challenge_admits_its_verifier_alone() {
        // RFC 7636, appendix B.
        let challenge = Challenge::parse("E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM").unwrap();
        let verifier = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk";
        assert!(challenge.admits(verifier));
        assert!(!challenge.admits(&verifier[1..]));
        assert!(!challenge.admits(&verifier.replace('d', "e")));
        for short in ["", "x", &"x".repeat(42), &"x".repeat(129), &"é".repeat(43)] {
            assert!(!Challenge::of(short).admits(short), "{short}");
        }
        for bad in ["", "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-c", "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM=", "plain"]
        {
            assert_eq!(Challenge::parse(bad), Err(NotAChallenge), "{bad}");
        }
    }

    #[test]
    fn codes_and_states_are_read_in_their_form_alone_and_never_printed() {
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
