//! What every request may use: built once in `main`, handed down.

use std::sync::Arc;

use crate::{
    callers::Callers,
    config::Apps,
    domain::{clock::Env, gate::Gate},
    settings::Settings,
    store::Stores,
};

/// Generic over the stores, so that the door can be tested without any.
pub struct State<S = Stores> {
    pub apps: Arc<Apps>,
    pub stores: S,
    pub env: Env,
    pub settings: Settings,
    pub callers: Callers,
    pub gate: Gate,
}
