//! Discovery documents (OpenID Connect Discovery 1.0), key sets, and the endpoints of a provider.

use std::sync::Arc;

use oauth2::AuthType;
use serde::Deserialize;

use super::{
    Inner,
    cache::MemorySize,
    client::{MICROSOFT_BASE_URL, MICROSOFT_CONSUMERS_TENANT, ProviderConfig},
    id_token::{KeySet, allowed_algorithms},
    preset::{ClientAuthenticationMethod, EndpointSource, IssuerSource, ProfileSource, TokenCheck},
};
use crate::domain::identity::{InvalidCallback, InvalidResponse, ProviderEndpoint, ProviderError, UnusableReason};

/// Maximum length of a URL in a document, in bytes. It bounds the memory of cached documents, which contain the URLs.
pub(super) const MAX_URL_LENGTH: usize = 2048;

/// The few small values of a discovery document that the cache keeps.
#[derive(Clone, Debug)]
pub struct Metadata {
    pub(super) issuer: String,
    authorization_endpoint: String,
    token_endpoint: String,
    jwks_uri: String,
    userinfo_endpoint: Option<String>,
    introspection_endpoint: Option<String>,
    algorithms: Vec<jsonwebtoken::Algorithm>,
    supports_basic: bool,
    announces_iss: bool,
}

/// The members of a discovery document that are read.
#[derive(Deserialize)]
struct Document {
    issuer: String,
    authorization_endpoint: String,
    token_endpoint: String,
    jwks_uri: String,
    userinfo_endpoint: Option<String>,
    introspection_endpoint: Option<String>,
    #[serde(default)]
    id_token_signing_alg_values_supported: Vec<String>,
    token_endpoint_auth_methods_supported: Option<Vec<String>>,
    /// Whether the provider sends `iss` in callbacks (RFC 9207, 3).
    #[serde(default)]
    authorization_response_iss_parameter_supported: bool,
}

/// The endpoints of a provider, for one Provider resource.
#[derive(Clone, Debug)]
pub(super) struct Endpoints {
    pub(super) authorization_endpoint: String,
    pub(super) token_endpoint: String,
    pub(super) authentication: AuthType,
    pub(super) userinfo_endpoint: Option<String>,
    pub(super) introspection_endpoint: Option<String>,
    /// `None` if no ID token of the provider is used.
    pub(super) keys: Option<KeySetSource>,
    pub(super) issuers: AcceptedIssuers,
    /// Whether the provider announces that every callback has `iss` (RFC 9207, 3).
    pub(super) announces_iss: bool,
}

/// The URL of the key set that verifies ID tokens, and the allowed algorithms.
#[derive(Clone, Debug)]
pub(super) struct KeySetSource {
    pub(super) url: String,
    pub(super) algorithms: Vec<jsonwebtoken::Algorithm>,
}

/// The accepted values of `iss`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AcceptedIssuers {
    /// The provider has no documented issuer: no ID token is accepted, and `iss` in callbacks is not checked.
    Unknown,
    /// The issuer, and other names for it.
    Known { issuer: String, aliases: &'static [&'static str] },
    /// Microsoft, for more than one tenant: the token's `tid` replaces `{tenantid}` in `template`.
    MicrosoftTenants { template: String, allows_consumers: bool },
}

// === impl Metadata ===

