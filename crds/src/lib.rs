//! The resources of Latchkey (`latchkey.dev/v1alpha1`), and the rendered document that the operator publishes to the
//! servers.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

pub mod app;
pub mod client;
pub mod conditions;
pub mod field_reference;
pub mod names;
pub mod pages;
pub mod provider;
pub mod refs;
pub mod rendered;
pub mod schema;
#[cfg(feature = "templates")]
pub mod templates;
pub mod types;
#[cfg(feature = "validation")]
pub mod validation;
pub mod webhook;

/// The API group of the resources.
pub const GROUP: &str = "latchkey.dev";
/// The version of the resources.
pub const VERSION: &str = "v1alpha1";

/// Returns all CustomResourceDefinitions as the chart installs them.
pub fn definitions() -> Vec<CustomResourceDefinition> {
    vec![app::definition(), provider::definition(), client::definition()]
}
