//! Amazon Cognito: the JSON of `aws cognito-idp list-users`, or a CSV file with the columns of a user pool
//! (`aws cognito-idp get-csv-header`). Cognito exports no password hashes.

use std::{
    collections::BTreeMap,
    io::{BufRead, Read},
};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::join_name;
use crate::{
    convert::Context,
    error::ImportError,
    hash::UnsupportedKind,
    input::{self, Input},
    json::{self, Budget, Handler, Items, LimitedReader, Shape, TopArray},
    report::Omitted,
    timestamp,
    user::NewUser,
};

const SHAPE: Shape = Shape { arrays: &["Users"], texts: &[], top_array: TopArray::Records };
/// Attributes that become fields of the imported user, and attributes about the phone number, which is only counted.
/// They do not become metadata.
const USED_ATTRIBUTES: [&str; 9] = [
    "sub",
    "email",
    "email_verified",
    "name",
    "given_name",
    "family_name",
    "identities",
    "phone_number",
    "phone_number_verified",
];

/// A user, `UserType` in Cognito.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct UserType {
    username: String,
    #[serde(default)]
    attributes: Items<Attribute>,
    user_create_date: Option<Date>,
    enabled: Option<bool>,
    user_status: Option<String>,
    #[serde(rename = "MFAOptions", default)]
    mfa_options: Items<serde::de::IgnoredAny>,
    #[serde(rename = "UserMFASettingList", default)]
    mfa_settings: Items<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Attribute {
    name: String,
    value: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Date {
    /// Unix seconds.
    Number(f64),
    Text(String),
}

/// An item of the attribute `identities`, which is JSON text.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Federated {
    user_id: String,
    provider_name: String,
}

/// A user of either form of the input, JSON or CSV. CSV has no `created_at`, and all its users are enabled and not
/// external.
struct User {
    username: String,
    attributes: BTreeMap<String, String>,
    created_at: Option<i64>,
    is_enabled: bool,
    /// Whether the user logs in only through a provider, so that there is no password.
    is_external: bool,
}

struct Reader<'a, 'b> {
    context: &'a mut Context<'b>,
    file: String,
    record: usize,
    has_users: bool,
}

pub(super) fn read(inputs: Vec<Input>, context: &mut Context<'_>) -> Result<(), ImportError> {
    for input in inputs {
        let input_error = |error| ImportError::Input { name: input.name.clone(), error };
        let mut reader = input::buffer(input.reader).map_err(input_error)?;
        let start = reader.fill_buf().map_err(input_error)?.trim_ascii_start().first();
        if matches!(start, Some(b'{' | b'[')) {
            read_json(&input.name, reader, context)?;
        } else {
            read_csv(&input.name, reader, context)?;
        }
    }
    Ok(())
}

fn read_json(name: &str, reader: impl Read, context: &mut Context<'_>) -> Result<(), ImportError> {
    let mut handler = Reader { context, file: name.to_owned(), record: 0, has_users: false };
    json::read_documents(name, reader, &SHAPE, &mut handler)?;
    if handler.has_users {
        return Ok(());
    }
    let reason = "has neither an array nor a member Users, so it is no list of users";
    Err(ImportError::Content { name: name.to_owned(), reason })
}

impl Handler for Reader<'_, '_> {
    fn array(&mut self, _: &str) {
        self.has_users = true;
    }

    fn record(&mut self, _: &str, record: &str) -> Result<(), ImportError> {
        self.record += 1;
        let Some(user) = json::parse::<UserType>(record) else {
            return self.context.count_unreadable(&format!("{}, user {}", self.file, self.record));
        };
        let totp = user.mfa_settings.0.iter().filter(|setting| *setting == "SOFTWARE_TOKEN_MFA").count();
        let others = (user.mfa_settings.0.len() - totp).max(user.mfa_options.0.len());
        self.context.report.count_omitted(Omitted::Totp, totp);
        self.context.report.count_omitted(Omitted::OtherFactors, others);
        let created_at = match user.user_create_date {
            #[expect(clippy::cast_possible_truncation, reason = "fractions of a second have no use")]
            Some(Date::Number(seconds)) => Some(seconds as i64),
            Some(Date::Text(text)) => timestamp::parse(&text),
            None => None,
        };
        let attributes = user.attributes.0.into_iter();
        let user = User {
            username: user.username,
            attributes: attributes.filter_map(|attribute| Some((attribute.name, attribute.value?))).collect(),
            created_at,
            is_enabled: user.enabled.unwrap_or(true),
            is_external: user.user_status.as_deref() == Some("EXTERNAL_PROVIDER"),
        };
        convert(user, self.context)
    }
}

