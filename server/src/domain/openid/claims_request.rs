//! The parameter `claims`, with which a client requests single claims (OpenID Connect Core 1.0, 5.5).

use latchkey_crds::client::ClientScope;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{ACR, scope::Scopes};

/// The maximum length of the parameter, in bytes.
pub const MAX_CLAIMS_BYTES: usize = 4 * 1024;

/// A claim about the user that can be requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserClaim {
    Name,
    Email,
    EmailVerified,
    Groups,
}

/// A set of claims about the user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ClaimSet(u8);

/// The content of the parameter. Only the two sets are stored with a code or a session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedClaims {
    /// Claims of the ID token.
    #[serde(rename = "i", default)]
    pub id_token: ClaimSet,
    /// Claims of *userinfo*.
    #[serde(rename = "u", default)]
    pub userinfo: ClaimSet,
    /// The user must have one of these ids. Empty: any user.
    #[serde(skip)]
    pub subjects: Vec<String>,
    /// Whether an essential `acr` lists only classes that Latchkey does not support. Then the request cannot succeed.
    #[serde(skip)]
    pub is_acr_unmet: bool,
}

/// The parameter is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("claims is not an object as in OpenID Connect Core 1.0, 5.5, or is longer than 4 KiB")]
pub struct InvalidClaims;

// === impl UserClaim ===

impl UserClaim {
    const ALL: [(Self, &'static str); 4] = [
        (Self::Name, "name"),
        (Self::Email, "email"),
        (Self::EmailVerified, "email_verified"),
        (Self::Groups, "groups"),
    ];

    const fn bit(self) -> u8 {
        match self {
            Self::Name => 1,
            Self::Email => 1 << 1,
            Self::EmailVerified => 1 << 2,
            Self::Groups => 1 << 3,
        }
    }

    /// The scope that a client needs for the claim.
    const fn scope(self) -> ClientScope {
        match self {
            Self::Name => ClientScope::Profile,
            Self::Email | Self::EmailVerified => ClientScope::Email,
            Self::Groups => ClientScope::Groups,
        }
    }
}

// === impl ClaimSet ===

impl ClaimSet {
    pub const NONE: Self = Self(0);

    pub const fn contains(self, claim: UserClaim) -> bool {
        self.0 & claim.bit() != 0
    }

    #[must_use]
    pub const fn with(self, claim: UserClaim) -> Self {
        Self(self.0 | claim.bit())
    }

    #[must_use]
    pub const fn without(self, claim: UserClaim) -> Self {
        Self(self.0 & !claim.bit())
    }

    /// The claims of the granted scopes, and the single claims that were requested. Leaves out claims for which the
    /// client does not have the scope.
    pub fn released(granted: Scopes, of_client: Scopes, requested: Self) -> Self {
        let is_released = |claim: UserClaim| {
            let scope = claim.scope();
            of_client.contains(scope) && (granted.contains(scope) || requested.contains(claim))
        };
        let all = UserClaim::ALL.into_iter().map(|(claim, _)| claim);
        all.filter(|claim| is_released(*claim)).fold(Self::NONE, Self::with)
    }

    /// Removes the claims of each granted scope that the token lacks. A token lacks scopes if its client requested
    /// fewer than were granted (RFC 6749, 6).
    #[must_use]
    pub fn narrowed(self, granted: Scopes, of_token: Scopes) -> Self {
        let all = UserClaim::ALL.into_iter().map(|(claim, _)| claim);
        let is_dropped = |claim: &UserClaim| granted.contains(claim.scope()) && !of_token.contains(claim.scope());
        all.filter(is_dropped).fold(self, Self::without)
    }

    /// The scopes that a client needs for the claims of the set.
    pub fn scopes(self) -> Scopes {
        let all = UserClaim::ALL.into_iter().map(|(claim, _)| claim);
        all.filter(|claim| self.contains(*claim)).map(UserClaim::scope).collect()
    }

    /// The set as Redis stores it.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The set for bits from Redis. Bits of unknown claims have no effect.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    fn of_names(members: &Map<String, Value>) -> Self {
        let named = UserClaim::ALL.into_iter().filter(|(_, name)| members.contains_key(*name));
        named.map(|(claim, _)| claim).fold(Self::NONE, Self::with)
    }
}

