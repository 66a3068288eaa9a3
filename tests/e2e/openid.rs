//! The OpenID provider: its pages in a browser without scripts, with real stores and mails, and third-party programs
//! that sign in users (tests/interop/openid/README.md).

mod applications;
mod authorize;
mod consent;
mod guides;
mod kubectl;
mod logout;

mod programs;
mod provider_test;
