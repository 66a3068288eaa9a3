//! Discovery documents (OpenID Connect Discovery 1.0), and where a client's provider is to be asked.

use std::sync::Arc;

use oauth2::AuthType;
use serde::Deserialize;

use super::{
    Inner,
    client::{CONSUMERS, Client, MICROSOFT},
    id_token::{KeySet, allowed_algorithms},
    preset::{Authentication, Check, Issuer, Profile, Server},
    shelf::Footprint,
};
use crate::domain::identity::{BadCallback, Fault, Place, ProviderError, Unusable};

/// The longest address that a document may name. It is kept for as long as the document is.
pub(super) const MAX_ADDRESS: usize = 2048;

/// Of a discovery document what is used, in a few small values.
#[derive(Clone, Debug)]
pub struct Metadata {
    pub(super) issuer: String,
    authorization_endpoint: String,
    token_endpoint: String,
    jwks_uri: String,
    userinfo_endpoint: Option<String>,
    introspection_endpoint: Option<String>,
    algorithms: Vec<jsonwebtoken::Algorithm>,
    takes_basic: bool,
    promises_iss: bool,
}

/// The members of a discovery document that are looked at.
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
    /// RFC 9207, 3.
    #[serde(default)]
    authorization_response_iss_parameter_supported: bool,
}

/// Where a client's provider is asked for what.
#[derive(Clone, Debug)]
pub(super) struct Endpoints {
    pub(super) authorization: String,
    pub(super) token: String,
    pub(super) authentication: AuthType,
    pub(super) user_info: Option<String>,
    pub(super) introspection: Option<String>,
    /// None: it gives no ID tokens.
    pub(super) keys: Option<Keys>,
    pub(super) issuers: Issuers,
    /// It promises `iss` in every callback.
    pub(super) promises_iss: bool,
}

/// What its ID tokens are judged by.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    pub(super) url: String,
    pub(super) algorithms: Vec<jsonwebtoken::Algorithm>,
}

/// Who may call itself the issuer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Issuers {
    /// Not known.
    Unknown,
    /// The issuer, and other names that it has.
    Known { issuer: String, also: &'static [&'static str] },
    /// Microsoft, for more than one tenant: `{tenantid}` stands for the token's `tid`.
    Tenants { template: String, consumers: bool },
}

// === impl Metadata ===

impl Metadata {
    /// Reads a document within [`super::BOUNDS`]; judges what does not depend on who asks.
    pub fn parse(body: &[u8]) -> Result<Self, Fault> {
        let document = Document::deserialize(super::parse(body)?).map_err(|_| Fault::Incomplete)?;
        let metadata = Self {
            issuer: document.issuer,
            authorization_endpoint: document.authorization_endpoint,
            token_endpoint: document.token_endpoint,
            jwks_uri: document.jwks_uri,
            userinfo_endpoint: document.userinfo_endpoint,
            introspection_endpoint: document.introspection_endpoint,
            algorithms: allowed_algorithms(&document.id_token_signing_alg_values_supported),
            // A document that names no method means Basic (RFC 8414, 2).
            takes_basic: document
                .token_endpoint_auth_methods_supported
                .is_none_or(|methods| methods.iter().any(|method| method == "client_secret_basic")),
            promises_iss: document.authorization_response_iss_parameter_supported,
        };
        let is_long = metadata.addresses().chain([&*metadata.issuer]).any(|address| address.len() > MAX_ADDRESS);
        if is_long { Err(Fault::LongAddress) } else { Ok(metadata) }
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = &str> {
        let more = [&self.userinfo_endpoint, &self.introspection_endpoint].into_iter().flatten();
        [&self.authorization_endpoint, &self.token_endpoint, &self.jwks_uri].into_iter().chain(more).map(String::as_str)
    }

    fn authentication(&self) -> AuthType {
        if self.takes_basic { AuthType::BasicAuth } else { AuthType::RequestBody }
    }
}

impl Footprint for Metadata {
    fn footprint(&self) -> usize {
        size_of::<Self>() + self.issuer.len() + self.addresses().map(str::len).sum::<usize>()
    }
}

// === impl Issuers ===

impl Issuers {
    /// The authority for a token's `iss`, where this is its issuer.
    pub(super) fn authority(&self, iss: &str, tenant: Option<&str>) -> Option<String> {
        match self {
            Self::Unknown => None,
            Self::Known { issuer, also } => (iss == issuer || also.contains(&iss)).then(|| issuer.clone()),
            Self::Tenants { template, consumers } => {
                let tenant = tenant.filter(|tenant| is_tenant(tenant) && (*consumers || *tenant != CONSUMERS))?;
                (template.replace("{tenantid}", tenant) == iss).then(|| iss.to_owned())
            }
        }
    }

