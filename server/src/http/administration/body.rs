//! Bodies of the administration listener. Unlike on the public listener, an unknown field is an error. Otherwise a
//! change with a misspelled field would be ignored silently.

use std::borrow::Cow;

use latchkey_crds::types::ProviderName;
use serde_json::{Map, Value};
use time::OffsetDateTime;

use crate::{
    domain::{
        administration::{ExternalId, InvalidExternalId, InvalidMetadata, Metadata},
        app::App,
        email::Email,
        foreign_hash::{HashError, ParsedHash},
        password::PasswordHash,
        ports::{NewAdministeredIdentity, Providers},
        user::{InvalidName, Name},
    },
    http::{
        error::{FieldCode, FieldProblem, Problem},
        request::{FromField, InvalidField},
    },
};

/// Maximum number of identities of a new user.
const MAX_IDENTITIES: usize = 10;
/// Maximum number of invalid fields that an error reports, because an object can have thousands.
const MAX_PROBLEMS: usize = 20;
/// Maximum length of an identity's subject, in bytes. The table `identities` has the same limit.
const MAX_SUBJECT_BYTES: usize = 512;

/// The parser of a JSON object. It parses and removes the fields one by one, and records every invalid field under its
/// full name, for example `identities[0].provider`.
pub struct StrictBody {
    object: Map<String, Value>,
    prefix: String,
    invalid: Vec<FieldProblem>,
}

/// The fields that a call that creates a user and each line of an import have in common.
pub struct NewUserFields {
    pub external_id: Option<ExternalId>,
    pub email: Option<Email>,
    pub email_verified: bool,
    pub name: Option<Name>,
    pub disabled: bool,
    pub password_hash: Option<PasswordHash>,
    pub metadata: Option<Metadata>,
    pub identities: Vec<NewAdministeredIdentity>,
}

// === impl StrictBody ===

impl StrictBody {
    pub fn new(object: Map<String, Value>) -> Self {
        Self { object, prefix: String::new(), invalid: Vec::new() }
    }

    fn nested(object: Map<String, Value>, prefix: String) -> Self {
        Self { object, prefix, invalid: Vec::new() }
    }

    fn record(&mut self, name: &str, code: FieldCode, message: impl Into<Cow<'static, str>>) {
        if self.invalid.len() >= MAX_PROBLEMS {
            return;
        }
        let field = format!("{}{name}", self.prefix).into();
        self.invalid.push(FieldProblem { field, code, message: message.into() });
    }

