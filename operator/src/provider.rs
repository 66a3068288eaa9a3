//! The steps of the reconcile of a Provider: resolve its references, validate it, write its status.

mod finding;
pub(crate) mod reconcile;
pub(crate) mod resolve;
mod status;
pub(crate) mod validate;
