//! A short run of the chaos benchmark of `make bench`.

use std::time::Duration;

use latchkey_tests::chaos;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chaos_loses_no_session_and_every_stolen_session_ends() {
    // The grace period is ten times that of `make bench`, because other tests slow the machine down.
    let duration = Duration::from_secs(20);
    let options = chaos::Options { sessions: 40, stolen: 10, duration, grace_seconds: 10, servers: 2, kills: 1 };
    let report = chaos::run(options).await.unwrap();
    println!("{report}");
    assert!(report.is_ok(), "{report}");
    assert!(report.kills > 0 && report.restarts > 0 && report.responses_lost > 0 && report.races > 0, "{report}");
}
