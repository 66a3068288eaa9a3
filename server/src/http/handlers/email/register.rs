//! `POST /v1/{APPID}/email/register`.

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::{
        accounts::{self, Register, RegisterError},
        app::App,
        email::Email,
        password::Password,
        user::Name,
    },
    http::{
        Ports,
        error::{ErrorCode, FieldCode, FieldProblem, Problem},
        request::{Inbound, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// What *register* takes.
    pub struct Request as "RegisterRequest" {
        /// The user's name; white space at its ends is taken away.
        name: Name,
        /// The address; a confirmation code goes there.
        email: Email,
        /// The password; its least length and strength are the App's.
        password: Password,
    }
}

/// What *register* answers, whether the address was new or not.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "RegisterResponse")]
pub struct Answer {
    pub email: String,
    pub name: String,
    /// Keep that of *confirm* or *login* instead: for an address that was known already it is a random one.
    pub local_id: String,
    /// Seconds that the confirmation code is valid, at least.
    pub expires_in: i64,
    /// Unix seconds at which the confirmation code ends, at the earliest.
    pub expires_at: i64,
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    let Request { name, email, password } = request.read().await?;
    let register = Register { email: email.clone(), name: name.clone(), password };
    match accounts::register(&state.stores, &state.env, app, &request.caller, register).await {
        Ok(registered) => response::json(&Answer {
            email: email.as_str().to_owned(),
            name: name.as_str().to_owned(),
            local_id: registered.local_id.to_string(),
            expires_in: registered.expires_in,
            expires_at: registered.expires_at,
        }),
        Err(error) => Err(problem(error)),
    }
}

fn problem(error: RegisterError) -> Problem {
    match error {
        RegisterError::Closed => Problem::new(ErrorCode::RegistrationDisabled, "this App takes no registrations"),
        RegisterError::DomainNotAllowed => domain_not_allowed(),
        RegisterError::Weak(weak) => Problem::weak_password(weak),
        RegisterError::EmailTaken => email_taken(),
        RegisterError::Trouble(trouble) => trouble.into(),
    }
}

pub fn domain_not_allowed() -> Problem {
    Problem::invalid_fields(vec![FieldProblem {
        field: "email",
        code: FieldCode::DomainNotAllowed,
        message: "is of a domain that this App does not take".into(),
    }])
}

pub fn email_taken() -> Problem {
    Problem::new(ErrorCode::EmailTaken, "the address has an account")
}
