//! `POST /v1/{APPID}/user/email`.

use super::problem;
use crate::{
    domain::{
        app::App,
        email::Email,
        own_account::{self, AddressAsked, ChangeAddress, ChangeAddressError},
        password::Password,
    },
    http::{
        Ports,
        error::Problem,
        guard,
        handlers::email::register,
        request::{Inbound, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// What a change of the address takes.
    pub struct Request as "ChangeAddressRequest" {
        /// The new address; a confirmation code goes there.
        email: Email,
        /// The password; only where the account has none a login in the last five minutes must do.
        password: Option<Password>,
    }
}

/// Answers as *register* does.
pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    guard::signed_in(state, app, &request.headers).await?;
    let Request { email, password } = request.read().await?;
    let signed_in = guard::signed_in_still(state, app, &request.headers).await?;
    let change = ChangeAddress { email, password };
    let (stores, env, caller) = (&state.stores, &state.env, &request.caller);
    match own_account::ask_for_address(stores, env, app, caller, &signed_in, &change).await {
        Ok(AddressAsked { user, expires_in, expires_at }) => response::json(&register::Answer {
            email: change.email.as_str().to_owned(),
            name: user.name,
            local_id: user.id.to_string(),
            expires_in,
            expires_at,
        }),
        Err(ChangeAddressError::DomainNotAllowed) => Err(register::domain_not_allowed()),
        Err(ChangeAddressError::EmailTaken) => Err(register::email_taken()),
        Err(ChangeAddressError::Refused(refused)) => Err(problem(app, refused)),
    }
}
