//! Validates an App with the objects that it references. Returns the parts of the App that can be served, or why the
//! App is rejected. The checks run in a fixed order. They do no I/O and read no clock.

use std::{collections::BTreeMap, str::FromStr, sync::Arc};

use latchkey_crds::{
    app::{App, AppSpec, MailSpec, Role, TokensSpec, WindowSpec},
    conditions::Reason,
    refs::{ProviderRef, ServiceAccountRef},
    rendered::{
        Administrator, AdministratorRole, BrowserBinding, CallbackMode, ClientLimitName, EnumerationProtection,
        LimitName, PasswordPolicy, RenderedClient, RenderedMail, RenderedPages, RenderedProvider,
        RenderedProviderGroups, RenderedSmtp, RenderedTokens, RenderedWebhook, SignUp, SigningAlgorithm, Window,
    },
    types::{AppId, EmailDomain, IssuerUrl, Origin, ProviderName, RedirectUrl},
};

use crate::{
    app::{
        resolve::{AppFacts, Ownership},
        templates,
    },
    facts::{FieldError, Lookup, Settings},
    provider::validate as provider,
};

mod firebase;
pub(crate) mod logo;
mod pages;
mod relay;
mod secrets;
#[cfg(test)]
mod tests;
mod webhooks;

/// The presets of providers that can report the groups of a user.
const PRESETS_WITH_GROUPS: [&str; 4] = ["oidc", "oauth2", "gitlab", "microsoft"];

/// A complete App: defaults are filled in, and references that cannot be used are left out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ValidatedApp {
    pub(crate) app_id: AppId,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) issuer: IssuerUrl,
    pub(crate) display_name: String,
    pub(crate) redirect_urls: Vec<RedirectUrl>,
    pub(crate) allowed_origins: Vec<Origin>,
    pub(crate) sign_up: SignUp,
    pub(crate) allowed_email_domains: Vec<EmailDomain>,
    pub(crate) require_verified_email: bool,
    pub(crate) enumeration_protection: EnumerationProtection,
    pub(crate) allow_users_without_email: bool,
    pub(crate) browser_binding: BrowserBinding,
    pub(crate) callback_mode: CallbackMode,
    pub(crate) password: PasswordPolicy,
    pub(crate) mail: RenderedMail,
    pub(crate) tokens: RenderedTokens,
    /// The number of days after which a key is replaced. Not part of the rendered document.
    pub(crate) key_rotation_days: u32,
    pub(crate) limits: BTreeMap<LimitName, Vec<Window>>,
    /// The limits of clients that the App overrides. The other limits of clients have their defaults.
    pub(crate) client_limits: BTreeMap<ClientLimitName, Vec<Window>>,
    pub(crate) administrators: Vec<Administrator>,
    pub(crate) importers: Vec<ServiceAccountRef>,
    pub(crate) webhooks: Vec<RenderedWebhook>,
    pub(crate) pages: Option<RenderedPages>,
    /// The clients that are served, the oldest first. The validation leaves this list empty:
    /// [`select`](crate::client::select::select) chooses the clients.
    pub(crate) clients: Vec<RenderedClient>,
    pub(crate) unverified_retention_days: u32,
    pub(crate) audit_retention_days: u32,
    pub(crate) providers: Vec<RenderedProvider>,
    /// Why references cannot be used, in the order of the checks. If there is an error, `ResolvedRefs` is False.
    pub(crate) field_errors: Vec<FieldError>,
}

/// Why the App is rejected. The document that was published last is still served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rejection {
    pub(crate) reason: Reason,
    pub(crate) field: String,
    pub(crate) message: String,
}

