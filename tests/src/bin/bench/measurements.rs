//! Measurements and bounds that all benchmarks share.

use std::{fs, time::Duration};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;

pub(crate) const MIB: f64 = 1024.0 * 1024.0;

/// A bound that the service promises, and whether the measurement met it.
pub(crate) struct Bound {
    pub(crate) what: String,
    pub(crate) met: bool,
}

// === impl Bound ===

impl Bound {
    pub(crate) fn new(what: String, met: bool) -> Self {
        Self { what, met }
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