    /// Whether a callback may say `iss` (RFC 9207, 2.4).
    fn may_call_back(&self, iss: &str) -> bool {
        match self {
            Self::Unknown => true,
            Self::Known { issuer, also } => iss == issuer || also.contains(&iss),
            Self::Tenants { template, .. } => template.split_once("{tenantid}").is_some_and(|(before, after)| {
                iss.strip_prefix(before).and_then(|rest| rest.strip_suffix(after)).is_some_and(is_tenant)
            }),
        }
    }
}

/// A directory's id is a UUID.
fn is_tenant(tenant: &str) -> bool {
    uuid::Uuid::try_parse(tenant).is_ok_and(|uuid| uuid.to_string() == tenant)
}

// === impl Endpoints ===

impl Endpoints {
    /// Judges `iss` of a callback: where it is sent, and where it must be.
    pub(super) fn judge_iss(&self, iss: Option<&str>) -> Result<(), ProviderError> {
        match iss {
            Some(iss) if !self.issuers.may_call_back(iss) => Err(ProviderError::Callback(BadCallback::OtherIssuer)),
            None if self.promises_iss => Err(ProviderError::Callback(BadCallback::NoIssuer)),
            Some(_) | None => Ok(()),
        }
    }
}

// === impl Inner ===

impl Inner {
    /// Where this client's provider is asked; reads its discovery document where it has one.
    pub(super) async fn endpoints(&self, client: &Client<'_>) -> Result<Endpoints, ProviderError> {
        match &client.preset.server {
            Server::Discovered { issuer, also } => self.discovered(client, *issuer, also).await,
            Server::Fixed { issuer, authorization, token, .. } => Ok(Endpoints {
                authorization: (*authorization).to_owned(),
                token: (*token).to_owned(),
                authentication: authentication(client, None)?,
                user_info: match &client.preset.profile {
                    Profile::Endpoint { url, .. } => Some((*url).to_owned()),
                    Profile::IdToken | Profile::Given => None,
                },
                introspection: None,
                keys: None,
                issuers: issuer
                    .map_or(Issuers::Unknown, |issuer| Issuers::Known { issuer: issuer.to_owned(), also: &[] }),
                promises_iss: false,
            }),
            Server::Given => Ok(Endpoints {
                authorization: client.needed("authorizationURL")?.to_owned(),
                token: client.needed("tokenURL")?.to_owned(),
                authentication: authentication(client, None)?,
                user_info: Some(client.needed("userInfoURL")?.to_owned()),
                introspection: client.option("introspectionURL").map(str::to_owned),
                keys: None,
                issuers: Issuers::Unknown,
                promises_iss: false,
            }),
        }
    }

    async fn discovered(
        &self,
        client: &Client<'_>,
        issuer: Issuer,
        also: &'static [&'static str],
    ) -> Result<Endpoints, ProviderError> {
        let (configured, address) = client.discovery(issuer)?;
        let metadata = self.metadata(client, &address).await?;
        let fault = |fault| ProviderError::Answer { place: Place::Discovery, fault };
        let issuers = match issuer {
            Issuer::Tenant => microsoft(client, &metadata.issuer).ok_or(fault(Fault::OtherIssuer))?,
            Issuer::Fixed(_) | Issuer::Option(_) => {
                // OpenID Connect Discovery 1.0, 4.3.
                if metadata.issuer != configured && !also.contains(&metadata.issuer.as_str()) {
                    return Err(fault(Fault::OtherIssuer));
                }
                Issuers::Known { issuer: configured.into_owned(), also }
            }
        };
        Ok(Endpoints {
            authorization: metadata.authorization_endpoint.clone(),
            token: metadata.token_endpoint.clone(),
            authentication: authentication(client, Some(&metadata))?,
            user_info: metadata.userinfo_endpoint.clone(),
            introspection: match client.preset.check {
                Check::Discovered => metadata.introspection_endpoint.clone(),
                Check::None | Check::Given | Check::Ask { .. } => None,
            },
            keys: Some(Keys { url: metadata.jwks_uri.clone(), algorithms: metadata.algorithms.clone() }),
            issuers,
            promises_iss: metadata.promises_iss,
        })
    }

