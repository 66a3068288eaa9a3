//! `POST /v1/{APPID}/user/password`.

use super::problem;
use crate::{
    domain::{
        app::App,
        own_account::{self, ChangePassword, ChangePasswordError},
        password::Password,
    },
    http::{
        Ports,
        error::Problem,
        guard,
        request::{Inbound, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// What a change of the password takes.
    pub struct Request as "ChangePasswordRequest" {
        /// The new password; its least length and strength are the App's.
        password: Password,
        /// The password until now; without it a login in the last five minutes must do.
        current_password: Option<Password>,
    }
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    guard::signed_in(state, app, &request.headers).await?;
    let Request { password, current_password } = request.read().await?;
    let signed_in = guard::signed_in_still(state, app, &request.headers).await?;
    let change = ChangePassword { password, current: current_password };
    let (stores, env, caller) = (&state.stores, &state.env, &request.caller);
    match own_account::change_password(stores, env, app, caller, &signed_in, &change).await {
        Ok(()) => response::nothing(),
        Err(ChangePasswordError::Weak(weak)) => Err(Problem::weak_password(weak)),
        Err(ChangePasswordError::Refused(refused)) => Err(problem(app, refused)),
    }
}
