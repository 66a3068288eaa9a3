//! What a caller in the cluster can do with an App.

use std::fmt;

use latchkey_crds::rendered::AdministratorRole;

/// Something that a caller can be allowed to do with an App.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Introspect tokens.
    Introspect,
    /// Read users, sessions, events and dead letters.
    Read,
    /// Import users.
    Import,
    /// Create, change and delete users.
    ManageUsers,
    /// Fetch the events of a webhook. No role includes this right: the webhook names the ServiceAccount that has it.
    FetchEvents,
}

/// A set of rights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    introspect: bool,
    read: bool,
    import: bool,
    manage_users: bool,
}

// === impl Right ===

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Introspect => "introspect",
            Self::Read => "read",
            Self::Import => "import",
            Self::ManageUsers => "manage users",
            Self::FetchEvents => "fetch events",
        })
    }
}

// === impl Rights ===

impl Rights {
    /// The rights of the role Importer.
    pub const IMPORTER: Self = Self { introspect: false, read: false, import: true, manage_users: false };

    pub const fn of_role(role: AdministratorRole) -> Self {
        match role {
            AdministratorRole::Introspector => {
                Self { introspect: true, read: false, import: false, manage_users: false }
            }
            AdministratorRole::Reader => Self { introspect: true, read: true, import: false, manage_users: false },
            AdministratorRole::UserAdmin => Self { introspect: true, read: true, import: true, manage_users: true },
        }
    }

    pub const fn contains(self, right: Right) -> bool {
        match right {
            Right::Introspect => self.introspect,
            Right::Read => self.read,
            Right::Import => self.import,
            Right::ManageUsers => self.manage_users,
            Right::FetchEvents => false,
        }
    }

    pub const fn union(self, other: Self) -> Self {
        Self {
            introspect: self.introspect || other.introspect,
            read: self.read || other.read,
            import: self.import || other.import,
            manage_users: self.manage_users || other.manage_users,
        }
    }
}
