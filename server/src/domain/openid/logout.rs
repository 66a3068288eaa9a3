//! A logout that a client requests (OpenID Connect RP-Initiated Logout 1.0; specification: Authorization, Logout).

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::Deserialize;

use super::{
    authorization_request::{MAX_STATE_BYTES, RepeatedRequestParameter, RequestParameters},
    client::OpenIdClient,
    id_token::{self, Hint, HintError},
};
use crate::domain::{
    app::App,
    redirect::{ParameterLocation, RedirectTarget, choose_target},
    session::SessionId,
};

/// The parameters of `logout`. All others are ignored.
const LOGOUT_PARAMETERS: [&str; 5] = ["client_id", "id_token_hint", "post_logout_redirect_uri", "state", "ui_locales"];

/// A checked logout request.
#[derive(Clone)]
pub struct LogoutRequest {
    /// The client that the parameters name. It can be a client that the App does not have.
    client_id: Option<String>,
    /// The browser session that the hint names, if the hint was signed with a key that the App has.
    session: Option<SessionId>,
    target: Option<RedirectTarget>,
    state: Option<String>,
}

/// Why a request is refused. The error is shown on a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogoutRequestError {
    #[error("{0}")]
    InvalidRequest(&'static str),
    #[error("the App has no client with this client_id")]
    InvalidClient,
    #[error("post_logout_redirect_uri is not registered for the client")]
    RedirectUrlNotAllowed,
}

/// The only claim that is read from an `id_token_hint` with an unknown key.
#[derive(Deserialize)]
struct UnverifiedClaims {
    aud: String,
}

// === impl LogoutRequest ===

impl LogoutRequest {
    pub fn check(app: &App, parameters: &RequestParameters) -> Result<Self, LogoutRequestError> {
        if LOGOUT_PARAMETERS.into_iter().any(|name| parameters.get(name).is_err()) {
            return Err(LogoutRequestError::InvalidRequest("a parameter is given more than once"));
        }
        let state = parameters.get("state")?;
        if state.is_some_and(|state| state.len() > MAX_STATE_BYTES) {
            return Err(LogoutRequestError::InvalidRequest("state is longer than 2,048 bytes"));
        }
        let named = parameters.get("client_id")?;
        let hint = parameters.get("id_token_hint")?;
        let (session, hinted) = match hint.map(|text| (text, id_token::verify_hint(app, text))) {
            None => (None, None),
            Some((_, Ok(Hint { sid, client_id, .. }))) => (Some(sid), Some(client_id)),
            // Like `client_id`, the hint only selects the client that must have registered the URL.
            Some((text, Err(HintError::UnknownKey))) => (None, unverified_audience(text)),
            Some((_, Err(HintError::Invalid))) => {
                return Err(LogoutRequestError::InvalidRequest("id_token_hint is not an ID token of this App"));
            }
        };
        if let (Some(named), Some(hinted)) = (named, &hinted)
            && named != hinted
        {
            return Err(LogoutRequestError::InvalidRequest("client_id and id_token_hint are of different clients"));
        }
        let client_id = named.or(hinted.as_deref());
        let target = match (parameters.get("post_logout_redirect_uri")?, client_id) {
            (None, _) => None,
            (Some(_), None) => {
                let why = "post_logout_redirect_uri needs id_token_hint or client_id";
                return Err(LogoutRequestError::InvalidRequest(why));
            }
            (Some(url), Some(client_id)) => {
                let client = app.client(client_id).ok_or(LogoutRequestError::InvalidClient)?;
                Some(registered_target(client, url).ok_or(LogoutRequestError::RedirectUrlNotAllowed)?)
            }
        };
        let client_id = client_id.map(str::to_owned);
        Ok(Self { client_id, session, target, state: state.map(str::to_owned) })
    }

    /// Whether the user must be asked before this browser session ends. Without the question, any web page could log a
    /// user out. `session` is `None` if the browser has no session.
    pub fn must_ask(&self, session: Option<SessionId>) -> bool {
        session.is_some_and(|session| self.session != Some(session))
    }

