//! Calls to social providers, and validation of their responses.

use std::{collections::HashMap, fmt, net::SocketAddr, sync::Arc};

use ::http::{Request, StatusCode, header::ACCEPT};
use latchkey_crds::rendered::RenderedProvider;
use oauth2::{AuthUrl, ClientId, CsrfToken, RedirectUrl, Scope, basic::BasicClient};
use prometheus_client::registry::Registry;
use rustls::pki_types::CertificateDer;
use serde_json::Value;
use tokio::time::timeout;

use crate::{
    domain::{
        app::App,
        client::ClientAddress,
        clock::Env,
        identity::{
            AuthorizationCodeGrant, AuthorizationRequest, InvalidProviderToken, InvalidResponse, ProviderCapabilities,
            ProviderEndpoint, ProviderError, ProviderOperation, UnavailableReason, UnusableReason, VerifiedIdentity,
        },
    },
    json::{self, Bounds, JsonError},
    outbound::{OutboundPolicy, proxy::OutboundProxy},
};

mod apple;
mod authority;
mod cache;
mod checks;
mod client;
pub mod discovery;
mod exchange;
#[doc(hidden)]
pub mod fuzzing;
mod groups;
mod http;
pub mod id_token;
mod metrics;
mod permits;
mod preset;
mod profile;
mod reports;
mod token_check;

pub use authority::identity_authority;
pub use permits::Permit;
pub use reports::ProviderReports;

use cache::DocumentCache;
use client::ProviderConfig;
use discovery::{Endpoints, Metadata};
use http::{CALL_TIMEOUT, CallTarget, ProviderHttp};
use id_token::{IdToken, KeySet, TokenOrigin};
use metrics::Metrics;
use permits::{Permits, SharedProviderKey};

/// Bounds on the JSON of a provider's response and of a token's claims. Regular documents are smaller: a list of 100
/// email addresses has about 900 values, a discovery document has about 400 values, and a token that lists 500 groups
/// has about 600 values. Within these bounds, the parsed JSON takes less than 2 MiB in addition to its text. No parsed
/// JSON is kept across an `await`, so each thread keeps at most one parsed document at a time.
pub const RESPONSE_BOUNDS: Bounds = Bounds { depth: 16, values: 2000 };

/// Settings of the installation that apply to the providers of all Apps.
#[derive(Clone, Debug, Default)]
pub struct ProviderOptions {
    /// The IP addresses that calls can reach, and whether calls without TLS are allowed (for development).
    pub reach: OutboundPolicy,
    /// The proxy for calls to providers.
    pub proxy: OutboundProxy,
    /// For tests: hosts that resolve to an IP address of this machine. A host's certificate must still match the host's
    /// name.
    pub test_hosts: HashMap<String, SocketAddr>,
    /// For tests: root certificates that are trusted in addition to those of the machine.
    pub test_roots: Vec<CertificateDer<'static>>,
}

/// A client for social providers. Clones are cheap and share their state.
#[derive(Clone)]
pub struct SocialProviders(Arc<Inner>);

struct Inner {
    env: Arc<Env>,
    http: Arc<ProviderHttp>,
    permits: Permits,
    metadata: DocumentCache<Metadata>,
    keys: DocumentCache<KeySet>,
    apple: apple::ClientSecrets,
    metrics: Metrics,
}

// === impl SocialProviders ===

impl SocialProviders {
    pub fn new(options: ProviderOptions, env: Env) -> Self {
        let (env, metrics) = (Arc::new(env), Metrics::new());
        Self(Arc::new(Inner {
            http: Arc::new(ProviderHttp::new(
                options.reach,
                options.proxy,
                options.test_hosts,
                options.test_roots,
                metrics.clone(),
            )),
            permits: Permits::default(),
            metadata: DocumentCache::new(Arc::clone(&env)),
            keys: DocumentCache::new(Arc::clone(&env)),
            apple: apple::ClientSecrets::default(),
            metrics,
            env,
        }))
    }

    /// Registers the metrics under names without a prefix. `registry` must add the prefix `provider`.
    pub fn register(&self, registry: &mut Registry) {
        self.0.metrics.register(registry);
    }

    /// Returns what a flow must know before it calls the provider.
    pub fn capabilities(&self, provider: &RenderedProvider) -> ProviderCapabilities {
        preset::find_preset(&provider.settings.preset).map_or(
            ProviderCapabilities { has_nonce: false, uses_form_post: false },
            |preset| ProviderCapabilities { has_nonce: preset.supports_nonce, uses_form_post: preset.uses_form_post },
        )
    }

