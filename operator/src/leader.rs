//! Leader election: one replica holds a Lease and renews it. If this replica may have lost the Lease, it writes nothing
//! more.
//!
//! The rules come from client-go's leader election. Clocks of pods are never compared: a candidate measures the time
//! since it saw the Lease change.

mod fence;
#[cfg(test)]
mod tests;

use std::time::Duration;

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use strum::Display;
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tracing::{info, warn};

use self::fence::Fence;
pub(crate) use self::fence::FenceLayer;
use crate::error::ErrorChain;

/// Parameters of the election. The times are client-go's defaults.
#[derive(Clone, Debug)]
pub(crate) struct LeaseOptions {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The name of this replica in the Lease, which must differ from the names of the other replicas.
    pub(crate) identity: String,
    /// If the Lease was not renewed for this time, another replica can take it.
    pub(crate) duration: Duration,
    /// If the leader could not renew the Lease for this time, it stops writing. This time is shorter than `duration`,
    /// so that two replicas never lead at the same time.
    pub(crate) renew_deadline: Duration,
    /// The wait between two attempts to take or renew the Lease.
    pub(crate) retry: Duration,
}

/// The Lease that this process holds. A background task renews it.
pub(crate) struct HeldLease {
    fence: Fence,
    lost: watch::Receiver<Option<LostReason>>,
    renewal_task: JoinHandle<()>,
    candidate: Candidate,
}

/// Why the Lease is lost.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq)]
pub(crate) enum LostReason {
    #[strum(to_string = "it could not be renewed in time")]
    NotRenewed,
    #[strum(to_string = "another operator holds it")]
    Taken,
}

/// A replica that wants the Lease.
#[derive(Clone)]
struct Candidate {
    api: Api<Lease>,
    options: LeaseOptions,
}

/// The version of the Lease that this candidate last saw, and when it first saw this version.
struct Observed {
    version: Option<String>,
    since: Instant,
}

/// The outcome of an attempt to take or renew the Lease.
enum LeaseAttempt {
    /// This replica holds the Lease. Contains the Lease as it was written last.
    Held(Box<Lease>),
    /// Another replica holds the Lease.
    HeldByOther,
}

