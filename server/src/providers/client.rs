//! A Provider of an App, as its document has it, with its preset beside it.

use std::borrow::Cow;

use latchkey_crds::rendered::{ProviderSettings, SecretString};
use serde::Deserialize;
use serde_json::Value;

use super::{
    http::Purpose,
    permits::Permit,
    preset::{Claims, Issuer, Preset, Server, Verified, preset},
};
use crate::domain::identity::{Place, Unusable};

/// Where Microsoft's issuers are, by tenant.
pub(super) const MICROSOFT: &str = "https://login.microsoftonline.com/";
/// Microsoft's tenant of all accounts that are nobody's at work or school.
pub(super) const CONSUMERS: &str = "9188040d-6c67-4c5b-b112-36a304b66dad";

pub(super) struct Client<'a> {
    pub(super) preset: &'static Preset,
    pub(super) settings: &'a ProviderSettings,
    /// Held until the last question of this client is answered.
    pub(super) permit: Permit,
    pub(super) mapping: Mapping,
}

/// Under which names it tells what; see [`Claims`].
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) subject: Vec<Cow<'static, str>>,
    pub(super) email: Option<Cow<'static, str>>,
    pub(super) verified: Source,
    pub(super) name: Vec<Cow<'static, str>>,
}

/// See [`Verified`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Source {
    Never,
    Documented,
    Listed,
    Claim { name: Cow<'static, str>, or_one: bool },
}

/// The Provider's `claims`, of `oidc` and `oauth2`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Given {
    subject: Option<String>,
    email: Option<String>,
    email_verified: Option<String>,
    name: Option<String>,
}

// === impl Client ===

impl<'a> Client<'a> {
    pub(super) fn new(settings: &'a ProviderSettings, permit: &Permit) -> Result<Self, Unusable> {
        let preset = preset(&settings.preset).ok_or(Unusable::UnknownPreset)?;
        let mapping = mapping(preset, settings)?;
        Ok(Self { preset, settings, permit: permit.clone(), mapping })
    }

    /// What a call of this client at that place is counted under.
    pub(super) fn at(&self, place: Place) -> Purpose {
        Purpose { preset: self.preset.name, place }
    }

    /// The client's secret or Apple's key.
    pub(super) fn secret(&self) -> Result<&'a SecretString, Unusable> {
        self.settings.secret.as_ref().ok_or(Unusable::NoSecret)
    }

    /// An option of the Provider that is text.
    pub(super) fn option(&self, name: &str) -> Option<&'a str> {
        self.settings.options.get(name).and_then(Value::as_str)
    }

    /// One that its preset cannot do without.
    pub(super) fn needed(&self, name: &str) -> Result<&'a str, Unusable> {
        self.option(name).ok_or(Unusable::BadOptions)
    }

    /// The issuer as configured, and the address of its discovery document.
    pub(super) fn discovery(&self, issuer: Issuer) -> Result<(Cow<'static, str>, String), Unusable> {
        let issuer: Cow<'static, str> = match issuer {
            Issuer::Fixed(issuer) => issuer.into(),
            Issuer::Option("baseURL") => self.needed("baseURL")?.trim_end_matches('/').to_owned().into(),
            Issuer::Option(name) => self.needed(name)?.to_owned().into(),
            Issuer::Tenant => format!("{MICROSOFT}{}/v2.0", self.needed("tenant")?).into(),
        };
        // OpenID Connect Discovery 1.0, 4.1: a final slash is taken away first.
        let address = format!("{}/.well-known/openid-configuration", issuer.trim_end_matches('/'));
        Ok((issuer, address))
    }

    /// What is asked for, each once.
    pub(super) fn scopes(&self) -> Vec<&str> {
        let mut scopes: Vec<&str> = self.preset.scopes.to_vec();
        for scope in &self.settings.scopes {
            if !scopes.contains(&scope.as_str()) {
                scopes.push(scope);
            }
        }
        scopes
    }

    /// Whether a client's id is one of those whose tokens are accepted at *login*.
    pub(super) fn is_ours(&self, client: &str) -> bool {
        client == self.settings.client_id || self.settings.additional_client_ids.iter().any(|other| other == client)
    }

    /// The authority of identities that no ID token vouches for.
    pub(super) fn authority(&self) -> Result<String, Unusable> {
        match &self.preset.server {
            Server::Fixed { base_url, .. } => Ok(format!("{}:{base_url}", self.preset.name)),
            Server::Given => Ok(self.needed("userInfoURL")?.to_owned()),
            Server::Discovered { issuer, .. } => Ok(self.discovery(*issuer)?.0.into_owned()),
        }
    }
}

