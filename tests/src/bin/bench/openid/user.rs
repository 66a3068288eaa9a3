//! A user who is logged in at a provider, and the requests of a program for this user.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use hdrhistogram::Histogram;
use http::StatusCode;
use http_body_util::Full;
use serde::Deserialize;
use url::{Url, form_urlencoded};

use super::{Operation, REDIRECT_URL};
use crate::{
    http_client::{encode_form, exchange, get, post_form},
    logins::{Connection, connect},
    measurements::{histogram, micros_of},
};

/// The maximum number of redirects from an authorization request to the client.
const MAX_REDIRECTS: usize = 5;

/// A provider and one of its clients.
pub(super) struct Provider {
    pub(super) server: SocketAddr,
    /// The path of the authorization endpoint.
    pub(super) authorize: String,
    /// The path of the token endpoint.
    pub(super) token: String,
    pub(super) client_id: String,
    pub(super) secret: String,
}

/// A user at a client address.
pub(super) struct ProviderUser {
    provider: Arc<Provider>,
    from: IpAddr,
    /// The value of the header `Cookie`.
    cookies: String,
    scope: &'static str,
    connection: Option<Connection>,
    /// The refresh token of the session that [`Self::open_session`] opened.
    refresh_token: Option<String>,
}

/// The fields of a token response that the benchmark reads.
#[derive(Deserialize)]
pub(super) struct TokenResponse {
    pub(super) id_token: String,
    refresh_token: Option<String>,
}

// === impl Provider ===

impl Provider {
    /// Path and query of an authorization request.
    pub(super) fn authorization_path(&self, scope: &str) -> String {
        let query = encode_form(&[
            ("client_id", &self.client_id),
            ("redirect_uri", REDIRECT_URL),
            ("response_type", "code"),
            ("scope", scope),
            ("state", "0123456789abcdef"),
            ("nonce", "fedcba9876543210"),
        ]);
        format!("{}?{query}", self.authorize)
    }

    /// The client's credentials, as the value of the header `Authorization`.
    fn authorization(&self) -> String {
        let encode = |text: &str| form_urlencoded::byte_serialize(text.as_bytes()).collect::<String>();
        format!("Basic {}", BASE64_STANDARD.encode(format!("{}:{}", encode(&self.client_id), encode(&self.secret))))
    }
}

// === impl ProviderUser ===

impl ProviderUser {
    /// `scope` contains the scopes that the user's repeated exchanges request.
    pub(super) fn new(
        provider: &Arc<Provider>,
        from: IpAddr,
        cookies: &BTreeMap<String, String>,
        scope: &'static str,
    ) -> Self {
        let pairs: Vec<String> = cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        Self {
            provider: Arc::clone(provider),
            from,
            cookies: pairs.join("; "),
            scope,
            connection: None,
            refresh_token: None,
        }
    }

    pub(super) fn server(&self) -> SocketAddr {
        self.provider.server
    }

    pub(super) fn has_session(&self) -> bool {
        self.refresh_token.is_some()
    }

    /// Repeats an operation until `end`, on a new connection.
    pub(super) async fn repeat_until(mut self, end: Instant, operation: Operation) -> Result<(Self, Histogram<u64>)> {
        self.connection = None;
        let mut latency = histogram();
        while Instant::now() < end {
            let started = Instant::now();
            match operation {
                Operation::Exchange => drop(self.exchange(self.scope).await?),
                Operation::Refresh => self.refresh().await?,
            }
            latency.record(micros_of(started.elapsed()))?;
        }
        Ok((self, latency))
    }

    /// Authorizes the client, and exchanges the code.
    pub(super) async fn exchange(&mut self, scope: &str) -> Result<TokenResponse> {
        let code = self.authorize(scope).await?;
        let fields = [("grant_type", "authorization_code"), ("code", code.as_str()), ("redirect_uri", REDIRECT_URL)];
        self.request_tokens(&fields).await
    }

    /// Sends an authorization request with the cookies of the user. Returns the code.
    pub(super) async fn authorize(&mut self, scope: &str) -> Result<String> {
        let server = self.provider.server;
        let own = format!("http://{server}");
        let mut path = self.provider.authorization_path(scope);
        for _ in 0..MAX_REDIRECTS {
            let request = get(server, &path, &self.cookies)?;
            let response = exchange(self.connection().await?, request).await?;
            let location = response.header("location");
            ensure!(response.status.is_redirection(), "{path} returned {} {}", response.status, response.text());
            if location.starts_with(REDIRECT_URL) {
                let location: Url = location.parse()?;
                let code = location.query_pairs().find(|(name, _)| name == "code");
                return Ok(code.with_context(|| format!("no code in {location}"))?.1.into_owned());
            }
            location.strip_prefix(&own).unwrap_or(location).clone_into(&mut path);
        }
        bail!("more than {MAX_REDIRECTS} redirects, the last to {path}")
    }

    /// Opens the session that `refresh` refreshes.
    pub(super) async fn open_session(&mut self, scope: &str) -> Result<()> {
        let tokens = self.exchange(scope).await?;
        self.refresh_token = Some(tokens.refresh_token.context("the provider returns no refresh token")?);
        Ok(())
    }

    async fn refresh(&mut self) -> Result<()> {
        let token = self.refresh_token.take().context("the user has a session")?;
        let tokens = self.request_tokens(&[("grant_type", "refresh_token"), ("refresh_token", &token)]).await?;
        self.refresh_token = Some(tokens.refresh_token.unwrap_or(token));
        Ok(())
    }

    async fn request_tokens(&mut self, fields: &[(&str, &str)]) -> Result<TokenResponse> {
        let provider = &self.provider;
        let request = post_form(provider.server, &provider.token, "").header("authorization", provider.authorization());
        let request = request.body(Full::from(encode_form(fields)))?;
        let response = exchange(self.connection().await?, request).await?;
        ensure!(response.status == StatusCode::OK, "token returned {} {}", response.status, response.text());
        Ok(serde_json::from_slice(&response.body)?)
    }

    async fn connection(&mut self) -> Result<&mut Connection> {
        if self.connection.is_none() {
            self.connection = Some(connect(self.provider.server, self.from).await?);
        }
        self.connection.as_mut().context("it was opened above")
    }
}
