//! The export of Keycloak that the test imports, and the passwords of its users.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// A file that `latchkey-server import keycloak -` reads: one or several files of `kc.sh export`, one after another.
pub(crate) struct Export {
    pub(crate) text: String,
    /// The number of users, without those of service accounts.
    pub(crate) users: usize,
    /// The number of users with an email address. The others are not imported.
    pub(crate) with_address: usize,
    /// The number of users with an email address and a password.
    pub(crate) with_password: usize,
}

/// A file of `kc.sh export`, with a realm and its users, or with only a part of the users.
#[derive(Deserialize)]
struct ExportedFile {
    users: Vec<User>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct User {
    email: Option<String>,
    #[serde(default)]
    credentials: Vec<Credential>,
    service_account_client_id: Option<String>,
}

#[derive(Deserialize)]
struct Credential {
    #[serde(rename = "type")]
    kind: String,
}

/// The passwords in import/tests/fixtures/keycloak/README.md, by user name.
const FIXTURE_PASSWORDS: [(&str, &str); 5] = [
    ("ada", "a quiet harbour at noon"),
    ("grace", "a moth in the relay"),
    ("alan", "seven miles before breakfast"),
    ("edsger", "the shortest path home"),
    ("margaret", "a stack of printed code"),
];

/// The password that the user with this email address had in Keycloak; `None` if
/// import/tests/fixtures/keycloak/generate does not create this user.
pub(crate) fn old_password(email: &str) -> Option<String> {
    let name = email.strip_suffix("@example.com")?;
    if name.starts_with("user-") {
        return Some(format!("the old password of {name}"));
    }
    let known = FIXTURE_PASSWORDS.iter().find(|(user, _)| *user == name);
    known.map(|(_, password)| (*password).to_owned())
}

// === impl Export ===

impl Export {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let files = serde_json::Deserializer::from_str(&text).into_iter::<ExportedFile>();
        let files = files.collect::<Result<Vec<_>, _>>().with_context(|| path.display().to_string())?;
        let exported_users = files.iter().flat_map(|file| &file.users);
        let (mut users, mut with_address, mut with_password) = (0, 0, 0);
        for user in exported_users.filter(|user| user.service_account_client_id.is_none()) {
            users += 1;
            let Some(email) = &user.email else { continue };
            with_address += 1;
            if user.credentials.iter().any(|credential| credential.kind == "password") {
                with_password += 1;
                ensure!(old_password(email).is_some(), "the test does not know the password of {email}");
            }
        }
        ensure!(with_password > 0, "no user in {} has a password", path.display());
        Ok(Self { text, users, with_address, with_password })
    }
}
