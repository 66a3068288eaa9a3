//! What calls to Redis took, and how they failed.

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

use super::errors::FaultKind;

/// What calls are for; the name is the metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    PutCode,
    FindCode,
    TakeCode,
    OpenSession,
    GetSession,
    Refresh,
    ListSessions,
    EndSession,
    EndOtherSessions,
    PutProfile,
    RaiseEpoch,
    RetireUsers,
    TakeLimits,
    GiveBack,
    IsKnown,
    Remember,
    KeepFlow,
    FindFlow,
    UseFlow,
    PutLogin,
    FindLogin,
    TakeLogin,
    CountRefusals,
    WriteRefusals,
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
    seconds: Family<OperationLabel, Histogram, fn() -> Histogram>,
    faults: Family<KindLabel, Counter>,
    evicts: Gauge,
}

// === impl Operation ===

impl Operation {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::PutCode => "put_code",
            Self::FindCode => "find_code",
            Self::TakeCode => "take_code",
            Self::OpenSession => "open_session",
            Self::GetSession => "get_session",
            Self::Refresh => "refresh",
            Self::ListSessions => "list_sessions",
            Self::EndSession => "end_session",
            Self::EndOtherSessions => "end_other_sessions",
            Self::PutProfile => "put_profile",
            Self::RaiseEpoch => "raise_epoch",
            Self::RetireUsers => "retire_users",
            Self::TakeLimits => "take_limits",
            Self::GiveBack => "give_back",
            Self::IsKnown => "is_known",
            Self::Remember => "remember",
            Self::KeepFlow => "keep_flow",
            Self::FindFlow => "find_flow",
            Self::UseFlow => "use_flow",
            Self::PutLogin => "put_login",
            Self::FindLogin => "find_login",
            Self::TakeLogin => "take_login",
            Self::CountRefusals => "count_refusals",
            Self::WriteRefusals => "write_refusals",
        }
    }
}

// === impl Metrics ===

impl Metrics {
    pub(super) fn new() -> Self {
        let faults = Family::<KindLabel, Counter>::default();
        for kind in FaultKind::ALL {
            drop(faults.get_or_create(&KindLabel { kind: kind.as_str() }));
        }
        // 100 µs to 3.3 s.
        let seconds = Family::new_with_constructor((|| Histogram::new(exponential_buckets(0.000_1, 2.0, 16))) as _);
        Self { seconds, faults, evicts: Gauge::default() }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("seconds", "What calls to Redis took", self.seconds.clone());
        registry.register("errors", "Calls to Redis that failed, by kind", self.faults.clone());
        registry.register("evicts", "1 where Redis evicts keys when it is full", self.evicts.clone());
    }

    pub(super) fn took(&self, operation: Operation, time: Duration) {
        self.seconds.get_or_create(&OperationLabel { operation: operation.as_str() }).observe(time.as_secs_f64());
    }

    pub(super) fn failed(&self, kind: FaultKind) {
        self.faults.get_or_create(&KindLabel { kind: kind.as_str() }).inc();
    }

    pub(super) fn evicts(&self, evicts: bool) {
        self.evicts.set(i64::from(evicts));
    }
}