impl Metadata {
    /// Parses a document within [`super::RESPONSE_BOUNDS`]. Makes only checks that do not depend on the Provider.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidResponse> {
        let document = Document::deserialize(super::parse(body)?).map_err(|_| InvalidResponse::Incomplete)?;
        let metadata = Self {
            issuer: document.issuer,
            authorization_endpoint: document.authorization_endpoint,
            token_endpoint: document.token_endpoint,
            jwks_uri: document.jwks_uri,
            userinfo_endpoint: document.userinfo_endpoint,
            introspection_endpoint: document.introspection_endpoint,
            algorithms: allowed_algorithms(&document.id_token_signing_alg_values_supported),
            // Without this member the method is Basic (RFC 8414, 2).
            supports_basic: document
                .token_endpoint_auth_methods_supported
                .is_none_or(|methods| methods.iter().any(|method| method == "client_secret_basic")),
            announces_iss: document.authorization_response_iss_parameter_supported,
        };
        let is_long = metadata.urls().chain([&*metadata.issuer]).any(|url| url.len() > MAX_URL_LENGTH);
        if is_long { Err(InvalidResponse::UrlTooLong) } else { Ok(metadata) }
    }

    pub(super) fn urls(&self) -> impl Iterator<Item = &str> {
        let more = [&self.userinfo_endpoint, &self.introspection_endpoint].into_iter().flatten();
        [&self.authorization_endpoint, &self.token_endpoint, &self.jwks_uri].into_iter().chain(more).map(String::as_str)
    }

    fn preferred_authentication(&self) -> AuthType {
        if self.supports_basic { AuthType::BasicAuth } else { AuthType::RequestBody }
    }
}

impl MemorySize for Metadata {
    fn memory_size(&self) -> usize {
        size_of::<Self>() + self.issuer.len() + self.urls().map(str::len).sum::<usize>()
    }
}

// === impl AcceptedIssuers ===

impl AcceptedIssuers {
    /// The authority of an identity with this `iss` in its token. `None` if `iss` is not accepted.
    pub(super) fn authority(&self, iss: &str, tenant: Option<&str>) -> Option<String> {
        match self {
            Self::Unknown => None,
            Self::Known { issuer, aliases } => (iss == issuer || aliases.contains(&iss)).then(|| issuer.clone()),
            Self::MicrosoftTenants { template, allows_consumers } => {
                let tenant = tenant.filter(|tenant| {
                    is_tenant_id(tenant) && (*allows_consumers || *tenant != MICROSOFT_CONSUMERS_TENANT)
                })?;
                (template.replace("{tenantid}", tenant) == iss).then(|| iss.to_owned())
            }
        }
    }

    /// Whether `iss` in a callback is accepted (RFC 9207, 2.4).
    fn is_valid_in_callback(&self, iss: &str) -> bool {
        match self {
            Self::Unknown => true,
            Self::Known { issuer, aliases } => iss == issuer || aliases.contains(&iss),
            Self::MicrosoftTenants { template, .. } => {
                template.split_once("{tenantid}").is_some_and(|(before, after)| {
                    iss.strip_prefix(before).and_then(|rest| rest.strip_suffix(after)).is_some_and(is_tenant_id)
                })
            }
        }
    }
}

/// Whether `tenant` is a tenant ID: a UUID in lower case.
pub(super) fn is_tenant_id(tenant: &str) -> bool {
    uuid::Uuid::try_parse(tenant).is_ok_and(|uuid| uuid.to_string() == tenant)
}

// === impl Endpoints ===

impl Endpoints {
    /// Validates `iss` in a callback. If `iss` is present, its value must be accepted. If the provider announces `iss`,
    /// it must be present.
    pub(super) fn validate_iss(&self, iss: Option<&str>) -> Result<(), ProviderError> {
        match iss {
            Some(iss) if !self.issuers.is_valid_in_callback(iss) => {
                Err(ProviderError::InvalidCallback(InvalidCallback::IssuerMismatch))
            }
            None if self.announces_iss => Err(ProviderError::InvalidCallback(InvalidCallback::MissingIssuer)),
            Some(_) | None => Ok(()),
        }
    }
}

// === impl Inner ===

