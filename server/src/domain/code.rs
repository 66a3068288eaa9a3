//! Codes that are mailed: ten symbols of Crockford base32, kept only as an HMAC.

use std::fmt;

use aws_lc_rs::hmac;
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_crds::types::AppId;
use serde::{Deserialize, Serialize};

use super::{
    app::App,
    clock::Env,
    keys::Hmac,
    user::{Epoch, UserId},
};

/// 50 bits (contract, 2): at the limit of ten wrong codes a minute nobody lives to guess one.
const SYMBOLS: usize = 10;
/// Crockford's alphabet: no I, L, O or U.
const ALPHABET: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";

/// A code in clear, in normal form: upper case, no hyphen. Never printed or stored; `shown` is for the mail.
#[derive(Clone, PartialEq, Eq)]
pub struct Code([u8; SYMBOLS]);

/// The input has not the form of a code; to the caller that is a wrong code like any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not a code")]
pub struct NotACode;

/// Under what a code is kept: its HMAC-SHA-256 with a key of the App.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeKey(String);

/// What a code is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Purpose {
    /// The account's own address.
    Confirm,
    /// An address that is to replace the account's.
    Change,
    /// A new password.
    Reset,
}

/// What is kept of a code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeRecord {
    pub user: UserId,
    pub purpose: Purpose,
    /// The user's epoch when the code was made; a raised epoch makes the code dead wherever it is still kept.
    pub epoch: Epoch,
    /// The canonical address it was sent to.
    pub address: String,
    /// Unix seconds.
    pub expires_at: i64,
}

// === impl Code ===

impl Code {
    pub fn generate(env: &Env) -> Self {
        Self(env.random::<SYMBOLS>().map(|byte| ALPHABET[usize::from(byte & 31)]))
    }

    /// Case, hyphens and white space do not matter; O is 0, I and L are 1.
    pub fn parse(input: &str) -> Result<Self, NotACode> {
        let mut symbols = [0; SYMBOLS];
        let mut length = 0;
        for symbol in input.chars().filter(|symbol| *symbol != '-' && !symbol.is_whitespace()) {
            let symbol = match symbol.to_ascii_uppercase() {
                'O' => '0',
                'I' | 'L' => '1',
                other => other,
            };
            let byte = u8::try_from(symbol).ok().filter(|byte| ALPHABET.contains(byte)).ok_or(NotACode)?;
            *symbols.get_mut(length).ok_or(NotACode)? = byte;
            length += 1;
        }
        if length == SYMBOLS { Ok(Self(symbols)) } else { Err(NotACode) }
    }

    /// `XXXXX-XXXXX`.
    pub fn shown(&self) -> String {
        let text = std::str::from_utf8(&self.0).expect("the alphabet is ASCII");
        format!("{}-{}", &text[..5], &text[5..])
    }

    fn key(&self, app: &AppId, key: &Hmac) -> CodeKey {
        let mut context = hmac::Context::with_key(&key.codes);
        context.update(app.as_str().as_bytes());
        context.update(b"\n");
        context.update(&self.0);
        CodeKey(URL_SAFE_NO_PAD.encode(context.sign().as_ref()))
    }

    /// Under what a new code is kept.
    pub fn key_to_store(&self, app: &App) -> CodeKey {
        self.key(app.id(), app.keys.hmac())
    }

    /// Under what it may have been kept: one for each key not yet dropped.
    pub fn keys_to_try(&self, app: &App) -> Vec<CodeKey> {
        app.keys.hmacs().map(|key| self.key(app.id(), key)).collect()
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
    fn a_code_is_read_as_people_write_it() {
        let code = Code::parse("ABCDE-01XYZ").unwrap();
        for same in ["abcde01xyz", " ABCDE 01XYZ ", "abcde-oixyz", "ABCDE-OLXYZ", "a-b-c-d-e-0-1-x-y-z"] {
            assert_eq!(Code::parse(same), Ok(code.clone()), "{same}");
        }
        assert_eq!(code.shown(), "ABCDE-01XYZ");
    }

    #[test]
    fn what_is_not_a_code() {
        for bad in ["", "ABCDE-01XY", "ABCDE-01XYZZ", "UBCDE-01XYZ", "ABCDE_01XYZ", "ÀBCDE-01XYZ"] {
            assert_eq!(Code::parse(bad), Err(NotACode), "{bad}");
        }
    }

    #[test]
    fn generated_codes_have_the_shown_form() {
        let env = Env::system();
        let code = Code::generate(&env);
        assert_eq!(Code::parse(&code.shown()), Ok(code.clone()));
        assert_ne!(Code::generate(&env), code);
        assert_eq!(format!("{code:?}"), "Code(…)");
    }
}
