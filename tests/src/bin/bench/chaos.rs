//! A thousand sessions under chaos, with a hundred thieves among them.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use latchkey_tests::chaos;

use crate::figures::Bound;

/// How much chaos.
#[derive(Args)]
#[group(id = "chaos")]
pub(crate) struct Options {
    /// How long the sessions are refreshed, in seconds.
    #[arg(long, default_value_t = 300)]
    chaos_seconds: u64,
}

/// Runs it, prints, and gives what was promised.
pub(crate) async fn run(options: &Options) -> Result<Vec<Bound>> {
    println!("Chaos\n");
    let lasts = Duration::from_secs(options.chaos_seconds);
    let wanted = chaos::Options { sessions: 1_000, stolen: 100, lasts, grace_seconds: 1, servers: 3, kills: 2 };
    let report = chaos::run(wanted).await?;
    println!("{report}\n");
    let most = report.turns_ended.iter().max().copied().unwrap_or(0);
    Ok(vec![
        Bound::new(format!("no honest session is lost: {} were", report.lost.len()), report.lost.is_empty()),
        Bound::new(
            format!(
                "a token two generations old ends its session at the first use: {} of {}",
                report.old_ended, report.old
            ),
            report.old_ended == report.old,
        ),
        Bound::new(
            format!(
                "of two who take turns the session ends within {} uses: {} of {}, after at most {most}",
                chaos::TURNS,
                report.turns_ended.len(),
                report.turns
            ),
            report.turns_ended.len() == report.turns && most <= chaos::TURNS,
        ),
    ])
}
