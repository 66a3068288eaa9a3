//! `GET /v1/{APPID}/user/identities`.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{app::App, identity::Identity, social},
    http::{
        Ports, authentication,
        error::Problem,
        openapi::operation::{Content, Operation},
        request::InboundRequest,
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
    /// The provider's name in the App when the identity was linked.
    pub provider: String,
    /// The user's identifier at the provider.
    pub subject: String,
    /// The email address that the provider reported when the identity was linked.
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

pub fn operation() -> Operation {
    Operation::new("The provider accounts with which the user can log in", "The oldest first.")
        .requires_access_token()
        .response(Content::json::<IdentitiesResponse>(json!({ "identities": [{
            "provider": "github",
            "subject": "583231",
            "email": "ada@example.com",
            "linked_at": 1_762_339_600,
        }] })))
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, &request).await?;
    let identities = social::list_identities(state.call(app, &request.client), &signed_in).await?;
    response::json(&IdentitiesResponse { identities: identities.into_iter().map(LinkedIdentity::from).collect() })
}
