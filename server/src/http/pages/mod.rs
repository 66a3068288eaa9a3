//! The hosted pages over HTTP (specification: Hosted pages): one file for each page. All requests pass the same checks,
//! and all responses have the same security headers.

mod account;
mod assets;
mod authorize;
mod brandings;
mod checks;
mod confirm;
mod consent;
mod continue_page;
mod forgot;
mod form;
mod login;
mod logout;
mod page;
mod register;
mod reset;
mod responses;
mod routes;
mod shared_pages;
mod social;

use futures::{FutureExt, future::BoxFuture};
use http::{Method, StatusCode};

pub(super) use assets::asset;
pub(super) use routes::PageRoute;

use self::{authorize::AuthorizationResponseKind, brandings::Brandings, checks::PageLocation, form::Form, page::Page};
use super::{Ports, error::Problem, metrics::HttpMetrics, request::InboundRequest, response::Response};
use crate::{
    config::Apps,
    domain::{app::App, pages::PagesUrl},
    state::State,
};

/// The state that all requests for pages share.
pub(super) struct Pages {
    brandings: Brandings,
    metrics: HttpMetrics,
}

/// The URL of the page *continue*, to which a social login from a page returns. `None` if the App has no pages.
pub(super) fn continue_url(apps: &Apps, app: &App) -> Option<String> {
    app.pages.as_ref().map(|_| pages_url(apps, app).page(PageRoute::Continue.path()))
}

fn pages_url(apps: &Apps, app: &App) -> PagesUrl {
    PagesUrl::new(app, apps.held_pages_host(app))
}

// === impl Pages ===

impl Pages {
    pub(super) fn new(metrics: HttpMetrics) -> Self {
        Self { brandings: Brandings::default(), metrics }
    }

    /// Handles a request for a page. If the page does not exist on this host, the error is JSON. Every other error is a
    /// page.
    pub(super) async fn handle<S: Ports>(
        &self,
        state: &State<S>,
        route: PageRoute,
        app: &App,
        mut request: InboundRequest,
    ) -> Result<Response, Problem> {
        let settings = app.pages.as_deref().ok_or_else(Problem::not_found)?;
        let url = pages_url(&state.apps, app);
        match checks::locate_page(&state.apps, app, &url, &state.settings.base_url, &request) {
            PageLocation::ThisHost => {}
            PageLocation::OwnHost(url) => return responses::redirect(StatusCode::FOUND, &url),
            PageLocation::NotFound => return Err(Problem::not_found()),
        }
        let form = read_form(route, &mut request).await;
        let branding = self.brandings.get(app, settings);
        let mut page = Page::new(state, app, settings, route, &request, url, branding);
        if route == PageRoute::Applications {
            match account::applications::exists(&page).boxed().await {
                Ok(true) => {}
                Ok(false) => return Err(Problem::not_found()),
                Err(problem) => return Ok(page.fail(problem)),
            }
        }
        let result = match page.check(form) {
            // If another user has logged in since the form was shown, the form changes nothing.
            Ok(Some(form)) if page.is_form_of_other_user(&form) => page.redirect("account", Vec::new()),
            Ok(form) => call(&page, form.as_ref()).await,
            Err(problem) => Err(problem),
        };
        let is_error = result.is_err();
        let response = result.unwrap_or_else(|problem| page.fail(problem));
        if !matches!(route, PageRoute::Theme | PageRoute::Logo) {
            self.metrics.record_page(route.page_name(), outcome(response.status(), is_error));
        }
        if matches!(route, PageRoute::Authorize | PageRoute::Consent)
            && let Some(outcome) = authorization_outcome(&response, is_error)
        {
            self.metrics.record_authorization(outcome);
        }
        Ok(response)
    }
}

/// Reads the form of a POST.
async fn read_form(route: PageRoute, request: &mut InboundRequest) -> Result<Option<Form>, Problem> {
    if request.method != Method::POST || !route.accepts(&request.method) {
        return Ok(None);
    }
    let body = request.read_form_text().await?;
    let form = match route {
        PageRoute::Authorize => Form::parse_authorization_request(&body),
        _ => Form::parse(&body),
    };
    form.map(Some)
}

