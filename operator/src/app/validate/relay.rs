//! The App's own SMTP relay, from the Secret that the App references.

use std::net::IpAddr;

use latchkey_crds::rendered::{RenderedSmtp, SecretString, SmtpRelay, SmtpTls};

use super::secrets::{SecretError, SecretReference, require_values, required_text};
use crate::{
    app::resolve::AppFacts,
    facts::{FieldError, SecretValues, Settings},
};

/// The ports of mail submission and relay. Other ports are rejected (except in development mode), so that no App can
/// make the servers connect to other services (specification: Limits, Outgoing connections).
const SMTP_PORTS: [u16; 4] = [25, 465, 587, 2525];
/// The maximum length of a user name or password, in bytes.
const MAX_CREDENTIAL_BYTES: usize = 1024;

/// Returns the relay for the App's mails. If the relay cannot be used, an error is added to `field_errors`, and the
/// mails wait.
pub(super) fn smtp(facts: &AppFacts, settings: &Settings, field_errors: &mut Vec<FieldError>) -> RenderedSmtp {
    let Some(secret) = &facts.smtp else { return RenderedSmtp::Install };
    match require_values(secret).and_then(|values| parse_relay(values, settings)) {
        Ok(relay) => RenderedSmtp::Own(relay),
        Err(error) => {
            field_errors.push(error.to_field_error(&SecretReference {
                field: "spec.mail.smtpSecretRef".to_owned(),
                name: facts.app.spec.mail.smtp_secret_ref.as_ref().map_or("", |reference| &reference.name),
                consequence: "Mail waits until then",
            }));
            RenderedSmtp::Unresolved
        }
    }
}

fn parse_relay(values: &SecretValues, settings: &Settings) -> Result<SmtpRelay, SecretError> {
    let host = required_text(values, "host")?;
    let host = host.expose();
    if !is_host_or_ip(host) {
        return Err(SecretError::InvalidKey("host", "must be a host name or an IP address, without port"));
    }
    let port = required_text(values, "port")?;
    let port = match port.expose().parse::<u16>() {
        Ok(0) | Err(_) => return Err(SecretError::InvalidKey("port", "must be a number from 1 to 65535")),
        Ok(port) => port,
    };
    if !settings.allow_insecure && !SMTP_PORTS.contains(&port) {
        return Err(SecretError::InvalidKey("port", "must be 25, 465, 587 or 2525"));
    }
    let tls = match required_text(values, "tls")?.expose() {
        "starttls" => SmtpTls::Starttls,
        "implicit" => SmtpTls::Implicit,
        "none" => SmtpTls::None,
        _ => return Err(SecretError::InvalidKey("tls", "must be starttls, implicit or none")),
    };
    let username = optional_credential(values, "username")?;
    let password = optional_credential(values, "password")?;
    match (&username, &password) {
        (Some(_), None) => return Err(SecretError::NoKey("password")),
        (None, Some(_)) => return Err(SecretError::NoKey("username")),
        (Some(_), Some(_)) | (None, None) => {}
    }
    if username.is_some() && tls == SmtpTls::None && !settings.allow_insecure {
        return Err(SecretError::InvalidKey("tls", "must be starttls or implicit if there is a password"));
    }
    Ok(SmtpRelay { host: host.to_owned(), port, tls, username, password })
}

fn optional_credential(values: &SecretValues, key: &'static str) -> Result<Option<SecretString>, SecretError> {
    let Some(value) = values.get(key) else { return Ok(None) };
    let text = value.to_trimmed_utf8().ok_or(SecretError::InvalidKey(key, "is not text"))?;
    if text.expose().is_empty() {
        return Err(SecretError::InvalidKey(key, "is empty; remove the key if the relay needs no login"));
    }
    if text.expose().len() > MAX_CREDENTIAL_BYTES || text.expose().contains(char::is_control) {
        return Err(SecretError::InvalidKey(key, "must have at most 1024 bytes and no control character"));
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
