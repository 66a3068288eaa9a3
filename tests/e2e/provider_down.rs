//! The short form of what `make bench` measures: a provider that is down holds up nobody but those who want to log in
//! there.

use latchkey_tests::provider_down::{Fault, OPERATIONS, Options, run};

/// Between the medians, on a machine that does much else. Whoever waited for the provider's ten seconds would be slower
/// by a hundred times and more.
const RATIO: f64 = 8.0;

#[tokio::test]
async fn email_login_refresh_and_other_providers_are_as_fast_while_a_provider_is_down() {
    let report = run(Options { rounds: 6, samples: 8 }).await.unwrap();
    println!("{report}");
    for fault in [Fault::Hangs, Fault::Gone] {
        for (operation, name) in OPERATIONS.into_iter().enumerate() {
            let ratio = report.ratio(fault, operation, 0.5);
            assert!(ratio > 0.0 && ratio < RATIO, "{name} while a provider {fault:?}: {ratio:.2}\n{report}");
        }
    }
}
