//! `POST /v1/{APPID}/email/register`.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    domain::{
        app::App,
        email::Email,
        email_account::{self, RegisterError, RegisterInput},
        password::Password,
        user::Name,
    },
    http::{
        Ports,
        error::{ErrorCode, FieldCode, FieldProblem, Problem},
        openapi::{
            examples,
            operation::{Content, Operation},
        },
        request::{InboundRequest, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// The request of *register*.
    pub struct RegisterRequest as "RegisterRequest" {
        /// The user's name, without control characters; leading and trailing white space is removed.
        name: Name,
        /// The email address; a confirmation code is sent to it.
        email: Email,
        /// The password; the App sets its minimum length and strength.
        password: Password,
    }
}

/// The response of *register*, whether or not the address was new.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "RegisterResponse")]
pub struct RegisterResponse {
    pub email: String,
    pub name: String,
    /// Store the `local_id` of *confirm* or *login* instead: for an address that was already known, the value in this
    /// field is random.
    pub local_id: String,
    /// Minimum lifetime of the confirmation code in seconds.
    pub expires_in: i64,
    /// The earliest time at which the confirmation code expires, in Unix seconds.
    pub expires_at: i64,
}

// === impl RegisterResponse ===

impl RegisterResponse {
    pub fn example(email: &str) -> Value {
        json!({
            "email": email,
            "name": "Ada Lovelace",
            "local_id": examples::USER_ID,
            "expires_in": 86_400,
            "expires_at": 1_762_426_000,
        })
    }
}

pub fn operation() -> Operation {
    Operation::new(
        "Register with name, email address and password",
        "Creates the user and sends the confirmation email. With enumeration protection, the response is the same for \
         an address that already has an account.",
    )
    .request(Content::json::<RegisterRequest>(
        json!({ "name": "Ada Lovelace", "email": "ada@example.com", "password": "correct horse battery" }),
    ))
    .response(Content::json::<RegisterResponse>(RegisterResponse::example("ada@example.com")))
    .errors(&[
        ErrorCode::WeakPassword,
        ErrorCode::RegistrationDisabled,
        ErrorCode::EmailTaken,
        ErrorCode::RateLimited,
    ])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let RegisterRequest { name, email, password } = request.read_json().await?;
    let register = RegisterInput { email: email.clone(), name: name.clone(), password };
    match email_account::register(state.call(app, &request.client), register).await {
        Ok(registered) => response::json(&RegisterResponse {
            email: email.as_str().to_owned(),
            name: name.as_str().to_owned(),
            local_id: registered.local_id.to_string(),
            expires_in: registered.expires_in,
            expires_at: registered.expires_at,
        }),
        Err(error) => Err(register_problem(error)),
    }
}

pub fn register_problem(error: RegisterError) -> Problem {
    match error {
        RegisterError::Closed => {
            Problem::new(ErrorCode::RegistrationDisabled, "this App does not accept registrations")
        }
        RegisterError::DomainNotAllowed => domain_not_allowed(),
        RegisterError::Weak(weak) => Problem::weak_password(weak),
        RegisterError::EmailTaken => email_taken(),
        RegisterError::Common(error) => error.into(),
    }
}

pub fn domain_not_allowed() -> Problem {
    Problem::invalid_fields(vec![FieldProblem {
        field: "email".into(),
        code: FieldCode::DomainNotAllowed,
        message: "is of a domain that this App does not accept".into(),
    }])
}

pub fn email_taken() -> Problem {
    Problem::new(ErrorCode::EmailTaken, "the email address has an account")
}
