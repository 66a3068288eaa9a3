//! Facts of an App → what can be served of it, or why nothing can. Pure; a fixed order of checks.

use std::{collections::BTreeMap, net::IpAddr, str::FromStr};

use latchkey_crds::{
    app::{AppSpec, MailSpec, TokensSpec, WindowSpec},
    conditions::{ConditionStatus, ConditionType, Reason, Wanted},
    rendered::{
        Administrator, BrowserBinding, CallbackMode, EnumerationProtection, LimitName, PasswordPolicy, RenderedMail,
        RenderedProvider, RenderedSmtp, RenderedTokens, SecretString, SignUp, SigningAlgorithm, SmtpRelay, SmtpTls,
        Window,
    },
    types::{AppId, EmailDomain, IssuerUrl, Origin, ProviderName, RedirectUrl},
};

use crate::{
    app::{
        resolve::{AppFacts, Holder},
        templates,
    },
    facts::{Lookup, Problem, SecretValues, Settings},
    provider::validate as provider,
};

/// An App of which everything is known, with defaults filled in and what does not resolve left out.
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
    pub(crate) limits: BTreeMap<LimitName, Vec<Window>>,
    pub(crate) administrators: Vec<Administrator>,
    pub(crate) unverified_retention_days: u32,
    pub(crate) audit_retention_days: u32,
    pub(crate) providers: Vec<RenderedProvider>,
    /// What was left out, in the order of the checks: `ResolvedRefs` is False where there is any.
    pub(crate) problems: Vec<Problem>,
}

/// Nothing can be served of the App: what was served before goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    pub(crate) field: String,
    pub(crate) message: String,
}

pub(crate) fn validate(facts: &AppFacts, settings: &Settings) -> Result<ValidatedApp, Refusal> {
    let spec = &facts.app.spec;
    let app_id = app_id(facts)?;
    let issuer = issuer(settings, &app_id)?;
    unique_provider_names(spec)?;
    session_outlives_idleness(&spec.tokens)?;

    let mut problems = Vec::new();
    let providers = providers(facts, settings, &mut problems);
    let smtp = smtp(facts, settings, &mut problems);
    let templates = own_templates(facts, &mut problems);

    Ok(ValidatedApp {
        namespace: facts.app.metadata.namespace.clone().unwrap_or_default(),
        name: facts.app.metadata.name.clone().unwrap_or_default(),
        issuer,
        display_name: spec.display_name.clone().unwrap_or_else(|| app_id.to_string()),
        redirect_urls: spec.redirect_urls.clone(),
        allowed_origins: spec.allowed_origins.clone(),
        sign_up: spec.sign_up,
        allowed_email_domains: spec.allowed_email_domains.clone(),
        // Who may only have addresses of some domains must have shown that the address is theirs.
        require_verified_email: spec.require_verified_email || !spec.allowed_email_domains.is_empty(),
        enumeration_protection: spec.enumeration_protection,
        allow_users_without_email: spec.allow_users_without_email,
        browser_binding: spec.browser_binding,
        callback_mode: spec.callback_mode,
        password: PasswordPolicy {
            minimum_length: number(spec.password.minimum_length, 8),
            minimum_strength: u8::try_from(number(spec.password.minimum_strength, 2)).unwrap_or(4),
        },
        mail: mail(&spec.mail, templates, smtp),
        tokens: tokens(&spec.tokens, &app_id),
        limits: limits(spec),
        administrators: spec
            .administrators
            .iter()
            .map(|administrator| Administrator {
                namespace: administrator.service_account.namespace.clone(),
                service_account: administrator.service_account.name.clone(),
                role: administrator.role,
            })
            .collect(),
        unverified_retention_days: number(spec.unverified_retention_days, 30),
        audit_retention_days: number(spec.audit_retention_days, 365),
        providers,
        problems,
        app_id,
    })
}

// === impl ValidatedApp ===

impl ValidatedApp {
    /// With what tokens are signed from now on.
    pub(crate) fn signing_algorithm(&self) -> SigningAlgorithm {
        self.tokens.signing_algorithm
    }