    async fn metadata(&self, client: &Client<'_>, address: &str) -> Result<Arc<Metadata>, ProviderError> {
        self.metadata.get(address, self.read_metadata(client, address)).await
    }

    /// Reads a document anew.
    pub(super) fn read_metadata(
        &self,
        client: &Client<'_>,
        address: &str,
    ) -> impl Future<Output = Result<Metadata, ProviderError>> + Send + use<> {
        let (http, purpose, url) = (Arc::clone(&self.http), client.at(Place::Discovery), address.to_owned());
        // The fetch goes on when the client goes away; its permit stays taken.
        let permit = client.permit.clone();
        async move {
            let _permit = permit;
            let answer = super::get(&http, purpose, &url).await?;
            let fault = |fault| ProviderError::Answer { place: Place::Discovery, fault };
            let metadata = answer.ok().and_then(Metadata::parse).map_err(fault)?;
            if metadata.addresses().any(|address| !http.allows(address)) {
                return Err(fault(Fault::NotHttps));
            }
            Ok(metadata)
        }
    }

    /// The key set at that address.
    pub(super) async fn keys(&self, client: &Client<'_>, url: &str) -> Result<Arc<KeySet>, ProviderError> {
        self.keys.get(url, self.read_keys(client, url)).await
    }

    /// One that is newer; see [`super::shelf::Shelf::newer`].
    pub(super) async fn newer_keys(&self, client: &Client<'_>, url: &str, seen: &Arc<KeySet>) -> Option<Arc<KeySet>> {
        self.keys.newer(url, seen, self.read_keys(client, url)).await
    }

    /// Reads a key set anew.
    pub(super) fn read_keys(
        &self,
        client: &Client<'_>,
        url: &str,
    ) -> impl Future<Output = Result<KeySet, ProviderError>> + Send + use<> {
        let (http, purpose, url) = (Arc::clone(&self.http), client.at(Place::Keys), url.to_owned());
        let permit = client.permit.clone();
        async move {
            let _permit = permit;
            let answer = super::get(&http, purpose, &url).await?;
            let fault = |fault| ProviderError::Answer { place: Place::Keys, fault };
            answer.ok().and_then(KeySet::parse).map_err(fault)
        }
    }
}

fn authentication(client: &Client<'_>, metadata: Option<&Metadata>) -> Result<AuthType, Unusable> {
    Ok(match client.preset.authentication {
        Authentication::Basic => AuthType::BasicAuth,
        Authentication::Post | Authentication::AppleKey => AuthType::RequestBody,
        Authentication::Discovered => metadata.map_or(AuthType::BasicAuth, Metadata::authentication),
        Authentication::Given => match client.option("clientAuthentication") {
            Some("Basic") | None => AuthType::BasicAuth,
            Some("Post") => AuthType::RequestBody,
            Some(_) => return Err(Unusable::BadOptions),
        },
    })
}

