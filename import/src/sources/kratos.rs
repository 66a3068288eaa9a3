//! Ory Kratos: identities with credentials, as the admin API and `kratos list identities --format json` return them. A
//! file can have several pages, one after another.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::join_name;
use crate::{
    convert::Context,
    error::ImportError,
    hash::{ScryptCost, UnsupportedKind},
    input::Input,
    json::{self, Handler, Items, Raw, Shape, TopArray},
    report::Omitted,
    timestamp,
    user::NewUser,
};

const SHAPE: Shape = Shape { arrays: &["identities"], texts: &[], top_array: TopArray::Records };

#[derive(Deserialize)]
struct Identity {
    id: String,
    state: Option<String>,
    created_at: Option<String>,
    #[serde(default)]
    traits: Raw,
    #[serde(default)]
    metadata_public: Raw,
    #[serde(default)]
    metadata_admin: Raw,
    #[serde(default)]
    verifiable_addresses: Items<Address>,
    #[serde(default)]
    credentials: Option<BTreeMap<String, Credential>>,
}

#[derive(Deserialize)]
struct Address {
    value: String,
    #[serde(default)]
    verified: bool,
    via: Option<String>,
}

#[derive(Deserialize)]
struct Credential {
    /// In credentials of the type `oidc`, each identifier is `PROVIDER:SUBJECT`.
    #[serde(default)]
    identifiers: Items<String>,
    config: Option<Config>,
}

/// The configuration of a credential. The admin API returns it only if `include_credential` contains the credential's
/// type.
#[derive(Deserialize)]
struct Config {
    hashed_password: Option<String>,
    #[serde(default)]
    providers: Items<Provider>,
}

#[derive(Deserialize)]
struct Provider {
    provider: String,
    subject: String,
}

struct Reader<'a, 'b> {
    context: &'a mut Context<'b>,
    file: String,
    record: usize,
    /// Whether the file has an array of identities.
    has_array: bool,
}

pub(super) fn read(inputs: Vec<Input>, context: &mut Context<'_>) -> Result<(), ImportError> {
    for input in inputs {
        let mut reader = Reader { context: &mut *context, file: input.name.clone(), record: 0, has_array: false };
        json::read_documents(&input.name, input.reader, &SHAPE, &mut reader)?;
        if !reader.has_array {
            let reason = "has neither an array nor a member identities, so it is no list of identities";
            return Err(ImportError::Content { name: input.name, reason });
        }
    }
    Ok(())
}

impl Handler for Reader<'_, '_> {
    fn array(&mut self, _: &str) {
        self.has_array = true;
    }

    fn record(&mut self, _: &str, record: &str) -> Result<(), ImportError> {
        self.record += 1;
        match json::parse(record) {
            Some(identity) => convert(identity, self.context),
            None => self.context.count_unreadable(&format!("{}, identity {}", self.file, self.record)),
        }
    }
}

fn convert(identity: Identity, context: &mut Context<'_>) -> Result<(), ImportError> {
    let traits = json::tree(&identity.traits).unwrap_or_default();
    let email = traits.pointer(&context.args.email_trait).and_then(Value::as_str).map(str::to_owned);
    let is_address = |address: &&Address| {
        let is_email = address.via.as_deref().is_none_or(|via| via == "email");
        is_email && email.as_ref().is_some_and(|email| email.eq_ignore_ascii_case(&address.value))
    };
    let email_verified = identity.verifiable_addresses.0.iter().filter(is_address).any(|address| address.verified);
    let name = match traits.pointer(&context.args.name_trait) {
        Some(Value::String(name)) => name.trim().to_owned(),
        Some(Value::Object(parts)) => join_name(&["first", "last"].map(|part| parts.get(part)?.as_str())),
        _ => String::new(),
    };
    let mut password_hash = None;
    let mut identities = Vec::new();
    for (kind, credential) in identity.credentials.unwrap_or_default() {
        let config = credential.config;
        match kind.as_str() {
            "password" => match config.and_then(|config| config.hashed_password) {
                Some(hash) => password_hash = context.text_hash(Some(&hash), ScryptCost::Value),
                None => {
                    let kind = UnsupportedKind("not in the export (include_credential=password is missing)");
                    password_hash = context.hash_or_count(Err(kind));
                }
            },
            "oidc" => {
                let providers = config.map(|config| config.providers.0).unwrap_or_default();
                let links: Vec<(String, String)> = if providers.is_empty() {
                    let identifiers = credential.identifiers.0.iter().filter_map(|text| text.split_once(':'));
                    identifiers.map(|(provider, subject)| (provider.to_owned(), subject.to_owned())).collect()
                } else {
                    providers.into_iter().map(|link| (link.provider, link.subject)).collect()
                };
                for (provider, subject) in links {
                    identities.extend(context.identity(&[&provider], &subject, None));
                }
            }
            "totp" => context.report.count_omitted(Omitted::Totp, 1),
            "webauthn" | "passkey" => context.report.count_omitted(Omitted::WebAuthn, 1),
            "lookup_secret" => context.report.count_omitted(Omitted::RecoveryCodes, 1),
            // Not counted, because nothing is lost: a login with an emailed code has no stored credential.
            "code" | "link_recovery" | "code_recovery" | "profile" | "identifier_first" => {}
            _ => context.report.count_omitted(Omitted::OtherFactors, 1),
        }
    }
    let is_used = |member: &str| {
        [&context.args.email_trait, &context.args.name_trait].iter().any(|pointer| pointer[1..] == *member)
    };
    let has_traits = traits.as_object().is_some_and(|traits| traits.keys().any(|member| !is_used(member)))
        || (traits.is_null() && json::has_content(&identity.traits));
    let is_too_large = [&identity.traits, &identity.metadata_public, &identity.metadata_admin]
        .iter()
        .any(|raw| json::has_content(raw) && json::tree(raw).is_none());
    let has_attributes =
        has_traits || json::has_content(&identity.metadata_public) || json::has_content(&identity.metadata_admin);
    let metadata = context.metadata(has_attributes, || {
        let [public, admin] = [&identity.metadata_public, &identity.metadata_admin].map(json::tree);
        if is_too_large {
            Value::Null
        } else {
            json!({ "traits": traits, "metadata_public": public, "metadata_admin": admin })
        }
    });
    context.user(NewUser {
        external_id: format!("kratos:{}", identity.id),
        email,
        email_verified,
        name,
        created_at: identity.created_at.as_deref().and_then(timestamp::parse),
        disabled: identity.state.as_deref() == Some("inactive"),
        password_hash,
        identities,
        metadata,
    })
}
