//! The groups that a provider reports, read from a claim.

use std::collections::BTreeSet;

use latchkey_crds::{rendered::RenderedProviderGroups, types::GroupName};
use serde_json::Value;

use crate::domain::groups::MAX_GROUPS_PER_USER;

/// Reads from the claim the groups that the App's settings select, sorted and without duplicates. Returns `None` if the
/// claim is not an array. The result is empty if there are more groups than a user can have.
///
/// Drops items that are not strings, and names that are not valid after the prefix is added. The number of items is
/// bounded, because the JSON that contains the claim is bounded ([`super::RESPONSE_BOUNDS`]).
pub(super) fn read_groups(claim: &Value, groups: &RenderedProviderGroups) -> Option<Vec<GroupName>> {
    let max_groups = MAX_GROUPS_PER_USER as usize;
    let mut names = BTreeSet::new();
    for name in claim.as_array()?.iter().filter_map(Value::as_str) {
        // The length is checked first, so that no name that is too long is copied or compared with the patterns.
        if name.is_empty() || groups.prefix.len() + name.len() > GroupName::MAX_LENGTH {
            continue;
        }
        if !groups.only.is_empty() && !groups.only.iter().any(|pattern| pattern.matches(name)) {
            continue;
        }
        let Ok(name) = format!("{}{name}", groups.prefix).parse::<GroupName>() else { continue };
        names.insert(name);
        if names.len() > max_groups {
            return Some(Vec::new());
        }
    }
    Some(names.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn settings(prefix: &str, only: &[&str]) -> RenderedProviderGroups {
        let only = only.iter().map(|pattern| pattern.parse().unwrap()).collect();
        RenderedProviderGroups { claim: "groups".to_owned(), prefix: prefix.to_owned(), only }
    }

    fn names(claim: &Value, settings: &RenderedProviderGroups) -> Vec<String> {
        let groups = read_groups(claim, settings).unwrap();
        groups.into_iter().map(|group| group.as_str().to_owned()).collect()
    }

    #[test]
    fn names_get_the_prefix_and_are_sorted_without_duplicates() {
        let claim = json!(["staff", "Platform Team", "staff", "admins"]);
        let expected = ["corp:Platform Team", "corp:admins", "corp:staff"];
        assert_eq!(names(&claim, &settings("corp:", &[])), expected);
        assert_eq!(names(&claim, &settings("", &[])), ["Platform Team", "admins", "staff"]);
        assert!(names(&json!([]), &settings("corp:", &[])).is_empty());
    }

    #[test]
    fn the_patterns_apply_to_the_names_of_the_provider() {
        let claim = json!(["argo:admins", "argo:viewers", "staff"]);
        assert_eq!(names(&claim, &settings("corp:", &["argo:*"])), ["corp:argo:admins", "corp:argo:viewers"]);
        assert_eq!(names(&claim, &settings("corp:", &["staff", "argo:admins"])), ["corp:argo:admins", "corp:staff"]);
        assert!(names(&claim, &settings("corp:", &["corp:*"])).is_empty());
    }

    #[test]
    fn items_that_are_not_valid_names_are_dropped() {
        let (longest, too_long) = ("a".repeat(123), "a".repeat(124));
        let claim =
            json!(["é", "", "a\tb", "a\nb", "\u{7f}", 1, null, true, ["x"], { "name": "x" }, longest, too_long, "ok"]);
        assert_eq!(names(&claim, &settings("corp:", &[])), [format!("corp:{longest}"), "corp:ok".to_owned()]);
        assert!(names(&json!(["ok"]), &settings("é:", &[])).is_empty(), "the prefix is part of the name");
    }

    #[test]
    fn too_many_reported_groups_give_no_groups() {
        let claim = |count: usize| Value::from((0..count).map(|number| format!("g{number}")).collect::<Vec<_>>());
        assert_eq!(names(&claim(500), &settings("corp:", &[])).len(), 500);
        assert!(names(&claim(501), &settings("corp:", &[])).is_empty());
        // Only groups that match the patterns are counted.
        assert_eq!(names(&claim(2000), &settings("corp:", &["g7", "g1999"])).len(), 2);
    }

    #[test]
    fn a_claim_that_is_not_an_array_has_no_groups() {
        for claim in [json!("staff"), json!({ "staff": true }), json!(1), json!(true)] {
            assert_eq!(read_groups(&claim, &settings("", &[])), None, "{claim}");
        }
    }
}
