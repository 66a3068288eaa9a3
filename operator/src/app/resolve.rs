//! Collects an App and the objects that it references. Decides nothing.

use latchkey_crds::{app::App, refs::LocalRef};

use crate::{
    facts::{ConfigMapValues, Lookup, ObjectSource, SecretValues},
    provider::resolve::{self as provider, ProviderFacts},
};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AppFacts {
    pub(crate) app: App,
    pub(crate) ownership: Ownership,
    /// The Providers that `spec.providerRefs` references, in the same order.
    pub(crate) providers: Vec<Lookup<ProviderFacts>>,
    /// The Secret that `spec.mail.smtpSecretRef` references. `None`: the field is not set.
    pub(crate) smtp: Option<Lookup<SecretValues>>,
    /// The Secret that `spec.password.firebaseScryptRef` references. `None`: the field is not set.
    pub(crate) firebase_scrypt: Option<Lookup<SecretValues>>,
    /// The Secret of each of `spec.webhooks`, in the same order. `None`: the webhook has no Secret.
    pub(crate) webhook_secrets: Vec<Option<Lookup<SecretValues>>>,
    /// The ConfigMap that `spec.mail.templatesRef` references. `None`: the field is not set.
    pub(crate) templates: Option<Lookup<ConfigMapValues>>,
    /// Whether the App gets the host `spec.pages.host`.
    pub(crate) holds_pages_host: bool,
    /// The ConfigMap that `spec.pages.theme.logoRef` references. `None`: the field is not set, or there are no pages.
    pub(crate) logo: Option<Lookup<ConfigMapValues>>,
    /// The ConfigMap that `spec.pages.textsRef` references. `None`: the field is not set, or there are no pages.
    pub(crate) texts: Option<Lookup<ConfigMapValues>>,
}

/// Who owns the appID that an App claims: the App itself, another App, or a deleted App.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ownership {
    /// This App owns the appID, or can take it.
    Ours,
    /// Another App.
    Taken,
    /// The owner is deleted, and this App is in another namespace. Only an App in the owner's namespace can have the
    /// appID, because the owner's users still exist.
    Reserved,
}

pub(crate) fn resolve(app: App, ownership: Ownership, holds_pages_host: bool, source: &impl ObjectSource) -> AppFacts {
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
    let secret = |reference: &LocalRef| source.secret(namespace, &reference.name);
    let smtp = app.spec.mail.smtp_secret_ref.as_ref().map(secret);
    let firebase_scrypt = app.spec.password.firebase_scrypt_ref.as_ref().map(secret);
    let webhook_secrets = app.spec.webhooks.iter().map(|webhook| webhook.secret_ref().map(secret)).collect();
    let config_map = |name: &str| source.config_map(namespace, name);
    let templates = app.spec.mail.templates_ref.as_ref().map(|reference| config_map(&reference.name));
    let pages = Some(&app.spec.pages).filter(|pages| pages.is_enabled());
    let logo = pages.and_then(|pages| pages.theme.logo_ref.as_ref()).map(|reference| config_map(&reference.name));
    let texts = pages.and_then(|pages| pages.texts_ref.as_ref()).map(|reference| config_map(&reference.name));
    AppFacts {
        app,
        ownership,
        providers,
        smtp,
        firebase_scrypt,
        webhook_secrets,
        templates,
        holds_pages_host,
        logo,
        texts,
    }
}
