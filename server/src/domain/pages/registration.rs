//! The registration cookie: it proves that the browser that confirms an email address is the browser that registered
//! it.

use std::fmt;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::{
    browser::BrowserId,
    seal::{self, SealedPurpose},
};
use crate::domain::{app::App, clock::Env, email::Email};

/// The longest `tx` that the cookie carries, in characters. With the longest email address, the cookie is then shorter
/// than `MAX_COOKIE_CHARS`. Four such cookies fit into the header block of a request, which has at most 32 KiB.
const MAX_CARRIED_CHARS: usize = 2_048;
/// The longest value of the cookie, in characters. Browsers accept 4,096 bytes for name, value and attributes together
/// (RFC 6265, 6.1).
const MAX_COOKIE_CHARS: usize = 3_500;

/// The content of a registration cookie.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// The registered email address, in lower case.
    #[serde(rename = "a")]
    address: String,
    /// The `tx` of the registration page.
    #[serde(rename = "t", skip_serializing_if = "Option::is_none", default)]
    transaction: Option<String>,
    /// Unix seconds.
    #[serde(rename = "e")]
    expires_at: i64,
}

// === impl Registration ===

impl Registration {
    /// `transaction` is the `tx` of the page, which the caller has opened. A `tx` of more than 2,048 characters is not
    /// carried: the confirmation in a new tab then leads to the account page.
    pub fn new(email: &Email, transaction: Option<&str>, expires_at: i64) -> Self {
        let carried = transaction.filter(|text| text.len() <= MAX_CARRIED_CHARS);
        Self { address: email.canonical().to_owned(), transaction: carried.map(str::to_owned), expires_at }
    }

    /// The value of the cookie, which opens only for this App in this browser.
    pub fn seal(&self, env: &Env, app: &App, browser: &BrowserId) -> String {
        seal::seal(env, app, SealedPurpose::Registration, &browser.encode(), self)
    }

    /// Opens the value of a cookie. Returns `None` if it is forged or has expired, if it belongs to another App or
    /// browser, and for every other cookie.
    pub fn open(app: &App, browser: &BrowserId, value: &str, now: OffsetDateTime) -> Option<Self> {
        let bound_to = browser.encode();
        let opened: Self = seal::open(app, SealedPurpose::Registration, &bound_to, value, MAX_COOKIE_CHARS)?;
        (now.unix_timestamp() < opened.expires_at).then_some(opened)
    }

    /// Whether the browser registered this email address. `canonical` is the address in lower case.
    pub fn is_for(&self, canonical: &str) -> bool {
        self.address == canonical
    }

    /// The registered email address, in lower case.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The `tx` with which the confirmation continues.
    pub fn transaction(&self) -> Option<&str> {
        self.transaction.as_deref()
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use time::Duration;

    use super::*;
    use crate::fixtures;

    #[test]
    fn a_registration_cookie_is_for_one_address_browser_and_lifetime() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let browser = BrowserId::generate(&env);
        let end = env.now() + Duration::hours(24);
        let registration =
            Registration::new(&Email::parse("Ada@Example.com").unwrap(), Some("tx"), end.unix_timestamp());
        let value = registration.seal(&env, &app, &browser);
        let opened = Registration::open(&app, &browser, &value, env.now()).unwrap();
        assert!(opened.is_for("ada@example.com") && !opened.is_for("eve@example.com"));
        assert_eq!(opened.transaction(), Some("tx"));
        assert_eq!(Registration::open(&app, &browser, &value, end), None, "expired");
        assert_eq!(Registration::open(&app, &BrowserId::generate(&env), &value, env.now()), None);
        assert!(!format!("{registration:?}").contains("ada"));
    }

    #[test]
    fn a_registration_cookie_of_maximum_size_fits_in_a_browser() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let browser = BrowserId::generate(&env);
        let longest =
            format!("{}@{}.example.com", "a".repeat(64), ["b".repeat(58), "c".repeat(58), "d".repeat(58)].join("."));
        let email = Email::parse(&longest).unwrap();
        let carried = "A".repeat(MAX_CARRIED_CHARS);
        let expires_at = i64::MAX;
        let value = Registration::new(&email, Some(&carried), expires_at).seal(&env, &app, &browser);
        assert!(value.len() < MAX_COOKIE_CHARS, "{}", value.len());
        let opened = Registration::open(&app, &browser, &value, env.now()).unwrap();
        assert_eq!(opened.transaction(), Some(carried.as_str()));
        let too_long = Registration::new(&email, Some(&format!("{carried}A")), expires_at);
        assert_eq!(too_long.transaction(), None);
    }
}
