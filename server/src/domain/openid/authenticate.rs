//! Client authentication (RFC 6749, 2.3; OpenID Connect Core 1.0, 9).

use latchkey_crds::types::ClientId;
use time::OffsetDateTime;

use super::{
    client::{ClientAuthentication, OpenIdClient},
    client_assertion::{ASSERTION_TYPE, VerifiedAssertion, unverified_client_id, verify_assertion},
};
use crate::domain::{
    call::Call,
    error::CommonError,
    ports::{ClientCodes, RateLimitPermit, RateLimits},
    rate_limits,
};

/// The credentials with which a request authenticates its client.
#[derive(Clone, Copy)]
pub struct PresentedClient<'a> {
    /// From the parameter `client_id` or from Basic. An assertion also names the client.
    pub client_id: Option<&'a str>,
    pub credentials: PresentedCredentials<'a>,
}

#[derive(Clone, Copy)]
pub enum PresentedCredentials<'a> {
    /// Only a `client_id`, or nothing.
    None,
    /// `client_secret_basic` or `client_secret_post`.
    Secret { secret: &'a str, is_basic: bool },
    /// A header `Authorization: Basic` that cannot be parsed.
    MalformedBasic,
    /// `client_assertion` with its `client_assertion_type`.
    Assertion { assertion: &'a str, assertion_type: Option<&'a str> },
}

/// How a client authenticates. Discovery documents list the methods, and a metric has them as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AuthenticationMethod {
    ClientSecretBasic,
    ClientSecretPost,
    PrivateKeyJwt,
    None,
}

/// Whether the request counts towards the limit on the requests of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestCount {
    Counted,
    NotCounted,
}

#[derive(Debug, thiserror::Error)]
pub enum ClientAuthenticationError {
    /// The client is unknown, or its method or secret is wrong or missing. The error does not say which.
    #[error("the client did not authenticate")]
    InvalidClient,
    /// The Secret or ConfigMap of the client is missing or invalid, so nothing can be checked.
    #[error("the secret or the keys of client {0} cannot be read")]
    Unresolved(ClientId),
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for ClientAuthenticationError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

/// Authenticates the client of a request. `audiences` are the URLs that an assertion can name as `aud`.
///
/// Failures are limited per client and client address. The limit is checked before the credentials, but only a failure
/// counts: otherwise a busy client with valid credentials would reach the limit. Therefore attempts that are checked at
/// the same time can together exceed the limit.
pub async fn authenticate_client<'a, S: RateLimits + ClientCodes>(
    call: Call<'a, S>,
    presented: PresentedClient<'_>,
    audiences: &[&str],
    count: RequestCount,
) -> Result<&'a OpenIdClient, ClientAuthenticationError> {
    let in_assertion = match (presented.client_id, presented.credentials) {
        (None, PresentedCredentials::Assertion { assertion, .. }) => unverified_client_id(assertion),
        _ => None,
    };
    let client_id = presented.client_id.or(in_assertion.as_deref());
    let client = client_id.and_then(|id| call.app.client(id)).map(|client| &**client);
    if let (Some(client), PresentedCredentials::None) = (client, presented.credentials)
        && client.is_public()
    {
        // A public client has no secret to guess, so the limit on failures does not apply. Only the request counts.
        count_request(call, client, count).await?;
        return Ok(client);
    }
    let failures = rate_limits::client_failures(call.app, client, call.client_address());
    call.stores.check_limits(call.app_id(), failures.clone()).await?;
    let authenticated = match client {
        Some(client) => match verify(client, presented.credentials, audiences, call.env.now()) {
            Ok(assertion) => count_and_use(call, client, assertion, count).await.map(|()| client),
            Err(error) => Err(error),
        },
        None => Err(ClientAuthenticationError::InvalidClient),
    };
    // Only this error means that the client or its credentials were wrong. Other errors do not count as failures.
    if matches!(authenticated, Err(ClientAuthenticationError::InvalidClient)) {
        call.stores.acquire(call.app_id(), failures).await?;
    }
    authenticated
}

