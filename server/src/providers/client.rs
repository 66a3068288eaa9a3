//! A Provider of an App: its preset, and its settings from the rendered document.

use std::borrow::Cow;

use latchkey_crds::rendered::{ProviderSettings, RenderedProvider, RenderedProviderGroups, SecretString};
use serde::Deserialize;
use serde_json::Value;

use super::{
    http::CallTarget,
    permits::Permit,
    preset::{ClaimNames, EmailVerificationSource, EndpointSource, IssuerSource, Preset, find_preset},
};
use crate::domain::identity::{ProviderEndpoint, UnusableReason};

/// The base URL of Microsoft's issuers; a tenant and `/v2.0` follow.
pub(super) const MICROSOFT_BASE_URL: &str = "https://login.microsoftonline.com/";
/// The ID of the tenant of all personal Microsoft accounts.
pub(super) const MICROSOFT_CONSUMERS_TENANT: &str = "9188040d-6c67-4c5b-b112-36a304b66dad";

pub(super) struct ProviderConfig<'a> {
    pub(super) preset: &'static Preset,
    pub(super) settings: &'a ProviderSettings,
    /// A clone of the operation's permit. A fetch that outlives the operation has another clone.
    pub(super) permit: Permit,
    pub(super) mapping: ClaimMapping,
}

/// The names of a provider's claims; see [`ClaimNames`]. `groups` is a setting of the App, not of the preset.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ClaimMapping {
    pub(super) subject: Vec<Cow<'static, str>>,
    pub(super) email: Option<Cow<'static, str>>,
    pub(super) verified: EmailVerification,
    pub(super) name: Vec<Cow<'static, str>>,
    /// `None`: no groups are read.
    pub(super) groups: Option<RenderedProviderGroups>,
}

/// How the provider shows that an email address is verified, from the preset's [`EmailVerificationSource`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum EmailVerification {
    Never,
    Documented,
    AddressList,
    Claim {
        name: Cow<'static, str>,
        /// Whether the number 1 means the same as `true`.
        accepts_one: bool,
    },
}

/// The `claims` of a Provider with the preset `oidc` or `oauth2`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ConfiguredClaims {
    subject: Option<String>,
    email: Option<String>,
    email_verified: Option<String>,
    name: Option<String>,
}

// === impl ProviderConfig ===

impl<'a> ProviderConfig<'a> {
    pub(super) fn new(settings: &'a ProviderSettings, permit: &Permit) -> Result<Self, UnusableReason> {
        let preset = find_preset(&settings.preset).ok_or(UnusableReason::UnknownPreset)?;
        let mapping = claim_mapping(preset, settings)?;
        Ok(Self { preset, settings, permit: permit.clone(), mapping })
    }

    /// Like [`Self::new`], but with the App's settings for groups. For operations that read the user's identity.
    pub(super) fn of_app(provider: &'a RenderedProvider, permit: &Permit) -> Result<Self, UnusableReason> {
        let mut config = Self::new(&provider.settings, permit)?;
        config.mapping.groups.clone_from(&provider.groups);
        Ok(config)
    }

    /// The labels under which a call of this client to `endpoint` is counted.
    pub(super) fn call_target(&self, endpoint: ProviderEndpoint) -> CallTarget {
        CallTarget { preset: self.preset.name, endpoint }
    }

