//! The administration listener. It has no endpoints yet: every path is `not_found`.

use std::{convert::Infallible, sync::Arc};

use http::Method;

use super::{
    door::{Endpoints, Lookup},
    error::Problem,
    request::Inbound,
    response::Response,
};
use crate::domain::app::App;

pub(super) struct Admin;

// === impl Admin ===

impl Endpoints for Admin {
    type Route = Infallible;

    const LISTENER: &'static str = "admin";
    /// Programs in the cluster, which are part of the platform.
    const TRUSTS_SAMPLING: bool = true;

    fn find(&self, _: &Method, _: &str) -> Lookup<Infallible> {
        Lookup::Nothing
    }

    fn name(route: Infallible) -> &'static str {
        match route {}
    }

    fn is_noise(route: Infallible) -> bool {
        match route {}
    }

    async fn call(&self, route: Infallible, _: Option<Arc<App>>, _: Inbound) -> Result<Response, Problem> {
        match route {}
    }
}
