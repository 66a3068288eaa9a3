//! What every request may use: built once in `main`, handed down.

use std::sync::Arc;

use crate::{config::Apps, domain::clock::Env, settings::Settings, store::Stores};

pub struct State {
    pub apps: Arc<Apps>,
    pub stores: Stores,
    pub env: Env,
    pub settings: Settings,
}
