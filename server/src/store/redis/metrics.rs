//! Metrics of calls to Redis.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use super::client::error::CallErrorKind;

/// The operations that calls perform. `as_str` is the value of the metric label `operation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    StoreCode,
    FindCode,
    ConsumeCode,
    OpenSession,
    RenewSession,
    GetSession,
    Refresh,
    ListSessions,
    EndSession,
    EndOtherSessions,
    StoreProfile,
    GetGroups,
    StoreGroups,
    RaiseEpoch,
    RetireUsers,
    AcquireLimits,
    CheckLimits,
    ReleaseLimits,
    IsKnownClient,
    RememberClient,
    StoreFlow,
    FindFlow,
    ConsumeFlow,
    StoreLogin,
    FindLogin,
    RedeemLogin,
    CountRefusals,
    WriteRefusals,
    StoreClientCode,
    FindClientCode,
    RedeemClientCode,
    UseAssertion,
    StorePushedRequest,
    FindPushedRequest,
    UsePushedRequest,
    OpenClientSession,
    GetClientSession,
    RefreshClientSession,
    ListClientSessions,
    EndClientSessions,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabel {
    operation: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

#[derive(Clone)]
pub(super) struct Metrics {
    call_seconds: Family<OperationLabel, Histogram, fn() -> Histogram>,
    errors: Family<KindLabel, Counter>,
    evicts: Gauge,
}

// === impl Operation ===

impl Operation {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::StoreCode => "put_code",
            Self::FindCode => "find_code",
            Self::ConsumeCode => "take_code",
            Self::OpenSession => "open_session",
            Self::RenewSession => "renew_session",
            Self::GetSession => "get_session",
            Self::Refresh => "refresh",
            Self::ListSessions => "list_sessions",
            Self::EndSession => "end_session",
            Self::EndOtherSessions => "end_other_sessions",
            Self::StoreProfile => "put_profile",
            Self::GetGroups => "get_groups",
            Self::StoreGroups => "put_groups",
            Self::RaiseEpoch => "raise_epoch",
            Self::RetireUsers => "retire_users",
            Self::AcquireLimits => "take_limits",
            Self::CheckLimits => "check_limits",
            Self::ReleaseLimits => "give_back",
            Self::IsKnownClient => "is_known",
            Self::RememberClient => "remember",
            Self::StoreFlow => "keep_flow",
            Self::FindFlow => "find_flow",
            Self::ConsumeFlow => "use_flow",
            Self::StoreLogin => "put_login",
            Self::FindLogin => "find_login",
            Self::RedeemLogin => "take_login",
            Self::CountRefusals => "count_refusals",
            Self::WriteRefusals => "write_refusals",
            Self::StoreClientCode => "store_client_code",
            Self::FindClientCode => "find_client_code",
            Self::RedeemClientCode => "redeem_client_code",
            Self::UseAssertion => "use_assertion",
            Self::StorePushedRequest => "store_pushed_request",
            Self::FindPushedRequest => "find_pushed_request",
            Self::UsePushedRequest => "use_pushed_request",
            Self::OpenClientSession => "open_client_session",
            Self::GetClientSession => "get_client_session",
            Self::RefreshClientSession => "refresh_client_session",
            Self::ListClientSessions => "list_client_sessions",
            Self::EndClientSessions => "end_client_sessions",
        }
    }
}

// === impl Metrics ===

impl Metrics {
    pub(super) fn new() -> Self {
        let errors = Family::<KindLabel, Counter>::default();
        for kind in CallErrorKind::ALL {
            drop(errors.get_or_create(&KindLabel { kind: kind.as_str() }));
        }
        // Buckets from 100 µs to 3.3 s.
        let call_seconds =
            Family::new_with_constructor((|| Histogram::new(exponential_buckets(0.000_1, 2.0, 16))) as _);
        Self { call_seconds, errors, evicts: Gauge::default() }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("seconds", "Duration of calls to Redis", self.call_seconds.clone());
        registry.register("errors", "Calls to Redis that failed, by kind", self.errors.clone());
        registry.register("evicts", "1 if Redis evicts keys when it is full", self.evicts.clone());
    }

    pub(super) fn observe(&self, operation: Operation, time: Duration) {
        self.call_seconds.get_or_create(&OperationLabel { operation: operation.as_str() }).observe(time.as_secs_f64());
    }

    pub(super) fn count_error(&self, kind: CallErrorKind) {
        self.errors.get_or_create(&KindLabel { kind: kind.as_str() }).inc();
    }

    pub(super) fn set_evicts(&self, evicts: bool) {
        self.evicts.set(i64::from(evicts));
    }
}
