//! `GET /v1/{APPID}/user/identities`, `POST` and `DELETE …/user/identities/{PROVIDER}`.

use latchkey_crds::types::ProviderName;
use schemars::JsonSchema;
use serde::Serialize;

use super::social::{self as social_handlers, login};
use crate::{
    domain::{
        app::App,
        identity::Identity,
        ports::UnlinkOutcome,
        social::{self, LinkError},
    },
    http::{
        Ports, authentication,
        error::{ErrorCode, Problem},
        request::{InboundRequest, RawText},
        response::{self, Response},
    },
    state::State,
};

/// The response of the list of identities.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "IdentitiesResponse")]
pub struct IdentitiesResponse {
    pub identities: Vec<LinkedIdentity>,
}

/// A provider account with which the user can log in.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Identity")]
pub struct LinkedIdentity {
    /// The provider's name in the App when it was linked.
    pub provider: String,
    /// The user's identifier at the provider.
    pub subject: String,
    /// The email address that the provider reported at that time.
    pub email: Option<String>,
    /// Unix seconds.
    pub linked_at: i64,
}

// === impl LinkedIdentity ===

impl From<Identity> for LinkedIdentity {
    fn from(identity: Identity) -> Self {
        Self {
            provider: identity.provider,
            subject: identity.subject,
            email: identity.email,
            linked_at: identity.linked_at.unix_timestamp(),
        }
    }
}

pub async fn list<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, &request).await?;
    let identities = social::list_identities(state.call(app, &request.client), &signed_in).await?;
    response::json(&IdentitiesResponse { identities: identities.into_iter().map(LinkedIdentity::from).collect() })
}

pub async fn link<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    authentication::authenticate(state, app, &request).await?;
    let provider = social_handlers::requested_provider(app, &request)?;
    let login::ProviderTokenRequest { token, nonce } = request.read_json().await?;
    let signed_in = authentication::authenticate_again(state, app, &request).await?;
    let nonce = nonce.as_ref().map(|RawText(nonce)| nonce.as_str());
    let linked = social::link_identity(state.call(app, &request.client), &signed_in, provider, &token.0, nonce).await;
    linked.map_err(|error| link_problem(app, error))?;
    response::empty_object()
}

pub async fn unlink<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, &request).await?;
    // A Provider that the App no longer has can still be unlinked.
    let name = request.path_parameter.as_deref().and_then(|name| name.parse::<ProviderName>().ok());
    let name = name.ok_or_else(not_linked)?;
    match social::unlink_identity(state.call(app, &request.client), &signed_in, &name).await? {
        UnlinkOutcome::Done => response::empty_object(),
        UnlinkOutcome::NotLinked => Err(not_linked()),
        UnlinkOutcome::LastLoginMethod => {
            let why = "it is the last way to log in to the account; set a password first";
            Err(Problem::new(ErrorCode::LastIdentity, why))
        }
    }
}

fn not_linked() -> Problem {
    Problem::new(ErrorCode::NotFound, "you have no identity of this provider")
}

fn link_problem(app: &App, error: LinkError) -> Problem {
    match error {
        LinkError::ReauthenticationRequired => Problem::unauthorized(
            ErrorCode::ReauthenticationRequired,
            "linking requires a login in the last five minutes",
            authentication::challenge(app, None),
        ),
        LinkError::EmailNotVerified => {
            Problem::new(ErrorCode::EmailNotVerified, "confirm the email address of the account first")
        }
        LinkError::AlreadyLinked => Problem::new(ErrorCode::AccessDenied, "this identity belongs to another account"),
        LinkError::InvalidToken => authentication::invalid_token(app, true),
        LinkError::Provider(error) => social_handlers::provider_problem(app, error),
        LinkError::Common(error) => error.into(),
    }
}
