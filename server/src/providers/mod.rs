//! Social providers: every call to one, and what is believed of its answers.

use latchkey_crds::rendered::RenderedProvider;

use crate::domain::{
    app::App,
    identity::{Authorization, Grant, ProviderError, ProviderTraits, Unusable, Vouched},
};

/// The way to social providers; a cheap handle.
#[derive(Clone, Debug, Default)]
pub struct SocialProviders {}

// === impl SocialProviders ===

impl SocialProviders {
    pub fn traits_of(&self, _: &RenderedProvider) -> ProviderTraits {
        ProviderTraits { nonce: false, form_post: false }
    }

    pub async fn authorization_url(
        &self,
        _: &App,
        _: &RenderedProvider,
        _: &Authorization<'_>,
    ) -> Result<String, ProviderError> {
        Err(ProviderError::Unusable(Unusable::UnknownPreset))
    }

    pub async fn exchange(&self, _: &App, _: &RenderedProvider, _: &Grant<'_>) -> Result<Vouched, ProviderError> {
        Err(ProviderError::Unusable(Unusable::UnknownPreset))
    }

    pub async fn check_token(
        &self,
        _: &App,
        _: &RenderedProvider,
        _: &str,
        _: Option<&str>,
    ) -> Result<Vouched, ProviderError> {
        Err(ProviderError::Unusable(Unusable::UnknownPreset))
    }
}
