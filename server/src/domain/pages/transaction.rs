//! Transactions: where the browser goes after a login, and the parameters of a logout for a Client. A page carries its
//! transaction in the query or a hidden field, as the text `tx`.

use std::fmt;

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::{
    browser::BrowserId,
    seal::{self, SealedPurpose},
    session_cookie::{SessionCookie, unix_millis},
};
use crate::domain::{
    app::App,
    clock::Env,
    openid::{authorization_request::RequestParameters, client::OpenIdClient, scope::Scopes},
    session::{Session, SessionId},
    user::UserId,
};

/// The longest `tx`, in characters (specification: Browser sessions, Transactions).
pub const MAX_TRANSACTION_CHARS: usize = 6_000;
/// How long a transaction is valid.
pub(super) const TRANSACTION_SECONDS: i64 = 3_600;
/// Characters that an authorization request leaves free in its `tx`. The consent page later adds the account and the
/// scopes that it showed. They have at most 110 bytes of JSON, which are 147 characters in base64url.
const RESERVED_CONSENT_CHARS: usize = 160;
/// Characters that an authorization request leaves free in its `tx`. The login for this request is added later. It has
/// at most 74 bytes of JSON, which are 99 characters in base64url.
const RESERVED_LOGIN_CHARS: usize = 110;

/// The target of a login or of a logout, and when the browser asked for it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transaction {
    #[serde(rename = "t")]
    pub target: Target,
    /// When the browser asked for the target, in Unix seconds.
    #[serde(rename = "i")]
    pub issued_at: i64,
}

/// The page to which the browser goes.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    #[serde(rename = "account")]
    Account(AccountPage),
    /// The page `authorize`.
    #[serde(rename = "authorize")]
    Authorize(Box<CarriedRequest>),
    /// The page `logout`, with the parameters that a Client sent. A login never leads to this page: only the page
    /// itself makes such a transaction.
    #[serde(rename = "logout")]
    Logout(RequestParameters),
}

/// An authorization request on its way through login and consent. It passes all checks again at each step.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarriedRequest {
    #[serde(rename = "p")]
    pub parameters: RequestParameters,
    /// A digest of the client's UID. Because of it, a new Client does not get the access that the user allowed to a
    /// deleted Client of the same name.
    #[serde(rename = "c")]
    pub client: String,
    /// The `request_uri`, if the request was pushed.
    #[serde(rename = "u", skip_serializing_if = "Option::is_none", default)]
    pub request_uri: Option<String>,
    /// The account and the scopes that the consent page showed. `None` before the consent page.
    #[serde(rename = "s", skip_serializing_if = "Option::is_none", default)]
    pub shown: Option<ShownConsent>,
    /// The last login that the user made for this request. `None` if there is none.
    #[serde(rename = "l", skip_serializing_if = "Option::is_none", default)]
    pub login: Option<TransactionLogin>,
}

/// The login, or the confirmation of a registration, that the user made for a request: the request sent the browser to
/// the login page, and after the login the browser returned to the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransactionLogin {
    #[serde(rename = "s")]
    session: SessionId,
    #[serde(rename = "t")]
    auth_time_ms: u64,
}

/// The account and the scopes that a consent page showed. A decision is valid only for these.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownConsent {
    #[serde(rename = "u")]
    pub user: UserId,
    #[serde(rename = "s")]
    pub scopes: Scopes,
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
    Applications,
}

/// The target is so large that its transaction would not fit into a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the transaction has more than {MAX_TRANSACTION_CHARS} characters")]
pub struct TransactionTooLong;

// === impl CarriedRequest ===

impl CarriedRequest {
    /// A new request of this client. `request_uri` is set if the request was pushed.
    pub fn new(client: &OpenIdClient, parameters: RequestParameters, request_uri: Option<String>) -> Self {
        Self { parameters, client: client_digest(&client.uid), request_uri, shown: None, login: None }
    }

    /// Whether the request was made for this client, and not for an earlier client with the same name.
    pub fn is_of(&self, client: &OpenIdClient) -> bool {
        self.client == client_digest(&client.uid)
    }
}

fn client_digest(uid: &str) -> String {
    URL_SAFE_NO_PAD.encode(&digest(&SHA256, uid.as_bytes()).as_ref()[..9])
}

// === impl Transaction ===

