//! Collects a Provider and the secret that it references. Decides nothing.

use latchkey_crds::provider::Provider;

use crate::facts::{ObjectSource, SecretKeyLookup};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ProviderFacts {
    pub(crate) provider: Provider,
    /// The client's secret or, for Apple, the client's private key.
    pub(crate) secret: SecretKeyLookup,
}

pub(crate) fn resolve(provider: Provider, source: &impl ObjectSource) -> ProviderFacts {
    let namespace = provider.metadata.namespace.as_deref().unwrap_or_default();
    let reference = provider.spec.client.secret_ref();
    let secret = SecretKeyLookup::resolve(source, namespace, &reference.name, &reference.key);
    ProviderFacts { provider, secret }
}
