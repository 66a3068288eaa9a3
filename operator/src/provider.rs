//! The steps of a Provider: resolve, validate, status.

pub(crate) mod reconcile;
pub(crate) mod resolve;
pub(crate) mod validate;
