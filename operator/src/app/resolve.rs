//! Collects what is known about an App. Decides nothing.

use latchkey_crds::app::App;

use crate::{
    facts::{ConfigMapValues, Lookup, ObjectSource, SecretValues},
    provider::resolve::{self as provider, ProviderFacts},
};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AppFacts {
    pub(crate) app: App,
    pub(crate) ownership: Ownership,
    /// One for each of `spec.providerRefs`, in their order.
    pub(crate) providers: Vec<Lookup<ProviderFacts>>,
    /// For `spec.mail.smtpSecretRef`; `None` if the App references none.
    pub(crate) smtp: Option<Lookup<SecretValues>>,
    /// For `spec.mail.templatesRef`; `None` if the App references none.
    pub(crate) templates: Option<Lookup<ConfigMapValues>>,
}

/// Who owns the appID that an App claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ownership {
    /// This App, or nobody yet.
    Ours,
    /// Another App.
    Taken,
    /// Nobody, but only an App in the namespace of the deleted owner can have it, because its users still exist.
    Reserved,
}

pub(crate) fn resolve(app: App, ownership: Ownership, source: &impl ObjectSource) -> AppFacts {
    let namespace = app.metadata.namespace.as_deref().unwrap_or_default();
    let providers = app
        .spec
        .provider_refs
        .iter()
        .map(|reference| match source.provider(namespace, &reference.name) {
            Lookup::Found(found) => Lookup::Found(provider::resolve(found, source)),
            Lookup::Missing => Lookup::Missing,
            Lookup::Invalid => Lookup::Invalid,
        })
        .collect();
    let smtp = app.spec.mail.smtp_secret_ref.as_ref().map(|reference| source.secret(namespace, &reference.name));
    let templates = app.spec.mail.templates_ref.as_ref().map(|reference| source.config_map(namespace, &reference.name));
    AppFacts { app, ownership, providers, smtp, templates }
}
