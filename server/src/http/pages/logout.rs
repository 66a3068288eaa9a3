//! `logout`: asks, then ends the browser session.

use super::page::Page;
use crate::{
    domain::sessions,
    http::{Ports, error::Problem, response::Response},
    pages::views::{LogoutDonePage, LogoutPage},
};

pub(super) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    match page.session().await? {
        Some(_) => page.show(&LogoutPage),
        None => page.show(&LogoutDonePage),
    }
}

pub(super) async fn submit<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    if let Some(session) = page.session().await? {
        sessions::log_out(page.call(), &session).await?;
    }
    page.redirect("logout", vec![page.cookies.clear_session(page.app.id())])
}
