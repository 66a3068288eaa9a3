//! One request for a page: the values that the browser sent, and the responses that a page can return.

use std::sync::Arc;

use http::{HeaderName, HeaderValue, Method, StatusCode, header::ACCEPT_LANGUAGE};
use url::form_urlencoded;

use super::{brandings::AppBranding, checks, form::Form, responses, routes::PageRoute, shared_pages::SharedPages};
use crate::{
    domain::{
        app::App,
        authentication::AuthenticatedSession,
        call::Call,
        email::Email,
        openid::authorization_request::RequestParameters,
        pages::{
            self, AccountPage, BrowserId, BrowserSessionTimes, PagesUrl, SessionCookie, SessionCookieError, Target,
            Transaction, csrf_token, is_valid_csrf_token, is_valid_user_token, open_address, seal_address,
            settings::PagesSettings, user_token,
        },
        sessions::UNKNOWN_KEY_RETRY,
        user::UserId,
    },
    http::{
        Ports,
        cookies::{CookieScheme, SentPageCookies},
        error::{ErrorCode, Problem, ReportedProblem},
        parameters::Parameters,
        request::{InboundRequest, require_few_parameters},
        response::Response,
    },
    pages::{
        Branding, PageContext, PageError, PageTexts, ProviderButton, choose_language,
        views::{ErrorPage, FormPostPage, View},
    },
    state::State,
};

/// A header of a response.
pub(super) type Header = (HeaderName, HeaderValue);

/// A request for a page. Its response functions add `own_cookies` to the response.
pub(super) struct Page<'a, S> {
    pub(super) state: &'a State<S>,
    pub(super) app: &'a App,
    pub(super) settings: &'a PagesSettings,
    pub(super) route: PageRoute,
    pub(super) request: &'a InboundRequest,
    pub(super) url: PagesUrl,
    pub(super) branding: Arc<Branding>,
    shared_pages: Arc<SharedPages>,
    pub(super) texts: PageTexts,
    pub(super) cookies: CookieScheme,
    pub(super) sent: SentPageCookies<'a>,
    pub(super) browser: BrowserId,
    query: Parameters<'a>,
    /// Why the query cannot be parsed.
    query_problem: Option<Problem>,
    csrf: String,
    tx: Option<OpenedTransaction>,
    /// The cookies that every response to this request sets.
    own_cookies: Vec<Header>,
}

/// The transaction of a request, encrypted (`text`, the `tx`) and decrypted.
struct OpenedTransaction {
    text: String,
    transaction: Transaction,
}

/// Encodes the parameters of a query, with the `?`. Empty if there are none.
pub(super) fn encode_query<'q>(parameters: impl IntoIterator<Item = (&'q str, &'q str)>) -> String {
    let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(parameters).finish();
    if query.is_empty() { query } else { format!("?{query}") }
}

fn parse_query(query: &str) -> Result<Parameters<'_>, Problem> {
    require_few_parameters(query)?;
    Parameters::parse(query)
}

impl<'a, S: Ports> Page<'a, S> {
    /// Reads the query and the cookies. A query that cannot be parsed counts as empty, and [`Self::check`] returns the
    /// error.
    pub(super) fn new(
        state: &'a State<S>,
        app: &'a App,
        settings: &'a PagesSettings,
        route: PageRoute,
        request: &'a InboundRequest,
        url: PagesUrl,
        AppBranding { branding, shared_pages }: AppBranding,
    ) -> Self {
        let cookies = CookieScheme::for_base_url(&state.settings.base_url);
        let sent = cookies.sent_to_pages(&request.headers);
        let (query, query_problem) = match parse_query(request.uri.query().unwrap_or_default()) {
            Ok(query) => (query, None),
            Err(problem) => (Parameters::default(), Some(problem)),
        };
        let requested = query.get_once("lang").ok().flatten();
        let accepted = accepted_languages(request);
        let language = choose_language(&settings.languages, requested.into_iter().chain(sent.language()), accepted);
        let mut own_cookies = Vec::new();
        if requested == Some(language.as_str()) {
            own_cookies.extend(cookies.set_language(language.as_str()));
        }
        let browser = sent.browser().cloned().unwrap_or_else(|| BrowserId::generate(&state.env));
        // Browsers send no `SameSite=Lax` cookie with a form from another site. If the response set a new browser
        // cookie, that site could make every open form of the user invalid.
        if sent.browser().is_none() && request.method != Method::POST {
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
            shared_pages,
            texts,
            cookies,
            sent,
            browser,
            query,
            query_problem,
            csrf,
            tx: None,
            own_cookies,
        }
    }

