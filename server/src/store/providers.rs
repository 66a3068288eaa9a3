//! Social providers, handed on to their client, so that use-cases find them beside the stores.

use latchkey_crds::rendered::RenderedProvider;

use super::Stores;
use crate::{
    domain::{
        app::App,
        client::ClientAddress,
        identity::{Authorization, Grant, Operation, ProviderError, ProviderTraits, Vouched},
        ports::Providers,
    },
    providers::Permit,
};

impl Providers for Stores {
    type Permit = Permit;

    fn traits_of(&self, provider: &RenderedProvider) -> ProviderTraits {
        self.providers.traits_of(provider)
    }

    fn try_acquire(
        &self,
        operation: Operation,
        app: &App,
        provider: &RenderedProvider,
        client: ClientAddress,
    ) -> Result<Permit, ProviderError> {
        self.providers.try_acquire(operation, app, provider, client)
    }

    async fn authorization_url(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        request: &Authorization<'_>,
    ) -> Result<String, ProviderError> {
        self.providers.authorization_url(permit, provider, request).await
    }

    async fn judge_issuer(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        iss: Option<&str>,
    ) -> Result<(), ProviderError> {
        self.providers.judge_issuer(permit, provider, iss).await
    }

    async fn exchange(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        grant: &Grant<'_>,
    ) -> Result<Vouched, ProviderError> {
        self.providers.exchange(permit, provider, grant).await
    }

    async fn check_token(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        token: &str,
        nonce: Option<&str>,
    ) -> Result<Vouched, ProviderError> {
        self.providers.check_token(permit, provider, token, nonce).await
    }
}
