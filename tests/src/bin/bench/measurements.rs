//! Measurements and bounds that all benchmarks share.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use futures::future::try_join_all;
use hdrhistogram::Histogram;
use tokio::task::JoinHandle;

pub(crate) const MIB: f64 = 1024.0 * 1024.0;

/// A bound that the service promises, and whether the measurement met it.
pub(crate) struct Bound {
    pub(crate) what: String,
    pub(crate) met: bool,
}

/// The latencies of one operation, and for how long it was measured.
pub(crate) struct Throughput {
    pub(crate) latency: Histogram<u64>,
    took: Duration,
}

// === impl Bound ===

impl Bound {
    pub(crate) fn new(what: String, met: bool) -> Self {
        Self { what, met }
    }

    /// A bound on a ratio, which is met if the ratio is not lower.
    pub(crate) fn at_least(what: &str, min: f64, ratio: f64) -> Self {
        Self::new(format!("{what}: at least {min}, {ratio:.2}"), ratio >= min)
    }

    /// A bound on a ratio, which is met if the ratio is not higher.
    pub(crate) fn at_most(what: &str, max: f64, ratio: f64) -> Self {
        Self::new(format!("{what}: at most {max}, {ratio:.2}"), ratio <= max)
    }

    /// A bound that is not met, because its measurement failed.
    pub(crate) fn not_measured(what: &str, reason: &str) -> Self {
        Self::new(format!("{what}: not measured, {reason}"), false)
    }
}

// === impl Throughput ===

impl Throughput {
    pub(crate) fn new() -> Self {
        Self { latency: histogram(), took: Duration::ZERO }
    }

    /// Adds the latencies of clients that began at the time `began` and have ended.
    pub(crate) fn add(&mut self, began: Instant, latencies: Vec<Histogram<u64>>) -> Result<()> {
        self.took += began.elapsed();
        for latency in latencies {
            self.latency.add(&latency)?;
        }
        Ok(())
    }

    pub(crate) fn per_second(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a count of a benchmark is far below 2^52")]
        let count = self.latency.len() as f64;
        count / self.took.as_secs_f64()
    }
}

pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000, 3).expect("bounds of microseconds up to a minute")
}

pub(crate) fn micros_of(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX).clamp(1, 60_000_000)
}

/// A quantile of a histogram of microseconds, in milliseconds.
pub(crate) fn millis(histogram: &Histogram<u64>, quantile: f64) -> f64 {
    let micros = u32::try_from(histogram.value_at_quantile(quantile)).unwrap_or(u32::MAX);
    f64::from(micros) / 1000.0
}

pub(crate) fn format_millis(histogram: &Histogram<u64>, quantile: f64) -> String {
    format!("{:.1} ms", millis(histogram, quantile))
}

/// The p99 of `loaded` relative to the p99 of `calm`.
pub(crate) fn p99_ratio(calm: &Histogram<u64>, loaded: &Histogram<u64>) -> f64 {
    millis(loaded, 0.99) / millis(calm, 0.99)
}

/// Waits until all clients have ended. Returns the clients and their measurements.
pub(crate) async fn join_clients<T>(
    running: impl Iterator<Item = JoinHandle<Result<(T, Histogram<u64>)>>>,
) -> Result<(Vec<T>, Vec<Histogram<u64>>)> {
    let ended = try_join_all(running).await?;
    Ok(ended.into_iter().collect::<Result<Vec<_>>>()?.into_iter().unzip())
}

/// Resident memory of a process in MiB.
pub(crate) fn resident_mib(pid: u32) -> Result<f64> {
    Ok(mib(resident_bytes(pid)?))
}

/// Peak resident memory of a process in MiB.
pub(crate) fn peak_resident_mib(pid: u32) -> Result<f64> {
    Ok(mib(read_proc_status(pid, "VmHWM:")?))
}

/// `VmRSS` of proc(5), in bytes.
pub(crate) fn resident_bytes(pid: u32) -> Result<u64> {
    read_proc_status(pid, "VmRSS:")
}

/// `RssAnon` of proc(5), in bytes: the process's own memory, without mapped files.
pub(crate) fn anonymous_bytes(pid: u32) -> Result<u64> {
    read_proc_status(pid, "RssAnon:")
}

pub(crate) fn mib(bytes: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "memory sizes are far below 2^52")]
    let bytes = bytes as f64;
    bytes / MIB
}

fn read_proc_status(pid: u32, name: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib * 1024)
}
