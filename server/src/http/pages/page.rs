//! One request for a page: what the browser sent, and the responses that a page can give.

use std::sync::Arc;

use http::{HeaderName, HeaderValue, StatusCode, header::ACCEPT_LANGUAGE};
use url::form_urlencoded;

use super::{checks, form::Form, responses, routes::PageRoute};
use crate::{
    domain::{
        app::App,
        authentication::AuthenticatedSession,
        call::Call,
        pages::{
            self, AccountPage, BrowserId, BrowserSessionTimes, PagesUrl, SessionCookie, SessionCookieError, Target,
            Transaction, csrf_token, is_valid_csrf_token, settings::PagesSettings,
        },
        sessions::UNKNOWN_KEY_RETRY,
    },
    http::{
        Ports,
        cookies::{PageCookies, SentPageCookies},
        error::{ErrorCode, Problem, ReportedProblem},
        parameters::Parameters,
        request::InboundRequest,
        response::Response,
    },
    pages::{
        Branding, PageContext, PageError, PageTexts, ProviderButton, choose_language, render,
        views::{ErrorPage, View},
    },
    state::State,
};

/// A header of a response.
pub(super) type Header = (HeaderName, HeaderValue);

/// A request for a page. The response functions add the browser's cookies.
pub(super) struct Page<'a, S> {
    pub(super) state: &'a State<S>,
    pub(super) app: &'a App,
    pub(super) settings: &'a PagesSettings,
    pub(super) route: PageRoute,
    pub(super) request: &'a InboundRequest,
    pub(super) url: PagesUrl,
    pub(super) branding: Arc<Branding>,
    pub(super) texts: PageTexts,
    pub(super) cookies: PageCookies,
    pub(super) sent: SentPageCookies<'a>,
    pub(super) browser: BrowserId,
    query: Parameters<'a>,
    csrf: String,
    tx: Option<OpenedTransaction>,
    /// The cookies of every response.
    own_cookies: Vec<Header>,
}

/// The transaction of a request, which opened.
struct OpenedTransaction {
    text: String,
    transaction: Transaction,
}

/// Encodes the parameters of a query, with the `?`. Empty if there are none.
pub(super) fn encode_query<'q>(parameters: impl IntoIterator<Item = (&'q str, &'q str)>) -> String {
    let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(parameters).finish();
    if query.is_empty() { query } else { format!("?{query}") }
}

fn invalid_state() -> Problem {
    Problem::new(ErrorCode::InvalidState, "the form or link is of another browser, or too old; start again")
}

impl<'a, S: Ports> Page<'a, S> {
    /// Reads what the browser sent. A query that cannot be parsed is empty here; [`Self::check`] reports it.
    pub(super) fn new(
        state: &'a State<S>,
        app: &'a App,
        settings: &'a PagesSettings,
        route: PageRoute,
        request: &'a InboundRequest,
        url: PagesUrl,
        branding: Arc<Branding>,
    ) -> Self {
        let cookies = PageCookies::for_base_url(&state.settings.base_url);
        let sent = cookies.from_request(&request.headers);
        let query = Parameters::parse(request.uri.query().unwrap_or_default()).unwrap_or_default();
        let requested = query.get_once("lang").ok().flatten();
        let accepted = request.headers.get(ACCEPT_LANGUAGE).and_then(|field| field.to_str().ok());
        let language = choose_language(&settings.languages, requested.into_iter().chain(sent.language()), accepted);
        let mut own_cookies = Vec::new();
        if requested == Some(language.as_str()) {
            own_cookies.extend(cookies.set_language(language.as_str()));
        }
        let browser = sent.browser().cloned().unwrap_or_else(|| BrowserId::generate(&state.env));
        if sent.browser().is_none() {
            own_cookies.push(cookies.set_browser(&browser));
        }
        let csrf = csrf_token(app, &browser);
        let texts = PageTexts::new(language, settings.own_texts(language));
        Self {
            state,
            app,
            settings,
            route,
            request,
            url,
            branding,
            texts,
            cookies,
            sent,
            browser,
            query,
            csrf,
            tx: None,
            own_cookies,
        }
    }

    // === checks ===

