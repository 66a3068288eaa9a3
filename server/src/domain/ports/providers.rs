//! Calls to social providers.

use std::future::Future;

use latchkey_crds::rendered::RenderedProvider;

use crate::domain::{
    app::App,
    client::ClientAddress,
    identity::{
        AuthorizationCodeGrant, AuthorizationRequest, ProviderCapabilities, ProviderError, ProviderOperation,
        VerifiedIdentity,
    },
};

/// Calls to the social providers of an App, and the validation of their responses.
pub trait Providers: Sync {
    /// Returns what a flow must know before it calls the provider. Returns no capabilities for an unknown preset. The
    /// other methods fail for such a preset, except `identity_authority`, which returns `None`.
    fn capabilities(&self, provider: &RenderedProvider) -> ProviderCapabilities;

    /// Returns the authority for an identity that an administrator or an import names; the provider is not called.
    /// `given` is the authority in the request. For `microsoft` without a fixed tenant, `given` is required and must be
    /// an issuer of Microsoft; for other Providers, it is optional. Returns `None` if `given` is required and missing
    /// or is not an authority of this Provider, or if an option of the Provider is missing.
    fn identity_authority(&self, provider: &RenderedProvider, given: Option<&str>) -> Option<String>;

    /// The permit to call a provider, released when it is dropped.
    type Permit: Send + Sync;

    /// Acquires a permit for an operation of a client, or fails immediately. The number of permits is bounded per
    /// client, per Provider, per namespace and for the whole server.
    fn try_acquire(
        &self,
        operation: ProviderOperation,
        app: &App,
        provider: &RenderedProvider,
        client: ClientAddress,
    ) -> Result<Self::Permit, ProviderError>;

    /// Returns the URL of the provider's login page for the browser.
    fn authorization_url(
        &self,
        permit: &Self::Permit,
        provider: &RenderedProvider,
        request: &AuthorizationRequest<'_>,
    ) -> impl Future<Output = Result<String, ProviderError>> + Send;

    /// Validates `iss` of a callback without a code (RFC 9207). A missing `iss` is an error only if the provider
    /// announces that it sends `iss`.
    fn validate_issuer(
        &self,
        permit: &Self::Permit,
        provider: &RenderedProvider,
        iss: Option<&str>,
    ) -> impl Future<Output = Result<(), ProviderError>> + Send;

    /// Exchanges a code for an identity. Fully validates the ID token and `iss` of the callback (RFC 9207). Also
    /// gets userinfo and email addresses, if they are necessary.
    fn exchange_code(
        &self,
        permit: &Self::Permit,
        provider: &RenderedProvider,
        grant: &AuthorizationCodeGrant<'_>,
    ) -> impl Future<Output = Result<VerifiedIdentity, ProviderError>> + Send;

    /// Validates a provider's token: an ID token or an access token that was issued for one of the client IDs of the
    /// Provider. If `nonce` is set, the ID token must contain it in plain text or as its SHA-256 in lower-case
    /// hexadecimal.
    fn validate_token(
        &self,
        permit: &Self::Permit,
        provider: &RenderedProvider,
        token: &str,
        nonce: Option<&str>,
    ) -> impl Future<Output = Result<VerifiedIdentity, ProviderError>> + Send;
}
