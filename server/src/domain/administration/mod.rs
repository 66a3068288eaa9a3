//! Use cases of administrators, who manage the users of an App (specification: Administration). Administrators are
//! ServiceAccounts.

mod call;
mod data;
mod groups;
mod mails;
mod sessions;
mod users;

pub use call::AdministratorCall;
pub use data::{UserExport, export_user, import_users, record_export, remove_identities};
pub use groups::{GroupError, add_member, put_group, remove_group, remove_member};
pub use mails::{RequestMailError, request_mail};
pub use sessions::{end_user_session, end_user_sessions, user_sessions};
pub use users::{
    ChangeUserError, ChangeUserInput, CreateUserError, CreateUserInput, change_user, create_user, remove_user,
};

use std::{fmt, ops::RangeInclusive};

use serde::Serialize;
use serde_json::{Map, Value, value::RawValue};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    email::Email,
    password::PasswordHash,
    session::{Profile, SessionId},
    user::{Epoch, UserId},
};

/// The ServiceAccount that makes a call. Events name this ServiceAccount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Actor {
    pub namespace: String,
    pub name: String,
}

/// The version of a user. It rises with every change except a login, a new hash of the same password, and a change of
/// identities or groups. The API shows it as `ETag`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version(pub i64);

/// The id of a user in another system: 1–255 bytes without control characters. Unique in an App.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExternalId(Box<str>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidExternalId {
    #[error("is empty")]
    Empty,
    #[error("is longer than 255 bytes")]
    TooLong,
    #[error("has a control character")]
    ControlCharacter,
}

/// A JSON object that the application attaches to a user: at most 8 KiB as compact JSON. It must not contain U+0000,
/// which Postgres cannot store. It is never in tokens and never on the public listener.
///
/// It is kept as text: a tree of values can need a hundred times as much memory.
#[derive(Clone)]
pub struct Metadata(Box<RawValue>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMetadata {
    #[error("is larger than 8 KiB")]
    TooLarge,
    #[error("contains the character U+0000")]
    NulCharacter,
    #[error("contains a number that is too large or too small: numbers are 0, or from 1e-20 to 1e20")]
    Number,
}

/// How the user came into the App.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreatedBy {
    Registration,
    Provider,
    Administrator,
    Import,
}

/// The state of a user. If several states apply, the first one in this order is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserState {
    Disabled,
    /// The email address is not verified, and was registered again with another password.
    Contested,
    /// The email address is not verified.
    Unverified,
    Active,
}

/// A user, as administrators see it.
#[derive(Clone)]
pub struct AdminUser {
    pub id: UserId,
    pub email: Option<Email>,
    pub email_verified: bool,
    pub pending_email: Option<Email>,
    /// Empty if the user has no name.
    pub name: String,
    pub disabled: bool,
    pub contested: bool,
    pub password_hash: Option<PasswordHash>,
    pub external_id: Option<ExternalId>,
    pub metadata: Option<Metadata>,
    pub created_by: CreatedBy,
    pub created_at: OffsetDateTime,
    pub epoch: Epoch,
    pub version: Version,
    /// The time of the newest login in the audit log. `None` in lists.
    pub last_signed_in_at: Option<OffsetDateTime>,
    /// Sorted from the oldest to the newest. Empty in lists.
    pub identities: Vec<AdminIdentity>,
}

/// An identity of a user, as administrators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminIdentity {
    /// The Provider's name at the time of linking.
    pub provider: String,
    pub authority: String,
    pub subject: String,
    /// The email address that the provider sent at the time of linking.
    pub email: Option<String>,
    pub linked_at: OffsetDateTime,
}

/// A row of the audit log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditRow {
    pub id: Uuid,
    pub at: OffsetDateTime,
    /// The name of an event kind. A newer server can have written a name that this server does not know.
    pub kind: String,
    pub user: Option<UserId>,
    pub session: Option<SessionId>,
    pub ip: Option<String>,
    pub count: i64,
    pub detail: Option<Value>,
}

/// A mail or a webhook event that the servers no longer try to deliver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetterRow {
    pub id: Uuid,
    /// The name of a kind of mail, or [`DeadLetterRow::WEBHOOK`].
    pub kind: String,
    /// The name of the webhook. `None` for a mail.
    pub webhook: Option<String>,
    pub user: Option<UserId>,
    pub attempts: i32,
    pub created_at: OffsetDateTime,
    pub dead_at: OffsetDateTime,
    /// Why the last attempt failed: a message of Latchkey, never text of the relay or the receiver.
    pub error: Option<String>,
}

// === impl DeadLetterRow ===

impl DeadLetterRow {
    /// The `kind` of a webhook event.
    pub const WEBHOOK: &str = "webhook";
}

// === impl ExternalId ===

impl ExternalId {
    pub const MAX_BYTES: usize = 255;

