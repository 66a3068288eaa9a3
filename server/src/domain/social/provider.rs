//! Values that are derived from a Provider of an App.

use latchkey_crds::{rendered::RenderedProvider, types::ProviderName};
use time::OffsetDateTime;

use crate::domain::{app::App, audit::Detail, identity::VerifiedIdentity, ports::NewIdentity};

/// Returns the Provider of the App with this name.
pub fn find_provider<'a>(app: &'a App, name: &str) -> Option<&'a RenderedProvider> {
    app.doc.providers.iter().find(|provider| provider.name.as_str() == name)
}

/// Returns Latchkey's callback URL for an App and a Provider, as registered at the provider.
pub(super) fn callback_url(app: &App, provider: &RenderedProvider) -> String {
    format!("{}/{}/callback", app.doc.issuer, provider.name)
}

/// Returns the detail of an event that names the Provider.
pub(super) fn provider_detail(provider: &ProviderName) -> Detail {
    Detail { provider: Some(provider.clone()), ..Detail::default() }
}

/// Converts a verified identity to an identity that can be stored.
pub(super) fn new_identity(
    provider: &RenderedProvider,
    verified: &VerifiedIdentity,
    at: OffsetDateTime,
) -> NewIdentity {
    NewIdentity {
        authority: verified.authority.clone(),
        subject: verified.subject.clone(),
        provider: provider.name.clone(),
        email: verified.email.as_ref().map(|provider_email| provider_email.email.clone()),
        at,
    }
}
