//! The scopes that a client can request (OpenID Connect Core 1.0, 5.4).

use std::fmt;

use latchkey_crds::client::ClientScope;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// All scopes with their names, in the order in which they are printed.
const ALL: [(ClientScope, &str); 5] = [
    (ClientScope::OpenId, "openid"),
    (ClientScope::Profile, "profile"),
    (ClientScope::Email, "email"),
    (ClientScope::Groups, "groups"),
    (ClientScope::OfflineAccess, "offline_access"),
];

/// A set of scopes. Its text form is their names, separated by spaces (RFC 6749, 3.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Scopes(u8);

const fn bit(scope: ClientScope) -> u8 {
    match scope {
        ClientScope::OpenId => 1,
        ClientScope::Profile => 1 << 1,
        ClientScope::Email => 1 << 2,
        ClientScope::Groups => 1 << 3,
        ClientScope::OfflineAccess => 1 << 4,
    }
}

// === impl Scopes ===

impl Scopes {
    pub const NONE: Self = Self(0);

    /// Reads the value of a parameter `scope`. Unknown scopes are left out.
    pub fn parse_known(text: &str) -> Self {
        let scope = |name: &str| ALL.iter().find(|(_, known)| *known == name).map(|(scope, _)| *scope);
        text.split(' ').filter_map(scope).collect()
    }

    /// The names of all scopes, for discovery.
    pub fn all_names() -> [&'static str; 5] {
        ALL.map(|(_, name)| name)
    }

    pub const fn contains(self, scope: ClientScope) -> bool {
        self.0 & bit(scope) != 0
    }

    #[must_use]
    pub const fn with(self, scope: ClientScope) -> Self {
        Self(self.0 | bit(scope))
    }

    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub const fn is_subset_of(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }

    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The scopes of the set, in the order in which they are printed.
    pub fn iter(self) -> impl Iterator<Item = ClientScope> {
        ALL.into_iter().map(|(scope, _)| scope).filter(move |scope| self.contains(*scope))
    }
}

impl FromIterator<ClientScope> for Scopes {
    fn from_iter<I: IntoIterator<Item = ClientScope>>(scopes: I) -> Self {
        scopes.into_iter().fold(Self::NONE, Self::with)
    }
}

impl fmt::Display for Scopes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (scope, name) in ALL {
            if self.contains(scope) {
                write!(f, "{separator}{name}")?;
                separator = " ";
            }
        }
        Ok(())
    }
}

impl Serialize for Scopes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Scopes that only a newer server knows are left out.
impl<'de> Deserialize<'de> for Scopes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|text| Self::parse_known(&text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_are_printed_in_a_fixed_order_and_unknown_ones_are_left_out() {
        let scopes = Scopes::parse_known("offline_access  email openid email OPENID roles");
        assert_eq!(scopes.to_string(), "openid email offline_access");
        assert_eq!(Scopes::parse_known(&scopes.to_string()), scopes);
        assert_eq!(serde_json::to_string(&scopes).unwrap(), "\"openid email offline_access\"");
        assert_eq!(serde_json::from_str::<Scopes>("\"openid later email offline_access\"").unwrap(), scopes);
        assert!(Scopes::parse_known("").is_empty() && Scopes::parse_known("open id").is_empty());
    }

    #[test]
    fn sets_of_scopes_can_be_compared_intersected_and_extended() {
        let (all, some) = (Scopes::parse_known("openid profile email"), Scopes::parse_known("openid email"));
        assert!(some.is_subset_of(all) && !all.is_subset_of(some));
        assert_eq!(all.intersection(Scopes::parse_known("email groups")).to_string(), "email");
        assert_eq!(some.iter().collect::<Vec<_>>(), [ClientScope::OpenId, ClientScope::Email]);
        assert!(some.with(ClientScope::Groups).contains(ClientScope::Groups) && !some.contains(ClientScope::Groups));
    }
}
