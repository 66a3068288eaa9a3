//! The state that all requests share.

use std::sync::Arc;

use crate::{
    callers::Callers,
    client_metrics::ClientMetrics,
    config::Apps,
    domain::{app::App, call::Call, client::ClientInfo, clock::Env},
    http::openapi::Documents,
    import_metrics::ImportMetrics,
    settings::Settings,
    store::Stores,
    token_cache::TokenCache,
};

/// The shared state. It is generic over the stores, so that the request pipeline can be tested without Postgres and
/// Redis.
pub struct State<S = Stores> {
    pub apps: Arc<Apps>,
    pub stores: S,
    pub env: Env,
    pub settings: Settings,
    pub openapi: Documents,
    pub callers: Callers,
    pub token_cache: TokenCache,
    pub import_metrics: ImportMetrics,
    pub client_metrics: ClientMetrics,
}

// === impl State ===

impl<S> State<S> {
    /// Builds the context of a use case, for a request of this client to this App.
    pub fn call<'a>(&'a self, app: &'a App, client: &'a ClientInfo) -> Call<'a, S> {
        Call { stores: &self.stores, env: &self.env, app, client }
    }
}
