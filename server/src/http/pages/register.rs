//! `register`.

use latchkey_crds::rendered::SignUp;

use super::{
    form::Form,
    page::{Page, encode_query},
};
use crate::{
    domain::{
        email_account::{self, RegisterError, RegisterInput},
        flow::FlowId,
        pages::Registration,
    },
    http::{
        Ports,
        error::Problem,
        handlers::email::register::{RegisterRequest, register_problem},
        response::Response,
    },
    pages::views::RegisterPage,
};

pub(super) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    require_open(page)?;
    page.show(&RegisterPage { name: "", email: page.login_hint(), providers: page.providers() })
}

/// With enumeration protection, the response is the same for every address: the same notice, cookies and form.
pub(super) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    require_open(page)?;
    let view = RegisterPage { name: form.text("name"), email: form.text("email"), providers: page.providers() };
    let RegisterRequest { name, email, password } = match form.read() {
        Ok(request) => request,
        Err(problem) => return page.refuse(&view, problem),
    };
    let input = RegisterInput { email: email.clone(), name, password };
    let registered = match email_account::register(page.call(), input).await {
        Ok(registered) => registered,
        Err(error) => return page.refuse(&view, register_problem(error)),
    };
    let env = &page.state.env;
    let registration = Registration::start(page.call(), &email, page.tx(), registered.expires_at).await;
    let sealed = registration.seal(env, page.app, &page.browser);
    let cookies = page.cookies.transactions().add(
        page.sent.transactions(),
        &FlowId::generate(env),
        env.now(),
        &sealed,
        registered.expires_in,
    );
    page.redirect(&format!("confirm{}", encode_query(page.tx().map(|tx| ("tx", tx)))), cookies)
}

fn require_open<S: Ports>(page: &Page<'_, S>) -> Result<(), Problem> {
    match page.app.doc.sign_up {
        SignUp::Closed => Err(register_problem(RegisterError::Closed)),
        SignUp::Open => Ok(()),
    }
}
