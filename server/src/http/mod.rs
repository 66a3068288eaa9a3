//! The HTTP server: listeners, the request pipeline, routes and handlers. The domain does not know HTTP.

use std::sync::Arc;

use prometheus_client::registry::Registry;

use crate::{
    domain::ports::{
        self, AuditLog, ClientCodes, ClientSessions, Codes, Consents, Flows, GroupAdministration, GroupChanges, Groups,
        Identities, Outbox, PasswordHasher, Providers, PushedRequests, RateLimits, Sessions, UserAdministration, Users,
        WebhookEvents,
    },
    providers::ProviderReports,
    state::State,
};

pub mod administration;
pub mod authentication;
pub mod budgets;
pub mod clients;
pub mod cookies;
pub mod cors;
#[cfg(test)]
pub(crate) mod docs;
mod endpoints;
pub mod error;
pub mod handlers;
pub mod metrics;
pub mod open_connections;
pub mod openapi;
mod pages;
pub mod parameters;
pub mod parked;
pub mod pipeline;
mod public;
pub mod quota;
pub mod refusals;
pub mod request;
mod request_span;
pub mod response;
pub mod routes;
pub mod serve;
#[cfg(test)]
mod tests;
pub mod timeouts;

pub use budgets::Budgets;
pub use handlers::ops::Readiness;
pub use metrics::HttpMetrics;
pub use pipeline::Service;
pub use serve::{Drain, serve};

/// All ports of the domain that the endpoints need.
pub trait Ports:
    AccountPorts + SocialPorts + OpenIdPorts + AdministrationPorts + Outbox + AuditLog + Send + Sync + 'static
{
}

impl<S> Ports for S where
    S: AccountPorts + SocialPorts + OpenIdPorts + AdministrationPorts + Outbox + AuditLog + Send + Sync + 'static
{
}

/// The ports that accounts, their sessions and their groups need.
pub trait AccountPorts: Users + ports::OwnAccounts + RateLimits + PasswordHasher + Sessions + Codes + Groups {}

impl<S: Users + ports::OwnAccounts + RateLimits + PasswordHasher + Sessions + Codes + Groups> AccountPorts for S {}

/// The ports that social login needs in addition to [`AccountPorts`].
pub trait SocialPorts: Identities + GroupChanges + Flows + Providers {}

impl<S: Identities + GroupChanges + Flows + Providers> SocialPorts for S {}

/// The ports that administrators need in addition to [`AccountPorts`].
pub trait AdministrationPorts: UserAdministration + GroupAdministration + WebhookEvents {}

impl<S: UserAdministration + GroupAdministration + WebhookEvents> AdministrationPorts for S {}

/// The ports that the OpenID provider needs in addition to [`AccountPorts`].
pub trait OpenIdPorts: ClientCodes + ClientSessions + PushedRequests + Consents + Groups {}

impl<S: ClientCodes + ClientSessions + PushedRequests + Consents + Groups> OpenIdPorts for S {}

/// The service of the public listener: the login API and the hosted pages.
pub fn public_service<S: Ports>(state: Arc<State<S>>, metrics: HttpMetrics, budgets: Arc<Budgets>) -> Service {
    let slots = budgets.public_connections();
    Service::new(public::PublicEndpoints::new(Arc::clone(&state), metrics.clone()), state, metrics, budgets, slots)
}

/// The service of the administration listener: the API for the ServiceAccounts that Apps list.
pub fn admin_service<S: Ports>(state: Arc<State<S>>, metrics: HttpMetrics, budgets: Arc<Budgets>) -> Service {
    let slots = budgets.admin_connections();
    let endpoints = administration::AdministrationEndpoints::new(Arc::clone(&state), budgets.admin_connection_count());
    Service::new(endpoints, state, metrics, budgets, slots)
}

/// The service of the operations listener. `drain` must be the drain of this listener: when the listener stops
/// accepting connections, the revision streams end.
pub fn ops_service<S: Ports>(
    state: Arc<State<S>>,
    metrics: HttpMetrics,
    budgets: Arc<Budgets>,
    registry: Arc<Registry>,
    readiness: Arc<Readiness>,
    reports: Arc<ProviderReports>,
    drain: &Drain,
) -> Service {
    let apps = Arc::clone(&state.apps);
    let ops = handlers::ops::OpsEndpoints::new(
        apps,
        state.settings.pod_uid.clone(),
        readiness,
        registry,
        reports,
        drain.closing(),
    );
    let slots = budgets.ops_connections();
    Service::new(ops, state, metrics, budgets, slots)
}