    /// The condition that follows from what was left out.
    pub(crate) fn resolved_refs(&self) -> Wanted {
        match self.problems.first() {
            None => Wanted::new(ConditionType::ResolvedRefs, ConditionStatus::True, Reason::Resolved, ""),
            Some(first) => {
                let message = self.problems.iter().map(|problem| format!("{}: {}", problem.field, problem.message));
                let message = message.collect::<Vec<_>>().join("; ");
                Wanted::new(ConditionType::ResolvedRefs, ConditionStatus::False, first.reason, message)
            }
        }
    }
}

// === impl Refusal ===

impl Refusal {
    pub(crate) fn new(reason: Reason, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { reason, field: field.into(), message: message.into() }
    }
}

fn app_id(facts: &AppFacts) -> Result<AppId, Refusal> {
    let named = facts.app.spec.app_id.is_some();
    let app_id = facts.app.app_id().map_err(|invalid| {
        let field = if named { "spec.appID" } else { "metadata.name" };
        let rest = if named { "" } else { "; set spec.appID" };
        Refusal::new(Reason::InvalidSpec, field, format!("{invalid}{rest}"))
    })?;
    match facts.holder {
        Holder::Us => Ok(app_id),
        Holder::Another => {
            let field = if named { "spec.appID" } else { "metadata.name" };
            let message = format!("another App holds the appID {app_id}; set another spec.appID");
            Err(Refusal::new(Reason::AppIDConflict, field, message))
        }
    }
}

fn issuer(settings: &Settings, app_id: &AppId) -> Result<IssuerUrl, Refusal> {
    format!("{}/{app_id}", settings.base_url).parse().map_err(|invalid| {
        Refusal::new(Reason::InvalidSpec, "spec.appID", format!("the issuer that follows from it {invalid}"))
    })
}

/// `{PROVIDER}` of a reference: its alias, else its name.
fn provider_name(spec: &AppSpec, index: usize) -> Result<ProviderName, Refusal> {
    let reference = &spec.provider_refs[index];
    match &reference.alias {
        Some(alias) => Ok(alias.clone()),
        None => ProviderName::from_str(&reference.name).map_err(|invalid| {
            let field = format!("spec.providerRefs[{index}].name");
            Refusal::new(Reason::InvalidSpec, field, format!("{invalid}; set alias"))
        }),
    }
}

fn unique_provider_names(spec: &AppSpec) -> Result<(), Refusal> {
    let mut seen = Vec::new();
    for index in 0..spec.provider_refs.len() {
        let name = provider_name(spec, index)?;
        if seen.contains(&name) {
            let message = format!("{name} is the name of an entry before it; set another alias");
            return Err(Refusal::new(Reason::InvalidSpec, format!("spec.providerRefs[{index}]"), message));
        }
        seen.push(name);
    }
    Ok(())
}

fn session_outlives_idleness(tokens: &TokensSpec) -> Result<(), Refusal> {
    match (tokens.refresh_idle_seconds, tokens.session_lifetime_seconds) {
        (Some(idle), Some(lifetime)) if idle > lifetime => Err(Refusal::new(
            Reason::InvalidSpec,
            "spec.tokens.refreshIdleSeconds",
            "is longer than sessionLifetimeSeconds, after which the session ends anyway; shorten it",
        )),
        _ => Ok(()),
    }
}

fn providers(facts: &AppFacts, settings: &Settings, problems: &mut Vec<Problem>) -> Vec<RenderedProvider> {
    let spec = &facts.app.spec;
    let mut rendered = Vec::new();
    for (index, (reference, fact)) in spec.provider_refs.iter().zip(&facts.providers).enumerate() {
        let field = format!("spec.providerRefs[{index}]");
        let Ok(name) = provider_name(spec, index) else { continue };
        let resource = &reference.name;
        let validated = match fact {
            Lookup::Missing => {
                let message = format!("Provider {resource} does not exist in this namespace; make it");
                problems.push(Problem::new(Reason::ProviderNotFound, field, message));
                continue;
            }
            Lookup::Refused => {
                let message = format!("Provider {resource} is not valid; see what is said of it");
                problems.push(Problem::new(Reason::ProviderInvalid, field, message));
                continue;
            }
            Lookup::Found(facts) => match provider::validate(facts, settings) {
                Ok(validated) => validated,
                Err(problem) => {
                    let message = format!("Provider {resource}: {}: {}", problem.field, problem.message);
                    problems.push(Problem::new(Reason::ProviderInvalid, field, message));
                    continue;
                }
            },
        };
        if let Some(problem) = validated.problem {
            let message = format!("Provider {resource}: {}: {}", problem.field, problem.message);
            problems.push(Problem::new(problem.reason, field, message));
        }
        rendered.push(RenderedProvider {
            name,
            resource: resource.clone(),
            link_by_email: reference.link_by_email.unwrap_or(validated.links_by_email),
            settings: validated.settings,
        });
    }
    rendered
}

