//! `account/sessions`: where the user is logged in. Works while Postgres is unavailable.

use crate::{
    domain::{
        authentication::AuthenticatedSession,
        session::{SessionId, SessionInfo},
        sessions,
    },
    http::{
        Ports,
        error::Problem,
        handlers::sessions::end::no_such_session,
        pages::{form::Form, page::Page},
        response::Response,
    },
    pages::{
        Timestamp, device_label,
        views::{AccountNotice, SessionRow, SessionsPage},
    },
};

pub(in crate::http::pages) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let notice = match page.query("notice")? {
        Some("session_ended") => Some(AccountNotice::SessionEnded),
        Some("others_ended") => Some(AccountNotice::OthersEnded),
        _ => None,
    };
    let view = view(page, &session).await?;
    page.show(&SessionsPage { notice, ..view })
}

pub(in crate::http::pages) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    if form.get("action") == Some("end_others") {
        sessions::end_other_sessions(page.call(), &session).await?;
        return page.redirect("account/sessions?notice=others_ended", Vec::new());
    }
    let ended = match form.text("session").parse::<SessionId>() {
        Ok(ended) => sessions::end_session(page.call(), &session, ended).await?,
        Err(_) => false,
    };
    if ended {
        page.redirect("account/sessions?notice=session_ended", Vec::new())
    } else {
        page.refuse(&view(page, &session).await?, no_such_session())
    }
}

async fn view<S: Ports>(page: &Page<'_, S>, session: &AuthenticatedSession) -> Result<SessionsPage<'static>, Problem> {
    let listed = sessions::list_sessions(page.call(), session).await?;
    let current = session.session.id;
    let device = |info: &SessionInfo| {
        let device = device_label(info.user_agent.as_deref(), &page.texts);
        match info.client_id.as_deref().map(|client_id| (client_id, page.app.client(client_id))) {
            Some((_, Some(client))) => format!("{} · {device}", client.display_name),
            // The App no longer has the client, so its display name is unknown.
            Some((client_id, None)) => format!("{client_id} · {device}"),
            None => device,
        }
    };
    let row = |info: SessionInfo| SessionRow {
        device: device(&info),
        last_used: Timestamp::new(info.last_used_at, page.texts.language()),
        current: info.id == current,
        id: info.id.to_string(),
        ip: info.ip,
    };
    let has_others = listed.iter().any(|info| info.id != current);
    Ok(SessionsPage { sessions: listed.into_iter().map(row).collect(), has_others, notice: None })
}
