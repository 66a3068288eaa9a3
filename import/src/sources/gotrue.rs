//! GoTrue (Supabase Auth): rows of `auth.users` and `auth.identities` as JSON, one per line. The columns of a row show
//! to which table it belongs.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    convert::Context,
    error::ImportError,
    hash::ScryptCost,
    input::Input,
    join::{Entry, MAX_KEY, Part, Sorter},
    json::{self, Line, Raw},
    report::Omitted,
    timestamp,
    user::{MAX_IDENTITIES, NewUser},
};

/// The columns that identify the table of a row, and the ids that join the rows of a user.
#[derive(Deserialize)]
struct Row {
    id: Option<String>,
    user_id: Option<String>,
    #[serde(default, deserialize_with = "is_present")]
    encrypted_password: bool,
    #[serde(default, deserialize_with = "is_present")]
    identity_data: bool,
    factor_type: Option<String>,
}

#[derive(Deserialize)]
struct User {
    id: String,
    email: Option<String>,
    encrypted_password: Option<String>,
    email_confirmed_at: Option<String>,
    phone: Option<String>,
    created_at: Option<String>,
    banned_until: Option<String>,
    deleted_at: Option<String>,
    #[serde(default)]
    raw_app_meta_data: Raw,
    #[serde(default)]
    raw_user_meta_data: Raw,
}

#[derive(Deserialize)]
struct Identity {
    provider: String,
    /// The user's id at the provider. Before 2023, this was the column `id`.
    provider_id: Option<String>,
    id: Option<String>,
    identity_data: IdentityData,
}

#[derive(Deserialize)]
struct IdentityData {
    iss: Option<String>,
}

/// A user from a row of `auth.users`. The identities in the following rows are added to this user.
struct Pending {
    user: NewUser,
    identities: usize,
}

pub(super) fn read(inputs: Vec<Input>, context: &mut Context<'_>) -> Result<(), ImportError> {
    let mut sorter = Sorter::new();
    for input in inputs {
        json::read_lines(&input.name, input.reader, |number, line| {
            let row = match line {
                Line::Text(text) => std::str::from_utf8(text).ok().and_then(|text| Some((json::parse(text)?, text))),
                Line::TooLong => None,
            };
            let entry = row.and_then(|(row, text): (Row, _)| match row {
                Row { encrypted_password: true, id: Some(id), .. } => Some((id, Some(Part::First), text)),
                Row { identity_data: true, user_id: Some(id), .. } => Some((id, Some(Part::Second), text)),
                // If the table auth.mfa_factors was exported, too, its rows are only counted.
                Row { factor_type: Some(kind), .. } => {
                    let omitted = match kind.as_str() {
                        "totp" => Omitted::Totp,
                        "webauthn" => Omitted::WebAuthn,
                        _ => Omitted::OtherFactors,
                    };
                    context.report.count_omitted(omitted, 1);
                    Some((String::new(), None, text))
                }
                _ => None,
            });
            match entry.filter(|(id, ..)| id.len() <= MAX_KEY) {
                Some((_, None, _)) => Ok(()),
                Some((id, Some(part), text)) => {
                    sorter.push(id.as_bytes(), part, text.as_bytes()).map_err(ImportError::Temporary)
                }
                None => context.count_unreadable(&format!("{}, line {number}", input.name)),
            }
        })?;
    }
    let mut sorted = sorter.sort().map_err(ImportError::Temporary)?;
    let mut pending: Option<(Vec<u8>, Option<Pending>)> = None;
    while let Some(Entry { key, part, payload }) = sorted.next().map_err(ImportError::Temporary)? {
        let text = String::from_utf8_lossy(&payload);
        if part == Part::First {
            finish(pending.take(), context)?;
            let user = match json::parse(&text) {
                Some(user) => convert(user, context),
                None => {
                    context.count_unreadable(&format!("user {}", String::from_utf8_lossy(&key)))?;
                    None
                }
            };
            pending = Some((key, user));
            continue;
        }
        match &mut pending {
            Some((user, pending)) if *user == key => {
                if let Some(pending) = pending {
                    add_identity(pending, &text, context);
                }
            }
            _ => context.report.count_omitted(Omitted::IdentitiesWithoutUser, 1),
        }
    }
    finish(pending, context)
}

