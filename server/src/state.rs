//! The state that all requests share.

use std::sync::Arc;

use crate::{
    callers::Callers, config::Apps, domain::clock::Env, settings::Settings, store::Stores, token_cache::TokenCache,
};

/// Generic over the stores, so that the request pipeline can be tested without stores.
pub struct State<S = Stores> {
    pub apps: Arc<Apps>,
    pub stores: S,
    pub env: Env,
    pub settings: Settings,
    pub callers: Callers,
    pub token_cache: TokenCache,
}
