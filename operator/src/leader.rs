//! One operator acts: it holds a Lease, renews it, and writes nothing once it may have lost it.
//!
//! The rules are those of client-go's leader election. Clocks of pods are never compared: who watches another's Lease
//! counts from when it saw the Lease change.

#[cfg(test)]
mod tests;

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    task::{Context as TaskContext, Poll},
    time::Duration,
};

use futures::future::BoxFuture;
use http::{Method, Request};
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower::{BoxError, Layer, Service};
use tracing::{info, warn};

use crate::error::Chain;

/// How a Lease is held. The times are client-go's defaults.
#[derive(Clone, Debug)]
pub(crate) struct LeaseOptions {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The name of this process among those that want the Lease.
    pub(crate) identity: String,
    /// After so long without a renewal another may take it.
    pub(crate) duration: Duration,
    /// After so long without a renewal its holder acts no more: shorter, so that two never act.
    pub(crate) renew_deadline: Duration,
    pub(crate) retry: Duration,
}

/// Whether this process may write. Read at every write.
#[derive(Clone)]
pub(crate) struct Fence(Arc<Mutex<Until>>);

#[derive(Clone, Copy)]
enum Until {
    /// A write is sure to be the leader's until then, by the monotonic clock, which runs on while a process is paused.
    At(Instant),
    Lost,
}

/// The Lease, held and renewed in the background.
pub(crate) struct Held {
    fence: Fence,
    lost: watch::Receiver<Option<Lost>>,
    renewing: JoinHandle<()>,
    candidate: Candidate,
}

/// Why the Lease is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    /// It could not be renewed in time.
    NotRenewed,
    /// Somebody else holds it.
    Taken,
}

/// Refuses every request that writes while the Lease is not held.
#[derive(Clone)]
pub(crate) struct FenceLayer {
    fence: Fence,
}

#[derive(Clone)]
pub(crate) struct Fenced<S> {
    inner: S,
    fence: Fence,
}

/// A write that was not sent.
#[derive(Debug, thiserror::Error)]
#[error("not sent: this operator does not hold the Lease any more")]
pub(crate) struct NotLeader;

/// What somebody wants who wants the Lease.
#[derive(Clone)]
struct Candidate {
    api: Api<Lease>,
    options: LeaseOptions,
}

/// Another's Lease as it was seen, and since when.
struct Observed {
    version: Option<String>,
    since: Instant,
}

/// What a try to take or renew it came to.
enum Tried {
    /// Held, as this version.
    Held(Box<Lease>),
    /// Another holds it.
    Anothers,
}

/// Waits until this process holds the Lease.
pub(crate) async fn acquire(client: Client, options: LeaseOptions) -> Held {
    let api = Api::namespaced(client, &options.namespace);
    let candidate = Candidate { api, options };
    let mut observed: Option<Observed> = None;
    loop {
        let began = Instant::now();
        match timeout(candidate.options.renew_deadline, candidate.try_acquire(&mut observed)).await {
            Ok(Ok(Tried::Held(lease))) => return Held::new(candidate, *lease, began),
            Ok(Ok(Tried::Anothers)) => {}
            Ok(Err(error)) => warn!(error = %Chain(&error), "the Lease cannot be had yet"),
            Err(_) => warn!("the Lease cannot be had yet: the API server does not answer"),
        }
        sleep(candidate.jittered()).await;
    }
}

// === impl LeaseOptions ===

impl LeaseOptions {
    pub(crate) fn new(namespace: &str, name: &str, identity: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            identity: identity.to_owned(),
            duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry: Duration::from_secs(2),
        }
    }
}

// === impl Candidate ===

impl Candidate {
    /// Takes the Lease where it is free, or where its holder was silent for a whole duration while this one looked.
    async fn try_acquire(&self, observed: &mut Option<Observed>) -> kube::Result<Tried> {
        let Some(lease) = self.api.get_opt(&self.options.name).await? else { return self.create().await };
        let version = lease.metadata.resource_version.clone();
        let since = match observed {
            Some(before) if before.version == version => before.since,
            Some(_) | None => {
                let since = Instant::now();
                *observed = Some(Observed { version, since });
                since
            }
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        // Its own, of the process before this one in the same pod: that one has ended.
        let is_free = holder.is_empty() || holder == self.options.identity;
        // The holder's own duration counts, where it names one.
        let theirs = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let duration = theirs.map_or(self.options.duration, Duration::from_secs);
        if !is_free && since.elapsed() < duration {
            return Ok(Tried::Anothers);
        }
        self.put(&lease).await
    }

    async fn create(&self) -> kube::Result<Tried> {
        match self.api.create(&PostParams::default(), &self.lease(None)).await {
            Ok(lease) => Ok(Tried::Held(Box::new(lease))),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Tried::Anothers),
            Err(error) => Err(error),
        }
    }

    /// Takes or renews it, unless it has changed since.
    async fn put(&self, seen: &Lease) -> kube::Result<Tried> {
        match self.api.replace(&self.options.name, &PostParams::default(), &self.lease(Some(seen))).await {
            Ok(lease) => Ok(Tried::Held(Box::new(lease))),
            Err(kube::Error::Api(status)) if status.code == 409 || status.code == 404 => Ok(Tried::Anothers),
            Err(error) => Err(error),
        }
    }

