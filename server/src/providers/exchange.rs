//! Exchanges an authorization code for tokens, and gets the user's identity with the tokens.

use std::{future::Future, pin::Pin};

use bytes::Bytes;
use http_body_util::Full;
use oauth2::{
    AccessToken, AsyncHttpClient, AuthorizationCode, ClientId, ClientSecret, EndpointNotSet, EndpointSet, HttpRequest,
    HttpResponse, PkceCodeVerifier, RedirectUrl, RefreshToken, RequestTokenError, Scope, StandardRevocableToken,
    TokenResponse, TokenUrl,
    basic::{
        BasicErrorResponse, BasicErrorResponseType, BasicRevocationErrorResponse, BasicTokenIntrospectionResponse,
        BasicTokenType,
    },
};
use serde::{Deserialize, Serialize};

use super::{
    Inner,
    client::ProviderConfig,
    discovery::Endpoints,
    http::{CallTarget, HttpCallError, ProviderHttp},
    id_token::{MAX_TOKEN_LENGTH, TokenOrigin},
    parse,
    preset::{ClientAuthenticationMethod, ProfileSource},
    profile::{find_claim_text, posted_name},
};
use crate::domain::identity::{
    AuthorizationCodeGrant, InvalidResponse, ProviderEndpoint, ProviderError, UnusableReason, VerifiedIdentity,
};

/// The response of a token endpoint (RFC 6749, 5.1; OpenID Connect Core 1.0, 3.1.3.3). Other members, such as `scope`,
/// are not read, because their format differs between providers.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct ProviderTokens {
    access_token: AccessToken,
    #[serde(skip, default = "bearer_type")]
    token_type: BasicTokenType,
    id_token: Option<EncodedIdToken>,
}

/// An encoded ID token. `Debug` does not show it.
#[derive(Deserialize, Serialize)]
#[serde(transparent)]
struct EncodedIdToken(String);

type OAuthClient = oauth2::Client<
    BasicErrorResponse,
    ProviderTokens,
    BasicTokenIntrospectionResponse,
    StandardRevocableToken,
    BasicRevocationErrorResponse,
    EndpointNotSet,
    EndpointNotSet,
    EndpointNotSet,
    EndpointNotSet,
    EndpointSet,
>;

/// Sends the requests of the `oauth2` crate through [`ProviderHttp`].
struct OAuthHttpClient<'a>(&'a ProviderHttp, CallTarget);

fn bearer_type() -> BasicTokenType {
    BasicTokenType::Bearer
}

// === impl ProviderTokens ===

impl TokenResponse for ProviderTokens {
    type TokenType = BasicTokenType;

    fn access_token(&self) -> &AccessToken {
        &self.access_token
    }

    fn token_type(&self) -> &BasicTokenType {
        &self.token_type
    }

    fn expires_in(&self) -> Option<std::time::Duration> {
        None
    }

    fn refresh_token(&self) -> Option<&RefreshToken> {
        None
    }

    fn scopes(&self) -> Option<&Vec<Scope>> {
        None
    }
}

impl std::fmt::Debug for EncodedIdToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EncodedIdToken(…)")
    }
}

// === impl OAuthHttpClient ===

impl<'c> AsyncHttpClient<'c> for OAuthHttpClient<'_> {
    type Error = HttpCallError;
    type Future = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpCallError>> + Send + 'c>>;

    fn call(&'c self, request: HttpRequest) -> Self::Future {
        Box::pin(async move {
            let received = self.0.call(self.1, request.map(|body| Full::new(Bytes::from(body)))).await?;
            let mut response = HttpResponse::new(received.body);
            *response.status_mut() = received.status;
            *response.headers_mut() = received.headers;
            Ok(response)
        })
    }
}

// === impl Inner ===

impl Inner {
    pub(super) async fn exchange_code(
        &self,
        client: &ProviderConfig<'_>,
        grant: &AuthorizationCodeGrant<'_>,
    ) -> Result<VerifiedIdentity, ProviderError> {
        let endpoints = self.endpoints(client).await?;
        endpoints.validate_iss(grant.iss)?;
        let verifier = client.preset.uses_pkce.then_some(grant.code_verifier);
        let tokens = self.redeem_code(client, &endpoints, grant.code, grant.redirect_uri, verifier).await?;
        let access_token = tokens.access_token.secret();
        match (&client.preset.profile, &endpoints.userinfo_endpoint) {
            (ProfileSource::IdToken, _) => self.identity_from_id_token(client, &endpoints, &tokens, grant).await,
            (ProfileSource::Endpoint { .. } | ProfileSource::Configured, Some(url)) => {
                self.fetch_identity(client, url, access_token).await
            }
            (ProfileSource::Endpoint { .. } | ProfileSource::Configured, None) => {
                Err(UnusableReason::InvalidOptions.into())
            }
        }
    }

