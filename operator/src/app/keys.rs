//! The keys of an App: their stored form, their life cycle, and the Secret that stores them.

pub(crate) mod acquire;
pub(crate) mod document;
pub(crate) mod lifecycle;
pub(crate) mod material;
pub(crate) mod policy;
pub(crate) mod secret;
mod stored_key;

pub(crate) use self::{
    document::{InvalidKeys, KeyDocument},
    material::{KeyGenerationError, from_pem},
};