    /// The request without its hint, for the form that asks the user. The answer of the user has the same effect as the
    /// hint.
    pub fn without_hint(&self, ui_locales: Option<&str>) -> RequestParameters {
        let url = self.target.as_ref().map(RedirectTarget::as_str);
        let all = [
            ("client_id", self.client_id.as_deref()),
            ("post_logout_redirect_uri", url),
            ("state", self.state.as_deref()),
            ("ui_locales", ui_locales),
        ];
        RequestParameters::new(all.into_iter().filter_map(|(name, value)| Some((name, value?))))
    }

    /// Where the browser goes after the logout. `None`: the browser stays on a page of Latchkey.
    pub fn redirect_url(&self) -> Option<String> {
        let target = self.target.as_ref()?;
        let state = self.state.as_deref().map(|state| ("state", state));
        Some(target.with_parameters(ParameterLocation::Query, state))
    }
}

fn registered_target(client: &OpenIdClient, url: &str) -> Option<RedirectTarget> {
    choose_target(&client.post_logout_redirect_urls, Some(url)).ok().flatten()
}

/// The client in a hint with an unknown key. Nothing else in the hint can be used.
fn unverified_audience(hint: &str) -> Option<String> {
    let claims = URL_SAFE_NO_PAD.decode(hint.split('.').nth(1)?).ok()?;
    serde_json::from_slice::<UnverifiedClaims>(&claims).ok().map(|claims| claims.aud)
}

