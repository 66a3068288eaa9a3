//! `confirm`: the notice after a registration, and the page that the link in the mail opens.

use super::{
    form::Form,
    page::{Page, encode_query},
};
use crate::{
    domain::{
        pages::{BrowserConfirmError, BrowserConfirmInput, BrowserConfirmed, Registration, confirm_in_browser},
        password::Password,
    },
    http::{
        Ports, authentication,
        cookies::TimedCookie,
        error::{ErrorCode, Problem},
        handlers::email::{
            confirm::{ConfirmRequest, invalid_code},
            login::invalid_credentials,
        },
        request::CodeText,
        response::Response,
    },
    pages::views::{ConfirmNoticePage, ConfirmPage},
};

/// Shows the page. Never checks or uses the code.
pub(super) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let code = page.query("code")?.unwrap_or_default();
    let registrations = registrations(page);
    if let Some((_, newest)) = registrations.first().filter(|_| code.is_empty()) {
        return page.show(&ConfirmNoticePage { email: newest.address() });
    }
    // If this browser has neither a registration nor a session, the button is not enough: the page also asks for the
    // password.
    let asks_password = registrations.is_empty() && page.session_cookie()?.is_none();
    page.show(&ConfirmPage { code, hides_code: !code.is_empty(), asks_password, login_needed: false })
}

pub(super) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    let CodeText(code) = match form.read() {
        Ok(ConfirmRequest { code }) => code,
        Err(problem) => return refuse(page, form, problem, false),
    };
    let password = form.get("password").map(Password::new);
    let (cookies, registrations): (Vec<_>, Vec<_>) = registrations(page).into_iter().unzip();
    let input = BrowserConfirmInput {
        code: &code,
        password: password.as_ref(),
        session: page.session().await?,
        registrations: &registrations,
        previous: page.session_cookie()?,
    };
    let confirmed = match confirm_in_browser(page.call(), input, page.session_times()).await {
        Ok(confirmed) => confirmed,
        Err(error) => {
            let login_needed = matches!(error, BrowserConfirmError::LoginRequired);
            return refuse(page, form, confirm_problem(page, error), login_needed);
        }
    };
    let BrowserConfirmed { cookie, password_required, address } = confirmed;
    let own = || cookies.iter().zip(&registrations).filter(|(_, registration)| registration.is_for(&address));
    // The address is confirmed, so the cookies of its registrations are cleared.
    let cleared = own().map(|(cookie, _)| page.cookies.transactions().clear(cookie)).collect();
    // If the link in the mail opened a new tab, the new tab has no `tx`. It continues with the `tx` of the
    // registration.
    let registered_tx = match own().next() {
        Some((_, registration)) => registration.transaction(page.call()).await,
        None => None,
    };
    let tx = page.tx().or(registered_tx.as_deref().filter(|tx| page.target_of(tx).is_some()));
    // If the confirmation opened a session, it counts as a login, and this login is added to the `tx`.
    let tx = match &cookie {
        Some(cookie) => tx.and_then(|tx| page.tx_after_login(tx, cookie)),
        None => tx.map(str::to_owned),
    };
    let tx = tx.as_deref();
    let next = match tx.and_then(|tx| page.target_of(tx)) {
        _ if password_required => format!("account/password{}", encode_query(tx.map(|tx| ("tx", tx)))),
        Some(target) => target,
        None => "account?notice=email_confirmed".to_owned(),
    };
    match cookie {
        Some(cookie) => page.redirect_after_login_to(&next, &cookie, cleared),
        None => page.redirect(&next, cleared),
    }
}

/// The registrations of this browser that have not expired, with their cookies, the newest first.
fn registrations<'p, S: Ports>(page: &Page<'p, S>) -> Vec<(TimedCookie<'p>, Registration)> {
    let Some(browser) = page.sent.browser() else { return Vec::new() };
    let now = page.state.env.now();
    let open = |cookie: TimedCookie<'p>| Some((cookie, Registration::open(page.app, browser, cookie.value, now)?));
    page.sent.newest_transactions().filter_map(open).collect()
}

/// Shows the form again, with the error. If the code was refused, the form shows the code; otherwise the code stays
/// hidden.
fn refuse<S: Ports>(
    page: &Page<'_, S>,
    form: &Form,
    problem: Problem,
    login_needed: bool,
) -> Result<Response, Problem> {
    let is_code_refused = matches!(problem.code, ErrorCode::InvalidCode | ErrorCode::InvalidRequest);
    let needs_password = matches!(problem.code, ErrorCode::ReauthenticationRequired | ErrorCode::InvalidCredentials);
    let view = ConfirmPage {
        code: form.text("code"),
        hides_code: !is_code_refused,
        asks_password: needs_password || form.get("password").is_some(),
        login_needed,
    };
    page.refuse(&view, problem)
}

fn confirm_problem<S: Ports>(page: &Page<'_, S>, error: BrowserConfirmError) -> Problem {
    match error {
        BrowserConfirmError::InvalidCode => invalid_code(),
        BrowserConfirmError::PasswordRequired | BrowserConfirmError::LoginRequired => Problem::unauthorized(
            ErrorCode::ReauthenticationRequired,
            "the confirmation in this browser needs the password or a login",
            authentication::challenge(page.app, None),
        ),
        BrowserConfirmError::InvalidCredentials => invalid_credentials(page.app),
        BrowserConfirmError::Common(error) => error.into(),
    }
}