fn finish(pending: Option<(Vec<u8>, Option<Pending>)>, context: &mut Context<'_>) -> Result<(), ImportError> {
    match pending {
        Some((_, Some(pending))) => {
            context.report.count_omitted(Omitted::ExcessIdentities, pending.identities.saturating_sub(MAX_IDENTITIES));
            context.user(pending.user)
        }
        Some((_, None)) | None => Ok(()),
    }
}

/// Converts a row of `auth.users`. Returns `None` if the user is not imported.
fn convert(user: User, context: &mut Context<'_>) -> Option<Pending> {
    if user.deleted_at.is_some() {
        context.report.count_omitted(Omitted::DeletedUsers, 1);
        return None;
    }
    let has_phone = user.phone.as_deref().is_some_and(|phone| !phone.is_empty());
    context.report.count_omitted(Omitted::PhoneNumbers, usize::from(has_phone));
    let (app, own) = (json::tree(&user.raw_app_meta_data), json::tree(&user.raw_user_meta_data));
    let name = ["full_name", "name", "display_name"].iter().find_map(|member| own.as_ref()?.get(member)?.as_str());
    let name = name.unwrap_or_default().trim().to_owned();
    // GoTrue itself writes `provider` and `providers` for each user.
    let is_own = |member: &String| !matches!(member.as_str(), "provider" | "providers");
    let has_app_data = app.as_ref().and_then(Value::as_object).is_some_and(|app| app.keys().any(is_own));
    let has_attributes = has_app_data || json::has_content(&user.raw_user_meta_data);
    let is_too_large = (app.is_none() && json::has_content(&user.raw_app_meta_data))
        || (own.is_none() && json::has_content(&user.raw_user_meta_data));
    let metadata = context.metadata(has_attributes, || {
        if is_too_large { Value::Null } else { json!({ "app_metadata": app, "user_metadata": own }) }
    });
    // A time that is not understood, such as `infinity`, is treated as a time in the future.
    let is_banned = |text: &str| text != "-infinity" && timestamp::parse(text).is_none_or(|until| until > context.now);
    let is_disabled = user.banned_until.as_deref().is_some_and(is_banned);
    let user = NewUser {
        external_id: format!("gotrue:{}", user.id),
        email: user.email,
        email_verified: user.email_confirmed_at.is_some(),
        name,
        created_at: user.created_at.as_deref().and_then(timestamp::parse),
        disabled: is_disabled,
        password_hash: context.text_hash(user.encrypted_password.as_deref(), ScryptCost::Logarithm),
        identities: Vec::new(),
        metadata,
    };
    Some(Pending { user, identities: 0 })
}

fn add_identity(pending: &mut Pending, row: &str, context: &mut Context<'_>) {
    let Some(identity) = json::parse::<Identity>(row) else {
        context.report.unmapped_identities.add("an unreadable row", 1);
        return;
    };
    // Identities of the providers `email` and `phone` are skipped: email address and phone number are columns of the
    // user.
    if matches!(identity.provider.as_str(), "email" | "phone") {
        return;
    }
    let Some(subject) = identity.provider_id.or(identity.id) else {
        context.report.unmapped_identities.add("an unreadable row", 1);
        return;
    };
    if let Some(identity) = context.identity(&[&identity.provider], &subject, identity.identity_data.iss.as_deref()) {
        pending.identities += 1;
        if pending.identities <= MAX_IDENTITIES {
            pending.user.identities.push(identity);
        }
    }
}

/// Returns `true` for every value, even for null: serde calls this function only if the row has the column.
fn is_present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    serde::de::IgnoredAny::deserialize(deserializer).map(|_| true)
}
