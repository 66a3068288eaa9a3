//! The door: bytes in, bytes out; the only place that knows HTTP.

use std::sync::Arc;

use prometheus_client::registry::Registry;

use crate::{
    domain::ports::{self, Audit, Codes, Flows, Hasher, Identities, Limits, Outbox, Providers, Sessions, Users},
    providers::Reports,
    state::State,
};

mod admin;
pub mod budgets;
pub mod cookies;
pub mod cors;
#[cfg(test)]
mod docs;
pub mod door;
pub mod error;
pub mod guard;
pub mod handlers;
pub mod metrics;
pub mod openapi;
pub mod parameters;
pub mod patience;
mod public;
pub mod quota;
pub mod refusals;
pub mod request;
pub mod response;
pub mod routes;
pub mod serve;
#[cfg(test)]
mod tests;
mod traced;

pub use budgets::Budgets;
pub use door::Service;
pub use handlers::ops::Readiness;
pub use metrics::HttpMetrics;
pub use serve::{Drain, serve};

/// All that the endpoints need from outside.
pub trait Ports: Accounts + Social + Outbox + Audit + Send + Sync + 'static {}

impl<S: Accounts + Social + Outbox + Audit + Send + Sync + 'static> Ports for S {}

/// What accounts and their sessions need.
pub trait Accounts: Users + ports::Accounts + Limits + Hasher + Sessions + Codes {}

impl<S: Users + ports::Accounts + Limits + Hasher + Sessions + Codes> Accounts for S {}

/// What social login needs beside them.
pub trait Social: Identities + Flows + Providers {}

impl<S: Identities + Flows + Providers> Social for S {}

/// The login API.
pub fn public_service<S: Ports>(state: Arc<State<S>>, metrics: HttpMetrics, budgets: Arc<Budgets>) -> Service {
    let places = budgets.public_connections();
    Service::new(public::Public::new(Arc::clone(&state)), state, metrics, budgets, places)
}

/// Administration.
pub fn admin_service<S: Ports>(state: Arc<State<S>>, metrics: HttpMetrics, budgets: Arc<Budgets>) -> Service {
    let places = budgets.admin_connections();
    Service::new(admin::Admin, state, metrics, budgets, places)
}

/// Operations; `drain` is that of its own listener, whose end ends the streams of revisions.
pub fn ops_service<S: Ports>(
    state: Arc<State<S>>,
    metrics: HttpMetrics,
    budgets: Arc<Budgets>,
    registry: Arc<Registry>,
    readiness: Arc<Readiness>,
    reports: Arc<Reports>,
    drain: &Drain,
) -> Service {
    let apps = Arc::clone(&state.apps);
    let ops =
        handlers::ops::Ops::new(apps, state.settings.pod_uid.clone(), readiness, registry, reports, drain.closing());
    let places = budgets.ops_connections();
    Service::new(ops, state, metrics, budgets, places)
}
