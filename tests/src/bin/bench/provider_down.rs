//! Log-ins, refreshes and another provider beside a provider that is down.

use std::thread;

use anyhow::Result;
use latchkey_tests::provider_down::{self, Options};

use crate::figures::Bound;

/// Of medians, turn by turn in one run.
const MOST: f64 = 1.2;

/// Measures, prints, and gives what was promised.
pub(crate) async fn run() -> Result<Vec<Bound>> {
    println!("A provider that is down, on {} cores shared by all\n", thread::available_parallelism()?);
    let report = provider_down::run(Options { rounds: 25, samples: 10 }).await?;
    println!("{report}");
    let worst = report.worst(0.5);
    Ok(vec![Bound::new(
        format!(
            "email login, refresh and other providers do not get slower while a provider is down: \
             at most {MOST} times the median without, {worst:.2}"
        ),
        worst <= MOST,
    )])
}
