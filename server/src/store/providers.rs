//! Social providers, handed on to their client, so that use-cases find them beside the stores.

use latchkey_crds::rendered::RenderedProvider;

use super::Stores;
use crate::domain::{
    app::App,
    identity::{Authorization, Grant, ProviderError, ProviderTraits, Vouched},
    ports::Providers,
};

impl Providers for Stores {
    fn traits_of(&self, provider: &RenderedProvider) -> ProviderTraits {
        self.providers.traits_of(provider)
    }

    async fn authorization_url(
        &self,
        app: &App,
        provider: &RenderedProvider,
        request: &Authorization<'_>,
    ) -> Result<String, ProviderError> {
        self.providers.authorization_url(app, provider, request).await
    }

    async fn judge_issuer(
        &self,
        app: &App,
        provider: &RenderedProvider,
        iss: Option<&str>,
    ) -> Result<(), ProviderError> {
        self.providers.judge_issuer(app, provider, iss).await
    }

    async fn exchange(
        &self,
        app: &App,
        provider: &RenderedProvider,
        grant: &Grant<'_>,
    ) -> Result<Vouched, ProviderError> {
        self.providers.exchange(app, provider, grant).await
    }

    async fn check_token(
        &self,
        app: &App,
        provider: &RenderedProvider,
        token: &str,
        nonce: Option<&str>,
    ) -> Result<Vouched, ProviderError> {
        self.providers.check_token(app, provider, token, nonce).await
    }
}
