//! A short run of `make bench ARGS=provider-down`: an unavailable provider delays only logins with that provider.

use latchkey_tests::provider_down::{Fault, OPERATIONS, Options, run};

/// Upper limit for the median with a failing provider, relative to the median without, on a loaded machine. An
/// operation that waits for the provider would take more than a hundred times as long: the timeout is ten seconds.
const RATIO: f64 = 8.0;

#[tokio::test]
async fn email_login_refresh_and_other_providers_are_as_fast_while_a_provider_is_down() {
    let report = run(Options { rounds: 6, samples: 8 }).await.unwrap();
    println!("{report}");
    for fault in [Fault::Hanging, Fault::Unreachable] {
        for (operation, name) in OPERATIONS.into_iter().enumerate() {
            let ratio = report.ratio(fault, operation, 0.5);
            assert!(ratio > 0.0 && ratio < RATIO, "{name} while a provider {fault:?}: {ratio:.2}\n{report}");
        }
    }
}
