//! The views: the data that each page shows. A handler fills a view; its template reads the fields as `page`. Views
//! contain user data and codes, so they have no `Debug`.

use serde::Serialize;

use super::{
    assets::{Asset, FORM_SCRIPT, PASSWORD_SCRIPT},
    errors,
    providers::{LinkedProvider, ProviderButton},
    texts::PageTexts,
    values::Timestamp,
};
use crate::{domain::audit::EventKind, http::error::ErrorCode};

/// The data of a page, for its template.
pub trait View: Serialize {
    const TEMPLATE: &'static str;

    /// The path below the path of the App, for the links to other languages. Empty: the page has no such links.
    const PATH: &'static str;

    fn title(&self, texts: &PageTexts) -> String;

    /// Parameters that the links to other languages keep.
    fn query(&self) -> Vec<(&'static str, &str)> {
        Vec::new()
    }

    /// Whether the session of the browser has just ended. The page then clears earlier pages from the memory of the
    /// browser, so that the back button does not show them.
    fn session_ended(&self) -> bool {
        false
    }

    /// The script that the page loads. The page also works without it.
    fn script(&self) -> Option<&'static Asset> {
        None
    }

    /// The text about the action that has just succeeded.
    fn notice(&self, _: &PageTexts) -> Option<String> {
        None
    }

    /// Whether the view contains nothing that depends on the user or the request. The HTML is then rendered once per
    /// App and language, for all browsers.
    fn is_shared(&self) -> bool {
        false
    }

    /// The text of an error on this page.
    fn error_text(&self, code: ErrorCode) -> &'static str {
        errors::error_text(code)
    }
}

/// The page `login`.
#[derive(Serialize)]
pub struct LoginPage<'a> {
    /// The email address that the user entered.
    pub email: &'a str,
    pub providers: Vec<ProviderButton<'a>>,
    /// Whether the App accepts registrations.
    pub registration_open: bool,
    #[serde(skip)]
    pub notice: Option<LoginNotice>,
}

/// Why the user is on the login page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoginNotice {
    PasswordReset,
    AccountDeleted,
    /// A recent login is needed.
    LoginAgain,
    /// The user wants to use another account at a Client.
    OtherAccount,
}

/// The page `register`.
#[derive(Serialize)]
pub struct RegisterPage<'a> {
    pub name: &'a str,
    pub email: &'a str,
    pub providers: Vec<ProviderButton<'a>>,
}

/// The notice after a registration, with the form for the code. It is the same for every address.
#[derive(Serialize)]
pub struct ConfirmNoticePage<'a> {
    pub email: &'a str,
}

/// The page `confirm`.
#[derive(Serialize)]
pub struct ConfirmPage<'a> {
    /// The code from the link, or what the user entered.
    pub code: &'a str,
    /// Whether the code is from a link and has not been refused, so the user does not need to see it.
    pub hides_code: bool,
    /// Whether the form asks for the password of the account.
    pub asks_password: bool,
    /// Whether the user must log in first, because the password is not enough.
    pub login_needed: bool,
}

/// The page `forgot`.
#[derive(Serialize)]
pub struct ForgotPage<'a> {
    pub email: &'a str,
}

/// The notice after *forgot*. It is the same for every address.
#[derive(Serialize)]
pub struct ForgotNoticePage<'a> {
    pub email: &'a str,
    /// The encrypted email address, for links.
    pub address: &'a str,
}

/// The page `reset`.
#[derive(Serialize)]
pub struct ResetPage<'a> {
    pub email: &'a str,
    /// The encrypted email address, for links. Empty if `email` is not an email address.
    #[serde(skip)]
    pub address: String,
    /// The code from the link, or what the user entered.
    pub code: &'a str,
    /// Whether the code is from a link and has not been refused, so the user does not need to see it.
    pub hides_code: bool,
}

/// The page `account`.
#[derive(Serialize)]
pub struct AccountPage<'a> {
    pub name: &'a str,
    pub email: Option<&'a str>,
    pub email_verified: bool,
    /// The new email address, if the user has not confirmed it yet.
    pub pending_email: Option<&'a str>,
    pub has_password: bool,
    /// Whether the App has providers.
    pub has_providers: bool,
    /// The labels of the linked providers, such as "Google, GitHub". Can be empty.
    pub linked_providers: &'a str,
    /// Whether the page has a link to `account/applications`.
    pub has_applications: bool,
    #[serde(skip)]
    pub notice: Option<AccountNotice<'a>>,
}