    // === checks ===

    /// Checks the method, the body, the query, the origin, `csrf` and `tx`, in this order (specification: Hosted pages,
    /// Requests). Returns the form of a POST. Two pages also accept a POST from another site. Such a POST changes
    /// nothing, and has neither `csrf` nor our origin. The browser sends no cookies with such a POST, so it looks like
    /// a request from a new browser. Therefore the response sets no cookies.
    pub(super) fn check(&mut self, form: Result<Option<Form>, Problem>) -> Result<Option<Form>, Problem> {
        if !self.route.accepts(&self.request.method) {
            return Err(Problem::method_not_allowed(self.route.allow()));
        }
        let can_be_cross_site = self.can_be_cross_site(&form);
        if can_be_cross_site {
            self.own_cookies.clear();
        }
        let form = form?;
        if let Some(problem) = self.query_problem.take() {
            return Err(problem);
        }
        if let Some(form) = form.as_ref().filter(|_| !can_be_cross_site) {
            checks::check_origin(&self.request.headers, &self.url)?;
            let browser = self.sent.browser().ok_or_else(Problem::invalid_state)?;
            if !is_valid_csrf_token(self.app, browser, form.text("csrf")) {
                return Err(Problem::invalid_state());
            }
        }
        let text = match &form {
            Some(_) if can_be_cross_site => None,
            Some(form) => form.get("tx"),
            None => self.query("tx")?,
        };
        let opened =
            text.map(|text| self.open_sent_transaction(text).ok_or_else(Problem::invalid_state)).transpose()?;
        self.tx = opened;
        self.apply_ui_locales(form.as_ref());
        Ok(form)
    }

    /// Whether another site can send this POST (specification: Authorization, Requests from other sites).
    fn can_be_cross_site(&self, form: &Result<Option<Form>, Problem>) -> bool {
        self.request.method == Method::POST
            && match self.route {
                PageRoute::Authorize => true,
                // In an App without clients, no other site can ask for a logout.
                PageRoute::Logout if !self.app.has_clients() => false,
                PageRoute::Logout => match form {
                    Ok(Some(form)) => form.get("csrf").is_none(),
                    Ok(None) => false,
                    // The caller refuses the malformed form.
                    Err(_) => true,
                },
                _ => false,
            }
    }

    /// Decrypts the `tx` of this request. Pages that accept a POST from another site also accept a `tx` that is not
    /// bound to a browser.
    fn open_sent_transaction(&self, text: &str) -> Option<OpenedTransaction> {
        self.open_transaction(text).or_else(|| {
            let transaction = Transaction::open_unbound(self.app, text, self.state.env.now());
            let transaction = transaction.filter(|transaction| match (&transaction.target, self.route) {
                (Target::Authorize(_), PageRoute::Authorize) | (Target::Logout(_), PageRoute::Logout) => true,
                (Target::Authorize(_) | Target::Logout(_) | Target::Account(_), _) => false,
            })?;
            Some(OpenedTransaction { text: text.to_owned(), transaction })
        })
    }

