//! Decides about an authorization request from a browser (specification: Authorization, Decision).

use time::OffsetDateTime;

use super::{
    authorization_request::{AuthorizationError, AuthorizationErrorCode, AuthorizationRequest},
    code::{Authorization, ClientCode, issue_code},
    consent::{ConsentReason, consent_reason, is_allowed, record_consent},
    par::use_request,
};
use crate::domain::{
    audit::{Detail, EventKind},
    authentication::AuthenticatedSession,
    call::Call,
    error::CommonError,
    groups::user_groups,
    pages::{ShownConsent, TransactionLogin},
    ports::{AcquireError, AuditLog, ClientCodes, Consents, Groups, PushedRequests, RateLimits, StoreError},
    rate_limits,
};

/// A checked request, and the browser that sent it.
#[derive(Clone, Copy)]
pub struct AuthorizationAttempt<'a> {
    pub request: &'a AuthorizationRequest,
    /// The `request_uri`, if the request was pushed.
    pub request_uri: Option<&'a str>,
    /// The login that the user made for this request (see [`TransactionLogin`]). It counts only while it is the last
    /// login of the session.
    pub login: Option<TransactionLogin>,
    /// The account and the scopes that the consent page showed, if the user has allowed the access.
    pub allowed: Option<&'a ShownConsent>,
}

/// The next step of the request.
#[derive(Debug, PartialEq, Eq)]
pub enum AuthorizationOutcome {
    LoginNeeded,
    ConsentNeeded,
    /// The error is sent to the client.
    Refused(AuthorizationError),
    /// A code was issued for this pushed request before.
    RequestUsed,
    /// The code is sent to the client.
    Issued(ClientCode),
}

/// The next step of the request, before a code is issued.
#[derive(Clone, Copy, Debug)]
pub enum AuthorizationStep<'a> {
    LoginNeeded,
    /// The user of this session must decide whether to allow the client the access.
    ConsentNeeded(&'a AuthenticatedSession),
    Refused(AuthorizationError),
    /// A code can be issued in this session. `given`: whether the user has just given consent.
    Ready {
        session: &'a AuthenticatedSession,
        given: bool,
    },
}

/// Decides whether the user must log in, whether the user must give consent, or whether a code can be issued. `session`
/// is the live session of the browser.
pub async fn decide<'a, S: Groups + Consents>(
    call: Call<'_, S>,
    attempt: AuthorizationAttempt<'a>,
    session: Option<&'a AuthenticatedSession>,
) -> Result<AuthorizationStep<'a>, StoreError> {
    use AuthorizationErrorCode as Code;
    let AuthorizationAttempt { request, allowed, .. } = attempt;
    let is_silent = request.prompts.none;
    let Some(session) = session.filter(|session| !needs_login(attempt, session, call.env.now())) else {
        let refused = Code::LoginRequired.because("the user must log in");
        return Ok(if is_silent { AuthorizationStep::Refused(refused) } else { AuthorizationStep::LoginNeeded });
    };
    if !is_admitted(call, request, session).await? {
        let refused = Code::AccessDenied.because("this user cannot use the client");
        return Ok(AuthorizationStep::Refused(refused));
    }
    let reason = consent_reason(call, request, session, has_just_logged_in(attempt, session)).await?;
    Ok(match reason {
        None => AuthorizationStep::Ready { session, given: false },
        Some(_) if is_allowed(allowed, request, session) => AuthorizationStep::Ready { session, given: true },
        Some(ConsentReason::Consent) if is_silent => {
            AuthorizationStep::Refused(Code::ConsentRequired.because("the user must allow the access"))
        }
        Some(ConsentReason::Interaction) if is_silent => {
            AuthorizationStep::Refused(Code::InteractionRequired.because("the user must confirm the login"))
        }
        Some(ConsentReason::Consent | ConsentReason::Interaction) => AuthorizationStep::ConsentNeeded(session),
    })
}

/// Like [`decide`], but also reads the session, and issues the code if the decision allows it. `session` is `None` if
/// the browser has no cookie of a session. Acquires the rate limit on codes before the decision, unless it is already
/// certain that the user must log in. Releases the limit if no code is issued. If the limit is reached, nothing is
/// stored.
pub async fn authorize<S>(
    call: Call<'_, S>,
    attempt: AuthorizationAttempt<'_>,
    session: Option<impl Future<Output = Result<Option<AuthenticatedSession>, StoreError>>>,
) -> Result<AuthorizationOutcome, CommonError>
where
    S: Groups + Consents + RateLimits + ClientCodes + PushedRequests + AuditLog,
{
    // If `prompt=login` demands a login that the user has not made yet, the user must log in, whatever the session is.
    let is_login_certain = attempt.request.prompts.login && attempt.login.is_none();
    let Some(session) = session.filter(|_| !is_login_certain) else {
        return decide_and_issue(call, attempt, None, None).await;
    };
    // The session is read while the limit counts the code, which saves the browser the time of one round trip to Redis.
    let limits = rate_limits::authorizations(call.app, call.client_address());
    let (session, permit) = tokio::join!(session, call.stores.acquire(call.app_id(), limits));
    let (permit, limited) = match permit {
        Ok(permit) => (Some(permit), None),
        Err(error) => (None, Some(error)),
    };
    let outcome = match session {
        Ok(session) => decide_and_issue(call, attempt, session.as_ref(), limited).await,
        Err(error) => Err(error.into()),
    };
    if let Some(permit) = permit
        && !matches!(outcome, Ok(AuthorizationOutcome::Issued(_)))
    {
        call.stores.release(call.app_id(), permit).await;
    }
    outcome
}