impl Transaction {
    /// A transaction that begins now.
    pub fn start(env: &Env, target: Target) -> Self {
        Self { target, issued_at: env.now().unix_timestamp() }
    }

    /// The transaction with which the browser returns from a login. `cookie` is the cookie of the new session.
    #[must_use]
    pub fn after_login(mut self, cookie: &SessionCookie) -> Self {
        if let Target::Authorize(carried) = &mut self.target {
            carried.login = Some(TransactionLogin::new(cookie));
        }
        self
    }

    /// The text `tx`, which opens only for this App in this browser.
    pub fn seal(&self, env: &Env, app: &App, browser: &BrowserId) -> Result<String, TransactionTooLong> {
        self.seal_for(env, app, SealedPurpose::Transaction, &browser.encode())
    }

    /// The text `tx` of a POST from another site. It opens for this App in every browser, with [`Self::open_unbound`].
    pub fn seal_unbound(&self, env: &Env, app: &App) -> Result<String, TransactionTooLong> {
        self.seal_for(env, app, SealedPurpose::UnboundTransaction, "")
    }

    fn seal_for(
        &self,
        env: &Env,
        app: &App,
        purpose: SealedPurpose,
        bound_to: &str,
    ) -> Result<String, TransactionTooLong> {
        if !self.fits() {
            return Err(TransactionTooLong);
        }
        Ok(seal::seal(env, app, purpose, bound_to, self))
    }

    /// Whether the transaction can be sealed.
    pub fn fits(&self) -> bool {
        let reserved = match &self.target {
            Target::Authorize(request) => {
                let for_consent = if request.shown.is_none() { RESERVED_CONSENT_CHARS } else { 0 };
                let for_login = if request.login.is_none() { RESERVED_LOGIN_CHARS } else { 0 };
                for_consent + for_login
            }
            Target::Account(_) | Target::Logout(_) => 0,
        };
        seal::sealed_chars(self) + reserved <= MAX_TRANSACTION_CHARS
    }

    /// Opens a `tx`. Returns `None` if it is forged, has expired, or belongs to another App or browser.
    pub fn open(app: &App, browser: &BrowserId, text: &str, now: OffsetDateTime) -> Option<Self> {
        Self::open_for(app, SealedPurpose::Transaction, &browser.encode(), text, now)
    }

    /// Opens the `tx` of a POST from another site. The returned transaction is issued now, and has no login.
    pub fn open_unbound(app: &App, text: &str, now: OffsetDateTime) -> Option<Self> {
        let mut opened = Self::open_for(app, SealedPurpose::UnboundTransaction, "", text, now)?;
        if let Target::Authorize(carried) = &mut opened.target {
            carried.login = None;
        }
        Some(Self { issued_at: now.unix_timestamp(), ..opened })
    }

    fn open_for(app: &App, purpose: SealedPurpose, bound_to: &str, text: &str, now: OffsetDateTime) -> Option<Self> {
        let opened: Self = seal::open(app, purpose, bound_to, text, MAX_TRANSACTION_CHARS)?;
        (now.unix_timestamp() < opened.issued_at.saturating_add(TRANSACTION_SECONDS)).then_some(opened)
    }
}

impl fmt::Debug for Transaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transaction").field("issued_at", &self.issued_at).finish_non_exhaustive()
    }
}

// === impl TransactionLogin ===

impl TransactionLogin {
    /// The login that opened or renewed the session of this cookie.
    pub fn new(cookie: &SessionCookie) -> Self {
        Self { session: cookie.session, auth_time_ms: cookie.issued_ms }
    }

    /// Whether this is the last login of the session.
    pub fn is_of(self, session: &Session) -> bool {
        self.session == session.id && self.auth_time_ms == unix_millis(session.auth_time)
    }
}

// === impl AccountPage ===

impl AccountPage {
    pub const ALL: [Self; 8] = [
        Self::Overview,
        Self::Password,
        Self::Email,
        Self::Delete,
        Self::Identities,
        Self::Sessions,
        Self::Activity,
        Self::Applications,
    ];

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
            Self::Applications => "account/applications",
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

    fn request(padding: usize) -> CarriedRequest {
        let parameters = RequestParameters::new([("client_id", "grafana"), ("state", "s".repeat(padding).as_str())]);
        CarriedRequest { parameters, client: client_digest("uid"), request_uri: None, shown: None, login: None }
    }