    /// The client's secret or, for Apple, the client's private key.
    pub(super) fn secret(&self) -> Result<&'a SecretString, UnusableReason> {
        self.settings.secret.as_ref().ok_or(UnusableReason::MissingSecret)
    }

    /// The value of the Provider's option `name`, if the value is text.
    pub(super) fn option(&self, name: &str) -> Option<&'a str> {
        option(self.settings, name)
    }

    /// The value of an option that the preset requires. It must be text.
    pub(super) fn required_option(&self, name: &str) -> Result<&'a str, UnusableReason> {
        required_option(self.settings, name)
    }

    /// Determines the issuer from the preset and the Provider's options. Returns the issuer and the URL of its
    /// discovery document.
    pub(super) fn discovery_url(&self, issuer: IssuerSource) -> Result<(Cow<'static, str>, String), UnusableReason> {
        let issuer = configured_issuer(issuer, self.settings)?;
        // The URL begins with the issuer without a trailing slash (OpenID Connect Discovery 1.0, 4.1).
        let url = format!("{}/.well-known/openid-configuration", issuer.trim_end_matches('/'));
        Ok((issuer, url))
    }

    /// The requested scopes, without duplicates.
    pub(super) fn scopes(&self) -> Vec<&str> {
        let mut scopes: Vec<&str> = self.preset.scopes.to_vec();
        for scope in &self.settings.scopes {
            if !scopes.contains(&scope.as_str()) {
                scopes.push(scope);
            }
        }
        scopes
    }

    /// Whether this client ID is the `clientID` or one of the `additionalClientIDs` of the Provider.
    pub(super) fn is_accepted_client(&self, client: &str) -> bool {
        client == self.settings.client_id || self.settings.additional_client_ids.iter().any(|other| other == client)
    }

    /// The authority (who issued the subject) of identities that are not read from an ID token:
    /// [`crate::domain::identity::VerifiedIdentity::authority`].
    pub(super) fn authority(&self) -> Result<String, UnusableReason> {
        configured_authority(self.preset, self.settings)
    }
}

fn option<'a>(settings: &'a ProviderSettings, name: &str) -> Option<&'a str> {
    settings.options.get(name).and_then(Value::as_str)
}

fn required_option<'a>(settings: &'a ProviderSettings, name: &str) -> Result<&'a str, UnusableReason> {
    option(settings, name).ok_or(UnusableReason::InvalidOptions)
}

/// The issuer that the preset and the Provider's options determine.
fn configured_issuer(issuer: IssuerSource, settings: &ProviderSettings) -> Result<Cow<'static, str>, UnusableReason> {
    Ok(match issuer {
        IssuerSource::Fixed(issuer) => issuer.into(),
        IssuerSource::Option("baseURL") => {
            required_option(settings, "baseURL")?.trim_end_matches('/').to_owned().into()
        }
        IssuerSource::Option(name) => required_option(settings, name)?.to_owned().into(),
        IssuerSource::MicrosoftTenant => {
            format!("{MICROSOFT_BASE_URL}{}/v2.0", required_option(settings, "tenant")?).into()
        }
    })
}

/// The authority that the preset and the Provider's options determine.
pub(super) fn configured_authority(preset: &Preset, settings: &ProviderSettings) -> Result<String, UnusableReason> {
    match &preset.endpoints {
        EndpointSource::Fixed { base_url, .. } => Ok(format!("{}:{base_url}", preset.name)),
        EndpointSource::Configured => Ok(required_option(settings, "userInfoURL")?.to_owned()),
        EndpointSource::Discovered { issuer, .. } => Ok(configured_issuer(*issuer, settings)?.into_owned()),
    }
}

