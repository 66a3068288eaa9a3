//! The keys of an App: what is stored of them, how they change over time, and the Secret that stores them.

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