impl Inner {
    /// The endpoints of the provider. Reads the discovery document if the preset uses one.
    pub(super) async fn endpoints(&self, client: &ProviderConfig<'_>) -> Result<Endpoints, ProviderError> {
        match &client.preset.endpoints {
            EndpointSource::Discovered { issuer, aliases } => self.discovered_endpoints(client, *issuer, aliases).await,
            EndpointSource::Fixed { issuer, authorization, token, .. } => Ok(Endpoints {
                authorization_endpoint: (*authorization).to_owned(),
                token_endpoint: (*token).to_owned(),
                authentication: client_authentication(client, None)?,
                userinfo_endpoint: match &client.preset.profile {
                    ProfileSource::Endpoint { url, .. } => Some((*url).to_owned()),
                    ProfileSource::IdToken | ProfileSource::Configured => None,
                },
                introspection_endpoint: None,
                keys: None,
                issuers: issuer.map_or(AcceptedIssuers::Unknown, |issuer| AcceptedIssuers::Known {
                    issuer: issuer.to_owned(),
                    aliases: &[],
                }),
                announces_iss: false,
            }),
            EndpointSource::Configured => Ok(Endpoints {
                authorization_endpoint: client.required_option("authorizationURL")?.to_owned(),
                token_endpoint: client.required_option("tokenURL")?.to_owned(),
                authentication: client_authentication(client, None)?,
                userinfo_endpoint: Some(client.required_option("userInfoURL")?.to_owned()),
                introspection_endpoint: client.option("introspectionURL").map(str::to_owned),
                keys: None,
                issuers: AcceptedIssuers::Unknown,
                announces_iss: false,
            }),
        }
    }

    async fn discovered_endpoints(
        &self,
        client: &ProviderConfig<'_>,
        issuer: IssuerSource,
        aliases: &'static [&'static str],
    ) -> Result<Endpoints, ProviderError> {
        let (expected_issuer, url) = client.discovery_url(issuer)?;
        let metadata = self.metadata(client, &url).await?;
        let invalid = |reason| ProviderError::InvalidResponse { endpoint: ProviderEndpoint::Discovery, reason };
        let issuers = match issuer {
            IssuerSource::MicrosoftTenant => {
                microsoft_issuers(client, &metadata.issuer).ok_or(invalid(InvalidResponse::IssuerMismatch))?
            }
            IssuerSource::Fixed(_) | IssuerSource::Option(_) => {
                // The document must name the issuer for which it was fetched (OpenID Connect Discovery 1.0, 4.3).
                if metadata.issuer != expected_issuer && !aliases.contains(&metadata.issuer.as_str()) {
                    return Err(invalid(InvalidResponse::IssuerMismatch));
                }
                AcceptedIssuers::Known { issuer: expected_issuer.into_owned(), aliases }
            }
        };
        Ok(Endpoints {
            authorization_endpoint: metadata.authorization_endpoint.clone(),
            token_endpoint: metadata.token_endpoint.clone(),
            authentication: client_authentication(client, Some(&metadata))?,
            userinfo_endpoint: metadata.userinfo_endpoint.clone(),
            introspection_endpoint: match client.preset.check {
                TokenCheck::Discovered => metadata.introspection_endpoint.clone(),
                TokenCheck::None | TokenCheck::Configured | TokenCheck::Endpoint { .. } => None,
            },
            keys: Some(KeySetSource { url: metadata.jwks_uri.clone(), algorithms: metadata.algorithms.clone() }),
            issuers,
            announces_iss: metadata.announces_iss,
        })
    }

    async fn metadata(&self, client: &ProviderConfig<'_>, url: &str) -> Result<Arc<Metadata>, ProviderError> {
        self.metadata.get(url, self.fetch_metadata(client, url)).await
    }

    /// Fetches a discovery document, without the cache.
    pub(super) fn fetch_metadata(
        &self,
        client: &ProviderConfig<'_>,
        url: &str,
    ) -> impl Future<Output = Result<Metadata, ProviderError>> + Send + use<> {
        let (http, target, url) =
            (Arc::clone(&self.http), client.call_target(ProviderEndpoint::Discovery), url.to_owned());
        // The fetch can outlive its caller, so it has a clone of the permit until it ends.
        let permit = client.permit.clone();
        async move {
            let _permit = permit;
            let response = super::fetch(&http, target, &url).await?;
            let invalid = |reason| ProviderError::InvalidResponse { endpoint: ProviderEndpoint::Discovery, reason };
            let metadata = response.success_body().and_then(Metadata::parse).map_err(invalid)?;
            if metadata.urls().any(|url| !http.allows_url(url)) {
                return Err(invalid(InvalidResponse::NotHttps));
            }
            Ok(metadata)
        }
    }

    /// The key set at `url`.
    pub(super) async fn keys(&self, client: &ProviderConfig<'_>, url: &str) -> Result<Arc<KeySet>, ProviderError> {
        self.keys.get(url, self.fetch_keys(client, url)).await
    }

    /// Returns a newer key set than `stale`, under the conditions of [`super::cache::DocumentCache::get_newer`].
    pub(super) async fn newer_keys(
        &self,
        client: &ProviderConfig<'_>,
        url: &str,
        stale: &Arc<KeySet>,
    ) -> Option<Arc<KeySet>> {
        self.keys.get_newer(url, stale, self.fetch_keys(client, url)).await
    }

    /// Fetches a key set, without the cache.
    pub(super) fn fetch_keys(
        &self,
        client: &ProviderConfig<'_>,
        url: &str,
    ) -> impl Future<Output = Result<KeySet, ProviderError>> + Send + use<> {
        let (http, target, url) = (Arc::clone(&self.http), client.call_target(ProviderEndpoint::Keys), url.to_owned());
        let permit = client.permit.clone();
        async move {
            let _permit = permit;
            let response = super::fetch(&http, target, &url).await?;
            let invalid = |reason| ProviderError::InvalidResponse { endpoint: ProviderEndpoint::Keys, reason };
            response.success_body().and_then(KeySet::parse).map_err(invalid)
        }
    }
}

