//! The endpoints of pull webhooks. The caller is the ServiceAccount that the webhook names, and needs no role.

use crate::{
    domain::{app::App, ports::WebhookKey, webhook::Delivery},
    http::{
        authentication::Caller,
        error::{ErrorCode, Problem},
        request::InboundRequest,
    },
};

pub mod acknowledge;
pub mod events;

/// Checks that the webhook in the path is a pull webhook, and that the caller is its consumer.
///
/// # Errors
///
/// 404 if the App has no pull webhook of this name; 403 if the webhook names another ServiceAccount.
pub fn authorize(app: &App, caller: &Caller, request: &InboundRequest) -> Result<(), Problem> {
    let webhook = app.webhook(request.path_parameter(0));
    let webhook = webhook.filter(|webhook| matches!(webhook.delivery, Delivery::Pull(_)));
    let webhook = webhook.ok_or_else(webhook_not_found)?;
    if webhook.is_pulled_by(caller.account.namespace(), caller.account.name()) {
        return Ok(());
    }
    Err(Problem::new(ErrorCode::AccessDenied, "another ServiceAccount pulls the events of this webhook"))
}

pub(super) fn webhook_not_found() -> Problem {
    Problem::new(ErrorCode::NotFound, "there is no such webhook")
}

/// Returns the key of the webhook in the path.
fn webhook_key(app: &App, request: &InboundRequest) -> Result<WebhookKey, Problem> {
    let webhook = app.webhook(request.path_parameter(0)).ok_or_else(webhook_not_found)?;
    Ok(WebhookKey { app: app.id().clone(), webhook: webhook.name.clone() })
}
