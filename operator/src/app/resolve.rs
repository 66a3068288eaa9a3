//! Collects what is known of an App. Judges nothing.

use latchkey_crds::app::App;

use crate::{
    facts::{ConfigMapValues, Lookup, SecretValues, Source},
    provider::resolve::{self as provider, ProviderFacts},
};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AppFacts {
    pub(crate) app: App,
    pub(crate) holder: Holder,
    /// One for each of `spec.providerRefs`, in their order.
    pub(crate) providers: Vec<Lookup<ProviderFacts>>,
    /// Of `spec.mail.smtpSecretRef`; none: the App names none.
    pub(crate) smtp: Option<Lookup<SecretValues>>,
    /// Of `spec.mail.templatesRef`; none: the App names none.
    pub(crate) templates: Option<Lookup<ConfigMapValues>>,
}

/// Who holds the appID that an App asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// This App, or nobody yet.
    Us,
    /// Another App.
    Another,
    /// Nobody, but only the namespace of the App that had it may claim it: its users are still there.
    Reserved,
}

pub(crate) fn resolve(app: App, holder: Holder, source: &impl Source) -> AppFacts {
    let namespace = app.metadata.namespace.as_deref().unwrap_or_default();
    let providers = app
        .spec
        .provider_refs
        .iter()
        .map(|reference| match source.provider(namespace, &reference.name) {
            Lookup::Found(found) => Lookup::Found(provider::resolve(found, source)),
            Lookup::Missing => Lookup::Missing,
            Lookup::Refused => Lookup::Refused,
        })
        .collect();
    let smtp = app.spec.mail.smtp_secret_ref.as_ref().map(|reference| source.secret(namespace, &reference.name));
    let templates = app.spec.mail.templates_ref.as_ref().map(|reference| source.config_map(namespace, &reference.name));
    AppFacts { app, holder, providers, smtp, templates }
}
