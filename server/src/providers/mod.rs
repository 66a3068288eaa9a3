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
        clock::Env,
        identity::{
            Authorization, Away, BadToken, Fault, Grant, Place, ProviderError, ProviderTraits, Unusable, Vouched,
        },
    },
    outbound::{Reach, proxy::Proxy},
};

mod apple;
mod checks;
mod client;
mod discovery;
mod exchange;
mod http;
mod id_token;
mod metrics;
mod preset;
mod profile;
mod reports;
mod shelf;
mod token_check;

pub use reports::Reports;

use client::Client;
use discovery::{Endpoints, Metadata};
use http::{Http, Purpose, WHOLE};
use id_token::{Expected, IdToken, KeySet};
use metrics::{Metrics, Operation};
use shelf::Shelf;

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
    pub async fn authorization_url(
        &self,
        app: &App,
        provider: &RenderedProvider,
        request: &Authorization<'_>,
    ) -> Result<String, ProviderError> {
        let client = Client::new(app, provider)?;
        // Without it nobody comes back from there logged in.
        client.secret()?;
        let endpoints = self.0.asking(&client, Operation::Redirect, self.0.endpoints(&client)).await?;
        authorization_url(&client, endpoints, request)
    }

    /// See [`crate::domain::ports::Providers`].
    pub async fn judge_issuer(
        &self,
        app: &App,
        provider: &RenderedProvider,
        iss: Option<&str>,
    ) -> Result<(), ProviderError> {
        let client = Client::new(app, provider)?;
        let judging = async { self.0.endpoints(&client).await?.judge_iss(iss) };
        self.0.asking(&client, Operation::Callback, judging).await
    }

    /// See [`crate::domain::ports::Providers`].
    pub async fn exchange(
        &self,
        app: &App,
        provider: &RenderedProvider,
        grant: &Grant<'_>,
    ) -> Result<Vouched, ProviderError> {
        let client = Client::new(app, provider)?;
        client.secret()?;
        self.0.asking(&client, Operation::Callback, self.0.exchange(&client, grant)).await
    }

    /// See [`crate::domain::ports::Providers`].
    pub async fn check_token(
        &self,
        app: &App,
        provider: &RenderedProvider,
        token: &str,
        nonce: Option<&str>,
    ) -> Result<Vouched, ProviderError> {
        let client = Client::new(app, provider)?;
        client.secret()?;
        self.0.asking(&client, Operation::Login, self.0.check_token(&client, token, nonce)).await
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
    /// Does what somebody's log-in asks a provider for.
    async fn asking<T>(
        &self,
        client: &Client<'_>,
        operation: Operation,
        work: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        let done = self.bounded(client, work).await;
        self.metrics.done(client.preset.name, operation, done.as_ref().err());
        done
    }

    /// Does something that asks a provider, one question after the other, as one of so many at once and within the time
    /// for the whole of it.
    async fn bounded<T>(
        &self,
        client: &Client<'_>,
        work: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        let _place = self.http.enter(&client.lane)?;
        timeout(WHOLE, work).await.unwrap_or(Err(Away::TooSlow.into()))
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
        if !id_token::is_signed(token) {
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
async fn get_json(http: &Http, purpose: Purpose, url: &str) -> Result<Value, ProviderError> {
    json(http, purpose, Request::get(url)).await
}

/// Asks a question without a body.
async fn json(http: &Http, purpose: Purpose, request: ::http::request::Builder) -> Result<Value, ProviderError> {
    let place = purpose.place;
    // An address of somebody's document that no request can be made to.
    let incomplete = |_| ProviderError::Answer { place, fault: Fault::Incomplete };
    let accepts = request.headers_ref().is_some_and(|headers| headers.contains_key(ACCEPT));
    let request = if accepts { request } else { request.header(ACCEPT, "application/json") };
    let answer = http.call(purpose, request.body(Default::default()).map_err(incomplete)?).await;
    let answer = answer.map_err(|error| error.at(place))?;
    answer.json().map_err(|fault| ProviderError::Answer { place, fault })
}

impl http::Answer {
    /// The body, where the answer is 200 and JSON.
    fn json(&self) -> Result<Value, Fault> {
        if self.status != StatusCode::OK {
            return Err(Fault::Status(self.status.as_u16()));
        }
        serde_json::from_slice(&self.body).map_err(|_| Fault::NotJson)
    }
}

impl From<Unusable> for ProviderError {
    fn from(unusable: Unusable) -> Self {
        Self::Unusable(unusable)
    }
}
