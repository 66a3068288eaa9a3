//! The hosted pages of an App (specification: Hosted pages): settings, the browser session, and the state that pages
//! keep in cookies and forms (specification: Browser sessions).

mod browser;
mod confirm;
mod continue_login;
mod csrf;
mod login;
mod pages_url;
mod registration;
mod seal;
mod sent_address;
mod session;
mod session_cookie;
pub mod settings;
mod social_login;
mod transaction;

pub use browser::BrowserId;
pub use confirm::{BrowserConfirmError, BrowserConfirmInput, BrowserConfirmed, confirm_in_browser};
pub use continue_login::{ContinueError, continue_link, continue_login};
pub use csrf::{csrf_token, is_valid_csrf_token, is_valid_user_token, user_token};
pub use login::log_in;
pub use pages_url::PagesUrl;
pub use registration::Registration;
pub use sent_address::{open_address, seal_address};
pub use session::{BrowserLogin, BrowserSessionTimes, find_session, open_browser_session};
pub use session_cookie::{SessionCookie, SessionCookieError};
pub use social_login::{
    SOCIAL_LOGIN_SECONDS, SocialLogin, SocialPurpose, SocialState, StartedSocialLogin, open_returned_login,
    start_social_login,
};
pub use transaction::{
    AccountPage, CarriedRequest, MAX_TRANSACTION_CHARS, ShownConsent, Target, Transaction, TransactionLogin,
    TransactionTooLong,
};
