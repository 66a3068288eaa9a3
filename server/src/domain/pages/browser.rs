//! The value of the browser cookie, to which forms and transactions are bound.

use std::fmt;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};

use crate::domain::clock::Env;

const BYTES: usize = 16;
/// The length of the text: 16 bytes in base64url.
const CHARS: usize = 22;

/// Identifies a browser: 16 random bytes, which only this browser and the servers know. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct BrowserId([u8; BYTES]);

// === impl BrowserId ===

impl BrowserId {
    pub fn generate(env: &Env) -> Self {
        Self(env.random_bytes())
    }

    /// `None` if the text is not 16 bytes in base64url.
    pub fn parse(text: &str) -> Option<Self> {
        if text.len() != CHARS {
            return None;
        }
        URL_SAFE_NO_PAD.decode(text).ok()?.try_into().ok().map(Self)
    }

    /// The value of the cookie.
    pub fn encode(&self) -> String {
        URL_SAFE_NO_PAD.encode(self.0)
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for BrowserId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BrowserId(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_browser_cookie_is_16_bytes_and_is_never_printed() {
        let browser = BrowserId::generate(&Env::system());
        let text = browser.encode();
        assert_eq!(BrowserId::parse(&text), Some(browser.clone()));
        assert_eq!(format!("{browser:?}"), "BrowserId(…)");
        // The last text of the list has bits after the 16 bytes.
        for bad in ["", "x", &text[1..], &format!("{text}A"), &"é".repeat(11), "AAAAAAAAAAAAAAAAAAAAAB"] {
            assert_eq!(BrowserId::parse(bad), None, "{bad}");
        }
    }
}
