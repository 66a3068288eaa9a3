//! Social providers: every call to one, and what is believed of its answers.

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
            Authorization, Away, BadToken, Fault, Grant, Operation, Place, ProviderError, ProviderTraits, Unusable,
            Vouched,
        },
    },
    json::{self, Bounds, Refusal},
    outbound::{Reach, proxy::Proxy},
};

mod apple;
mod checks;
mod client;
pub mod discovery;
mod exchange;
#[doc(hidden)]
pub mod fuzzing;
mod http;
pub mod id_token;
mod metrics;
mod permits;
mod preset;
mod profile;
mod reports;
mod shelf;
mod token_check;

pub use permits::Permit;
pub use reports::Reports;

use client::Client;
use discovery::{Endpoints, Metadata};
use http::{Http, Purpose, WHOLE};
use id_token::{Expected, IdToken, KeySet};
use metrics::Metrics;
use permits::{Key, Permits};
use shelf::Shelf;

/// What an answer of a provider, or the claims of a token, may be made of. The longest honest ones are lists of 100
/// addresses of some 9 values each, discovery documents of some 400 and groups of some 500. As a tree such an answer
/// costs less than 2 MiB beside its bytes, whatever is in it. No tree outlives the step that reads it, so there are at
/// most as many as there are threads.
pub const BOUNDS: Bounds = Bounds { depth: 16, values: 2000 };

/// What the install sets for the providers of all Apps.
#[derive(Clone, Debug, Default)]
pub struct ProviderOptions {
    /// Where providers may stand.
    pub reach: Reach,
    /// Through which they are reached.
    pub proxy: Proxy,
    /// For tests: hosts that stand at an address of this machine. Their certificates are still judged by their names.
    pub hosts: HashMap<String, SocketAddr>,
    /// For tests: roots that are trusted beside the machine's.
    pub authorities: Vec<CertificateDer<'static>>,
}

/// The way to social providers; a cheap handle.
#[derive(Clone)]
pub struct SocialProviders(Arc<Inner>);

struct Inner {
    env: Arc<Env>,
    http: Arc<Http>,
    permits: Permits,
    metadata: Shelf<Metadata>,
    keys: Shelf<KeySet>,
    apple: apple::Secrets,
    metrics: Metrics,
}

// === impl SocialProviders ===

impl SocialProviders {
    pub fn new(options: ProviderOptions, env: Env) -> Self {
        let (env, metrics) = (Arc::new(env), Metrics::new());
        Self(Arc::new(Inner {
            http: Arc::new(Http::new(
                options.reach,
                options.proxy,
                options.hosts,
                options.authorities,
                metrics.clone(),
            )),
            permits: Permits::default(),
            metadata: Shelf::new(Arc::clone(&env)),
            keys: Shelf::new(Arc::clone(&env)),
            apple: apple::Secrets::default(),
            metrics,
            env,
        }))
    }

    /// Under names without a prefix: the registry is to be one of providers' own.
    pub fn register(&self, registry: &mut Registry) {
        self.0.metrics.register(registry);
    }

    /// See [`crate::domain::ports::Providers`].
    pub fn traits_of(&self, provider: &RenderedProvider) -> ProviderTraits {
        preset::preset(&provider.settings.preset).map_or(ProviderTraits { nonce: false, form_post: false }, |preset| {
            ProviderTraits { nonce: preset.nonce, form_post: preset.form_post }
        })
    }

    /// See [`crate::domain::ports::Providers`].
    pub fn try_acquire(
        &self,
        operation: Operation,
        app: &App,
        provider: &RenderedProvider,
        client: ClientAddress,
    ) -> Result<Permit, ProviderError> {
        let preset = preset::preset(&provider.settings.preset).ok_or(Unusable::UnknownPreset)?;
        let key = Key::new((app.doc.namespace.clone(), provider.resource.clone()));
        self.0.permits.try_acquire(&key, client, operation).map_err(|away| {
            let error = ProviderError::Away(away);
            self.0.metrics.done(preset.name, operation, Some(&error));
            error
        })
    }

    /// See [`crate::domain::ports::Providers`].
    pub async fn authorization_url(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        request: &Authorization<'_>,
    ) -> Result<String, ProviderError> {
        let client = Client::new(&provider.settings, permit)?;
        // Without it nobody comes back from there logged in.
        client.secret()?;
        let endpoints = self.0.asking(&client, self.0.endpoints(&client)).await?;
        authorization_url(&client, endpoints, request)
    }

    /// See [`crate::domain::ports::Providers`].
    pub async fn judge_issuer(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        iss: Option<&str>,
    ) -> Result<(), ProviderError> {
        let client = Client::new(&provider.settings, permit)?;
        let judging = async { self.0.endpoints(&client).await?.judge_iss(iss) };
        self.0.asking(&client, judging).await
    }

    /// See [`crate::domain::ports::Providers`].
    pub async fn exchange(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        grant: &Grant<'_>,
    ) -> Result<Vouched, ProviderError> {
        let client = Client::new(&provider.settings, permit)?;
        client.secret()?;
        self.0.asking(&client, self.0.exchange(&client, grant)).await
    }

