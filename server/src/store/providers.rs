//! Implements the port `Providers` with `SocialProviders`.

use latchkey_crds::rendered::RenderedProvider;

use super::stores::Stores;
use crate::{
    domain::{
        app::App,
        client::ClientAddress,
        identity::{
            AuthorizationCodeGrant, AuthorizationRequest, ProviderCapabilities, ProviderError, ProviderOperation,
            VerifiedIdentity,
        },
        ports::Providers,
    },
    providers::Permit,
};

impl Providers for Stores {
    type Permit = Permit;

    fn capabilities(&self, provider: &RenderedProvider) -> ProviderCapabilities {
        self.providers.capabilities(provider)
    }

    fn identity_authority(&self, provider: &RenderedProvider, given: Option<&str>) -> Option<String> {
        crate::providers::identity_authority(&provider.settings, given)
    }

    fn try_acquire(
        &self,
        operation: ProviderOperation,
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
        request: &AuthorizationRequest<'_>,
    ) -> Result<String, ProviderError> {
        self.providers.authorization_url(permit, provider, request).await
    }

    async fn validate_issuer(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        iss: Option<&str>,
    ) -> Result<(), ProviderError> {
        self.providers.validate_issuer(permit, provider, iss).await
    }

    async fn exchange_code(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        grant: &AuthorizationCodeGrant<'_>,
    ) -> Result<VerifiedIdentity, ProviderError> {
        self.providers.exchange_code(permit, provider, grant).await
    }

    async fn validate_token(
        &self,
        permit: &Permit,
        provider: &RenderedProvider,
        token: &str,
        nonce: Option<&str>,
    ) -> Result<VerifiedIdentity, ProviderError> {
        self.providers.validate_token(permit, provider, token, nonce).await
    }
}
