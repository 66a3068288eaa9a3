//! `logout`: asks the user, then ends the browser session. A client can send the browser here (OpenID Connect
//! RP-Initiated Logout 1.0). If the App has no clients, the page ignores all parameters.

use http::Method;

use super::{
    form::Form,
    page::{Page, encode_query},
};
use crate::{
    domain::{
        authentication::AuthenticatedSession,
        openid::{
            authorization_request::RequestParameters,
            logout::{LogoutRequest, LogoutRequestError},
        },
        pages::{Target, Transaction, TransactionTooLong},
        sessions,
    },
    http::{Ports, error::Problem, response::Response},
    pages::views::{LogoutDonePage, LogoutPage},
};

pub(super) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let parameters = match carried_parameters(page) {
        _ if !page.app.has_clients() => RequestParameters::default(),
        Some(parameters) => parameters.clone(),
        None => RequestParameters::new(page.query_pairs()),
    };
    let request = check(page, &parameters)?;
    let session = page.session().await?;
    // A link scanner that sends HEAD must not log the user out.
    let must_ask =
        page.request.method == Method::HEAD || request.must_ask(session.as_ref().map(|live| live.session.id));
    match session {
        Some(_) if must_ask => ask(page, &request, &parameters),
        None if request.redirect_url().is_none() => page.show(&LogoutDonePage),
        session => finish(page, &request, session).await,
    }
}

pub(super) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    // If the App has no clients, `Page::check` has already refused a form without `csrf`.
    if form.get("csrf").is_none() {
        return redirect_to_get(page, form.parameters());
    }
    let none = RequestParameters::default();
    let carried = carried_parameters(page).filter(|_| page.app.has_clients());
    let request = check(page, carried.unwrap_or(&none))?;
    finish(page, &request, page.session().await?).await
}

/// Redirects a POST from another site to a GET, so that the browser sends its cookies (`SameSite=Lax`).
fn redirect_to_get<S: Ports>(page: &Page<'_, S>, parameters: &RequestParameters) -> Result<Response, Problem> {
    let request = check(page, parameters)?;
    if parameters.is_empty() {
        return page.redirect_to_next("logout");
    }
    let seal = |parameters: RequestParameters| {
        Transaction::start(&page.state.env, Target::Logout(parameters)).seal_unbound(&page.state.env, page.app)
    };
    // If `id_token_hint` is too long for a `tx`, it is left out, and the page asks the user.
    let tx = seal(parameters.clone()).or_else(|TransactionTooLong| seal(request.without_hint(ui_locales(parameters))));
    let tx = tx.map_err(too_long)?;
    page.redirect_to_next(&format!("logout{}", encode_query([("tx", tx.as_str())])))
}

fn ask<S: Ports>(
    page: &Page<'_, S>,
    request: &LogoutRequest,
    parameters: &RequestParameters,
) -> Result<Response, Problem> {
    let carried = request.without_hint(ui_locales(parameters));
    if carried.is_empty() {
        return page.show(&LogoutPage);
    }
    let transaction = Transaction::start(&page.state.env, Target::Logout(carried));
    let tx = transaction.seal(&page.state.env, page.app, &page.browser).map_err(too_long)?;
    page.show_with_tx(&LogoutPage, &tx)
}

/// Ends the browser session, and with it the client sessions without `offline_access`. Then redirects to the client or
/// to the page that confirms the logout.
async fn finish<S: Ports>(
    page: &Page<'_, S>,
    request: &LogoutRequest,
    session: Option<AuthenticatedSession>,
) -> Result<Response, Problem> {
    if let Some(session) = session {
        sessions::log_out(page.call(), &session).await?;
    }
    let cookies = vec![page.cookies.clear_session(page.app.id())];
    match request.redirect_url() {
        Some(url) => page.redirect_to(&url, cookies),
        None => page.redirect("logout", cookies),
    }
}

/// The parameters in the `tx`. `None` if there is no `tx`, or if it does not belong to a logout.
fn carried_parameters<'p, S: Ports>(page: &'p Page<'_, S>) -> Option<&'p RequestParameters> {
    match &page.transaction()?.target {
        Target::Logout(parameters) => Some(parameters),
        Target::Account(_) | Target::Authorize(_) => None,
    }
}

fn check<S: Ports>(page: &Page<'_, S>, parameters: &RequestParameters) -> Result<LogoutRequest, Problem> {
    LogoutRequest::check(page.app, parameters).map_err(|error| match error {
        LogoutRequestError::InvalidRequest(why) => Problem::invalid_request(why),
        LogoutRequestError::InvalidClient => Problem::client_not_found(),
        LogoutRequestError::RedirectUrlNotAllowed => Problem::client_redirect_url_not_allowed(),
    })
}

fn ui_locales(parameters: &RequestParameters) -> Option<&str> {
    parameters.get("ui_locales").ok().flatten()
}

fn too_long(error: TransactionTooLong) -> Problem {
    Problem::invalid_request("the request is too long").with_cause(error)
}
