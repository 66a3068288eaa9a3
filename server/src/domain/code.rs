//! Codes that are sent by email: ten symbols of Crockford base32, stored only as an HMAC.

use std::fmt;

use aws_lc_rs::hmac;
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_crds::types::AppId;
use serde::{Deserialize, Serialize};

use super::{
    app::App,
    clock::Env,
    keys::DerivedHmacKeys,
    user::{Epoch, UserId},
};

/// The number of symbols of a code. Ten symbols are 50 random bits. With the default limit of ten wrong codes per
/// minute and client address, nobody can guess a code (specification: Sessions and tokens, Codes).
const CODE_SYMBOLS: usize = 10;
/// Crockford's alphabet: no I, L, O or U.
const ALPHABET: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";

/// A code in clear text and normal form: upper case, no hyphen. Never printed or stored; only the mail shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct Code([u8; CODE_SYMBOLS]);

/// The input does not have the format of a code. The client gets the same response as for a wrong code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not a code")]
pub struct MalformedCode;

/// The key under which a code is stored: its HMAC-SHA-256 with a key of the App.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeKey(String);

/// What a code is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CodePurpose {
    /// To confirm the email address of the account.
    Confirm,
    /// To confirm a new email address for the account.
    Change,
    /// To set a new password.
    Reset,
}

/// What is stored for a code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeRecord {
    pub user: UserId,
    pub purpose: CodePurpose,
    /// The user's epoch when the code was made. When the epoch rises, the code becomes invalid even if it is still
    /// stored.
    pub epoch: Epoch,
    /// The canonical email address to which the code was sent.
    pub address: String,
    /// Unix seconds.
    pub expires_at: i64,
}

// === impl Code ===

impl Code {
    pub fn generate(env: &Env) -> Self {
        Self(env.random_bytes::<CODE_SYMBOLS>().map(|byte| ALPHABET[usize::from(byte & 31)]))
    }

    /// Parses a code as users type it: case, hyphens and white space do not matter; O is read as 0, I and L as 1.
    pub fn parse(input: &str) -> Result<Self, MalformedCode> {
        let mut symbols = [0; CODE_SYMBOLS];
        let mut length = 0;
        for symbol in input.chars().filter(|symbol| *symbol != '-' && !symbol.is_whitespace()) {
            let symbol = match symbol.to_ascii_uppercase() {
                'O' => '0',
                'I' | 'L' => '1',
                other => other,
            };
            let byte = u8::try_from(symbol).ok().filter(|byte| ALPHABET.contains(byte)).ok_or(MalformedCode)?;
            *symbols.get_mut(length).ok_or(MalformedCode)? = byte;
            length += 1;
        }
        if length == CODE_SYMBOLS { Ok(Self(symbols)) } else { Err(MalformedCode) }
    }

    /// Formats the code for users: `XXXXX-XXXXX`.
    pub fn display_form(&self) -> String {
        let text = std::str::from_utf8(&self.0).expect("the alphabet is ASCII");
        format!("{}-{}", &text[..5], &text[5..])
    }

    fn key(&self, app: &AppId, key: &DerivedHmacKeys) -> CodeKey {
        let mut context = hmac::Context::with_key(&key.codes);
        context.update(app.as_str().as_bytes());
        context.update(b"\n");
        context.update(&self.0);
        CodeKey(URL_SAFE_NO_PAD.encode(context.sign().as_ref()))
    }

    /// Returns the key under which a new code is stored.
    pub fn key_to_store(&self, app: &App) -> CodeKey {
        self.key(app.id(), app.keys.active_hmac())
    }

    /// Returns the keys under which the code can be stored: one for each HMAC key that the App still has.
    pub fn keys_to_try(&self, app: &App) -> Vec<CodeKey> {
        app.keys.all_hmac().map(|key| self.key(app.id(), key)).collect()
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Code(…)")
    }
}

// === impl CodeKey ===

impl CodeKey {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_read_as_users_type_it() {
        let code = Code::parse("ABCDE-01XYZ").unwrap();
        for same in ["abcde01xyz", " ABCDE 01XYZ ", "abcde-oixyz", "ABCDE-OLXYZ", "a-b-c-d-e-0-1-x-y-z"] {
            assert_eq!(Code::parse(same), Ok(code.clone()), "{same}");
        }
        assert_eq!(code.display_form(), "ABCDE-01XYZ");
    }

    #[test]
    fn malformed_codes_are_rejected() {
        for bad in ["", "ABCDE-01XY", "ABCDE-01XYZZ", "UBCDE-01XYZ", "ABCDE_01XYZ", "ÀBCDE-01XYZ"] {
            assert_eq!(Code::parse(bad), Err(MalformedCode), "{bad}");
        }
    }

    #[test]
    fn generated_codes_can_be_parsed_from_their_display_form() {
        let env = Env::system();
        let code = Code::generate(&env);
        assert_eq!(Code::parse(&code.display_form()), Ok(code.clone()));
        assert_ne!(Code::generate(&env), code);
        assert_eq!(format!("{code:?}"), "Code(…)");
    }
}
