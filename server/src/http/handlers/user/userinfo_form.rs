//! `POST /v1/{APPID}/userinfo`: like GET, with the token in the header or in a form (RFC 6750, 2.2).

use serde_json::Value;

use super::userinfo::{UserInfoResponse, example, userinfo_of_token};
use crate::{
    domain::app::App,
    http::{
        Ports,
        authentication::{self, Bearer},
        error::{ErrorCode, Problem},
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::Response,
    },
    state::State,
};

pub fn operation() -> Operation {
    Operation::new(
        "The user's claims, with the token in a form (OpenID Connect Core 1.0, 5.3.1)",
        "Accepts the token in `Authorization` or in the field `access_token` of a form, but not in both. Only an App with \
         OpenID Connect clients accepts this method.",
    )
    .takes_optional_access_token()
    .response(Content::json::<UserInfoResponse<'static>>(example()))
    .errors(&[
        ErrorCode::InvalidToken,
        ErrorCode::InvalidRequest,
        ErrorCode::PayloadTooLarge,
        ErrorCode::UnsupportedMediaType,
    ])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let form = request.read_optional_form().await?;
    let in_form = form.get("access_token").and_then(Value::as_str);
    let token = match (Bearer::from_headers(&request.headers), in_form) {
        (Bearer::None, Some(token)) => token,
        (Bearer::Token(_) | Bearer::Malformed, Some(_)) => {
            return Err(Problem::invalid_request("send the access token in one place only"));
        }
        (_, None) => authentication::bearer_token(app, &request.headers)?,
    };
    userinfo_of_token(state, app, &request, token).await
}
