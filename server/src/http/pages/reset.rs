//! `reset`: sets a new password with the code from a mail.

use super::{
    form::Form,
    page::{Page, encode_query},
};
use crate::{
    domain::{
        email::Email,
        email_account::{self, ResetPasswordInput},
    },
    http::{
        Ports,
        error::{ErrorCode, Problem},
        handlers::email::confirm_password::{ConfirmPasswordRequest, reset_problem},
        response::Response,
    },
    pages::views::ResetPage,
};

/// Shows the page. Never checks or uses the code.
pub(super) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let sent = page.sent_address()?;
    let email = match &sent {
        Some(email) => email.as_str(),
        None => page.query("email")?.unwrap_or_default(),
    };
    let code = page.query("code")?.unwrap_or_default();
    page.show(&view(page, email, code, !code.is_empty()))
}

pub(super) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    let ConfirmPasswordRequest { email, code, password } = match form.read() {
        Ok(request) => request,
        Err(problem) => return refuse(page, form, problem),
    };
    let input = ResetPasswordInput { email, code: code.0, password };
    if let Err(error) = email_account::reset_password(page.call(), input).await {
        return refuse(page, form, reset_problem(error));
    }
    let tx = page.tx().map(|tx| ("tx", tx));
    let query = encode_query([("notice", "password_reset")].into_iter().chain(tx));
    page.redirect(&format!("login{query}"), Vec::new())
}

/// Shows the form again, with the error. If the code is missing or was refused, the form shows the field of the code;
/// otherwise the code stays hidden.
fn refuse<S: Ports>(page: &Page<'_, S>, form: &Form, problem: Problem) -> Result<Response, Problem> {
    let code = form.text("code");
    let hides_code = !code.is_empty() && problem.code != ErrorCode::InvalidCode;
    page.refuse(&view(page, form.text("email"), code, hides_code), problem)
}

fn view<'v, S: Ports>(page: &Page<'_, S>, email: &'v str, code: &'v str, hides_code: bool) -> ResetPage<'v> {
    let address = Email::parse(email).map(|email| page.seal_address(&email)).unwrap_or_default();
    ResetPage { email, address, code, hides_code }
}