fn read_csv(name: &str, reader: impl Read, context: &mut Context<'_>) -> Result<(), ImportError> {
    let budget = Budget::default();
    let reader = LimitedReader::new(reader, &budget);
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(reader);
    let csv_error = |error: csv::Error| match error.into_kind() {
        csv::ErrorKind::Io(error) => ImportError::Input { name: name.to_owned(), error },
        _ => ImportError::Content { name: name.to_owned(), reason: "is neither CSV nor JSON in UTF-8" },
    };
    let columns = reader.headers().map_err(csv_error)?.clone();
    let columns: Vec<String> = columns.iter().map(|column| column.trim().to_owned()).collect();
    let has_id = columns.iter().any(|column| matches!(column.as_str(), "sub" | "cognito:username"));
    if !has_id || !columns.iter().any(|column| column == "email") {
        let reason = "has no columns email, and sub or cognito:username";
        return Err(ImportError::Content { name: name.to_owned(), reason });
    }
    let mut record = csv::ByteRecord::new();
    for number in 1.. {
        budget.reset();
        if !reader.read_byte_record(&mut record).map_err(csv_error)? {
            break;
        }
        let fields: Option<Vec<&str>> = record.iter().map(|field| std::str::from_utf8(field).ok()).collect();
        let Some(fields) = fields.filter(|fields| fields.len() == columns.len()) else {
            context.count_unreadable(&format!("{name}, record {number}"))?;
            continue;
        };
        let cells = columns.iter().zip(fields).filter(|(_, field)| !field.is_empty());
        let mut attributes: BTreeMap<String, String> =
            cells.map(|(column, field)| (column.clone(), field.to_owned())).collect();
        if attributes.remove("cognito:mfa_enabled").is_some_and(|flag| is_true(&flag)) {
            context.report.count_omitted(Omitted::OtherFactors, 1);
        }
        let username = attributes.remove("cognito:username").unwrap_or_default();
        let user = User { username, attributes, created_at: None, is_enabled: true, is_external: false };
        convert(user, context)?;
    }
    Ok(())
}

fn convert(user: User, context: &mut Context<'_>) -> Result<(), ImportError> {
    let attribute = |name: &str| user.attributes.get(name).map(String::as_str);
    let id = attribute("sub").unwrap_or(&user.username);
    if id.is_empty() {
        return context.count_unreadable("a user without sub and user name");
    }
    if !user.is_external {
        context.hash_or_count(Err(UnsupportedKind("not exported by Cognito")));
    }
    context.report.count_omitted(Omitted::PhoneNumbers, usize::from(attribute("phone_number").is_some()));
    let mut identities = Vec::new();
    for federated in attribute("identities").and_then(json::parse::<Items<Federated>>).unwrap_or_default().0 {
        identities.extend(context.identity(&[&federated.provider_name], &federated.user_id, None));
    }
    let others = user.attributes.iter().filter(|(name, _)| !USED_ATTRIBUTES.contains(&name.as_str()));
    let others: Map<String, Value> = others.map(|(name, value)| (name.clone(), Value::String(value.clone()))).collect();
    let metadata = context.metadata(!others.is_empty(), || Value::Object(others));
    let name = match attribute("name") {
        Some(name) => name.trim().to_owned(),
        None => join_name(&[attribute("given_name"), attribute("family_name")]),
    };
    context.user(NewUser {
        external_id: format!("cognito:{id}"),
        email: attribute("email").map(str::to_owned),
        email_verified: attribute("email_verified").is_some_and(is_true),
        name,
        created_at: user.created_at,
        disabled: !user.is_enabled,
        password_hash: None,
        identities,
        metadata,
    })
}

fn is_true(text: &str) -> bool {
    text.trim().eq_ignore_ascii_case("true")
}
