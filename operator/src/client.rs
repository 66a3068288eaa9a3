//! The Clients of Apps: which Clients an App accepts, how its document contains them, their Secrets, and their
//! statuses.

pub(crate) mod changes;
pub(crate) mod digest;
mod events;
pub(crate) mod gather;
pub(crate) mod jwks;
pub(crate) mod outcomes;
pub(crate) mod prune;
pub(crate) mod reconcile;
pub(crate) mod render;
pub(crate) mod rollout;
mod secret;
pub(crate) mod secret_state;
pub(crate) mod select;
pub(crate) mod status;
pub(crate) mod validate;

#[cfg(test)]
pub(crate) mod fixtures;