/// The action in the account that has just succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccountNotice<'a> {
    NameSaved,
    /// An email was sent to this address.
    EmailSent(&'a str),
    EmailConfirmed,
    PasswordSaved,
    /// A provider with this label was linked.
    Linked(&'a str),
    /// A provider with this label was unlinked.
    Unlinked(&'a str),
    SessionEnded,
    OthersEnded,
    ApplicationRemoved,
}

/// The page `account/password`.
#[derive(Serialize)]
pub struct PasswordPage<'a> {
    /// The email address of the account, for password managers. Can be empty.
    pub email: &'a str,
    pub has_password: bool,
    /// Whether the account lost its password and needs a new one.
    pub required: bool,
    pub login_needed: bool,
}

/// The page `account/email`.
#[derive(Serialize)]
pub struct EmailPage<'a> {
    pub current: Option<&'a str>,
    /// The email address that the user entered.
    pub email: &'a str,
    pub asks_password: bool,
    pub login_needed: bool,
}

/// The page `account/delete`.
#[derive(Serialize)]
pub struct DeletePage {
    pub asks_password: bool,
    pub login_needed: bool,
}

/// The page `account/identities`.
#[derive(Serialize)]
pub struct IdentitiesPage<'a> {
    pub linked: Vec<LinkedProvider<'a>>,
    /// The providers that are not linked yet.
    pub available: Vec<ProviderButton<'a>>,
    pub login_needed: bool,
    #[serde(skip)]
    pub notice: Option<AccountNotice<'a>>,
}

/// The page `account/sessions`.
#[derive(Serialize)]
pub struct SessionsPage<'a> {
    pub sessions: Vec<SessionRow>,
    /// Whether the user has sessions other than that of this browser.
    pub has_others: bool,
    #[serde(skip)]
    pub notice: Option<AccountNotice<'a>>,
}

#[derive(Serialize)]
pub struct SessionRow {
    pub id: String,
    /// A short name of the device, from [`super::device_label`].
    pub device: String,
    pub ip: String,
    pub last_used: Timestamp,
    /// Whether it is the session of this browser.
    pub current: bool,
}

/// The page `account/activity`.
#[derive(Serialize)]
pub struct ActivityPage {
    pub events: Vec<ActivityRow>,
}

#[derive(Serialize)]
pub struct ActivityRow {
    text: &'static str,
    count: u64,
    at: Timestamp,
    ip: Option<String>,
}

/// The page `account/applications`.
#[derive(Serialize)]
pub struct ApplicationsPage<'a> {
    pub applications: Vec<ApplicationRow<'a>>,
    #[serde(skip)]
    pub notice: Option<AccountNotice<'a>>,
}

#[derive(Serialize)]
pub struct ApplicationRow<'a> {
    /// The id of the Client, as in the field `client` of the form that removes the application.
    pub client: &'a str,
    pub name: &'a str,
    pub since: Timestamp,
}

/// The page `consent`.
#[derive(Serialize)]
pub struct ConsentPage<'a> {
    /// The display name of the Client.
    pub client: &'a str,
    /// The host of the redirect URL, or its scheme if a program on the device receives the response.
    pub host: &'a str,
    /// Whether a program on the device receives the response. Any program there could have started the request.
    pub on_device: bool,
    /// The email address or the name of the user.
    pub account: &'a str,
    pub scopes: Vec<ScopeRow<'a>>,
}

#[derive(Serialize)]
pub struct ScopeRow<'a> {
    name: &'a str,
    text: &'static str,
}

/// The response to a Client as a form (OAuth 2.0 Form Post Response Mode). A script of the service submits the form. If
/// the browser runs no scripts, the user submits it.
#[derive(Serialize)]
pub struct FormPostPage<'a> {
    /// The redirect URL.
    pub action: &'a str,
    /// The host of the redirect URL, as in [`ConsentPage`].
    pub host: &'a str,
    pub fields: Vec<FormPostField<'a>>,
}

