//! Sessions: open, refresh, revoke, introspect (specification: Sessions and tokens).

mod introspect;
pub(super) mod open;
mod refresh;
mod revoke;

pub use introspect::{ActiveToken, IntrospectError, TokenKind, introspect};
pub use refresh::{RefreshError, RefreshedSession, UNKNOWN_KEY_RETRY, refresh};
pub use revoke::revoke;
