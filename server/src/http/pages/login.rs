//! `login`: the login with email address and password, and the start of a social login.

use latchkey_crds::rendered::SignUp;

use super::{form::Form, page::Page, social};
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
    if let Some(provider) = page.query("provider")? {
        return social::start(page, provider, SocialPurpose::LogIn, page.tx()).await;
    }
    let notice = page.query("notice")?.and_then(parse_notice);
    if let Some(error) = page.query("error")? {
        let code = ErrorCode::from_name(error).unwrap_or(ErrorCode::ProviderError);
        return page.show_error(&view(page, "", None), code);
    }
    let is_logged_in = has_session(page).await?;
    match (is_logged_in, page.tx()) {
        (true, None) => page.redirect("account", Vec::new()),
        (true, Some(_)) => page.show(&view(page, "", notice.or(Some(LoginNotice::LoginAgain)))),
        (false, _) => page.show(&view(page, "", notice)),
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
        Ok(cookie) => page.logged_in(page.target(), &cookie, Vec::new()),
        Err(error) => page.refuse(&view, login_problem(page.app, error)),
    }
}

/// Whether the browser is logged in. While Redis is away, the login page is still shown.
async fn has_session<S: Ports>(page: &Page<'_, S>) -> Result<bool, Problem> {
    let Some(cookie) = page.session_cookie()? else { return Ok(false) };
    match pages::find_session(page.call(), &cookie).await {
        Ok(session) => Ok(session.is_some()),
        Err(StoreError::Unavailable { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn view<'v, S: Ports>(page: &Page<'v, S>, email: &'v str, notice: Option<LoginNotice>) -> LoginPage<'v> {
    let registration_open = page.app.doc.sign_up != SignUp::Closed;
    LoginPage { email, providers: page.providers(), registration_open, notice }
}

fn parse_notice(name: &str) -> Option<LoginNotice> {
    match name {
        "password_reset" => Some(LoginNotice::PasswordReset),
        "account_deleted" => Some(LoginNotice::AccountDeleted),
        _ => None,
    }
}
