//! The tokens that a client gets for a code or a refresh token.

use latchkey_crds::types::GroupName;

use super::{
    access_token::issue_access_token,
    client::OpenIdClient,
    client_session::ClientSession,
    id_token::{IdTokenError, issue_id_token},
    scope::Scopes,
};
use crate::domain::{app::App, clock::Env, error::CommonError, session::NO_REFRESH_TOKEN, token::RefreshToken};

/// The tokens in a response of the token endpoint.
#[derive(Clone)]
pub struct ClientTokens {
    pub access_token: String,
    pub id_token: String,
    /// `None` for a session that ends with the access token.
    pub refresh_token: Option<String>,
    /// The scopes of the access token.
    pub scope: Scopes,
    /// The lifetime of the access token in seconds.
    pub expires_in: i64,
    /// The time at which the access token expires, in Unix seconds.
    pub expires_at: i64,
}

/// Issues the tokens of a client session for its current generation. `scope` is the scope of the access token.
pub(super) fn issue_client_tokens(
    app: &App,
    env: &Env,
    client: &OpenIdClient,
    session: &ClientSession,
    scope: Scopes,
    nonce: Option<&str>,
    groups: &[GroupName],
) -> Result<ClientTokens, IdTokenError> {
    let access_token = issue_access_token(app, env, client, session, scope).map_err(CommonError::from)?;
    let id_token = issue_id_token(app, env, client, session, &access_token.text, nonce, groups)?;
    let has_refresh_token = session.session.generation != NO_REFRESH_TOKEN;
    Ok(ClientTokens {
        access_token: access_token.text,
        id_token,
        refresh_token: has_refresh_token.then(|| RefreshToken::for_session(&session.session).encode_for_client(app)),
        scope,
        expires_in: access_token.expires_in,
        expires_at: access_token.expires_at,
    })
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::digest::{SHA256, digest};
    use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
    use jsonwebtoken::Algorithm;
    use latchkey_crds::{
        client::{ClientScope, IdTokenAlgorithm},
        rendered::{KeyState, RenderedClient, SigningAlgorithm},
    };
    use serde_json::{Value, json};
    use time::{OffsetDateTime, macros::datetime};
    use uuid::Uuid;

    use super::{
        super::{
            claims_request::{ClaimSet, RequestedClaims, UserClaim},
            client_session::ClientGrant,
            id_token::{Hint, HintError, NoIdTokenKey, has_key, verify_hint},
        },
        *,
    };
    use crate::{
        domain::{
            clock::Clock,
            session::{Amr, Profile, Session, SessionId},
            token::{verify_access_token, verify_any_access_token},
            user::{Epoch, UserId},
        },
        fixtures,
    };

    const NOW: OffsetDateTime = datetime!(2030-01-02 03:04:05 UTC);
    const LOGIN_TIME: OffsetDateTime = datetime!(2030-01-01 01:00 UTC);
    const ISSUER: &str = "https://auth.example.com/shop";

    struct FixedClock;

    impl Clock for FixedClock {
        fn now(&self) -> OffsetDateTime {
            NOW
        }
    }

    fn env() -> Env {
        Env { clock: Box::new(FixedClock), ..Env::system() }
    }

    fn session(scopes: &str) -> ClientSession {
        ClientSession {
            session: Session {
                id: SessionId(Uuid::from_u128(9)),
                user: UserId(Uuid::from_u128(7)),
                epoch: Epoch(3),
                generation: 1,
                amr: Amr::Password,
                auth_time: LOGIN_TIME,
            },
            profile: Profile {
                version: 1,
                email: Some("ada@example.com".to_owned()),
                email_verified: true,
                name: "Ada".to_owned(),
            },
            grant: ClientGrant {
                client_uid: "uid-grafana".to_owned(),
                client_id: "grafana".to_owned(),
                scopes: Scopes::parse_known(scopes),
                claims: RequestedClaims::default(),
                browser_session: SessionId(Uuid::from_u128(5)),
                ends_with_browser: true,
            },
        }
    }

    fn app_with(edit: impl FnOnce(&mut RenderedClient)) -> App {
        let mut client = fixtures::client("grafana");
        edit(&mut client);
        fixtures::provider(vec![client])
    }

    fn issue(app: &App, session: &ClientSession, nonce: Option<&str>) -> ClientTokens {
        let client = app.client("grafana").unwrap();
        let groups: [GroupName; 1] = ["ops".parse().unwrap()];
        issue_client_tokens(app, &env(), client, session, session.grant.scopes, nonce, &groups).unwrap()
    }

    fn claims(token: &str) -> Value {
        let body = token.split('.').nth(1).unwrap();
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(body).unwrap()).unwrap()
    }

    #[test]
    fn an_id_token_contains_the_specified_claims() {
        let app = app_with(|client| client.tokens.id_token_algorithm = IdTokenAlgorithm::RS256);
        let tokens = issue(&app, &session("openid profile email groups"), Some("n-1"));
        let header = jsonwebtoken::decode_header(&tokens.id_token).unwrap();
        assert_eq!(
            (header.typ.as_deref(), header.alg, header.kid.as_deref()),
            (Some("JWT"), Algorithm::RS256, Some("s2"))
        );
        let hash = digest(&SHA256, tokens.access_token.as_bytes());
        let expected = json!({
            "iss": ISSUER,
            "aud": "grafana",
            "sub": UserId(Uuid::from_u128(7)).to_string(),
            "iat": NOW.unix_timestamp(),
            "exp": NOW.unix_timestamp() + 3600,
            "auth_time": LOGIN_TIME.unix_timestamp(),
            "nonce": "n-1",
            "acr": "urn:latchkey:aal:1",
            "amr": ["pwd"],
            "at_hash": URL_SAFE_NO_PAD.encode(&hash.as_ref()[..16]),
            "sid": SessionId(Uuid::from_u128(5)).to_string(),
            "name": "Ada",
            "email": "ada@example.com",
            "email_verified": true,
            "groups": ["ops"],
        });
        assert_eq!(claims(&tokens.id_token), expected);
        let published: Vec<_> = app.keys.jwks().keys.into_iter().filter_map(|key| key.common.key_id).collect();
        assert_eq!(published, ["s1", "s2"], "clients find both keys");
        let without = claims(&issue(&app, &session("openid"), None).id_token);
        for absent in ["nonce", "name", "email", "email_verified", "groups", "groups_omitted"] {
            assert!(without.get(absent).is_none(), "{absent}");
        }
    }

    #[test]
    fn an_access_token_contains_the_specified_claims_and_no_groups() {
        let app = app_with(|client| client.tokens.audiences = vec!["shop".to_owned()]);
        let tokens = issue(&app, &session("openid email groups"), Some("n-1"));
        let header = jsonwebtoken::decode_header(&tokens.access_token).unwrap();
        assert_eq!((header.typ.as_deref(), header.kid.as_deref()), (Some("at+jwt"), Some("s1")));
        let claims = claims(&tokens.access_token);
        assert_eq!(claims["aud"], json!([ISSUER, "shop"]));
        assert_eq!((&claims["client_id"], &claims["scope"]), (&json!("grafana"), &json!("openid email groups")));
        assert_eq!(claims["sid"], SessionId(Uuid::from_u128(9)).to_string());
        assert_eq!((&claims["acr"], &claims["amr"]), (&json!("urn:latchkey:aal:1"), &json!(["pwd"])));
        assert_eq!((&claims["email"], &claims["exp"]), (&json!("ada@example.com"), &json!(tokens.expires_at)));
        for absent in ["groups", "name", "nonce"] {
            assert!(claims.get(absent).is_none(), "{absent}");
        }
        assert!(tokens.refresh_token.unwrap().starts_with("lkrc_"));
    }

    #[test]
    fn an_access_token_of_a_client_is_not_accepted_as_a_token_of_the_app() {
        let app = app_with(|client| client.tokens.audiences = vec!["shop".to_owned()]);
        let tokens = issue(&app, &session("openid"), None);
        assert!(verify_access_token(&app, NOW, &tokens.access_token).is_none());
        let verified = verify_any_access_token(&app, NOW, &tokens.access_token).unwrap();
        assert_eq!((verified.client_id.as_str(), verified.scope), ("grafana", Scopes::parse_known("openid")));
        assert!(verified.is_of_client(&app) && verified.is_admitted(&app));
        assert!(verify_any_access_token(&app, NOW, &tokens.id_token).is_none(), "an ID token is no access token");
    }

    #[test]
    fn forward_auth_admits_a_client_token_only_for_an_audience_other_than_the_issuer() {
        let is_admitted = |of_app: &[&str], of_client: &[&str]| {
            let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
            let app = app_with(|client| client.tokens.audiences = texts(of_client));
            let mut doc = app.doc.clone();
            doc.tokens.audiences = texts(of_app);
            let token = issue(&app, &session("openid"), None).access_token;
            verify_any_access_token(&fixtures::app(doc), NOW, &token).unwrap().is_admitted(&app_of(of_app))
        };
        fn app_of(audiences: &[&str]) -> App {
            let mut doc = fixtures::rendered("shop");
            doc.tokens.audiences = audiences.iter().map(|text| (*text).to_owned()).collect();
            fixtures::app(doc)
        }
        assert!(is_admitted(&["shop", "api"], &["api"]));
        assert!(!is_admitted(&["shop", "api"], &[]));
        assert!(!is_admitted(&["shop", ISSUER], &[]), "every client has the issuer as an audience");
        assert!(is_admitted(&["shop", ISSUER], &["shop"]));
        assert!(is_admitted(&[], &["shop"]), "without audiences, the appID is the audience");
    }

    #[test]
    fn an_individually_requested_claim_is_in_the_id_token_only_if_the_client_has_its_scope() {
        let requested = ClaimSet::NONE.with(UserClaim::Name).with(UserClaim::Email);
        let mut session = session("openid");
        session.grant.claims = RequestedClaims { id_token: requested, ..RequestedClaims::default() };
        let app = app_with(|client| client.scopes = vec![ClientScope::OpenId, ClientScope::Profile]);
        let tokens = issue(&app, &session, None);
        let id_token = claims(&tokens.id_token);
        assert_eq!((id_token["name"].as_str(), id_token.get("email")), (Some("Ada"), None));
        assert!(claims(&tokens.access_token).get("name").is_none());
    }

    #[test]
    fn no_token_is_issued_without_an_active_key_for_the_algorithm() {
        let app = app_with(|client| client.tokens.id_token_algorithm = IdTokenAlgorithm::RS256);
        let mut doc = app.doc.clone();
        doc.pages = Some(fixtures::pages());
        doc.clients = vec![fixtures::client("grafana")];
        doc.clients[0].tokens.id_token_algorithm = IdTokenAlgorithm::RS256;
        doc.keys.id_tokens[0].state = KeyState::Published;
        let app = fixtures::app(doc);
        let client = app.client("grafana").unwrap();
        assert!(!has_key(&app, client));
        let session = session("openid");
        let issued = issue_client_tokens(&app, &env(), client, &session, session.grant.scopes, None, &[]);
        assert!(matches!(issued, Err(IdTokenError::NoKey(NoIdTokenKey))));
    }

    #[test]
    fn only_an_id_token_with_a_known_key_is_a_valid_hint() {
        let app = app_with(|client| client.tokens.id_token_algorithm = IdTokenAlgorithm::RS256);
        let tokens = issue(&app, &session("openid"), None);
        let expected = Hint {
            sub: UserId(Uuid::from_u128(7)),
            sid: SessionId(Uuid::from_u128(5)),
            client_id: "grafana".to_owned(),
        };
        assert_eq!(verify_hint(&app, &tokens.id_token), Ok(expected.clone()));
        let mut doc = app.doc.clone();
        doc.keys.id_tokens[0].state = KeyState::Retired;
        assert_eq!(verify_hint(&fixtures::app(doc.clone()), &tokens.id_token), Ok(expected));
        doc.keys.id_tokens.clear();
        assert_eq!(verify_hint(&fixtures::app(doc.clone()), &tokens.id_token), Err(HintError::UnknownKey));
        doc.keys.id_tokens = vec![fixtures::signing_key("s2", SigningAlgorithm::RS256, KeyState::Active)];
        assert_eq!(verify_hint(&fixtures::app(doc), &tokens.id_token), Err(HintError::Invalid), "another signature");
        let mut parts: Vec<&str> = tokens.id_token.split('.').collect();
        parts.pop();
        let unsigned = format!("{}.", parts.join("."));
        for bad in ["", "x", "a.b.c", &unsigned, &tokens.access_token, &"a".repeat(40_000)] {
            assert_eq!(verify_hint(&app, bad), Err(HintError::Invalid), "{bad:.20}");
        }
    }
}