    /// Acquires a permit for an operation of a client, or fails immediately.
    pub fn try_acquire(
        &self,
        operation: ProviderOperation,
        app: &App,
        provider: &RenderedProvider,
        client: ClientAddress,
    ) -> Result<Permit, ProviderError> {
        let preset = preset::find_preset(&provider.settings.preset).ok_or(UnusableReason::UnknownPreset)?;
        let key = SharedProviderKey::new((app.doc.namespace.clone(), provider.resource.clone()));
        self.0.permits.try_acquire(&key, client, operation).map_err(|reason| {
            let error = ProviderError::Unavailable(reason);
            self.0.metrics.record_operation(preset.name, operation, Some(&error));
            error
        })
    }

    /// Returns the URL of the provider's login page for the browser.
    pub async fn authorization_url(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        request: &AuthorizationRequest<'_>,
    ) -> Result<String, ProviderError> {
        let client = ProviderConfig::new(&provider.settings, permit)?;
        // A missing secret is already an error here, because the callback of this flow would fail without the secret.
        client.secret()?;
        let endpoints = self.0.run_operation(&client, self.0.endpoints(&client)).await?;
        authorization_url(&client, endpoints, request)
    }

    /// Validates `iss` in a callback that has no code (RFC 9207).
    pub async fn validate_issuer(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        iss: Option<&str>,
    ) -> Result<(), ProviderError> {
        let client = ProviderConfig::new(&provider.settings, permit)?;
        let validation = async { self.0.endpoints(&client).await?.validate_iss(iss) };
        self.0.run_operation(&client, validation).await
    }

    /// Exchanges a code for the identity of the user.
    pub async fn exchange_code(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        grant: &AuthorizationCodeGrant<'_>,
    ) -> Result<VerifiedIdentity, ProviderError> {
        let client = ProviderConfig::of_app(provider, permit)?;
        client.secret()?;
        self.0.run_operation(&client, self.0.exchange_code(&client, grant)).await
    }

    /// Validates a provider's token, and returns the identity of its owner.
    pub async fn validate_token(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        token: &str,
        nonce: Option<&str>,
    ) -> Result<VerifiedIdentity, ProviderError> {
        let client = ProviderConfig::of_app(provider, permit)?;
        client.secret()?;
        self.0.run_operation(&client, self.0.validate_token(&client, token, nonce)).await
    }
}

impl Default for SocialProviders {
    fn default() -> Self {
        Self::new(ProviderOptions::default(), Env::system())
    }
}

impl fmt::Debug for SocialProviders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SocialProviders(…)")
    }
}

// === impl Inner ===

impl Inner {
    /// Runs `work` with the timeout [`CALL_TIMEOUT`]. Counts the outcome of a client's operation, but not the outcome
    /// of a check ([`checks`]).
    async fn run_operation<T>(
        &self,
        client: &ProviderConfig<'_>,
        work: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        let result = timeout(CALL_TIMEOUT, work).await.unwrap_or(Err(UnavailableReason::Timeout.into()));
        if let Some(operation) = client.permit.operation() {
            self.metrics.record_operation(client.preset.name, operation, result.as_ref().err());
        }
        result
    }

    /// Validates an ID token. If its key is unknown, fetches newer keys and validates the token with them. The outer
    /// error is a failed call to the provider; the inner error says what is wrong with the token.
    async fn validate_id_token(
        &self,
        client: &ProviderConfig<'_>,
        endpoints: &Endpoints,
        token: &str,
        expected: TokenOrigin<'_>,
    ) -> Result<Result<IdToken, InvalidProviderToken>, ProviderError> {
        let Some(keys) = &endpoints.keys else { return Ok(Err(InvalidProviderToken::Malformed)) };
        let verify = |set: &KeySet| {
            IdToken::verify(token, set, &keys.algorithms, &endpoints.issuers, client, expected, self.env.now())
        };
        // A malformed token causes no call to the provider.
        if !id_token::is_well_formed(token) {
            return Ok(Err(InvalidProviderToken::Malformed));
        }
        let set = self.keys(client, &keys.url).await?;
        Ok(match verify(&set) {
            Err(InvalidProviderToken::UnknownKey) => match self.newer_keys(client, &keys.url, &set).await {
                Some(newer) => verify(&newer),
                None => Err(InvalidProviderToken::UnknownKey),
            },
            result => result,
        })
    }
}

