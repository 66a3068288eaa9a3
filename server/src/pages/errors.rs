//! Errors on pages: the texts of error codes and invalid fields.

use std::{borrow::Cow, time::Duration};

use serde::Serialize;

use super::texts::PageTexts;
use crate::http::error::{ErrorCode, FieldCode, Problem};

/// Why a form was refused, or why only an error page is shown.
#[derive(Clone, Debug)]
pub struct PageError {
    pub code: ErrorCode,
    pub fields: Vec<(Cow<'static, str>, FieldCode)>,
    /// The time in `Retry-After`.
    pub retry_after: Option<Duration>,
}

/// An error as templates read it.
#[derive(Debug, Serialize)]
pub(super) struct ShownError {
    code: &'static str,
    message: String,
}

/// The error of each field that a form can have.
#[derive(Debug, Default, Serialize)]
pub(super) struct FieldErrors {
    name: Option<String>,
    email: Option<String>,
    code: Option<String>,
    password: Option<String>,
    current_password: Option<String>,
}

/// The text of an error code. Codes that only programs can get have the text of `invalid_request`.
pub(super) const fn error_text(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::InvalidRequest
        | ErrorCode::UnsupportedGrantType
        | ErrorCode::InvalidGrant
        | ErrorCode::InvalidScope
        | ErrorCode::UnsupportedResponseType
        | ErrorCode::RequestNotSupported
        | ErrorCode::RequestUriNotSupported
        | ErrorCode::RegistrationNotSupported
        | ErrorCode::UnmetAuthenticationRequirements
        | ErrorCode::ExternalIdTaken
        | ErrorCode::IdentityTaken
        | ErrorCode::TooManyGroups
        | ErrorCode::VersionConflict
        | ErrorCode::UnsupportedMediaType => "error-invalid-request",
        ErrorCode::InvalidCode => "error-invalid-code",
        ErrorCode::WeakPassword => "error-weak-password",
        ErrorCode::RedirectUrlNotAllowed => "error-redirect-url-not-allowed",
        ErrorCode::InvalidState | ErrorCode::InvalidToken => "error-invalid-state",
        ErrorCode::InvalidCredentials => "error-invalid-credentials",
        ErrorCode::ReauthenticationRequired => "error-reauthentication-required",
        ErrorCode::InvalidRequestUri => "error-invalid-request-uri",
        ErrorCode::InvalidClient => "error-invalid-client",
        ErrorCode::InvalidProviderToken => "error-invalid-provider-token",
        ErrorCode::EmailNotVerified => "error-email-not-verified",
        ErrorCode::RegistrationDisabled => "error-registration-disabled",
        ErrorCode::UserDisabled => "error-user-disabled",
        ErrorCode::AccessDenied => "error-access-denied",
        ErrorCode::OriginNotAllowed => "error-origin-not-allowed",
        ErrorCode::NotFound | ErrorCode::AppNotFound => "error-not-found",
        ErrorCode::ProviderNotFound => "error-provider-not-found",
        ErrorCode::MethodNotAllowed => "error-method-not-allowed",
        ErrorCode::EmailTaken => "error-email-taken",
        ErrorCode::AccountLinkRequired => "error-account-link-required",
        ErrorCode::LastIdentity => "error-last-identity",
        ErrorCode::PayloadTooLarge => "error-payload-too-large",
        ErrorCode::RateLimited => "error-rate-limited",
        ErrorCode::ServerError => "error-server-error",
        ErrorCode::ProviderError => "error-provider-error",
        ErrorCode::TemporarilyUnavailable => "error-temporarily-unavailable",
    }
}

/// The heading of the error page.
pub(super) const fn error_title(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::NotFound | ErrorCode::AppNotFound => "error-title-not-found",
        ErrorCode::RateLimited | ErrorCode::TemporarilyUnavailable => "error-title-busy",
        ErrorCode::ServerError => "error-title-failed",
        _ => "error-title",
    }
}

/// The text for an invalid field. Fields that a form does not have are not shown.
const fn field_text(field: Field, code: FieldCode) -> &'static str {
    match (field, code) {
        (Field::Name, FieldCode::Missing | FieldCode::Empty) => "field-name-missing",
        (Field::Name, FieldCode::Invalid) => "field-name-invalid",
        (Field::Email, FieldCode::Missing | FieldCode::Empty) => "field-email-missing",
        (Field::Email, FieldCode::Invalid) => "field-email-invalid",
        (Field::Email, FieldCode::DomainNotAllowed) => "field-email-domain-not-allowed",
        (Field::Code, FieldCode::Missing | FieldCode::Empty) => "field-code-missing",
        (Field::Password, FieldCode::Missing | FieldCode::Empty) => "field-password-missing",
        (Field::Password, FieldCode::TooShort) => "field-password-too-short",
        (Field::Password, FieldCode::TooLong) => "field-password-too-long",
        (Field::Password, FieldCode::Guessable) => "field-password-guessable",
        (_, FieldCode::TooLong) => "field-too-long",
        _ => "field-invalid",
    }
}

#[derive(Clone, Copy, Debug)]
enum Field {
    Name,
    Email,
    Code,
    Password,
}

// === impl PageError ===

impl PageError {
    pub fn new(code: ErrorCode) -> Self {
        Self { code, fields: Vec::new(), retry_after: None }
    }

    /// Returns the error with its text. `text` is the ID of the text that this page has for the error code.
    pub(super) fn show(&self, text: &str, texts: &PageTexts) -> ShownError {
        let message = match (self.code, self.retry_after) {
            (ErrorCode::RateLimited, Some(retry_after)) => {
                let minutes = retry_after.as_secs().div_ceil(60).max(1).to_string();
                texts.format("error-rate-limited-minutes", &[("minutes", &minutes)])
            }
            _ => texts.format(text, &[]),
        };
        ShownError { code: self.code.as_str(), message }
    }
}

impl From<&Problem> for PageError {
    fn from(problem: &Problem) -> Self {
        let fields = problem.fields.iter().map(|bad| (bad.field.clone(), bad.code)).collect();
        Self { code: problem.code, fields, retry_after: problem.refusal_retry_after }
    }
}

// === impl FieldErrors ===

impl FieldErrors {
    pub(super) fn new(error: &PageError, texts: &PageTexts, minimum_password_length: u32) -> Self {
        let minimum = minimum_password_length.to_string();
        let mut errors = Self::default();
        for (name, code) in &error.fields {
            let (field, slot) = match &**name {
                "name" => (Field::Name, &mut errors.name),
                "email" => (Field::Email, &mut errors.email),
                "code" => (Field::Code, &mut errors.code),
                "password" => (Field::Password, &mut errors.password),
                "current_password" => (Field::Password, &mut errors.current_password),
                _ => continue,
            };
            *slot = Some(texts.format(field_text(field, *code), &[("minimum", &minimum)]));
        }
        errors
    }
}
