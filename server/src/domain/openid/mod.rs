//! The OpenID provider of an App (specification: OpenID provider): its clients, authorization codes, client sessions
//! and ID tokens.

pub mod access_token;
pub mod applications;
pub mod authenticate;
pub mod authorization_request;
pub mod authorize;
pub mod claims;
pub mod claims_request;
pub mod client;
pub mod client_assertion;
pub mod client_session;
pub mod code;
pub mod consent;
pub mod exchange;
pub mod id_token;
pub mod introspect;
pub mod logout;
pub mod par;
pub mod refresh;
pub mod revoke;
pub mod scope;
pub mod tokens;
pub mod userinfo;

/// The only authentication context class (OpenID Connect Core 1.0, 2): any login that an App allows.
pub const ACR: &str = "urn:latchkey:aal:1";