pub(crate) fn validate(facts: &AppFacts, settings: &Settings) -> Result<ValidatedApp, Rejection> {
    let spec = &facts.app.spec;
    let app_id = owned_app_id(facts)?;
    let issuer = issuer(settings, &app_id)?;
    check_provider_names(spec)?;
    check_idle_lifetime(&spec.tokens)?;
    webhooks::check(spec, settings)?;
    pages::check(&spec.pages, settings)?;

    let mut field_errors = Vec::new();
    let providers = providers(facts, settings, &mut field_errors);
    let firebase_scrypt = firebase::firebase_scrypt(facts, &mut field_errors);
    let smtp = relay::smtp(facts, settings, &mut field_errors);
    let templates = valid_templates(facts, &mut field_errors);
    let webhooks = webhooks::webhooks(facts, &mut field_errors);
    let pages = pages::pages(facts, &mut field_errors);

    Ok(ValidatedApp {
        namespace: facts.app.metadata.namespace.clone().unwrap_or_default(),
        name: facts.app.metadata.name.clone().unwrap_or_default(),
        issuer,
        display_name: spec.display_name.clone().unwrap_or_else(|| app_id.to_string()),
        redirect_urls: spec.redirect_urls.clone(),
        allowed_origins: spec.allowed_origins.clone(),
        sign_up: spec.sign_up,
        allowed_email_domains: spec.allowed_email_domains.clone(),
        // A restriction to domains works only if users have proved that they own their email address.
        require_verified_email: spec.require_verified_email || !spec.allowed_email_domains.is_empty(),
        enumeration_protection: spec.enumeration_protection,
        allow_users_without_email: spec.allow_users_without_email,
        browser_binding: spec.browser_binding,
        callback_mode: spec.callback_mode,
        password: PasswordPolicy {
            minimum_length: number_or_default(spec.password.minimum_length, 8),
            minimum_strength: u8::try_from(number_or_default(spec.password.minimum_strength, 2)).unwrap_or(4),
            foreign_hash_retention_days: spec
                .password
                .foreign_hash_retention_days
                .and_then(|days| u32::try_from(days).ok()),
            firebase_scrypt,
        },
        mail: mail(&spec.mail, templates, smtp),
        tokens: tokens(&spec.tokens, &app_id),
        key_rotation_days: number_or_default(spec.tokens.key_rotation_days, 90),
        limits: limits(spec),
        client_limits: client_limits(spec),
        administrators: administrators(spec),
        importers: importers(spec),
        webhooks,
        pages,
        clients: Vec::new(),
        unverified_retention_days: number_or_default(spec.unverified_retention_days, 30),
        audit_retention_days: number_or_default(spec.audit_retention_days, 365),
        providers,
        field_errors,
        app_id,
    })
}

// === impl ValidatedApp ===

impl ValidatedApp {
    /// Returns the signing algorithm that the App asks for. If the Active key has another algorithm, the key is
    /// rotated.
    pub(crate) fn signing_algorithm(&self) -> SigningAlgorithm {
        self.tokens.signing_algorithm
    }

    /// Whether the App does not get the host for its pages because another App has it, or can take it first.
    pub(crate) fn waits_for_pages_host(&self) -> bool {
        self.field_errors.iter().any(|error| error.reason == Reason::HostConflict)
    }
}

// === impl Rejection ===

impl Rejection {
    pub(crate) fn new(reason: Reason, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { reason, field: field.into(), message: message.into() }
    }
}

/// Returns the appID that the App claims.
pub(crate) fn parse_app_id(app: &App) -> Result<AppId, Rejection> {
    app.app_id().map_err(|invalid| {
        let advice = if app.spec.app_id.is_some() { "" } else { "; set spec.appID" };
        Rejection::new(Reason::InvalidSpec, app_id_field(app), format!("{invalid}{advice}"))
    })
}

/// Returns the field that the appID comes from.
fn app_id_field(app: &App) -> &'static str {
    if app.spec.app_id.is_some() { "spec.appID" } else { "metadata.name" }
}

fn owned_app_id(facts: &AppFacts) -> Result<AppId, Rejection> {
    let app_id = parse_app_id(&facts.app)?;
    // Neither message names the owner, because the owner may belong to another tenant.
    let (reason, message) = match facts.ownership {
        Ownership::Ours => return Ok(app_id),
        Ownership::Taken => {
            (Reason::AppIDConflict, format!("another App owns the appID {app_id}; set another spec.appID"))
        }
        Ownership::Reserved => (
            Reason::AppIDReserved,
            format!(
                "the appID {app_id} belonged to an App of another namespace, which still has users; \
                 set another spec.appID, or ask the platform team to hand it over"
            ),
        ),
    };
    Err(Rejection::new(reason, app_id_field(&facts.app), message))
}

fn issuer(settings: &Settings, app_id: &AppId) -> Result<IssuerUrl, Rejection> {
    format!("{}/{app_id}", settings.base_url)
        .parse()
        .map_err(|invalid| Rejection::new(Reason::InvalidSpec, "spec.appID", format!("the resulting issuer {invalid}")))
}

