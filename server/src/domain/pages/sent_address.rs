//! The email address of a submitted form, for the next page. The address is sealed, so that no URL contains it in clear
//! text, and a link on another site cannot make a page show a text of its choice.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::{
    browser::BrowserId,
    seal::{self, SealedPurpose},
};
use crate::domain::{app::App, clock::Env, email::Email};

/// How long the page after the form still shows the address.
const ADDRESS_SECONDS: i64 = 3_600;
/// The longest sealed address, in characters.
const MAX_CHARS: usize = 512;

#[derive(Serialize, Deserialize)]
struct SentAddress {
    #[serde(rename = "a")]
    address: String,
    /// Unix seconds.
    #[serde(rename = "e")]
    expires_at: i64,
}

/// Seals an email address for an hour. The text opens only for this App in this browser.
pub fn seal_address(env: &Env, app: &App, browser: &BrowserId, email: &Email) -> String {
    let expires_at = env.now().unix_timestamp() + ADDRESS_SECONDS;
    let content = SentAddress { address: email.as_str().to_owned(), expires_at };
    seal::seal(env, app, SealedPurpose::Address, &browser.encode(), &content)
}

/// Opens a sealed address. Returns `None` if it is forged, has expired, or belongs to another App or browser.
pub fn open_address(app: &App, browser: &BrowserId, text: &str, now: OffsetDateTime) -> Option<Email> {
    let opened: SentAddress = seal::open(app, SealedPurpose::Address, &browser.encode(), text, MAX_CHARS)?;
    if now.unix_timestamp() < opened.expires_at { Email::parse(&opened.address).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use time::Duration;

    use super::*;
    use crate::fixtures;

    #[test]
    fn an_address_opens_for_an_hour_in_its_browser() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let browser = BrowserId::generate(&env);
        let email = Email::parse("Ada@example.com").unwrap();
        let text = seal_address(&env, &app, &browser, &email);
        assert!(!text.contains("Ada"));
        let now = env.now();
        assert_eq!(open_address(&app, &browser, &text, now), Some(email));
        assert_eq!(open_address(&app, &browser, &text, now + Duration::hours(2)), None);
        assert_eq!(open_address(&app, &BrowserId::generate(&env), &text, now), None);
        for bad in ["", "x", "Ada@example.com", &text[1..]] {
            assert_eq!(open_address(&app, &browser, bad, now), None, "{bad}");
        }
    }

    #[test]
    fn the_longest_address_can_be_sealed() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let browser = BrowserId::generate(&env);
        let labels = ["b".repeat(60), "c".repeat(60), "d".repeat(60)].join(".");
        let longest = Email::parse(&format!("{}@{labels}.exampl", "a".repeat(64))).unwrap();
        assert_eq!(longest.as_str().len(), 254);
        let text = seal_address(&env, &app, &browser, &longest);
        assert_eq!(open_address(&app, &browser, &text, env.now()), Some(longest), "{} characters", text.len());
    }
}
