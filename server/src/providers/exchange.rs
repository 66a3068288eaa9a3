//! A code becomes a token, and the token a user.

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
    client::Client,
    discovery::Endpoints,
    http::{Http, NoAnswer, Purpose},
    id_token::{Expected, MAX_TOKEN},
    parse,
    preset::{Authentication, Profile},
    profile::{find_text, posted_name},
};
use crate::domain::identity::{Fault, Grant, Place, ProviderError, Unusable, Vouched};

/// What a token endpoint answers (RFC 6749, 5.1; OpenID Connect Core 1.0, 3.1.3.3). What else it says is not looked at:
/// providers differ in the form of `scope`.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Tokens {
    access_token: AccessToken,
    #[serde(skip, default = "bearer")]
    token_type: BasicTokenType,
    id_token: Option<IdTokenText>,
}

/// An ID token as text, which is never printed.
#[derive(Deserialize, Serialize)]
#[serde(transparent)]
struct IdTokenText(String);

type OAuthClient = oauth2::Client<
    BasicErrorResponse,
    Tokens,
    BasicTokenIntrospectionResponse,
    StandardRevocableToken,
    BasicRevocationErrorResponse,
    EndpointNotSet,
    EndpointNotSet,
    EndpointNotSet,
    EndpointNotSet,
    EndpointSet,
>;

/// The crate's requests, sent our way.
struct Sender<'a>(&'a Http, Purpose);

fn bearer() -> BasicTokenType {
    BasicTokenType::Bearer
}

// === impl Tokens ===

impl TokenResponse for Tokens {
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

impl std::fmt::Debug for IdTokenText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IdToken(…)")
    }
}

// === impl Sender ===

impl<'c> AsyncHttpClient<'c> for Sender<'_> {
    type Error = NoAnswer;
    type Future = Pin<Box<dyn Future<Output = Result<HttpResponse, NoAnswer>> + Send + 'c>>;

    fn call(&'c self, request: HttpRequest) -> Self::Future {
        Box::pin(async move {
            let answer = self.0.call(self.1, request.map(|body| Full::new(Bytes::from(body)))).await?;
            let mut response = HttpResponse::new(answer.body);
            *response.status_mut() = answer.status;
            *response.headers_mut() = answer.headers;
            Ok(response)
        })
    }
}

// === impl Inner ===

impl Inner {
    pub(super) async fn exchange(&self, client: &Client<'_>, grant: &Grant<'_>) -> Result<Vouched, ProviderError> {
        let endpoints = self.endpoints(client).await?;
        endpoints.judge_iss(grant.iss)?;
        let verifier = client.preset.pkce.then_some(grant.code_verifier);
        let tokens = self.redeem(client, &endpoints, grant.code, grant.redirect_uri, verifier).await?;
        let access_token = tokens.access_token.secret();
        match (&client.preset.profile, &endpoints.user_info) {
            (Profile::IdToken, _) => self.vouched_by_id_token(client, &endpoints, &tokens, grant).await,
            (Profile::Endpoint { .. } | Profile::Given, Some(url)) => {
                self.vouched_by_profile(client, url, access_token).await
            }
            (Profile::Endpoint { .. } | Profile::Given, None) => Err(Unusable::BadOptions.into()),
        }
    }

    async fn vouched_by_id_token(
        &self,
        client: &Client<'_>,
        endpoints: &Endpoints,
        tokens: &Tokens,
        grant: &Grant<'_>,
    ) -> Result<Vouched, ProviderError> {
        let at = |place| move |fault| ProviderError::Answer { place, fault };
        let access_token = tokens.access_token.secret();
        let text = tokens.id_token.as_ref().ok_or(at(Place::Token)(Fault::NoIdToken))?;
        let expected = Expected::Flow { nonce: grant.nonce.filter(|_| client.preset.nonce) };
        let judged = self.id_token(client, endpoints, &text.0, expected).await?;
        let judged = judged.and_then(|token| token.judge_access_token(access_token).map(|()| token));
        let token = judged.map_err(|bad| at(Place::Token)(Fault::IdToken(bad)))?;
        let mut statements = vec![token.statement];
        if let Some(url) = endpoints.user_info.as_deref().filter(|_| client.mapping.lacks(&statements[0])) {
            let profile = self.profile(client, url, access_token).await?;
            // OpenID Connect Core 1.0, 5.3.2.
            if profile.sub.as_ref() != Some(&token.subject) {
                return Err(at(Place::UserInfo)(Fault::OtherSubject));
            }
            statements.push(profile);
        }
        statements.extend(grant.posted_user.filter(|_| client.preset.form_post).and_then(posted_name));
        let statements: Vec<_> = statements.iter().collect();
        client.mapping.vouched(token.authority, &statements).ok_or(at(Place::Token)(Fault::Incomplete))
    }

