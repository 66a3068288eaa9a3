//! The App's own SMTP relay, from the Secret that the App references.

use std::net::IpAddr;

use latchkey_crds::{
    conditions::Reason,
    rendered::{RenderedSmtp, SecretString, SmtpRelay, SmtpTls},
};

use crate::{
    app::resolve::AppFacts,
    facts::{FieldError, Lookup, SecretValues, Settings},
};

/// The ports of mail submission and relay. Other ports are rejected (except in development mode), so that no App can
/// make the servers connect to other services (specification: Limits, Outgoing connections).
const SMTP_PORTS: [u16; 4] = [25, 465, 587, 2525];
/// The maximum length of a user name or password, in bytes.
const MAX_CREDENTIAL_BYTES: usize = 1024;

/// Why the relay cannot be used. Names keys of the Secret, never their values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RelayError {
    NoSecret,
    InvalidSecret,
    NoKey(&'static str),
    /// The key, and what is wrong with its value.
    InvalidKey(&'static str, &'static str),
}

/// The relay for the App's mails. If the relay cannot be used, an error is added to `field_errors`, and the mails wait.
pub(super) fn smtp(facts: &AppFacts, settings: &Settings, field_errors: &mut Vec<FieldError>) -> RenderedSmtp {
    let relay = match &facts.smtp {
        None => return RenderedSmtp::Install,
        Some(Lookup::Missing) => Err(RelayError::NoSecret),
        Some(Lookup::Invalid) => Err(RelayError::InvalidSecret),
        Some(Lookup::Found(values)) => parse_relay(values, settings),
    };
    relay.map_or_else(
        |error| {
            let secret = facts.app.spec.mail.smtp_secret_ref.as_ref().map_or("", |reference| &reference.name);
            field_errors.push(FieldError::new(error.reason(), "spec.mail.smtpSecretRef", error.message(secret)));
            RenderedSmtp::Unresolved
        },
        RenderedSmtp::Own,
    )
}

// === impl RelayError ===

impl RelayError {
    fn reason(self) -> Reason {
        match self {
            Self::NoSecret => Reason::SecretNotFound,
            Self::NoKey(_) => Reason::SecretKeyNotFound,
            Self::InvalidSecret | Self::InvalidKey(..) => Reason::SecretKeyInvalid,
        }
    }

    fn message(self, secret: &str) -> String {
        match self {
            Self::NoSecret => {
                format!("Secret {secret} does not exist in this namespace; create it. Mail waits until then")
            }
            Self::InvalidSecret => format!("Secret {secret} is not valid; see the message about it. Mail waits"),
            Self::NoKey(key) => format!("Secret {secret} has no key {key}; add it. Mail waits until then"),
            Self::InvalidKey(key, what) => format!("Secret {secret}, key {key}: {what}. Mail waits until then"),
        }
    }
}

fn parse_relay(values: &SecretValues, settings: &Settings) -> Result<SmtpRelay, RelayError> {
    let host = required_text(values, "host")?;
    let host = host.expose();
    if !is_host_or_ip(host) {
        return Err(RelayError::InvalidKey("host", "must be a host name or an IP address, without port"));
    }
    let port = required_text(values, "port")?;
    let port = match port.expose().parse::<u16>() {
        Ok(0) | Err(_) => return Err(RelayError::InvalidKey("port", "must be a number from 1 to 65535")),
        Ok(port) => port,
    };
    if !settings.allow_insecure && !SMTP_PORTS.contains(&port) {
        return Err(RelayError::InvalidKey("port", "must be 25, 465, 587 or 2525"));
    }
    let tls = match required_text(values, "tls")?.expose() {
        "starttls" => SmtpTls::Starttls,
        "implicit" => SmtpTls::Implicit,
        "none" => SmtpTls::None,
        _ => return Err(RelayError::InvalidKey("tls", "must be starttls, implicit or none")),
    };
    let username = optional_credential(values, "username")?;
    let password = optional_credential(values, "password")?;
    match (&username, &password) {
        (Some(_), None) => return Err(RelayError::NoKey("password")),
        (None, Some(_)) => return Err(RelayError::NoKey("username")),
        (Some(_), Some(_)) | (None, None) => {}
    }
    if username.is_some() && tls == SmtpTls::None && !settings.allow_insecure {
        return Err(RelayError::InvalidKey("tls", "must be starttls or implicit if there is a password"));
    }
    Ok(SmtpRelay { host: host.to_owned(), port, tls, username, password })
}

fn required_text(values: &SecretValues, key: &'static str) -> Result<SecretString, RelayError> {
    let value = values.get(key).ok_or(RelayError::NoKey(key))?;
    let text = value.to_trimmed_utf8().ok_or(RelayError::InvalidKey(key, "is not text"))?;
    Ok(SecretString::new(text.expose().trim()))
}

fn optional_credential(values: &SecretValues, key: &'static str) -> Result<Option<SecretString>, RelayError> {
    let Some(value) = values.get(key) else { return Ok(None) };
    let text = value.to_trimmed_utf8().ok_or(RelayError::InvalidKey(key, "is not text"))?;
    if text.expose().is_empty() {
        return Err(RelayError::InvalidKey(key, "is empty; remove the key if the relay needs no login"));
    }
    if text.expose().len() > MAX_CREDENTIAL_BYTES || text.expose().contains(char::is_control) {
        return Err(RelayError::InvalidKey(key, "must have at most 1024 bytes and no control character"));
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
