//! Facts of an App → what can be served of it, or why nothing can. Pure; checks run in a fixed order.

use std::{collections::BTreeMap, net::IpAddr, str::FromStr, sync::Arc};

use latchkey_crds::{
    app::{App, AppSpec, MailSpec, TokensSpec, WindowSpec},
    conditions::Reason,
    rendered::{
        Administrator, BrowserBinding, CallbackMode, EnumerationProtection, LimitName, PasswordPolicy, RenderedMail,
        RenderedProvider, RenderedSmtp, RenderedTokens, SecretString, SignUp, SigningAlgorithm, SmtpRelay, SmtpTls,
        Window,
    },
    types::{AppId, EmailDomain, IssuerUrl, Origin, ProviderName, RedirectUrl},
};

use crate::{
    app::{
        resolve::{AppFacts, Ownership},
        templates,
    },
    facts::{FieldError, Lookup, SecretValues, Settings},
    provider::validate as provider,
};

/// A complete App: defaults are filled in, and references that do not resolve are left out.
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
    /// After how many days a key is replaced; servers need not know.
    pub(crate) key_rotation_days: u32,
    pub(crate) limits: BTreeMap<LimitName, Vec<Window>>,
    pub(crate) administrators: Vec<Administrator>,
    pub(crate) unverified_retention_days: u32,
    pub(crate) audit_retention_days: u32,
    pub(crate) providers: Vec<RenderedProvider>,
    /// What was left out, in the order of the checks. If there is any, `ResolvedRefs` is False.
    pub(crate) field_errors: Vec<FieldError>,
}

/// Why nothing of the App can be served. What was published before is still served.
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

    let mut problems = Vec::new();
    let providers = providers(facts, settings, &mut problems);
    let smtp = smtp(facts, settings, &mut problems);
    let templates = valid_templates(facts, &mut problems);

    Ok(ValidatedApp {
        namespace: facts.app.metadata.namespace.clone().unwrap_or_default(),
        name: facts.app.metadata.name.clone().unwrap_or_default(),
        issuer,
        display_name: spec.display_name.clone().unwrap_or_else(|| app_id.to_string()),
        redirect_urls: spec.redirect_urls.clone(),
        allowed_origins: spec.allowed_origins.clone(),
        sign_up: spec.sign_up,
        allowed_email_domains: spec.allowed_email_domains.clone(),
        // A restriction to domains only works if users have proved that they own their address.
        require_verified_email: spec.require_verified_email || !spec.allowed_email_domains.is_empty(),
        enumeration_protection: spec.enumeration_protection,
        allow_users_without_email: spec.allow_users_without_email,
        browser_binding: spec.browser_binding,
        callback_mode: spec.callback_mode,
        password: PasswordPolicy {
            minimum_length: number_or_default(spec.password.minimum_length, 8),
            minimum_strength: u8::try_from(number_or_default(spec.password.minimum_strength, 2)).unwrap_or(4),
        },
        mail: mail(&spec.mail, templates, smtp),
        tokens: tokens(&spec.tokens, &app_id),
        key_rotation_days: number_or_default(spec.tokens.key_rotation_days, 90),
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
        unverified_retention_days: number_or_default(spec.unverified_retention_days, 30),
        audit_retention_days: number_or_default(spec.audit_retention_days, 365),
        providers,
        field_errors: problems,
        app_id,
    })
}

// === impl ValidatedApp ===

impl ValidatedApp {
    /// The algorithm that signs tokens from now on.
    pub(crate) fn signing_algorithm(&self) -> SigningAlgorithm {
        self.tokens.signing_algorithm
    }
}

// === impl Rejection ===

impl Rejection {
    pub(crate) fn new(reason: Reason, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { reason, field: field.into(), message: message.into() }
    }
}

/// The appID that the App claims.
pub(crate) fn parse_app_id(app: &App) -> Result<AppId, Rejection> {
    app.app_id().map_err(|invalid| {
        let advice = if app.spec.app_id.is_some() { "" } else { "; set spec.appID" };
        Rejection::new(Reason::InvalidSpec, app_id_field(app), format!("{invalid}{advice}"))
    })
}

/// The field that the appID comes from.
fn app_id_field(app: &App) -> &'static str {
    if app.spec.app_id.is_some() { "spec.appID" } else { "metadata.name" }
}

