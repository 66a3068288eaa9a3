//! `account/activity`: recent events of the account.

use crate::{
    domain::audit::ActivityEntry,
    http::{Ports, error::Problem, handlers::activity::recent_events, pages::page::Page, response::Response},
    pages::{
        Timestamp,
        views::{ActivityPage, ActivityRow},
    },
};

pub(in crate::http::pages) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let Some(session) = page.session().await? else { return page.log_in_first() };
    let events = recent_events(page.state, page.app, session.user_id()).await?;
    let language = page.texts.language();
    let row =
        |event: ActivityEntry| ActivityRow::new(event.kind, event.count, Timestamp::new(event.at, language), event.ip);
    page.show(&ActivityPage { events: events.into_iter().map(row).collect() })
}