/// Microsoft's document says, for `common` and `organizations`, a template; for one tenant the issuer with its id,
/// whichever of its names was asked for.
fn microsoft(client: &Client<'_>, issuer: &str) -> Option<Issuers> {
    let tenant = issuer.strip_prefix(MICROSOFT)?.strip_suffix("/v2.0")?;
    if tenant == "{tenantid}" {
        let consumers = client.option("tenant") != Some("organizations");
        Some(Issuers::Tenants { template: issuer.to_owned(), consumers })
    } else {
        is_tenant(tenant).then(|| Issuers::Known { issuer: issuer.to_owned(), also: &[] })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(change: Value) -> Result<Metadata, Fault> {
        let mut document = json!({
            "issuer": "https://id.example", "authorization_endpoint": "https://id.example/a",
            "token_endpoint": "https://id.example/t", "jwks_uri": "https://id.example/k",
        });
        document.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        Metadata::parse(document.to_string().as_bytes())
    }

    #[test]
    fn of_a_document_only_what_is_used_is_kept() {
        let claims: Vec<String> = (0..1000).map(|number| format!("claim-{number}")).collect();
        let algorithms = vec!["RS256"; 900];
        let metadata =
            parse(json!({ "claims_supported": claims, "id_token_signing_alg_values_supported": algorithms })).unwrap();
        assert!(metadata.footprint() < 500, "{}", metadata.footprint());
        assert_eq!(metadata.algorithms, [jsonwebtoken::Algorithm::RS256]);
    }

    #[test]
    fn an_address_that_is_kept_has_a_longest_length() {
        let of = |length: usize| format!("https://id.example/{}", "x".repeat(length - "https://id.example/".len()));
        for name in [
            "issuer",
            "authorization_endpoint",
            "token_endpoint",
            "jwks_uri",
            "userinfo_endpoint",
            "introspection_endpoint",
        ] {
            assert!(parse(json!({ name: of(2048) })).is_ok(), "{name}");
            assert_eq!(parse(json!({ name: of(2049) })).err(), Some(Fault::LongAddress), "{name}");
        }
    }

    #[test]
    fn a_document_out_of_bounds_is_no_document() {
        let mut deep = json!(0);
        for _ in 0..20 {
            deep = json!([deep]);
        }
        assert_eq!(parse(json!({ "more": deep })).err(), Some(Fault::TooComplex));
        assert_eq!(parse(json!({ "more": vec![0; 2000] })).err(), Some(Fault::TooComplex));
        assert_eq!(Metadata::parse(br#"{"issuer": "a", "issuer": "b"}"#).err(), Some(Fault::NotJson));
        assert_eq!(Metadata::parse(b"[]").err(), Some(Fault::Incomplete));
    }

    const TENANT: &str = "72f988bf-86f1-41af-91ab-2d7cd011db47";

    #[test]
    fn a_template_is_filled_with_the_tenant_and_with_nothing_else() {
        let template = format!("{MICROSOFT}{{tenantid}}/v2.0");
        let all = Issuers::Tenants { template: template.clone(), consumers: true };
        let of = |tenant: &str| format!("{MICROSOFT}{tenant}/v2.0");
        assert_eq!(all.authority(&of(TENANT), Some(TENANT)), Some(of(TENANT)));
        assert_eq!(all.authority(&of(CONSUMERS), Some(CONSUMERS)), Some(of(CONSUMERS)));
        for (iss, tid) in [
            (of(TENANT), None),
            (of(TENANT), Some(CONSUMERS)),
            (of("{tenantid}"), Some("{tenantid}")),
            (of("x"), Some("x")),
            (of(""), Some("")),
            (format!("{MICROSOFT}../evil/v2.0"), Some("../evil")),
            (of(&TENANT.to_uppercase()), Some(&*TENANT.to_uppercase())),
        ] {
            assert_eq!(all.authority(&iss, tid), None, "{iss}");
        }
        let work = Issuers::Tenants { template, consumers: false };
        assert!(work.authority(&of(TENANT), Some(TENANT)).is_some());
        assert_eq!(work.authority(&of(CONSUMERS), Some(CONSUMERS)), None);
        assert!(all.may_call_back(&of(TENANT)) && !all.may_call_back(&of("common")) && !all.may_call_back(TENANT));
    }

    #[test]
    fn other_names_of_an_issuer_lead_to_one_authority() {
        let issuers = Issuers::Known { issuer: "https://a.example".to_owned(), also: &["a.example"] };
        for iss in ["https://a.example", "a.example"] {
            assert_eq!(issuers.authority(iss, None).as_deref(), Some("https://a.example"));
            assert!(issuers.may_call_back(iss));
        }
        for iss in ["https://a.example/", "https://A.example", "http://a.example", ""] {
            assert_eq!(issuers.authority(iss, None), None, "{iss}");
            assert!(!issuers.may_call_back(iss), "{iss}");
        }
    }
}