    #[test]
    fn an_unbound_transaction_opens_in_every_browser_and_begins_when_it_is_opened() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let transaction = Transaction::start(&env, Target::Authorize(Box::new(request(3))));
        let text = transaction.seal_unbound(&env, &app).unwrap();
        let begin = OffsetDateTime::from_unix_timestamp(transaction.issued_at).unwrap();
        let later = begin + Duration::minutes(59);
        let opened = Transaction::open_unbound(&app, &text, later).unwrap();
        assert!(opened.target == transaction.target);
        assert_eq!(opened.issued_at, later.unix_timestamp());
        assert_eq!(Transaction::open_unbound(&app, &text, begin + Duration::hours(1)), None);
        let browser = BrowserId::generate(&env);
        assert_eq!(Transaction::open(&app, &browser, &text, begin), None, "no other page accepts it");
        let bound = transaction.seal(&env, &app, &browser).unwrap();
        assert_eq!(Transaction::open_unbound(&app, &bound, begin), None);
    }

    #[test]
    fn every_authorization_request_that_fits_has_room_for_a_login_and_what_the_consent_page_showed() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let browser = BrowserId::generate(&env);
        let seal = |request: CarriedRequest| {
            Transaction::start(&env, Target::Authorize(Box::new(request))).seal(&env, &app, &browser)
        };
        let longest = (3_000..5_000).rev().find(|padding| seal(request(*padding)).is_ok()).unwrap();
        assert!(longest > 4_000, "{longest}");
        let shown = ShownConsent {
            user: UserId(uuid::Uuid::from_u128(u128::MAX)),
            scopes: Scopes::parse_known("openid profile email groups offline_access"),
        };
        let login = TransactionLogin { session: SessionId(uuid::Uuid::from_u128(u128::MAX)), auth_time_ms: u64::MAX };
        seal(CarriedRequest { login: Some(login), ..request(longest) }).unwrap();
        seal(CarriedRequest { shown: Some(shown.clone()), ..request(longest) }).unwrap();
        let text = seal(CarriedRequest { shown: Some(shown), login: Some(login), ..request(longest) }).unwrap();
        assert!(text.len() <= MAX_TRANSACTION_CHARS);
        assert!(Transaction::open(&app, &browser, &text, env.now()).is_some());
    }

    #[test]
    fn a_login_for_a_request_counts_only_while_it_is_the_last_login_of_its_session() {
        let env = Env::system();
        let app = fixtures::app(fixtures::rendered("shop"));
        let cookie = SessionCookie {
            issued_ms: 1_893_553_445_678,
            user: UserId(uuid::Uuid::from_u128(7)),
            session: SessionId(uuid::Uuid::from_u128(9)),
        };
        let auth_time = OffsetDateTime::from_unix_timestamp_nanos(i128::from(cookie.issued_ms) * 1_000_000).unwrap();
        let session = Session {
            id: cookie.session,
            user: cookie.user,
            epoch: crate::domain::user::Epoch(1),
            generation: crate::domain::session::NO_REFRESH_TOKEN,
            amr: crate::domain::session::Amr::Password,
            auth_time,
        };
        let with_login = Transaction::start(&env, Target::Authorize(Box::new(request(3)))).after_login(&cookie);
        let Target::Authorize(carried) = &with_login.target else { unreachable!("it was made above") };
        let login = carried.login.unwrap();
        assert!(login.is_of(&session));
        assert!(!login.is_of(&Session { auth_time: auth_time + Duration::milliseconds(1), ..session.clone() }));
        assert!(!login.is_of(&Session { id: SessionId(uuid::Uuid::from_u128(10)), ..session }));
        // An unbound transaction, which anybody can have made, carries no login.
        let unbound = with_login.seal_unbound(&env, &app).unwrap();
        let Target::Authorize(carried) = Transaction::open_unbound(&app, &unbound, env.now()).unwrap().target else {
            unreachable!("it was made above")
        };
        assert_eq!(carried.login, None);
    }

    #[test]
    fn a_request_belongs_to_the_uid_of_its_client() {
        let app = fixtures::provider(["grafana", "other"].map(fixtures::client).into());
        let (client, other) = (app.client("grafana").unwrap(), app.client("other").unwrap());
        let carried = CarriedRequest::new(client, RequestParameters::default(), None);
        assert!(carried.is_of(client) && !carried.is_of(other));
    }

    #[test]
    fn a_forged_or_long_text_is_no_transaction() {
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
