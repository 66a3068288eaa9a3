//! `GET` and `POST /{APPID}/{PROVIDER}/callback`.

use latchkey_crds::rendered::RenderedProvider;
use schemars::JsonSchema;
use serde::Serialize;

use super::Session;
use crate::{
    domain::{
        app::App,
        flow::FlowState,
        social::{self, CallbackError, Ended, Given, Returned},
    },
    http::{
        Ports,
        cookies::FlowCookies,
        error::{ErrorCode, Problem},
        parameters::Parameters,
        request::Inbound,
        response::{self, Response},
    },
    state::State,
};

/// What *callback* answers where the App has no redirect addresses.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "CallbackResponse")]
pub enum Answer {
    Session {
        #[serde(flatten)]
        session: Session,
        /// The `state` that was given to *redirect*.
        #[serde(skip_serializing_if = "Option::is_none")]
        state: Option<String>,
    },
    Code {
        /// To be exchanged at *token*, within a minute.
        code: String,
        /// The `state` that was given to *redirect*.
        #[serde(skip_serializing_if = "Option::is_none")]
        state: Option<String>,
    },
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: Inbound) -> Result<Response, Problem> {
    let provider = super::provider(app, &request)?;
    let parameters = Parameters::parse(request.uri.query().unwrap_or_default())?;
    end(state, app, provider, &request, &parameters, None).await
}

pub async fn handle_form<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    let provider = super::provider(app, &request)?;
    let form = request.form_text().await?;
    let parameters = Parameters::parse(&form)?;
    end(state, app, provider, &request, &parameters, parameters.once("user")?).await
}

/// Ends the flow that the parameters name.
async fn end<S: Ports>(
    state: &State<S>,
    app: &App,
    provider: &RenderedProvider,
    request: &Inbound,
    parameters: &Parameters<'_>,
    posted_user: Option<&str>,
) -> Result<Response, Problem> {
    let flow = parameters.once("state").ok().flatten().and_then(FlowState::parse).ok_or_else(invalid_state)?;
    let id = flow.id();
    let cookies = FlowCookies::of(&state.settings.base_url);
    let kept = cookies.sent(&request.headers);
    let returned = Returned {
        state: flow,
        code: parameters.once("code")?,
        iss: parameters.once("iss")?,
        error: parameters.once("error")?,
        posted_user,
        sealed: kept.iter().filter(|cookie| cookie.is_of(&id)).map(|cookie| cookie.value).collect(),
    };
    let ended = social::callback(&state.stores, &state.env, app, provider, &request.caller, returned).await;
    // What was sent to the wrong place, or found no room, has used nothing up: the flow may still come back.
    let cleared = match &ended {
        Err(CallbackError::InvalidState) | Ok(Ended { used: false, .. }) => Vec::new(),
        Ok(Ended { used: true, .. }) | Err(CallbackError::RedirectUrl(_) | CallbackError::Trouble(_)) => {
            cookies.end(&kept, &id)
        }
    };
    match ended.map_err(problem).and_then(|ended| answer(app, ended)) {
        Ok(response) => Ok(super::with_headers(response, cleared)),
        Err(problem) => Err(cleared.into_iter().fold(problem, |problem, (name, value)| problem.header(name, value))),
    }
}

fn answer(app: &App, ended: Ended) -> Result<Response, Problem> {
    let Ended { target, place, app_state, used: _, outcome } = ended;
    let Some(target) = target else {
        return match outcome {
            Ok(Given::Session(signed_up)) => {
                response::json(&Answer::Session { session: Session::from(*signed_up), state: app_state })
            }
            Ok(Given::Code(code)) => response::json(&Answer::Code { code: code.expose().to_owned(), state: app_state }),
            Err(error) => Err(super::sign_in_problem(app, error)),
        };
    };
    let mut problem = None;
    let mut parameters: Vec<(&str, String)> = match outcome {
        Ok(Given::Session(signed_up)) => {
            let session = Session::from(*signed_up);
            vec![
                ("access_token", session.access_token),
                ("refresh_token", session.refresh_token),
                ("session_id", session.session_id),
                ("local_id", session.local_id),
                ("email_verified", session.email_verified.to_string()),
                ("expires_at", session.expires_at.to_string()),
                ("expires_in", session.expires_in.to_string()),
            ]
        }
        Ok(Given::Code(code)) => vec![("code", code.expose().to_owned())],
        Err(error) => {
            let (code, redirected) = super::redirected(app, error);
            let description = redirected.0.description.to_string();
            problem = Some(redirected);
            vec![("error", code.to_owned()), ("error_description", description)]
        }
    };
    parameters.extend(app_state.map(|state| ("state", state)));
    let address = target.with(place, parameters.iter().map(|(name, value)| (*name, value.as_str())));
    let mut response = super::redirect_to(&address)?;
    if let Some(problem) = problem {
        response.extensions_mut().insert(problem);
    }
    Ok(response)
}

fn invalid_state() -> Problem {
    Problem::new(ErrorCode::InvalidState, "the state is missing, used, expired or another browser's; begin again")
}

fn problem(error: CallbackError) -> Problem {
    match error {
        CallbackError::InvalidState => invalid_state(),
        CallbackError::RedirectUrl(_) => Problem::new(
            ErrorCode::RedirectUrlNotAllowed,
            "the address that this login was to lead to is not on the App's list any more",
        ),
        CallbackError::Trouble(trouble) => trouble.into(),
    }
}
