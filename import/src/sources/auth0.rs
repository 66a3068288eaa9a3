//! Auth0: the export of users (`POST /api/v2/jobs/users-exports`) and the export of password hashes by Auth0's support,
//! both as one JSON object per line.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    convert::Context,
    error::ImportError,
    hash::ScryptCost,
    input::Input,
    join::{Entry, MAX_KEY, Part, Sorter},
    json::{self, Items, Line, Raw},
    report::Omitted,
    timestamp,
    user::NewUser,
};

/// The prefix of `user_id` for users in an Auth0 database. The export of hashes has the ids without this prefix.
const DATABASE_PREFIX: &str = "auth0|";

/// The members that show whether a line has a user or a hash, and the ids that join the lines of a user.
#[derive(Deserialize)]
struct Row {
    user_id: Option<String>,
    #[serde(rename = "_id")]
    id: Option<HashId>,
    /// In a line with a hash: the id of the user, if somebody other than Auth0 chose the id.
    alt_id: Option<String>,
    #[serde(rename = "passwordHash", alias = "password_hash")]
    password_hash: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum HashId {
    Text(String),
    Object {
        #[serde(rename = "$oid")]
        oid: String,
    },
}

#[derive(Deserialize)]
struct User {
    user_id: String,
    email: Option<String>,
    email_verified: Option<bool>,
    name: Option<String>,
    created_at: Option<Date>,
    blocked: Option<bool>,
    phone_number: Option<String>,
    #[serde(default)]
    identities: Items<Identity>,
    #[serde(default)]
    user_metadata: Raw,
    #[serde(default)]
    app_metadata: Raw,
    #[serde(default)]
    multifactor: Items<serde::de::IgnoredAny>,
}

/// A time as text, or in the form of MongoDB.
#[derive(Deserialize)]
#[serde(untagged)]
enum Date {
    Text(String),
    Object {
        #[serde(rename = "$date")]
        date: String,
    },
}

#[derive(Deserialize)]
struct Identity {
    provider: String,
    connection: Option<String>,
    user_id: Subject,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Subject {
    Text(String),
    Number(u64),
}

pub(super) fn read(inputs: Vec<Input>, context: &mut Context<'_>) -> Result<(), ImportError> {
    let mut sorter = Sorter::new();
    for input in inputs {
        json::read_lines(&input.name, input.reader, |number, line| {
            let row = match line {
                Line::Text(text) => std::str::from_utf8(text).ok().and_then(|text| Some((json::parse(text)?, text))),
                Line::TooLong => None,
            };
            let entry = row.and_then(|(row, text): (Row, _)| {
                let id = row.id.map(|id| match id {
                    HashId::Text(text) => text,
                    HashId::Object { oid } => oid,
                });
                match row.password_hash {
                    Some(hash) => Some((row.alt_id.or(id).or(row.user_id)?, Part::Second, hash)),
                    None => Some((row.user_id?, Part::First, text.to_owned())),
                }
            });
            match entry.filter(|(id, ..)| id.len() <= MAX_KEY) {
                Some((id, part, payload)) => {
                    let key = id.strip_prefix(DATABASE_PREFIX).unwrap_or(&id);
                    sorter.push(key.as_bytes(), part, payload.as_bytes()).map_err(ImportError::Temporary)
                }
                None => context.count_unreadable(&format!("{}, line {number}", input.name)),
            }
        })?;
    }
    let mut sorted = sorter.sort().map_err(ImportError::Temporary)?;
    let mut pending: Option<(Vec<u8>, Option<NewUser>)> = None;
    while let Some(Entry { key, part, payload }) = sorted.next().map_err(ImportError::Temporary)? {
        let text = String::from_utf8_lossy(&payload);
        if part == Part::First {
            finish(pending.take(), context)?;
            let user = match json::parse(&text) {
                Some(user) => Some(convert(user, context)),
                None => {
                    context.count_unreadable(&format!("user {}", String::from_utf8_lossy(&key)))?;
                    None
                }
            };
            pending = Some((key, user));
            continue;
        }
        match &mut pending {
            Some((user, Some(pending))) if *user == key => {
                // If the input has several hashes of a user, only the first is imported.
                if pending.password_hash.is_none() {
                    pending.password_hash = context.text_hash(Some(&text), ScryptCost::Logarithm);
                }
            }
            Some((user, None)) if *user == key => {}
            _ => context.report.count_omitted(Omitted::HashesWithoutUser, 1),
        }
    }
    finish(pending, context)
}

fn finish(pending: Option<(Vec<u8>, Option<NewUser>)>, context: &mut Context<'_>) -> Result<(), ImportError> {
    match pending {
        Some((_, Some(user))) => context.user(user),
        Some((_, None)) | None => Ok(()),
    }
}

fn convert(user: User, context: &mut Context<'_>) -> NewUser {
    let has_phone = user.phone_number.as_deref().is_some_and(|number| !number.is_empty());
    context.report.count_omitted(Omitted::PhoneNumbers, usize::from(has_phone));
    context.report.count_omitted(Omitted::OtherFactors, user.multifactor.0.len());
    let mut identities = Vec::new();
    if user.identities.0.is_empty() {
        // The export has identities only if they were selected as a field. Without them, the id of the user is the only
        // identity.
        if let Some((strategy, subject)) = user.user_id.split_once('|').filter(|(strategy, _)| *strategy != "auth0") {
            let (connection, subject) = subject.split_once('|').unwrap_or((strategy, subject));
            identities.extend(context.identity(&[connection, strategy], subject, None));
        }
    }
    for identity in &user.identities.0 {
        if identity.provider == "auth0" {
            continue;
        }
        let subject = match &identity.user_id {
            Subject::Text(text) => text.clone(),
            Subject::Number(number) => number.to_string(),
        };
        let connection = identity.connection.as_deref().unwrap_or(&identity.provider);
        // Some connections write their name before the subject.
        let subject = subject.strip_prefix(&format!("{connection}|")).unwrap_or(&subject);
        identities.extend(context.identity(&[connection, &identity.provider], subject, None));
    }
    let has_attributes = json::has_content(&user.user_metadata) || json::has_content(&user.app_metadata);
    let metadata = context.metadata(has_attributes, || {
        let raws = [&user.user_metadata, &user.app_metadata];
        if raws.iter().any(|raw| json::has_content(raw) && json::tree(raw).is_none()) {
            return Value::Null;
        }
        let [own, app] = raws.map(json::tree);
        json!({ "user_metadata": own, "app_metadata": app })
    });
    let created_at = user.created_at.map(|date| match date {
        Date::Text(text) | Date::Object { date: text } => text,
    });
    // Auth0 uses the email address as the name of a user without a name.
    let name = user.name.filter(|name| user.email.as_ref() != Some(name)).unwrap_or_default();
    NewUser {
        external_id: format!("auth0:{}", user.user_id),
        email: user.email,
        email_verified: user.email_verified.unwrap_or_default(),
        name: name.trim().to_owned(),
        created_at: created_at.as_deref().and_then(timestamp::parse),
        disabled: user.blocked.unwrap_or_default(),
        password_hash: None,
        identities,
        metadata,
    }
}
