//! Login with a provider token: accepts only tokens that were issued for one of our clients.

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{
    Request,
    header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE},
};
use http_body_util::Full;
use oauth2::AuthType;
use serde_json::{Value, json};
use url::{Url, form_urlencoded};

use super::{
    Inner,
    client::ProviderConfig,
    discovery::Endpoints,
    id_token::{MAX_TOKEN_LENGTH, TokenOrigin},
    preset::{CheckAuthentication, CheckMethod, ProfileSource, TokenCheck, TokenLocation},
    profile::{authorization_header, claim_text, find_claim},
};
use crate::domain::identity::{
    InvalidProviderToken, InvalidResponse, ProviderEndpoint, ProviderError, UnusableReason, VerifiedIdentity,
};

/// A request that returns the client to which a token was issued; see [`TokenCheck::Endpoint`].
struct TokenCheckRequest<'a> {
    method: CheckMethod,
    url: String,
    token: TokenLocation,
    authentication: CheckAuthentication,
    valid_member: Option<&'a str>,
    client_id_members: &'a [&'a str],
    subject: Option<&'a str>,
    /// Whether the response must contain the subject.
    requires_subject: bool,
    invalid_token_statuses: &'a [u16],
    own_tokens_only: bool,
}

impl Inner {
    pub(super) async fn validate_token(
        &self,
        client: &ProviderConfig<'_>,
        token: &str,
        nonce: Option<&str>,
    ) -> Result<VerifiedIdentity, ProviderError> {
        if token.is_empty() || token.len() > MAX_TOKEN_LENGTH || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(ProviderError::InvalidToken(InvalidProviderToken::Malformed));
        }
        let endpoints = self.endpoints(client).await?;
        let result = match &endpoints.keys {
            Some(_) => self.validate_id_token(client, &endpoints, token, TokenOrigin::Login { nonce }).await?,
            None => Err(InvalidProviderToken::Malformed),
        };
        let error = match result {
            Ok(id_token) => {
                return client
                    .mapping
                    .verified_identity(id_token.authority, &[&id_token.statement])
                    .ok_or(ProviderError::InvalidToken(InvalidProviderToken::Malformed));
            }
            Err(error) => error,
        };
        match error {
            // The token is not an ID token for one of our clients. It can be an access token.
            InvalidProviderToken::Malformed
            | InvalidProviderToken::Audience
            | InvalidProviderToken::AuthorizedParty
            | InvalidProviderToken::Algorithm => {}
            InvalidProviderToken::UnknownKey
            | InvalidProviderToken::Signature
            | InvalidProviderToken::Issuer
            | InvalidProviderToken::Expired
            | InvalidProviderToken::NotYetValid
            | InvalidProviderToken::Nonce
            | InvalidProviderToken::AccessTokenHash
            | InvalidProviderToken::Unknown => return Err(ProviderError::InvalidToken(error)),
        }
        let Some(check) = token_check_request(client, &endpoints)? else {
            // If ID tokens of the provider are accepted, this token is an invalid ID token. Otherwise, no token of the
            // provider can be checked.
            return Err(if endpoints.keys.is_some() {
                ProviderError::InvalidToken(error)
            } else {
                ProviderError::NoTokenCheck
            });
        };
        if nonce.is_some() {
            // An access token has no nonce, so it cannot have the expected one.
            return Err(ProviderError::InvalidToken(InvalidProviderToken::Nonce));
        }
        let subject = self.check_token_client(client, check, token).await?;
        self.token_owner(client, &endpoints, token, subject).await
    }

    /// The owner of a token that passed the check. `checked_subject` is the subject in the response of the check, if
    /// the response has one.
    async fn token_owner(
        &self,
        client: &ProviderConfig<'_>,
        endpoints: &Endpoints,
        token: &str,
        checked_subject: Option<String>,
    ) -> Result<VerifiedIdentity, ProviderError> {
        let invalid = |reason| ProviderError::InvalidResponse { endpoint: ProviderEndpoint::UserInfo, reason };
        // Without a userinfo endpoint, nothing identifies the user.
        let url = endpoints.userinfo_endpoint.as_deref().ok_or(ProviderError::NoTokenCheck)?;
        let identity = match &client.preset.profile {
            ProfileSource::IdToken => {
                let profile = self.fetch_profile(client, url, token).await?;
                client
                    .mapping
                    .verified_identity(client.authority()?, &[&profile])
                    .ok_or(invalid(InvalidResponse::Incomplete))?
            }
            ProfileSource::Endpoint { .. } | ProfileSource::Configured => {
                self.fetch_identity(client, url, token).await?
            }
        };
        if checked_subject.is_some_and(|subject| subject != identity.subject) {
            return Err(invalid(InvalidResponse::SubjectMismatch));
        }
        Ok(identity)
    }

    /// Checks that the token was issued to one of our clients. Returns the token's subject, if the response has one.
    async fn check_token_client(
        &self,
        client: &ProviderConfig<'_>,
        check: TokenCheckRequest<'_>,
        token: &str,
    ) -> Result<Option<String>, ProviderError> {
        let invalid = |reason| ProviderError::InvalidResponse { endpoint: ProviderEndpoint::TokenCheck, reason };
        let request = http_request(client, &check, token)?;
        let response = self
            .http
            .call(client.call_target(ProviderEndpoint::TokenCheck), request)
            .await
            .map_err(|error| error.into_provider_error(ProviderEndpoint::TokenCheck))?;
        if check.invalid_token_statuses.contains(&response.status.as_u16()) {
            return Err(ProviderError::InvalidToken(InvalidProviderToken::Unknown));
        }
        let claims = response.json().map_err(invalid)?;
        if let Some(valid) = check.valid_member {
            match find_claim(&claims, valid) {
                Some(Value::Bool(true)) => {}
                Some(Value::Bool(false)) => return Err(ProviderError::InvalidToken(InvalidProviderToken::Unknown)),
                Some(_) | None => return Err(invalid(InvalidResponse::Incomplete)),
            }
        }
        let is_ours = |id: &str| {
            if check.own_tokens_only { id == client.settings.client_id } else { client.is_accepted_client(id) }
        };
        let client_ids: Vec<&Value> =
            check.client_id_members.iter().filter_map(|name| find_claim(&claims, name)).collect();
        if client_ids.is_empty() {
            return Err(invalid(InvalidResponse::Incomplete));
        }
        if !client_ids.into_iter().all(|id| claim_text(id).is_some_and(|id| is_ours(&id))) {
            return Err(ProviderError::InvalidToken(InvalidProviderToken::Audience));
        }
        let subject = check.subject.and_then(|name| find_claim(&claims, name)).and_then(claim_text);
        if subject.is_none() && check.requires_subject {
            return Err(invalid(InvalidResponse::Incomplete));
        }
        Ok(subject)
    }
}

