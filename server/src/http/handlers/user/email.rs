//! `POST /v1/{APPID}/user/email`.

use serde_json::json;

use super::account_problem;
use crate::{
    domain::{
        app::App,
        email::Email,
        own_account::{self, ChangeAddressError, ChangeAddressInput, PendingAddressChange},
        password::Password,
    },
    http::{
        Ports, authentication,
        error::{ErrorCode, Problem},
        handlers::email::register::{self, RegisterResponse},
        openapi::operation::{Content, Operation},
        request::{InboundRequest, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// The request to change the email address.
    pub struct ChangeAddressRequest as "ChangeAddressRequest" {
        /// The new address; a confirmation code is sent to it.
        email: Email,
        /// The password. If the account has none, a login in the last five minutes is required instead.
        password: Option<Password>,
    }
}

pub fn operation() -> Operation {
    Operation::new(
        "Request a change of the email address",
        "Requires the password or, if there is none, a login in the last five minutes. The code goes to the new \
         address and is valid at *confirm* only with a token of this account. With enumeration protection, the \
         response is the same for an address of another account.",
    )
    .requires_access_token()
    .request(Content::json::<ChangeAddressRequest>(
        json!({ "email": "ada@example.org", "password": "correct horse battery" }),
    ))
    .response(Content::json::<RegisterResponse>(RegisterResponse::example("ada@example.org")))
    .errors(&[
        ErrorCode::InvalidCredentials,
        ErrorCode::ReauthenticationRequired,
        ErrorCode::EmailNotVerified,
        ErrorCode::EmailTaken,
        ErrorCode::RateLimited,
    ])
}

/// The response has the same fields as the response of *register*.
pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    authentication::authenticate(state, app, &request).await?;
    let ChangeAddressRequest { email, password } = request.read_json().await?;
    let signed_in = authentication::authenticate_again(state, app, &request).await?;
    let change = ChangeAddressInput { email, password };
    match own_account::request_address_change(state.call(app, &request.client), &signed_in, &change).await {
        Ok(PendingAddressChange { user, expires_in, expires_at }) => response::json(&RegisterResponse {
            email: change.email.as_str().to_owned(),
            name: user.name,
            local_id: user.id.to_string(),
            expires_in,
            expires_at,
        }),
        Err(error) => Err(problem_of_address_change(app, error)),
    }
}

pub fn problem_of_address_change(app: &App, error: ChangeAddressError) -> Problem {
    match error {
        ChangeAddressError::DomainNotAllowed => register::domain_not_allowed(),
        ChangeAddressError::EmailTaken => register::email_taken(),
        ChangeAddressError::Account(error) => account_problem(app, error),
    }
}
