//! The start of a social login: the response sends the browser from the pages to *redirect*.

use super::{
    PageRoute,
    page::{Page, encode_query},
};
use crate::{
    domain::{
        pages::{SOCIAL_LOGIN_SECONDS, SocialPurpose, StartedSocialLogin, start_social_login},
        ports::StoreFlowError,
        social,
    },
    http::{Ports, error::Problem, handlers::social::too_many_flows_problem, response::Response},
};

/// Stores the PKCE verifier and the `tx` in an encrypted cookie, and sends the browser to *redirect*, which is on the
/// host of the base URL.
pub(super) async fn start<S: Ports>(
    page: &Page<'_, S>,
    provider: &str,
    purpose: SocialPurpose,
    tx: Option<&str>,
) -> Result<Response, Problem> {
    let provider = social::find_provider(page.app, provider).ok_or_else(Problem::provider_not_found)?;
    let started = start_social_login(page.call(), &page.browser, purpose, tx).await.map_err(start_problem)?;
    let StartedSocialLogin { cookie, cookie_value, code_challenge, state } = started;
    let cookies = page.cookies.transactions().add(
        page.sent.transactions(),
        &cookie,
        page.state.env.now(),
        &cookie_value,
        SOCIAL_LOGIN_SECONDS,
    );
    let query = encode_query([
        ("redirect_url", page.url.page(PageRoute::Continue.path()).as_str()),
        ("code_challenge", code_challenge.as_str()),
        ("state", state.as_str()),
    ]);
    page.redirect_to(&format!("{}/{}/redirect{query}", page.app.doc.issuer, provider.name), cookies)
}

fn start_problem(error: StoreFlowError) -> Problem {
    match error {
        StoreFlowError::TooManyFlows(too_many) => too_many_flows_problem(&too_many),
        StoreFlowError::Store(error) => error.into(),
    }
}