/// The request that checks a token at this provider. `None` if the provider offers no check.
fn token_check_request<'a>(
    client: &ProviderConfig<'_>,
    endpoints: &Endpoints,
) -> Result<Option<TokenCheckRequest<'a>>, UnusableReason> {
    let introspection = |subject| {
        endpoints.introspection_endpoint.clone().map(|url| TokenCheckRequest {
            method: CheckMethod::Post,
            url,
            token: TokenLocation::Form("token"),
            authentication: match endpoints.authentication {
                AuthType::RequestBody => CheckAuthentication::Form,
                // `AuthType` is non-exhaustive, so a default is needed. Every authorization server must support Basic
                // (RFC 6749, 2.3.1).
                _ => CheckAuthentication::Basic,
            },
            valid_member: Some("active"),
            // `aud` is not in this list: `aud` names the recipients of the token, not the client to which the token was
            // issued. Another client can request tokens for our audience (RFC 7662, 2.2; RFC 8707, 2).
            client_id_members: &["client_id", "azp"],
            subject,
            // `sub` is optional (RFC 7662, 2.2).
            requires_subject: false,
            invalid_token_statuses: &[],
            own_tokens_only: false,
        })
    };
    Ok(match &client.preset.check {
        TokenCheck::None => None,
        TokenCheck::Discovered => introspection(Some("sub")),
        // `sub` of the response is not read, because it can differ from the claim that `claims.subject` names.
        TokenCheck::Configured => introspection(None),
        TokenCheck::Endpoint {
            method,
            url,
            token,
            authentication,
            valid_member,
            client_id_members,
            subject,
            invalid_token_statuses,
            own_tokens_only,
        } => {
            let id: String = form_urlencoded::byte_serialize(client.settings.client_id.as_bytes()).collect();
            Some(TokenCheckRequest {
                method: *method,
                url: url.replace("{client_id}", &id),
                token: *token,
                authentication: *authentication,
                valid_member: *valid_member,
                client_id_members,
                subject: *subject,
                requires_subject: subject.is_some(),
                invalid_token_statuses,
                own_tokens_only: *own_tokens_only,
            })
        }
    })
}