    async fn identity_from_id_token(
        &self,
        client: &ProviderConfig<'_>,
        endpoints: &Endpoints,
        tokens: &ProviderTokens,
        grant: &AuthorizationCodeGrant<'_>,
    ) -> Result<VerifiedIdentity, ProviderError> {
        let at = |endpoint| move |reason| ProviderError::InvalidResponse { endpoint, reason };
        let access_token = tokens.access_token.secret();
        let encoded = tokens.id_token.as_ref().ok_or(at(ProviderEndpoint::Token)(InvalidResponse::MissingIdToken))?;
        let expected = TokenOrigin::Flow { nonce: grant.nonce.filter(|_| client.preset.supports_nonce) };
        let result = self.validate_id_token(client, endpoints, &encoded.0, expected).await?;
        let result = result.and_then(|token| token.validate_access_token_hash(access_token).map(|()| token));
        let token = result.map_err(|error| at(ProviderEndpoint::Token)(InvalidResponse::IdToken(error)))?;
        let mut statements = vec![token.statement];
        if let Some(url) =
            endpoints.userinfo_endpoint.as_deref().filter(|_| client.mapping.has_missing_claims(&statements[0]))
        {
            let profile = self.fetch_profile(client, url, access_token).await?;
            // The profile must have the subject of the ID token (OpenID Connect Core 1.0, 5.3.2).
            if profile.sub.as_ref() != Some(&token.subject) {
                return Err(at(ProviderEndpoint::UserInfo)(InvalidResponse::SubjectMismatch));
            }
            statements.push(profile);
        }
        statements.extend(grant.posted_user.filter(|_| client.preset.uses_form_post).and_then(posted_name));
        let statements: Vec<_> = statements.iter().collect();
        client
            .mapping
            .verified_identity(token.authority, &statements)
            .ok_or(at(ProviderEndpoint::Token)(InvalidResponse::Incomplete))
    }

    /// Redeems a code at the token endpoint.
    pub(super) async fn redeem_code(
        &self,
        client: &ProviderConfig<'_>,
        endpoints: &Endpoints,
        code: &str,
        redirect_uri: &str,
        verifier: Option<&str>,
    ) -> Result<ProviderTokens, ProviderError> {
        let secret = match client.preset.authentication {
            ClientAuthenticationMethod::AppleKey => self.apple.get(client, self.env.now())?,
            ClientAuthenticationMethod::Basic
            | ClientAuthenticationMethod::Post
            | ClientAuthenticationMethod::Discovered
            | ClientAuthenticationMethod::Configured => client.secret()?.clone(),
        };
        let invalid = |reason| ProviderError::InvalidResponse { endpoint: ProviderEndpoint::Token, reason };
        let url = TokenUrl::new(endpoints.token_endpoint.clone()).map_err(|_| invalid(InvalidResponse::Incomplete))?;
        let redirect = RedirectUrl::new(redirect_uri.to_owned()).map_err(|_| UnusableReason::InvalidOptions)?;
        let oauth: OAuthClient = oauth2::Client::new(ClientId::new(client.settings.client_id.clone()))
            .set_client_secret(ClientSecret::new(secret.expose().to_owned()))
            .set_auth_type(endpoints.authentication.clone())
            .set_token_uri(url)
            .set_redirect_uri(redirect);
        let mut request = oauth.exchange_code(AuthorizationCode::new(code.to_owned()));
        if let Some(verifier) = verifier {
            request = request.set_pkce_verifier(PkceCodeVerifier::new(verifier.to_owned()));
        }
        let sender = OAuthHttpClient(&self.http, client.call_target(ProviderEndpoint::Token));
        let tokens = request.request_async(&sender).await.map_err(|error| token_endpoint_error(client, error))?;
        let access_token = tokens.access_token.secret();
        if access_token.is_empty() || access_token.len() > MAX_TOKEN_LENGTH {
            return Err(invalid(InvalidResponse::Incomplete));
        }
        Ok(tokens)
    }
}

/// Converts the error of a call to a token endpoint into a [`ProviderError`].
fn token_endpoint_error(
    client: &ProviderConfig<'_>,
    error: RequestTokenError<HttpCallError, BasicErrorResponse>,
) -> ProviderError {
    let reason = match error {
        RequestTokenError::Request(error) => return error.into_provider_error(ProviderEndpoint::Token),
        RequestTokenError::ServerResponse(response) => reason_of_error_code(client, response.error().as_ref()),
        // Some providers send errors with status 200.
        RequestTokenError::Parse(_, body) => match parse(&body) {
            // `error` is an error code (RFC 6749, 5.2). At Facebook, `error` is an object with the number `code`.
            // Twitch sends `message` instead of `error`.
            Ok(claims) => {
                let error_code =
                    ["error", "/error/code", "message"].into_iter().find_map(|name| find_claim_text(&claims, name));
                error_code.map_or(InvalidResponse::Incomplete, |error| reason_of_error_code(client, &error))
            }
            Err(reason) => reason,
        },
        // An empty response, or a content type that is not JSON.
        RequestTokenError::Other(_) => InvalidResponse::NotJson,
    };
    ProviderError::InvalidResponse { endpoint: ProviderEndpoint::Token, reason }
}

/// The meaning of an error code. The code is from RFC 6749, 5.2, or is the provider's own.
fn reason_of_error_code(client: &ProviderConfig<'_>, error: &str) -> InvalidResponse {
    let codes = &client.preset.error_codes;
    let is = |kind: BasicErrorResponseType| error == kind.as_ref();
    if is(BasicErrorResponseType::InvalidGrant) || codes.invalid_code.contains(&error) {
        InvalidResponse::CodeRejected
    } else if is(BasicErrorResponseType::InvalidClient)
        || is(BasicErrorResponseType::UnauthorizedClient)
        || codes.invalid_client.contains(&error)
    {
        InvalidResponse::ClientRejected
    } else {
        InvalidResponse::RequestRejected
    }
}
