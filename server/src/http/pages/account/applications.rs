//! `account/applications`: the Clients that have access to the account.

use crate::{
    domain::{
        authentication::AuthenticatedSession,
        openid::applications::{Application, list_applications, withdraw_access},
    },
    http::{
        Ports,
        error::{ErrorCode, Problem},
        pages::{form::Form, page::Page},
        response::Response,
    },
    pages::{
        Timestamp,
        views::{AccountNotice, ApplicationRow, ApplicationsPage},
    },
};

/// Whether this page exists for this browser. In an App without clients, the page exists only for a user who has
/// entries (Clients with access): entries stay after the last client of the App is removed. For everybody else, its
/// path is unknown, as in an App that never had clients.
pub(in crate::http::pages) async fn exists<S: Ports>(page: &Page<'_, S>) -> Result<bool, Problem> {
    if page.app.has_clients() {
        return Ok(true);
    }
    match page.session().await? {
        Some(session) => has_entries(page, &session).await,
        None => Ok(false),
    }
}

/// Whether the account page has a link to this page.
pub(super) async fn is_linked<S: Ports>(page: &Page<'_, S>, session: &AuthenticatedSession) -> Result<bool, Problem> {
    if page.app.has_clients() { Ok(true) } else { has_entries(page, session).await }
}

pub(in crate::http::pages) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let notice = match page.query("notice")? {
        Some("application_removed") => Some(AccountNotice::ApplicationRemoved),
        _ => None,
    };
    let applications = list(page, &session).await?;
    page.show(&ApplicationsPage { notice, ..view(page, &applications) })
}

pub(in crate::http::pages) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let sent = form.text("client");
    let call = page.call();
    let mut applications = None;
    let removed = match page.app.client(sent) {
        Some(client) => withdraw_access(call, &session, &client.uid, Some(client.as_ref())).await?,
        // If the App no longer has the client, the form contains the UID of the client instead of its client ID.
        None => {
            let listed = applications.insert(list(page, &session).await?);
            match listed.iter().find(|application| application.client_uid == sent) {
                Some(found) => withdraw_access(call, &session, sent, found.client.as_deref()).await?,
                None => false,
            }
        }
    };
    if removed && !page.app.has_clients() {
        // After the last entry is removed, this page no longer exists.
        return page.redirect("account?notice=application_removed", Vec::new());
    }
    if removed {
        return page.redirect("account/applications?notice=application_removed", Vec::new());
    }
    let applications = match applications {
        Some(listed) => listed,
        None => list(page, &session).await?,
    };
    page.refuse(&view(page, &applications), Problem::new(ErrorCode::NotFound, "no such application has access"))
}

async fn has_entries<S: Ports>(page: &Page<'_, S>, session: &AuthenticatedSession) -> Result<bool, Problem> {
    Ok(!list(page, session).await?.is_empty())
}

async fn list<S: Ports>(page: &Page<'_, S>, session: &AuthenticatedSession) -> Result<Vec<Application>, Problem> {
    Ok(list_applications(page.call(), session).await?)
}

fn view<'v, S: Ports>(page: &Page<'_, S>, applications: &'v [Application]) -> ApplicationsPage<'v> {
    let row = |application: &'v Application| ApplicationRow {
        client: application.id(),
        name: application.name(),
        since: Timestamp::new(application.since, page.texts.language()),
    };
    ApplicationsPage { applications: applications.iter().map(row).collect(), notice: None }
}