#[derive(Serialize)]
pub struct FormPostField<'a> {
    pub name: &'a str,
    pub value: &'a str,
}

/// The page `logout` that asks whether to log out.
#[derive(Serialize)]
pub struct LogoutPage;

/// The page `logout` after the session has ended.
#[derive(Serialize)]
pub struct LogoutDonePage;

/// An error without a form.
#[derive(Serialize)]
pub struct ErrorPage {
    #[serde(skip)]
    pub code: ErrorCode,
}

/// The script of a page that can have a password field.
fn password_script(has_password_field: bool) -> Option<&'static Asset> {
    has_password_field.then(|| &*PASSWORD_SCRIPT)
}

// === impl LoginPage ===

impl View for LoginPage<'_> {
    const TEMPLATE: &'static str = "login.html";
    const PATH: &'static str = "login";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("login-title", &[])
    }

    /// Of all notices, only this one is shown at the end of a session.
    fn session_ended(&self) -> bool {
        self.notice == Some(LoginNotice::AccountDeleted)
    }

    fn is_shared(&self) -> bool {
        // Names every field, so that a new field is not shared by accident.
        let Self { email, notice, providers: _, registration_open: _ } = self;
        email.is_empty() && notice.is_none()
    }

    fn script(&self) -> Option<&'static Asset> {
        password_script(true)
    }

    fn notice(&self, texts: &PageTexts) -> Option<String> {
        let id = match self.notice? {
            LoginNotice::PasswordReset => "login-notice-password-reset",
            LoginNotice::AccountDeleted => "login-notice-account-deleted",
            LoginNotice::LoginAgain => "login-notice-again",
            LoginNotice::OtherAccount => "login-notice-other-account",
        };
        Some(texts.format(id, &[]))
    }
}

// === impl RegisterPage ===

impl View for RegisterPage<'_> {
    const TEMPLATE: &'static str = "register.html";
    const PATH: &'static str = "register";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("register-title", &[])
    }

    fn script(&self) -> Option<&'static Asset> {
        password_script(true)
    }
}

// === impl ConfirmNoticePage ===

impl View for ConfirmNoticePage<'_> {
    const TEMPLATE: &'static str = "confirm_notice.html";
    const PATH: &'static str = "confirm";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("confirm-notice-title", &[])
    }
}

// === impl ConfirmPage ===

impl View for ConfirmPage<'_> {
    const TEMPLATE: &'static str = "confirm.html";
    const PATH: &'static str = "confirm";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("confirm-title", &[])
    }

    fn script(&self) -> Option<&'static Asset> {
        password_script(self.asks_password && !self.login_needed)
    }

    fn query(&self) -> Vec<(&'static str, &str)> {
        if self.code.is_empty() { Vec::new() } else { vec![("code", self.code)] }
    }

    fn error_text(&self, code: ErrorCode) -> &'static str {
        match code {
            ErrorCode::ReauthenticationRequired if self.login_needed => "confirm-lead-login",
            ErrorCode::ReauthenticationRequired => "confirm-lead-password",
            _ => password_error_text(code, self.login_needed),
        }
    }
}

// === impl ForgotPage, ForgotNoticePage ===

impl View for ForgotPage<'_> {
    const TEMPLATE: &'static str = "forgot.html";
    const PATH: &'static str = "forgot";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("forgot-title", &[])
    }
}

impl View for ForgotNoticePage<'_> {
    const TEMPLATE: &'static str = "forgot_notice.html";
    const PATH: &'static str = "forgot";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("forgot-notice-title", &[])
    }

    fn query(&self) -> Vec<(&'static str, &str)> {
        vec![("notice", "sent"), ("address", self.address)]
    }
}

// === impl ResetPage ===

impl View for ResetPage<'_> {
    const TEMPLATE: &'static str = "reset.html";
    const PATH: &'static str = "reset";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("reset-title", &[])
    }

    fn script(&self) -> Option<&'static Asset> {
        password_script(true)
    }

    fn query(&self) -> Vec<(&'static str, &str)> {
        [("address", self.address.as_str()), ("code", self.code)]
            .into_iter()
            .filter(|(_, value)| !value.is_empty())
            .collect()
    }
}

