//! `account/email`: requests a change of the email address.

use super::load_user;
use crate::{
    domain::{
        authentication::AuthenticatedSession,
        email::Email,
        own_account::{self, ChangeAddressInput},
        user::User,
    },
    http::{
        Ports,
        error::Problem,
        handlers::user::email::{ChangeAddressRequest, problem_of_address_change},
        pages::{form::Form, page::Page},
        response::Response,
    },
    pages::views::EmailPage,
};

pub(in crate::http::pages) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let user = load_user(page, &session).await?;
    let view = view(page, &session, &user, "");
    if view.login_needed { page.show_before_login(&view) } else { page.show(&view) }
}

pub(in crate::http::pages) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let requested = match form.read() {
        Ok(ChangeAddressRequest { email, password }) => {
            let input = ChangeAddressInput { email, password };
            let requested = own_account::request_address_change(page.call(), &session, &input).await;
            requested.map(drop).map_err(|error| problem_of_address_change(page.app, error))
        }
        Err(problem) => Err(problem),
    };
    match requested {
        Ok(()) => page.redirect("account?notice=email_sent", Vec::new()),
        Err(problem) => {
            let user = load_user(page, &session).await?;
            page.refuse(&view(page, &session, &user, form.text("email")), problem)
        }
    }
}

fn view<'v, S: Ports>(
    page: &Page<'_, S>,
    session: &AuthenticatedSession,
    user: &'v User,
    email: &'v str,
) -> EmailPage<'v> {
    let asks_password = user.password_hash.is_some();
    let login_needed = !asks_password && !session.is_recent(&page.state.env);
    EmailPage { current: user.email.as_ref().map(Email::as_str), email, asks_password, login_needed }
}