/// Counts the request, then marks the assertion as used. If the limit refuses the request, the client can repeat it
/// with the same assertion. If the assertion was used before, the request does not count.
async fn count_and_use<S: RateLimits + ClientCodes>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    assertion: Option<VerifiedAssertion>,
    count: RequestCount,
) -> Result<(), ClientAuthenticationError> {
    let permit = count_request(call, client, count).await?;
    let Some(VerifiedAssertion { jti, expires_at }) = assertion else { return Ok(()) };
    let error = match call.stores.use_assertion(call.app_id(), &client.uid, &jti, expires_at).await {
        Ok(true) => return Ok(()),
        Ok(false) => ClientAuthenticationError::InvalidClient,
        Err(error) => error.into(),
    };
    call.stores.release(call.app_id(), permit).await;
    Err(error)
}

async fn count_request<S: RateLimits>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    count: RequestCount,
) -> Result<RateLimitPermit, ClientAuthenticationError> {
    match count {
        RequestCount::Counted => {
            let checks = rate_limits::token_requests(call.app, client, call.client_address());
            Ok(call.stores.acquire(call.app_id(), checks).await?)
        }
        RequestCount::NotCounted => Ok(RateLimitPermit::default()),
    }
}

/// Checks the credentials, without a call to Redis or Postgres. Returns the assertion, if the client has sent one.
fn verify(
    client: &OpenIdClient,
    credentials: PresentedCredentials<'_>,
    audiences: &[&str],
    now: OffsetDateTime,
) -> Result<Option<VerifiedAssertion>, ClientAuthenticationError> {
    let verified = match (&client.authentication, credentials) {
        (ClientAuthentication::Unresolved, _) => {
            return Err(ClientAuthenticationError::Unresolved(client.client_id.clone()));
        }
        (ClientAuthentication::Secret(secrets), PresentedCredentials::Secret { secret, .. }) => {
            secrets.accept(secret, now.unix_timestamp()).then_some(None)
        }
        (
            ClientAuthentication::PrivateKeyJwt(keys),
            PresentedCredentials::Assertion { assertion, assertion_type: Some(ASSERTION_TYPE) },
        ) => verify_assertion(keys, client.client_id.as_str(), audiences, now, assertion).map(Some),
        // The request uses no method, or another one than the client must use.
        (
            ClientAuthentication::None | ClientAuthentication::Secret(_) | ClientAuthentication::PrivateKeyJwt(_),
            PresentedCredentials::None
            | PresentedCredentials::MalformedBasic
            | PresentedCredentials::Secret { .. }
            | PresentedCredentials::Assertion { .. },
        ) => None,
    };
    verified.ok_or(ClientAuthenticationError::InvalidClient)
}

// === impl PresentedCredentials ===

impl PresentedCredentials<'_> {
    pub const fn method(&self) -> AuthenticationMethod {
        match self {
            Self::None => AuthenticationMethod::None,
            Self::Secret { is_basic: true, .. } | Self::MalformedBasic => AuthenticationMethod::ClientSecretBasic,
            Self::Secret { is_basic: false, .. } => AuthenticationMethod::ClientSecretPost,
            Self::Assertion { .. } => AuthenticationMethod::PrivateKeyJwt,
        }
    }
}

// === impl AuthenticationMethod ===

impl AuthenticationMethod {
    pub const ALL: [Self; 4] = [Self::ClientSecretBasic, Self::ClientSecretPost, Self::PrivateKeyJwt, Self::None];

    /// The name in discovery documents and metrics (RFC 7591, 2).
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ClientSecretBasic => "client_secret_basic",
            Self::ClientSecretPost => "client_secret_post",
            Self::PrivateKeyJwt => "private_key_jwt",
            Self::None => "none",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use futures::FutureExt;
    use jsonwebtoken::{Algorithm, EncodingKey, Header, jwk::Jwk};
    use latchkey_crds::{
        rendered::{ClientLimitName, KeyState, RenderedClient, RenderedClientAuthentication, SigningAlgorithm, Window},
        types::AppId,
    };
    use parking_lot::Mutex;
    use serde_json::json;

    use super::*;
    use crate::{
        domain::{
            app::App,
            client::{ClientAddress, ClientInfo},
            clock::Env,
            email::AccountKey,
            openid::code::{ClientCodeKey, ClientCodeRecord, ExchangedCode, Redemption, StoredClientCode},
            ports::{AcquireError, StoreError},
            rate_limits::{Limit, RateLimitCheck, RateLimited},
            session::SessionId,
        },
        fixtures::{self, CLIENT_SECRET},
    };

