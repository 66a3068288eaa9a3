//! The steps of a Provider: resolve, then validate.

pub(crate) mod resolve;
pub(crate) mod validate;