// === impl RequestedClaims ===

impl RequestedClaims {
    /// Parses the parameter. Unknown claims are ignored.
    pub fn parse(text: &str) -> Result<Self, InvalidClaims> {
        if text.len() > MAX_CLAIMS_BYTES {
            return Err(InvalidClaims);
        }
        // 4 KiB of JSON have at most a few thousand values, and serde_json bounds the depth.
        let document: Value = serde_json::from_str(text).map_err(|_| InvalidClaims)?;
        let Value::Object(mut document) = document else { return Err(InvalidClaims) };
        let mut members = |name: &str| match document.remove(name) {
            None | Some(Value::Null) => Ok(Map::new()),
            Some(Value::Object(members)) => Ok(members),
            Some(_) => Err(InvalidClaims),
        };
        let (id_token, userinfo) = (members("id_token")?, members("userinfo")?);
        for request in id_token.values().chain(userinfo.values()) {
            check_request(request)?;
        }
        let subjects = id_token.get("sub").into_iter().chain(userinfo.get("sub")).map(requested_values);
        let subjects = subjects.filter(|values| !values.is_empty()).reduce(|one, other| {
            // If both `id_token` and `userinfo` name users, only a user in both lists is accepted.
            let both: Vec<String> = one.into_iter().filter(|value| other.contains(value)).collect();
            // No user has an empty id, so this matches no user.
            if both.is_empty() { vec![String::new()] } else { both }
        });
        let is_acr_unmet = id_token.get("acr").is_some_and(|acr| {
            let values = requested_values(acr);
            let is_essential = acr.get("essential") == Some(&Value::Bool(true));
            is_essential && !values.is_empty() && !values.iter().any(|value| value == ACR)
        });
        Ok(Self {
            id_token: ClaimSet::of_names(&id_token),
            userinfo: ClaimSet::of_names(&userinfo),
            subjects: subjects.unwrap_or_default(),
            is_acr_unmet,
        })
    }

    /// Whether the request names this user, or no user.
    pub fn allows_subject(&self, user: &str) -> bool {
        self.subjects.is_empty() || self.subjects.iter().any(|subject| subject == user)
    }
}

/// Checks the request for one claim: it must be null or an object. In an object, `essential` must be a boolean, and
/// `values` an array that is not empty, if they are present (5.5.1).
fn check_request(request: &Value) -> Result<(), InvalidClaims> {
    let members = match request {
        Value::Null => return Ok(()),
        Value::Object(members) => members,
        _ => return Err(InvalidClaims),
    };
    let is_valid = |(name, value): (&String, &Value)| match name.as_str() {
        "essential" => value.is_boolean(),
        "values" => value.as_array().is_some_and(|values| !values.is_empty()),
        _ => true,
    };
    if members.iter().all(is_valid) { Ok(()) } else { Err(InvalidClaims) }
}