impl From<RepeatedRequestParameter> for LogoutRequestError {
    fn from(_: RepeatedRequestParameter) -> Self {
        Self::InvalidRequest("a parameter is given more than once")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use uuid::Uuid;

    use super::*;
    use crate::fixtures;

    const DONE: &str = "https://grafana.example.com/bye";
    const SESSION: SessionId = SessionId(Uuid::from_u128(9));

    fn app() -> App {
        let mut client = fixtures::client("grafana");
        client.post_logout_redirect_urls = vec![DONE.parse().unwrap(), "http://localhost/bye".parse().unwrap()];
        fixtures::provider(vec![client, fixtures::client("other")])
    }

    fn check(app: &App, sent: &[(&str, &str)]) -> Result<LogoutRequest, LogoutRequestError> {
        LogoutRequest::check(app, &RequestParameters::new(sent.iter().copied()))
    }

    fn redirect_url(app: &App, sent: &[(&str, &str)]) -> Option<String> {
        check(app, sent).unwrap().redirect_url()
    }

    /// An ID token for this client, signed by the App.
    fn hint(app: &App, client: &str) -> String {
        let signer = app.keys.id_token_signer(latchkey_crds::client::IdTokenAlgorithm::ES256).unwrap();
        signer.sign_id_token(&claims(app, client)).unwrap()
    }

    fn claims(app: &App, client: &str) -> Value {
        let user = Uuid::from_u128(7);
        // The token has expired.
        json!({ "iss": app.doc.issuer.as_str(), "aud": client, "sub": user, "sid": SESSION.0, "iat": 1, "exp": 2 })
    }

    #[test]
    fn a_url_must_be_registered_for_the_client() {
        let app = app();
        let client = ("client_id", "grafana");
        let to = |url| ("post_logout_redirect_uri", url);
        assert_eq!(redirect_url(&app, &[client, to(DONE)]).as_deref(), Some(DONE));
        let with_state = redirect_url(&app, &[client, to(DONE), ("state", "a b&c")]);
        assert_eq!(with_state, Some(format!("{DONE}?state=a%20b%26c")));
        let loopback = redirect_url(&app, &[client, to("http://localhost:3000/bye")]);
        assert_eq!(loopback.as_deref(), Some("http://localhost:3000/bye"));
        assert_eq!(redirect_url(&app, &[client]), None);
        for url in ["https://grafana.example.com/bye/", "https://grafana.example.com/callback", "https://evil.example"]
        {
            let refused = check(&app, &[client, to(url)]).err();
            assert_eq!(refused, Some(LogoutRequestError::RedirectUrlNotAllowed), "{url}");
        }
        let of_other = check(&app, &[("client_id", "other"), to(DONE)]).err();
        assert_eq!(of_other, Some(LogoutRequestError::RedirectUrlNotAllowed));
        assert_eq!(check(&app, &[("client_id", "gone"), to(DONE)]).err(), Some(LogoutRequestError::InvalidClient));
        let nobody = check(&app, &[to(DONE)]).err();
        assert!(matches!(nobody, Some(LogoutRequestError::InvalidRequest(_))));
    }

    #[test]
    fn a_hint_names_the_client_and_the_session() {
        let app = app();
        let own = hint(&app, "grafana");
        let to = ("post_logout_redirect_uri", DONE);
        let request = check(&app, &[("id_token_hint", &own), to]).unwrap();
        assert_eq!(request.redirect_url().as_deref(), Some(DONE));
        let asked = LogoutRequest::check(&app, &request.without_hint(Some("de"))).unwrap();
        assert_eq!(asked.redirect_url(), request.redirect_url());
        assert!(asked.must_ask(Some(SESSION)));
        assert!(!request.must_ask(Some(SESSION)) && !request.must_ask(None));
        assert!(request.must_ask(Some(SessionId(Uuid::from_u128(10)))), "another login");
        assert!(check(&app, &[("id_token_hint", &own), ("client_id", "grafana"), to]).is_ok());
        for sent in [
            &[("id_token_hint", own.as_str()), ("client_id", "other")][..],
            &[("id_token_hint", &own[1..])],
            &[("id_token_hint", &own[..own.len() - 4])],
            &[("id_token_hint", "x")],
            &[("id_token_hint", "eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0.e30.")],
        ] {
            let refused = check(&app, sent).err();
            assert!(matches!(refused, Some(LogoutRequestError::InvalidRequest(_))), "{sent:?}");
        }
    }

    #[test]
    fn the_user_is_asked_if_no_hint_names_the_session() {
        let app = app();
        let client = ("client_id", "grafana");
        for sent in [&[("ui_locales", "de")][..], &[client], &[client, ("state", "x")]] {
            let request = check(&app, sent).unwrap();
            assert!(request.must_ask(Some(SESSION)) && !request.must_ask(None), "{sent:?}");
        }
    }

    #[test]
    fn a_hint_with_an_unknown_key_only_names_the_client() {
        let mut doc = fixtures::rendered("shop");
        doc.pages = Some(fixtures::pages());
        let algorithm = doc.keys.signing[0].algorithm;
        doc.keys.signing = vec![fixtures::signing_key("s9", algorithm, latchkey_crds::rendered::KeyState::Active)];
        doc.clients = vec![fixtures::client("grafana")];
        let old = hint(&fixtures::app(doc), "grafana");
        let app = app();
        let to = ("post_logout_redirect_uri", DONE);
        let request = check(&app, &[("id_token_hint", &old), to]).unwrap();
        assert!(request.must_ask(Some(SESSION)));
        assert_eq!(request.redirect_url().as_deref(), Some(DONE));
        let disagreeing = check(&app, &[("id_token_hint", &old), ("client_id", "other")]).err();
        assert!(matches!(disagreeing, Some(LogoutRequestError::InvalidRequest(_))));
    }

    #[test]
    fn repeated_and_long_parameters_are_refused() {
        let app = app();
        let long = "s".repeat(MAX_STATE_BYTES + 1);
        for sent in [
            &[("client_id", "grafana"), ("client_id", "grafana")][..],
            &[("state", "a"), ("state", "a")],
            &[("id_token_hint", "x"), ("id_token_hint", "x")],
            &[("state", long.as_str())],
        ] {
            let refused = check(&app, sent).err();
            assert!(matches!(refused, Some(LogoutRequestError::InvalidRequest(_))), "{sent:?}");
        }
        // A parameter of `authorize` can occur twice, because `logout` ignores it.
        assert!(check(&app, &[("nonce", "a"), ("nonce", "b")]).is_ok());
    }
}
