//! `consent`: asks the user whether the client gets access.

use super::{
    authorize::{self, CheckedRequest, check_request, proceed, refuse, reply_error, seal, shown_host},
    form::Form,
    page::{Page, encode_query},
    routes::PageRoute,
};
use crate::{
    domain::{
        openid::{
            authorization_request::AuthorizationErrorCode,
            authorize::{AuthorizationAttempt, AuthorizationStep, decide},
            consent::{is_program_on_device, shown_consent},
        },
        pages::CarriedRequest,
    },
    http::{Ports, error::Problem, response::Response},
    pages::views::{ConsentPage, ScopeRow},
};

pub(super) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let (carried, requested_at) = authorize::carried_request(page)?;
    let checked = match check_request(page, carried, requested_at) {
        Ok(checked) => checked,
        Err(error) => return refuse(page, error),
    };
    let request = &checked.request;
    let session = page.session().await?;
    let attempt = AuthorizationAttempt {
        request,
        request_uri: checked.carried.request_uri.as_deref(),
        login: checked.carried.login,
        allowed: None,
    };
    let AuthorizationStep::ConsentNeeded(session) = decide(page.call(), attempt, session.as_ref()).await? else {
        return redirect_with_request(page, &checked, PageRoute::Authorize, None);
    };
    let shown = CarriedRequest { shown: Some(shown_consent(request, session)), ..checked.carried.clone() };
    let tx = seal(page, shown, requested_at)?;
    let scopes = request.scopes_for_client().to_string();
    let host = shown_host(&request.reply.target);
    let profile = &session.profile;
    let view = ConsentPage {
        client: &request.client.display_name,
        host: &host,
        on_device: is_program_on_device(request),
        account: profile.email.as_deref().unwrap_or(&profile.name),
        scopes: scopes.split(' ').map(ScopeRow::new).collect(),
    };
    page.show_with_tx(&view, &tx)
}

pub(super) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    let (carried, requested_at) = authorize::carried_request(page)?;
    let allowed = carried.shown.clone();
    let checked = match check_request(page, carried, requested_at) {
        Ok(checked) => checked,
        Err(error) => return refuse(page, error),
    };
    match form.get("decision") {
        Some("allow") => proceed(page, &checked, allowed.as_ref()).await,
        Some("deny") => {
            let denied = AuthorizationErrorCode::AccessDenied.because("the user did not allow the access");
            reply_error(page, &checked.request.reply, &denied)
        }
        Some("switch") => redirect_with_request(page, &checked, PageRoute::Login, Some("other_account")),
        Some(_) | None => Err(Problem::invalid_request("decision must be allow, deny or switch")),
    }
}

/// Redirects to another page. The `tx` in the URL carries the request.
fn redirect_with_request<S: Ports>(
    page: &Page<'_, S>,
    checked: &CheckedRequest,
    route: PageRoute,
    notice: Option<&str>,
) -> Result<Response, Problem> {
    let tx = seal(page, checked.without_decision(), checked.requested_at)?;
    let notice = notice.map(|notice| ("notice", notice));
    let query = encode_query([("tx", tx.as_str())].into_iter().chain(notice));
    page.redirect_to_next(&format!("{}{query}", route.path()))
}