    fn lease(&self, seen: Option<&Lease>) -> Lease {
        let before = seen.and_then(|lease| lease.spec.clone()).unwrap_or_default();
        let renews = before.holder_identity.as_deref() == Some(self.options.identity.as_str());
        let now = MicroTime(Timestamp::now());
        let transitions = before.lease_transitions.unwrap_or(0);
        Lease {
            metadata: match seen {
                Some(lease) => lease.metadata.clone(),
                None => ObjectMeta { name: Some(self.options.name.clone()), ..ObjectMeta::default() },
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.options.identity.clone()),
                lease_duration_seconds: i32::try_from(self.options.duration.as_secs()).ok(),
                acquire_time: if renews { before.acquire_time } else { Some(now.clone()) },
                renew_time: Some(now),
                lease_transitions: Some(if renews || seen.is_none() { transitions } else { transitions + 1 }),
                ..LeaseSpec::default()
            }),
        }
    }

    fn holds(&self, lease: &Lease) -> bool {
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref());
        holder == Some(self.options.identity.as_str())
    }

    /// Gives it back, if it is still this one's.
    async fn free(&self) -> kube::Result<()> {
        loop {
            let Some(mut lease) = self.api.get_opt(&self.options.name).await?.filter(|lease| self.holds(lease)) else {
                return Ok(());
            };
            let spec = lease.spec.get_or_insert_default();
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            spec.renew_time = Some(MicroTime(Timestamp::now()));
            match self.api.replace(&self.options.name, &PostParams::default(), &lease).await {
                Ok(_) => return Ok(()),
                // A renewal that was on its way came first.
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// So that those who wait do not ask at one moment.
    fn jittered(&self) -> Duration {
        self.options.retry.mul_f64(rand::random_range(1.0..=1.2))
    }

    /// Renews until it is lost.
    async fn renew(self, mut lease: Lease, fence: Fence, lost: watch::Sender<Option<Lost>>) {
        let why = loop {
            sleep(self.options.retry).await;
            let began = Instant::now();
            let left = match fence.left(began) {
                Some(left) => left,
                None => break Lost::NotRenewed,
            };
            // Twice at least: a connection that was dropped in silence does not cost the Lease.
            match timeout(left.min(self.options.renew_deadline / 2), self.renew_once(&lease)).await {
                Ok(Ok(Tried::Held(renewed))) => {
                    lease = *renewed;
                    fence.extend(began + self.options.renew_deadline);
                }
                Ok(Ok(Tried::Anothers)) => break Lost::Taken,
                Ok(Err(error)) => warn!(error = %Chain(&error), "the Lease was not renewed"),
                Err(_) => warn!("the Lease was not renewed: the API server does not answer"),
            }
        };
        fence.drop_now();
        let _ = lost.send(Some(why));
    }

    async fn renew_once(&self, lease: &Lease) -> kube::Result<Tried> {
        let tried = self.put(lease).await?;
        if let Tried::Anothers = tried {
            // Changed: by this one's own try whose answer was lost, by somebody who only touched it, or by another holder.
            return match self.api.get_opt(&self.options.name).await? {
                Some(there) if self.holds(&there) => self.put(&there).await,
                Some(_) => Ok(tried),
                None => self.create().await,
            };
        }
        Ok(tried)
    }
}

// === impl Held ===

impl Held {
    fn new(candidate: Candidate, lease: Lease, began: Instant) -> Self {
        let fence = Fence(Arc::new(Mutex::new(Until::At(began + candidate.options.renew_deadline))));
        let (sender, lost) = watch::channel(None);
        let renewing = tokio::spawn(candidate.clone().renew(lease, fence.clone(), sender));
        Self { fence, lost, renewing, candidate }
    }

    pub(crate) fn fence(&self) -> Fence {
        self.fence.clone()
    }

    /// Ends when the Lease is lost.
    pub(crate) async fn lost(&mut self) -> Lost {
        match self.lost.wait_for(Option::is_some).await {
            Ok(lost) => lost.unwrap_or(Lost::NotRenewed),
            // The renewing ended without a word.
            Err(_) => Lost::NotRenewed,
        }
    }

    /// Gives the Lease back, so that another acts at once. Nothing is written after it.
    pub(crate) async fn release(self) {
        self.renewing.abort();
        self.fence.drop_now();
        match timeout(self.candidate.options.retry, self.candidate.free()).await {
            Ok(Ok(())) => info!("the Lease is given back"),
            Ok(Err(error)) => {
                warn!(error = %Chain(&error), "the Lease was not given back; it runs out");
            }
            Err(_) => warn!("the Lease was not given back; it runs out"),
        }
    }
}

// === impl Lost ===

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotRenewed => "it could not be renewed in time",
            Self::Taken => "another operator holds it",
        })
    }
}

// === impl Fence ===

impl Fence {
    /// Whether a write now is the leader's.
    pub(crate) fn holds(&self) -> bool {
        self.left(Instant::now()).is_some()
    }

    fn left(&self, now: Instant) -> Option<Duration> {
        match *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Until::At(until) => until.checked_duration_since(now).filter(|left| !left.is_zero()),
            Until::Lost => None,
        }
    }

    fn extend(&self, until: Instant) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Until::At(at) = &mut *held {
            *at = until;
        }
    }

    fn drop_now(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Until::Lost;
    }
}

// === impl FenceLayer ===

impl FenceLayer {
    pub(crate) fn new(fence: Fence) -> Self {
        Self { fence }
    }
}

impl<S> Layer<S> for FenceLayer {
    type Service = Fenced<S>;

    fn layer(&self, inner: S) -> Fenced<S> {
        Fenced { inner, fence: self.fence.clone() }
    }
}

impl<S, B> Service<Request<B>> for Fenced<S>
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
        if request.method() != Method::GET && !self.fence.holds() {
            return Box::pin(async { Err(NotLeader.into()) });
        }
        let answer = self.inner.call(request);
        Box::pin(async move { answer.await.map_err(Into::into) })
    }
}
