//! `continue`: the return from a social login, with a one-time code or an error.

use super::page::{Header, Page, encode_query};
use crate::{
    domain::pages::{
        ContinueError, SocialLogin, SocialPurpose, SocialState, continue_link, continue_login, open_returned_login,
    },
    http::{
        Ports,
        error::{ErrorCode, Problem},
        handlers::identities::link::link_problem,
        response::Response,
    },
};

pub(super) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let now = page.state.env.now();
    let state = page.query("state")?.and_then(|state| SocialState::open(page.app, state, now));
    let state = state.ok_or_else(Problem::invalid_state)?;
    let sent = page.sent.transactions().iter().find(|cookie| cookie.belongs_to(&state.cookie));
    let (Some(sent), Some(browser)) = (sent, page.sent.browser()) else { return Err(Problem::invalid_state()) };
    let login =
        open_returned_login(page.call(), browser, &state, sent.value).await?.ok_or_else(Problem::invalid_state)?;
    let cleared = page.cookies.transactions().remove(page.sent.transactions(), &state.cookie);
    match (page.query("error")?, page.query("code")?) {
        (None, Some(code)) => finish(page, &state, &login, code, cleared).await,
        (error, _) => {
            let code = error.and_then(ErrorCode::from_name).unwrap_or(ErrorCode::ProviderError);
            show_error(page, &state, &login, code, cleared)
        }
    }
}

async fn finish<S: Ports>(
    page: &Page<'_, S>,
    state: &SocialState,
    login: &SocialLogin,
    code: &str,
    cleared: Vec<Header>,
) -> Result<Response, Problem> {
    let verifier = &login.code_verifier;
    match state.purpose {
        SocialPurpose::LogIn => {
            let previous = page.session_cookie()?;
            let opened = continue_login(page.call(), code, verifier, previous, page.session_times()).await;
            let cookie = opened.map_err(|error| continue_problem(page, error))?;
            page.redirect_after_login(login.transaction.as_deref(), &cookie, cleared)
        }
        SocialPurpose::Link { user, session } => {
            let signed_in = page.session().await?;
            let signed_in = signed_in.filter(|found| found.user_id() == user && found.session.id == session);
            let signed_in = signed_in.ok_or_else(Problem::invalid_state)?;
            match continue_link(page.call(), &signed_in, code, verifier).await {
                Ok(provider) => {
                    let query = encode_query([("notice", "linked"), ("provider", provider.as_str())]);
                    page.redirect(&format!("account/identities{query}"), cleared)
                }
                Err(error) => {
                    let problem = continue_problem(page, error);
                    if problem.refusal_retry_after.is_some() || problem.status.is_server_error() {
                        return Err(problem);
                    }
                    show_error(page, state, login, problem.code, cleared)
                }
            }
        }
    }
}

/// Redirects to the page that started the login. That page shows the error.
fn show_error<S: Ports>(
    page: &Page<'_, S>,
    state: &SocialState,
    login: &SocialLogin,
    code: ErrorCode,
    cleared: Vec<Header>,
) -> Result<Response, Problem> {
    let error = [("error", code.as_str())].into_iter();
    let path = match state.purpose {
        SocialPurpose::LogIn => {
            let tx = login.transaction.as_deref().filter(|tx| page.target_of(tx).is_some());
            format!("login{}", encode_query(error.chain(tx.map(|tx| ("tx", tx)))))
        }
        SocialPurpose::Link { .. } => format!("account/identities{}", encode_query(error)),
    };
    page.redirect(&path, cleared)
}

fn continue_problem<S: Ports>(page: &Page<'_, S>, error: ContinueError) -> Problem {
    match error {
        ContinueError::InvalidCode => Problem::invalid_state(),
        ContinueError::Link(error) => link_problem(page.app, error),
        ContinueError::Common(error) => error.into(),
    }
}