    /// See [`crate::domain::ports::Providers`].
    pub async fn check_token(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        token: &str,
        nonce: Option<&str>,
    ) -> Result<Vouched, ProviderError> {
        let client = Client::new(&provider.settings, permit)?;
        client.secret()?;
        self.0.asking(&client, self.0.check_token(&client, token, nonce)).await
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
    /// Asks a provider on behalf of a client, within the time for the whole of it.
    async fn asking<T>(
        &self,
        client: &Client<'_>,
        work: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        let done = timeout(WHOLE, work).await.unwrap_or(Err(Away::TooSlow.into()));
        if let Some(operation) = client.permit.operation() {
            self.metrics.done(client.preset.name, operation, done.as_ref().err());
        }
        done
    }

    /// Judges an ID token, by newer keys where its key is not known.
    async fn id_token(
        &self,
        client: &Client<'_>,
        endpoints: &Endpoints,
        token: &str,
        expected: Expected<'_>,
    ) -> Result<Result<IdToken, BadToken>, ProviderError> {
        let Some(keys) = &endpoints.keys else { return Ok(Err(BadToken::Malformed)) };
        let verify = |set: &KeySet| {
            IdToken::verify(token, set, &keys.algorithms, &endpoints.issuers, client, expected, self.env.now())
        };
        // Before the provider is asked.
        if !id_token::is_well_formed(token) {
            return Ok(Err(BadToken::Malformed));
        }
        let set = self.keys(client, &keys.url).await?;
        Ok(match verify(&set) {
            Err(BadToken::UnknownKey) => match self.newer_keys(client, &keys.url, &set).await {
                Some(newer) => verify(&newer),
                None => Err(BadToken::UnknownKey),
            },
            judged => judged,
        })
    }
}

fn authorization_url(
    client: &Client<'_>,
    endpoints: Endpoints,
    request: &Authorization<'_>,
) -> Result<String, ProviderError> {
    let preset = client.preset;
    let redirect = RedirectUrl::new(request.redirect_uri.to_owned()).map_err(|_| Unusable::BadOptions)?;
    let address = AuthUrl::new(endpoints.authorization)
        .map_err(|_| ProviderError::Answer { place: Place::Discovery, fault: Fault::Incomplete })?;
    let oauth = BasicClient::new(ClientId::new(client.settings.client_id.clone()))
        .set_auth_uri(address)
        .set_redirect_uri(redirect);
    let mut address = oauth
        .authorize_url(|| CsrfToken::new(request.state.to_owned()))
        .add_scopes(client.scopes().into_iter().map(|scope| Scope::new(scope.to_owned())));
    if preset.pkce {
        address = address
            .add_extra_param("code_challenge", request.code_challenge)
            .add_extra_param("code_challenge_method", "S256");
    }
    if let Some(nonce) = request.nonce.filter(|_| preset.nonce) {
        address = address.add_extra_param("nonce", nonce);
    }
    for (name, value) in preset.parameters {
        address = address.add_extra_param(*name, *value);
    }
    // Space-separated (OpenID Connect Core 1.0, 3.1.2.1); one value that is not known makes it another question.
    let knows = |prompt: &&str| prompt.split(' ').all(|value| preset.prompts.contains(&value));
    if let Some(prompt) = request.prompt.filter(knows) {
        address = address.add_extra_param("prompt", prompt);
    }
    if let (Some(name), Some(hint)) = (preset.login_hint, request.login_hint) {
        address = address.add_extra_param(name, hint);
    }
    Ok(address.url().0.into())
}

/// Reads a document that anybody may read.
async fn get(http: &Http, purpose: Purpose, url: &str) -> Result<http::Answer, ProviderError> {
    ask(http, purpose, Request::get(url)).await
}

/// Asks a question without a body.
async fn ask(http: &Http, purpose: Purpose, request: ::http::request::Builder) -> Result<http::Answer, ProviderError> {
    let place = purpose.place;
    // An address of somebody's document that no request can be made to.
    let incomplete = |_| ProviderError::Answer { place, fault: Fault::Incomplete };
    let accepts = request.headers_ref().is_some_and(|headers| headers.contains_key(ACCEPT));
    let request = if accepts { request } else { request.header(ACCEPT, "application/json") };
    let answer = http.call(purpose, request.body(Default::default()).map_err(incomplete)?).await;
    answer.map_err(|error| error.at(place))
}

/// Reads an answer within [`BOUNDS`].
fn parse(body: &[u8]) -> Result<Value, Fault> {
    json::parse(body, BOUNDS).map_err(|refusal| match refusal {
        Refusal::TooDeep | Refusal::TooManyValues => Fault::TooComplex,
        Refusal::NotUtf8 | Refusal::Syntax { .. } | Refusal::DuplicateKey { .. } => Fault::NotJson,
    })
}

impl http::Answer {
    /// The body, if the status is 200.
    fn ok(&self) -> Result<&[u8], Fault> {
        if self.status == StatusCode::OK { Ok(&self.body) } else { Err(Fault::Status(self.status.as_u16())) }
    }

    /// The body as a tree, if the status is 200. Drop it before the next question.
    fn json(&self) -> Result<Value, Fault> {
        parse(self.ok()?)
    }
}

impl From<Unusable> for ProviderError {
    fn from(unusable: Unusable) -> Self {
        Self::Unusable(unusable)
    }
}
