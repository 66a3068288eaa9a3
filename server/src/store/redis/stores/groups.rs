//! The groups of users in Redis: two fields of the user's hash, beside the profile.

use std::sync::Arc;

use latchkey_crds::types::{AppId, GroupName};

use super::{
    super::{handle::RedisStore, metrics::Operation, scripts::script_command},
    sessions::user_key,
};
use crate::domain::{
    groups::UserGroups,
    ports::{Replication, StoreError},
    user::UserId,
};

/// How long the groups of a user without a session are kept. They are stored although nobody needs them: a request that
/// has read older groups in Postgres must find the newer ones, and not store the older ones. No request lasts this
/// long.
const UNUSED_TTL_MILLIS: u64 = 5 * 60 * 1000;
/// Separates the names. No name contains it, because names consist of printable characters.
const SEPARATOR: char = '\n';

/// Parses the fields of the user's hash. `None` if a field is missing or malformed.
fn parse_groups(version: &str, names: &str) -> Option<UserGroups> {
    let names: Option<Arc<[GroupName]>> = match names {
        "" => Some(Arc::default()),
        names => names.split(SEPARATOR).map(|name| name.parse::<GroupName>().ok()).collect(),
    };
    Some(UserGroups { version: version.parse().ok()?, names: names? })
}

/// Returns the groups as the script expects them: version, names.
fn group_arguments(groups: &UserGroups) -> [String; 2] {
    let mut names = String::new();
    for name in groups.names.iter() {
        if !names.is_empty() {
            names.push(SEPARATOR);
        }
        names.push_str(name.as_str());
    }
    [groups.version.to_string(), names]
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
        let (Some(version), Some(names)) = fields else { return Ok(None) };
        parse_groups(&version, &names).map(Some).ok_or_else(|| self.unexpected_value())
    }

    /// Stores the groups of the user, unless the stored ones are newer.
    pub(in crate::store) async fn store_groups(
        &self,
        app: &AppId,
        user: UserId,
        groups: &UserGroups,
    ) -> Result<Replication, StoreError> {
        let [version, names] = group_arguments(groups);
        let arguments = [version, names, UNUSED_TTL_MILLIS.to_string()];
        let command = script_command(&self.scripts().store_groups, &[user_key(app, user)], &arguments);
        self.send_replicated(Operation::StoreGroups, command).await.map(|(_, replication)| replication)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(version: i64, names: &[&str]) -> UserGroups {
        UserGroups { version, names: names.iter().map(|name| name.parse::<GroupName>().unwrap()).collect() }
    }

    #[test]
    fn stored_groups_are_read_as_they_were_written() {
        for stored in [groups(0, &[]), groups(1, &["staff"]), groups(7, &["a b", "argo:*", "corp:Team, \\ 1"])] {
            let [version, names] = group_arguments(&stored);
            assert_eq!(parse_groups(&version, &names), Some(stored));
        }
    }

    #[test]
    fn malformed_groups_are_not_read() {
        for (version, names) in [("", "staff"), ("x", "staff"), ("1", "staff\n"), ("1", "\nstaff"), ("1", "st\u{e4}b")]
        {
            assert_eq!(parse_groups(version, names), None, "{version} {names:?}");
        }
    }
}
