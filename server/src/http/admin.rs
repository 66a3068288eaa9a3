//! The administration listener. It has no endpoints yet: every request gets `not_found`.

use std::{convert::Infallible, sync::Arc};

use http::Method;

use super::{
    error::Problem,
    pipeline::{Endpoints, Lookup},
    request::InboundRequest,
    response::Response,
};
use crate::domain::app::App;

pub(super) struct AdminEndpoints;

// === impl AdminEndpoints ===

impl Endpoints for AdminEndpoints {
    type Route = Infallible;

    const LISTENER: &'static str = "admin";
    /// The callers are programs in the cluster. They are trusted to decide which traces are sampled.
    const TRUSTS_SAMPLING: bool = true;

    fn find(&self, _: &Method, _: &str) -> Lookup<Infallible> {
        Lookup::NotFound
    }

    fn name(route: Infallible) -> &'static str {
        match route {}
    }

    fn is_logged_at_debug(route: Infallible) -> bool {
        match route {}
    }

    async fn call(&self, route: Infallible, _: Option<Arc<App>>, _: InboundRequest) -> Result<Response, Problem> {
        match route {}
    }
}
