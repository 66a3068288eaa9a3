//! The public listener: the login API.

use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use http::Method;

use super::{
    Ports,
    error::Problem,
    handlers::{
        activity, authorize, discovery,
        email::{confirm, confirm_password, forgot_password, login, register, verify},
        identities, introspect, jwks, revoke, sessions, social, token, user,
    },
    openapi,
    pipeline::{Endpoints, Lookup},
    request::InboundRequest,
    response::{self, Response},
    routes::Route,
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
        let openapi = openapi::document(&state.settings.base_url).to_string().into();
        Self { state, openapi }
    }
}

impl<S: Ports> Endpoints for PublicEndpoints<S> {
    type Route = Route;

    const LISTENER: &'static str = "public";

    fn find(&self, method: &Method, path: &str) -> Lookup<Route> {
        let Some(matched) = Route::find(path) else { return Lookup::NotFound };
        let route = matched.route_for(method);
        let app = match matched.app.map(|id| self.state.apps.get(id)) {
            Some(None) => return Lookup::AppNotFound { route: route.unwrap_or(matched.any_route()) },
            Some(Some(app)) => Some(app),
            None => None,
        };
        let allow = matched.allow();
        match route {
            Some(route) => Lookup::Route { route, app, path_parameter: matched.path_parameter.map(str::to_owned) },
            None if method == Method::OPTIONS => Lookup::Options { route: matched.any_route(), app, allow },
            None => Lookup::WrongMethod { route: matched.any_route(), app, allow },
        }
    }

    fn name(route: Route) -> &'static str {
        route.name()
    }

    fn path_template(route: Route) -> Option<&'static str> {
        Some(route.template())
    }

    /// The ingress calls forward auth for every request and has its own log.
    fn is_logged_at_debug(route: Route) -> bool {
        matches!(route, Route::Authorize | Route::AuthorizeBelow)
    }

    /// The ingress waits for forward auth before each request of a page. A held refusal would block a connection of the
    /// ingress that all clients share.
    fn can_hold_refusal(route: Route) -> bool {
        !matches!(route, Route::Authorize | Route::AuthorizeBelow)
    }

    /// Pages do not call forward auth: its CORS headers would become those of the ingress's response.
    fn has_cors(route: Route) -> bool {
        !matches!(route, Route::Authorize | Route::AuthorizeBelow)
    }

    async fn call(&self, route: Route, app: Option<Arc<App>>, request: InboundRequest) -> Result<Response, Problem> {
        let state = &*self.state;
        let base = &state.settings.base_url;
        let openapi = |request: &InboundRequest| Ok(response::public_document(self.openapi.clone(), &request.headers));
        let Some(app) = app else {
            return if route == Route::OpenApi { openapi(&request) } else { Err(Problem::app_not_found()) };
        };
        let app = &*app;
        // Each future is boxed separately: otherwise every request would be as large as the largest of them.
        let handled = match route {
            Route::Login => login::handle(state, app, request).boxed(),
            Route::Register => register::handle(state, app, request).boxed(),
            Route::Verify => verify::handle(state, app, request).boxed(),
            Route::Confirm => confirm::handle(state, app, request).boxed(),
            Route::ForgotPassword => forgot_password::handle(state, app, request).boxed(),
            Route::ConfirmPassword => confirm_password::handle(state, app, request).boxed(),
            Route::Token => token::handle(state, app, request).boxed(),
            Route::Revoke => revoke::handle(state, app, request).boxed(),
            Route::User => user::read(state, app, &request).boxed(),
            Route::RenameUser => user::rename(state, app, request).boxed(),
            Route::DeleteUser => user::delete(state, app, request).boxed(),
            Route::ChangePassword => user::password::handle(state, app, request).boxed(),
            Route::ChangeAddress => user::email::handle(state, app, request).boxed(),
            Route::UserInfo => user::userinfo::handle(state, app, &request).boxed(),
            Route::Logout => sessions::log_out(state, app, request).boxed(),
            Route::Sessions => sessions::list(state, app, request).boxed(),
            Route::EndOtherSessions => sessions::end_others(state, app, request).boxed(),
            Route::EndSession => sessions::end_session(state, app, request).boxed(),
            Route::Identities => identities::list(state, app, request).boxed(),
            Route::LinkIdentity => identities::link(state, app, request).boxed(),
            Route::UnlinkIdentity => identities::unlink(state, app, request).boxed(),
            Route::SocialRedirect => social::redirect::handle(state, app, request).boxed(),
            Route::SocialCallback => social::callback::handle(state, app, request).boxed(),
            Route::SocialCallbackForm => social::callback::handle_form(state, app, request).boxed(),
            Route::SocialLogin => social::login::handle(state, app, request).boxed(),
            Route::Introspect => introspect::handle(state, app, request).boxed(),
            Route::Authorize | Route::AuthorizeBelow => authorize::handle(state, app, request).boxed(),
            Route::Activity => activity::handle(state, app, request).boxed(),
            Route::Jwks => return jwks::handle(app, &request),
            Route::OpenIdConfiguration => return discovery::openid_configuration(base, app, &request),
            Route::AuthorizationServer | Route::AuthorizationServerOfApp => {
                return discovery::authorization_server(base, app, &request);
            }
            Route::OpenApi => return openapi(&request),
        };
        handled.await
    }
}
