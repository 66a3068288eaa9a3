//! A short run of `make bench ARGS=provider-down`: an unavailable provider delays only logins with that provider.

use latchkey_tests::provider_down::{Fault, OPERATIONS, Options, run};

/// Maximum ratio of the median time while a provider is down to the median time while no provider is down, on a loaded
/// machine. An operation that waits for the provider would take more than a hundred times as long: the timeout is ten
/// seconds.
const MAX_RATIO: f64 = 8.0;

#[tokio::test]
async fn a_provider_that_is_down_delays_no_email_login_no_refresh_and_no_login_at_other_providers() {
    let report = run(Options { rounds: 6, samples: 8 }).await.unwrap();
    println!("{report}");
    for fault in [Fault::Hanging, Fault::Unreachable] {
        for (operation, name) in OPERATIONS.into_iter().enumerate() {
            let ratio = report.ratio(fault, operation, 0.5);
            assert!(ratio > 0.0 && ratio < MAX_RATIO, "{name} while a provider {fault:?}: {ratio:.2}\n{report}");
        }
    }
}
