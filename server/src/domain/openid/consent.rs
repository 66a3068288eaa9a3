//! When a user must decide about the access of a client, and what the user has allowed (specification: Authorization,
//! Consent).

use latchkey_crds::client::Consent;

use super::authorization_request::AuthorizationRequest;
use crate::domain::{
    audit::{Detail, EventKind},
    authentication::AuthenticatedSession,
    call::Call,
    pages::ShownConsent,
    ports::{AuditLog, Consents, NewConsent, StoreError},
};

/// Why the user must decide on the consent page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConsentReason {
    /// The request asks for consent or for a choice of the account, or the setting `consent` of the client requires
    /// consent.
    Consent,
    /// Any program on the device could have started the request (RFC 8252, 8.6).
    Interaction,
}

/// Whether the user must decide, and why. `has_just_logged_in`: whether the last login of the session was made for this
/// request. Such a login shows that the user is present, so [`ConsentReason::Interaction`] does not apply. It does not
/// replace a consent.
pub(super) async fn consent_reason<S: Consents>(
    call: Call<'_, S>,
    request: &AuthorizationRequest,
    session: &AuthenticatedSession,
    has_just_logged_in: bool,
) -> Result<Option<ConsentReason>, StoreError> {
    let is_asked_for = request.prompts.consent || request.prompts.select_account;
    let is_needed = is_asked_for
        || match request.client.consent {
            Consent::Never => false,
            Consent::Always => true,
            Consent::Once => {
                let uid = &request.client.uid;
                let allowed = call.stores.consented_scopes(call.app_id(), session.user_id(), uid).await?;
                !request.scopes_for_client().is_subset_of(allowed)
            }
        };
    Ok(if is_needed {
        Some(ConsentReason::Consent)
    } else if is_program_on_device(request) && !has_just_logged_in {
        Some(ConsentReason::Interaction)
    } else {
        None
    })
}

/// Whether the response goes to a program on the user's device. Such a program cannot prove which program it is.
pub fn is_program_on_device(request: &AuthorizationRequest) -> bool {
    request.client.is_public() && !request.reply.target.as_str().starts_with("https://")
}

/// Whether the user has allowed this request: the consent page showed this account, and at least the requested scopes.
pub(super) fn is_allowed(
    shown: Option<&ShownConsent>,
    request: &AuthorizationRequest,
    session: &AuthenticatedSession,
) -> bool {
    shown.is_some_and(|shown| shown.user == session.user_id() && request.scopes_for_client().is_subset_of(shown.scopes))
}

/// Records that the user has allowed the access. The consent is stored only for a Client with `consent: Once`, so that
/// requests of other Clients do not need Postgres. Returns false if the user does not exist any more.
pub(super) async fn record_consent<S: Consents + AuditLog>(
    call: Call<'_, S>,
    request: &AuthorizationRequest,
    session: &AuthenticatedSession,
) -> Result<bool, StoreError> {
    let client = &request.client;
    let detail = Detail::from_client(&client.client_id);
    let event = session.event(call, EventKind::ConsentGiven).with_detail(detail);
    match client.consent {
        Consent::Once => {
            let consent = NewConsent {
                user: session.user_id(),
                client_uid: client.uid.to_string(),
                scopes: request.scopes_for_client(),
                at: call.env.now(),
                event,
            };
            call.stores.add_consent(call.app_id(), consent).await
        }
        Consent::Never | Consent::Always => {
            call.stores.record_later(call.app_id(), event);
            Ok(true)
        }
    }
}

/// What the consent page shows for this user.
pub fn shown_consent(request: &AuthorizationRequest, session: &AuthenticatedSession) -> ShownConsent {
    ShownConsent { user: session.user_id(), scopes: request.scopes_for_client() }
}
