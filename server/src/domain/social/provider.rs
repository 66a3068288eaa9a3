//! Values that are derived from a Provider of an App.

use latchkey_crds::{rendered::RenderedProvider, types::ProviderName};
use time::OffsetDateTime;

use crate::domain::{app::App, audit::Detail, identity::VerifiedIdentity, ports::NewIdentity};

/// The Provider of the App with that name.
pub fn find_provider<'a>(app: &'a App, name: &str) -> Option<&'a RenderedProvider> {
    app.doc.providers.iter().find(|provider| provider.name.as_str() == name)
}

/// Our callback URL for an App and a Provider, as registered at the provider.
pub(super) fn callback_url(app: &App, provider: &RenderedProvider) -> String {
    format!("{}/{}/callback", app.doc.issuer, provider.name)
}

/// The detail with the name of the Provider, for an event.
pub(super) fn provider_detail(provider: &ProviderName) -> Detail {
    Detail { provider: Some(provider.clone()), ..Detail::default() }
}

/// The identity to store, made from a verified identity.
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