// === impl AccountPage, AccountNotice ===

impl View for AccountPage<'_> {
    const TEMPLATE: &'static str = "account.html";
    const PATH: &'static str = "account";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("account-title", &[])
    }

    fn notice(&self, texts: &PageTexts) -> Option<String> {
        self.notice.map(|notice| notice.text(texts))
    }
}

impl AccountNotice<'_> {
    fn text(self, texts: &PageTexts) -> String {
        match self {
            Self::NameSaved => texts.format("account-notice-name", &[]),
            Self::EmailSent(email) => texts.format("account-notice-email-sent", &[("email", email)]),
            Self::EmailConfirmed => texts.format("account-notice-email-confirmed", &[]),
            Self::PasswordSaved => texts.format("account-notice-password", &[]),
            Self::Linked(provider) => texts.format("account-notice-linked", &[("provider", provider)]),
            Self::Unlinked(provider) => texts.format("account-notice-unlinked", &[("provider", provider)]),
            Self::SessionEnded => texts.format("account-notice-session-ended", &[]),
            Self::OthersEnded => texts.format("account-notice-others-ended", &[]),
            Self::ApplicationRemoved => texts.format("account-notice-application-removed", &[]),
        }
    }
}

// === impl PasswordPage, EmailPage, DeletePage, IdentitiesPage ===

/// The text of an error on a page that asks only for the password.
const fn password_error_text(code: ErrorCode, login_needed: bool) -> &'static str {
    match code {
        ErrorCode::InvalidCredentials => "error-wrong-password",
        ErrorCode::ReauthenticationRequired if login_needed => "reauthenticate-login",
        _ => errors::error_text(code),
    }
}

impl View for PasswordPage<'_> {
    const TEMPLATE: &'static str = "account_password.html";
    const PATH: &'static str = "account/password";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format(if self.has_password { "password-title" } else { "password-title-new" }, &[])
    }

    fn script(&self) -> Option<&'static Asset> {
        password_script(!self.login_needed)
    }

    fn error_text(&self, code: ErrorCode) -> &'static str {
        password_error_text(code, self.login_needed)
    }
}

impl View for EmailPage<'_> {
    const TEMPLATE: &'static str = "account_email.html";
    const PATH: &'static str = "account/email";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("email-title", &[])
    }

    fn script(&self) -> Option<&'static Asset> {
        password_script(self.asks_password && !self.login_needed)
    }

    fn error_text(&self, code: ErrorCode) -> &'static str {
        password_error_text(code, self.login_needed)
    }
}

impl View for DeletePage {
    const TEMPLATE: &'static str = "account_delete.html";
    const PATH: &'static str = "account/delete";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("delete-title", &[])
    }

    fn script(&self) -> Option<&'static Asset> {
        password_script(self.asks_password && !self.login_needed)
    }

    fn error_text(&self, code: ErrorCode) -> &'static str {
        password_error_text(code, self.login_needed)
    }
}

impl View for IdentitiesPage<'_> {
    const TEMPLATE: &'static str = "account_identities.html";
    const PATH: &'static str = "account/identities";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("identities-title", &[])
    }

    fn notice(&self, texts: &PageTexts) -> Option<String> {
        self.notice.map(|notice| notice.text(texts))
    }

    fn error_text(&self, code: ErrorCode) -> &'static str {
        password_error_text(code, self.login_needed)
    }
}

// === impl SessionsPage ===

impl View for SessionsPage<'_> {
    const TEMPLATE: &'static str = "account_sessions.html";
    const PATH: &'static str = "account/sessions";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("sessions-title", &[])
    }

    fn notice(&self, texts: &PageTexts) -> Option<String> {
        self.notice.map(|notice| notice.text(texts))
    }
}

// === impl ActivityPage, ActivityRow ===

impl View for ActivityPage {
    const TEMPLATE: &'static str = "account_activity.html";
    const PATH: &'static str = "account/activity";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("activity-title", &[])
    }
}

impl ActivityRow {
    pub fn new(kind: EventKind, count: u64, at: Timestamp, ip: Option<String>) -> Self {
        Self { text: activity_text(kind), count, at, ip }
    }
}

