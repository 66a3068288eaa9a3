//! The registration cookie: it proves that the browser that confirms an email address is the browser that registered
//! it.

use std::fmt;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::{
    browser::BrowserId,
    seal::{self, SealedPurpose},
    transaction::TRANSACTION_SECONDS,
};
use crate::domain::{app::App, call::Call, clock::Env, email::Email, flow::FlowId, ports::Flows};

/// The longest `tx` (the text of a transaction) that the cookie carries, in characters. A cookie with this `tx` and the
/// longest email address is shorter than `MAX_COOKIE_CHARS`. Four such cookies fit into the header block of a request,
/// which has at most 32 KiB.
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
    /// The `tx` of the registration page, if it is in the cookie.
    #[serde(rename = "t", skip_serializing_if = "Option::is_none", default)]
    carried: Option<String>,
    /// The id of the `tx` in Redis, if the `tx` itself is too long for the cookie.
    #[serde(rename = "f", skip_serializing_if = "Option::is_none", default)]
    stored: Option<FlowId>,
    /// Unix seconds.
    #[serde(rename = "e")]
    expires_at: i64,
}

// === impl Registration ===

impl Registration {
    /// Makes the content of a registration cookie. `transaction` is the `tx` of the page, which the caller has opened.
    /// A `tx` of more than 2,048 characters is stored in Redis, within the limits on unbound flows. If that fails, the
    /// registration continues without the `tx`: the confirmation in a new tab then leads to the account page.
    pub async fn start<S: Flows>(call: Call<'_, S>, email: &Email, transaction: Option<&str>, expires_at: i64) -> Self {
        let (carried, stored) = match transaction {
            Some(text) if text.len() > MAX_CARRIED_CHARS => (None, store_transaction(call, text).await),
            short => (short, None),
        };
        Self { stored, ..Self::new(email, carried, expires_at) }
    }

    /// A registration with a `tx` of at most 2,048 characters in its cookie.
    pub fn new(email: &Email, carried: Option<&str>, expires_at: i64) -> Self {
        Self { address: email.canonical().to_owned(), carried: carried.map(str::to_owned), stored: None, expires_at }
    }

    /// The value of the cookie, which opens only for this App in this browser.
    pub fn seal(&self, env: &Env, app: &App, browser: &BrowserId) -> String {
        seal::seal(env, app, SealedPurpose::Registration, &browser.encode(), self)
    }

    /// Opens the value of a cookie. Returns `None` if the value is forged or has expired, if it belongs to another App
    /// or browser, or if it is from another kind of cookie.
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

    /// The `tx` with which the confirmation continues. Reads Redis if the cookie does not contain the `tx`. `None` if
    /// there is no `tx`, or if it cannot be read: this must not make a successful confirmation fail.
    pub async fn transaction<S: Flows>(&self, call: Call<'_, S>) -> Option<String> {
        match (&self.carried, &self.stored) {
            (Some(text), _) => Some(text.clone()),
            (None, Some(id)) => call.stores.find_flow(call.app_id(), id).await.ok().flatten(),
            (None, None) => None,
        }
    }
}

/// Stores a `tx` for as long as it is valid. `None` if a limit is reached or Redis is unavailable.
async fn store_transaction<S: Flows>(call: Call<'_, S>, text: &str) -> Option<FlowId> {
    let id = FlowId::generate(call.env);
    let stored = call.stores.store_flow(call.app_id(), &id, text, call.client_address(), TRANSACTION_SECONDS).await;
    stored.ok().map(|()| id)
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

    fn registration(address: &str, carried: Option<&str>, expires_at: i64) -> Registration {
        let address = Email::parse(address).unwrap().canonical().to_owned();
        Registration { address, carried: carried.map(str::to_owned), stored: None, expires_at }
    }

    #[test]
    fn a_registration_cookie_is_valid_for_one_address_in_one_browser_until_it_expires() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let browser = BrowserId::generate(&env);
        let end = env.now() + Duration::hours(24);
        let registration = registration("Ada@Example.com", Some("tx"), end.unix_timestamp());
        let value = registration.seal(&env, &app, &browser);
        let opened = Registration::open(&app, &browser, &value, env.now()).unwrap();
        assert!(opened.is_for("ada@example.com") && !opened.is_for("eve@example.com"));
        assert_eq!(opened.carried.as_deref(), Some("tx"));
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
        let carried = "A".repeat(MAX_CARRIED_CHARS);
        let value = registration(&longest, Some(&carried), i64::MAX).seal(&env, &app, &browser);
        assert!(value.len() < MAX_COOKIE_CHARS, "{}", value.len());
        let opened = Registration::open(&app, &browser, &value, env.now()).unwrap();
        assert_eq!(opened.carried, Some(carried));
    }

    #[test]
    fn a_cookie_of_the_previous_version_opens() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let browser = BrowserId::generate(&env);
        let content = serde_json::json!({ "a": "ada@example.com", "t": "tx", "e": i64::MAX });
        let value = seal::seal(&env, &app, SealedPurpose::Registration, &browser.encode(), &content);
        let opened = Registration::open(&app, &browser, &value, env.now()).unwrap();
        assert_eq!((opened.carried.as_deref(), opened.stored), (Some("tx"), None));
    }
}
