//! The short form of the chaos that `make bench` runs for minutes.

use std::time::Duration;

use latchkey_tests::chaos;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chaos_loses_no_session_and_every_stolen_one_ends() {
    // The grace time is that of `make bench` ten times over: tests share the machine.
    let lasts = Duration::from_secs(20);
    let options = chaos::Options { sessions: 40, stolen: 10, lasts, grace_seconds: 10, servers: 2, kills: 1 };
    let report = chaos::run(options).await.unwrap();
    println!("{report}");
    assert!(report.holds(), "{report}");
    assert!(report.kills > 0 && report.restarts > 0 && report.answers_lost > 0 && report.races > 0, "{report}");
}
