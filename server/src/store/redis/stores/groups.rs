//! The memberships of users in Redis: two fields in the hash of each user, next to the profile.

use std::sync::Arc;

use latchkey_crds::types::{AppId, GroupName};

use super::{
    super::{handle::RedisStore, metrics::Operation, scripts::script_command},
    sessions::user_key,
};
use crate::domain::{
    groups::{Membership, UserGroups},
    ports::{Replication, StoreError},
    user::UserId,
};

/// How long Redis stores the groups of a user without a session. No session needs them, but a request that has read
/// older groups from Postgres must find the newer groups in Redis, so that it does not store the older ones. No request
/// lasts this long.
const UNUSED_TTL_MILLIS: u64 = 5 * 60 * 1000;
/// Separates the memberships. No name contains it, because names consist of printable characters.
const SEPARATOR: char = '\n';
/// Separates the name of a group from the source of the membership. A membership by an administrator has no source.
const SOURCE_SEPARATOR: char = '\t';

/// Parses the fields of the user's hash. `None` if a field is missing or malformed.
fn parse_groups(version: &str, memberships: &str) -> Option<UserGroups> {
    let memberships: Option<Arc<[Membership]>> = match memberships {
        "" => Some(Arc::default()),
        memberships => memberships.split(SEPARATOR).map(parse_membership).collect(),
    };
    Some(UserGroups { version: version.parse().ok()?, memberships: memberships? })
}

fn parse_membership(line: &str) -> Option<Membership> {
    let (name, source) = line.split_once(SOURCE_SEPARATOR).unwrap_or((line, ""));
    Some(Membership { name: name.parse::<GroupName>().ok()?, source: source.to_owned() })
}

/// Returns the groups as the script expects them: version, memberships.
fn group_arguments(groups: &UserGroups) -> [String; 2] {
    let mut memberships = String::new();
    for Membership { name, source } in groups.memberships.iter() {
        if !memberships.is_empty() {
            memberships.push(SEPARATOR);
        }
        memberships.push_str(name.as_str());
        if !source.is_empty() {
            memberships.push(SOURCE_SEPARATOR);
            memberships.push_str(source);
        }
    }
    [groups.version.to_string(), memberships]
}

impl RedisStore {
    /// Returns the groups of the user, or `None` if they are not stored.
    pub(in crate::store) async fn stored_groups(
        &self,
        app: &AppId,
        user: UserId,
    ) -> Result<Option<UserGroups>, StoreError> {
        let mut command = redis::cmd("HMGET");
        command.arg(user_key(app, user)).arg("groups_version").arg("groups");
        let value = self.send_one(Operation::GetGroups, command).await?;
        let fields: (Option<String>, Option<String>) = self.parse(value)?;
        let (Some(version), Some(memberships)) = fields else { return Ok(None) };
        parse_groups(&version, &memberships).map(Some).ok_or_else(|| self.unexpected_value())
    }

    /// Stores the groups of the user, unless the stored ones are newer.
    pub(in crate::store) async fn store_groups(
        &self,
        app: &AppId,
        user: UserId,
        groups: &UserGroups,
    ) -> Result<Replication, StoreError> {
        let [version, memberships] = group_arguments(groups);
        let arguments = [version, memberships, UNUSED_TTL_MILLIS.to_string()];
        let command = script_command(&self.scripts().store_groups, &[user_key(app, user)], &arguments);
        self.send_replicated(Operation::StoreGroups, command).await.map(|(_, replication)| replication)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(version: i64, memberships: &[(&str, &str)]) -> UserGroups {
        let membership =
            |(name, source): &(&str, &str)| Membership { name: name.parse().unwrap(), source: (*source).to_owned() };
        UserGroups { version, memberships: memberships.iter().map(membership).collect() }
    }

    #[test]
    fn stored_groups_are_read_as_they_were_written() {
        let several = [("a b", ""), ("argo:*", "corp"), ("corp:Team, \\ 1", ""), ("corp:Team, \\ 1", "corp")];
        for stored in [groups(0, &[]), groups(1, &[("staff", "")]), groups(7, &several)] {
            let [version, memberships] = group_arguments(&stored);
            assert_eq!(parse_groups(&version, &memberships), Some(stored));
        }
    }

    #[test]
    fn malformed_groups_are_not_read() {
        let malformed = ["staff\n", "\nstaff", "st\u{e4}b", "\tcorp"];
        let malformed = malformed.map(|memberships| ("1", memberships));
        for (version, memberships) in [("", "staff"), ("x", "staff")].into_iter().chain(malformed) {
            assert_eq!(parse_groups(version, memberships), None, "{version} {memberships:?}");
        }
    }
}