/// Issues the code if the decision and the rate limit allow it. `limited`: the error to return if the decision allows
/// the code but the rate limit does not.
async fn decide_and_issue<S>(
    call: Call<'_, S>,
    attempt: AuthorizationAttempt<'_>,
    session: Option<&AuthenticatedSession>,
    limited: Option<AcquireError>,
) -> Result<AuthorizationOutcome, CommonError>
where
    S: Groups + Consents + ClientCodes + PushedRequests + AuditLog,
{
    match decide(call, attempt, session).await? {
        AuthorizationStep::LoginNeeded => Ok(AuthorizationOutcome::LoginNeeded),
        AuthorizationStep::ConsentNeeded(_) => Ok(AuthorizationOutcome::ConsentNeeded),
        AuthorizationStep::Refused(error) => Ok(AuthorizationOutcome::Refused(error)),
        AuthorizationStep::Ready { session, given } => match limited {
            Some(error) => Err(error.into()),
            None => issue(call, attempt, session, given).await,
        },
    }
}

async fn issue<S>(
    call: Call<'_, S>,
    attempt: AuthorizationAttempt<'_>,
    session: &AuthenticatedSession,
    given: bool,
) -> Result<AuthorizationOutcome, CommonError>
where
    S: Consents + ClientCodes + PushedRequests + AuditLog,
{
    let request = attempt.request;
    // The consent is stored first: a code without a consent would be worse than a consent without a code.
    if given && !record_consent(call, request, session).await? {
        return Ok(AuthorizationOutcome::LoginNeeded);
    }
    // The pushed request is used up before the code is stored, so that two concurrent requests never both get a code.
    if let Some(request_uri) = attempt.request_uri
        && !use_request(call, &request.client, request_uri).await?
    {
        return Ok(AuthorizationOutcome::RequestUsed);
    }
    let code = issue_code(call, authorization(request, session)).await?;
    let detail = Detail::from_client(&request.client.client_id);
    call.stores.record_later(call.app_id(), session.event(call, EventKind::ClientAuthorized).with_detail(detail));
    Ok(AuthorizationOutcome::Issued(code))
}

fn authorization(request: &AuthorizationRequest, session: &AuthenticatedSession) -> Authorization {
    Authorization {
        client_uid: request.client.uid.to_string(),
        client_id: request.client.client_id.as_str().to_owned(),
        redirect_uri: request.reply.target.as_str().to_owned(),
        user: session.user_id(),
        browser_session: session.session.id,
        epoch: session.session.epoch,
        auth_time: session.session.auth_time.unix_timestamp(),
        amr: session.session.amr,
        scopes: request.scopes,
        nonce: request.nonce.clone(),
        code_challenge: request.code_challenge.clone(),
        claims: request.claims.clone(),
    }
}

/// Whether the user must log in although the browser has a session. A login that the user made for this request is
/// enough, unless the request names another user. `max_age=0` is the same as `prompt=login` (OpenID Connect Core 1.0,
/// 3.1.2.1).
fn needs_login(attempt: AuthorizationAttempt<'_>, session: &AuthenticatedSession, now: OffsetDateTime) -> bool {
    let request = attempt.request;
    if !request.allows_subject(session.user_id()) {
        return true;
    }
    let age = now.unix_timestamp().saturating_sub(session.session.auth_time.unix_timestamp());
    let is_too_old = request.max_age.is_some_and(|max_age| max_age == 0 || age > i64::from(max_age));
    (request.prompts.login || is_too_old) && !has_just_logged_in(attempt, session)
}

/// Whether the last login of the session was made for this request. The time of the login alone does not show this: the
/// user can have logged in for another purpose in the meantime.
fn has_just_logged_in(attempt: AuthorizationAttempt<'_>, session: &AuthenticatedSession) -> bool {
    attempt.login.is_some_and(|login| login.is_of(&session.session))
}

/// Whether the user has a verified email address, if the App requires one, and is in an allowed group, if the client
/// has a list of allowed groups.
async fn is_admitted<S: Groups>(
    call: Call<'_, S>,
    request: &AuthorizationRequest,
    session: &AuthenticatedSession,
) -> Result<bool, StoreError> {
    if call.app.doc.require_verified_email && !session.profile.email_verified {
        return Ok(false);
    }
    if request.client.allowed_groups.is_empty() {
        return Ok(true);
    }
    let groups = user_groups(call, session.user_id()).await?;
    Ok(request.client.allows(&groups))
}

#[cfg(test)]
mod tests;