/// The outcome of an authorization request, as the metric counts it. The response is from the page `authorize` or
/// `consent`. `None` for a response that is not counted: the redirect from a POST to a GET, the consent page itself
/// (the redirect to it is already counted), and a redirect from the consent page to the login or back to `authorize`.
fn authorization_outcome(response: &Response, is_error: bool) -> Option<&'static str> {
    let kind = response.extensions().get::<AuthorizationResponseKind>();
    kind.map(|kind| kind.as_str()).or_else(|| {
        is_error.then(|| match response.status() {
            StatusCode::TOO_MANY_REQUESTS => "limited",
            status if status.is_server_error() => "unavailable",
            _ => "invalid",
        })
    })
}

/// The outcome of a request for a page, as the metric counts it.
fn outcome(status: StatusCode, is_error: bool) -> &'static str {
    if status.is_redirection() {
        "done"
    } else if is_error {
        "error"
    } else if status == StatusCode::OK {
        "shown"
    } else {
        "refused"
    }
}

/// Calls the page. Each future is boxed separately: otherwise the future of every request would be as large as the
/// future of the largest page.
fn call<'p, S: Ports>(page: &'p Page<'_, S>, form: Option<&'p Form>) -> BoxFuture<'p, Result<Response, Problem>> {
    match (page.route, form) {
        (PageRoute::Login, None) => login::show(page).boxed(),
        (PageRoute::Login, Some(form)) => login::submit(page, form).boxed(),
        (PageRoute::Register, None) => register::show(page).boxed(),
        (PageRoute::Register, Some(form)) => register::submit(page, form).boxed(),
        (PageRoute::Confirm, None) => confirm::show(page).boxed(),
        (PageRoute::Confirm, Some(form)) => confirm::submit(page, form).boxed(),
        (PageRoute::Forgot, None) => forgot::show(page).boxed(),
        (PageRoute::Forgot, Some(form)) => forgot::submit(page, form).boxed(),
        (PageRoute::Reset, None) => reset::show(page).boxed(),
        (PageRoute::Reset, Some(form)) => reset::submit(page, form).boxed(),
        (PageRoute::Continue, _) => continue_page::show(page).boxed(),
        (PageRoute::Authorize, None) => authorize::show(page).boxed(),
        (PageRoute::Authorize, Some(form)) => authorize::submit(page, form).boxed(),
        (PageRoute::Consent, None) => consent::show(page).boxed(),
        (PageRoute::Consent, Some(form)) => consent::submit(page, form).boxed(),
        (PageRoute::Account, None) => account::overview::show(page).boxed(),
        (PageRoute::Account, Some(form)) => account::overview::submit(page, form).boxed(),
        (PageRoute::Password, None) => account::password::show(page).boxed(),
        (PageRoute::Password, Some(form)) => account::password::submit(page, form).boxed(),
        (PageRoute::Email, None) => account::email::show(page).boxed(),
        (PageRoute::Email, Some(form)) => account::email::submit(page, form).boxed(),
        (PageRoute::Delete, None) => account::delete::show(page).boxed(),
        (PageRoute::Delete, Some(form)) => account::delete::submit(page, form).boxed(),
        (PageRoute::Identities, None) => account::identities::show(page).boxed(),
        (PageRoute::Identities, Some(form)) => account::identities::submit(page, form).boxed(),
        (PageRoute::Sessions, None) => account::sessions::show(page).boxed(),
        (PageRoute::Sessions, Some(form)) => account::sessions::submit(page, form).boxed(),
        (PageRoute::Activity, _) => account::activity::show(page).boxed(),
        (PageRoute::Applications, None) => account::applications::show(page).boxed(),
        (PageRoute::Applications, Some(form)) => account::applications::submit(page, form).boxed(),
        (PageRoute::Logout, None) => logout::show(page).boxed(),
        (PageRoute::Logout, Some(form)) => logout::submit(page, form).boxed(),
        (PageRoute::Theme, _) => async move { assets::theme(page) }.boxed(),
        (PageRoute::Logo, _) => async move { assets::logo(page) }.boxed(),
    }
}
