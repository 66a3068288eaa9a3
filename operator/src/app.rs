//! The steps of an App: resolve, validate, keys, render.

pub(crate) mod keys;
pub(crate) mod owner;
pub(crate) mod render;
pub(crate) mod resolve;
pub(crate) mod templates;
pub(crate) mod validate;

#[cfg(test)]
pub(crate) mod scripted;
