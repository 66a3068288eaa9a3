//! The permissions that the chart grants, one by one, so that a test can revoke each of them.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Installation, apply};

/// One verb on one resource in a role of the chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permission {
    /// `Role` or `ClusterRole`.
    pub kind: String,
    /// The role's namespace; `None` for a ClusterRole.
    pub namespace: Option<String>,
    pub role: String,
    pub group: String,
    /// The resource with its subresource, for example `apps/status`.
    pub resource: String,
    pub verb: String,
}

impl Installation<'_> {
    /// The permissions that the chart grants to a program (`operator` or `server`), but not those in the roles for
    /// people.
    pub fn permissions(&self, component: &str) -> Vec<Permission> {
        let roles = self.objects().iter().filter(|object| {
            matches!(object["kind"].as_str(), Some("Role" | "ClusterRole"))
                && object["metadata"]["labels"]["app.kubernetes.io/component"] == component
        });
        let mut permissions = Vec::new();
        for role in roles {
            for rule in list(&role["rules"]) {
                for group in texts(&rule["apiGroups"]) {
                    for resource in texts(&rule["resources"]) {
                        permissions.extend(texts(&rule["verbs"]).into_iter().map(|verb| Permission {
                            kind: text(&role["kind"]),
                            namespace: role["metadata"]["namespace"].as_str().map(str::to_owned),
                            role: text(&role["metadata"]["name"]),
                            group: group.clone(),
                            resource: resource.clone(),
                            verb,
                        }));
                    }
                }
            }
        }
        permissions
    }

    /// Revokes a permission. Open watches continue; a restart of the program ends them.
    pub async fn revoke(&self, permission: &Permission) -> Result<()> {
        let mut role = self.role(permission)?;
        let before = role["rules"].clone();
        let rules: Vec<Value> = list(&before).iter().flat_map(|rule| permission.remove_from(rule)).collect();
        ensure!(!rules.is_empty(), "a role without rules tests nothing: {permission:?}");
        role["rules"] = json!(rules);
        apply(&self.admin(), &role).await?;
        Ok(())
    }

    /// Grants a revoked permission again.
    pub async fn grant(&self, permission: &Permission) -> Result<()> {
        apply(&self.admin(), &self.role(permission)?).await?;
        Ok(())
    }

    fn role(&self, permission: &Permission) -> Result<Value> {
        let found = self.objects().iter().find(|object| {
            object["kind"] == permission.kind.as_str()
                && object["metadata"]["name"] == permission.role.as_str()
                && object["metadata"]["namespace"].as_str() == permission.namespace.as_deref()
        });
        found.cloned().with_context(|| format!("the chart has no role of {permission:?}"))
    }
}

// === impl Permission ===

impl Permission {
    /// Splits a rule into one rule for each resource, and removes the permission's verb from the rule for the
    /// permission's resource.
    fn remove_from(&self, rule: &Value) -> Vec<Value> {
        let groups = texts(&rule["apiGroups"]);
        let rules = texts(&rule["resources"]).into_iter().filter_map(|resource| {
            let mut verbs = texts(&rule["verbs"]);
            if resource == self.resource && groups.contains(&self.group) {
                verbs.retain(|verb| *verb != self.verb);
            }
            let mut rule = rule.clone();
            rule["resources"] = json!([resource]);
            rule["verbs"] = json!(verbs);
            (!verbs.is_empty()).then_some(rule)
        });
        rules.collect()
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn texts(value: &Value) -> Vec<String> {
    list(value).iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verb_is_removed_only_from_its_resource() {
        let rule = json!({ "apiGroups": [""], "resources": ["secrets", "configmaps"], "verbs": ["get", "watch"] });
        let permission = Permission {
            kind: "Role".into(),
            namespace: None,
            role: "one".into(),
            group: String::new(),
            resource: "secrets".into(),
            verb: "get".into(),
        };
        let expected = json!([
            { "apiGroups": [""], "resources": ["secrets"], "verbs": ["watch"] },
            { "apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "watch"] },
        ]);
        assert_eq!(json!(permission.remove_from(&rule)), expected);
        let other = json!({ "apiGroups": ["other"], "resources": ["secrets"], "verbs": ["get"] });
        assert_eq!(permission.remove_from(&other), [other]);
    }
}
