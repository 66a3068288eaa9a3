//! The groups of the App and their members.

use crate::{
    domain::{administration::GroupError, groups::ManagedGroupName, user::UserId},
    http::{
        error::{ErrorCode, Problem},
        handlers::administration::{user_id_at, user_not_found},
        request::InboundRequest,
    },
};

pub mod list;
pub mod members;
pub mod put;
pub mod remove;

/// Returns the name of the group in the path.
///
/// # Errors
///
/// 404 if the text in the path is not a valid group name.
fn group_name(request: &InboundRequest) -> Result<ManagedGroupName, Problem> {
    // Many clients encode `:` and `@` in a path, although this is not necessary (RFC 3986, 3.3). Clients do not encode
    // the other characters of a name, because these are unreserved (RFC 3986, 2.3).
    let text = request.path_parameter(0).replace("%3A", ":").replace("%3a", ":").replace("%40", "@");
    ManagedGroupName::parse(&text).ok_or_else(group_not_found)
}

/// Returns the group and the user in the path.
fn group_and_user(request: &InboundRequest) -> Result<(ManagedGroupName, UserId), Problem> {
    Ok((group_name(request)?, user_id_at(request, 1)?))
}

fn group_not_found() -> Problem {
    Problem::new(ErrorCode::NotFound, "there is no such group")
}

fn group_problem(error: GroupError) -> Problem {
    match error {
        GroupError::GroupNotFound => group_not_found(),
        GroupError::UserNotFound => user_not_found(),
        GroupError::TooManyInApp => {
            Problem::new(ErrorCode::TooManyGroups, "the App has the maximum number of groups; delete one first")
        }
        GroupError::TooManyOfUser => Problem::new(
            ErrorCode::TooManyGroups,
            "the user is in the maximum number of groups; remove the user from one first",
        ),
        GroupError::Store(error) => error.into(),
    }
}