/// The strings in `value` and `values`. A value that is not a string matches nothing.
fn requested_values(request: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let several = request.get("values").and_then(Value::as_array).into_iter().flatten();
    request.get("value").into_iter().chain(several).map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrower_token_loses_the_claims_of_granted_scopes_that_it_does_not_have() {
        let requested = ClaimSet::NONE.with(UserClaim::Email).with(UserClaim::Groups);
        let narrowed = |granted: &str, of_token: &str| {
            requested.narrowed(Scopes::parse_known(granted), Scopes::parse_known(of_token))
        };
        assert_eq!(narrowed("openid email", "openid email"), requested);
        assert_eq!(narrowed("openid email", "openid"), ClaimSet::NONE.with(UserClaim::Groups));
        assert_eq!(narrowed("openid", "openid"), requested, "asked for without their scopes");
        assert_eq!(narrowed("openid email groups", "openid"), ClaimSet::NONE);
    }

    fn parse(text: &str) -> RequestedClaims {
        RequestedClaims::parse(text).unwrap_or_else(|_| panic!("{text}"))
    }

    #[test]
    fn claims_are_collected_separately_for_the_id_token_and_for_userinfo() {
        let text = r#"{"id_token": {"email": null, "groups": {"essential": true}, "website": null},
            "userinfo": {"name": {"value": "Ada"}, "email_verified": null}, "later": 1}"#;
        let claims = parse(text);
        assert_eq!(claims.id_token, ClaimSet::NONE.with(UserClaim::Email).with(UserClaim::Groups));
        assert_eq!(claims.userinfo, ClaimSet::NONE.with(UserClaim::Name).with(UserClaim::EmailVerified));
        assert_eq!(claims.id_token.scopes().to_string(), "email groups");
        let stored: RequestedClaims = serde_json::from_str(&serde_json::to_string(&claims).unwrap()).unwrap();
        assert_eq!(stored, claims);
        assert_eq!(parse("{}"), RequestedClaims::default());
    }

    #[test]
    fn a_claim_is_released_only_within_the_scopes_of_the_client() {
        let (granted, of_client) = (Scopes::parse_known("openid profile"), Scopes::parse_known("openid profile email"));
        let requested = ClaimSet::NONE.with(UserClaim::Email).with(UserClaim::Groups);
        let released = ClaimSet::released(granted, of_client, requested);
        assert_eq!(released, ClaimSet::NONE.with(UserClaim::Name).with(UserClaim::Email));
        // The client has lost the scope `profile` since the login.
        let released = ClaimSet::released(granted, Scopes::parse_known("openid"), requested);
        assert_eq!(released, ClaimSet::NONE);
    }

    #[test]
    fn only_a_user_in_both_lists_is_accepted_if_id_token_and_userinfo_name_users() {
        let one = parse(r#"{"id_token": {"sub": {"value": "a"}}}"#);
        assert!(one.allows_subject("a") && !one.allows_subject("b"));
        let several = parse(r#"{"id_token": {"sub": {"values": ["a", "b"]}}, "userinfo": {"sub": {"value": "b"}}}"#);
        assert!(several.allows_subject("b") && !several.allows_subject("a"));
        let never = parse(r#"{"id_token": {"sub": {"value": "a"}}, "userinfo": {"sub": {"value": "b"}}}"#);
        assert!(!never.allows_subject("a") && !never.allows_subject("b"));
        let number = parse(r#"{"id_token": {"sub": {"value": 7}}}"#);
        assert!(!number.allows_subject("7"));
        assert!(parse(r#"{"id_token": {"sub": null}}"#).allows_subject("a"));
    }

    #[test]
    fn an_acr_is_unmet_only_if_it_is_essential_and_no_value_is_supported() {
        let acr = |request: &str| parse(&format!(r#"{{"id_token": {{"acr": {request}}}}}"#)).is_acr_unmet;
        assert!(acr(r#"{"essential": true, "value": "urn:other"}"#));
        assert!(acr(r#"{"essential": true, "values": ["urn:other", "urn:latchkey:aal:2"]}"#));
        assert!(!acr(r#"{"essential": true, "values": ["urn:other", "urn:latchkey:aal:1"]}"#));
        assert!(!acr(r#"{"essential": false, "value": "urn:other"}"#));
        assert!(!acr(r#"{"value": "urn:other"}"#));
        assert!(!acr(r#"{"essential": true}"#) && !acr("null"));
    }

    #[test]
    fn malformed_requests_are_refused() {
        let long = format!(r#"{{"id_token": {{"{}": null}}}}"#, "x".repeat(MAX_CLAIMS_BYTES));
        let deep = "[".repeat(2000);
        for bad in [
            "",
            "null",
            "[]",
            "\"x\"",
            "{",
            r#"{"id_token": []}"#,
            r#"{"userinfo": 1}"#,
            r#"{"id_token": {"email": true}}"#,
            r#"{"id_token": {"email": {"essential": "yes"}}}"#,
            r#"{"id_token": {"acr": {"values": []}}}"#,
            r#"{"id_token": {"acr": {"values": "urn:latchkey:aal:1"}}}"#,
            &long,
            &deep,
        ] {
            assert_eq!(RequestedClaims::parse(bad), Err(InvalidClaims), "{bad}");
        }
    }
}
