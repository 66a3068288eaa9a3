//! Rejects writes as soon as this process may have lost the Lease.

use std::{
    sync::Arc,
    task::{Context as TaskContext, Poll},
    time::Duration,
};

use futures::future::BoxFuture;
use http::{Method, Request};
use parking_lot::Mutex;
use tokio::time::Instant;
use tower::{BoxError, Layer, Service};

/// Whether this process can write. It is checked before every write.
#[derive(Clone)]
pub(crate) struct Fence(Arc<Mutex<FenceState>>);

#[derive(Clone, Copy)]
enum FenceState {
    /// Writes are safe until this time. The clock is monotonic, and continues while the process is paused.
    HeldUntil(Instant),
    Lost,
}

/// Rejects every write request while the Lease is not held.
#[derive(Clone)]
pub(crate) struct FenceLayer {
    fence: Fence,
}

#[derive(Clone)]
pub(crate) struct FencedService<S> {
    inner: S,
    fence: Fence,
}

/// The error of a write that was not sent, because this replica does not hold the Lease.
#[derive(Debug, thiserror::Error)]
#[error("not sent: this operator no longer holds the Lease")]
pub(super) struct NotLeader;

// === impl Fence ===

impl Fence {
    pub(super) fn held_until(until: Instant) -> Self {
        Self(Arc::new(Mutex::new(FenceState::HeldUntil(until))))
    }

    /// Whether a write is safe now.
    pub(crate) fn is_open(&self) -> bool {
        self.time_left(Instant::now()).is_some()
    }

    pub(super) fn time_left(&self, now: Instant) -> Option<Duration> {
        match *self.0.lock() {
            FenceState::HeldUntil(until) => until.checked_duration_since(now).filter(|left| !left.is_zero()),
            FenceState::Lost => None,
        }
    }

    pub(super) fn extend(&self, until: Instant) {
        if let FenceState::HeldUntil(at) = &mut *self.0.lock() {
            *at = until;
        }
    }

    pub(super) fn close(&self) {
        *self.0.lock() = FenceState::Lost;
    }
}

// === impl FenceLayer ===

impl FenceLayer {
    pub(crate) fn new(fence: Fence) -> Self {
        Self { fence }
    }
}

impl<S> Layer<S> for FenceLayer {
    type Service = FencedService<S>;

    fn layer(&self, inner: S) -> FencedService<S> {
        FencedService { inner, fence: self.fence.clone() }
    }
}

impl<S, B> Service<Request<B>> for FencedService<S>
where
    S: Service<Request<B>, Error: Into<BoxError>, Future: Send + 'static>,
    S::Response: 'static,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<S::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        if request.method() != Method::GET && !self.fence.is_open() {
            return Box::pin(async { Err(NotLeader.into()) });
        }
        let response = self.inner.call(request);
        Box::pin(async move { response.await.map_err(Into::into) })
    }
}