    /// Redeems a code at the token endpoint.
    pub(super) async fn redeem(
        &self,
        client: &Client<'_>,
        endpoints: &Endpoints,
        code: &str,
        redirect_uri: &str,
        verifier: Option<&str>,
    ) -> Result<Tokens, ProviderError> {
        let secret = match client.preset.authentication {
            Authentication::AppleKey => self.apple.get(client, self.env.now())?,
            Authentication::Basic | Authentication::Post | Authentication::Discovered | Authentication::Given => {
                client.secret()?.clone()
            }
        };
        let at_token = |fault| ProviderError::Answer { place: Place::Token, fault };
        let url = TokenUrl::new(endpoints.token.clone()).map_err(|_| at_token(Fault::Incomplete))?;
        let redirect = RedirectUrl::new(redirect_uri.to_owned()).map_err(|_| Unusable::BadOptions)?;
        let oauth: OAuthClient = oauth2::Client::new(ClientId::new(client.settings.client_id.clone()))
            .set_client_secret(ClientSecret::new(secret.expose().to_owned()))
            .set_auth_type(endpoints.authentication.clone())
            .set_token_uri(url)
            .set_redirect_uri(redirect);
        let mut request = oauth.exchange_code(AuthorizationCode::new(code.to_owned()));
        if let Some(verifier) = verifier {
            request = request.set_pkce_verifier(PkceCodeVerifier::new(verifier.to_owned()));
        }
        let sender = Sender(&self.http, client.at(Place::Token));
        let tokens = request.request_async(&sender).await.map_err(|error| refusal(client, error))?;
        let access_token = tokens.access_token.secret();
        if access_token.is_empty() || access_token.len() > MAX_TOKEN {
            return Err(at_token(Fault::Incomplete));
        }
        Ok(tokens)
    }
}

/// What a token endpoint's refusal says, in our words.
fn refusal(client: &Client<'_>, error: RequestTokenError<NoAnswer, BasicErrorResponse>) -> ProviderError {
    let fault = match error {
        RequestTokenError::Request(error) => return error.at(Place::Token),
        RequestTokenError::ServerResponse(response) => refused(client, response.error().as_ref()),
        // Some refuse with status 200.
        RequestTokenError::Parse(_, body) => match parse(&body) {
            // RFC 6749's `error`; Facebook's has a number in it, Twitch has only words.
            Ok(answer) => {
                let said = ["error", "/error/code", "message"].into_iter().find_map(|name| find_text(&answer, name));
                said.map_or(Fault::Incomplete, |error| refused(client, &error))
            }
            Err(fault) => fault,
        },
        // An empty answer, or one that says that it is no JSON.
        RequestTokenError::Other(_) => Fault::NotJson,
    };
    ProviderError::Answer { place: Place::Token, fault }
}

/// RFC 6749, 5.2, and the provider's own words for the same.
fn refused(client: &Client<'_>, error: &str) -> Fault {
    let refusals = &client.preset.refusals;
    let is = |kind: BasicErrorResponseType| error == kind.as_ref();
    if is(BasicErrorResponseType::InvalidGrant) || refusals.code.contains(&error) {
        Fault::CodeRefused
    } else if is(BasicErrorResponseType::InvalidClient)
        || is(BasicErrorResponseType::UnauthorizedClient)
        || refusals.client.contains(&error)
    {
        Fault::ClientRefused
    } else {
        Fault::Refused
    }
}
