//! What every request may use: built once in `main`, handed down.

use std::sync::Arc;

use crate::{config::Apps, domain::clock::Env, settings::Settings, store::Stores};

/// Generic over the stores, so that the door can be tested without any.
pub struct State<S = Stores> {
    pub apps: Arc<Apps>,
    pub stores: S,
    pub env: Env,
    pub settings: Settings,
}
