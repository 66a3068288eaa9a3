//! `authorize`: the authorization endpoint (OpenID Connect Core 1.0, 3.1.2). It has no form of its own: it leads to the
//! login, to the consent page, or back to the client. The parameter `tx` carries the request from page to page: it is
//! the encrypted transaction (specification: Browser sessions, Transactions).

use latchkey_crds::rendered::SignUp;
use url::Url;

use super::{
    form::Form,
    page::{Page, encode_query, report},
    routes::PageRoute,
};
use crate::{
    domain::{
        openid::{
            authorization_request::{
                AuthorizationError, AuthorizationErrorCode, AuthorizationRequest, Delivery, ReplyTo, RequestError,
                RequestParameters, ResponseMode, UnsafeRequest, find_client,
            },
            authorize::{AuthorizationAttempt, AuthorizationOutcome, authorize},
            par::{self, find_request},
        },
        pages::{CarriedRequest, ShownConsent, Target, Transaction, find_session},
        redirect::{ParameterLocation, RedirectTarget},
    },
    http::{
        Ports,
        error::{ErrorCode, Problem},
        response::Response,
    },
    pages::views::{FormPostField, FormPostPage},
};

/// The outcome of a request, for the metric. It is in the extensions of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AuthorizationResponseKind {
    Issued,
    Login,
    Consent,
    /// The client gets `access_denied`.
    Denied,
    /// The client gets an error other than `access_denied`.
    Error,
}

/// A request that passed its checks, with the login and the consent that its `tx` carries.
pub(super) struct CheckedRequest {
    pub(super) request: AuthorizationRequest,
    pub(super) carried: CarriedRequest,
    /// When the browser sent the request, in Unix seconds.
    pub(super) requested_at: i64,
}

pub(super) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let (carried, requested_at) = match page.transaction() {
        Some(_) => carried_request(page)?,
        None => {
            let carried = read_request(page, RequestParameters::new(page.query_pairs())).await?;
            (carried, page.state.env.now().unix_timestamp())
        }
    };
    // `shown` is what the consent page has shown to the user. It is dropped here, because only the form of the consent
    // page contains a decision of the user.
    let carried = CarriedRequest { shown: None, ..carried };
    match check_request(page, carried, requested_at) {
        Ok(checked) => proceed(page, &checked, None).await,
        Err(error) => refuse(page, error),
    }
}

/// Redirects a POST from another site to a GET, so that the browser sends its cookies (`SameSite=Lax`).
pub(super) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    let carried = read_request(page, form.parameters().clone()).await?;
    let requested_at = page.state.env.now().unix_timestamp();
    let checked = match check_request(page, carried, requested_at) {
        Ok(checked) => checked,
        Err(error) => return refuse(page, error),
    };
    let transaction = Transaction { target: Target::Authorize(Box::new(checked.carried)), issued_at: requested_at };
    let tx = transaction.seal_unbound(&page.state.env, page.app);
    let tx = tx.map_err(|error| Problem::server_error().with_cause(error))?;
    page.redirect_to_next(&format!("authorize{}", encode_query([("tx", tx.as_str())])))
}

/// The authorization request in the `tx`, and when the browser sent it, in Unix seconds.
pub(super) fn carried_request<S: Ports>(page: &Page<'_, S>) -> Result<(CarriedRequest, i64), Problem> {
    match page.transaction() {
        Some(Transaction { target: Target::Authorize(carried), issued_at }) => Ok(((**carried).clone(), *issued_at)),
        Some(Transaction { target: Target::Account(_) | Target::Logout(_), .. }) | None => {
            Err(Problem::invalid_state())
        }
    }
}

/// Checks the client, and returns its request. The parameters of a pushed request replace all others.
async fn read_request<S: Ports>(page: &Page<'_, S>, parameters: RequestParameters) -> Result<CarriedRequest, Problem> {
    let client = find_client(page.app, &parameters).map_err(unsafe_request_problem)?;
    let Some(request_uri) = parameters.pushed_request_uri() else {
        return Ok(CarriedRequest::new(client, parameters, None));
    };
    let found = find_request(page.call(), client, request_uri).await?;
    let pushed = found.ok_or_else(|| unsafe_request_problem(UnsafeRequest::InvalidRequestUri))?;
    Ok(par::carried_request(client, request_uri, &pushed))
}

