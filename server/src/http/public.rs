//! The public listener: the login API and the hosted pages.

use std::sync::Arc;

use futures::FutureExt;
use http::Method;

use super::{
    Ports, endpoints,
    error::Problem,
    metrics::HttpMetrics,
    pages::{self, PageRoute, Pages},
    pipeline::{Endpoints, Lookup},
    request::InboundRequest,
    response::Response,
    routes::{Route, RouteTable},
};
use crate::{domain::app::App, state::State};

/// The paths of the files that all pages share.
const ASSETS: &str = "/assets/";

pub(super) struct PublicEndpoints<S> {
    state: Arc<State<S>>,
    pages: Pages,
}

/// The target of a path of the public listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PublicRoute {
    Api(Route),
    Page(PageRoute),
    /// A file that all pages share.
    Asset,
}

// === impl PublicEndpoints ===

impl<S> PublicEndpoints<S> {
    pub(super) fn new(state: Arc<State<S>>, metrics: HttpMetrics) -> Self {
        Self { state, pages: Pages::new(metrics) }
    }

    /// Finds a page. The page itself checks the method, because the error for a wrong method is a page, too. If the App
    /// does not have the page, the path is unknown.
    fn find_page(&self, path: &str) -> Lookup<PublicRoute> {
        if let Some(file) = path.strip_prefix(ASSETS).filter(|_| self.state.apps.has_pages()) {
            return Lookup::Route { route: PublicRoute::Asset, app: None, path_parameters: vec![file.to_owned()] };
        }
        let Some((id, route)) = PageRoute::find(path) else { return Lookup::NotFound };
        match self.state.apps.get(id).filter(|app| has_page(app, route)) {
            Some(app) => Lookup::Route { route: PublicRoute::Page(route), app: Some(app), path_parameters: Vec::new() },
            None => Lookup::NotFound,
        }
    }
}

impl<S: Ports> Endpoints for PublicEndpoints<S> {
    type Route = PublicRoute;

    const LISTENER: &'static str = "public";
    const HOLDS_REFUSED_HEADS: bool = true;

    fn find(&self, method: &Method, path: &str) -> Lookup<PublicRoute> {
        match Lookup::<Route>::find(&self.state.apps, method, path) {
            Lookup::NotFound => self.find_page(path),
            found => only_with_clients(found).map(PublicRoute::Api),
        }
    }

    fn name(route: PublicRoute) -> &'static str {
        match route {
            PublicRoute::Api(route) => route.name(),
            PublicRoute::Page(route) => route.name(),
            PublicRoute::Asset => "page-asset",
        }
    }

    fn path_template(route: PublicRoute) -> Option<&'static str> {
        Some(match route {
            PublicRoute::Api(route) => route.path_template(),
            PublicRoute::Page(route) => route.path_template(),
            PublicRoute::Asset => "/assets/{FILE}",
        })
    }

    /// The ingress calls forward auth for every request and has its own log.
    fn is_logged_at_debug(route: PublicRoute) -> bool {
        route.is_forward_auth()
    }

    /// The ingress waits for forward auth before it lets a request through. A held refusal would block a connection
    /// that the ingress uses for all clients.
    fn can_hold_refusal(route: PublicRoute) -> bool {
        !route.is_forward_auth()
    }

    /// No web page calls forward auth itself. If the response of forward auth had CORS headers, the ingress would copy
    /// them into the response that the web page gets. The hosted pages have no CORS headers, so that no other site can
    /// read them.
    fn has_cors(route: PublicRoute) -> bool {
        matches!(route, PublicRoute::Api(_)) && !route.is_forward_auth()
    }

    fn is_for_clients(route: PublicRoute) -> bool {
        let PublicRoute::Api(route) = route else { return false };
        matches!(
            route,
            Route::Token
                | Route::Revoke
                | Route::UserInfo
                | Route::UserInfoForm
                | Route::Jwks
                | Route::OpenIdConfiguration
                | Route::AuthorizationServer
                | Route::AuthorizationServerOfApp
        )
    }

    async fn call(
        &self,
        route: PublicRoute,
        app: Option<Arc<App>>,
        request: InboundRequest,
    ) -> Result<Response, Problem> {
        match (route, app) {
            (PublicRoute::Api(route), app) => endpoints::call(route, &self.state, app.as_deref(), request).await,
            (PublicRoute::Page(route), Some(app)) => {
                // Boxed, so that the future of every request is not as large as that of a page.
                self.pages.handle(&self.state, route, &app, request).boxed().await
            }
            (PublicRoute::Page(_), None) => Err(Problem::not_found()),
            (PublicRoute::Asset, _) => pages::asset(&request),
        }
    }
}

/// Whether the App has this page. An App without clients has no page `consent`. Its page `authorize` shows
/// `invalid_client`, and `account/applications` checks itself whether it exists.
fn has_page(app: &App, route: PageRoute) -> bool {
    app.pages.is_some() && (app.has_clients() || !route.needs_clients())
}

/// Hides the paths and methods that only clients need, unless the App exists and has clients.
fn only_with_clients(found: Lookup<Route>) -> Lookup<Route> {
    /// The methods of *userinfo* in an App without clients.
    const USERINFO: &str = "GET, HEAD, OPTIONS";
    let has_clients = |app: &Option<Arc<App>>| app.as_ref().is_some_and(|app| app.has_clients());
    match found {
        Lookup::Route { route: Route::Par, ref app, .. }
        | Lookup::WrongMethod { route: Route::Par, ref app, .. }
        | Lookup::Options { route: Route::Par, ref app, .. }
            if !has_clients(app) =>
        {
            Lookup::NotFound
        }
        Lookup::AppNotFound { route: Route::Par } => Lookup::NotFound,
        Lookup::Route { route: Route::UserInfoForm, app, .. } if !has_clients(&app) => {
            Lookup::WrongMethod { route: Route::UserInfo, app, allow: USERINFO }
        }
        Lookup::WrongMethod { route: Route::UserInfo, app, .. } if !has_clients(&app) => {
            Lookup::WrongMethod { route: Route::UserInfo, app, allow: USERINFO }
        }
        Lookup::Options { route: Route::UserInfo, app, .. } if !has_clients(&app) => {
            Lookup::Options { route: Route::UserInfo, app, allow: USERINFO }
        }
        Lookup::AppNotFound { route: Route::UserInfoForm } => Lookup::AppNotFound { route: Route::UserInfo },
        found => found,
    }
}

// === impl PublicRoute ===

impl PublicRoute {
    fn is_forward_auth(self) -> bool {
        matches!(self, Self::Api(Route::Authorize | Route::AuthorizeBelow))
    }
}