fn authorization_url(
    client: &ProviderConfig<'_>,
    endpoints: Endpoints,
    request: &AuthorizationRequest<'_>,
) -> Result<String, ProviderError> {
    let preset = client.preset;
    let redirect = RedirectUrl::new(request.redirect_uri.to_owned()).map_err(|_| UnusableReason::InvalidOptions)?;
    let endpoint = AuthUrl::new(endpoints.authorization_endpoint).map_err(|_| ProviderError::InvalidResponse {
        endpoint: ProviderEndpoint::Discovery,
        reason: InvalidResponse::Incomplete,
    })?;
    let oauth = BasicClient::new(ClientId::new(client.settings.client_id.clone()))
        .set_auth_uri(endpoint)
        .set_redirect_uri(redirect);
    let mut url = oauth
        .authorize_url(|| CsrfToken::new(request.state.to_owned()))
        .add_scopes(client.scopes().into_iter().map(|scope| Scope::new(scope.to_owned())));
    if preset.uses_pkce {
        url = url
            .add_extra_param("code_challenge", request.code_challenge)
            .add_extra_param("code_challenge_method", "S256");
    }
    if let Some(nonce) = request.nonce.filter(|_| preset.supports_nonce) {
        url = url.add_extra_param("nonce", nonce);
    }
    for (name, value) in preset.parameters {
        url = url.add_extra_param(*name, *value);
    }
    // `prompt` is a list of values, separated by spaces (OpenID Connect Core 1.0, 3.1.2.1). It is sent only if the
    // provider supports every value, because a shorter list can have a different meaning.
    let is_supported = |prompt: &&str| prompt.split(' ').all(|value| preset.prompts.contains(&value));
    if let Some(prompt) = request.prompt.filter(is_supported) {
        url = url.add_extra_param("prompt", prompt);
    }
    if let (Some(name), Some(hint)) = (preset.login_hint, request.login_hint) {
        url = url.add_extra_param(name, hint);
    }
    Ok(url.url().0.into())
}

/// Fetches a discovery document or a key set, which need no credentials.
async fn fetch(http: &ProviderHttp, target: CallTarget, url: &str) -> Result<http::ProviderResponse, ProviderError> {
    send_request(http, target, Request::get(url)).await
}

/// Sends a request without a body, with `Accept: application/json` if the request has no `Accept`.
async fn send_request(
    http: &ProviderHttp,
    target: CallTarget,
    request: ::http::request::Builder,
) -> Result<http::ProviderResponse, ProviderError> {
    let endpoint = target.endpoint;
    // The URL can be invalid, because it can come from a discovery document or from a Provider.
    let incomplete = |_| ProviderError::InvalidResponse { endpoint, reason: InvalidResponse::Incomplete };
    let has_accept = request.headers_ref().is_some_and(|headers| headers.contains_key(ACCEPT));
    let request = if has_accept { request } else { request.header(ACCEPT, "application/json") };
    let response = http.call(target, request.body(Default::default()).map_err(incomplete)?).await;
    response.map_err(|error| error.into_provider_error(endpoint))
}

/// Parses JSON within [`RESPONSE_BOUNDS`].
fn parse(body: &[u8]) -> Result<Value, InvalidResponse> {
    json::parse(body, RESPONSE_BOUNDS).map_err(|error| match error {
        JsonError::TooDeep | JsonError::TooManyValues => InvalidResponse::TooComplex,
        JsonError::NotUtf8 | JsonError::Syntax { .. } | JsonError::DuplicateKey { .. } => InvalidResponse::NotJson,
    })
}

impl http::ProviderResponse {
    /// The body. Fails unless the status is 200.
    fn success_body(&self) -> Result<&[u8], InvalidResponse> {
        if self.status == StatusCode::OK { Ok(&self.body) } else { Err(InvalidResponse::Status(self.status.as_u16())) }
    }

    /// The parsed body. Fails unless the status is 200. Drop the value before the next request; see
    /// [`RESPONSE_BOUNDS`].
    fn json(&self) -> Result<Value, InvalidResponse> {
        parse(self.success_body()?)
    }
}

impl From<UnusableReason> for ProviderError {
    fn from(unusable: UnusableReason) -> Self {
        Self::Unusable(unusable)
    }
}
