//! `PATCH /v1/{APPID}/user`.

use serde_json::json;

use super::{UserResponse, account_problem};
use crate::{
    domain::{app::App, own_account, user::Name},
    http::{
        Ports, authentication,
        error::{ErrorCode, Problem},
        openapi::operation::{Content, Operation},
        request::{InboundRequest, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// The request to rename the user.
    pub struct RenameRequest as "RenameRequest" {
        /// The new name, without control characters; leading and trailing white space is removed.
        name: Name,
    }
}

pub fn operation() -> Operation {
    Operation::new("Rename the user", "Tokens contain the new name from the next refresh on.")
        .requires_access_token()
        .request(Content::json::<RenameRequest>(json!({ "name": "Ada Lovelace" })))
        .response(Content::json::<UserResponse>(UserResponse::example()))
        .errors(&[ErrorCode::RateLimited])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    authentication::authenticate(state, app, &request).await?;
    let RenameRequest { name } = request.read_json().await?;
    let signed_in = authentication::authenticate_again(state, app, &request).await?;
    let user = own_account::rename_user(state.call(app, &request.client), &signed_in, &name).await;
    response::json(&UserResponse::from(user.map_err(|error| account_problem(app, error))?))
}