/// Returns the name of a provider in URLs: the alias of the reference or, without an alias, the name of the Provider.
fn provider_name(spec: &AppSpec, index: usize) -> Result<ProviderName, Rejection> {
    let reference = &spec.provider_refs[index];
    match &reference.alias {
        Some(alias) => Ok(alias.clone()),
        None => ProviderName::from_str(&reference.name).map_err(|invalid| {
            let field = format!("spec.providerRefs[{index}].name");
            Rejection::new(Reason::InvalidSpec, field, format!("{invalid}; set alias"))
        }),
    }
}

fn check_provider_names(spec: &AppSpec) -> Result<(), Rejection> {
    let mut seen = Vec::new();
    for index in 0..spec.provider_refs.len() {
        let name = provider_name(spec, index)?;
        if seen.contains(&name) {
            let message = format!("{name} is already the name of an earlier entry; set another alias");
            return Err(Rejection::new(Reason::InvalidSpec, format!("spec.providerRefs[{index}]"), message));
        }
        seen.push(name);
    }
    Ok(())
}

fn check_idle_lifetime(tokens: &TokensSpec) -> Result<(), Rejection> {
    match (tokens.refresh_idle_seconds, tokens.session_lifetime_seconds) {
        (Some(idle), Some(lifetime)) if idle > lifetime => Err(Rejection::new(
            Reason::InvalidSpec,
            "spec.tokens.refreshIdleSeconds",
            "is longer than sessionLifetimeSeconds, which ends the session anyway; shorten it",
        )),
        _ => Ok(()),
    }
}

fn providers(facts: &AppFacts, settings: &Settings, field_errors: &mut Vec<FieldError>) -> Vec<RenderedProvider> {
    let spec = &facts.app.spec;
    let mut rendered = Vec::new();
    for (index, (reference, fact)) in spec.provider_refs.iter().zip(&facts.providers).enumerate() {
        let field = format!("spec.providerRefs[{index}]");
        let Ok(name) = provider_name(spec, index) else { continue };
        let resource = &reference.name;
        let validated = match fact {
            Lookup::Missing => {
                let message = format!("Provider {resource} does not exist in this namespace; create it");
                field_errors.push(FieldError::new(Reason::ProviderNotFound, field, message));
                continue;
            }
            Lookup::Invalid => {
                let message = format!("Provider {resource} is not valid; see the message about it");
                field_errors.push(FieldError::new(Reason::ProviderInvalid, field, message));
                continue;
            }
            Lookup::Found(facts) => match provider::validate(facts, settings) {
                Ok(validated) => validated,
                Err(error) => {
                    let message = format!("Provider {resource}: {}: {}", error.field, error.message);
                    field_errors.push(FieldError::new(Reason::ProviderInvalid, field, message));
                    continue;
                }
            },
        };
        if let Some(error) = validated.field_error {
            let message = format!("Provider {resource}: {}: {}", error.field, error.message);
            field_errors.push(FieldError::new(error.reason, &field, message));
        }
        let groups = provider_groups(reference, &name, &validated.settings.preset).unwrap_or_else(|message| {
            field_errors.push(FieldError::new(Reason::ProviderInvalid, format!("{field}.groups"), message));
            None
        });
        rendered.push(RenderedProvider {
            name,
            groups,
            resource: resource.clone(),
            link_by_email: reference.link_by_email.unwrap_or(validated.links_by_email),
            settings: validated.settings,
        });
    }
    rendered
}

/// Returns the groups to take over from a provider, or why they cannot be taken over.
fn provider_groups(
    reference: &ProviderRef,
    name: &ProviderName,
    preset: &str,
) -> Result<Option<RenderedProviderGroups>, String> {
    let Some(groups) = &reference.groups else { return Ok(None) };
    if !PRESETS_WITH_GROUPS.contains(&preset) {
        let resource = &reference.name;
        return Err(format!("Provider {resource} with {preset} reports no groups; remove groups"));
    }
    Ok(Some(RenderedProviderGroups {
        claim: groups.claim.clone(),
        prefix: groups.prefix.clone().unwrap_or_else(|| format!("{name}:")),
        only: groups.only.clone(),
    }))
}