    /// Checks the method, the body, the origin, `csrf` and `tx`, in this order (specification: Hosted pages, Requests).
    /// Returns the form of a POST.
    pub(super) fn check(&mut self, form: Result<Option<Form>, Problem>) -> Result<Option<Form>, Problem> {
        if !self.route.accepts(&self.request.method) {
            return Err(Problem::method_not_allowed(self.route.allow()));
        }
        let form = form?;
        Parameters::parse(self.request.uri.query().unwrap_or_default())?;
        if let Some(form) = &form {
            checks::check_origin(&self.request.headers, &self.url)?;
            let browser = self.sent.browser().ok_or_else(invalid_state)?;
            if !is_valid_csrf_token(self.app, browser, form.text("csrf")) {
                return Err(invalid_state());
            }
        }
        let text = match &form {
            Some(form) => form.get("tx"),
            None => self.query("tx")?,
        };
        let opened = text.map(|text| self.open_transaction(text).ok_or_else(invalid_state)).transpose()?;
        self.tx = opened;
        Ok(form)
    }

    fn open_transaction(&self, text: &str) -> Option<OpenedTransaction> {
        let browser = self.sent.browser()?;
        let transaction = Transaction::open(self.app, browser, text, self.state.env.now())?;
        Some(OpenedTransaction { text: text.to_owned(), transaction })
    }

    // === reading ===