    /// Chooses the language again, if the client requested languages (OpenID Connect Core 1.0, 3.1.2.1).
    fn apply_ui_locales(&mut self, form: Option<&Form>) {
        let of_client = match (&self.tx, self.route) {
            (Some(tx), _) => {
                request_parameters(&tx.transaction).and_then(|parameters| parameters.get("ui_locales").ok())
            }
            (None, PageRoute::Authorize | PageRoute::Logout) if self.app.has_clients() => match form {
                Some(form) => form.parameters().get("ui_locales").ok(),
                None => self.query.get_once("ui_locales").ok(),
            },
            (None, _) => None,
        };
        let Some(ui_locales) = of_client.flatten() else { return };
        let requested = self.query.get_once("lang").ok().flatten();
        let preferences = requested.into_iter().chain([ui_locales]).chain(self.sent.language());
        let language = choose_language(&self.settings.languages, preferences, accepted_languages(self.request));
        self.texts = PageTexts::new(language, self.settings.own_texts(language));
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

    /// A parameter of the query, which can occur only once. An empty parameter counts as missing, as in a form.
    pub(super) fn query(&self, name: &'static str) -> Result<Option<&str>, Problem> {
        Ok(self.query.get_once(name)?.filter(|value| !value.is_empty()))
    }

    /// All parameters of the query.
    pub(super) fn query_pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.query.pairs()
    }

    /// The decrypted `tx` of the request.
    pub(super) fn transaction(&self) -> Option<&Transaction> {
        self.tx.as_ref().map(|tx| &tx.transaction)
    }

    /// The email address that a client suggests. Can be any text.
    pub(super) fn login_hint(&self) -> &str {
        let parameters = self.transaction().and_then(request_parameters);
        parameters.and_then(|parameters| parameters.get("login_hint").ok().flatten()).unwrap_or_default()
    }

    /// The `tx` of the request.
    pub(super) fn tx(&self) -> Option<&str> {
        self.tx.as_ref().map(|tx| tx.text.as_str())
    }

    /// The target of the `tx`, as a path below the App, with its query. `None` without a `tx`.
    pub(super) fn target(&self) -> Option<String> {
        self.tx.as_ref().map(OpenedTransaction::path)
    }

    /// The target of the `tx` in `text`. `None` if the `tx` has expired, or belongs to another App or browser.
    pub(super) fn target_of(&self, text: &str) -> Option<String> {
        self.open_transaction(text).map(|tx| tx.path())
    }

    /// Adds a login to a `tx`, and returns the new `tx`, for the redirect after the login. `cookie` is the cookie of
    /// the new session. Returns `None` if the `tx` has expired.
    pub(super) fn tx_after_login(&self, text: &str, cookie: &SessionCookie) -> Option<String> {
        let OpenedTransaction { text, transaction } = self.open_transaction(text)?;
        let with_login = transaction.after_login(cookie);
        // If a server of the previous version made the `tx`, the login may not fit into it. The `tx` then stays without
        // the login, and the user must log in, or decide about the access of the client, once more.
        Some(with_login.seal(&self.state.env, self.app, &self.browser).unwrap_or(text))
    }

    /// The session cookie of the request, if the cookie is valid. Its session may have ended nevertheless.
    pub(super) fn session_cookie(&self) -> Result<Option<SessionCookie>, Problem> {
        let Some(text) = self.sent.session(self.app.id()) else { return Ok(None) };
        match SessionCookie::decode(self.app, text, self.state.env.now()) {
            Ok(cookie) => Ok(Some(cookie)),
            Err(SessionCookieError::Invalid) => Ok(None),
            Err(error @ SessionCookieError::UnknownKey) => {
                Err(Problem::unavailable(UNKNOWN_KEY_RETRY).with_cause(error))
            }
        }
    }

    /// The user that a form of this page changes. `None` if the page is not an account page.
    fn form_user(&self) -> Option<UserId> {
        self.route.account_page()?;
        self.session_cookie().ok().flatten().map(|cookie| cookie.user)
    }

    /// Whether the form shows the account of one user, but the browser has since logged in as another user. A form
    /// without the field `user` is accepted, because servers of earlier versions do not write this field.
    pub(super) fn is_form_of_other_user(&self, form: &Form) -> bool {
        match (self.form_user(), form.get("user")) {
            (Some(user), Some(text)) => !is_valid_user_token(self.app, user, text),
            (None, _) | (_, None) => false,
        }
    }

    /// The email address that the previous page encrypted into the parameter `address`. `None` if the parameter is
    /// missing, has expired, or belongs to another App or browser.
    pub(super) fn sent_address(&self) -> Result<Option<Email>, Problem> {
        let Some(text) = self.query("address")? else { return Ok(None) };
        let browser = self.sent.browser();
        Ok(browser.and_then(|browser| open_address(self.app, browser, text, self.state.env.now())))
    }

