//! `account/password`: changes the password, or sets the first one.

use super::load_user;
use crate::{
    domain::{
        authentication::AuthenticatedSession,
        email::Email,
        own_account::{self, ChangePasswordInput},
        user::User,
    },
    http::{
        Ports,
        error::Problem,
        handlers::user::password::{ChangePasswordRequest, change_password_problem},
        pages::{form::Form, page::Page},
        response::Response,
    },
    pages::views::PasswordPage,
};

pub(in crate::http::pages) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let user = load_user(page, &session).await?;
    let view = view(page, &session, &user);
    if view.login_needed { page.show_before_login(&view) } else { page.show(&view) }
}

pub(in crate::http::pages) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let changed = match form.read() {
        Ok(ChangePasswordRequest { password, current_password }) => {
            let input = ChangePasswordInput { password, current: current_password };
            let changed = own_account::change_password(page.call(), &session, &input).await;
            changed.map_err(|error| change_password_problem(page.app, error))
        }
        Err(problem) => Err(problem),
    };
    match changed {
        Ok(()) => page.redirect(page.target().as_deref().unwrap_or("account?notice=password_saved"), Vec::new()),
        Err(problem) => {
            let user = load_user(page, &session).await?;
            page.refuse(&view(page, &session, &user), problem)
        }
    }
}

fn view<'v, S: Ports>(page: &Page<'_, S>, session: &AuthenticatedSession, user: &'v User) -> PasswordPage<'v> {
    let has_password = user.password_hash.is_some();
    let required = !has_password && user.password_session == Some(session.session.id);
    PasswordPage {
        email: user.email.as_ref().map_or("", Email::as_str),
        has_password,
        required,
        login_needed: !has_password && !required && !session.is_recent(&page.state.env),
    }
}
