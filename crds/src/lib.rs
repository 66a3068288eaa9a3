//! The resources of Latchkey (`latchkey.dev/v1alpha1`), and the document that its operator hands to its servers.

pub mod rendered;
pub mod types;

/// The API group of the resources.
pub const GROUP: &str = "latchkey.dev";
/// The version of the resources.
pub const VERSION: &str = "v1alpha1";
