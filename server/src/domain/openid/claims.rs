//! The claims about a user that a client gets (OpenID Connect Core 1.0, 5.1).

use std::sync::Arc;

use latchkey_crds::{client::ClientScope, types::GroupName};
use serde::Serialize;

use super::{
    claims_request::{ClaimSet, UserClaim},
    client::{OpenIdClient, VisibleGroups},
    scope::Scopes,
};
use crate::domain::{
    call::Call,
    groups::user_groups,
    ports::{Groups, StoreError},
    session::Profile,
    user::UserId,
};

/// The claims about a user. A claim that was not granted is left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UserClaims<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// The email address, only if it is verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub email: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub email_verified: Option<bool>,
    /// The names of the user's groups that the client sees; empty if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub groups: Option<Vec<&'a str>>,
    /// `true` if the user has more groups than the client accepts. Then there is no claim `groups`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub groups_omitted: Option<bool>,
}

/// Reads the groups of the user if the client needs them, for the claim `groups` or for `allow.groups`.
pub async fn needed_groups<S: Groups>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    user: UserId,
    granted: ClaimSet,
) -> Result<Arc<[GroupName]>, StoreError> {
    if client.allowed_groups.is_empty() && !granted.contains(UserClaim::Groups) {
        return Ok(Arc::from([]));
    }
    user_groups(call, user).await
}

/// The part of the profile that these scopes disclose. The other fields are empty.
pub fn disclosed_profile(profile: Profile, scopes: Scopes) -> Profile {
    let has_email = scopes.contains(ClientScope::Email);
    Profile {
        version: profile.version,
        email: profile.email.filter(|_| has_email),
        email_verified: profile.email_verified && has_email,
        name: if scopes.contains(ClientScope::Profile) { profile.name } else { String::new() },
    }
}

// === impl UserClaims ===

impl<'a> UserClaims<'a> {
    pub fn new(client: &OpenIdClient, profile: &'a Profile, groups: &'a [GroupName], granted: ClaimSet) -> Self {
        let (groups, groups_omitted) = if granted.contains(UserClaim::Groups) {
            match client.groups.visible(groups) {
                VisibleGroups::Listed(names) => (Some(names), None),
                VisibleGroups::TooMany => (None, Some(true)),
            }
        } else {
            (None, None)
        };
        Self {
            name: granted.contains(UserClaim::Name).then_some(profile.name.as_str()),
            email: profile.verified_email().filter(|_| granted.contains(UserClaim::Email)),
            email_verified: granted.contains(UserClaim::EmailVerified).then_some(profile.email_verified),
            groups,
            groups_omitted,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixtures;

    fn claims(scopes: &str, profile: &Profile, groups: &[GroupName]) -> Value {
        let app = fixtures::provider(vec![fixtures::client("grafana")]);
        let client = app.client("grafana").unwrap();
        let granted = ClaimSet::released(Scopes::parse_known(scopes), client.scopes, ClaimSet::NONE);
        serde_json::to_value(UserClaims::new(client, profile, groups, granted)).unwrap()
    }

    fn profile(email_verified: bool) -> Profile {
        Profile { version: 1, email: Some("ada@example.com".to_owned()), email_verified, name: "Ada".to_owned() }
    }

    #[test]
    fn each_scope_has_its_claims() {
        let groups = ["dev", "ops"].map(|name| name.parse::<GroupName>().unwrap());
        assert_eq!(claims("openid", &profile(true), &groups), json!({}));
        assert_eq!(claims("openid profile", &profile(true), &groups), json!({ "name": "Ada" }));
        let email = json!({ "email": "ada@example.com", "email_verified": true });
        assert_eq!(claims("openid email", &profile(true), &groups), email);
        assert_eq!(claims("openid email", &profile(false), &groups), json!({ "email_verified": false }));
        assert_eq!(claims("openid groups", &profile(true), &groups), json!({ "groups": ["dev", "ops"] }));
        assert_eq!(claims("openid groups", &profile(true), &[]), json!({ "groups": [] }));
    }

    #[test]
    fn a_profile_is_disclosed_by_scope() {
        let disclosed = |scopes: &str| {
            let Profile { email, email_verified, name, .. } =
                disclosed_profile(profile(true), Scopes::parse_known(scopes));
            (email, email_verified, name)
        };
        let email = || Some("ada@example.com".to_owned());
        assert_eq!(disclosed("openid groups"), (None, false, String::new()));
        assert_eq!(disclosed("openid email"), (email(), true, String::new()));
        assert_eq!(disclosed("openid profile"), (None, false, "Ada".to_owned()));
        assert_eq!(disclosed("openid profile email"), (email(), true, "Ada".to_owned()));
    }

    #[test]
    fn too_many_groups_are_omitted() {
        let groups: Vec<GroupName> = (0..101).map(|number| format!("g{number}").parse().unwrap()).collect();
        assert_eq!(claims("openid groups", &profile(true), &groups), json!({ "groups_omitted": true }));
        assert_eq!(claims("openid groups", &profile(true), &groups[1..])["groups"].as_array().unwrap().len(), 100);
    }
}
