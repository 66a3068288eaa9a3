//! One file per endpoint: request, response, entry in the OpenAPI document, error mapping and handler.

pub mod activity;
pub mod administration;
pub mod authorize;
pub mod discovery;
pub mod email;
pub mod identities;
pub mod introspect;
pub mod jwks;
pub mod openapi_document;
pub mod ops;
pub mod par;
pub mod revoke;
pub mod sessions;
pub mod social;
pub mod token;
pub mod user;
