//! A listener with one endpoint, which waits until it is notified.

use std::{sync::Arc, time::Duration};

use http::Method;
use serde_json::json;
use tokio::{sync::Notify, time::timeout};

use crate::{
    domain::app::App,
    http::{
        error::Problem,
        pipeline::{Endpoints, Lookup},
        request::InboundRequest,
        response::{self, Response},
    },
};

/// A request notifies `began` when it begins, and ends when `may_end` is notified.
#[derive(Clone, Default)]
pub(super) struct SlowEndpoint {
    pub(super) began: Arc<Notify>,
    pub(super) may_end: Arc<Notify>,
    pub(super) ended: Arc<Notify>,
}

impl Endpoints for SlowEndpoint {
    type Route = ();

    const LISTENER: &'static str = "slow";

    fn find(&self, _: &Method, _: &str) -> Lookup<()> {
        Lookup::Route { route: (), app: None, path_parameters: Vec::new() }
    }

    fn name(_: ()) -> &'static str {
        "slow"
    }

    fn is_logged_at_debug(_: ()) -> bool {
        false
    }

    async fn call(&self, _: (), _: Option<Arc<App>>, _: InboundRequest) -> Result<Response, Problem> {
        self.began.notify_one();
        self.may_end.notified().await;
        self.ended.notify_one();
        response::json(&json!({}))
    }
}

pub(super) async fn wait_for(what: &Notify) {
    timeout(Duration::from_secs(20), what.notified()).await.expect("the event happens in time");
}