    pub fn parse(text: &str) -> Result<Self, InvalidExternalId> {
        if text.is_empty() {
            return Err(InvalidExternalId::Empty);
        }
        if text.len() > Self::MAX_BYTES {
            return Err(InvalidExternalId::TooLong);
        }
        if text.chars().any(char::is_control) {
            return Err(InvalidExternalId::ControlCharacter);
        }
        Ok(Self(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ExternalId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ExternalId(…)")
    }
}

// === impl Metadata ===

impl Metadata {
    pub const MAX_BYTES: usize = 8 * 1024;
    /// The allowed absolute values of the numbers in metadata. The number 0 is also allowed.
    pub const NUMBERS: RangeInclusive<f64> = 1e-20..=1e20;

    pub fn new(object: Map<String, Value>) -> Result<Self, InvalidMetadata> {
        let value = Value::Object(object);
        let text = value.to_string();
        if text.len() > Self::MAX_BYTES {
            return Err(InvalidMetadata::TooLarge);
        }
        if has_nul(&value) {
            return Err(InvalidMetadata::NulCharacter);
        }
        if has_long_number(&value) {
            return Err(InvalidMetadata::Number);
        }
        Self::from_stored(text).ok_or(InvalidMetadata::TooLarge)
    }

    /// Returns the metadata for a text from Postgres, or `None` if the text is not JSON.
    pub fn from_stored(text: String) -> Option<Self> {
        RawValue::from_string(text).map(Self).ok()
    }

    /// Returns the object as JSON text.
    pub fn as_json(&self) -> &RawValue {
        &self.0
    }
}

impl PartialEq for Metadata {
    /// Compares the parsed values, not the texts, because Postgres changes the white space and the order of the keys.
    fn eq(&self, other: &Self) -> bool {
        let value = |metadata: &Self| serde_json::from_str::<Value>(metadata.0.get()).ok();
        value(self) == value(other)
    }
}

impl Eq for Metadata {}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metadata(…)")
    }
}

fn has_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(items) => items.iter().any(has_nul),
        Value::Object(object) => object.iter().any(|(key, value)| key.contains('\0') || has_nul(value)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Whether the value contains a number outside [`Metadata::NUMBERS`]. Postgres writes a number such as 1e308 with all
/// its digits, so short text would become long.
fn has_long_number(value: &Value) -> bool {
    match value {
        Value::Number(number) => {
            number.as_f64().is_some_and(|number| number != 0.0 && !Metadata::NUMBERS.contains(&number.abs()))
        }
        Value::Array(items) => items.iter().any(has_long_number),
        Value::Object(object) => object.values().any(has_long_number),
        Value::Null | Value::Bool(_) | Value::String(_) => false,
    }
}

// === impl CreatedBy ===

impl CreatedBy {
    pub const ALL: [Self; 4] = [Self::Registration, Self::Provider, Self::Administrator, Self::Import];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Registration => "registration",
            Self::Provider => "provider",
            Self::Administrator => "administrator",
            Self::Import => "import",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|created_by| created_by.as_str() == name)
    }
}

// === impl UserState ===

impl UserState {
    /// Returns the first state that applies.
    pub const fn of(is_disabled: bool, is_contested: bool, is_unverified: bool) -> Self {
        if is_disabled {
            Self::Disabled
        } else if is_contested {
            Self::Contested
        } else if is_unverified {
            Self::Unverified
        } else {
            Self::Active
        }
    }

    pub const ALL: [Self; 4] = [Self::Disabled, Self::Contested, Self::Unverified, Self::Active];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::Contested => "contested",
            Self::Unverified => "unverified",
            Self::Active => "active",
        }
    }
}

// === impl AdminUser ===

impl AdminUser {
    pub fn state(&self) -> UserState {
        UserState::of(self.disabled, self.contested, self.email.is_some() && !self.email_verified)
    }

    /// Returns the claims about the user that tokens contain.
    pub fn profile(&self) -> Profile {
        Profile {
            version: self.version.0,
            email: self.email.as_ref().map(|email| email.as_str().to_owned()),
            email_verified: self.email_verified,
            name: self.name.clone(),
        }
    }
}

impl fmt::Debug for AdminUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdminUser").field("id", &self.id).field("version", &self.version).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn metadata(value: Value) -> Result<Metadata, InvalidMetadata> {
        let Value::Object(object) = value else { panic!("an object") };
        Metadata::new(object)
    }

    #[test]
    fn an_external_id_has_1_to_255_bytes_and_no_control_characters() {
        assert_eq!(ExternalId::parse("keycloak:shop:1").unwrap().as_str(), "keycloak:shop:1");
        assert!(ExternalId::parse(&"x".repeat(255)).is_ok());
        assert_eq!(ExternalId::parse(&"x".repeat(256)), Err(InvalidExternalId::TooLong));
        assert_eq!(ExternalId::parse(""), Err(InvalidExternalId::Empty));
        assert_eq!(ExternalId::parse("a\u{7f}"), Err(InvalidExternalId::ControlCharacter));
    }

    #[test]
    fn metadata_with_too_many_bytes_a_nul_or_an_extreme_number_is_rejected() {
        // {"a":"…"} has eight bytes around the text.
        assert!(metadata(json!({ "a": "x".repeat(8 * 1024 - 8) })).is_ok());
        assert_eq!(metadata(json!({ "a": "x".repeat(8 * 1024 - 7) })), Err(InvalidMetadata::TooLarge));
        for nul in [json!({ "a": ["\0"] }), json!({ "\0": 1 }), json!({ "a": { "b": "x\0" } })] {
            assert_eq!(metadata(nul), Err(InvalidMetadata::NulCharacter));
        }
        assert!(metadata(json!({ "a": "\\u0000" })).is_ok());
        for number in [1e21, -1e300, 1e-21] {
            assert_eq!(metadata(json!({ "a": [number] })), Err(InvalidMetadata::Number));
        }
        assert_eq!(
            metadata(json!({ "a": [0, -1.5, u64::MAX] })).unwrap().as_json().get(),
            r#"{"a":[0,-1.5,18446744073709551615]}"#
        );
    }
}
