//! `login`: the login with email address and password, and the start of a social login.

use latchkey_crds::rendered::SignUp;

use super::{checks, form::Form, page::Page, social};
use crate::{
    domain::{
        email_account::LoginInput,
        pages::{self, SocialPurpose},
        ports::StoreError,
    },
    http::{
        Ports,
        error::{ErrorCode, Problem},
        handlers::email::login::{LoginRequest, login_problem},
        response::Response,
    },
    pages::views::{LoginNotice, LoginPage},
};

pub(super) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    // Another site cannot start a social login. Otherwise any site could start logins, and thereby clear the cookies of
    // logins that have already begun.
    if let Some(provider) = page.query("provider")?.filter(|_| checks::is_from_own_pages_or_user(&page.request.headers))
    {
        return social::start(page, provider, SocialPurpose::LogIn, page.tx()).await;
    }
    let notice = page.query("notice")?.and_then(parse_notice);
    if let Some(error) = page.query("error")? {
        let code = ErrorCode::from_name(error).unwrap_or(ErrorCode::ProviderError);
        return page.show_error(&view(page, page.login_hint(), None), code);
    }
    let is_logged_in = has_session(page).await?;
    match (is_logged_in, page.tx()) {
        (true, None) => page.redirect(account_with_notice(notice), Vec::new()),
        (true, Some(_)) => page.show(&view(page, page.login_hint(), notice.or(Some(LoginNotice::LoginAgain)))),
        (false, _) => page.show(&view(page, page.login_hint(), notice)),
    }
}

pub(super) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    let view = view(page, form.text("email"), None);
    let LoginRequest { email, password } = match form.read() {
        Ok(request) => request,
        Err(problem) => return page.refuse(&view, problem),
    };
    let previous = page.session_cookie()?;
    let input = LoginInput { email, password };
    match pages::log_in(page.call(), input, previous, page.session_times()).await {
        Ok(cookie) => page.redirect_after_login(page.tx(), &cookie, Vec::new()),
        Err(error) => page.refuse(&view, login_problem(page.app, error)),
    }
}

/// Whether the browser is logged in. Returns false while Redis is unavailable, so that the login page is still shown.
async fn has_session<S: Ports>(page: &Page<'_, S>) -> Result<bool, Problem> {
    let Some(cookie) = page.session_cookie()? else { return Ok(false) };
    match pages::find_session(page.call(), &cookie).await {
        Ok(session) => Ok(session.is_some()),
        Err(StoreError::Unavailable { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn view<'v, S: Ports>(page: &'v Page<'_, S>, email: &'v str, notice: Option<LoginNotice>) -> LoginPage<'v> {
    let registration_open = page.app.doc.sign_up != SignUp::Closed;
    LoginPage { email, providers: page.providers(), registration_open, notice }
}

/// The path of the account page, for a user who is logged in already. Of the notices of the login page, the account
/// page shows only the one that a new password was set.
fn account_with_notice(notice: Option<LoginNotice>) -> &'static str {
    match notice {
        Some(LoginNotice::PasswordReset) => "account?notice=password_saved",
        Some(LoginNotice::AccountDeleted | LoginNotice::LoginAgain | LoginNotice::OtherAccount) | None => "account",
    }
}

fn parse_notice(name: &str) -> Option<LoginNotice> {
    match name {
        "password_reset" => Some(LoginNotice::PasswordReset),
        "account_deleted" => Some(LoginNotice::AccountDeleted),
        "other_account" => Some(LoginNotice::OtherAccount),
        _ => None,
    }
}