fn client_authentication(client: &ProviderConfig<'_>, metadata: Option<&Metadata>) -> Result<AuthType, UnusableReason> {
    Ok(match client.preset.authentication {
        ClientAuthenticationMethod::Basic => AuthType::BasicAuth,
        ClientAuthenticationMethod::Post | ClientAuthenticationMethod::AppleKey => AuthType::RequestBody,
        ClientAuthenticationMethod::Discovered => {
            metadata.map_or(AuthType::BasicAuth, Metadata::preferred_authentication)
        }
        ClientAuthenticationMethod::Configured => match client.option("clientAuthentication") {
            Some("Basic") | None => AuthType::BasicAuth,
            Some("Post") => AuthType::RequestBody,
            Some(_) => return Err(UnusableReason::InvalidOptions),
        },
    })
}

/// The accepted issuers, from the `issuer` in Microsoft's discovery document. For the tenants `common` and
/// `organizations`, `issuer` is a template. For any other tenant, `issuer` contains the tenant ID, even if the Provider
/// names the tenant by its domain.
fn microsoft_issuers(client: &ProviderConfig<'_>, issuer: &str) -> Option<AcceptedIssuers> {
    let tenant = issuer.strip_prefix(MICROSOFT_BASE_URL)?.strip_suffix("/v2.0")?;
    if tenant == "{tenantid}" {
        let allows_consumers = client.option("tenant") != Some("organizations");
        Some(AcceptedIssuers::MicrosoftTenants { template: issuer.to_owned(), allows_consumers })
    } else {
        is_tenant_id(tenant).then(|| AcceptedIssuers::Known { issuer: issuer.to_owned(), aliases: &[] })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(change: Value) -> Result<Metadata, InvalidResponse> {
        let mut document = json!({
            "issuer": "https://id.example", "authorization_endpoint": "https://id.example/a",
            "token_endpoint": "https://id.example/t", "jwks_uri": "https://id.example/k",
        });
        document.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        Metadata::parse(document.to_string().as_bytes())
    }

    #[test]
    fn only_the_used_members_of_a_document_are_kept() {
        let claims: Vec<String> = (0..1000).map(|number| format!("claim-{number}")).collect();
        let algorithms = vec!["RS256"; 900];
        let metadata =
            parse(json!({ "claims_supported": claims, "id_token_signing_alg_values_supported": algorithms })).unwrap();
        assert!(metadata.memory_size() < 500, "{}", metadata.memory_size());
        assert_eq!(metadata.algorithms, [jsonwebtoken::Algorithm::RS256]);
    }

    #[test]
    fn the_length_of_a_cached_url_is_bounded() {
        let url_of_length =
            |length: usize| format!("https://id.example/{}", "x".repeat(length - "https://id.example/".len()));
        for name in [
            "issuer",
            "authorization_endpoint",
            "token_endpoint",
            "jwks_uri",
            "userinfo_endpoint",
            "introspection_endpoint",
        ] {
            assert!(parse(json!({ name: url_of_length(2048) })).is_ok(), "{name}");
            assert_eq!(parse(json!({ name: url_of_length(2049) })).err(), Some(InvalidResponse::UrlTooLong), "{name}");
        }
    }

    #[test]
    fn a_document_out_of_bounds_is_invalid() {
        let mut deep = json!(0);
        for _ in 0..20 {
            deep = json!([deep]);
        }
        assert_eq!(parse(json!({ "more": deep })).err(), Some(InvalidResponse::TooComplex));
        assert_eq!(parse(json!({ "more": vec![0; 2000] })).err(), Some(InvalidResponse::TooComplex));
        assert_eq!(Metadata::parse(br#"{"issuer": "a", "issuer": "b"}"#).err(), Some(InvalidResponse::NotJson));
        assert_eq!(Metadata::parse(b"[]").err(), Some(InvalidResponse::Incomplete));
    }

    const TENANT: &str = "72f988bf-86f1-41af-91ab-2d7cd011db47";

    #[test]
    fn an_issuer_template_accepts_only_tenant_ids() {
        let template = format!("{MICROSOFT_BASE_URL}{{tenantid}}/v2.0");
        let all_tenants = AcceptedIssuers::MicrosoftTenants { template: template.clone(), allows_consumers: true };
        let issuer_of = |tenant: &str| format!("{MICROSOFT_BASE_URL}{tenant}/v2.0");
        assert_eq!(all_tenants.authority(&issuer_of(TENANT), Some(TENANT)), Some(issuer_of(TENANT)));
        assert_eq!(
            all_tenants.authority(&issuer_of(MICROSOFT_CONSUMERS_TENANT), Some(MICROSOFT_CONSUMERS_TENANT)),
            Some(issuer_of(MICROSOFT_CONSUMERS_TENANT))
        );
        for (iss, tid) in [
            (issuer_of(TENANT), None),
            (issuer_of(TENANT), Some(MICROSOFT_CONSUMERS_TENANT)),
            (issuer_of("{tenantid}"), Some("{tenantid}")),
            (issuer_of("x"), Some("x")),
            (issuer_of(""), Some("")),
            (format!("{MICROSOFT_BASE_URL}../evil/v2.0"), Some("../evil")),
            (issuer_of(&TENANT.to_uppercase()), Some(&*TENANT.to_uppercase())),
        ] {
            assert_eq!(all_tenants.authority(&iss, tid), None, "{iss}");
        }
        let work_accounts_only = AcceptedIssuers::MicrosoftTenants { template, allows_consumers: false };
        assert!(work_accounts_only.authority(&issuer_of(TENANT), Some(TENANT)).is_some());
        assert_eq!(
            work_accounts_only.authority(&issuer_of(MICROSOFT_CONSUMERS_TENANT), Some(MICROSOFT_CONSUMERS_TENANT)),
            None
        );
        assert!(
            all_tenants.is_valid_in_callback(&issuer_of(TENANT))
                && !all_tenants.is_valid_in_callback(&issuer_of("common"))
                && !all_tenants.is_valid_in_callback(TENANT)
        );
    }

    #[test]
    fn all_names_of_an_issuer_have_one_authority() {
        let issuers = AcceptedIssuers::Known { issuer: "https://a.example".to_owned(), aliases: &["a.example"] };
        for iss in ["https://a.example", "a.example"] {
            assert_eq!(issuers.authority(iss, None).as_deref(), Some("https://a.example"));
            assert!(issuers.is_valid_in_callback(iss));
        }
        for iss in ["https://a.example/", "https://A.example", "http://a.example", ""] {
            assert_eq!(issuers.authority(iss, None), None, "{iss}");
            assert!(!issuers.is_valid_in_callback(iss), "{iss}");
        }
    }
}