fn mapping(preset: &Preset, settings: &ProviderSettings) -> Result<Mapping, Unusable> {
    match &preset.claims {
        Claims::Fixed { subject, email, verified, name } => Ok(Mapping {
            subject: subject.iter().copied().map(Cow::Borrowed).collect(),
            email: email.map(Cow::Borrowed),
            verified: match *verified {
                Verified::Never => Source::Never,
                Verified::Documented => Source::Documented,
                Verified::Listed => Source::Listed,
                Verified::Claim(name) => Source::Claim { name: name.into(), or_one: false },
                Verified::ClaimOrOne(name) => Source::Claim { name: name.into(), or_one: true },
            },
            name: name.iter().copied().map(Cow::Borrowed).collect(),
        }),
        Claims::Given => {
            let given = settings.options.get("claims").ok_or(Unusable::BadOptions)?;
            let given = Given::deserialize(given).map_err(|_| Unusable::BadOptions)?;
            // An ID token's subject is `sub` and nothing else (OpenID Connect Core 1.0, 2).
            let subject = match &preset.server {
                Server::Discovered { .. } => "sub".to_owned(),
                Server::Fixed { .. } | Server::Given => given.subject.ok_or(Unusable::BadOptions)?,
            };
            Ok(Mapping {
                subject: vec![subject.into()],
                email: given.email.map(Cow::Owned),
                verified: match given.email_verified {
                    Some(name) => Source::Claim { name: name.into(), or_one: false },
                    None => Source::Never,
                },
                name: given.name.map(Cow::Owned).into_iter().collect(),
            })
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;
    use crate::providers::permits::{Key, Permits};

    pub(in crate::providers) fn client_of(settings: &ProviderSettings) -> Result<Client<'_>, Unusable> {
        let provider = Key::new(("shop".to_owned(), "p".to_owned()));
        Client::new(settings, &Permits::default().try_acquire_for_check(&provider).unwrap())
    }

    /// As the operator renders it.
    pub(in crate::providers) fn settings(preset: &str, options: Value) -> ProviderSettings {
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
    fn an_issuers_document_is_below_it() {
        let address = |preset: &str, options| {
            let settings = settings(preset, options);
            let client = client_of(&settings).unwrap();
            let Server::Discovered { issuer, .. } = &client.preset.server else { panic!("{preset} has no issuer") };
            client.discovery(*issuer).unwrap()
        };
        let claims = json!({ "email": "email", "emailVerified": "email_verified", "name": "name" });
        let end = "/.well-known/openid-configuration";
        for (preset, options, issuer, below) in [
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
            assert_eq!(address(preset, options), (issuer.into(), format!("{below}{end}")), "{preset}");
        }
    }

    #[test]
    fn what_the_document_lacks_is_told() {
        let refused = |preset: &str, options| {
            let settings = settings(preset, options);
            client_of(&settings).map(|_| ()).unwrap_err()
        };
        assert_eq!(refused("yahoo", json!({})), Unusable::UnknownPreset);
        assert_eq!(refused("oidc", json!({ "issuer": "https://id.example" })), Unusable::BadOptions);
        assert_eq!(refused("oauth2", json!({ "claims": { "email": "mail" } })), Unusable::BadOptions);
        let settings = settings("oauth2", json!({ "claims": { "subject": "id", "email": "mail" } }));
        let client = client_of(&settings).unwrap();
        assert_eq!(client.mapping.verified, Source::Never);
        assert_eq!(client.authority(), Err(Unusable::BadOptions));
    }

    #[test]
    fn scopes_are_asked_for_once() {
        let settings = settings("google", json!({}));
        assert_eq!(client_of(&settings).unwrap().scopes(), ["openid", "email", "profile", "more"]);
    }
}
