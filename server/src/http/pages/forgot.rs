//! `forgot`: requests a mail with a reset code.

use super::{
    form::Form,
    page::{Page, encode_query},
};
use crate::{
    domain::email_account,
    http::{Ports, error::Problem, handlers::email::forgot_password::ForgotPasswordRequest, response::Response},
    pages::views::{ForgotNoticePage, ForgotPage},
};

pub(super) async fn show<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let sent = match page.query("notice")? {
        Some("sent") => page.sent_address()?,
        _ => None,
    };
    match sent {
        Some(email) => {
            let address = page.seal_address(&email);
            page.show(&ForgotNoticePage { email: email.as_str(), address: &address })
        }
        None => page.show(&ForgotPage { email: page.query("email")?.unwrap_or_default() }),
    }
}

/// The response is the same for every address, even if a limit on mails is reached.
pub(super) async fn submit<S: Ports>(page: &Page<'_, S>, form: &Form) -> Result<Response, Problem> {
    let ForgotPasswordRequest { email } = match form.read() {
        Ok(request) => request,
        Err(problem) => return page.refuse(&ForgotPage { email: form.text("email") }, problem),
    };
    email_account::forgot_password(page.call(), &email).await?;
    let address = page.seal_address(&email);
    let tx = page.tx().map(|tx| ("tx", tx));
    let query = encode_query([("notice", "sent"), ("address", address.as_str())].into_iter().chain(tx));
    page.redirect(&format!("forgot{query}"), Vec::new())
}