    const ISSUER: &str = "https://auth.example.com/shop";

    /// Rate limits with windows that never end, and the used assertions, both in memory.
    #[derive(Default)]
    struct FakeStores {
        /// Each use that was counted and not released: its limit and its subject.
        counted: Mutex<Vec<(Limit, String)>>,
        /// The limit that is reached.
        reached: Option<ClientLimitName>,
        used: Mutex<HashSet<(String, String)>>,
    }

    impl FakeStores {
        fn refuse_if_reached(&self, checks: &[RateLimitCheck]) -> Result<(), AcquireError> {
            let Some(check) = checks.iter().find(|check| self.reached.map(Limit::from) == Some(check.limit)) else {
                return Ok(());
            };
            let window = Window { count: 1, window_seconds: 60 };
            let retry_after = std::time::Duration::from_secs(9);
            Err(RateLimited { limit: check.limit, window, retry_after }.into())
        }
    }

    impl RateLimits for FakeStores {
        async fn acquire(&self, _: &AppId, checks: Vec<RateLimitCheck>) -> Result<RateLimitPermit, AcquireError> {
            self.refuse_if_reached(&checks)?;
            self.counted.lock().extend(checks.iter().map(|check| (check.limit, check.subject.clone())));
            Ok(RateLimitPermit(checks.into_iter().map(|check| (check, 0)).collect()))
        }
        async fn check_limits(&self, _: &AppId, checks: Vec<RateLimitCheck>) -> Result<(), AcquireError> {
            self.refuse_if_reached(&checks)
        }
        async fn release(&self, _: &AppId, permit: RateLimitPermit) {
            let mut counted = self.counted.lock();
            for (check, _) in permit.0 {
                let failures = ClientLimitName::ClientFailuresPerClientAddress.into();
                assert_ne!(check.limit, failures, "only a failure counts, and it stays counted");
                let index =
                    counted.iter().position(|(limit, subject)| (*limit, subject) == (check.limit, &check.subject));
                counted.remove(index.unwrap());
            }
        }
        async fn is_known_client(&self, _: &AppId, _: &AccountKey, _: ClientAddress) -> Result<bool, StoreError> {
            Ok(false)
        }
        async fn remember_client(&self, _: &AppId, _: &AccountKey, _: ClientAddress) {}
    }

    impl ClientCodes for FakeStores {
        async fn store_client_code(
            &self,
            _: &AppId,
            _: &ClientCodeKey,
            _: &ClientCodeRecord,
        ) -> Result<(), StoreError> {
            Ok(())
        }
        async fn find_client_code(&self, _: &AppId, _: &ClientCodeKey) -> Result<Option<StoredClientCode>, StoreError> {
            Ok(None)
        }
        async fn redeem_client_code(
            &self,
            _: &AppId,
            _: &ClientCodeKey,
            _: &ExchangedCode,
            _: SessionId,
        ) -> Result<Redemption, StoreError> {
            Ok(Redemption::Unknown)
        }
        async fn use_assertion(&self, _: &AppId, client_uid: &str, jti: &str, _: i64) -> Result<bool, StoreError> {
            Ok(self.used.lock().insert((client_uid.to_owned(), jti.to_owned())))
        }
    }

    /// A client's key pair and its key set.
    struct Signer {
        key: EncodingKey,
        jwks: String,
    }

    impl Signer {
        fn new() -> Self {
            let pem = fixtures::signing_key("k", SigningAlgorithm::ES256, KeyState::Active).private_key;
            let key = EncodingKey::from_ec_pem(pem.expose().as_bytes()).unwrap();
            let jwks = json!({ "keys": [Jwk::from_encoding_key(&key, Algorithm::ES256).unwrap()] }).to_string();
            Self { key, jwks }
        }

        fn assertion(&self, env: &Env, client_id: &str, jti: &str) -> String {
            let exp = env.now().unix_timestamp() + 60;
            let claims = json!({ "iss": client_id, "sub": client_id, "aud": ISSUER, "exp": exp, "jti": jti });
            jsonwebtoken::encode(&Header::new(Algorithm::ES256), &claims, &self.key).unwrap()
        }
    }