/// Waits until this process holds the Lease.
pub(crate) async fn acquire(client: Client, options: LeaseOptions) -> HeldLease {
    let api = Api::namespaced(client, &options.namespace);
    let candidate = Candidate { api, options };
    let mut observed: Option<Observed> = None;
    loop {
        let began = Instant::now();
        match timeout(candidate.options.renew_deadline, candidate.try_acquire(&mut observed)).await {
            Ok(Ok(LeaseAttempt::Held(lease))) => return HeldLease::new(candidate, *lease, began),
            Ok(Ok(LeaseAttempt::HeldByOther)) => {}
            Ok(Err(error)) => warn!(error = %ErrorChain(&error), "cannot acquire the Lease yet"),
            Err(_) => warn!("cannot acquire the Lease yet: the API server does not respond"),
        }
        sleep(candidate.retry_delay()).await;
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
    /// Takes the Lease if it is free, or if it has expired: this candidate has not seen the Lease change for the
    /// duration that the Lease contains.
    async fn try_acquire(&self, observed: &mut Option<Observed>) -> kube::Result<LeaseAttempt> {
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
        // A holder with this identity is the previous process of the same pod, which has ended.
        let is_free = holder.is_empty() || holder == self.options.identity;
        // The duration that counts is in the Lease, because each holder writes its own duration there.
        let holder_duration = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let duration = holder_duration.map_or(self.options.duration, Duration::from_secs);
        if !is_free && since.elapsed() < duration {
            return Ok(LeaseAttempt::HeldByOther);
        }
        self.take_or_renew(&lease).await
    }

    async fn create(&self) -> kube::Result<LeaseAttempt> {
        match self.api.create(&PostParams::default(), &self.new_lease(None)).await {
            Ok(lease) => Ok(LeaseAttempt::Held(Box::new(lease))),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(LeaseAttempt::HeldByOther),
            Err(error) => Err(error),
        }
    }

    /// Takes or renews the Lease, unless it has changed since it was read.
    async fn take_or_renew(&self, current: &Lease) -> kube::Result<LeaseAttempt> {
        match self.api.replace(&self.options.name, &PostParams::default(), &self.new_lease(Some(current))).await {
            Ok(lease) => Ok(LeaseAttempt::Held(Box::new(lease))),
            Err(kube::Error::Api(status)) if status.code == 409 || status.code == 404 => Ok(LeaseAttempt::HeldByOther),
            Err(error) => Err(error),
        }
    }

    fn new_lease(&self, current: Option<&Lease>) -> Lease {
        let before = current.and_then(|lease| lease.spec.clone()).unwrap_or_default();
        let renews = before.holder_identity.as_deref() == Some(self.options.identity.as_str());
        let now = MicroTime(Timestamp::now());
        let transitions = before.lease_transitions.unwrap_or(0);
        Lease {
            metadata: match current {
                Some(lease) => lease.metadata.clone(),
                None => ObjectMeta { name: Some(self.options.name.clone()), ..ObjectMeta::default() },
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.options.identity.clone()),
                lease_duration_seconds: i32::try_from(self.options.duration.as_secs()).ok(),
                acquire_time: if renews { before.acquire_time } else { Some(now.clone()) },
                renew_time: Some(now),
                lease_transitions: Some(if renews || current.is_none() { transitions } else { transitions + 1 }),
                ..LeaseSpec::default()
            }),
        }
    }

    fn is_holder(&self, lease: &Lease) -> bool {
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref());
        holder == Some(self.options.identity.as_str())
    }

    /// Releases the Lease if this candidate still holds it.
    async fn clear_holder(&self) -> kube::Result<()> {
        loop {
            let Some(mut lease) = self.api.get_opt(&self.options.name).await?.filter(|lease| self.is_holder(lease))
            else {
                return Ok(());
            };
            let spec = lease.spec.get_or_insert_default();
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            spec.renew_time = Some(MicroTime(Timestamp::now()));
            match self.api.replace(&self.options.name, &PostParams::default(), &lease).await {
                Ok(_) => return Ok(()),
                // Repeats the release: the last renewal of this replica reached the API server only after the Lease was
                // read.
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the wait before the next attempt, with jitter, so that candidates do not all ask at the same moment.
    fn retry_delay(&self) -> Duration {
        self.options.retry.mul_f64(rand::random_range(1.0..=1.2))
    }

    /// Renews the Lease until it is lost.
    async fn renew_until_lost(self, mut lease: Lease, fence: Fence, lost: watch::Sender<Option<LostReason>>) {
        let reason = loop {
            sleep(self.options.retry).await;
            let began = Instant::now();
            let time_left = match fence.time_left(began) {
                Some(time_left) => time_left,
                None => break LostReason::NotRenewed,
            };
            // Two attempts fit into the deadline. So the Lease is not lost if only one connection silently drops
            // packets.
            match timeout(time_left.min(self.options.renew_deadline / 2), self.renew_once(&lease)).await {
                Ok(Ok(LeaseAttempt::Held(renewed))) => {
                    lease = *renewed;
                    fence.extend(began + self.options.renew_deadline);
                }
                Ok(Ok(LeaseAttempt::HeldByOther)) => break LostReason::Taken,
                Ok(Err(error)) => warn!(error = %ErrorChain(&error), "failed to renew the Lease"),
                Err(_) => warn!("failed to renew the Lease: the API server does not respond"),
            }
        };
        fence.close();
        let _ = lost.send(Some(reason));
    }

    async fn renew_once(&self, lease: &Lease) -> kube::Result<LeaseAttempt> {
        let attempt = self.take_or_renew(lease).await?;
        if let LeaseAttempt::HeldByOther = attempt {
            // The Lease has changed: by our own request (its response was lost), by somebody who only edited it, or by
            // another holder.
            return match self.api.get_opt(&self.options.name).await? {
                Some(current) if self.is_holder(&current) => self.take_or_renew(&current).await,
                Some(_) => Ok(attempt),
                None => self.create().await,
            };
        }
        Ok(attempt)
    }
}

// === impl HeldLease ===

impl HeldLease {
    fn new(candidate: Candidate, lease: Lease, began: Instant) -> Self {
        let fence = Fence::held_until(began + candidate.options.renew_deadline);
        let (sender, lost) = watch::channel(None);
        let renewal_task = tokio::spawn(candidate.clone().renew_until_lost(lease, fence.clone(), sender));
        Self { fence, lost, renewal_task, candidate }
    }

    pub(crate) fn fence(&self) -> Fence {
        self.fence.clone()
    }

    /// Waits until the Lease is lost, and returns the reason.
    pub(crate) async fn lost(&mut self) -> LostReason {
        match self.lost.wait_for(Option::is_some).await {
            Ok(lost) => lost.unwrap_or(LostReason::NotRenewed),
            // The renewal task ended without a reason.
            Err(_) => LostReason::NotRenewed,
        }
    }

    /// Releases the Lease, so that another replica can take it immediately. After that, this replica writes nothing
    /// more.
    pub(crate) async fn release(self) {
        self.renewal_task.abort();
        self.fence.close();
        match timeout(self.candidate.options.retry, self.candidate.clear_holder()).await {
            Ok(Ok(())) => info!("released the Lease"),
            Ok(Err(error)) => {
                warn!(error = %ErrorChain(&error), "failed to release the Lease; it will expire");
            }
            Err(_) => warn!("failed to release the Lease; it will expire"),
        }
    }
}