fn smtp(facts: &AppFacts, settings: &Settings, problems: &mut Vec<Problem>) -> RenderedSmtp {
    let name = facts.app.spec.mail.smtp_secret_ref.as_ref().map_or("", |reference| &reference.name);
    let problem = match &facts.smtp {
        None => return RenderedSmtp::Install,
        Some(Lookup::Missing) => {
            let message = format!("Secret {name} does not exist in this namespace; make it. Mail waits until then");
            (Reason::SecretNotFound, message)
        }
        Some(Lookup::Refused) => {
            (Reason::SecretKeyInvalid, format!("Secret {name} is not valid; see what is said of it. Mail waits"))
        }
        Some(Lookup::Found(values)) => match smtp_relay(values, settings) {
            Ok(relay) => return RenderedSmtp::Own(relay),
            Err(SmtpProblem::NoKey(key)) => {
                (Reason::SecretKeyNotFound, format!("Secret {name} has no key {key}; add it. Mail waits until then"))
            }
            Err(SmtpProblem::Invalid(key, what)) => {
                (Reason::SecretKeyInvalid, format!("Secret {name}, key {key}: {what}. Mail waits until then"))
            }
        },
    };
    problems.push(Problem::new(problem.0, "spec.mail.smtpSecretRef", problem.1));
    RenderedSmtp::Unresolved
}

/// What is wrong with a relay's Secret: the key, and what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SmtpProblem {
    NoKey(&'static str),
    Invalid(&'static str, &'static str),
}

/// The ports of mail submission and relay; others are refused so that no App reaches other services by it (contract, 5).
const SMTP_PORTS: [u16; 4] = [25, 465, 587, 2525];

fn smtp_relay(values: &SecretValues, settings: &Settings) -> Result<SmtpRelay, SmtpProblem> {
    let host = smtp_text(values, "host")?;
    let host = host.expose();
    if !is_host(host) {
        return Err(SmtpProblem::Invalid("host", "must be a host name or an IP address, without port"));
    }
    let port = smtp_text(values, "port")?;
    let port = match port.expose().parse::<u16>() {
        Ok(0) | Err(_) => return Err(SmtpProblem::Invalid("port", "must be a number from 1 to 65535")),
        Ok(port) => port,
    };
    if !settings.allow_insecure && !SMTP_PORTS.contains(&port) {
        return Err(SmtpProblem::Invalid("port", "must be 25, 465, 587 or 2525"));
    }
    let tls = match smtp_text(values, "tls")?.expose() {
        "starttls" => SmtpTls::Starttls,
        "implicit" => SmtpTls::Implicit,
        "none" => SmtpTls::None,
        _ => return Err(SmtpProblem::Invalid("tls", "must be starttls, implicit or none")),
    };
    let username = smtp_login(values, "username")?;
    let password = smtp_login(values, "password")?;
    match (&username, &password) {
        (Some(_), None) => return Err(SmtpProblem::NoKey("password")),
        (None, Some(_)) => return Err(SmtpProblem::NoKey("username")),
        (Some(_), Some(_)) | (None, None) => {}
    }
    if username.is_some() && tls == SmtpTls::None && !settings.allow_insecure {
        return Err(SmtpProblem::Invalid("tls", "must be starttls or implicit where there is a password"));
    }
    Ok(SmtpRelay { host: host.to_owned(), port, tls, username, password })
}