    fn app(signer: &Signer) -> App {
        let with = |id: &str, authentication| RenderedClient { authentication, ..fixtures::client(id) };
        fixtures::provider(vec![
            fixtures::client("web"),
            with("public", RenderedClientAuthentication::None),
            with("lost", RenderedClientAuthentication::Unresolved),
            with("keys", RenderedClientAuthentication::PrivateKeyJwt { jwks: signer.jwks.clone() }),
        ])
    }

    /// Authenticates, and returns the client ID or what failed.
    fn authenticate(stores: &FakeStores, app: &App, presented: PresentedClient<'_>) -> Result<String, &'static str> {
        let (env, client) = (Env::system(), ClientInfo { ip: [192, 0, 2, 1].into(), user_agent: None });
        let call = Call { stores, env: &env, app, client: &client };
        let outcome = authenticate_client(call, presented, &[ISSUER], RequestCount::Counted).now_or_never().unwrap();
        outcome.map(|client| client.client_id.to_string()).map_err(|error| match error {
            ClientAuthenticationError::InvalidClient => "invalid_client",
            ClientAuthenticationError::Unresolved(_) => "unresolved",
            ClientAuthenticationError::Common(CommonError::RateLimited(limited)) => limited.limit.as_str(),
            ClientAuthenticationError::Common(error) => panic!("{error}"),
        })
    }

    fn secret<'a>(client_id: &'a str, secret: &'a str) -> PresentedClient<'a> {
        PresentedClient {
            client_id: Some(client_id),
            credentials: PresentedCredentials::Secret { secret, is_basic: false },
        }
    }

    fn counted_limits(stores: &FakeStores) -> Vec<(&'static str, String)> {
        stores.counted.lock().iter().map(|(limit, subject)| (limit.as_str(), subject.clone())).collect()
    }

    #[test]
    fn a_right_secret_counts_as_a_request_and_a_wrong_one_as_a_failure() {
        let (stores, app) = (FakeStores::default(), app(&Signer::new()));
        assert_eq!(authenticate(&stores, &app, secret("web", CLIENT_SECRET)), Ok("web".to_owned()));
        assert_eq!(counted_limits(&stores), [("tokenRequestsPerClientID", "uid-web".to_owned())]);
        stores.counted.lock().clear();
        assert_eq!(authenticate(&stores, &app, secret("web", "wrong")), Err("invalid_client"));
        assert_eq!(counted_limits(&stores), [("clientFailuresPerClientAddress", "192.0.2.1 uid-web".to_owned())]);
    }

    #[test]
    fn failures_of_unknown_clients_are_counted_together() {
        let (stores, app) = (FakeStores::default(), app(&Signer::new()));
        for unknown in ["", "a", "uid-web", "WEB"] {
            assert_eq!(authenticate(&stores, &app, secret(unknown, CLIENT_SECRET)), Err("invalid_client"));
        }
        let subjects: HashSet<String> = counted_limits(&stores).into_iter().map(|(_, subject)| subject).collect();
        assert_eq!(subjects, HashSet::from(["192.0.2.1".to_owned()]));
    }

    #[test]
    fn the_right_secret_is_not_checked_after_too_many_failures() {
        let reached = Some(ClientLimitName::ClientFailuresPerClientAddress);
        let (stores, app) = (FakeStores { reached, ..FakeStores::default() }, app(&Signer::new()));
        for text in [CLIENT_SECRET, "wrong"] {
            assert_eq!(authenticate(&stores, &app, secret("web", text)), Err("clientFailuresPerClientAddress"));
        }
    }

    #[test]
    fn a_limit_on_requests_applies_after_the_authentication() {
        let reached = Some(ClientLimitName::TokenRequestsPerClientId);
        let (stores, app) = (FakeStores { reached, ..FakeStores::default() }, app(&Signer::new()));
        assert_eq!(authenticate(&stores, &app, secret("web", "wrong")), Err("invalid_client"));
        assert_eq!(authenticate(&stores, &app, secret("web", CLIENT_SECRET)), Err("tokenRequestsPerClientID"));
    }

    #[test]
    fn a_client_cannot_use_the_authentication_method_of_another_client() {
        let signer = Signer::new();
        let (stores, app, env) = (FakeStores::default(), app(&signer), Env::system());
        let none = |client_id| PresentedClient { client_id, credentials: PresentedCredentials::None };
        assert_eq!(authenticate(&stores, &app, none(Some("public"))), Ok("public".to_owned()));
        let own_count = ("tokenRequestsPerClientID", "192.0.2.1 uid-public".to_owned());
        assert_eq!(counted_limits(&stores), [own_count], "per client address, because anybody knows the ID");
        for client_id in [None, Some("web"), Some("keys"), Some("unknown")] {
            assert_eq!(authenticate(&stores, &app, none(client_id)), Err("invalid_client"), "{client_id:?}");
        }
        for client_id in ["public", "keys"] {
            assert_eq!(authenticate(&stores, &app, secret(client_id, CLIENT_SECRET)), Err("invalid_client"));
        }
        let malformed = PresentedClient { client_id: Some("web"), credentials: PresentedCredentials::MalformedBasic };
        assert_eq!(authenticate(&stores, &app, malformed), Err("invalid_client"));
        let assertion = signer.assertion(&env, "web", "j-1");
        let credentials =
            PresentedCredentials::Assertion { assertion: &assertion, assertion_type: Some(ASSERTION_TYPE) };
        let with_assertion = PresentedClient { client_id: Some("web"), credentials };
        assert_eq!(authenticate(&stores, &app, with_assertion), Err("invalid_client"));
    }

    #[test]
    fn an_assertion_names_its_client_and_can_be_used_only_once() {
        let signer = Signer::new();
        let (stores, app, env) = (FakeStores::default(), app(&signer), Env::system());
        let authenticate_with = |client_id, assertion: &str, assertion_type| {
            let credentials = PresentedCredentials::Assertion { assertion, assertion_type };
            authenticate(&stores, &app, PresentedClient { client_id, credentials })
        };
        let assertion = signer.assertion(&env, "keys", "j-1");
        for assertion_type in [None, Some("other")] {
            assert_eq!(authenticate_with(None, &assertion, assertion_type), Err("invalid_client"));
        }
        assert_eq!(authenticate_with(Some("web"), &assertion, Some(ASSERTION_TYPE)), Err("invalid_client"));
        assert_eq!(authenticate_with(None, &assertion, Some(ASSERTION_TYPE)), Ok("keys".to_owned()));
        assert_eq!(authenticate_with(None, &assertion, Some(ASSERTION_TYPE)), Err("invalid_client"), "used");
        let second = signer.assertion(&env, "keys", "j-2");
        assert_eq!(authenticate_with(Some("keys"), &second, Some(ASSERTION_TYPE)), Ok("keys".to_owned()));
    }

    #[test]
    fn a_rate_limited_request_does_not_use_up_its_assertion() {
        let signer = Signer::new();
        let reached = Some(ClientLimitName::TokenRequestsPerClientId);
        let (stores, app, env) = (FakeStores { reached, ..FakeStores::default() }, app(&signer), Env::system());
        let assertion = signer.assertion(&env, "keys", "j-1");
        let credentials =
            PresentedCredentials::Assertion { assertion: &assertion, assertion_type: Some(ASSERTION_TYPE) };
        let presented = PresentedClient { client_id: None, credentials };
        assert_eq!(authenticate(&stores, &app, presented), Err("tokenRequestsPerClientID"));
        assert!(stores.used.lock().is_empty());
        let stores = FakeStores { reached: None, ..stores };
        assert_eq!(authenticate(&stores, &app, presented), Ok("keys".to_owned()));
        stores.counted.lock().clear();
        assert_eq!(authenticate(&stores, &app, presented), Err("invalid_client"), "used");
        assert_eq!(counted_limits(&stores).len(), 1, "only the failure counts");
    }

    #[test]
    fn a_request_of_a_client_without_a_readable_secret_does_not_count_as_a_failure() {
        let (stores, app) = (FakeStores::default(), app(&Signer::new()));
        assert_eq!(authenticate(&stores, &app, secret("lost", CLIENT_SECRET)), Err("unresolved"));
        assert!(counted_limits(&stores).is_empty());
    }
}
