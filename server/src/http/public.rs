//! The public listener: the login API.

use std::sync::Arc;

use bytes::Bytes;
use http::Method;

use super::{
    Ports, endpoints,
    error::Problem,
    openapi,
    pipeline::{Endpoints, Lookup},
    request::InboundRequest,
    response::Response,
    routes::{Route, RouteTable},
};
use crate::{domain::app::App, state::State};

pub(super) struct PublicEndpoints<S> {
    state: Arc<State<S>>,
    /// The OpenAPI document, rendered once.
    openapi: Bytes,
}

// === impl PublicEndpoints ===

impl<S> PublicEndpoints<S> {
    pub(super) fn new(state: Arc<State<S>>) -> Self {
        let openapi = openapi::public_document(&state.settings.base_url).to_string().into();
        Self { state, openapi }
    }
}

impl<S: Ports> Endpoints for PublicEndpoints<S> {
    type Route = Route;

    const LISTENER: &'static str = "public";

    fn find(&self, method: &Method, path: &str) -> Lookup<Route> {
        Lookup::find(&self.state.apps, method, path)
    }

    fn name(route: Route) -> &'static str {
        route.name()
    }

    fn path_template(route: Route) -> Option<&'static str> {
        Some(route.path_template())
    }

    /// The ingress calls forward auth for every request and has its own log.
    fn is_logged_at_debug(route: Route) -> bool {
        matches!(route, Route::Authorize | Route::AuthorizeBelow)
    }

    /// The ingress waits for forward auth before it lets a request through. A held refusal would block a connection
    /// that the ingress uses for all clients.
    fn can_hold_refusal(route: Route) -> bool {
        !matches!(route, Route::Authorize | Route::AuthorizeBelow)
    }

    /// No page calls forward auth itself. If the response of forward auth had CORS headers, the ingress would copy them
    /// into the response that the page gets.
    fn has_cors(route: Route) -> bool {
        !matches!(route, Route::Authorize | Route::AuthorizeBelow)
    }

    async fn call(&self, route: Route, app: Option<Arc<App>>, request: InboundRequest) -> Result<Response, Problem> {
        endpoints::call(route, &self.state, &self.openapi, app.as_deref(), request).await
    }
}