fn smtp_text(values: &SecretValues, key: &'static str) -> Result<SecretString, SmtpProblem> {
    let value = values.get(key).ok_or(SmtpProblem::NoKey(key))?;
    let text = value.text().ok_or(SmtpProblem::Invalid(key, "is not text"))?;
    Ok(SecretString::new(text.expose().trim()))
}

fn smtp_login(values: &SecretValues, key: &'static str) -> Result<Option<SecretString>, SmtpProblem> {
    let Some(value) = values.get(key) else { return Ok(None) };
    let text = value.text().ok_or(SmtpProblem::Invalid(key, "is not text"))?;
    if text.expose().is_empty() {
        return Err(SmtpProblem::Invalid(key, "is empty; take the key away where the relay wants no login"));
    }
    if text.expose().len() > 1024 || text.expose().contains(char::is_control) {
        return Err(SmtpProblem::Invalid(key, "must have 1024 characters or fewer and no control character"));
    }
    Ok(Some(text))
}

fn is_host(host: &str) -> bool {
    let is_label = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    host.parse::<IpAddr>().is_ok() || (host.len() <= 253 && host.trim_end_matches('.').split('.').all(is_label))
}

fn own_templates(facts: &AppFacts, problems: &mut Vec<Problem>) -> BTreeMap<String, String> {
    let name = facts.app.spec.mail.templates_ref.as_ref().map_or("", |reference| &reference.name);
    let field = "spec.mail.templatesRef";
    match &facts.templates {
        None => BTreeMap::new(),
        Some(Lookup::Missing) => {
            let message = format!("ConfigMap {name} does not exist in this namespace; make it. Mails are the defaults");
            problems.push(Problem::new(Reason::ConfigMapNotFound, field, message));
            BTreeMap::new()
        }
        Some(Lookup::Refused) => {
            let message = format!("ConfigMap {name} is not valid; see what is said of it. Mails are the defaults");
            problems.push(Problem::new(Reason::TemplatesInvalid, field, message));
            BTreeMap::new()
        }
        Some(Lookup::Found(values)) => {
            let checked = templates::check(name, values);
            for fault in checked.faults {
                problems.push(Problem::new(Reason::TemplatesInvalid, field, fault));
            }
            checked.good
        }
    }
}

fn mail(spec: &MailSpec, templates: BTreeMap<String, String>, smtp: RenderedSmtp) -> RenderedMail {
    RenderedMail {
        from: spec.from.clone(),
        confirm_url: spec.confirm_url.clone(),
        reset_url: spec.reset_url.clone(),
        confirm_code_lifetime_seconds: number(spec.confirm_code_lifetime_seconds, 86_400),
        reset_code_lifetime_seconds: number(spec.reset_code_lifetime_seconds, 1800),
        templates,
        smtp,
    }
}

fn tokens(spec: &TokensSpec, app_id: &AppId) -> RenderedTokens {
    let session_lifetime_seconds = number(spec.session_lifetime_seconds, 7_776_000);
    RenderedTokens {
        signing_algorithm: spec.signing_algorithm,
        access_lifetime_seconds: number(spec.access_lifetime_seconds, 900),
        // A default never outlives what the App says of the session.
        refresh_idle_seconds: number(spec.refresh_idle_seconds, 2_592_000).min(session_lifetime_seconds),
        session_lifetime_seconds,
        refresh_grace_seconds: number(spec.refresh_grace_seconds, 30),
        audiences: match spec.audiences.as_slice() {
            [] => vec![app_id.to_string()],
            audiences => audiences.to_vec(),
        },
    }
}

fn limits(spec: &AppSpec) -> BTreeMap<LimitName, Vec<Window>> {
    let window = |window: &WindowSpec| Window {
        count: number(Some(window.count), 1),
        window_seconds: number(Some(window.window_seconds), 1),
    };
    LimitName::ALL
        .into_iter()
        .map(|name| match spec.limits.get(name) {
            Some(windows) => (name, windows.iter().map(window).collect()),
            None => (name, name.default_windows()),
        })
        .collect()
}

/// A number of the spec, which the schema keeps from being negative, or the default.
fn number(value: Option<i32>, default: u32) -> u32 {
    value.and_then(|value| u32::try_from(value).ok()).unwrap_or(default)
}
