//! What fuzz targets and test vectors call: the parsers and judges of what providers send.

use latchkey_crds::rendered::ProviderSettings;
use time::OffsetDateTime;

use super::{
    client::Client,
    discovery::{Issuers, Metadata},
    id_token::{self, Expected, IdToken, allowed_algorithms},
    permits::{Key, Permits},
    profile,
};
use crate::domain::identity::{BadToken, Unusable, Vouched};

/// The keys of a provider.
pub struct KeySet(id_token::KeySet);

/// The audience and nonce that a token must have.
#[derive(Clone, Copy, Debug)]
pub struct Expectation<'a> {
    pub issuer: &'a str,
    pub client: &'a ProviderSettings,
    /// For a login with a provider's token; otherwise for a flow of this service.
    pub is_login: bool,
    pub nonce: Option<&'a str>,
}

/// The addresses of a discovery document, `issuer` first; none if the document is refused.
pub fn discovery(body: &[u8]) -> Option<Vec<String>> {
    let metadata = Metadata::parse(body).ok()?;
    Some([metadata.issuer.as_str()].into_iter().chain(metadata.addresses()).map(str::to_owned).collect())
}

/// Whether a rendered Provider has all that its preset needs, its secret aside.
pub fn is_usable(settings: &ProviderSettings) -> bool {
    client(settings).is_ok()
}

/// The identity in the answer of a profile endpoint.
pub fn profile(body: &[u8], client: &ProviderSettings) -> Option<Vouched> {
    let client = self::client(client).ok()?;
    let statement = client.mapping.read(&super::parse(body).ok()?);
    client.mapping.vouched(client.authority().ok()?, &[&statement])
}

fn client(settings: &ProviderSettings) -> Result<Client<'_>, Unusable> {
    let provider = Key::new(("fuzz".to_owned(), "fuzz".to_owned()));
    let permit = Permits::default().try_acquire_for_check(&provider).expect("nobody else holds one");
    Client::new(settings, &permit)
}

/// Whether there is a name in the form that Apple posts.
pub fn has_posted_name(posted: &str) -> bool {
    profile::posted_name(posted).is_some()
}

// === impl KeySet ===

impl KeySet {
    /// None if the document is refused.
    pub fn parse(body: &[u8]) -> Option<Self> {
        id_token::KeySet::parse(body).ok().map(Self)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Verifies an ID token in full; `supported` is what the provider says it signs with.
    pub fn verify(
        &self,
        token: &str,
        supported: &[String],
        expected: Expectation<'_>,
        now: OffsetDateTime,
    ) -> Result<(), BadToken> {
        let Expectation { issuer, client, is_login, nonce } = expected;
        let client = self::client(client).map_err(|_| BadToken::Malformed)?;
        let issuers = Issuers::Known { issuer: issuer.to_owned(), also: &[] };
        let expected = if is_login { Expected::Login { nonce } } else { Expected::Flow { nonce } };
        let algorithms = allowed_algorithms(supported);
        IdToken::verify(token, &self.0, &algorithms, &issuers, &client, expected, now).map(drop)
    }

    /// Whether a signature over any bytes holds under one of the keys: test vectors sign no tokens.
    pub fn verifies(&self, algorithm: &str, message: &[u8], signature: &[u8]) -> bool {
        self.0.verifies(algorithm, message, signature)
    }
}