    /// Encrypts the email address for the parameter `address` of the next page.
    pub(super) fn seal_address(&self, email: &Email) -> String {
        seal_address(&self.state.env, self.app, &self.browser, email)
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
        Ok(self.html(StatusCode::OK, view, None, None))
    }

    /// Like [`Self::show`], with another `tx` in the forms and links of the page.
    pub(super) fn show_with_tx<V: View>(&self, view: &V, tx: &str) -> Result<Response, Problem> {
        Ok(self.render(StatusCode::OK, view, &self.context(None, Some(tx))))
    }

    /// The page with the form that sends an authorization response to a client.
    pub(super) fn form_post(&self, view: &FormPostPage<'_>) -> Response {
        self.render(StatusCode::OK, view, &self.context(None, None))
    }

    /// Like [`Self::show`], with an error that the redirect to this page reported.
    pub(super) fn show_error<V: View>(&self, view: &V, code: ErrorCode) -> Result<Response, Problem> {
        Ok(self.html(StatusCode::OK, view, Some(&PageError::new(code)), None))
    }

    /// Like [`Self::show`], for a page that asks the user to log in again. The login leads back to this page.
    pub(super) fn show_before_login<V: View>(&self, view: &V) -> Result<Response, Problem> {
        let tx = self.transaction_to_here()?;
        Ok(self.html(StatusCode::OK, view, None, Some(&tx)))
    }

