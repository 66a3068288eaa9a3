//! Firebase Authentication: the JSON file of `firebase auth:export`.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    convert::Context,
    error::ImportError,
    hash,
    input::Input,
    json::{self, Handler, Items, Shape, TopArray},
    report::Omitted,
    user::NewUser,
};

const SHAPE: Shape = Shape { arrays: &["users"], texts: &[], top_array: TopArray::Documents };

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Account {
    local_id: String,
    email: Option<String>,
    email_verified: Option<bool>,
    display_name: Option<String>,
    disabled: Option<bool>,
    /// Milliseconds since the Unix epoch, as text or number.
    created_at: Option<Milliseconds>,
    password_hash: Option<String>,
    salt: Option<String>,
    phone_number: Option<String>,
    /// A JSON object, as text.
    custom_attributes: Option<String>,
    #[serde(default)]
    provider_user_info: Items<ProviderInfo>,
    #[serde(default)]
    mfa_info: Items<Factor>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Milliseconds {
    Number(i64),
    Text(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ProviderInfo {
    provider_id: String,
    raw_id: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Factor {
    totp_info: Option<serde::de::IgnoredAny>,
}

struct Reader<'a, 'b> {
    context: &'a mut Context<'b>,
    file: String,
    record: usize,
    has_users: bool,
}

pub(super) fn read(inputs: Vec<Input>, context: &mut Context<'_>) -> Result<(), ImportError> {
    for input in inputs {
        let mut reader = Reader { context: &mut *context, file: input.name.clone(), record: 0, has_users: false };
        json::read_documents(&input.name, input.reader, &SHAPE, &mut reader)?;
        if !reader.has_users {
            return Err(ImportError::Content { name: input.name, reason: "has no member users, so it is no export" });
        }
    }
    Ok(())
}

impl Handler for Reader<'_, '_> {
    fn array(&mut self, _: &str) {
        self.has_users = true;
    }

    fn record(&mut self, _: &str, record: &str) -> Result<(), ImportError> {
        self.record += 1;
        match json::parse(record) {
            Some(account) => convert(account, self.context),
            None => self.context.count_unreadable(&format!("{}, account {}", self.file, self.record)),
        }
    }
}

fn convert(account: Account, context: &mut Context<'_>) -> Result<(), ImportError> {
    let has_phone = account.phone_number.as_deref().is_some_and(|number| !number.is_empty());
    context.report.count_omitted(Omitted::PhoneNumbers, usize::from(has_phone));
    let totp = account.mfa_info.0.iter().filter(|factor| factor.totp_info.is_some()).count();
    context.report.count_omitted(Omitted::Totp, totp);
    context.report.count_omitted(Omitted::OtherFactors, account.mfa_info.0.len() - totp);
    let password_hash = match (account.password_hash.as_deref(), account.salt.as_deref()) {
        (Some(hash), salt) if !hash.is_empty() => {
            let (rounds, memory_cost) = (context.args.rounds, context.args.memory_cost);
            let converted = hash::firebase(hash, salt.unwrap_or_default(), rounds, memory_cost);
            context.hash_or_count(converted)
        }
        _ => None,
    };
    let mut identities = Vec::new();
    for info in &account.provider_user_info.0 {
        let Some(subject) = &info.raw_id else { continue };
        // `password` and `phone` stand for the email address and the phone number of the account.
        if !matches!(info.provider_id.as_str(), "password" | "phone") {
            identities.extend(context.identity(&[&info.provider_id], subject, None));
        }
    }
    let claims = account.custom_attributes.filter(|claims| !matches!(claims.trim(), "" | "{}"));
    let metadata = context.metadata(claims.is_some(), || {
        let claims = claims.as_deref().and_then(|claims| serde_json::from_str::<Value>(claims).ok());
        json!({ "custom_claims": claims })
    });
    let created_at = match account.created_at {
        Some(Milliseconds::Number(number)) => Some(number),
        Some(Milliseconds::Text(text)) => text.parse().ok(),
        None => None,
    };
    context.user(NewUser {
        external_id: format!("firebase:{}", account.local_id),
        email: account.email,
        email_verified: account.email_verified.unwrap_or_default(),
        name: account.display_name.as_deref().unwrap_or_default().trim().to_owned(),
        created_at: created_at.map(|milliseconds: i64| milliseconds.div_euclid(1000)),
        disabled: account.disabled.unwrap_or_default(),
        password_hash,
        identities,
        metadata,
    })
}