/// Runs all checks that need no session. A request in a `tx` is checked again, because the client can have changed.
pub(super) fn check_request<S: Ports>(
    page: &Page<'_, S>,
    carried: CarriedRequest,
    requested_at: i64,
) -> Result<CheckedRequest, RequestError> {
    let client = find_client(page.app, &carried.parameters)?;
    if !carried.is_of(client) {
        return Err(UnsafeRequest::InvalidClient.into());
    }
    let delivery = if carried.request_uri.is_some() { Delivery::Pushed } else { Delivery::Browser };
    let request = AuthorizationRequest::check(page.app, client, &carried.parameters, delivery)?;
    let transaction = Transaction { target: Target::Authorize(Box::new(carried)), issued_at: requested_at };
    if !transaction.fits() {
        return Err(request.refuse(AuthorizationError::invalid("the request is too long")));
    }
    let Target::Authorize(carried) = transaction.target else { unreachable!("it was made above") };
    Ok(CheckedRequest { request, carried: *carried, requested_at })
}

/// Sends the browser to the login, to the consent page, or back to the client. `allowed` is set if the user has allowed
/// the access on the consent page.
pub(super) async fn proceed<S: Ports>(
    page: &Page<'_, S>,
    checked: &CheckedRequest,
    allowed: Option<&ShownConsent>,
) -> Result<Response, Problem> {
    let request = &checked.request;
    let outcome = match decide(page, checked, allowed).await {
        Ok(outcome) => outcome,
        Err(problem) if request.prompts.none && problem.code == ErrorCode::TemporarilyUnavailable => {
            let away =
                AuthorizationErrorCode::TemporarilyUnavailable.because("the service is unavailable for a moment");
            return Ok(report(reply_error(page, &request.reply, &away)?, problem));
        }
        Err(problem) => return Err(problem),
    };
    match outcome {
        AuthorizationOutcome::LoginNeeded => {
            let can_register = page.app.doc.sign_up == SignUp::Open;
            let route = if request.prompts.create && can_register { PageRoute::Register } else { PageRoute::Login };
            redirect_to_page(page, checked, route, AuthorizationResponseKind::Login)
        }
        AuthorizationOutcome::ConsentNeeded => {
            redirect_to_page(page, checked, PageRoute::Consent, AuthorizationResponseKind::Consent)
        }
        AuthorizationOutcome::Refused(error) => reply_error(page, &request.reply, &error),
        AuthorizationOutcome::RequestUsed => Err(unsafe_request_problem(UnsafeRequest::InvalidRequestUri)),
        AuthorizationOutcome::Issued(code) => {
            let parameters = request.reply.success_parameters(page.app, code.expose());
            reply(page, &request.reply, &parameters, AuthorizationResponseKind::Issued)
        }
    }
}

async fn decide<S: Ports>(
    page: &Page<'_, S>,
    checked: &CheckedRequest,
    allowed: Option<&ShownConsent>,
) -> Result<AuthorizationOutcome, Problem> {
    let attempt = AuthorizationAttempt {
        request: &checked.request,
        request_uri: checked.carried.request_uri.as_deref(),
        login: checked.carried.login,
        allowed,
    };
    let cookie = page.session_cookie()?;
    let session = cookie.as_ref().map(|cookie| find_session(page.call(), cookie));
    Ok(authorize(page.call(), attempt, session).await?)
}

/// Redirects to a page that later leads back to `authorize` with the `tx`.
fn redirect_to_page<S: Ports>(
    page: &Page<'_, S>,
    checked: &CheckedRequest,
    route: PageRoute,
    kind: AuthorizationResponseKind,
) -> Result<Response, Problem> {
    let tx = seal(page, checked.without_decision(), checked.requested_at)?;
    let mut response = page.redirect_to_next(&format!("{}{}", route.path(), encode_query([("tx", tx.as_str())])))?;
    response.extensions_mut().insert(kind);
    Ok(response)
}

/// Encrypts a request into a `tx` that is valid only in this browser.
pub(super) fn seal<S: Ports>(
    page: &Page<'_, S>,
    carried: CarriedRequest,
    requested_at: i64,
) -> Result<String, Problem> {
    let transaction = Transaction { target: Target::Authorize(Box::new(carried)), issued_at: requested_at };
    let sealed = transaction.seal(&page.state.env, page.app, &page.browser);
    sealed.map_err(|error| Problem::server_error().with_cause(error))
}

