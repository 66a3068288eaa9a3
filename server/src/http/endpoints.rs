//! Connects each route to the functions `operation` and `handle` of its module in `handlers`.

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};

use super::{
    Ports,
    error::Problem,
    handlers,
    openapi::operation::Operation,
    request::InboundRequest,
    response::Response,
    routes::{AdministrationRoute, Route, administration_endpoints, public_endpoints},
};
use crate::{domain::app::App, state::State};

/// Generates `operation` and `call` from the table of the public endpoints.
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
        /// Returns the operation of the route for the OpenAPI document.
        pub(super) fn operation(route: Route) -> Operation {
            match route {
                $(Route::$app_route => handlers::$($app_module::)+operation(),)+
                $(Route::$route => handlers::$($module::)+operation(),)+
            }
        }

        /// Calls the handler of the route.
        ///
        /// Each future is boxed separately: otherwise the future of every request would be as large as the future of
        /// the largest handler.
        pub(super) fn call<'a, S: Ports>(
            route: Route,
            state: &'a State<S>,
            app: Option<&'a App>,
            request: InboundRequest,
        ) -> BoxFuture<'a, Result<Response, Problem>> {
            match (route, app) {
                $((Route::$app_route, Some(app)) => handlers::$($app_module::)+handle(state, app, request).boxed(),)+
                $((Route::$app_route, None))|+ => async { Err(Problem::app_not_found()) }.boxed(),
                $((Route::$route, _) => handlers::$($module::)+handle(&state.openapi.public, request).boxed(),)+
            }
        }
    };
}

public_endpoints!(declare_functions);

/// The functions that connect the routes of the administration listener to their handlers.
pub(super) mod administration {
    use std::sync::Arc;

    use super::{
        AdministrationRoute, App, BoxFuture, Bytes, FutureExt, InboundRequest, Operation, Ports, Problem, Response,
        State, administration_endpoints, handlers,
    };
    use crate::{domain::rights::Right, http::authentication::Caller};

    /// Generates the functions from the table of the administration endpoints.
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
            /// Returns the operation of the route for the OpenAPI document.
            pub(in crate::http) fn operation(route: AdministrationRoute) -> Operation {
                match route {
                    $(AdministrationRoute::$app_route => handlers::$($app_module::)+operation(),)+
                    $(AdministrationRoute::$route => handlers::$($module::)+operation(),)+
                }
            }

            /// The right that the caller needs. `None` for a route without an App.
            pub(in crate::http) fn right(route: AdministrationRoute) -> Option<Right> {
                match route {
                    $(AdministrationRoute::$app_route => Some(handlers::$($app_module::)+RIGHT),)+
                    $(AdministrationRoute::$route)|+ => None,
                }
            }

            /// Calls the handler of a route with an App.
            pub(in crate::http) fn call<'a, S: Ports>(
                route: AdministrationRoute,
                state: &'a Arc<State<S>>,
                app: &'a App,
                caller: &'a Caller,
                request: InboundRequest,
            ) -> BoxFuture<'a, Result<Response, Problem>> {
                match route {
                    $(
                        AdministrationRoute::$app_route => {
                            handlers::$($app_module::)+handle(state, app, caller, request).boxed()
                        }
                    )+
                    $(AdministrationRoute::$route)|+ => async { Err(Problem::app_not_found()) }.boxed(),
                }
            }

            /// Calls the handler of a route without an App. `openapi` is the rendered OpenAPI document.
            pub(in crate::http) fn call_service(
                route: AdministrationRoute,
                openapi: &Bytes,
                request: InboundRequest,
            ) -> BoxFuture<'_, Result<Response, Problem>> {
                match route {
                    $(AdministrationRoute::$app_route)|+ => async { Err(Problem::app_not_found()) }.boxed(),
                    $(AdministrationRoute::$route => handlers::$($module::)+handle(openapi, request).boxed(),)+
                }
            }
        };
    }

    administration_endpoints!(declare_functions);
}
