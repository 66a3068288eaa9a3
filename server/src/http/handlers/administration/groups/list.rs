//! `GET /v1/{APPID}/groups`.

use std::sync::Arc;

use latchkey_crds::types::GroupName;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{app::App, groups::Group, rights::Right},
    http::{
        Ports,
        administration::{Cursor, Query},
        authentication::Caller,
        error::Problem,
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::Read;

/// A page of groups.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "GroupsResponse")]
pub struct GroupsResponse {
    /// By `name`, byte by byte.
    pub groups: Vec<GroupResponse>,
    /// The `cursor` of the next page; left out on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A group of users.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Group")]
pub struct GroupResponse {
    pub name: String,
    /// The name for people.
    pub title: Option<String>,
    /// Unix seconds.
    pub created_at: i64,
}

// === impl GroupResponse ===

impl From<Group> for GroupResponse {
    fn from(group: Group) -> Self {
        Self { name: group.name.as_str().to_owned(), title: group.title, created_at: group.created_at.unix_timestamp() }
    }
}

pub fn operation() -> Operation {
    Operation::new(
        "List groups",
        "The groups that administrators have created, by `name`. Groups that only a provider reports are not listed.",
    )
    .requires_right(RIGHT)
    .query([Query::limit_parameter(), Cursor::parameter()])
    .response(Content::json::<GroupsResponse>(json!({
        "groups": [{ "name": "argo:admins", "title": "Argo CD administrators", "created_at": 1_762_339_600 }],
        "next": "nE6t0jDxvQ3WeyJhcmdvOmFkbWlucyI",
    })))
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    _: &Caller,
    request: InboundRequest,
) -> Result<Response, Problem> {
    let query = Query::parse(&request.uri, &["limit", "cursor"])?;
    let limit = query.limit()?;
    let cursor = Cursor::new(app.id(), "groups", &());
    let after: Option<GroupName> = cursor.position(&query)?;
    let page = state.stores.groups(app.id(), after.as_ref(), limit).await?;
    response::json(&GroupsResponse {
        groups: page.groups.into_iter().map(GroupResponse::from).collect(),
        next: page.next.map(|next| cursor.encode(&next)),
    })
}