fn http_request(
    client: &ProviderConfig<'_>,
    check: &TokenCheckRequest<'_>,
    token: &str,
) -> Result<Request<Full<Bytes>>, ProviderError> {
    let incomplete =
        ProviderError::InvalidResponse { endpoint: ProviderEndpoint::TokenCheck, reason: InvalidResponse::Incomplete };
    let (id, secret) = (client.settings.client_id.as_str(), client.secret()?.expose());
    let mut url = Url::parse(&check.url).map_err(|_| incomplete)?;
    let mut form: Vec<(&str, &str)> = Vec::new();
    let mut request = Request::builder().header(ACCEPT, "application/json");
    let mut body = None;
    match check.token {
        TokenLocation::Query(name) => drop(url.query_pairs_mut().append_pair(name, token)),
        TokenLocation::Form(name) => form.push((name, token)),
        TokenLocation::Json(name) => body = Some(("application/json", json!({ name: token }).to_string())),
        TokenLocation::Header(scheme) => request = request.header(AUTHORIZATION, authorization_header(scheme, token)?),
    }
    match check.authentication {
        CheckAuthentication::None => {}
        CheckAuthentication::Basic => request = request.header(AUTHORIZATION, basic_authorization(id, secret)?),
        CheckAuthentication::Form => form.extend([("client_id", id), ("client_secret", secret)]),
        CheckAuthentication::AppToken => {
            url.query_pairs_mut().append_pair("access_token", &format!("{id}|{secret}"));
        }
    }
    if !form.is_empty() {
        let form = form_urlencoded::Serializer::new(String::new()).extend_pairs(form).finish();
        body = Some(("application/x-www-form-urlencoded", form));
    }
    request = match check.method {
        CheckMethod::Get => request.method(http::Method::GET),
        CheckMethod::Post => request.method(http::Method::POST),
    };
    let body = match body {
        Some((kind, body)) => {
            request = request.header(CONTENT_TYPE, kind);
            Full::new(Bytes::from(body))
        }
        None => Full::default(),
    };
    request.uri(url.as_str()).body(body).map_err(|_| incomplete)
}

/// Credentials for HTTP Basic (RFC 7617). OAuth endpoints require form-encoding of the ID and of the secret (RFC 6749,
/// 2.3.1). The encoding does not change letters and digits.
fn basic_authorization(id: &str, secret: &str) -> Result<http::HeaderValue, ProviderError> {
    let encoded = |part: &str| form_urlencoded::byte_serialize(part.as_bytes()).collect::<String>();
    authorization_header("Basic", &STANDARD.encode(format!("{}:{}", encoded(id), encoded(secret))))
}
