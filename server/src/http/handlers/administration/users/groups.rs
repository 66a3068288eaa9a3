//! `GET /v1/{APPID}/users/{USER}/groups`.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{app::App, groups::Membership, rights::Right},
    http::{
        Ports,
        administration::Query,
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::{user_id, user_not_found},
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::Read;

/// The groups of a user.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "UserGroupsResponse")]
pub struct UserGroupsResponse {
    /// Sorted by the bytes of `name`. A group with several sources is listed once for each source.
    pub groups: Vec<UserGroup>,
}

/// A group of a user.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "UserGroup")]
pub struct UserGroup {
    pub name: String,
    /// The name of the provider that reported the membership. Empty: an administrator added the user.
    pub source: String,
}

// === impl UserGroup ===

impl From<Membership> for UserGroup {
    fn from(membership: Membership) -> Self {
        Self { name: membership.name.as_str().to_owned(), source: membership.source }
    }
}

pub fn operation() -> Operation {
    Operation::new("List the groups of a user", "At most 500, also those from providers.")
        .requires_right(RIGHT)
        .response(Content::json::<UserGroupsResponse>(json!({
            "groups": [{ "name": "argo:admins", "source": "" }, { "name": "corp:Platform Team", "source": "corp" }],
        })))
        .errors(&[ErrorCode::NotFound])
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    _: &Caller,
    request: InboundRequest,
) -> Result<Response, Problem> {
    Query::parse(&request.uri, &[])?;
    let memberships = state.stores.memberships(app.id(), user_id(&request)?).await?.ok_or_else(user_not_found)?;
    response::json(&UserGroupsResponse { groups: memberships.into_iter().map(UserGroup::from).collect() })
}
