//! Connects each route of the public listener to the functions `operation` and `handle` of its module in `handlers`.

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};

use super::{
    Ports,
    error::Problem,
    handlers,
    openapi::operation::Operation,
    request::InboundRequest,
    response::Response,
    routes::{Route, endpoints},
};
use crate::{domain::app::App, state::State};

/// Generates `operation` and `call` from the table of the endpoints (`endpoints!`).
macro_rules! declare_functions {
    (
        app {
            $(
                $(#[$app_doc:meta])*
                $app_route:ident = $app_verb:ident $app_name:literal $app_path:literal => $($app_module:ident)::+;
            )+
        }
        service {
            $($(#[$doc:meta])* $route:ident = $verb:ident $name:literal $path:literal => $($module:ident)::+;)+
        }
    ) => {
        /// What the OpenAPI document says about the route.
        pub(super) fn operation(route: Route) -> Operation {
            match route {
                $(Route::$app_route => handlers::$($app_module::)+operation(),)+
                $(Route::$route => handlers::$($module::)+operation(),)+
            }
        }

        /// Calls the handler of the route. `openapi` is the rendered OpenAPI document.
        ///
        /// Each future is boxed separately: otherwise the future of every request would be as large as that of the
        /// largest handler.
        pub(super) fn call<'a, S: Ports>(
            route: Route,
            state: &'a State<S>,
            openapi: &'a Bytes,
            app: Option<&'a App>,
            request: InboundRequest,
        ) -> BoxFuture<'a, Result<Response, Problem>> {
            match (route, app) {
                $((Route::$app_route, Some(app)) => handlers::$($app_module::)+handle(state, app, request).boxed(),)+
                $((Route::$app_route, None))|+ => async { Err(Problem::app_not_found()) }.boxed(),
                $((Route::$route, _) => handlers::$($module::)+handle(openapi, request).boxed(),)+
            }
        }
    };
}

endpoints!(declare_functions);