/// Shows the error on a page if the client or its redirect URL cannot be trusted. Otherwise sends the error to the
/// client.
pub(super) fn refuse<S: Ports>(page: &Page<'_, S>, error: RequestError) -> Result<Response, Problem> {
    match error {
        RequestError::Page(error) => Err(unsafe_request_problem(error)),
        RequestError::Reply { error, to } => reply_error(page, &to, &error),
    }
}

pub(super) fn reply_error<S: Ports>(
    page: &Page<'_, S>,
    to: &ReplyTo,
    error: &AuthorizationError,
) -> Result<Response, Problem> {
    let kind = match error.code {
        AuthorizationErrorCode::AccessDenied => AuthorizationResponseKind::Denied,
        _ => AuthorizationResponseKind::Error,
    };
    reply(page, to, &to.error_parameters(page.app, error), kind)
}

/// Sends the response to the client by a redirect, or by a page with a form. The redirect has the status 303, so that
/// the browser does not repeat a POST at the client.
fn reply<S: Ports>(
    page: &Page<'_, S>,
    to: &ReplyTo,
    parameters: &[(&'static str, &str)],
    kind: AuthorizationResponseKind,
) -> Result<Response, Problem> {
    let mut response = match to.mode {
        ResponseMode::Query => {
            let url = to.target.with_parameters(ParameterLocation::Query, parameters.iter().copied());
            page.redirect_to(&url, Vec::new())?
        }
        ResponseMode::FormPost => {
            let fields = parameters.iter().map(|(name, value)| FormPostField { name, value });
            let host = shown_host(&to.target);
            page.form_post(&FormPostPage { action: to.target.as_str(), host: &host, fields: fields.collect() })
        }
    };
    response.extensions_mut().insert(kind);
    Ok(response)
}

/// Where the user continues: the host of the redirect URL, or its scheme if this is neither `https` nor `http`.
pub(super) fn shown_host(target: &RedirectTarget) -> String {
    let Ok(url) = Url::parse(target.as_str()) else { return String::new() };
    match (url.scheme(), url.host_str()) {
        ("https" | "http", Some(host)) => host.to_owned(),
        (scheme, _) => scheme.to_owned(),
    }
}

/// The error that a page shows. Its status is never 401, because the request does not authenticate the client.
fn unsafe_request_problem(error: UnsafeRequest) -> Problem {
    match error {
        UnsafeRequest::InvalidClient => Problem::client_not_found(),
        UnsafeRequest::InvalidRequestUri => {
            Problem::new(ErrorCode::InvalidRequestUri, "the request_uri is unknown, used, expired or of another client")
        }
        UnsafeRequest::RedirectUrlNotAllowed => Problem::client_redirect_url_not_allowed(),
    }
}

// === impl AuthorizationResponseKind ===

impl AuthorizationResponseKind {
    /// The label of this outcome in the metric.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Issued => "issued",
            Self::Login => "login",
            Self::Consent => "consent",
            Self::Denied => "denied",
            Self::Error => "error",
        }
    }
}

// === impl CheckedRequest ===

impl CheckedRequest {
    /// Returns the request without a decision, for the `tx` of a page that comes before the decision of the user.
    pub(super) fn without_decision(&self) -> CarriedRequest {
        CarriedRequest { shown: None, ..self.carried.clone() }
    }
}

#[cfg(test)]
mod tests {
    use crate::domain::redirect::choose_target;

    use super::*;

    #[test]
    fn the_host_of_the_redirect_url_is_shown() {
        for (url, host) in [
            ("https://grafana.example.com:8443/callback?a=b", "grafana.example.com"),
            ("http://127.0.0.1:51004/done", "127.0.0.1"),
            ("http://[::1]/done", "[::1]"),
            ("com.example.app:/done", "com.example.app"),
            ("com.example.app://done", "com.example.app"),
        ] {
            let target = choose_target(&[url.parse().unwrap()], None).unwrap().unwrap();
            assert_eq!(shown_host(&target), host, "{url}");
        }
    }
}