fn claim_mapping(preset: &Preset, settings: &ProviderSettings) -> Result<ClaimMapping, UnusableReason> {
    match &preset.claims {
        ClaimNames::Fixed { subject, email, verified, name } => Ok(ClaimMapping {
            subject: subject.iter().copied().map(Cow::Borrowed).collect(),
            email: email.map(Cow::Borrowed),
            verified: match *verified {
                EmailVerificationSource::Never => EmailVerification::Never,
                EmailVerificationSource::Documented => EmailVerification::Documented,
                EmailVerificationSource::AddressList => EmailVerification::AddressList,
                EmailVerificationSource::Claim(name) => {
                    EmailVerification::Claim { name: name.into(), accepts_one: false }
                }
                EmailVerificationSource::ClaimOrNumberOne(name) => {
                    EmailVerification::Claim { name: name.into(), accepts_one: true }
                }
            },
            name: name.iter().copied().map(Cow::Borrowed).collect(),
            groups: None,
        }),
        ClaimNames::Configured => {
            let configured = settings.options.get("claims").ok_or(UnusableReason::InvalidOptions)?;
            let configured = ConfiguredClaims::deserialize(configured).map_err(|_| UnusableReason::InvalidOptions)?;
            // The subject of an ID token is always `sub` (OpenID Connect Core 1.0, 2).
            let subject = match &preset.endpoints {
                EndpointSource::Discovered { .. } => "sub".to_owned(),
                EndpointSource::Fixed { .. } | EndpointSource::Configured => {
                    configured.subject.ok_or(UnusableReason::InvalidOptions)?
                }
            };
            Ok(ClaimMapping {
                subject: vec![subject.into()],
                email: configured.email.map(Cow::Owned),
                verified: match configured.email_verified {
                    Some(name) => EmailVerification::Claim { name: name.into(), accepts_one: false },
                    None => EmailVerification::Never,
                },
                name: configured.name.map(Cow::Owned).into_iter().collect(),
                groups: None,
            })
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;
    use crate::providers::permits::{Permits, SharedProviderKey};

    pub(in crate::providers) fn test_client(settings: &ProviderSettings) -> Result<ProviderConfig<'_>, UnusableReason> {
        let provider = SharedProviderKey::new(("shop".to_owned(), "p".to_owned()));
        ProviderConfig::new(settings, &Permits::default().try_acquire_for_check(&provider).unwrap())
    }

    /// Settings as the operator renders them.
    pub(in crate::providers) fn test_settings(preset: &str, options: Value) -> ProviderSettings {
        let document = json!({
            "preset": preset,
            "clientID": "ours",
            "additionalClientIDs": ["ours-too"],
            "scopes": ["openid", "more"],
            "secret": "hush",
            "options": options,
        });
        serde_json::from_value(document).unwrap()
    }

    #[test]
    fn the_discovery_url_is_below_the_issuer() {
        let discovery_url = |preset: &str, options| {
            let settings = test_settings(preset, options);
            let client = test_client(&settings).unwrap();
            let EndpointSource::Discovered { issuer, .. } = &client.preset.endpoints else {
                panic!("{preset} has no issuer")
            };
            client.discovery_url(*issuer).unwrap()
        };
        let claims = json!({ "email": "email", "emailVerified": "email_verified", "name": "name" });
        let end = "/.well-known/openid-configuration";
        for (preset, options, issuer, base_url) in [
            ("google", json!({}), "https://accounts.google.com", "https://accounts.google.com"),
            (
                "gitlab",
                json!({ "baseURL": "https://git.example/g/" }),
                "https://git.example/g",
                "https://git.example/g",
            ),
            (
                "microsoft",
                json!({ "tenant": "common" }),
                "https://login.microsoftonline.com/common/v2.0",
                "https://login.microsoftonline.com/common/v2.0",
            ),
            (
                "oidc",
                json!({ "issuer": "https://id.example/", "claims": claims }),
                "https://id.example/",
                "https://id.example",
            ),
        ] {
            assert_eq!(discovery_url(preset, options), (issuer.into(), format!("{base_url}{end}")), "{preset}");
        }
    }

    #[test]
    fn missing_options_are_reported() {
        let error_of = |preset: &str, options| {
            let settings = test_settings(preset, options);
            test_client(&settings).map(|_| ()).unwrap_err()
        };
        assert_eq!(error_of("yahoo", json!({})), UnusableReason::UnknownPreset);
        assert_eq!(error_of("oidc", json!({ "issuer": "https://id.example" })), UnusableReason::InvalidOptions);
        assert_eq!(error_of("oauth2", json!({ "claims": { "email": "mail" } })), UnusableReason::InvalidOptions);
        let settings = test_settings("oauth2", json!({ "claims": { "subject": "id", "email": "mail" } }));
        let client = test_client(&settings).unwrap();
        assert_eq!(client.mapping.verified, EmailVerification::Never);
        assert_eq!(client.authority(), Err(UnusableReason::InvalidOptions));
    }

    #[test]
    fn each_scope_is_requested_once() {
        let settings = test_settings("google", json!({}));
        assert_eq!(test_client(&settings).unwrap().scopes(), ["openid", "email", "profile", "more"]);
    }
}