    /// Shows the form again, with the error. After an outage, a reached limit or the end of the session, returns the
    /// error instead: the browser then gets an error page or the login page.
    pub(super) fn refuse<V: View>(&self, view: &V, problem: Problem) -> Result<Response, Problem> {
        let can_show_form = problem.refusal_retry_after.is_none()
            && !problem.status.is_server_error()
            && problem.code != ErrorCode::InvalidToken;
        if !can_show_form {
            return Err(problem);
        }
        // The link to a new login needs a `tx` that leads back to this page after the login. The form itself does not
        // need this `tx`.
        let login_tx = match problem.code {
            ErrorCode::ReauthenticationRequired if self.tx.is_none() => Some(self.transaction_to_here()?),
            _ => None,
        };
        let response = self.html(problem.status, view, Some(&PageError::from(&problem)), login_tx.as_deref());
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

    /// A redirect (303) to a page of the App. `path` is below the path of the App, and can have a query.
    pub(super) fn redirect(&self, path: &str, cookies: Vec<Header>) -> Result<Response, Problem> {
        self.redirect_to(&format!("{}/{path}", self.branding.path()), cookies)
    }

    /// Redirects a GET to another page with 302, and a POST with 303. `path` is as in [`Self::redirect`].
    pub(super) fn redirect_to_next(&self, path: &str) -> Result<Response, Problem> {
        let status = if self.request.method == Method::POST { StatusCode::SEE_OTHER } else { StatusCode::FOUND };
        self.redirect_with(status, &format!("{}/{path}", self.branding.path()), Vec::new())
    }

    /// A redirect (303) to a URL.
    pub(super) fn redirect_to(&self, url: &str, cookies: Vec<Header>) -> Result<Response, Problem> {
        self.redirect_with(StatusCode::SEE_OTHER, url, cookies)
    }

    fn redirect_with(&self, status: StatusCode, url: &str, cookies: Vec<Header>) -> Result<Response, Problem> {
        let mut response = responses::redirect(status, url)?;
        self.add_cookies(&mut response);
        for (name, value) in cookies {
            response.headers_mut().append(name, value);
        }
        Ok(response)
    }

    /// A redirect (303) to the login page, which leads back to this page.
    pub(super) fn log_in_first(&self) -> Result<Response, Problem> {
        let tx = self.transaction_to_here()?;
        let ended = self.sent.session(self.app.id()).map(|_| self.cookies.clear_session(self.app.id()));
        self.redirect(&format!("login{}", encode_query([("tx", tx.as_str())])), ended.into_iter().collect())
    }

    /// A redirect (303) to the target of `tx` or, without a valid `tx`, to the account. `cookie` is the cookie of the
    /// new session.
    pub(super) fn redirect_after_login(
        &self,
        tx: Option<&str>,
        cookie: &SessionCookie,
        cookies: Vec<Header>,
    ) -> Result<Response, Problem> {
        let target = tx.and_then(|tx| self.tx_after_login(tx, cookie)).and_then(|tx| self.target_of(&tx));
        self.redirect_after_login_to(target.as_deref().unwrap_or(AccountPage::Overview.path()), cookie, cookies)
    }

    /// A redirect (303) to a page after a login, with the cookie of the new session. `path` is as in
    /// [`Self::redirect`].
    pub(super) fn redirect_after_login_to(
        &self,
        path: &str,
        cookie: &SessionCookie,
        mut cookies: Vec<Header>,
    ) -> Result<Response, Problem> {
        cookies.extend(self.cookies.set_session(&self.sent, self.app, cookie));
        self.redirect(path, cookies)
    }

    /// Renders a page. `login_tx` is the `tx` in the link to a new login, if it differs from the `tx` of the request.
    fn html<V: View>(
        &self,
        status: StatusCode,
        view: &V,
        error: Option<&PageError>,
        login_tx: Option<&str>,
    ) -> Response {
        let user = self.form_user().map(|user| user_token(self.app, user));
        let context = PageContext { user: user.as_deref(), login_tx, ..self.context(error, self.tx()) };
        self.render(status, view, &context)
    }

    fn render<V: View>(&self, status: StatusCode, view: &V, context: &PageContext<'_>) -> Response {
        let mut response = responses::html(status, self.shared_pages.render(view, context), view.script().is_some());
        self.add_cookies(&mut response);
        response
    }

    fn context<'c>(&'c self, error: Option<&'c PageError>, tx: Option<&'c str>) -> PageContext<'c> {
        PageContext {
            branding: &self.branding,
            texts: &self.texts,
            error,
            csrf: &self.csrf,
            user: None,
            tx,
            login_tx: None,
            request_id: &self.request.id,
        }
    }

    fn add_cookies(&self, response: &mut Response) {
        for (name, value) in &self.own_cookies {
            response.headers_mut().append(name, value.clone());
        }
    }

    /// A `tx` that leads back to this page after a login. If this page is not an account page, the `tx` leads to the
    /// account.
    fn transaction_to_here(&self) -> Result<String, Problem> {
        let page = self.route.account_page().unwrap_or(AccountPage::Overview);
        let transaction = Transaction::start(&self.state.env, Target::Account(page));
        let sealed = transaction.seal(&self.state.env, self.app, &self.browser);
        sealed.map_err(|error| Problem::server_error().with_cause(error))
    }
}

// === impl OpenedTransaction ===

impl OpenedTransaction {
    /// The target of the transaction, as a path below the path of the App, with its query.
    fn path(&self) -> String {
        let with_tx = |page: PageRoute| format!("{}{}", page.path(), encode_query([("tx", self.text.as_str())]));
        match &self.transaction.target {
            Target::Account(page) => page.path().to_owned(),
            Target::Authorize(_) => with_tx(PageRoute::Authorize),
            Target::Logout(_) => with_tx(PageRoute::Logout),
        }
    }
}

/// The parameters that a client sent. `None` if no client started the transaction.
fn request_parameters(transaction: &Transaction) -> Option<&RequestParameters> {
    match &transaction.target {
        Target::Account(_) => None,
        Target::Authorize(carried) => Some(&carried.parameters),
        Target::Logout(parameters) => Some(parameters),
    }
}

fn accepted_languages(request: &InboundRequest) -> Option<&str> {
    request.headers.get(ACCEPT_LANGUAGE).and_then(|field| field.to_str().ok())
}

/// Adds the headers of the error, and lets the pipeline log it.
pub(super) fn report(mut response: Response, problem: Problem) -> Response {
    for (name, value) in &problem.headers {
        response.headers_mut().append(name, value.clone());
    }
    response.extensions_mut().insert(ReportedProblem(Arc::new(problem)));
    response
}
