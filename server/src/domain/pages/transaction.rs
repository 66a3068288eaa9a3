//! Transactions: where a login leads. A page carries its transaction in the query or a hidden field, as the text `tx`.

use std::fmt;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::{
    browser::BrowserId,
    seal::{self, SealedPurpose},
};
use crate::domain::{app::App, clock::Env};

/// The longest `tx`, in characters (specification: Browser sessions, Transactions).
pub const MAX_TRANSACTION_CHARS: usize = 6_000;
/// How long a transaction is valid.
const TRANSACTION_SECONDS: i64 = 3_600;

/// What a browser wants after the login.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transaction {
    #[serde(rename = "t")]
    pub target: Target,
    /// When the browser asked for the target, in Unix seconds.
    #[serde(rename = "i")]
    pub issued_at: i64,
}

/// Where the browser goes after the login.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    #[serde(rename = "account")]
    Account(AccountPage),
}

/// A page that needs a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccountPage {
    Overview,
    Password,
    Email,
    Delete,
    Identities,
    Sessions,
    Activity,
}

/// The target is so large that its transaction would not fit into a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the transaction has more than {MAX_TRANSACTION_CHARS} characters")]
pub struct TransactionTooLong;

// === impl Transaction ===

impl Transaction {
    /// A transaction that begins now.
    pub fn start(env: &Env, target: Target) -> Self {
        Self { target, issued_at: env.now().unix_timestamp() }
    }

    /// The text `tx`, which opens only for this App in this browser.
    pub fn seal(&self, env: &Env, app: &App, browser: &BrowserId) -> Result<String, TransactionTooLong> {
        let text = seal::seal(env, app, SealedPurpose::Transaction, &browser.encode(), self);
        if text.len() <= MAX_TRANSACTION_CHARS { Ok(text) } else { Err(TransactionTooLong) }
    }

    /// Opens a `tx`. Returns `None` if it is forged, has expired, or belongs to another App or browser.
    pub fn open(app: &App, browser: &BrowserId, text: &str, now: OffsetDateTime) -> Option<Self> {
        let bound_to = browser.encode();
        let opened: Self = seal::open(app, SealedPurpose::Transaction, &bound_to, text, MAX_TRANSACTION_CHARS)?;
        (now.unix_timestamp() < opened.issued_at.saturating_add(TRANSACTION_SECONDS)).then_some(opened)
    }
}

impl fmt::Debug for Transaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transaction").field("issued_at", &self.issued_at).finish_non_exhaustive()
    }
}

// === impl AccountPage ===

impl AccountPage {
    pub const ALL: [Self; 7] =
        [Self::Overview, Self::Password, Self::Email, Self::Delete, Self::Identities, Self::Sessions, Self::Activity];

    /// The path below the App's path.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Overview => "account",
            Self::Password => "account/password",
            Self::Email => "account/email",
            Self::Delete => "account/delete",
            Self::Identities => "account/identities",
            Self::Sessions => "account/sessions",
            Self::Activity => "account/activity",
        }
    }
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::RenderedApp;
    use time::Duration;

    use super::*;
    use crate::fixtures;

    #[test]
    fn a_transaction_opens_for_an_hour_in_its_browser_and_app() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let browser = BrowserId::generate(&env);
        for page in AccountPage::ALL {
            let transaction = Transaction::start(&env, Target::Account(page));
            let text = transaction.seal(&env, &app, &browser).unwrap();
            let begin = OffsetDateTime::from_unix_timestamp(transaction.issued_at).unwrap();
            let open =
                |app: &App, browser: &BrowserId, after: Duration| Transaction::open(app, browser, &text, begin + after);
            assert_eq!(open(&app, &browser, Duration::hours(1) - Duration::SECOND), Some(transaction));
            assert_eq!(open(&app, &browser, Duration::hours(1)), None);
            assert_eq!(open(&app, &BrowserId::generate(&env), Duration::ZERO), None);
            let other = fixtures::app(RenderedApp { keys: app.doc.keys.clone(), ..fixtures::rendered("other") });
            assert_eq!(open(&other, &browser, Duration::ZERO), None);
        }
    }

    #[test]
    fn a_long_text_is_no_transaction() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let browser = BrowserId::generate(&env);
        for bad in ["", "x", &"A".repeat(MAX_TRANSACTION_CHARS), &"A".repeat(MAX_TRANSACTION_CHARS + 1)] {
            assert_eq!(Transaction::open(&app, &browser, bad, env.now()), None, "{} characters", bad.len());
        }
    }

    #[test]
    fn a_transaction_is_never_printed() {
        let transaction = Transaction { target: Target::Account(AccountPage::Password), issued_at: 1 };
        assert_eq!(format!("{transaction:?}"), "Transaction { issued_at: 1, .. }");
    }
}
