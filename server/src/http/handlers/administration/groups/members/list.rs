//! `GET /v1/{APPID}/groups/{GROUP}/members`.

use std::sync::Arc;

use latchkey_crds::types::ProviderName;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;
use uuid::Uuid;

use crate::{
    domain::{app::App, groups::GroupMember, ports::MemberPosition, rights::Right, user::UserId},
    http::{
        Ports,
        administration::{Cursor, Query},
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::groups::{group_name, group_not_found},
        openapi::{
            examples,
            operation::{Content, Operation},
        },
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::Read;

/// A page of members of a group.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "GroupMembersResponse")]
pub struct GroupMembersResponse {
    /// By `user_id`. A user is listed once for each source.
    pub members: Vec<GroupMemberResponse>,
    /// The `cursor` of the next page; left out on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A member of a group.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "GroupMember")]
pub struct GroupMemberResponse {
    pub user_id: String,
    /// The name of the provider that reported the membership. Empty: an administrator added the member.
    pub source: String,
    /// Unix seconds.
    pub created_at: i64,
}

// === impl GroupMemberResponse ===

impl From<GroupMember> for GroupMemberResponse {
    fn from(member: GroupMember) -> Self {
        Self { user_id: member.user.to_string(), source: member.source, created_at: member.created_at.unix_timestamp() }
    }
}

pub fn operation() -> Operation {
    Operation::new("List the members of a group", "By `user_id`.")
        .requires_right(RIGHT)
        .query([Query::limit_parameter(), Cursor::parameter()])
        .response(Content::json::<GroupMembersResponse>(json!({
            "members": [{ "user_id": examples::USER_ID, "source": "", "created_at": 1_762_339_600 }],
            "next": "nE6t0jDxvQ3WWyIwMTlhODQ1MiIsIiJd",
        })))
        .errors(&[ErrorCode::NotFound])
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    _: &Caller,
    request: InboundRequest,
) -> Result<Response, Problem> {
    let query = Query::parse(&request.uri, &["limit", "cursor"])?;
    let limit = query.limit()?;
    // A cursor is valid only for its group. If the name of the group is malformed, the response is the 404 below.
    let cursor = Cursor::new(app.id(), "group-members", &request.path_parameter(0));
    let after = cursor.position::<(Uuid, Option<ProviderName>)>(&query)?.map(|(user, provider)| MemberPosition {
        user: UserId(user),
        source: provider.map_or_else(String::new, |provider| provider.as_str().to_owned()),
    });
    let name = group_name(&request)?;
    let page = state.stores.group_members(app.id(), &name, after.as_ref(), limit).await?;
    let page = page.ok_or_else(group_not_found)?;
    response::json(&GroupMembersResponse {
        members: page.members.into_iter().map(GroupMemberResponse::from).collect(),
        next: page.next.map(|next| cursor.encode(&(next.user.0, next.source.parse::<ProviderName>().ok()))),
    })
}