    pub(super) fn call(&self) -> Call<'a, S> {
        self.state.call(self.app, &self.request.client)
    }

    /// A parameter of the query, which can occur only once.
    pub(super) fn query(&self, name: &'static str) -> Result<Option<&str>, Problem> {
        Ok(self.query.get_once(name)?)
    }

    /// The `tx` of the request.
    pub(super) fn tx(&self) -> Option<&str> {
        self.tx.as_ref().map(|tx| tx.text.as_str())
    }

    /// The target of the `tx`, as a path below the App. `None` without a `tx`.
    pub(super) fn target(&self) -> Option<&'static str> {
        self.tx.as_ref().map(|tx| target_path(&tx.transaction))
    }

    /// The target of a `tx` from a cookie. `None` if it has expired.
    pub(super) fn target_of(&self, text: &str) -> Option<&'static str> {
        self.open_transaction(text).map(|tx| target_path(&tx.transaction))
    }

    /// The valid session cookie of the request. Its session can have ended.
    pub(super) fn session_cookie(&self) -> Result<Option<SessionCookie>, Problem> {
        let Some(text) = self.sent.session(self.app.id()) else { return Ok(None) };
        match SessionCookie::decode(self.app, text) {
            Ok(cookie) => Ok(Some(cookie)),
            Err(SessionCookieError::Invalid) => Ok(None),
            Err(error @ SessionCookieError::UnknownKey) => {
                Err(Problem::unavailable(UNKNOWN_KEY_RETRY).with_cause(error))
            }
        }
    }

    /// The live session of the browser.
    pub(super) async fn session(&self) -> Result<Option<AuthenticatedSession>, Problem> {
        match self.session_cookie()? {
            Some(cookie) => Ok(pages::find_session(self.call(), &cookie).await?),
            None => Ok(None),
        }
    }

    pub(super) fn session_times(&self) -> BrowserSessionTimes {
        self.settings.session
    }

    /// The buttons of the App's providers.
    pub(super) fn providers(&self) -> Vec<ProviderButton<'a>> {
        let providers = self.app.doc.providers.iter();
        providers.map(|provider| ProviderButton::new(&provider.name, &provider.settings.preset)).collect()
    }

    // === responses ===

    pub(super) fn show<V: View>(&self, view: &V) -> Result<Response, Problem> {
        Ok(self.html(StatusCode::OK, view, None, self.tx()))
    }

    /// Like [`Self::show`], with an error that came with a redirect.
    pub(super) fn show_error<V: View>(&self, view: &V, code: ErrorCode) -> Result<Response, Problem> {
        Ok(self.html(StatusCode::OK, view, Some(&PageError::new(code)), self.tx()))
    }

    /// Like [`Self::show`], for a page that asks for a new login and then continues here.
    pub(super) fn show_before_login<V: View>(&self, view: &V) -> Result<Response, Problem> {
        let tx = self.transaction_to_here()?;
        Ok(self.html(StatusCode::OK, view, None, Some(&tx)))
    }

    /// The form again, with the error. An outage, a limit and the end of the session are no refusals of the form: they
    /// get an error page, or the login page.
    pub(super) fn refuse<V: View>(&self, view: &V, problem: Problem) -> Result<Response, Problem> {
        let is_refusal = problem.refusal_retry_after.is_none()
            && !problem.status.is_server_error()
            && problem.code != ErrorCode::InvalidToken;
        if !is_refusal {
            return Err(problem);
        }
        // A page that asks for a new login needs a `tx`, with which the login comes back.
        let own_tx = match problem.code {
            ErrorCode::ReauthenticationRequired if self.tx.is_none() => Some(self.transaction_to_here()?),
            _ => None,
        };
        let tx = self.tx().or(own_tx.as_deref());
        let response = self.html(problem.status, view, Some(&PageError::from(&problem)), tx);
        Ok(report(response, problem))
    }

    /// The error page or, if the session has ended, a redirect to the login page.
    pub(super) fn fail(&self, problem: Problem) -> Response {
        if problem.code == ErrorCode::InvalidToken
            && self.route.account_page().is_some()
            && let Ok(redirect) = self.log_in_first()
        {
            return redirect;
        }
        let view = ErrorPage { code: problem.code };
        let response = self.html(problem.status, &view, Some(&PageError::from(&problem)), None);
        report(response, problem)
    }

    /// 303 to a page of the App. `path` is below the path of the App, and can have a query.
    pub(super) fn redirect(&self, path: &str, cookies: Vec<Header>) -> Result<Response, Problem> {
        self.redirect_to(&format!("{}/{path}", self.branding.path()), cookies)
    }

    /// 303 to a URL.
    pub(super) fn redirect_to(&self, url: &str, cookies: Vec<Header>) -> Result<Response, Problem> {
        let mut response = responses::redirect(StatusCode::SEE_OTHER, url)?;
        self.add_cookies(&mut response);
        for (name, value) in cookies {
            response.headers_mut().append(name, value);
        }
        Ok(response)
    }

    /// 303 to the login page, which leads back to this page.
    pub(super) fn log_in_first(&self) -> Result<Response, Problem> {
        let tx = self.transaction_to_here()?;
        let ended = self.sent.session(self.app.id()).map(|_| self.cookies.clear_session(self.app.id()));
        self.redirect(&format!("login{}", encode_query([("tx", tx.as_str())])), ended.into_iter().collect())
    }

    /// 303 to where a login leads: the target, otherwise the account. `cookie` is that of the new session.
    pub(super) fn logged_in(
        &self,
        target: Option<&str>,
        cookie: &SessionCookie,
        mut cookies: Vec<Header>,
    ) -> Result<Response, Problem> {
        cookies.extend(self.cookies.set_session(&self.sent, self.app, cookie));
        self.redirect(target.unwrap_or(AccountPage::Overview.path()), cookies)
    }

    fn html<V: View>(&self, status: StatusCode, view: &V, error: Option<&PageError>, tx: Option<&str>) -> Response {
        let context = PageContext {
            branding: &self.branding,
            texts: &self.texts,
            error,
            csrf: &self.csrf,
            tx,
            request_id: &self.request.id,
        };
        let mut response = responses::html(status, render(view, &context));
        self.add_cookies(&mut response);
        response
    }

    fn add_cookies(&self, response: &mut Response) {
        for (name, value) in &self.own_cookies {
            response.headers_mut().append(name, value.clone());
        }
    }

    /// A `tx` that leads to this page, or to the account if this page has no address of its own.
    fn transaction_to_here(&self) -> Result<String, Problem> {
        let page = self.route.account_page().unwrap_or(AccountPage::Overview);
        let transaction = Transaction::start(&self.state.env, Target::Account(page));
        let sealed = transaction.seal(&self.state.env, self.app, &self.browser);
        sealed.map_err(|error| Problem::server_error().with_cause(error))
    }
}

fn target_path(transaction: &Transaction) -> &'static str {
    match transaction.target {
        Target::Account(page) => page.path(),
    }
}

/// Adds the headers of the error, and lets the pipeline log it.
fn report(mut response: Response, problem: Problem) -> Response {
    for (name, value) in &problem.headers {
        response.headers_mut().append(name, value.clone());
    }
    response.extensions_mut().insert(ReportedProblem(Arc::new(problem)));
    response
}
