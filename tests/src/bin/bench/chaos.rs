//! A thousand sessions, a hundred of them stolen, while servers restart and the Redis primary is killed.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use latchkey_tests::chaos;

use crate::measurements::Bound;

/// Options of `chaos`.
#[derive(Args)]
#[group(id = "chaos")]
pub(crate) struct ChaosArgs {
    /// How long the sessions are refreshed, in seconds.
    #[arg(long, default_value_t = 300)]
    chaos_seconds: u64,
}

/// Runs the scenario, prints the report, and returns the bounds.
pub(crate) async fn run(options: &ChaosArgs) -> Result<Vec<Bound>> {
    println!("Chaos\n");
    let duration = Duration::from_secs(options.chaos_seconds);
    let chaos_options =
        chaos::Options { sessions: 1_000, stolen: 100, duration, grace_seconds: 1, servers: 3, kills: 2 };
    let report = chaos::run(chaos_options).await?;
    println!("{report}\n");
    let max_uses = report.alternating_ended.iter().max().copied().unwrap_or(0);
    Ok(vec![
        Bound::new(format!("no honest session is lost: {} were", report.lost.len()), report.lost.is_empty()),
        Bound::new(
            format!(
                "a token two generations old ends its session when it is first used: {} of {}",
                report.old_tokens_ended, report.old_tokens
            ),
            report.old_tokens_ended == report.old_tokens,
        ),
        Bound::new(
            format!(
                "a session used by thief and victim in turn ends within {} uses: {} of {}, after at most {max_uses}",
                chaos::MAX_THIEF_REFRESHES,
                report.alternating_ended.len(),
                report.alternating
            ),
            report.alternating_ended.len() == report.alternating && max_uses <= chaos::MAX_THIEF_REFRESHES,
        ),
    ])
}
