//! Sessions: open, refresh, revoke, introspect, list and end (specification: Sessions and tokens).

mod introspect;
mod manage;
pub(super) mod open;
mod refresh;
mod revoke;

pub use introspect::{ActiveToken, IntrospectError, TokenKind, introspect};
pub use manage::{end_other_sessions, end_session, list_sessions, log_out};
pub use refresh::{RefreshError, RefreshedSession, UNKNOWN_KEY_RETRY, refresh};
pub use revoke::revoke;