fn owned_app_id(facts: &AppFacts) -> Result<AppId, Rejection> {
    let app_id = parse_app_id(&facts.app)?;
    // Neither message names the owner, because it may belong to another tenant.
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

/// `{PROVIDER}` of a reference: its alias, or its name.
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

fn providers(facts: &AppFacts, settings: &Settings, problems: &mut Vec<FieldError>) -> Vec<RenderedProvider> {
    let spec = &facts.app.spec;
    let mut rendered = Vec::new();
    for (index, (reference, fact)) in spec.provider_refs.iter().zip(&facts.providers).enumerate() {
        let field = format!("spec.providerRefs[{index}]");
        let Ok(name) = provider_name(spec, index) else { continue };
        let resource = &reference.name;
        let validated = match fact {
            Lookup::Missing => {
                let message = format!("Provider {resource} does not exist in this namespace; create it");
                problems.push(FieldError::new(Reason::ProviderNotFound, field, message));
                continue;
            }
            Lookup::Invalid => {
                let message = format!("Provider {resource} is not valid; see the message about it");
                problems.push(FieldError::new(Reason::ProviderInvalid, field, message));
                continue;
            }
            Lookup::Found(facts) => match provider::validate(facts, settings) {
                Ok(validated) => validated,
                Err(problem) => {
                    let message = format!("Provider {resource}: {}: {}", problem.field, problem.message);
                    problems.push(FieldError::new(Reason::ProviderInvalid, field, message));
                    continue;
                }
            },
        };
        if let Some(problem) = validated.field_error {
            let message = format!("Provider {resource}: {}: {}", problem.field, problem.message);
            problems.push(FieldError::new(problem.reason, field, message));
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

fn smtp(facts: &AppFacts, settings: &Settings, problems: &mut Vec<FieldError>) -> RenderedSmtp {
    let name = facts.app.spec.mail.smtp_secret_ref.as_ref().map_or("", |reference| &reference.name);
    let problem = match &facts.smtp {
        None => return RenderedSmtp::Install,
        Some(Lookup::Missing) => {
            let message = format!("Secret {name} does not exist in this namespace; create it. Mail waits until then");
            (Reason::SecretNotFound, message)
        }
        Some(Lookup::Invalid) => {
            (Reason::SecretKeyInvalid, format!("Secret {name} is not valid; see the message about it. Mail waits"))
        }
        Some(Lookup::Found(values)) => match smtp_relay(values, settings) {
            Ok(relay) => return RenderedSmtp::Own(relay),
            Err(SmtpSecretError::MissingKey(key)) => {
                (Reason::SecretKeyNotFound, format!("Secret {name} has no key {key}; add it. Mail waits until then"))
            }
            Err(SmtpSecretError::Invalid(key, what)) => {
                (Reason::SecretKeyInvalid, format!("Secret {name}, key {key}: {what}. Mail waits until then"))
            }
        },
    };
    problems.push(FieldError::new(problem.0, "spec.mail.smtpSecretRef", problem.1));
    RenderedSmtp::Unresolved
}

/// What is wrong with a relay's Secret: the key, and what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SmtpSecretError {
    MissingKey(&'static str),
    Invalid(&'static str, &'static str),
}

/// The ports of mail submission and relay. Others are rejected, so that no App reaches other services through them
/// (specification: Limits, Outgoing connections).
const SMTP_PORTS: [u16; 4] = [25, 465, 587, 2525];

fn smtp_relay(values: &SecretValues, settings: &Settings) -> Result<SmtpRelay, SmtpSecretError> {
    let host = required_text(values, "host")?;
    let host = host.expose();
    if !is_host_or_ip(host) {
        return Err(SmtpSecretError::Invalid("host", "must be a host name or an IP address, without port"));
    }
    let port = required_text(values, "port")?;
    let port = match port.expose().parse::<u16>() {
        Ok(0) | Err(_) => return Err(SmtpSecretError::Invalid("port", "must be a number from 1 to 65535")),
        Ok(port) => port,
    };
    if !settings.allow_insecure && !SMTP_PORTS.contains(&port) {
        return Err(SmtpSecretError::Invalid("port", "must be 25, 465, 587 or 2525"));
    }
    let tls = match required_text(values, "tls")?.expose() {
        "starttls" => SmtpTls::Starttls,
        "implicit" => SmtpTls::Implicit,
        "none" => SmtpTls::None,
        _ => return Err(SmtpSecretError::Invalid("tls", "must be starttls, implicit or none")),
    };
    let username = optional_credential(values, "username")?;
    let password = optional_credential(values, "password")?;
    match (&username, &password) {
        (Some(_), None) => return Err(SmtpSecretError::MissingKey("password")),
        (None, Some(_)) => return Err(SmtpSecretError::MissingKey("username")),
        (Some(_), Some(_)) | (None, None) => {}
    }
    if username.is_some() && tls == SmtpTls::None && !settings.allow_insecure {
        return Err(SmtpSecretError::Invalid("tls", "must be starttls or implicit if there is a password"));
    }
    Ok(SmtpRelay { host: host.to_owned(), port, tls, username, password })
}

fn required_text(values: &SecretValues, key: &'static str) -> Result<SecretString, SmtpSecretError> {
    let value = values.get(key).ok_or(SmtpSecretError::MissingKey(key))?;
    let text = value.text().ok_or(SmtpSecretError::Invalid(key, "is not text"))?;
    Ok(SecretString::new(text.expose().trim()))
}

fn optional_credential(values: &SecretValues, key: &'static str) -> Result<Option<SecretString>, SmtpSecretError> {
    let Some(value) = values.get(key) else { return Ok(None) };
    let text = value.text().ok_or(SmtpSecretError::Invalid(key, "is not text"))?;
    if text.expose().is_empty() {
        return Err(SmtpSecretError::Invalid(key, "is empty; remove the key if the relay needs no login"));
    }
    if text.expose().len() > 1024 || text.expose().contains(char::is_control) {
        return Err(SmtpSecretError::Invalid(key, "must have 1024 characters or fewer and no control character"));
    }
    Ok(Some(text))
}

fn is_host_or_ip(host: &str) -> bool {
    let is_label = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    host.parse::<IpAddr>().is_ok() || (host.len() <= 253 && host.trim_end_matches('.').split('.').all(is_label))
}

fn valid_templates(facts: &AppFacts, problems: &mut Vec<FieldError>) -> BTreeMap<String, String> {
    let name = facts.app.spec.mail.templates_ref.as_ref().map_or("", |reference| &reference.name);
    let field = "spec.mail.templatesRef";
    match &facts.templates {
        None => BTreeMap::new(),
        Some(Lookup::Missing) => {
            let message =
                format!("ConfigMap {name} does not exist in this namespace; create it. The default mails are sent");
            problems.push(FieldError::new(Reason::ConfigMapNotFound, field, message));
            BTreeMap::new()
        }
        Some(Lookup::Invalid) => {
            let message =
                format!("ConfigMap {name} is not valid; see the message about it. The default mails are sent");
            problems.push(FieldError::new(Reason::TemplatesInvalid, field, message));
            BTreeMap::new()
        }
        Some(Lookup::Found(values)) => {
            let checked = templates::check_templates(name, values);
            for fault in checked.errors {
                problems.push(FieldError::new(Reason::TemplatesInvalid, field, fault));
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
        templates: templates.into_iter().map(|(name, source)| (name, Arc::new(source))).collect(),
        smtp,
    }
}

fn tokens(spec: &TokensSpec, app_id: &AppId) -> RenderedTokens {
    let session_lifetime_seconds = number_or_default(spec.session_lifetime_seconds, 7_776_000);
    RenderedTokens {
        signing_algorithm: spec.signing_algorithm,
        access_lifetime_seconds: number_or_default(spec.access_lifetime_seconds, 900),
        // The default must not exceed the App's session lifetime.
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
    let window = |window: &WindowSpec| Window {
        count: number_or_default(Some(window.count), 1),
        window_seconds: number_or_default(Some(window.window_seconds), 1),
    };
    LimitName::ALL
        .into_iter()
        .map(|name| match spec.limits.get(name) {
            Some(windows) => (name, windows.iter().map(window).collect()),
            None => (name, name.default_windows()),
        })
        .collect()
}

/// A number of the spec, which the schema keeps non-negative, or the default.
fn number_or_default(value: Option<i32>, default: u32) -> u32 {
    value.and_then(|value| u32::try_from(value).ok()).unwrap_or(default)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        app::{keys::lifecycle::KeyPolicy, resolve},
        facts::{SecretBytes, SecretKeyLookup},
        manifests::{Manifests, Schemas},
    };

    fn settings() -> Settings {
        Settings { base_url: "https://auth.example.com".parse().unwrap(), allow_insecure: false }
    }

    fn development() -> Settings {
        Settings { base_url: "http://127.0.0.1:8080".parse().unwrap(), allow_insecure: true }
    }

    /// An App that uses everything: its Provider, relay and templates exist.
    fn facts(spec: Value) -> AppFacts {
        let app: App = serde_json::from_value(json!({
            "apiVersion": "latchkey.dev/v1alpha1",
            "kind": "App",
            "metadata": { "name": "shop", "namespace": "shop" },
            "spec": spec,
        }))
        .unwrap();
        let mut manifests = Manifests::default();
        manifests.add_file("a.yaml", AROUND, &Schemas::new(true).unwrap());
        assert_eq!(manifests.rejected, []);
        resolve::resolve(app, Ownership::Ours, &manifests)
    }

    const AROUND: &str = r#"
apiVersion: latchkey.dev/v1alpha1
kind: Provider
metadata: { name: github, namespace: shop }
spec: { github: { clientID: abc, clientSecretRef: { name: github, key: secret }, scopes: [repo] } }
---
apiVersion: latchkey.dev/v1alpha1
kind: Provider
metadata: { name: corp, namespace: shop }
spec: { oidc: { issuer: "https://id.example.com", clientID: abc, clientSecretRef: { name: corp, key: secret } } }
---
apiVersion: latchkey.dev/v1alpha1
kind: Provider
metadata: { name: local, namespace: shop }
spec: { oidc: { issuer: "http://127.0.0.1:5556", clientID: abc, clientSecretRef: { name: github, key: secret } } }
---
apiVersion: v1
kind: Secret
metadata: { name: github, namespace: shop }
stringData: { secret: "hush\n" }
---
apiVersion: v1
kind: Secret
metadata: { name: relay, namespace: shop }
stringData: { host: smtp.example.com, port: "587", tls: starttls, username: shop, password: hush }
---
apiVersion: v1
kind: ConfigMap
metadata: { name: mail, namespace: shop }
data: { confirm.subject: "Your code", confirm.txt: "{{ code }}", reset.txt: "{{ broken }}" }
"#;

    fn valid(spec: Value) -> ValidatedApp {
        validate(&facts(spec), &settings()).unwrap()
    }

    /// The one problem, and the rest of the App.
    #[track_caller]
    fn problem(facts: &AppFacts) -> (ValidatedApp, FieldError) {
        let mut app = validate(facts, &settings()).unwrap();
        assert_eq!(app.field_errors.len(), 1, "{:?}", app.field_errors);
        let problem = app.field_errors.remove(0);
        (app, problem)
    }

    #[test]
    fn an_app_with_an_empty_spec_gets_the_defaults() {
        let app = valid(json!({}));
        assert_eq!(app.field_errors, []);
        assert_eq!((app.app_id.as_str(), app.display_name.as_str()), ("shop", "shop"));
        assert_eq!(app.issuer.as_str(), "https://auth.example.com/shop");
        assert_eq!(app.password, PasswordPolicy { minimum_length: 8, minimum_strength: 2 });
        assert_eq!(app.mail.smtp, RenderedSmtp::Install);
        assert_eq!((app.mail.confirm_code_lifetime_seconds, app.mail.reset_code_lifetime_seconds), (86_400, 1800));
        assert_eq!(
            app.tokens,
            RenderedTokens {
                signing_algorithm: SigningAlgorithm::ES256,
                access_lifetime_seconds: 900,
                refresh_idle_seconds: 2_592_000,
                session_lifetime_seconds: 7_776_000,
                refresh_grace_seconds: 30,
                audiences: vec!["shop".into()],
            }
        );
        assert!(!app.require_verified_email && !app.allow_users_without_email);
        assert_eq!((app.unverified_retention_days, app.audit_retention_days), (30, 365));
        for name in LimitName::ALL {
            assert_eq!(app.limits[&name], name.default_windows());
        }
    }

    #[test]
    fn what_an_app_sets_is_served() {
        let app = valid(json!({
            "displayName": "The Shop",
            "tokens": { "audiences": ["api"], "signingAlgorithm": "RS256", "accessLifetimeSeconds": 60 },
            "password": { "minimumLength": 12, "minimumStrength": 4 },
            "limits": { "codesPerClient": [{ "count": 2, "windowSeconds": 30 }] },
            "administrators": [{ "serviceAccount": { "namespace": "ops", "name": "bot" }, "role": "Reader" }],
            "unverifiedRetentionDays": 7,
        }));
        assert_eq!(app.display_name, "The Shop");
        assert_eq!((app.tokens.audiences, app.tokens.access_lifetime_seconds), (vec!["api".to_owned()], 60));
        assert_eq!(app.tokens.signing_algorithm, SigningAlgorithm::RS256);
        assert_eq!(app.password, PasswordPolicy { minimum_length: 12, minimum_strength: 4 });
        assert_eq!(app.limits.len(), 9);
        assert_eq!(app.limits[&LimitName::CodesPerClient], [Window { count: 2, window_seconds: 30 }]);
        assert_eq!(
            (app.administrators[0].namespace.as_str(), app.administrators[0].service_account.as_str()),
            ("ops", "bot")
        );
        assert_eq!(app.unverified_retention_days, 7);
    }

    #[test]
    fn a_domain_implies_a_verified_address() {
        assert!(valid(json!({ "allowedEmailDomains": ["example.com"] })).require_verified_email);
        assert!(valid(json!({ "requireVerifiedEmail": true })).require_verified_email);
    }

    #[test]
    fn the_default_idle_time_does_not_exceed_the_session_lifetime() {
        let app = valid(json!({ "tokens": { "sessionLifetimeSeconds": 600 } }));
        assert_eq!(app.tokens.refresh_idle_seconds, 600);
    }

    #[test]
    fn an_app_id_of_another_app_is_rejected_without_naming_it() {
        let refusal = validate(&AppFacts { ownership: Ownership::Taken, ..facts(json!({})) }, &settings()).unwrap_err();
        assert_eq!((refusal.reason, refusal.field.as_str()), (Reason::AppIDConflict, "metadata.name"));
        assert_eq!(refusal.message, "another App owns the appID shop; set another spec.appID");
        let facts = AppFacts { ownership: Ownership::Taken, ..facts(json!({ "appID": "store" })) };
        assert_eq!(validate(&facts, &settings()).unwrap_err().field, "spec.appID");
    }

    #[test]
    fn an_app_id_reserved_for_another_namespace_is_rejected_without_naming_it() {
        let facts = AppFacts { ownership: Ownership::Reserved, ..facts(json!({ "appID": "store" })) };
        let refusal = validate(&facts, &settings()).unwrap_err();
        assert_eq!((refusal.reason, refusal.field.as_str()), (Reason::AppIDReserved, "spec.appID"));
        assert_eq!(
            refusal.message,
            "the appID store belonged to an App of another namespace, which still has users; \
             set another spec.appID, or ask the platform team to hand it over"
        );
    }

    #[test]
    fn the_key_policy_comes_from_the_spec_and_the_annotations() {
        let annotations = [("latchkey.dev/rotate-keys", "1"), ("latchkey.dev/revoke-key", "h1"), ("other", "x")];
        let annotations = annotations.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let policy = KeyPolicy::for_app(&valid(json!({})), &annotations);
        assert_eq!(
            (policy.access_lifetime_seconds, policy.session_lifetime_seconds, policy.rotation_days),
            (900, 7_776_000, 90)
        );
        let asked = (policy.rotate_request.as_deref(), policy.revoke_id.as_deref(), policy.new_keys_request.as_deref());
        assert_eq!(asked, (Some("1"), Some("h1"), None));
        // A code can outlive a session.
        let spec = json!({
            "tokens": { "sessionLifetimeSeconds": 600, "keyRotationDays": 7, "signingAlgorithm": "EdDSA" },
            "mail": { "confirmCodeLifetimeSeconds": 604_800 },
        });
        let policy =
            KeyPolicy::for_app(&valid(spec), &[(String::from("latchkey.dev/revoke-key"), String::new())].into());
        assert_eq!((policy.session_lifetime_seconds, policy.rotation_days), (604_800, 7));
        assert_eq!((policy.algorithm, policy.revoke_id), (SigningAlgorithm::EdDSA, None));
    }

    #[test]
    fn specs_that_pass_the_schema_are_validated_again() {
        let refusal = |change: fn(&mut AppFacts)| {
            let mut facts = facts(json!({ "providerRefs": [{ "name": "github" }, { "name": "corp" }] }));
            change(&mut facts);
            let refusal = validate(&facts, &settings()).unwrap_err();
            assert_eq!(refusal.reason, Reason::InvalidSpec);
            refusal.field
        };
        assert_eq!(refusal(|facts| facts.app.metadata.name = Some("a.b".into())), "metadata.name");
        assert_eq!(refusal(|facts| facts.app.metadata.name = Some("v1".into())), "metadata.name");
        assert_eq!(refusal(|facts| facts.app.spec.provider_refs[1].name = "a.b".into()), "spec.providerRefs[1].name");
        assert_eq!(
            refusal(|facts| facts.app.spec.provider_refs[1].alias = Some("github".parse().unwrap())),
            "spec.providerRefs[1]"
        );
        assert_eq!(
            refusal(|facts| {
                facts.app.spec.tokens.refresh_idle_seconds = Some(601);
                facts.app.spec.tokens.session_lifetime_seconds = Some(600);
            }),
            "spec.tokens.refreshIdleSeconds"
        );
    }

    #[test]
    fn providers_are_served_with_their_resolved_references() {
        let app = valid(json!({ "providerRefs": [{ "name": "github", "alias": "code" }] }));
        let provider = &app.providers[0];
        assert_eq!(
            (provider.name.as_str(), provider.resource.as_str(), provider.link_by_email),
            ("code", "github", true)
        );
        assert_eq!(provider.settings.secret.as_ref().unwrap().expose(), "hush", "without the trailing line break");
        assert_eq!(
            (provider.settings.preset.as_str(), &provider.settings.scopes[..]),
            ("github", &["repo".to_owned()][..])
        );
    }

    #[test]
    fn a_missing_provider_is_left_out() {
        let refs = json!({ "providerRefs": [{ "name": "gone" }, { "name": "github" }] });
        let (app, problem) = problem(&facts(refs));
        assert_eq!((problem.reason, problem.field.as_str()), (Reason::ProviderNotFound, "spec.providerRefs[0]"));
        assert!(problem.message.contains("Provider gone does not exist"));
        assert_eq!(app.providers.len(), 1);
    }

    #[test]
    fn an_invalid_provider_is_left_out() {
        let mut facts = facts(json!({ "providerRefs": [{ "name": "github" }] }));
        facts.providers[0] = Lookup::Invalid;
        let (app, problem) = problem(&facts);
        assert_eq!((problem.reason, app.providers.len()), (Reason::ProviderInvalid, 0));
    }

    #[test]
    fn a_provider_without_its_secret_is_served_without_it() {
        let (app, problem) = problem(&facts(json!({ "providerRefs": [{ "name": "corp" }] })));
        assert_eq!(problem.reason, Reason::SecretNotFound);
        assert!(problem.message.contains("Secret corp does not exist"), "{}", problem.message);
        assert_eq!(app.providers[0].settings.secret, None);
        assert!(!app.providers[0].link_by_email, "off for oidc unless the App says so");
        let linked =
            validate(&facts(json!({ "providerRefs": [{ "name": "corp", "linkByEmail": true }] })), &settings());
        assert!(linked.unwrap().providers[0].link_by_email);

        let mut facts = facts(json!({ "providerRefs": [{ "name": "corp" }] }));
        let Lookup::Found(provider) = &mut facts.providers[0] else { panic!("it is there") };
        provider.secret = SecretKeyLookup::NoKey;
        assert_eq!(validate(&facts, &settings()).unwrap().field_errors[0].reason, Reason::SecretKeyNotFound);
        for bytes in [&b""[..], b"\n", b"\xff"] {
            let Lookup::Found(provider) = &mut facts.providers[0] else { panic!("it is there") };
            provider.secret = SecretKeyLookup::Value(SecretBytes(bytes.to_vec()));
            assert_eq!(validate(&facts, &settings()).unwrap().field_errors[0].reason, Reason::SecretKeyInvalid);
        }
    }

    #[test]
    fn http_providers_are_for_development() {
        let refs = json!({ "providerRefs": [{ "name": "local" }] });
        let (app, problem) = problem(&facts(refs.clone()));
        assert_eq!((problem.reason, app.providers.len()), (Reason::ProviderInvalid, 0));
        assert!(problem.message.contains("spec.oidc.issuer: use https"), "{}", problem.message);
        assert_eq!(validate(&facts(refs), &development()).unwrap().field_errors, []);
    }

    #[test]
    fn a_relay_of_the_apps_own() {
        let app = valid(json!({ "mail": { "smtpSecretRef": { "name": "relay" } } }));
        let RenderedSmtp::Own(relay) = app.mail.smtp else { panic!("{:?}", app.mail.smtp) };
        assert_eq!((relay.host.as_str(), relay.port, relay.tls), ("smtp.example.com", 587, SmtpTls::Starttls));
        assert_eq!(relay.username.unwrap().expose(), "shop");
    }

    #[test]
    fn mail_waits_if_the_relay_secret_is_missing() {
        let (app, problem) = problem(&facts(json!({ "mail": { "smtpSecretRef": { "name": "gone" } } })));
        assert_eq!((problem.reason, problem.field.as_str()), (Reason::SecretNotFound, "spec.mail.smtpSecretRef"));
        assert_eq!(app.mail.smtp, RenderedSmtp::Unresolved);
    }

    #[test]
    fn each_key_of_a_relay_secret_is_checked_and_no_value_is_reported() {
        let relay = json!({ "mail": { "smtpSecretRef": { "name": "relay" } } });
        let with = |key: &str, value: Option<&str>| {
            let mut facts = facts(relay.clone());
            let Some(Lookup::Found(values)) = &mut facts.smtp else { panic!("it is there") };
            match value {
                Some(value) => drop(values.insert(key.into(), SecretBytes(value.as_bytes().to_vec()))),
                None => drop(values.remove(key)),
            }
            facts
        };
        for (key, value, says) in [
            ("host", "", "must be a host name"),
            ("host", "smtp.example.com:587", "must be a host name"),
            ("host", "smtp example com", "must be a host name"),
            ("port", "0", "must be a number from 1 to 65535"),
            ("port", "65536", "must be a number from 1 to 65535"),
            ("port", "smtp", "must be a number from 1 to 65535"),
            ("port", "6379", "must be 25, 465, 587 or 2525"),
            ("tls", "STARTTLS", "must be starttls, implicit or none"),
            ("tls", "none", "if there is a password"),
            ("username", "", "is empty"),
            ("password", "hu\tsh", "no control character"),
        ] {
            let (app, problem) = problem(&with(key, Some(value)));
            assert_eq!(problem.reason, Reason::SecretKeyInvalid, "{key} {value:?}");
            assert!(problem.message.starts_with(&format!("Secret relay, key {key}: ")), "{}", problem.message);
            assert!(problem.message.contains(says), "{}", problem.message);
            assert_eq!(app.mail.smtp, RenderedSmtp::Unresolved);
        }
        for key in ["host", "port", "tls", "username", "password"] {
            let (_, problem) = problem(&with(key, None));
            assert_eq!(problem.reason, Reason::SecretKeyNotFound);
            assert!(problem.message.contains(&format!("has no key {key}")), "{}", problem.message);
        }
        for (key, value) in [("host", "192.0.2.1\n"), ("host", "2001:db8::1"), ("port", " 465 "), ("tls", "implicit")] {
            assert_eq!(validate(&with(key, Some(value)), &settings()).unwrap().field_errors, [], "{key} {value:?}");
        }
        assert_eq!(validate(&with("port", Some("1025")), &development()).unwrap().field_errors, []);
        assert_eq!(validate(&with("tls", Some("none")), &development()).unwrap().field_errors, []);
    }

    #[test]
    fn broken_templates_are_left_out_and_the_valid_ones_stay() {
        let (app, problem) = problem(&facts(json!({ "mail": { "templatesRef": { "name": "mail" } } })));
        assert_eq!((problem.reason, problem.field.as_str()), (Reason::TemplatesInvalid, "spec.mail.templatesRef"));
        assert!(problem.message.starts_with("mail/reset.txt:1: "), "{}", problem.message);
        assert_eq!(app.mail.templates.keys().collect::<Vec<_>>(), ["confirm.subject", "confirm.txt"]);
    }

    #[test]
    fn missing_templates_leave_the_defaults() {
        let (app, problem) = problem(&facts(json!({ "mail": { "templatesRef": { "name": "gone" } } })));
        assert_eq!(problem.reason, Reason::ConfigMapNotFound);
        assert!(app.mail.templates.is_empty());
    }
}