fn valid_templates(facts: &AppFacts, field_errors: &mut Vec<FieldError>) -> BTreeMap<String, String> {
    let name = facts.app.spec.mail.templates_ref.as_ref().map_or("", |reference| &reference.name);
    let field = "spec.mail.templatesRef";
    match &facts.templates {
        None => BTreeMap::new(),
        Some(Lookup::Missing) => {
            let message =
                format!("ConfigMap {name} does not exist in this namespace; create it. The default mails are sent");
            field_errors.push(FieldError::new(Reason::ConfigMapNotFound, field, message));
            BTreeMap::new()
        }
        Some(Lookup::Invalid) => {
            let message =
                format!("ConfigMap {name} is not valid; see the message about it. The default mails are sent");
            field_errors.push(FieldError::new(Reason::TemplatesInvalid, field, message));
            BTreeMap::new()
        }
        Some(Lookup::Found(values)) => {
            let checked = templates::check_templates(name, values);
            for error in checked.errors {
                field_errors.push(FieldError::new(Reason::TemplatesInvalid, field, error));
            }
            checked.valid
        }
    }
}

fn mail(spec: &MailSpec, templates: BTreeMap<String, String>, smtp: RenderedSmtp) -> RenderedMail {
    RenderedMail {
        from: spec.from.clone(),
        confirm_url: spec.confirm_url.clone(),
        reset_url: spec.reset_url.clone(),
        confirm_code_lifetime_seconds: number_or_default(spec.confirm_code_lifetime_seconds, 86_400),
        reset_code_lifetime_seconds: number_or_default(spec.reset_code_lifetime_seconds, 1800),
        own_invitation_url: spec.invitation_url.clone(),
        own_invitation_code_lifetime_seconds: spec
            .invitation_code_lifetime_seconds
            .and_then(|seconds| u32::try_from(seconds).ok()),
        templates: templates.into_iter().map(|(name, source)| (name, Arc::new(source))).collect(),
        smtp,
    }
}

fn tokens(spec: &TokensSpec, app_id: &AppId) -> RenderedTokens {
    let session_lifetime_seconds = number_or_default(spec.session_lifetime_seconds, 7_776_000);
    RenderedTokens {
        signing_algorithm: spec.signing_algorithm,
        access_lifetime_seconds: number_or_default(spec.access_lifetime_seconds, 900),
        // The default of the idle time must not exceed the App's session lifetime.
        refresh_idle_seconds: number_or_default(spec.refresh_idle_seconds, 2_592_000).min(session_lifetime_seconds),
        session_lifetime_seconds,
        refresh_grace_seconds: number_or_default(spec.refresh_grace_seconds, 30),
        audiences: match spec.audiences.as_slice() {
            [] => vec![app_id.to_string()],
            audiences => audiences.to_vec(),
        },
    }
}

fn limits(spec: &AppSpec) -> BTreeMap<LimitName, Vec<Window>> {
    LimitName::ALL
        .into_iter()
        .map(|name| match spec.limits.get(name) {
            Some(own) => (name, windows(own)),
            None => (name, name.default_windows()),
        })
        .collect()
}

/// Returns the limits of clients that the App overrides.
fn client_limits(spec: &AppSpec) -> BTreeMap<ClientLimitName, Vec<Window>> {
    let own = |name: ClientLimitName| Some((name, windows(spec.limits.get_client_limit(name)?)));
    ClientLimitName::ALL.into_iter().filter_map(own).collect()
}

fn windows(windows: &[WindowSpec]) -> Vec<Window> {
    let window = |window: &WindowSpec| Window {
        count: number_or_default(Some(window.count), 1),
        window_seconds: number_or_default(Some(window.window_seconds), 1),
    };
    windows.iter().map(window).collect()
}

/// Returns the administrators without the importers: servers that know only format 1 of the document reject the role
/// `Importer`.
fn administrators(spec: &AppSpec) -> Vec<Administrator> {
    let listed = spec.administrators.iter().filter_map(|administrator| {
        let role = match administrator.role {
            Role::UserAdmin => AdministratorRole::UserAdmin,
            Role::Reader => AdministratorRole::Reader,
            Role::Introspector => AdministratorRole::Introspector,
            Role::Importer => return None,
        };
        let ServiceAccountRef { namespace, name } = administrator.service_account.clone();
        Some(Administrator { namespace, service_account: name, role })
    });
    listed.collect()
}

fn importers(spec: &AppSpec) -> Vec<ServiceAccountRef> {
    let importers = spec.administrators.iter().filter(|administrator| administrator.role == Role::Importer);
    importers.map(|importer| importer.service_account.clone()).collect()
}

/// Returns a number of the spec, or the default if the spec does not set the number. The schema rejects negative
/// numbers.
fn number_or_default(value: Option<i32>, default: u32) -> u32 {
    value.and_then(|value| u32::try_from(value).ok()).unwrap_or(default)
}