    /// Parses and removes a text. Returns `None` if the field is missing, `null` or invalid. An invalid field is
    /// recorded.
    pub fn text<T>(&mut self, name: &str, parse: impl FnOnce(&str) -> Result<T, InvalidField>) -> Option<T> {
        let read = match self.object.remove(name)? {
            Value::Null => return None,
            Value::String(text) => parse(&text),
            Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                Err(InvalidField::new(FieldCode::Invalid, "is not a string"))
            }
        };
        read.map_err(|InvalidField { code, message }| self.record(name, code, message)).ok()
    }

    /// Like [`Self::text`], for a text that must not be empty.
    pub fn non_empty<T: FromField>(&mut self, name: &str) -> Option<T> {
        self.text(name, |text| {
            if text.is_empty() { Err(InvalidField::new(FieldCode::Empty, "is empty")) } else { T::from_text(text) }
        })
    }

    /// Parses and removes a field that a client can clear by sending `null`. Returns `Some(None)` if the field is
    /// `null`, and `None` if the field is missing or invalid.
    pub fn clearable<T>(&mut self, name: &str, take: impl FnOnce(&mut Self, &str) -> Option<T>) -> Option<Option<T>> {
        if self.object.get(name) == Some(&Value::Null) {
            self.object.remove(name);
            return Some(None);
        }
        take(self, name).map(Some)
    }

    /// Records an error if the field is `null`, because `null` does not clear this field.
    pub fn refuse_null(&mut self, name: &str) {
        if self.object.get(name) == Some(&Value::Null) {
            self.object.remove(name);
            self.reject(name, "cannot be null");
        }
    }

    pub fn boolean(&mut self, name: &str) -> Option<bool> {
        match self.object.remove(name)? {
            Value::Bool(value) => Some(value),
            Value::Null | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => {
                self.record(name, FieldCode::Invalid, "is not true or false");
                None
            }
        }
    }

    /// Parses and removes the name of the user. Returns `Some(None)` if the text is empty: the user then has no name.
    pub fn name(&mut self) -> Option<Option<Name>> {
        self.text("name", |text| match Name::parse(text) {
            Ok(name) => Ok(Some(name)),
            Err(InvalidName::Empty) => Ok(None),
            Err(error @ InvalidName::TooLong) => Err(InvalidField::new(FieldCode::TooLong, error.to_string())),
            Err(error @ InvalidName::ControlCharacter) => Err(InvalidField::new(FieldCode::Invalid, error.to_string())),
        })
    }

    /// Parses and removes the email address. Its domain must be one that the App accepts.
    pub fn email(&mut self, app: &App) -> Option<Email> {
        let email: Email = self.non_empty("email")?;
        if !app.allows_email_domain(&email) {
            self.record("email", FieldCode::DomainNotAllowed, "is of a domain that this App does not accept");
            return None;
        }
        Some(email)
    }

    pub fn external_id(&mut self, name: &str) -> Option<ExternalId> {
        self.text(name, |text| {
            ExternalId::parse(text).map_err(|error| {
                let code = match error {
                    InvalidExternalId::Empty => FieldCode::Empty,
                    InvalidExternalId::TooLong => FieldCode::TooLong,
                    InvalidExternalId::ControlCharacter => FieldCode::Invalid,
                };
                InvalidField::new(code, error.to_string())
            })
        })
    }

    pub fn metadata(&mut self, name: &str) -> Option<Metadata> {
        let object = match self.object.remove(name)? {
            Value::Null => return None,
            Value::Object(object) => object,
            Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                self.record(name, FieldCode::Invalid, "is not an object");
                return None;
            }
        };
        let metadata = Metadata::new(object).map_err(|error| {
            let code = match error {
                InvalidMetadata::TooLarge => FieldCode::TooLong,
                InvalidMetadata::NulCharacter | InvalidMetadata::Number => FieldCode::Invalid,
            };
            self.record(name, code, error.to_string());
        });
        metadata.ok()
    }

    /// Parses and removes a password hash that this or another service made, in the PHC string format or the older
    /// Modular Crypt Format (MCF). The error does not contain the hash.
    fn password_hash(&mut self) -> Option<PasswordHash> {
        self.text("password_hash", |text| match ParsedHash::parse(text) {
            Ok(_) => Ok(PasswordHash::new(text)),
            Err(error @ HashError::NotSupported) => {
                Err(InvalidField::new(FieldCode::HashNotSupported, error.to_string()))
            }
            Err(error @ HashError::TooCostly) => Err(InvalidField::new(FieldCode::HashTooCostly, error.to_string())),
        })
    }

    /// Parses and removes a time in Unix seconds, from 0 to `now`.
    pub fn past_time(&mut self, name: &str, now: OffsetDateTime) -> Option<OffsetDateTime> {
        let value = self.object.remove(name).filter(|value| !value.is_null())?;
        let seconds = value.as_i64().filter(|seconds| (0..=now.unix_timestamp()).contains(seconds));
        let time = seconds.and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
        if time.is_none() {
            self.record(name, FieldCode::Invalid, "is not a time in Unix seconds from 0 to now");
        }
        time
    }

    /// Parses and removes an array of 1 to `max` texts.
    pub fn texts<T>(&mut self, name: &str, max: usize, parse: impl Fn(&str) -> Option<T>) -> Option<Vec<T>> {
        let parsed = match self.object.remove(name)? {
            Value::Array(items) if (1..=max).contains(&items.len()) => {
                items.iter().map(|item| item.as_str().and_then(&parse)).collect::<Option<Vec<_>>>()
            }
            _ => None,
        };
        if parsed.is_none() {
            self.record(name, FieldCode::Invalid, format!("is not an array of 1 to {max} valid values"));
        }
        parsed
    }

    /// Records a required field as missing if `is_present` is false. A field that is already recorded as invalid is not
    /// recorded again.
    pub fn require(&mut self, name: &str, is_present: bool) {
        let field = format!("{}{name}", self.prefix);
        if !is_present
            && self.invalid.len() < MAX_PROBLEMS
            && !self.invalid.iter().any(|problem| problem.field == field)
        {
            self.record(name, FieldCode::Missing, "is missing");
        }
    }

    /// Records that a field is invalid, for example because it contradicts another field.
    pub fn reject(&mut self, name: &str, message: &'static str) {
        self.record(name, FieldCode::Invalid, message);
    }

    fn identities<S: Providers>(&mut self, stores: &S, app: &App) -> Vec<NewAdministeredIdentity> {
        let items = match self.object.remove("identities") {
            None | Some(Value::Null) => return Vec::new(),
            Some(Value::Array(items)) if items.len() <= MAX_IDENTITIES => items,
            Some(Value::Array(_)) => {
                self.record("identities", FieldCode::TooLong, format!("has more than {MAX_IDENTITIES} identities"));
                return Vec::new();
            }
            Some(_) => {
                self.record("identities", FieldCode::Invalid, "is not an array");
                return Vec::new();
            }
        };
        let mut identities = Vec::with_capacity(items.len());
        for (index, item) in items.into_iter().enumerate() {
            let Value::Object(object) = item else {
                self.record(&format!("identities[{index}]"), FieldCode::Invalid, "is not an object");
                continue;
            };
            let mut nested = Self::nested(object, format!("{}identities[{index}].", self.prefix));
            identities.extend(nested.identity(stores, app));
            nested.record_unknown();
            self.invalid.append(&mut nested.invalid);
            self.invalid.truncate(MAX_PROBLEMS);
        }
        identities
    }

    fn identity<S: Providers>(&mut self, stores: &S, app: &App) -> Option<NewAdministeredIdentity> {
        let name = self.text("provider", |text| {
            text.parse::<ProviderName>()
                .map_err(|_| InvalidField::new(FieldCode::UnknownProvider, "is not a provider of this App"))
        });
        self.require("provider", name.is_some());
        let subject = self.text("subject", |text| {
            if text.is_empty() {
                Err(InvalidField::new(FieldCode::Empty, "is empty"))
            } else if text.len() > MAX_SUBJECT_BYTES {
                Err(InvalidField::new(FieldCode::TooLong, format!("is longer than {MAX_SUBJECT_BYTES} bytes")))
            } else if text.contains('\0') {
                Err(InvalidField::new(FieldCode::Invalid, "contains the character U+0000"))
            } else {
                Ok(text.to_owned())
            }
        });
        self.require("subject", subject.is_some());
        let authority = self.text("authority", |text| Ok(text.to_owned()));
        let name = name?;
        let Some(provider) = app.doc.providers.iter().find(|provider| provider.name == name) else {
            self.record("provider", FieldCode::UnknownProvider, "is not a provider of this App");
            return None;
        };
        let Some(authority) = stores.identity_authority(provider, authority.as_deref()) else {
            let code = if authority.is_none() { FieldCode::Missing } else { FieldCode::Invalid };
            self.record("authority", code, "must be the issuer of the user's tenant, or absent for other providers");
            return None;
        };
        Some(NewAdministeredIdentity { provider: name, authority, subject: subject? })
    }

    /// Reads the fields of a new user. Errors are recorded.
    pub fn new_user<S: Providers>(&mut self, stores: &S, app: &App) -> NewUserFields {
        let fields = NewUserFields {
            external_id: self.external_id("external_id"),
            email: self.email(app),
            email_verified: self.boolean("email_verified").unwrap_or(false),
            name: self.name().flatten(),
            disabled: self.boolean("disabled").unwrap_or(false),
            password_hash: self.password_hash(),
            metadata: self.metadata("metadata"),
            identities: self.identities(stores, app),
        };
        let can_lack_email = app.doc.allow_users_without_email && !fields.identities.is_empty();
        self.require("email", fields.email.is_some() || can_lack_email);
        if fields.email.is_none() && fields.email_verified && self.invalid.is_empty() {
            self.reject("email_verified", "is true, but there is no email address");
        }
        fields
    }

    /// The names of the unknown fields: those that no method of this parser has removed.
    pub fn unknown_fields(&self) -> impl Iterator<Item = &str> {
        self.object.keys().map(String::as_str)
    }

    fn record_unknown(&mut self) {
        // The names come from the client, so the error contains at most the first 64 characters of a name.
        let names: Vec<String> =
            self.object.keys().take(MAX_PROBLEMS).map(|name| name.chars().take(64).collect()).collect();
        for name in names {
            self.record(&name, FieldCode::Invalid, "is unknown");
        }
    }

    /// Returns the recorded errors. The unknown fields of the object itself are not among them, but those of its
    /// identities are.
    pub fn into_problems(self) -> Vec<FieldProblem> {
        self.invalid
    }

    /// Checks that all fields are valid and known.
    ///
    /// # Errors
    ///
    /// 400 if a field is invalid or unknown.
    pub fn finish(mut self) -> Result<(), Problem> {
        self.record_unknown();
        if self.invalid.is_empty() { Ok(()) } else { Err(Problem::invalid_fields(self.invalid)) }
    }
}
