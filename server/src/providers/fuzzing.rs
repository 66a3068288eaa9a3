//! Entry points for fuzz targets and test vectors: parsers and validation of data from providers.

use latchkey_crds::rendered::{ProviderSettings, RenderedProviderGroups};
use time::OffsetDateTime;

use super::{
    client::ProviderConfig,
    discovery::{AcceptedIssuers, Metadata},
    id_token::{self, IdToken, TokenOrigin, allowed_algorithms},
    permits::{Permits, SharedProviderKey},
    profile,
};
use crate::domain::identity::{InvalidProviderToken, UnusableReason, VerifiedIdentity};

/// The keys of a provider.
pub struct KeySet(id_token::KeySet);

/// The issuer, audience and nonce that a token must have.
#[derive(Clone, Copy, Debug)]
pub struct Expectation<'a> {
    pub issuer: &'a str,
    pub client: &'a ProviderSettings,
    /// Whether an application sent the token in a request to *login*. False if the token comes from a flow.
    pub is_login: bool,
    pub nonce: Option<&'a str>,
}

/// The URLs of a discovery document, `issuer` first. `None` if the document is invalid.
pub fn discovery_urls(body: &[u8]) -> Option<Vec<String>> {
    let metadata = Metadata::parse(body).ok()?;
    Some([metadata.issuer.as_str()].into_iter().chain(metadata.urls()).map(str::to_owned).collect())
}

/// Whether this server knows the preset of a rendered Provider and can read the `claims` that the preset needs. Checks
/// neither the other options nor the secret.
pub fn is_usable(settings: &ProviderSettings) -> bool {
    client(settings).is_ok()
}

/// The prefix of the groups that [`identity_from_profile`] reads.
pub const GROUPS_PREFIX: &str = "fuzz:";

/// The identity in the response of a profile endpoint, with the groups in the claim `groups`.
pub fn identity_from_profile(body: &[u8], client: &ProviderSettings) -> Option<VerifiedIdentity> {
    let mut client = self::client(client).ok()?;
    client.mapping.groups =
        Some(RenderedProviderGroups { claim: "groups".to_owned(), prefix: GROUPS_PREFIX.to_owned(), only: Vec::new() });
    let statement = client.mapping.read_claims(&super::parse(body).ok()?);
    client.mapping.verified_identity(client.authority().ok()?, &[&statement])
}

fn client(settings: &ProviderSettings) -> Result<ProviderConfig<'_>, UnusableReason> {
    let provider = SharedProviderKey::new(("fuzz".to_owned(), "fuzz".to_owned()));
    let permit = Permits::default().try_acquire_for_check(&provider).expect("a new set has free permits");
    ProviderConfig::new(settings, &permit)
}

/// Whether Apple's posted `user` contains a name.
pub fn has_posted_name(posted: &str) -> bool {
    profile::posted_name(posted).is_some()
}

// === impl KeySet ===

impl KeySet {
    /// `None` if the document is invalid.
    pub fn parse(body: &[u8]) -> Option<Self> {
        id_token::KeySet::parse(body).ok().map(Self)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Validates an ID token in full. `supported`: the signing algorithms in the provider's discovery document.
    pub fn verify(
        &self,
        token: &str,
        supported: &[String],
        expected: Expectation<'_>,
        now: OffsetDateTime,
    ) -> Result<(), InvalidProviderToken> {
        let Expectation { issuer, client, is_login, nonce } = expected;
        let client = self::client(client).map_err(|_| InvalidProviderToken::Malformed)?;
        let issuers = AcceptedIssuers::Known { issuer: issuer.to_owned(), aliases: &[] };
        let expected = if is_login { TokenOrigin::Login { nonce } } else { TokenOrigin::Flow { nonce } };
        let algorithms = allowed_algorithms(supported);
        IdToken::verify(token, &self.0, &algorithms, &issuers, &client, expected, now).map(drop)
    }

    /// Whether a signature over `message` is valid under one of the keys. Test vectors need this function, because
    /// their messages are not tokens.
    pub fn verifies(&self, algorithm: &str, message: &[u8], signature: &[u8]) -> bool {
        self.0.verifies_with_any_key(algorithm, message, signature)
    }
}
