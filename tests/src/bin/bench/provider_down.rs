//! The latency of logins, refreshes and another provider while one provider is down.

use std::thread;

use anyhow::Result;
use latchkey_tests::provider_down::{self, Options};

use crate::measurements::Bound;

/// Upper limit of the median latency while a provider is down, relative to the median latency while it works.
const MAX_RATIO: f64 = 1.2;

/// Runs the benchmark, prints the measurements, and returns the bounds.
pub(crate) async fn run() -> Result<Vec<Bound>> {
    println!("A provider that is down, on {} cores shared by all processes\n", thread::available_parallelism()?);
    let report = provider_down::run(Options { rounds: 25, samples: 10 }).await?;
    println!("{report}");
    let worst = report.worst_ratio(0.5);
    Ok(vec![Bound::new(
        format!(
            "email login, refresh and other providers do not become slower while a provider is down: \
             at most {MAX_RATIO} times the median without, {worst:.2}"
        ),
        worst <= MAX_RATIO,
    )])
}
