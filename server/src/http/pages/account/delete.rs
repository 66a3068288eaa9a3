//! `account/delete`.

use super::load_user;
use crate::{
    domain::{authentication::AuthenticatedSession, own_account, user::User},
    http::{
        Ports,
        error::{ErrorCode, Problem},
        handlers::user::{account_problem, delete::DeleteUserRequest},
        pages::{form::Form, page::Page},
        response::Response,
    },
    pages::views::DeletePage,
};

pub(in crate::http::pages) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let user = load_user(page, &session).await?;
    let view = view(page, &session, &user);
    if view.login_needed { page.show_before_login(&view) } else { page.show(&view) }
}

pub(in crate::http::pages) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let DeleteUserRequest { password } = form.read()?;
    match own_account::delete_account(page.call(), &session, password.as_ref()).await {
        Ok(()) => page.redirect("login?notice=account_deleted", vec![page.cookies.clear_session(page.app.id())]),
        Err(error) => {
            let problem = account_problem(page.app, error);
            let user = load_user(page, &session).await?;
            let mut view = view(page, &session, &user);
            // After a wrong password, the page asks for the password again, even if the login is recent.
            view.asks_password |= problem.code == ErrorCode::InvalidCredentials;
            page.refuse(&view, problem)
        }
    }
}

/// If the login is recent, the page does not ask for the password, and the JSON API does not require it either.
fn view<S: Ports>(page: &Page<'_, S>, session: &AuthenticatedSession, user: &User) -> DeletePage {
    let is_recent = session.is_recent(&page.state.env);
    let has_password = user.password_hash.is_some();
    DeletePage { asks_password: has_password && !is_recent, login_needed: !has_password && !is_recent }
}