const fn activity_text(kind: EventKind) -> &'static str {
    match kind {
        EventKind::Registered | EventKind::UserCreated => "activity-registered",
        EventKind::RegisteredAgain => "activity-registered-again",
        EventKind::ConfirmationRequested => "activity-confirmation-requested",
        EventKind::Confirmed => "activity-confirmed",
        EventKind::LoggedIn => "activity-logged-in",
        EventKind::LoggedOut => "activity-logged-out",
        EventKind::PasswordResetRequested => "activity-password-reset-requested",
        EventKind::PasswordReset => "activity-password-reset",
        EventKind::PasswordChanged => "activity-password-changed",
        EventKind::PasswordRemoved => "activity-password-removed",
        EventKind::AddressChangeRequested => "activity-address-change-requested",
        EventKind::AddressChanged => "activity-address-changed",
        EventKind::Renamed => "activity-renamed",
        EventKind::SessionEnded => "activity-session-ended",
        EventKind::SessionsEnded => "activity-sessions-ended",
        EventKind::RefreshLate => "activity-refresh-late",
        EventKind::RefreshStolen | EventKind::ClientCodeReused => "activity-refresh-stolen",
        EventKind::IdentityLinked => "activity-identity-linked",
        EventKind::IdentityUnlinked => "activity-identity-unlinked",
        EventKind::ClientAuthorized => "activity-client-authorized",
        EventKind::ConsentGiven => "activity-consent-given",
        EventKind::ConsentWithdrawn => "activity-consent-withdrawn",
        EventKind::UserChanged | EventKind::UserDisabled | EventKind::UserEnabled | EventKind::MailRequested => {
            "activity-changed-by-administrator"
        }
        EventKind::LoginRefused => "activity-login-refused",
        EventKind::LoginLimited => "activity-login-limited",
        EventKind::PasswordCheckRefused => "activity-password-check-refused",
        EventKind::PasswordResetRefused => "activity-password-reset-refused",
        EventKind::UserDeleted
        | EventKind::UsersImported
        | EventKind::Exported
        | EventKind::GroupMemberAdded
        | EventKind::GroupMemberRemoved => "activity-other",
    }
}

// === impl ApplicationsPage, ConsentPage, ScopeRow ===

impl View for ApplicationsPage<'_> {
    const TEMPLATE: &'static str = "account_applications.html";
    const PATH: &'static str = "account/applications";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("applications-title", &[])
    }

    fn notice(&self, texts: &PageTexts) -> Option<String> {
        self.notice.map(|notice| notice.text(texts))
    }
}

impl View for ConsentPage<'_> {
    const TEMPLATE: &'static str = "consent.html";
    const PATH: &'static str = "consent";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("consent-title", &[("client", self.client)])
    }
}

impl<'a> ScopeRow<'a> {
    pub fn new(name: &'a str) -> Self {
        let text = match name {
            "openid" => "scope-openid",
            "profile" => "scope-profile",
            "email" => "scope-email",
            "groups" => "scope-groups",
            "offline_access" => "scope-offline-access",
            _ => "scope-other",
        };
        Self { name, text }
    }
}

// === impl FormPostPage ===

impl View for FormPostPage<'_> {
    const TEMPLATE: &'static str = "form_post.html";
    const PATH: &'static str = "";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("form-post-title", &[])
    }

    fn script(&self) -> Option<&'static Asset> {
        Some(&FORM_SCRIPT)
    }
}

// === impl LogoutPage, LogoutDonePage, ErrorPage ===

impl View for LogoutPage {
    const TEMPLATE: &'static str = "logout.html";
    const PATH: &'static str = "logout";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("logout-title", &[])
    }
}

impl View for LogoutDonePage {
    const TEMPLATE: &'static str = "logout_done.html";
    const PATH: &'static str = "";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format("logout-done-title", &[])
    }

    fn session_ended(&self) -> bool {
        true
    }
}

impl View for ErrorPage {
    const TEMPLATE: &'static str = "error.html";
    const PATH: &'static str = "";

    fn title(&self, texts: &PageTexts) -> String {
        texts.format(errors::error_title(self.code), &[])
    }
}
