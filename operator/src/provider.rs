//! The steps of a Provider: resolve, validate, status.

mod finding;
pub(crate) mod reconcile;
pub(crate) mod resolve;
mod status;
pub(crate) mod validate;
