//! The administration listener: the ServiceAccounts that an App lists can read and change its users.
//!
//! Each call is checked in this order. The number is the status of the error if the check fails: path and App (404),
//! method (405), token (401), right (403), number of calls in flight (429), query and body, existence of the object
//! (404), `If-Match` (412), conflict with another object (409).

use std::sync::Arc;

use http::Method;

use super::{
    Ports, authentication, endpoints,
    error::Problem,
    handlers::administration::{export, webhooks},
    pipeline::{Endpoints, Lookup},
    request::InboundRequest,
    response::Response,
    routes::{AdministrationRoute, RouteTable},
};
use crate::{
    domain::{app::App, rights::Right},
    state::State,
};

mod body;
mod cursor;
mod limits;
mod query;

pub use body::{NewUserFields, StrictBody};
pub use cursor::Cursor;
pub use limits::CallLimits;
pub use query::{NumberParameter, Query};

pub(super) struct AdministrationEndpoints<S> {
    state: Arc<State<S>>,
    limits: CallLimits,
}

// === impl AdministrationEndpoints ===

impl<S> AdministrationEndpoints<S> {
    /// `connections`: the maximum number of connections of the listener.
    pub(super) fn new(state: Arc<State<S>>, connections: usize) -> Self {
        Self { state, limits: CallLimits::new(connections) }
    }
}

impl<S: Ports> Endpoints for AdministrationEndpoints<S> {
    type Route = AdministrationRoute;

    const LISTENER: &'static str = "admin";
    /// The callers are programs in the cluster. They are trusted to decide which traces are sampled.
    const TRUSTS_SAMPLING: bool = true;

    fn find(&self, method: &Method, path: &str) -> Lookup<AdministrationRoute> {
        Lookup::find(&self.state.apps, method, path)
    }

    fn name(route: AdministrationRoute) -> &'static str {
        route.name()
    }

    fn path_template(route: AdministrationRoute) -> Option<&'static str> {
        Some(route.path_template())
    }

    fn is_logged_at_debug(_: AdministrationRoute) -> bool {
        false
    }

    /// No route sends CORS headers, because the callers are not browsers.
    fn has_cors(_: AdministrationRoute) -> bool {
        false
    }

    async fn call(
        &self,
        route: AdministrationRoute,
        app: Option<Arc<App>>,
        request: InboundRequest,
    ) -> Result<Response, Problem> {
        let Some((app, right)) = app.as_deref().zip(endpoints::administration::right(route)) else {
            return endpoints::administration::call_service(route, &self.state.openapi.administration, request).await;
        };
        let caller = authentication::authenticate_caller(&self.state, app, &request.headers).await?;
        if right == Right::FetchEvents {
            webhooks::authorize(app, &caller, &request)?;
        } else {
            caller.require(right)?;
        }
        // Only this call needs a right that depends on its query.
        if route == AdministrationRoute::ExportUsers && export::users::requests_hashes(&request.uri) {
            caller.require(Right::ManageUsers)?;
        }
        let permit = self.limits.admit(app.id(), &caller.account, route)?;
        let response = endpoints::administration::call(route, &self.state, app, &caller, request).await?;
        Ok(permit.hold_until_sent(response))
    }
}
