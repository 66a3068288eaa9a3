//! Sessions: refresh, revocation and introspection (specification: Sessions and tokens).

pub mod introspect;
pub mod refresh;
