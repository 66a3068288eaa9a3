//! `GET /v1/{APPID}/user/identities`, `POST` and `DELETE …/user/identities/{PROVIDER}`.

use latchkey_crds::types::ProviderName;
use schemars::JsonSchema;
use serde::Serialize;

use super::social::{self as social_handlers, login};
use crate::{
    domain::{
        app::App,
        identity::Identity,
        ports::Unlinked,
        social::{self, LinkError},
    },
    http::{
        Ports,
        error::{ErrorCode, Problem},
        guard,
        request::{Inbound, Text},
        response::{self, Response},
    },
    state::State,
};

/// What the list of identities answers.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "IdentitiesResponse")]
pub struct Answer {
    pub identities: Vec<Listed>,
}

/// A provider's account by which the user may sign in.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Identity")]
pub struct Listed {
    /// The provider's name in the App when it was linked.
    pub provider: String,
    /// Who the user is there.
    pub subject: String,
    /// The address that the provider told then.
    pub email: Option<String>,
    /// Unix seconds.
    pub linked_at: i64,
}

// === impl Listed ===

impl From<Identity> for Listed {
    fn from(identity: Identity) -> Self {
        Self {
            provider: identity.provider,
            subject: identity.subject,
            email: identity.email,
            linked_at: identity.linked_at.unix_timestamp(),
        }
    }
}

pub async fn list<S: Ports>(state: &State<S>, app: &App, request: Inbound) -> Result<Response, Problem> {
    let signed_in = guard::signed_in(state, app, &request.headers).await?;
    let identities = social::identities(&state.stores, app, &signed_in).await?;
    response::json(&Answer { identities: identities.into_iter().map(Listed::from).collect() })
}

pub async fn link<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    guard::signed_in(state, app, &request.headers).await?;
    let provider = social_handlers::provider(app, &request)?;
    let login::Request { token, nonce } = request.read().await?;
    let signed_in = guard::signed_in_still(state, app, &request.headers).await?;
    let nonce = nonce.as_ref().map(|Text(nonce)| nonce.as_str());
    let linked =
        social::link(&state.stores, &state.env, app, &request.caller, &signed_in, provider, &token.0, nonce).await;
    linked.map_err(|error| problem(app, error))?;
    response::nothing()
}

pub async fn unlink<S: Ports>(state: &State<S>, app: &App, request: Inbound) -> Result<Response, Problem> {
    let signed_in = guard::signed_in(state, app, &request.headers).await?;
    // A Provider that the App does not have any more may be unlinked all the same.
    let name = request.item.as_deref().and_then(|name| name.parse::<ProviderName>().ok());
    let name = name.ok_or_else(not_linked)?;
    match social::unlink(&state.stores, &state.env, app, &request.caller, &signed_in, &name).await? {
        Unlinked::Done => response::nothing(),
        Unlinked::NotLinked => Err(not_linked()),
        Unlinked::LastWayIn => {
            Err(Problem::new(ErrorCode::LastIdentity, "it is the last way into the account; set a password first"))
        }
    }
}

fn not_linked() -> Problem {
    Problem::new(ErrorCode::NotFound, "you have no identity of this provider")
}

fn problem(app: &App, error: LinkError) -> Problem {
    match error {
        LinkError::ReauthenticationRequired => Problem::unauthorized(
            ErrorCode::ReauthenticationRequired,
            "linking needs a login in the last five minutes",
            guard::challenge(app, None),
        ),
        LinkError::EmailNotVerified => Problem::new(ErrorCode::EmailNotVerified, "confirm the account's address first"),
        LinkError::Taken => Problem::new(ErrorCode::AccessDenied, "this identity is that of another account"),
        LinkError::InvalidToken => guard::invalid_token(app, true),
        LinkError::Provider(error) => social_handlers::provider_problem(app, error),
        LinkError::Trouble(trouble) => trouble.into(),
    }
}
