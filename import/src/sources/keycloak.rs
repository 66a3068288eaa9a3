//! Keycloak: files of `kc.sh export`, with the users in the file of the realm or in separate files.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::join_name;
use crate::{
    convert::Context,
    error::ImportError,
    hash::{Argon2Parameters, KeycloakHash, PasswordHash, UnsupportedKind},
    input::Input,
    json::{self, Handler, Items, Raw, Shape, TopArray},
    report::Omitted,
    user::NewUser,
};

const SHAPE: Shape = Shape { arrays: &["users", "federatedUsers"], texts: &["realm"], top_array: TopArray::Documents };

/// A user, `UserRepresentation` in Keycloak.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct User {
    id: String,
    email: Option<String>,
    #[serde(default)]
    email_verified: Option<bool>,
    first_name: Option<String>,
    last_name: Option<String>,
    enabled: Option<bool>,
    /// Milliseconds since the Unix epoch.
    created_timestamp: Option<i64>,
    #[serde(default)]
    credentials: Items<Credential>,
    #[serde(default)]
    federated_identities: Items<FederatedIdentity>,
    #[serde(default)]
    required_actions: Items<String>,
    #[serde(default)]
    realm_roles: Items<String>,
    #[serde(default)]
    client_roles: Option<BTreeMap<String, Items<String>>>,
    #[serde(default)]
    groups: Items<String>,
    #[serde(default)]
    attributes: Raw,
    service_account_client_id: Option<String>,
    /// The user federation (LDAP) that manages the user.
    federation_link: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Credential {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    secret_data: Option<String>,
    credential_data: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FederatedIdentity {
    identity_provider: String,
    user_id: String,
}

/// The JSON text in `secretData`.
#[derive(Deserialize)]
struct SecretData {
    value: String,
    salt: String,
}

/// The JSON text in `credentialData`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CredentialData {
    hash_iterations: u32,
    algorithm: String,
    #[serde(default)]
    additional_parameters: Option<BTreeMap<String, Items<String>>>,
}

struct Reader<'a, 'b> {
    context: &'a mut Context<'b>,
    file: String,
    realm: Option<String>,
    record: usize,
}

pub(super) fn read(inputs: Vec<Input>, context: &mut Context<'_>) -> Result<(), ImportError> {
    let mut realm = None;
    for input in inputs {
        let mut reader = Reader { context: &mut *context, file: input.name.clone(), realm: None, record: 0 };
        // Keeps the realm of the previous files, to detect a second realm.
        reader.realm.clone_from(&realm);
        json::read_documents(&input.name, input.reader, &SHAPE, &mut reader)?;
        if reader.realm.is_none() {
            return Err(ImportError::Content { name: input.name, reason: "has no member realm, so it is no export" });
        }
        realm = reader.realm;
    }
    Ok(())
}

// === impl Reader ===

impl Handler for Reader<'_, '_> {
    fn text(&mut self, _: &str, value: String) -> Result<(), ImportError> {
        if self.realm.as_ref().is_some_and(|realm| *realm != value) {
            let reason = "has users of another realm. Export one realm: kc.sh export --realm NAME";
            return Err(ImportError::Content { name: self.file.clone(), reason });
        }
        self.realm = Some(value);
        Ok(())
    }

    fn record(&mut self, member: &str, record: &str) -> Result<(), ImportError> {
        if member == "federatedUsers" {
            self.context.report.count_omitted(Omitted::FederatedUsers, 1);
            return Ok(());
        }
        self.record += 1;
        let Some(realm) = &self.realm else {
            let reason = "has users before the name of the realm. Use the file as kc.sh export wrote it";
            return Err(ImportError::Content { name: self.file.clone(), reason });
        };
        match json::parse(record) {
            Some(user) => convert(user, realm, self.context),
            None => self.context.count_unreadable(&format!("{}, user {}", self.file, self.record)),
        }
    }
}

fn convert(user: User, realm: &str, context: &mut Context<'_>) -> Result<(), ImportError> {
    if user.service_account_client_id.is_some() {
        context.report.count_omitted(Omitted::ServiceAccounts, 1);
        return Ok(());
    }
    // The default role of the realm is not counted, because every user has it.
    let default_role = format!("default-roles-{}", realm.to_lowercase());
    let realm_roles = user.realm_roles.0.iter().filter(|role| **role != default_role).count();
    let client_roles: usize = user.client_roles.iter().flat_map(BTreeMap::values).map(|roles| roles.0.len()).sum();
    context.report.count_omitted(Omitted::Roles, realm_roles + client_roles);
    context.report.count_omitted(Omitted::Groups, user.groups.0.len());
    context.report.count_omitted(Omitted::RequiredActions, user.required_actions.0.len());

    let mut password_hash = None;
    for credential in &user.credentials.0 {
        match credential.kind.as_deref() {
            Some("password") if password_hash.is_none() => password_hash = convert_password(credential, context),
            // Previous passwords are not imported.
            Some("password" | "password-history") => {}
            Some("otp") => context.report.count_omitted(Omitted::Totp, 1),
            Some("webauthn" | "webauthn-passwordless") => context.report.count_omitted(Omitted::WebAuthn, 1),
            Some("recovery-authn-codes") => context.report.count_omitted(Omitted::RecoveryCodes, 1),
            _ => context.report.count_omitted(Omitted::OtherFactors, 1),
        }
    }
    if user.federation_link.is_some() && password_hash.is_none() {
        context.report.count_omitted(Omitted::FederatedPasswords, 1);
    }
    let mut identities = Vec::new();
    for identity in &user.federated_identities.0 {
        identities.extend(context.identity(&[&identity.identity_provider], &identity.user_id, None));
    }
    let attributes = user.attributes;
    let metadata = context.metadata(json::has_content(&attributes), || json::tree(&attributes).unwrap_or(Value::Null));
    context.user(NewUser {
        external_id: format!("keycloak:{realm}:{}", user.id),
        email: user.email,
        email_verified: user.email_verified.unwrap_or_default(),
        name: join_name(&[user.first_name.as_deref(), user.last_name.as_deref()]),
        created_at: user.created_timestamp.map(|milliseconds| milliseconds.div_euclid(1000)),
        disabled: !user.enabled.unwrap_or_default(),
        password_hash,
        identities,
        metadata,
    })
}

fn convert_password(credential: &Credential, context: &mut Context<'_>) -> Option<PasswordHash> {
    let secret = credential.secret_data.as_deref().and_then(json::parse::<SecretData>);
    let data = credential.credential_data.as_deref().and_then(json::parse::<CredentialData>);
    let (Some(secret), Some(data)) = (secret, data) else {
        return context.hash_or_count(Err(UnsupportedKind("other form")));
    };
    let parameters = data.additional_parameters.unwrap_or_default();
    let parameter = |name: &str| parameters.get(name).and_then(|values| values.0.first()).map(String::as_str);
    let hash = KeycloakHash {
        algorithm: &data.algorithm,
        iterations: data.hash_iterations,
        value: &secret.value,
        salt: &secret.salt,
        argon2: Argon2Parameters {
            kind: parameter("type"),
            version: parameter("version"),
            memory: parameter("memory"),
            parallelism: parameter("parallelism"),
        },
    };
    context.hash_or_count(hash.convert())
}
